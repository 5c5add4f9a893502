"""How well a model does in every domain."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.algorithms.base import Loss, full_precision
from shoal.data.batch import Task, cut, known_labels, widest
from shoal.data.domains import Domains
from shoal.data.loader import MetaBatchLoader
from shoal.data.sampler import key
from shoal.errors import unknown_name
from shoal.losses import find_terms
from shoal.models.calling import call
from shoal.training.metrics import METRICS, NONE, Metric, Outcome, mean_over_domains, usual
from shoal.training.processes import Processes

MOST_DOMAINS = 5000
"""A sample of a split with more domains than this, and than its limit, is of some of the domains only."""
FEW_DOMAINS = 1000
"""A test split with more is not measured in each of them."""
ROOM = 10
"""Examples per class in a domain's sample from which on every class is in it."""
SAMPLE = 41  # what a key is for
Kept = dict[str, dict[str, np.ndarray]]
Passed = tuple[dict[str, Tensor], dict[str, Tensor], Kept]
Watch = Callable[[str, int, int], None]
"""Told between batches which split is evaluated, how many of its examples are done, and of how many."""


@dataclass(frozen=True)
class Scores:
    """The score of each domain: the mean squared error in regression, in the units of the label, otherwise
    accuracy (over labels or positions).

    ``more`` has further metrics by name; see :mod:`shoal.training.metrics`.
    """

    metric: str
    names: tuple[str, ...]
    values: tuple[float, ...]
    sizes: tuple[int, ...]
    average: float
    """Over examples, each counted once."""
    loss: float | None = None
    """The training's loss, a mean over examples, with their weights where they have some."""
    more: Mapping[str, float] = field(default_factory=dict)
    selects: str | None = None
    """The metric in ``more`` that selects steps; ``None``: the mean over domains."""
    higher: bool | None = None
    """Whether higher values of that metric are better."""
    sampled: tuple[int, int] | None = None
    """How many examples of how many were scored, where it was not all of them."""
    by_domain: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    """Of a test split with a few domains: what of ``more`` is in each, by name and domain."""

    @property
    def mean(self) -> float:
        """Over domains, each counted once; see :func:`~shoal.training.metrics.mean_over_domains`."""
        return mean_over_domains(self.metric, self.values)

    @property
    def worst(self) -> float:
        """Of the domains that have a score."""
        known = [v for v in self.values if not math.isnan(v)]
        return (min if self.metric == "accuracy" else max)(known, default=math.nan)

    @property
    def selection_score(self) -> float:
        """The value that selects steps: the mean over domains, or another metric."""
        return self.mean if self.selects is None else self.more[self.selects]

    def __getitem__(self, name: str) -> float:
        """Of a domain, or else what was measured under this name."""
        if name in self.names:
            return self.values[self.names.index(name)]
        if name in self.more:
            return self.more[name]
        raise unknown_name("domain", name, self.names)

    def better_than(self, other: Scores) -> bool:
        """By the selection score; a NaN is never better, and anything is better than it."""
        mine, theirs = self.selection_score, other.selection_score
        if math.isnan(mine) or math.isnan(theirs):
            return math.isnan(theirs) and not math.isnan(mine)
        higher = self.metric == "accuracy" if self.higher is None else self.higher
        return mine > theirs if higher else mine < theirs

    def to_dict(self) -> dict[str, Any]:
        """Plain data; without other measures the same as before there were any."""
        found = {name: getattr(self, name) for name in ("metric", "average", "mean", "loss")}
        found |= {"domains": dict(zip(self.names, self.values, strict=True)), "sizes": list(self.sizes)}
        if self.more:
            found["metrics"] = {k: v if math.isfinite(v) else None for k, v in self.more.items()}
        if self.selects is not None:
            found |= {"selects": self.selects, "higher": self.higher}
        if self.sampled is not None:
            found["sampled"] = list(self.sampled)
        if self.by_domain:
            found["by_domain"] = {name: dict(values) for name, values in self.by_domain.items()}
        return found

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Scores:
        domains = content["domains"]
        more = {k: math.nan if v is None else v for k, v in content.get("metrics", {}).items()}
        sampled = tuple(content["sampled"]) if "sampled" in content else None
        same: dict[str, Any] = {k: content.get(k) for k in ("metric", "average", "loss", "selects", "higher")}
        same |= {"more": more, "sampled": sampled, "by_domain": content.get("by_domain", {})}
        sizes, values = tuple(content["sizes"]), tuple(domains.values())
        return cls(names=tuple(domains), values=values, sizes=sizes, **same)


def scored(
    outcome: Outcome,
    kind: str,
    metrics: Iterable[Metric],
    selects: Metric | None,
    sampled: tuple[int, int] | None = None,
    by_domain: bool = False,
) -> Scores:
    """What came out, by group and as each metric sees it; ``by_domain``: also in each of a few domains."""
    metrics, domains = list(metrics), len(outcome.groups)
    return Scores(
        metric=usual(kind),
        names=tuple(outcome.groups.names),
        values=tuple(outcome.group_points.tolist()),
        sizes=tuple(outcome.groups.sizes.tolist()),
        average=outcome.average,
        loss=outcome.loss,
        more={m.name: m(outcome) for m in metrics},
        selects=selects.name if selects else None,
        higher=selects.higher if selects else None,
        sampled=sampled,
        by_domain=each_domain(outcome, metrics) if by_domain and 1 < domains <= FEW_DOMAINS else {},
    )


def each_domain(outcome: Outcome, metrics: Iterable[Metric]) -> dict[str, dict[str, float | None]]:
    """Each metric in each domain, ``None`` where it is undefined; without those that are of groups."""
    metrics = [m for m in metrics if m.name in METRICS and m.by_group is None and m.needs != "loss"]
    found: dict[str, dict[str, float | None]] = {m.name: {} for m in metrics}
    for number, name in enumerate(outcome.groups.names):
        which = outcome.groups.indices_of(number)
        parts: dict[str, Any] = {"groups": Domains([name], np.array([0, len(which)]), np.arange(len(which)))}
        for part in ("y", "points", "predicted", "output", "sizes", "counts"):
            if (values := getattr(outcome, part)) is not None and len(values):
                parts[part] = values[which]
        one = outcome._replace(**parts)
        for metric in metrics:
            found[metric.name][str(name)] = value if math.isfinite(value := metric(one)) else None
    return found


class Evaluator:
    """Scores a model in every domain of every split; each example is passed once, whatever domains it is in.

    ``limits`` scores about so many examples of a split, evenly over its domains (see :func:`sample`).
    Several ``processes`` take a share each. ``watch`` is called before each batch, in every process equally
    often, and may raise to abandon the evaluation. A batch that does not fit in memory is taken in pieces.
    ``selects`` is the one of ``metrics`` that selects weights; groups in ``uncounted`` are never the worst.
    ``enter`` is applied to inputs on the device. ``label_scale`` is the mean and scale by which the label of
    a regression was standardized; scores are in its own units.
    """

    def __init__(
        self,
        examples: Any,
        splits: Mapping[str, Domains],
        *,
        task: Task,
        loss: Loss | None = None,
        batch_size: int = 1024,
        workers: int = 0,
        limits: Mapping[str, int] | None = None,
        processes: Processes | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        metrics: Sequence[Metric] = (),
        selects: Metric | None = None,
        uncounted: frozenset[str] = frozenset(),
        watch: Watch | None = None,
        enter: Callable[[Any], Any] | None = None,
        label_scale: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        self.label_scale = label_scale
        self.metrics, self.selects, self.uncounted = metrics, selects, uncounted
        self.truth: dict[str, np.ndarray] = {}
        self.watch, self.pieces = watch, 1
        limits = limits or {}
        labels = class_labels(examples) if limits and task.is_classification else None
        self.splits = {n: sample(d, limits[n], labels) if n in limits else d for n, d in splits.items()}
        self.task, self.loss, self.autocast = task, loss, autocast
        terms = None if loss is None else find_terms(loss)
        self.terms, self.ignored = terms, terms.ignore_index if terms else None
        self.processes = processes or Processes("cpu")
        index, count = self.processes.index, self.processes.count
        self.which = {name: domains.examples() for name, domains in self.splits.items()}
        every = {n: len(splits[n].examples()) if n in limits else len(w) for n, w in self.which.items()}
        self.sampled = {n: (len(w), every[n]) for n, w in self.which.items() if len(w) < every[n]}
        order: Any = _InOrder({name: w[index::count] for name, w in self.which.items()}, batch_size)
        self.order = order
        # The first process has the most batches; the others wait for it in as many calls of ``watch``.
        self.rounds = sum(-(-len(w[::count]) // batch_size) for w in self.which.values())
        self.loader = MetaBatchLoader(
            examples,
            order,
            workers=workers,
            device=self.processes.device,
            stop=len(order.batches),
            enter=enter,
        )

    @cached_property
    def groups(self) -> dict[str, Domains]:
        """Of every split: its domains as places among its examples."""
        return {
            name: Domains(domains.names, domains.offsets, np.searchsorted(self.which[name], domains.indices))
            for name, domains in self.splits.items()
        }

    def __call__(self, model: nn.Module) -> dict[str, Scores]:
        wanted: set[str] = {m.needs for m in self.metrics if m.needs in ("class", "output", "counts")}
        if wanted - {"counts"} and not self.truth:
            wanted.add("y")
        if self.ignored is not None:
            wanted.add("sizes")
        points, losses, kept = self._pass(model, sorted(wanted))
        self.truth |= kept.get("y", {})
        return {name: self._scores(name, points[name], losses[name], kept) for name in self.splits}

    def predict(self, model: nn.Module) -> dict[str, np.ndarray]:
        """For every split what is predicted of each example, in order of index.

        That is the class, or one for each position; 0 or 1 for each of several labels; in regression the
        output.
        """
        what = "output" if self.task.kind == "regression" else "class"
        return self._pass(model, [what])[2][what]

    def _pass(self, model: nn.Module, wanted: Sequence[str]) -> Passed:
        modes = [(module, module.training) for module in model.modules()]
        training = model.training
        model.eval()
        try:
            with torch.inference_mode():
                return self._passed(model, wanted)
        finally:
            model.train(training)
            for module, mode in modes:  # one part may be trained and the rest not
                module.training = mode

    def _passed(self, model: nn.Module, wanted: Sequence[str]) -> Passed:
        """For every split one number an example, the sum of the losses, and what else is wanted."""
        device, index, count = self.processes.device, self.processes.index, self.processes.count
        points = {n: torch.zeros(len(w), device=device) for n, w in self.which.items()}
        losses = {n: torch.zeros(2, dtype=widest(device), device=device) for n in self.which}
        kept: dict[str, dict[str, Tensor]] = {what: {} for what in wanted}
        at = dict.fromkeys(self.which, 0)
        for (split, indices), batch in zip(self.order.batches, self.loader, strict=True):
            self._tell(split, at)
            output, y = self._output(model, batch.x, len(indices)), batch.y
            losses[split] += self._loss(output, y, batch.weight)
            own = points[split][index::count]  # a view
            here = slice(at[split], at[split] + len(indices))
            own[here] = self._points(output, y)
            for what in wanted:
                part = self._part(what, output, y)
                if split not in kept[what]:
                    kept[what][split] = part.new_zeros(len(self.which[split]), *part.shape[1:])
                kept[what][split][index::count][here] = part
            at[split] += len(indices)
        for _ in range(self.rounds - len(self.order.batches)):
            self._tell(list(self.which)[-1], at)
        together = self.processes.sum([*points.values(), *losses.values()])
        names = list(self.which)
        return (
            dict(zip(names, together, strict=False)),
            dict(zip(names, together[len(names) :], strict=True)),
            self._gathered(kept),
        )

    def _loss(self, output: Any, y: Tensor, weight: Tensor | None) -> Tensor:
        """The sum of the examples' losses, and what the mean divides it by."""
        place: dict[str, Any] = {"dtype": widest(y.device), "device": y.device}
        if self.loss is None:
            return torch.zeros(2, **place)
        if self.terms is None or (self.terms.plain and weight is None):
            # torch.tensor would copy the number to the device, and wait for it there.
            count = torch.full((), len(y), **place)
            return torch.stack([self.loss(output, y).to(**place) * count, count])
        sums, counts = self.terms.sums(output, y).to(**place), self.terms.counts(y).to(**place)
        if weight is not None:
            sums, counts = sums * weight, counts * weight
        return torch.stack([sums.sum(), counts.sum()])

    def _points(self, output: Any, y: Tensor) -> Tensor:
        """One number an example."""
        score = (output - y).square() if self.task.kind == "regression" else self._class(output) == y
        score = score.float().reshape(len(y), -1)
        if self.ignored is None:
            return score.mean(1)
        counted = y.ne(self.ignored).reshape(len(y), -1)
        return (score * counted).sum(1) / counted.sum(1).clamp(min=1)

    def _class(self, output: Tensor) -> Tensor:
        """The predicted classes; in the multi-label task 1 for each label whose logit is positive."""
        return (output > 0).int() if self.task.kind == "multilabel" else output.argmax(1).int()

    def _part(self, what: str, output: Any, y: Tensor) -> Tensor:
        """What is to be kept of a batch."""
        if what == "sizes":
            return y.ne(self.ignored or 0).reshape(len(y), -1).sum(1)
        if what == "counts":
            return self._counts(self._class(output), y)
        return y if what == "y" else output if what == "output" else self._class(output)

    def _counts(self, predicted: Tensor, y: Tensor) -> Tensor:
        """(B, 3, classes): positions that were right, true and predicted in each class."""
        classes = self.task.classes or 0
        counted = torch.ones_like(y, dtype=torch.bool) if self.ignored is None else y != self.ignored
        true, claimed = y.where(counted, classes), predicted.long().where(counted, classes)
        right = true.where(true == claimed, classes)
        found = y.new_zeros(len(y), 3, classes + 1, dtype=torch.int64)
        for n, which in enumerate((right, true, claimed)):
            flat = which.long().reshape(len(y), -1)
            found[:, n].scatter_add_(1, flat, torch.ones_like(flat))
        return found[:, :, :classes]

    def _tell(self, split: str, at: Mapping[str, int]) -> None:
        if self.watch is not None:
            total = len(self.which[split])
            self.watch(split, min(at[split] * self.processes.count, total), total)

    def _output(self, model: nn.Module, x: Any, count: int) -> Any:
        """What the model makes of ``count`` examples, in as many pieces as memory asks for."""
        while True:
            size = -(-count // self.pieces)
            try:
                with self.autocast():
                    if size == count:
                        return full_precision(call(model, x))
                    parts = [call(model, cut(x, slice(a, a + size))) for a in range(0, count, size)]
                return full_precision(torch.cat(parts))
            except RuntimeError as error:
                if size == 1 or not _out_of_memory(error):
                    raise
            # After the handler: the error's traceback holds what did not fit.
            if self.pieces == 1:
                warnings.warn(
                    f"{size:,} examples per evaluation batch do not fit in memory; they are taken in pieces. "
                    "A smaller eval_batch avoids this.",
                    stacklevel=2,
                )
            self.pieces *= 2
            if self.processes.device.type == "cuda":
                torch.cuda.empty_cache()

    def _gathered(self, kept: dict[str, dict[str, Tensor]]) -> Kept:
        """Each process has filled its own places; one without an example is told how wide they are."""
        names = list(self.which)
        if kept and self.processes.count > 1:
            shapes = {w: {n: (t.shape[1:], t.dtype) for n, t in by.items()} for w, by in kept.items()}
            for what, by_split in self.processes.broadcast(shapes).items():
                for name, (shape, kind) in by_split.items():
                    size = (len(self.which[name]), *shape)
                    kept[what].setdefault(name, torch.zeros(size, dtype=kind, device=self.processes.device))
        flat = self.processes.sum([kept[what][name] for what in kept for name in names])
        arrays = iter(flat)
        return {what: {name: next(arrays).cpu().numpy() for name in names} for what in kept}

    def _scores(self, name: str, points: Tensor, loss: Tensor, kept: Kept) -> Scores:
        values = points.cpu().double().numpy()
        sizes = kept["sizes"][name] if "sizes" in kept else None
        if sizes is not None and sizes.min() == sizes.max() > 0:
            sizes = None
        outcome = Outcome(
            y=self.truth.get(name, NONE),
            groups=self.groups[name],
            points=values,
            predicted=kept.get("class", {}).get(name, NONE),
            output=kept.get("output", {}).get(name, NONE),
            loss=None if self.loss is None else _ratio(*loss.tolist()),
            uncounted=self.uncounted,
            sizes=sizes,
            counts=kept.get("counts", {}).get(name, NONE),
        )
        outcome = outcome.in_units(*self.label_scale)
        sampled, test = self.sampled.get(name), name == "test"
        return scored(outcome, self.task.kind, self.metrics, self.selects, sampled, by_domain=test)


def _ratio(total: float, whole: float) -> float:
    return total / whole if whole else math.nan


def _out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def class_labels(examples: Any) -> np.ndarray | None:
    """The class of every example, −1 where it is unknown; ``None`` where none is known without reading."""
    labels = known_labels(examples)
    return labels if labels is not None and labels.dtype.kind in "iu" and labels.ndim == 1 else None


def sample(domains: Domains, limit: int, labels: np.ndarray | None = None) -> Domains:
    """About ``limit`` examples, equally many from each domain, chosen at random and the same ones every time.

    What is chosen depends on the examples' numbers alone, not on a seed. Each class gets its share of a
    domain's sample: the r-th of its c examples, in random order, is at (r + u)/c with a random u in [0, 1),
    and the first ones are taken. So the expected number is right for any class, and the actual one is off by
    less than one or so. Where there are ten examples or more per class, every class is in the sample.
    """
    count, entries = len(domains), domains.indices.astype(np.int64)
    each = max(1, -(-limit // count))
    domain = np.repeat(np.arange(count), domains.sizes)
    label = np.zeros(len(entries), np.int64) if labels is None else labels[entries].astype(np.int64)
    chance = key(SAMPLE, entries)
    order = np.lexsort((chance, label, domain))
    new = np.ones(len(order), bool)
    new[1:] = (np.diff(domain[order]) != 0) | (np.diff(label[order]) != 0)
    stratum = np.cumsum(new) - 1
    starts = np.flatnonzero(new)
    sizes = np.diff(np.append(starts, len(order)))
    rank = np.arange(len(order)) - starts[stratum]
    offset = key(SAMPLE, domain[order][starts], label[order][starts]) / 2.0**64
    place = (rank + offset[stratum]) / sizes[stratum]
    classes = np.bincount(domain[order][starts], minlength=count)
    place[(rank == 0) & (ROOM * classes <= each)[domain[order]]] = -1.0
    taken = np.lexsort((chance[order], place, domain[order]))  # domains stay where they are
    first = np.arange(len(order)) - domains.offsets[domain[order]] < each
    keep = np.zeros(len(order), bool)
    keep[order[taken[first]]] = True
    if count > max(limit, MOST_DOMAINS):
        chosen = np.argsort(key(SAMPLE, np.arange(count)), kind="stable")[: max(limit, MOST_DOMAINS)]
        keep &= np.isin(domain, chosen)
    return domains.filter(keep)


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

    def plans(self, start: int, stop: int) -> tuple[None, list[np.ndarray]]:
        return None, [indices[None] for _, indices in self.batches[start:stop]]


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the model's weights and buffers."""
    return {k: v.detach().clone() for k, v in model.state_dict().items()}
