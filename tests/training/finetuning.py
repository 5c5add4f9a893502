"""Plain loops in float64, against which options of fine-tuning are checked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal.data import DomainBatchSampler, DomainData, Domains, TensorData
from shoal.models import FeatureModel

RATE = 0.05
Seen = Callable[[int, nn.Module], None]


def examples(number: int, count: int = 30) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    y = torch.arange(count) % 2
    return torch.randn(count, 4, generator=draw).double() + 1.5 * y[:, None], y


def data(turned: bool = False) -> DomainData:
    """Two training domains with validation examples of the same domains, and a test domain.

    Validation that is ``turned`` has the other labels, so that it gets worse by training.
    """
    x, y = (torch.cat(both) for both in zip(*map(examples, range(3)), strict=True))
    held = [range(20, 30), range(50, 60)]
    if turned:
        y = y.clone()
        y[[*held[0], *held[1]]] = 1 - y[[*held[0], *held[1]]]
    splits = {
        "train": {"a": range(20), "b": range(30, 50)},
        "validation": {"a": held[0], "b": held[1]},
        "test": {"c": range(60, 90)},
    }
    domains = {k: Domains.from_indices({n: list(i) for n, i in v.items()}) for k, v in splits.items()}
    return DomainData(TensorData(x, y), domains, 2, (4,), "")


def union(turned: bool = False) -> DomainData:
    """The same, with the validation examples among those to train on."""
    every = Domains.from_indices({"a": [*range(30)], "b": [*range(30, 60)]})
    return replace(data(turned), splits={"train": every})


def network(*between: nn.Module, dropout: float = 0.0) -> FeatureModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        features = nn.Sequential(nn.Linear(4, 6), *between, nn.Tanh(), nn.Dropout(dropout))
        return FeatureModel(features, nn.Linear(6, 2)).double()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, RATE, momentum=0.9)


def fit(
    algorithm: str = "erm", model: nn.Module | None = None, given: DomainData | None = None, **options: Any
) -> shoal.Fit:
    usual: dict[str, Any] = {"steps": 12, "batch_size": 5, "eval_every": 3, "progress": False}
    usual |= {"device": "cpu", "optimizer": sgd}
    return shoal.fit(algorithm, model or network(), given or data(), **usual | options)


def batches(given: DomainData, steps: int, slots: int, draw: Any) -> Iterator[list[tuple[Tensor, Tensor]]]:
    sampler = DomainBatchSampler(given.splits["train"], 5, slots, draw=draw, seed=0, steps=steps)
    every: Any = given.examples
    for row in sampler.plans(0, steps)[1]:
        yield [every.batch(torch.from_numpy(indices)) for indices in row]


def erm(
    model: nn.Module,
    given: DomainData,
    steps: int,
    params: Any = None,
    slots: int = 2,
    seen: Seen | None = None,
) -> None:
    """Steps of SGD with momentum on the pooled examples."""
    optimizer = sgd(list(params or model.parameters()))
    for step, drawn in enumerate(batches(given, steps, slots, "pooled"), 1):
        x, y = (torch.cat(both) for both in zip(*drawn, strict=True))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if seen is not None:
            seen(step, model)


def fish(model: nn.Module, given: DomainData, steps: int, seen: Seen | None = None) -> None:
    """Inner steps of SGD with momentum on a batch of each domain, then halfway back."""
    params = list(model.parameters())
    optimizer = sgd(params)
    for step, drawn in enumerate(batches(given, steps, 2, "domains"), 1):
        start = [p.detach().clone() for p in params]
        for x, y in drawn:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            for p, s in zip(params, start, strict=True):
                p.copy_(s + 0.5 * (p - s))
        if seen is not None:
            seen(step, model)


def assert_close(a: nn.Module | dict[str, Tensor], b: nn.Module | dict[str, Tensor]) -> None:
    one, other = (m.state_dict() if isinstance(m, nn.Module) else m for m in (a, b))
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=1e-10, msg=name)


@contextlib.contextmanager
def frozen(model: nn.Module, head: nn.Module) -> Iterator[None]:
    """For a linear probe by hand."""
    rest = [p for p in model.parameters() if not any(p is q for q in head.parameters())]
    for p in rest:
        p.requires_grad_(False)
    model.eval()
    head.train()
    yield
    for p in rest:
        p.requires_grad_(True)
    model.train()
