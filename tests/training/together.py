"""Trainings that come out alike in one process and in two.

    torchrun --nproc-per-node 2 together.py FOLDER

Every process writes what it found to FOLDER/<its number>.json.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import shoal
from shoal.algorithms import registry
from shoal.errors import InputError
from shoal.models import FeatureModel
from shoal.training.stopping import Diverged

STEPS = 4
# Settings with which a penalty counts from the first step on, and small discriminators.
ACTIVE: dict[str, dict[str, Any]] = {
    "cdann": {"width": 16},
    "dann": {"width": 16, "discriminator_steps": 2, "gradient_penalty": 0.5},
    "eqrm": {"start": 0, "quantile": 0.9},
    "fishr": {"start": 0, "weight": 1.0},
    "gga": {"start": 0, "length": 2.0, "trials": 4, "radius": 0.1},
    "hessian-alignment": {"hessian_weight": 1.0, "gradient_weight": 1.0},
    "iga": {"weight": 0.1},
    "irm": {"start": 0, "weight": 3.0},
    "pgrad": {"rollouts": 1},
    "vrex": {"start": 0, "weight": 3.0},
}


def domain(number: int, examples: int = 31) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    y = torch.arange(examples) % 2
    x = torch.stack([4.0 * y - 2, torch.full((examples,), 1.0 * number)], 1)
    return (x + torch.randn(examples, 2, generator=draw)).double(), y


def domains(*numbers: int) -> dict[str, Any]:
    return {f"d{n}": domain(n) for n in numbers}


def network(*between: nn.Module) -> FeatureModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        features = nn.Sequential(nn.Linear(2, 8), *between, nn.Tanh())
        return FeatureModel(features, nn.Linear(8, 2)).double()


def outcome(name: str, model: nn.Module | None = None, **options: Any) -> dict[str, Any]:
    model = model or network()
    given = {"steps": STEPS, "batch_size": 8, "lr": 0.05, "device": "cpu", "progress": False} | options
    run = shoal.fit(name, model, domains(0, 1, 2), **given)
    weights = {key: t.double().flatten().tolist() for key, t in model.state_dict().items()}
    return {"weights": weights, "history": [point.to_dict() for point in run.history]}


class Bad:
    """Cross-entropy that is not finite in one step, in the last process only."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        self.calls += torch.is_grad_enabled()
        last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
        return cross_entropy(output, y) + (math.nan if last and self.calls > 2 else 0.0)


def message(name: str = "erm", **options: Any) -> str:
    """What is said of a training that fails."""
    try:
        outcome(name, **options)
    except (InputError, Diverged) as error:
        return str(error)
    return "trained"


SPLITS = {"validation": domains(3), "test": domains(4, 5)}
SAME: dict[str, Callable[[], Any]] = {
    **{name: lambda n=name: outcome(n, settings=ACTIVE.get(n, {})) for name in registry.names()},
    "idgm by differences": lambda: outcome("idgm", settings={"method": "finite-difference"}),
    "two examples": lambda: outcome("fish", batch_size=2),
    "accumulated": lambda: outcome("fish", accumulate=2),
    "clipped": lambda: outcome("coral", clip=0.3),
    "pooled": lambda: outcome("groupdro", draw="pooled"),
    "regrouped": lambda: outcome("fish", draw="regrouped"),
    "evaluated": lambda: outcome("dann", settings=ACTIVE["dann"], eval_every=1, eval_batch=7, **SPLITS),
    "worst group": lambda: outcome("erm", eval_every=1, metric="worst-group accuracy", **SPLITS),
    "averaged": lambda: outcome("fish", average="sma:2"),
    "warm start": lambda: outcome("fish", warm_start=3),
    "fine-tuned": lambda: outcome(
        "fish", validation=domains(0, 1), warm_start="head:3", average="ema", wise_ft=0.5, retrain=True
    ),
}
APART: dict[str, Callable[[], Any]] = {
    "statistics": lambda: outcome("fish", network(nn.BatchNorm1d(8)), average="sma:2"),
    "not finite": lambda: message(loss=Bad()),
    "one example": lambda: message(batch_size=9),
    "too many parts": lambda: message(accumulate=5),
    "rollouts": lambda: message(name="pgrad"),
}


def main(folder: Path) -> None:
    found = {name: train() for name, train in (SAME | APART).items()}
    found["folder"] = outcome("fish", folder=folder / "run", checkpoint_every=2)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    from shoal.training.processes import leave

    leave(0)
