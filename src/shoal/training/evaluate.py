"""How well a model does in every domain."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from shoal.data.domains import Domains
from shoal.data.loader import MetaBatchLoader
from shoal.errors import unknown_name


@dataclass(frozen=True)
class Scores:
    """One number a domain: accuracy for classification, mean squared error for regression."""

    metric: str
    names: tuple[str, ...]
    values: tuple[float, ...]
    sizes: tuple[int, ...]
    average: float
    """Over examples, each counted once."""

    @property
    def mean(self) -> float:
        """Over domains, each counted once."""
        return float(np.mean(self.values))

    @property
    def worst(self) -> float:
        return min(self.values) if self.metric == "accuracy" else max(self.values)

    def __getitem__(self, name: str) -> float:
        if name not in self.names:
            raise unknown_name("domain", name, self.names)
        return self.values[self.names.index(name)]

    def better_than(self, other: Scores) -> bool:
        return self.average > other.average if self.metric == "accuracy" else self.average < other.average

    def to_dict(self) -> dict[str, Any]:
        domains = dict(zip(self.names, self.values, strict=True))
        return {"metric": self.metric, "average": self.average, "mean": self.mean, "domains": domains}


@torch.no_grad()
def evaluate(
    model: nn.Module,
    examples: Dataset,
    domains: Domains,
    *,
    classification: bool,
    device: torch.device,
    batch_size: int = 1024,
    workers: int = 0,
    limit: int | None = None,
) -> Scores:
    """Scores of ``model`` in evaluation mode; every example is passed once, whatever domains it is in.

    ``limit`` scores about so many examples in all, evenly over the domains and the same ones every time.
    """
    if limit is not None:
        each = -(-limit // len(domains))
        few = {n: domains.indices_of(d)[:each] for d, n in enumerate(domains.names)}
        domains = Domains.from_indices(few)
    which = domains.examples()
    points = torch.empty(len(which), dtype=torch.float32, device=device)
    training = model.training
    model.eval()
    at = 0
    for x, y in _batches(examples, which, batch_size, device, workers):
        output = model(x)
        score = (output.argmax(-1) == y).float() if classification else (output - y).float().square()
        points[at : at + len(y)] = score if score.ndim == 1 else score.flatten(1).mean(1)
        at += len(y)
    model.train(training)
    values = points.double().cpu().numpy()
    place = np.searchsorted(which, domains.indices)
    sums = np.add.reduceat(values[place], domains.offsets[:-1])
    return Scores(
        metric="accuracy" if classification else "mse",
        names=tuple(domains.names),
        values=tuple((sums / domains.sizes).tolist()),
        sizes=tuple(domains.sizes.tolist()),
        average=float(values.mean()),
    )


class _InOrder:
    """Plans each of ``which`` once, in order, as a sampler plans steps of one batch."""

    seed = 0
    domains_per_step = 1

    def __init__(self, which: np.ndarray, size: int) -> None:
        self.which, self.size = which.astype(np.int64), size
        self.steps = math.ceil(len(which) / size)

    def plan(self, step: int) -> list[tuple[None, np.ndarray]]:
        return [(None, self.which[step * self.size : (step + 1) * self.size])]


def _batches(examples: Any, which: np.ndarray, size: int, device: torch.device, workers: int) -> Any:
    order: Any = _InOrder(which, size)
    for (batch,) in MetaBatchLoader(examples, order, workers=workers, device=device, stop=order.steps):
        yield batch.x, batch.y


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the model's weights and buffers."""
    return {k: v.detach().clone() for k, v in model.state_dict().items()}
