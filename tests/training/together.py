"""Trainings that come out alike in one process and in several.

    torchrun --nproc-per-node 2 together.py FOLDER [WHAT]

Every process writes what it found to FOLDER/WHAT-<its number>.json. The tests and benchmarks/two_processes.py
start it through :func:`launch`.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shoal.training.loop import Training
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import shoal
from shoal.algorithms import algorithm_class, registry
from shoal.algorithms.base import Algorithm
from shoal.api.fit import as_domain_data
from shoal.data import Domains
from shoal.errors import InputError
from shoal.models import FeatureModel
from shoal.training.options import complete
from shoal.training.stopping import Diverged

S, STEPS = 3, 4
# Settings with which a penalty counts from the first step on, and small discriminators.
ACTIVE: dict[str, dict[str, Any]] = {
    "cdann": {"width": 16},
    "dann": {"width": 16},
    "eqrm": {"start": 0, "quantile": 0.9},
    "fishr": {"start": 0, "weight": 1.0},
    "gga": {"start": 0, "length": 2.0, "trials": 4, "radius": 0.1},
    "iga": {"weight": 0.1},
    "irm": {"start": 0, "weight": 3.0},
    "vrex": {"start": 0, "weight": 3.0},
}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, ACTIVE.get(name, {})) for name in registry.names()},
    "idgm by differences": ("idgm", {"method": "finite-difference"}),
    "mldg, exact": ("mldg", {"order": "exact"}),
    "mixup of features": ("mixup", {"where": "features"}),
    "dann, rough": ("dann", {"discriminator_steps": 2, "gradient_penalty": 0.5, "width": 16}),
    "cdann, in turns": ("cdann", {"form": "domainbed", "gradient_penalty": 0.5, "width": 16}),
}
# One of each kind is tried in two variants, some of them in all, the others in a single one.
KINDS = ["erm", "fish", "idgm", "smoothfish", "reptile", "coral", "dann", "groupdro", "fishr", "mixup", "irm"]
FEW = ["erm", "fish", "dann", "irm"]
VARIANTS: dict[str, dict[str, Any]] = {
    "even": {"batch_size": 8},
    "odd": {"batch_size": 9},
    "two": {"batch_size": 2},
    "pieces": {"batch_size": 9, "accumulate": 2},
    "clipped": {"batch_size": 9, "clip": 0.3},
    "pooled": {"batch_size": 9, "draw": "pooled"},
    "regrouped": {"batch_size": 8, "draw": "regrouped"},
}
MOST = "pieces"
BAD_STEP = 3
"""At which a loss is not finite, counted from 1."""
KEEPERS = [n for n in registry.names() if algorithm_class(n).knows_domains]
"""Which keep something for each domain, or train it."""


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


# What is trained


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


def fit(name: str | type[Algorithm], model: nn.Module, **options: Any) -> shoal.Fit:
    given = {"steps": STEPS, "batch_size": 8, "lr": 0.05, "device": "cpu", "progress": False} | options
    return shoal.fit(name, model, given.pop("train", domains(0, 1, 2)), **given)


def state(model: nn.Module) -> dict[str, list[float]]:
    return {name: t.double().flatten().tolist() for name, t in model.state_dict().items()}


def outcome(name: str, model: nn.Module, **options: Any) -> dict[str, Any]:
    run = fit(name, model, **options)
    return {"weights": state(model), "history": [point.to_dict() for point in run.history], "rule": run.rule}


def middle(output: Any, y: Any, groups: Domains) -> float:
    """A metric for which it matters which output is whose, and of what group."""
    places = np.arange(len(y)) + 1.0
    return float((places * output[:, 1]) @ y) + float(places[groups.indices] @ output[groups.indices, 0])


class Noisy(Dataset):
    """Draws from all three sources of random numbers."""

    def __init__(self, number: int) -> None:
        self.x, self.y = domain(number)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(2) + torch.as_tensor(np.random.rand(2)) + random.random()
        return self.x[i] + noise, self.y[i]


class Masks(nn.Dropout):
    """Remembers what it dropped."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.drawn: list[list[float]] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.drawn.append(super().forward(torch.ones(16)).tolist())
        return super().forward(x)


class Bad:
    """Cross-entropy that is not finite in one step, in the last process only."""

    def __init__(self, value: float, at: int) -> None:
        self.value, self.at, self.step = value, at, 0

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        last = rank() == int(os.environ.get("WORLD_SIZE", "1")) - 1
        bad = self.step == self.at and last and torch.is_grad_enabled()
        return cross_entropy(output, y) + (self.value if bad else 0.0)


def counting(name: str) -> type[Algorithm]:
    """The algorithm, which tells its loss at which step it is: how often one calls the loss is its own."""

    def step(self: Any, batches: Any, engine: Any) -> Any:
        self.loss.step += 1
        return cls.step(self, batches, engine)

    cls = algorithm_class(name)
    return type(name, (cls,), {"step": step, "__doc__": cls.__doc__})


# The trainings, by name


def same() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Whose outcome is the same in any number of processes."""
    for way, (name, settings) in WAYS.items():
        for variant, options in VARIANTS.items():
            if variant != MOST and way not in (KINDS if variant == "odd" else FEW):
                continue
            yield (
                f"{way}, {variant}",
                lambda n=name, s=settings, o=options: outcome(n, network(), settings=s, **o),
            )
    splits = {"validation": domains(3), "test": domains(4, 5)}
    for name in ("erm", "fish", "dann"):
        yield (
            f"{name}, scores",
            lambda n=name: outcome(n, network(), eval_every=1, eval_batch=7, batch_size=9, **splits),
        )
    for name in ("worst-group accuracy", "macro F1", "AUC"):
        yield (
            f"judged by {name}",
            lambda n=name: outcome("erm", network(), eval_every=1, eval_batch=7, metric=n, **splits),
        )
    yield "judged by a function", lambda: outcome("erm", network(), eval_every=1, metric=middle, **splits)
    few = {"few": tuple(t[:1] for t in domain(6))}
    yield "one example to judge by", lambda: outcome("erm", network(), metric=middle, test=few)
    for name in KEEPERS:
        for variant in ("odd", "pieces", "pooled"):
            yield f"{name}, kept, {variant}", lambda n=name, o=VARIANTS[variant]: kept(n, **o)
    noisy = {f"n{n}": Noisy(n) for n in range(S)}
    for workers in (0, 1):
        yield (
            f"random transforms, {workers} workers",
            lambda w=workers: outcome("fish", network(), train=noisy, workers=w, batch_size=9),
        )
    for name in ("erm", "fish"):
        for variant in ("odd", "pieces"):
            yield f"{name}, tracked, {variant}", lambda n=name, o=VARIANTS[variant]: tracked(n, **o)
    yield "averaged", lambda: outcome("fish", network(), average="sma:2")
    yield "warm start", lambda: outcome("fish", network(), warm_start=3, batch_size=9)
    tuned: dict[str, Any] = {"warm_start": "head:3", "average": "ema", "wise_ft": 0.5, "retrain": True}
    yield "fine-tuned", lambda: outcome("fish", network(), validation=domains(0, 1), **tuned)
    yield (
        "one example to evaluate on",
        lambda: outcome("erm", network(), test={"few": tuple(t[:1] for t in domain(6))}),
    )


def apart() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Whose outcome in two processes is a matter of its own."""
    for name in KINDS:
        yield (
            f"{name}, statistics",
            lambda n=name: outcome(n, network(nn.BatchNorm1d(8)), batch_size=9, average="sma:2"),
        )
        for value in (math.nan, math.inf) if name in FEW else (math.nan,):
            yield f"{name}, {value}", lambda n=name, v=value: bad(n, v)
    yield "masks", masks
    yield "one example", lambda: refused(batch_size=1)
    yield "five pieces", lambda: refused(batch_size=9, accumulate=5)


def tracked(name: str, **options: Any) -> dict[str, Any]:
    """How well gradients agree, of which each process has a share of every batch."""
    given = {"steps": STEPS, "lr": 0.05, "device": "cpu", "progress": False, "track_every": 1} | options
    model = network()
    training = Training(name, model, as_domain_data(domains(0, 1, 2), None, None), complete(**given))
    training.run()
    return {"weights": state(model), "agreement": training.agreement}


def kept(name: str, **options: Any) -> dict[str, Any]:
    """All that a training holds besides the history: the algorithm's own, and its optimizers'."""
    settings = ACTIVE.get(name, {})
    given = {"steps": STEPS, "lr": 0.05, "device": "cpu", "progress": False, "settings": settings} | options
    parts = as_domain_data(domains(0, 1, 2), None, None)
    training = Training(name, network(), parts, complete(**given))
    training.run()
    optimizers = {"the user's": training.engine.optimizer, **training.engine.auxiliary}
    return {
        "weights": state(training.model),
        "algorithm": state(training.algorithm),
        **{n: _plain(o.state_dict()["state"]) for n, o in optimizers.items()},
    }


def _plain(state: dict[int, dict[str, Tensor]]) -> dict[str, Any]:
    return {f"{n} {k}": v.double().flatten().tolist() for n, s in state.items() for k, v in s.items()}


def bad(name: str, value: float, **options: Any) -> dict[str, Any]:
    model = network(nn.BatchNorm1d(8))
    found: dict[str, Any] = {}
    try:
        given = {"steps": 5, "loss": Bad(value, BAD_STEP), "settings": ACTIVE.get(name, {})}
        fit(counting(name), model, **given | options)
    except Diverged as error:
        found |= {"message": str(error), "step": error.step, "what": error.quantity, "domain": error.domain}
    return found | {"weights": state(model)}


def masks() -> Any:
    dropout = Masks()
    fit("fish", network(dropout))
    return dropout.drawn


def refused(**options: Any) -> str:
    try:
        given = {"steps": 1, "device": "cpu", "progress": False} | options
        Training("erm", network(), as_domain_data(domains(0, 1), None, None), complete(**given))
    except InputError as error:
        return str(error)
    return "accepted"


# In a folder


class Slow(nn.Module):
    """A network that takes its time if asked to, so that a signal finds it at work."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network(nn.BatchNorm1d(8), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        if "SLOW" in os.environ:
            time.sleep(0.03 if self.training else 0.3)
        return self.net(x)


def in_folder(folder: Path, resume: bool = False) -> dict[str, Any]:
    options = {"steps": 60, "eval_every": 20, "checkpoint_every": 5, "average": "sma", "eval_batch": 4}
    return outcome("fish", Slow(), folder=folder, resume=resume, validation=domains(3), **options)


def trainings(what: str, folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    if what == "all":
        yield from same()
        yield from apart()
        yield "folder", lambda: in_folder(folder / "whole")
    elif what == "every":  # what the benchmark repeats
        for name in registry.names():
            yield name, lambda n=name: outcome(n, network(nn.BatchNorm1d(8), nn.Dropout(0.2)), batch_size=9)
    elif what == "broken":
        yield "folder", lambda: in_folder(folder / "broken")
    else:
        yield "folder", lambda: in_folder(folder / "broken", resume=True)


def main() -> None:
    folder, what = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    found = {name: train() for name, train in trainings(what, folder)}
    (folder / f"{what}-{rank()}.json").write_text(json.dumps(found))


# Starting it


def start(folder: Path, what: str, processes: int = 2, **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return subprocess.Popen(
        [*command, str(processes), __file__, str(folder), what],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": _source()} | environment,
        stdout=subprocess.DEVNULL,
        stderr=(folder / f"{what}.log").open("wb"),
        start_new_session=True,
    )


def _source() -> str:
    return str(Path(shoal.__file__).parents[1])


def end(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Its exit code; one that does not come to its end is killed, its workers too, and has none."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        workers = _children(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
        for worker in workers:  # each has a group of its own
            os.killpg(worker, signal.SIGKILL)
        process.wait()
        return None


def _children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return found


if __name__ == "__main__":
    main()
