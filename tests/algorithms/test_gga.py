"""GGA's search against loops over copies of the model, in float64; and where there is nothing to search."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from shoal.algorithms import build
from shoal.algorithms.base import Algorithm
from shoal.data import DomainBatch, Task
from shoal.training.engine import Engine

S, SIZE = 3, 6
CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
WIDE = {"start": 1, "length": 3, "trials": 6, "radius": 0.2}


def network(*between: nn.Module) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 5), *between, nn.Tanh(), nn.Linear(5, 2)).double()


def batches(step: int, count: int = S) -> list[DomainBatch]:
    draw = torch.Generator().manual_seed(step)
    x = [torch.randn(SIZE, 4, generator=draw, dtype=torch.float64) * (1 + d) + d for d in range(count)]
    return [DomainBatch(x[d], torch.randint(2, (SIZE,), generator=draw), d) for d in range(count)]


def made(model: nn.Module, name: str = "gga", **settings: Any) -> tuple[Algorithm, Engine]:
    algorithm = build(name, model, cross_entropy, Task(S, 2, steps=10), **settings).train()
    return algorithm, Engine(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))


def trained(model: nn.Module, steps: int = 5, name: str = "gga", **settings: Any) -> nn.Module:
    algorithm, engine = made(model, name, **settings)
    for step in range(steps):
        torch.manual_seed(step)
        engine.step(algorithm, batches(step))
    return model


def close(a: nn.Module, b: nn.Module) -> None:
    torch.testing.assert_close(a.state_dict(), b.state_dict(), **CLOSE)


def differ(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs) > 1e-4


def measured(model: nn.Module, step: int) -> tuple[float, float]:
    """The mean loss, and the least cosine over all pairs."""
    losses, gradients = [], []
    for b in batches(step):
        loss = cross_entropy(model(b.x), b.y)
        found = torch.autograd.grad(loss, list(model.parameters()))
        losses.append(float(loss.detach()))
        gradients.append(torch.cat([g.reshape(-1) for g in found]))
    pairs = itertools.combinations(gradients, 2)
    return sum(losses) / S, min(float(a @ b / (a.norm() * b.norm())) for a, b in pairs)


def naive(steps: int, start: int, length: int, trials: int, radius: float, tolerance: float = 0.1) -> Any:
    """The model after so many steps, and how many perturbations were kept."""
    model, kept = network(), 0
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        if start <= step < start + length:
            torch.manual_seed(step)
            seeds = torch.randint(2**62, (trials,)).tolist()
            first, highest = measured(model, step)
            best = None
            for seed in seeds:
                draw = torch.Generator().manual_seed(seed)
                other = copy.deepcopy(model)
                for p in other.parameters():
                    noise = torch.empty(p.shape, dtype=torch.float64).uniform_(
                        -radius, radius, generator=draw
                    )
                    p.data = p.data + noise
                loss, cosine = measured(other, step)
                if loss < first + tolerance and cosine > highest:
                    highest, best = cosine, other
            if best is not None:
                kept += 1
                for p, q in zip(model.parameters(), best.parameters(), strict=True):
                    p.data.copy_(q.data)
        loss = sum(cross_entropy(model(b.x), b.y) for b in batches(step)) / S
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, kept


@pytest.mark.parametrize("radius", [0.01, 0.2, 2.0])
@pytest.mark.parametrize("tolerance", [0.0, 0.1, 5.0])
def test_steps(radius: float, tolerance: float) -> None:
    settings = WIDE | {"radius": radius, "tolerance": tolerance}
    expected, kept = naive(5, **settings)
    found = trained(network(), **settings)
    close(found, expected)
    assert kept or radius == 2.0
    assert differ(found, trained(network(), name="erm-by-domain")) is bool(kept)


@pytest.mark.parametrize(
    "settings",
    [
        {"start": 7, "length": 2},  # after the last step
        {"start": 2, "length": 0},
        {"start": 0, "length": 0.09},  # of 10 steps, none
        {"start": 0, "length": 5, "radius": 0.0},
    ],
)
def test_nothing_to_search_is_the_mean_of_the_losses(settings: dict[str, Any]) -> None:
    found = trained(network(), **{"trials": 3, "radius": 0.5} | settings)
    close(found, trained(network(), name="erm-by-domain"))


def test_a_share_is_of_the_training() -> None:
    algorithm, _ = made(network(), start=0.2, length=0.3)
    assert (algorithm.start, algorithm.end) == (2, 5)
    whole = build("gga", network(), cross_entropy, Task(S, 2, steps=5001))
    assert (whole.start, whole.end) == (100, 200)


def test_one_domain_in_a_step_is_not_searched() -> None:
    model, other = network(), network()
    for each, name, settings in ((model, "gga", WIDE | {"start": 0}), (other, "erm-by-domain", {})):
        algorithm, engine = made(each, name, **settings)
        engine.step(algorithm, batches(0, 1))
    close(model, other)


def test_zero_gradients_leave_everything_in_place() -> None:
    """The cosine of a zero gradient is 0 with any other."""

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theta = nn.Parameter(torch.ones(2, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return 0 * self.theta.expand(len(x), 2)

    model = trained(Constant(), **WIDE)
    assert model.theta.tolist() == [1.0, 1.0]


def test_it_leaves_no_trace_in_buffers_and_random_numbers() -> None:
    """Trials move no statistics, and all see the same dropout masks."""
    model = network(nn.BatchNorm1d(5).double(), nn.Dropout(0.5))
    algorithm, engine = made(model, **WIDE | {"start": 0, "radius": 0.0})
    torch.manual_seed(0)
    torch.randint(2**62, (WIDE["trials"],))  # type: ignore[call-overload]
    expected = torch.get_rng_state()
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(0)
    assert algorithm.search(batches(0), engine) is None
    assert torch.equal(torch.get_rng_state(), expected)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    seen = []
    algorithm.agreement = lambda *a: seen.append(type(algorithm).agreement(algorithm, *a)) or seen[-1]
    algorithm.search(batches(0), engine)
    assert len(seen) == 1 + WIDE["trials"]
    assert all(torch.equal(s, seen[0]) for s in seen)
