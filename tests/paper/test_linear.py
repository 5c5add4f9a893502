"""The linear example: every method against the library's algorithm, and the numbers that are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shoal.algorithms import build
from shoal.data.batch import MetaBatch, Task
from shoal.data.sampler import DomainBatchSampler
from shoal.paper import linear
from shoal.paper.reproduce import reproduce
from shoal.training.engine import Engine

FISH: dict[str, Any] = {"meta_lr": 0.05}
ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "ERM": ("erm", {}),
    "IDGM, normalised, γ=0.1": ("idgm", {"gamma": 0.1, "trust": None}),
    "IDGM, raw, γ=2.5": ("idgm", {"gamma": 2.5, "normalize": False, "trust": None}),
    "IDGM, normalised, trust 0.9": ("idgm", {"gamma": 1.0, "trust": 0.9}),
    "IGA, λ=1": ("iga", {"weight": 1.0}),
    "IGA, λ=100": ("iga", {"weight": 100.0}),
    "Fish": ("fish", FISH),
    "Fish, random grouping": ("fish", FISH),
    "Reptile": ("reptile", FISH),
}


def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Each kind of example weighted by its share, the second column of the labels."""
    each = nn.functional.binary_cross_entropy_with_logits(output[:, 0], y[:, 0], reduction="none")
    return (each * y[:, 1]).sum() / y[:, 1].sum()


def batch(*blocks: tuple[linear.Domain, int]) -> MetaBatch:
    x = np.concatenate([domain.x[:, :4] for domain, _ in blocks])
    y = np.concatenate([np.stack([domain.y, domain.share], 1) for domain, _ in blocks])
    sizes = tuple(len(domain.y) for domain, _ in blocks)
    numbers = np.repeat([number for _, number in blocks], sizes)
    return MetaBatch(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(numbers), sizes)


@pytest.mark.parametrize("method", linear.METHODS)
def test_a_method_takes_the_steps_of_the_algorithm(method: str) -> None:
    name, settings = ALGORITHMS[method]
    model = nn.Linear(4, 1).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    algorithm = build(name, model, loss, Task(2, 2), **settings)
    rate, decay, steps = (10.0 if "meta_lr" in settings else 1.0), 0.008, 20
    optimizer = torch.optim.SGD(model.parameters(), rate, weight_decay=decay)
    algorithm.prepare(optimizer, rate)
    engine = Engine(algorithm, optimizer)
    draw: Any = linear.METHODS[method][1]
    sampler = DomainBatchSampler([0, 1], 1, 2, draw=draw, steps=1)
    for step in range(1, steps + 1):
        blocks = [(linear.TRAINING[d], d) for d, _ in sampler.plan(step) if d is not None]
        if method in ("ERM", "Fish, random grouping"):
            blocks = [(linear.MIXTURE, 0)] * (1 if name == "erm" else 2)
        engine.step(batch(*blocks), step)
    weights = torch.cat([model.weight[0], model.bias]).detach().numpy()
    ours = linear.follow(method, [0.0, decay], steps)[-1]
    np.testing.assert_allclose(ours[1], weights, atol=1e-12)
    assert not np.allclose(ours[0], weights)


def test_the_numbers_that_are_known(tmp_path: Path) -> None:
    result = reproduce("linear", out=tmp_path, progress=False)
    rows = {(r["method"], r["weight_decay"]): r for r in result.data["rows"]}
    free = {method: rows[method, 0.0] for method in linear.METHODS}
    assert {row["states"][linear.STEPS] for row in free.values()} == {"97/57"}
    until = {method: row["invariant_until"] for method, row in free.items()}
    assert (until["ERM"], until["Fish"], until["IDGM, normalised, γ=0.1"]) == (82, 102, 218)
    assert (until["IGA, λ=1"], until["IGA, λ=100"], until["Fish, random grouping"]) == (82, 104, 0)
    ends = {method: rows[method, 0.008] for method in linear.METHODS}
    invariant = [method for method, row in ends.items() if row["states"][linear.STEPS] == "93/93"]
    assert invariant == [m for m in linear.METHODS if m.startswith(("IDGM", "IGA, λ=100", "Fish"))][:-1]
    assert ends["IDGM, raw, γ=2.5"]["w1+b"] == pytest.approx(0.003, abs=1e-3)
    # The paper's table, recomputed: its ERM row gives 93/93, its Fish row is on the boundary.
    assert result.data["printed"] == {"ERM": "93/93", "IDGM and Fish": "97/57"}
    assert {path.suffix for path in result.files} == {".md", ".json", ".png", ".svg"}
    assert all(path.stat().st_size for path in result.files)
    assert "linear-isometric.png" in {path.name for path in result.files}
    assert "every method ends at 97/57" in str(result)
    assert result.left_out == ""
