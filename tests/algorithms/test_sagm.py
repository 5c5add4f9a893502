"""SAGM where its formula has no room for mistakes; the steps themselves are in test_formulas."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from shoal.algorithms import build
from shoal.data import DomainBatch, Task
from shoal.training.engine import Engine

S, SIZE = 3, 6
CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}


class Bowl(nn.Module):
    """Its loss is ½ θᵀAθ, whose gradient is Aθ."""

    def __init__(self, start: list[float]) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.theta.expand(len(x), -1)


SHAPE = torch.tensor([[3.0, 0.5], [0.5, 1.0]], dtype=torch.float64)


def energy(output: Tensor, _: Tensor) -> Tensor:
    return ((output @ SHAPE) * output).sum(1).mean() / 2


def stepped(
    name: str, model: nn.Module, loss: Any = cross_entropy, steps: int = 3, **settings: Any
) -> nn.Module:
    algorithm = build(name, model, loss, Task(S, 2), **settings).train()
    engine = Engine(torch.optim.SGD(model.parameters(), 0.1))
    for step in range(steps):
        torch.manual_seed(step)
        engine.step(algorithm, batches(step))
    return model


def batches(step: int, count: int = S) -> list[DomainBatch]:
    draw = torch.Generator().manual_seed(step)
    x = [torch.randn(SIZE, 4, generator=draw, dtype=torch.float64) + d for d in range(count)]
    return [DomainBatch(x[d], torch.randint(2, (SIZE,), generator=draw), d) for d in range(count)]


def network(*between: nn.Module) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 5), *between, nn.Tanh(), nn.Linear(5, 2)).double()


def close(a: nn.Module, b: nn.Module) -> None:
    torch.testing.assert_close(a.state_dict(), b.state_dict(), **CLOSE)


@pytest.mark.parametrize(("rho", "alpha"), [(0.4, 0.3), (0.4, 0.0), (0.0, 0.3), (0.05, 0.001)])
def test_on_a_bowl(rho: float, alpha: float) -> None:
    """g = Aθ, and the gradient there is A(θ + (ρ/‖g‖ − α) g)."""
    found = stepped("sagm", Bowl([1.0, -2.0]), energy, rho=rho, alpha=alpha)
    theta = torch.tensor([1.0, -2.0], dtype=torch.float64)
    for _ in range(3):
        g = SHAPE @ theta
        theta = theta - 0.1 * (g + SHAPE @ (theta + rho * g / g.norm() - alpha * g)) / 2
    torch.testing.assert_close(found.theta.data, theta, **CLOSE)


def test_a_zero_gradient_moves_nothing() -> None:
    found = stepped("sagm", Bowl([0.0, 0.0]), energy)
    assert found.theta.tolist() == [0.0, 0.0]


def test_without_either_it_is_erm() -> None:
    close(stepped("sagm", network(), rho=0.0, alpha=0.0), stepped("erm", network()))


def test_dropout_is_the_same_in_both_passes() -> None:
    """Else the mean of the two gradients would not be ERM's without ρ and α."""
    close(
        stepped("sagm", network(nn.Dropout(0.5)), rho=0.0, alpha=0.0),
        stepped("erm", network(nn.Dropout(0.5))),
    )
