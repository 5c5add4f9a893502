"""GGA's search against loops over copies of the model, in float64; and where there is nothing to search."""

import copy
import itertools
from typing import Any

import pytest
import torch
from test_formulas import Maker, blocks, network, trained
from torch import nn
from torch.nn.functional import cross_entropy

from shoal.algorithms import build
from shoal.data import Task

WIDE = {"start": 1, "length": 3, "trials": 6, "radius": 0.2}
MOMENTUM: Maker = lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)  # noqa: E731


def measured(model: nn.Module, step: int) -> tuple[float, float]:
    """The mean loss, and the least cosine over all pairs."""
    losses, gradients = [], []
    for x, y, _ in blocks(step):
        loss = cross_entropy(model(x), y)
        losses.append(float(loss.detach()))
        found = torch.autograd.grad(loss, list(model.parameters()))
        gradients.append(torch.cat([g.reshape(-1) for g in found]))
    pairs = itertools.combinations(gradients, 2)
    return sum(losses) / len(losses), min(float(a @ b / (a.norm() * b.norm())) for a, b in pairs)


def naive(steps: int, start: int, length: int, trials: int, radius: float, tolerance: float) -> Any:
    """The model after so many steps, and how many perturbations were kept."""
    model, kept = network(), 0
    optimizer = MOMENTUM(model.parameters())
    for step in range(steps):
        best: Any = None
        if start <= step < start + length:
            torch.manual_seed(step)
            first, highest = measured(model, step)
            for seed in torch.randint(2**62, (trials,)).tolist():
                draw, other = torch.Generator().manual_seed(seed), copy.deepcopy(model)
                for p in other.parameters():
                    noise = torch.empty(p.shape, dtype=torch.float64)
                    p.data = p.data + noise.uniform_(-radius, radius, generator=draw)
                loss, cosine = measured(other, step)
                if loss < first + tolerance and cosine > highest:
                    highest, best = cosine, other
        if best is not None:
            kept += 1
            for p, q in zip(model.parameters(), best.parameters(), strict=True):
                p.data.copy_(q.data)
        losses = [cross_entropy(model(x), y) for x, y, _ in blocks(step)]
        optimizer.zero_grad()
        (sum(losses[1:], losses[0]) / len(losses)).backward()
        optimizer.step()
    return model, kept


@pytest.mark.parametrize(("radius", "tolerance"), [(0.01, 0.1), (0.2, 0.0), (0.2, 5.0), (2.0, 0.1)])
def test_steps(radius: float, tolerance: float) -> None:
    settings = WIDE | {"radius": radius, "tolerance": tolerance}
    expected, kept = naive(5, **settings)
    found = trained("gga", MOMENTUM, 5, **settings)
    torch.testing.assert_close(found, expected.state_dict(), rtol=1e-10, atol=1e-10)
    assert kept or radius == 2.0
    other = trained("erm-by-domain", MOMENTUM, 5)
    assert (max(float((found[k] - other[k]).abs().max()) for k in found) > 1e-4) is bool(kept)


@pytest.mark.parametrize("settings", [{"start": 7}, {"start": 2, "length": 0}, {"radius": 0.0}])
def test_nothing_to_search_is_the_mean_of_the_losses(settings: dict[str, Any]) -> None:
    """A trial changes neither BatchNorm's statistics nor what dropout draws next."""
    found = trained("gga", MOMENTUM, 5, **{"start": 0, "length": 2, "trials": 3, "radius": 0.5} | settings)
    torch.testing.assert_close(found, trained("erm-by-domain", MOMENTUM, 5), rtol=1e-10, atol=1e-10)
    made = build("gga", network(), cross_entropy, Task(3, 3, steps=5001))
    assert (made.first, made.end) == (100, 200)
