"""Each task that can be trained for: losses, sample weights, several inputs and refusals, against loops."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.errors import InputError

N = 24
OUTPUTS = {"classification": 3, "ordinal": 3, "multilabel": 3, "binary": 1, "regression": 2}
NAMES = {"binary": "multilabel"}
"""What the task is called."""
CLASSES = torch.tensor([1.0, 5.0, 0.2]).double()
LOSSES: dict[str, Any] = {
    "classification": lambda: nn.CrossEntropyLoss(CLASSES, label_smoothing=0.1),
    "ordinal": lambda: functools.partial(F.cross_entropy, weight=CLASSES),
    "multilabel": lambda: nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0]).double()),
    "binary": lambda: nn.BCEWithLogitsLoss(),
    "regression": lambda: nn.SmoothL1Loss(),
}


class Squeezed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


def network(task: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        last: nn.Module = Squeezed() if task == "binary" else nn.Identity()
        layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, OUTPUTS[task]), last)
        return layers.double()


def targets(task: str, x: Tensor) -> Tensor:
    if task in ("classification", "ordinal"):
        return (x[:, :3]).argmax(1)
    if task == "multilabel":
        return (x[:, :3] > 0).double()
    return (x[:, 0] > 0).double() if task == "binary" else x[:, :2] - x[:, 2:]


def examples(task: str, weighted: bool = False) -> dict[str, tuple[Tensor, ...]]:
    found: dict[str, tuple[Tensor, ...]] = {}
    draw = torch.Generator().manual_seed(7)
    for name in "ab":
        x = torch.randn(N, 4, generator=draw, dtype=torch.float64)
        w = torch.rand(N, generator=draw, dtype=torch.float64) * 5
        w[::4] = 0
        found[name] = (x, targets(task, x), w) if weighted else (x, targets(task, x))
    return found


def fit(of: str, algorithm: str = "erm", train: Any = None, **options: Any) -> shoal.Fit:
    given: dict[str, Any] = {"steps": 5, "batch_size": 7, "progress": False, "device": "cpu"}
    given |= {"optimizer": lambda p: torch.optim.SGD(p, 0.3), "task": NAMES.get(of, of)}
    train = examples(of) if train is None else train
    return shoal.fit(algorithm, options.pop("model", None) or network(of), train, **given | options)


def distance(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max(float((x - y).abs().max()) for x, y in pairs)


def naive(loss: Any, output: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    """Σ w l / Σ w c, an example at a time; l and c by torch's own sum of one example."""
    total, whole = torch.zeros((), dtype=torch.float64), 0.0
    summed = copy.copy(loss) if isinstance(loss, nn.Module) else functools.partial(loss, reduction="sum")
    summed.reduction = "sum"
    classes = (
        loss.keywords["weight"] if isinstance(loss, functools.partial) else getattr(loss, "weight", None)
    )
    for i in range(len(y)):
        w, one = 1.0 if weight is None else float(weight[i]), y[i : i + 1]
        total = total + w * summed(output[i : i + 1], one)
        whole += w * sum(1.0 if classes is None else float(classes[int(c)]) for c in one.reshape(-1).tolist())
    return total / whole


def naive_points(task: str, output: Tensor, y: Tensor) -> float:
    if task == "regression":
        return float((output - y).square().mean())
    chosen = output.sigmoid().round() if task in ("multilabel", "binary") else output.softmax(1).argmax(1)
    return float((chosen == y).double().mean())


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "sample-weights"])
@pytest.mark.parametrize("task", OUTPUTS)
def test_a_step_and_an_evaluation_are_those_of_a_plain_loop(task: str, weighted: bool) -> None:
    """One step on all data at once, as a few lines of torch would take it."""
    train, model, loss = examples(task, weighted), network(task), LOSSES[task]()
    options = {"loss": loss, "steps": 1, "batch_size": N, "eval_batch": 5}
    run = fit(task, "erm-by-domain", train, test=train, **options)
    total = torch.zeros((), dtype=torch.float64)
    for x, y, *w in train.values():
        total = total + naive(loss, model(x), y, w[0] if w else None) / 2
    total.backward()
    for p, old in zip(run.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), old.detach() - 0.3 * old.grad, rtol=0, atol=1e-10)
    x, y, *_ = (torch.cat(parts) for parts in zip(*train.values(), strict=True))
    with torch.no_grad():
        losses = [naive(loss, run.model(x), y, w[0] if w else None).item() for x, y, *w in train.values()]
        points = naive_points(task, run.model(x), y)
    assert run.scores().loss == pytest.approx(np.mean(losses), abs=1e-10)
    assert run.scores().average == pytest.approx(points, abs=1e-6)


Change = Callable[[Tensor, Tensor], Any]
CE, BCE = nn.CrossEntropyLoss, nn.BCEWithLogitsLoss
REFUSED: dict[str, tuple[str, Change | None, dict[str, Any], str]] = {
    "class weights": (
        "classification",
        None,
        {"loss": CE(torch.ones(2).double())},
        r"loss: cannot take .*\(2, 3\)",
    ),
    "pos_weight": (
        "multilabel",
        None,
        {"loss": BCE(pos_weight=torch.ones(7))},
        r"loss: cannot take .*\(2, 3\)",
    ),
    "label 2": ("multilabel", lambda x, y: (x, 2 * y), {}, "has the label .2.0"),
    "labels of positions": (
        *("classification", lambda x, y: (x, torch.stack([y, y], 1)), {}),
        r"labels \(2, 2\): a class per example",
    ),
    "half a class": ("ordinal", lambda x, y: (x, y + 0.5), {}, "has the label 2.5"),
    "weights of a loss of one's own": (
        *("regression", lambda x, y: (x, y, x[:, 0].abs()), {"loss": lambda a, b: (a - b).square().mean()}),
        "sample weights need a loss whose terms are known",
    ),
    "one target of two": (
        "regression",
        lambda x, y: (x, y[:, 0]),
        {},
        r"of shape \(2, 2\) and the targets .*\(2,\)",
    ),
}


@pytest.mark.parametrize(("task", "change", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_before_training(
    task: str, change: Change | None, options: dict[str, Any], message: str
) -> None:
    model = network(task)
    train = {name: change(x, y) if change else (x, y) for name, (x, y) in examples(task).items()}
    with pytest.raises(InputError, match=message):
        fit(task, train=train, model=model, **options)
    assert distance(model, network(task)) == 0


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 3).double()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.layer(torch.cat([a, b], 1))


def test_several_inputs() -> None:
    """By place or by name, as arrays or as examples."""

    def trained(data: Callable[..., Any]) -> nn.Module:
        train = {n: data(*parts) for n, parts in examples("classification").items()}
        return fit("classification", train=train, model=Two()).model

    first = trained(lambda x, y: [{"x": (z[:2], z[2:]), "y": label} for z, label in zip(x, y, strict=True)])
    assert distance(first, trained(lambda x, y: ((x[:, :2], x[:, 2:]), y))) == 0
    assert distance(first, trained(lambda x, y: ({"a": x[:, :2], "b": x[:, 2:]}, y))) == 0
    with pytest.raises(InputError, match=r"passed as several arguments where forward needs more than one"):
        trained(lambda x, y: ((x[:, :2], x[:, 2:], x), y))
