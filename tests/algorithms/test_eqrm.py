"""EQRM: its quantile, its start and its learning rate after it; the steps are in test_formulas."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import shoal
from references.naive import quantile_of
from shoal.algorithms import build
from shoal.data import DomainBatch, Task
from shoal.errors import InputError
from shoal.penalties import Blocks, quantile_risk
from shoal.training.engine import Engine

S, SIZE = 3, 6
CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
QUANTILES = [0.001, 0.3, 0.5, 0.75, 0.99, 0.9999]
each_quantile = pytest.mark.parametrize("quantile", QUANTILES)


def quantile_and_slope(losses: Tensor, quantile: float) -> tuple[Tensor, Tensor]:
    losses = losses.clone().requires_grad_()
    found = quantile_risk(losses, Blocks([1] * len(losses)), quantile)
    return found.detach(), torch.autograd.grad(found, losses)[0]


class TestQuantile:
    @each_quantile
    @pytest.mark.parametrize(
        "losses", [[0.3, 1.7], [2.0, 0.5, 0.51, 4.0], [1e-9, 2e-9, 5e-9], [1e6, 1e6 + 3, 2e6]]
    )
    def test_against_bisection(self, losses: list[float], quantile: float) -> None:
        values = torch.tensor(losses, dtype=torch.float64)
        twins = [v.clone().requires_grad_() for v in values / values.max()]
        expected = quantile_of(twins, quantile)
        found, slope = quantile_and_slope(values, quantile)
        torch.testing.assert_close(found / values.max(), expected.detach(), **CLOSE)
        torch.testing.assert_close(slope, torch.stack(torch.autograd.grad(expected, twins)), **CLOSE)

    @each_quantile
    def test_moves_and_scales_with_the_losses(self, quantile: float) -> None:
        losses = torch.tensor([0.2, 1.0, 0.7, 3.0], dtype=torch.float64)
        found, slope = quantile_and_slope(losses, quantile)
        other, same = quantile_and_slope(5 * losses - 2, quantile)
        torch.testing.assert_close(other, 5 * found - 2, **CLOSE)
        torch.testing.assert_close(same, slope, **CLOSE)
        assert float(slope.sum()) == pytest.approx(1, abs=1e-12)

    def test_single_precision_of_nearly_equal_losses(self) -> None:
        losses = torch.tensor([2.0, 2.0, 2.0 + 2**-22])
        found, slope = quantile_and_slope(losses, 0.9)
        assert found.dtype == torch.float32
        assert 2 <= float(found) <= 2 + 2**-20
        assert slope.isfinite().all()

    def test_equal_losses_and_a_single_one(self) -> None:
        for count in (1, 2, 5):
            found, slope = quantile_and_slope(torch.full((count,), 0.7, dtype=torch.float64), 0.9)
            assert float(found) == pytest.approx(0.7, abs=1e-15)
            torch.testing.assert_close(slope, torch.full_like(slope, 1 / count))


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def batches(step: int, count: int = S) -> list[DomainBatch]:
    draw = torch.Generator().manual_seed(step)
    x = [torch.randn(SIZE, 4, generator=draw, dtype=torch.float64) * (1 + d) + d for d in range(count)]
    return [DomainBatch(x[d], torch.randint(2, (SIZE,), generator=draw), d) for d in range(count)]


def trained(maker: Any, steps: int = 5, **settings: Any) -> nn.Module:
    model = network()
    algorithm = build("eqrm", model, cross_entropy, Task(S, 2, steps=steps), **settings)
    engine = Engine(algorithm.wrap(maker(model.parameters()), S))
    for step in range(steps):
        engine.step(algorithm, batches(step))
    return model


def by_hand(maker: Any, start: int, quantile: float, late: float | None, steps: int = 5) -> nn.Module:
    model = network()
    optimizer = maker(model.parameters())
    for step in range(steps):
        losses = [cross_entropy(model(b.x), b.y) for b in batches(step)]
        loss = quantile_of(losses, quantile) if step >= start else sum(losses) / S
        if step == start and late is not None:
            optimizer.param_groups[0]["lr"] = late
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def close(a: nn.Module, b: nn.Module) -> None:
    torch.testing.assert_close(a.state_dict(), b.state_dict(), **CLOSE)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.02, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.1),
}


@pytest.mark.parametrize("maker", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("late", [None, 1e-4, 0.3])
@pytest.mark.parametrize(("start", "first"), [(0, 0), (2, 2), (0.5, 2), (5, 5), (2.0, 5)])
def test_steps(maker: Any, late: float | None, start: float, first: int) -> None:
    """With a start at once, within the training and never; and a learning rate of its own after it."""
    found = trained(maker, start=start, quantile=0.9, quantile_lr=late)
    close(found, by_hand(maker, first, 0.9, late))


def test_one_domain_in_a_step() -> None:
    """Its quantile is its loss."""
    models = []
    for name, settings in (("eqrm", {"start": 0}), ("erm-by-domain", {})):
        model = network()
        algorithm = build(name, model, cross_entropy, Task(S, 2), **settings)
        Engine(torch.optim.SGD(model.parameters(), 0.1)).step(algorithm, batches(0, 1))
        models.append(model)
    close(*models)


def test_a_schedule_applies_to_either_rate() -> None:
    """With a rate that is zero at the end, nothing moves there."""
    x, y = batches(0)[0][:2]
    made: dict[float | None, nn.Module] = {}
    for late in (None, 0.05):
        made[late] = network()
        shoal.fit(
            "eqrm",
            made[late],
            {str(d): (x + d, y) for d in range(S)},
            steps=4,
            batch_size=SIZE,
            optimizer=lambda p: torch.optim.SGD(p, 0.05),
            schedule=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 - step / 3),
            settings={"start": 1, "quantile_lr": late},
            progress=False,
        )
    close(made[None], made[0.05])


def test_a_rate_of_zero_is_refused() -> None:
    algorithm = build("eqrm", network(), cross_entropy, Task(S, 2), quantile_lr=1e-6)
    with pytest.raises(InputError, match=r"quantile_lr=1e-06 of EQRM requires an optimizer with lr above 0"):
        algorithm.wrap(torch.optim.SGD(algorithm.parameters(), 0.0), S)
