"""Fine-tuning of pretrained models, with any algorithm: each option against a plain loop in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus

import shoal
from shoal.errors import InputError
from shoal.gradients import pcgrad
from shoal.training.callbacks import Callback, State

META_LR = 0.3
algorithms = pytest.mark.parametrize("algorithm", ["erm", "fish", "pcgrad"])


class Net(nn.Module):
    """A stem, two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.stem = nn.Linear(4, 6)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
            self.norm = nn.LayerNorm(6)
            self.fc = nn.Linear(6, 2)
        self.double()

    def features(self, x: Tensor) -> list[Tensor]:
        """Outputs of the stem and both blocks, and what the head takes."""
        x = self.stem(x).relu_()
        found = [x]
        for block in self.blocks:
            found.append(block(x))
            x = x + found[-1]
        return [*found, self.norm(x)]

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc(self.features(x)[-1])
        return output


def domain(number: int, examples: int = 24) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    y = torch.arange(examples) % 2
    x = torch.randn(examples, 4, generator=draw, dtype=torch.float64)
    return x + torch.stack([2.0 * y, -1.0 * y, 0 * y + number, 0 * y], 1), y


TRAIN = {f"d{n}": domain(n) for n in range(3)}


class Batches(Callback):
    """Keeps what every step was trained on."""

    def __init__(self) -> None:
        self.found: list[list[tuple[Tensor, Tensor]]] = []

    def before_step(self, state: State) -> None:
        assert state.batch is not None
        self.found.append([(b.x.clone(), b.y.clone()) for b in state.batch.split()])


def fit(algorithm: str, model: nn.Module, **options: Any) -> shoal.Fit:
    settings = {"meta_lr": META_LR} if algorithm == "fish" else {}
    given = {"steps": 5, "batch_size": 6, "device": "cpu", "progress": False, "settings": settings}
    if "optimizer" not in options:
        given["lr"] = 0.05
    return shoal.fit(algorithm, model, TRAIN, **given | options)


Loss = Callable[[Any, Tensor, Tensor], Tensor]


def plain_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y)


def by_hand(
    algorithm: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[list[tuple[Tensor, Tensor]]],
    loss: Loss = plain_loss,
    pull: Callable[[nn.Parameter], Tensor] = torch.zeros_like,
) -> None:
    """Trains as the formulas say; ``pull`` is added to the gradient of each parameter before it is used."""
    params = [p for group in optimizer.param_groups for p in group["params"]]

    def apply(gradients: Iterable[Tensor]) -> None:
        for p, g in zip(params, gradients, strict=True):
            p.grad = g + pull(p).detach()
        optimizer.step()

    def gradient(x: Tensor, y: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(loss(model, x, y), params, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(params, found, strict=True)]

    for batches in steps:
        if algorithm == "erm":
            apply(gradient(*(torch.cat(parts) for parts in zip(*batches, strict=True))))
        elif algorithm == "pcgrad":
            apply(pcgrad([gradient(x, y) for x, y in batches]))
        else:
            before = [p.detach().clone() for p in params]
            for x, y in batches:
                apply(gradient(x, y))
            with torch.no_grad():
                for p, start in zip(params, before, strict=True):
                    p.copy_(start + META_LR * (p - start))


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert (a - b).abs().max() <= 1e-10, name


# Learning rates


def groups_of(model: Net, lr: float, head_lr: float | None, decay: float) -> list[dict[str, Any]]:
    parts = [model.stem, model.blocks[0], model.blocks[1], model.norm, model.fc]
    rates = [lr * decay**3, lr * decay**2, lr * decay, lr, head_lr or lr]
    return [{"params": [*part.parameters()], "lr": rate} for part, rate in zip(parts, rates, strict=True)]


@pytest.mark.parametrize(
    ("algorithm", "head_lr", "decay"),
    [("erm", 0.2, 0.5), ("fish", 0.2, 0.5), ("pcgrad", None, 0.5), ("fish", 0.2, None)],
)
def test_learning_rates_as_by_hand(algorithm: str, head_lr: float | None, decay: float | None) -> None:
    model, batches = Net(), Batches()
    other = copy.deepcopy(model)
    config = fit(algorithm, model, head_lr=head_lr, layer_decay=decay, callbacks=[batches]).record["config"]
    optimizer = torch.optim.Adam(groups_of(other, 0.05, head_lr, decay or 1.0))
    by_hand(algorithm, other, optimizer, batches.found)
    assert_same(model, other)
    assert (config["lr"], config["head_lr"], config["layer_decay"]) == (0.05, head_lr, decay)


@pytest.mark.parametrize("option", ["head_lr", "layer_decay", "l2_sp"])
def test_a_model_without_a_head(option: str) -> None:
    model = nn.Sequential(nn.Conv1d(1, 2, 4), nn.Flatten()).double()
    train = {name: (x[:, None], y) for name, (x, y) in TRAIN.items()}
    with pytest.raises(InputError, match=rf"{option}: .*no head"):
        shoal.fit("erm", model, train, steps=1, device="cpu", progress=False, **{option: 0.5})  # type: ignore[arg-type]


# L2-SP


@algorithms
def test_l2_sp_as_by_hand(algorithm: str) -> None:
    model, batches = Net(), Batches()
    other = copy.deepcopy(model)
    fit(algorithm, model, l2_sp=0.3, callbacks=[batches])
    before = {p: p.detach().clone() for p in other.parameters()}
    own = set(other.fc.parameters())

    def pull(p: nn.Parameter) -> Tensor:
        if p.ndim < 2:  # biases and norms
            return torch.zeros_like(p)
        return 0.3 * (p if p in own else p - before[p])

    by_hand(algorithm, other, torch.optim.Adam(other.parameters(), 0.05), batches.found, pull=pull)
    assert_same(model, other)


# MIRO


@pytest.mark.parametrize("accumulate", [1, 3])
@algorithms
def test_miro_as_by_hand(algorithm: str, accumulate: int) -> None:
    """With the features of the stem and both blocks."""
    model, batches = Net(), Batches()
    other, start = copy.deepcopy(model), copy.deepcopy(model)
    options: dict[str, Any] = {"optimizer": torch.optim.SGD, "lr": 0.05, "accumulate": accumulate}
    fit(algorithm, model, miro=0.3, callbacks=[batches], **options)
    first = torch.tensor(0.1 - 1e-5, dtype=torch.float64).expm1().log()
    spreads = [first.repeat(1, 6).requires_grad_() for _ in range(3)]

    def loss(net: Net, x: Tensor, y: Tensor) -> Tensor:
        *features, last = net.features(x)
        total = cross_entropy(net.fc(last), y)
        for z, z0, b in zip(features, start.features(x)[:3], spreads, strict=True):
            variance = softplus(b) + 1e-5
            total = total + 0.3 * 0.5 * ((z - z0.detach()) ** 2 / variance + variance.log()).mean()
        return total

    groups = [{"params": list(other.parameters())}, {"params": spreads, "lr": 0.5}]
    by_hand(algorithm, other, torch.optim.SGD(groups, 0.05), batches.found, loss=loss)
    assert_same(model, other)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
