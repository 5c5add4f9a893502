"""How well a model does in every domain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.algorithms.base import Loss, full_precision
from shoal.data.domains import Domains
from shoal.data.loader import MetaBatchLoader
from shoal.errors import unknown_name
from shoal.training.processes import Processes


@dataclass(frozen=True)
class Scores:
    """One number a domain: accuracy for classification, mean squared error for regression."""

    metric: str
    names: tuple[str, ...]
    values: tuple[float, ...]
    sizes: tuple[int, ...]
    average: float
    """Over examples, each counted once."""
    loss: float | None = None
    """The training's loss, a mean over examples."""

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
        return {
            "metric": self.metric,
            "average": self.average,
            "mean": self.mean,
            "loss": self.loss,
            "domains": dict(zip(self.names, self.values, strict=True)),
            "sizes": list(self.sizes),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Scores:
        domains = content["domains"]
        return cls(
            content["metric"],
            tuple(domains),
            tuple(domains.values()),
            tuple(content["sizes"]),
            content["average"],
            content["loss"],
        )


class Evaluator:
    """Scores a model in every domain of every split; each example is passed once, whatever domains it is in.

    Made once for a training: worker processes that read examples stay from one evaluation to the next.
    ``limit`` scores about so many examples of a split, evenly over its domains and the same ones every time.
    Several ``processes`` take a share each.
    """

    def __init__(
        self,
        examples: Any,
        splits: Mapping[str, Domains],
        *,
        classification: bool,
        loss: Loss | None = None,
        batch_size: int = 1024,
        workers: int = 0,
        limit: int | None = None,
        processes: Processes | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.splits = {name: _few(domains, limit) for name, domains in splits.items()}
        self.classification, self.loss, self.autocast = classification, loss, autocast
        self.processes = processes or Processes("cpu")
        index, count = self.processes.index, self.processes.count
        self.which = {name: domains.examples() for name, domains in self.splits.items()}
        order: Any = _InOrder({name: w[index::count] for name, w in self.which.items()}, batch_size)
        self.order = order
        self.loader = MetaBatchLoader(
            examples, order, workers=workers, device=self.processes.device, stop=len(order.batches)
        )

    def __call__(self, model: nn.Module) -> dict[str, Scores]:
        training = model.training
        model.eval()
        try:
            with torch.inference_mode():
                points, losses = self._pass(model)
        finally:
            model.train(training)
        return {
            name: self._scores(domains, self.which[name], points[name], losses[name])
            for name, domains in self.splits.items()
        }

    def _pass(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """For every split one number an example, and the sum of the losses."""
        device, index, count = self.processes.device, self.processes.index, self.processes.count
        points = {n: torch.zeros(len(w), device=device) for n, w in self.which.items()}
        losses = {n: torch.zeros((), dtype=torch.float64, device=device) for n in self.which}
        at = dict.fromkeys(self.which, 0)
        for (split, indices), ((x, y, _),) in zip(self.order.batches, self.loader, strict=True):
            with self.autocast():
                output = full_precision(model(x))
            if self.loss is not None:
                losses[split] += self.loss(output, y) * len(indices)
            score = output.argmax(-1) == y if self.classification else (output - y).square()
            own = points[split][index::count]  # a view
            score = score.float()
            own[at[split] : at[split] + len(indices)] = score if score.ndim == 1 else score.flatten(1).mean(1)
            at[split] += len(indices)
        together = self.processes.sum([*points.values(), *losses.values()])
        names = list(self.which)
        return dict(zip(names, together, strict=False)), dict(zip(names, together[len(names) :], strict=True))

    def _scores(self, domains: Domains, which: np.ndarray, points: Tensor, loss: Tensor) -> Scores:
        values = points.double().cpu().numpy()
        place = np.searchsorted(which, domains.indices)
        sums = np.add.reduceat(values[place], domains.offsets[:-1])
        return Scores(
            metric="accuracy" if self.classification else "mse",
            names=tuple(domains.names),
            values=tuple((sums / domains.sizes).tolist()),
            sizes=tuple(domains.sizes.tolist()),
            average=float(values.mean()),
            loss=None if self.loss is None else float(loss) / len(which),
        )


def _few(domains: Domains, limit: int | None) -> Domains:
    if limit is None:
        return domains
    each = -(-limit // len(domains))
    return Domains.from_indices({n: domains.indices_of(d)[:each] for d, n in enumerate(domains.names)})


class _InOrder:
    """Plans each example once, in order, as a sampler plans steps of one batch; none mixes splits."""

    seed = 0
    domains_per_step = 1

    def __init__(self, which: Mapping[str, np.ndarray], size: int) -> None:
        self.batches = [
            (name, indices[at : at + size].astype(np.int64))
            for name, indices in which.items()
            for at in range(0, len(indices), size)
        ]

    def plans(self, start: int, stop: int) -> tuple[list[list[None]], list[np.ndarray]]:
        return [[None]] * (stop - start), [indices[None] for _, indices in self.batches[start:stop]]


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the model's weights and buffers."""
    return {k: v.detach().clone() for k, v in model.state_dict().items()}
