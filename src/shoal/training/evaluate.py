"""Scores of a model in every domain."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shoal.algorithms.base import Loss, full_precision
from shoal.data.batch import MetaBatch, Task, widest
from shoal.data.domains import Domains
from shoal.data.loader import MetaBatchLoader
from shoal.data.sampler import key
from shoal.errors import InputError, unknown_name
from shoal.losses import find_terms
from shoal.models.calling import call
from shoal.training.metrics import METRICS, NONE, Metric, Outcome, default_metric, mean_over_domains
from shoal.training.processes import Processes

MOST_DOMAINS = 5000
"""A sample of a split with more domains than this, and than its limit, is of some of the domains only."""
FEW_DOMAINS = 1000
"""Metrics in each domain are computed of test splits with no more domains."""
SAMPLE = 41  # what a key is for
Rows = dict[str, np.ndarray]
"""What is known of the examples of a split: arrays with a row for each."""


@dataclass(frozen=True)
class Scores:
    """The score of each domain: the mean squared error in regression, in the units of the label, otherwise
    accuracy (over labels).

    ``more`` has further metrics by name; see :mod:`shoal.training.metrics`.
    """

    metric: str
    names: tuple[str, ...]
    values: tuple[float, ...]
    sizes: tuple[int, ...]
    average: float
    """Over examples, each counted once (estimated, if only a sample was scored)."""
    loss: float | None = None
    """The loss of the training: the mean over domains of the mean over their examples."""
    more: Mapping[str, float] = field(default_factory=dict)
    selects: str | None = None
    """The metric in ``more`` that selects steps; ``None``: the mean over domains."""
    higher: bool | None = None
    """Whether higher values of that metric are better."""
    sampled: tuple[int, int] | None = None
    """How many examples of how many were scored, where it was not all of them."""
    by_domain: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    """Metrics in each domain of a test split, by name and domain."""

    @property
    def mean(self) -> float:
        """Over domains, each counted once; see :func:`~shoal.training.metrics.mean_over_domains`."""
        return mean_over_domains(self.metric, self.values)

    @property
    def worst(self) -> float:
        """Of the domains that have an accuracy; an mse is NaN if any output is not finite."""
        if self.metric != "accuracy":
            return float(np.max(self.values))
        return min((v for v in self.values if not math.isnan(v)), default=math.nan)

    @property
    def selection_score(self) -> float:
        """The value that selects steps: the mean over domains, or another metric."""
        return self.mean if self.selects is None else self.more[self.selects]

    def __getitem__(self, name: str) -> float:
        """Of a domain, or else of a metric."""
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
        """Plain data; what is empty is left out."""
        found: dict[str, Any] = {n: getattr(self, n) for n in ("metric", "average", "mean", "loss")}
        found |= {"domains": dict(zip(self.names, self.values, strict=True)), "sizes": list(self.sizes)}
        optional = {
            "metrics": {k: v if math.isfinite(v) else None for k, v in self.more.items()},
            "by_domain": {name: dict(values) for name, values in self.by_domain.items()},
            "selects": self.selects,
            "higher": self.higher,
            "sampled": self.sampled and [*self.sampled],
        }
        return found | {k: v for k, v in optional.items() if v not in (None, {})}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Scores:
        domains, sampled = content["domains"], content.get("sampled")
        return cls(
            names=tuple(domains),
            values=tuple(domains.values()),
            sizes=tuple(content["sizes"]),
            more={k: math.nan if v is None else v for k, v in content.get("metrics", {}).items()},
            sampled=tuple(sampled) if sampled else None,
            by_domain=content.get("by_domain", {}),
            **{k: content.get(k) for k in ("metric", "average", "loss", "selects", "higher")},  # type: ignore[arg-type]
        )


def scored(
    outcome: Outcome,
    kind: str,
    metrics: Iterable[Metric],
    selects: Metric | None,
    sampled: tuple[int, int] | None = None,
    by_domain: bool = False,
) -> Scores:
    """The scores of an outcome, by domain and by every metric; ``by_domain``: also metrics in each domain."""
    metrics, groups = list(metrics), outcome.groups
    each: dict[str, dict[str, float | None]] = {}
    if by_domain and 1 < len(groups) <= FEW_DOMAINS:
        within = [m for m in metrics if m.name in METRICS and m.over_groups is None and m.needs != "loss"]
        each = {m.name: {} for m in within}
        for number, name in enumerate(groups.names):
            which = groups.indices_of(number)
            one = outcome.rows(which, Domains.from_sizes({name: len(which)}))
            for m in within:
                each[m.name][name] = value if math.isfinite(value := m(one)) else None
    return Scores(
        metric=default_metric(kind),
        names=tuple(groups.names),
        values=tuple(outcome.group_points.tolist()),
        sizes=tuple(groups.sizes.tolist()),
        average=outcome.average,
        loss=outcome.loss,
        more={m.name: m(outcome) for m in metrics},
        selects=selects.name if selects else None,
        higher=selects.higher if selects else None,
        sampled=sampled,
        by_domain=each,
    )


@dataclass
class Evaluator:
    """Scores a model in every domain of every split; each example is passed once, whatever domains it is in.

    Args:
        limits: number of examples to score of a split, about equally many of each domain; see :func:`sample`.
        processes: take a share each.
        metrics: metrics to compute besides the default one.
        selects: the metric that selects weights.
        uncounted: groups that are never the worst.
        watch: called before each batch with the split, how many of its examples are done, and their number.
        enter: applied to inputs on the device.
        label_scale: mean and scale by which the label of a regression was standardized; scores are in its own
            units.
    """

    examples: Any
    splits: Mapping[str, Domains]
    task: Task
    loss: Loss | None = None
    batch_size: int = 1024
    workers: int = 0
    limits: Mapping[str, int] | None = None
    processes: Processes = field(default_factory=lambda: Processes("cpu"))
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    metrics: Sequence[Metric] = ()
    selects: Metric | None = None
    uncounted: frozenset[str] = frozenset()
    watch: Callable[[str, int, int], Any] = lambda *_: None
    enter: Callable[[Any], Any] = lambda x: x
    label_scale: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        limits = self.limits or {}
        self.sets = {
            name: _Set.of(sample(d, limits[name]) if name in limits else d, d)
            for name, d in self.splits.items()
        }
        self.which = {name: own.which for name, own in self.sets.items()}
        self.terms = None if self.loss is None else find_terms(self.loss)
        index, count = self.processes.index, self.processes.count
        self.plan = InOrder({name: w[index::count] for name, w in self.which.items()}, self.batch_size)
        self.loader = MetaBatchLoader(
            self.examples,
            self.plan,
            workers=self.workers,
            device=self.processes.device,
            stop=len(self.plan.batches),
            enter=self.enter,
        )

    def __call__(self, model: nn.Module) -> dict[str, Scores]:
        wanted = {m.needs for m in self.metrics} & {"class", "output"}
        wanted |= {"y"} if wanted else set()
        wanted |= {"loss"} if self.loss is not None else set()
        found = self.rows(model, ["points", *sorted(wanted)])
        return {name: self._scores(name, rows) for name, rows in found.items()}

    def rows(self, model: nn.Module, wanted: Sequence[str]) -> dict[str, Rows]:
        """What is wanted of the examples of every split, in order of index.

        Args:
            model: model to evaluate.
            wanted: ``output``, ``y`` (labels), ``class`` (what is predicted: the class, or 0 or 1 for each of
                several labels; in regression the output), and what scores are computed from: ``points`` and
                ``loss``.
        """
        index, count = self.processes.index, self.processes.count
        parts: dict[str, dict[str, list[Tensor]]] = {s: {w: [] for w in wanted} for s in self.sets}
        done = dict.fromkeys(self.sets, 0)
        with torch.inference_mode(), evaluating(model):
            for (split, size), batch in zip(self.plan.batches, self.loader, strict=True):
                own = self.sets[split]
                self.watch(split, done[split] * count, len(own.which))
                domain = own.domain[index::count][done[split] : done[split] + size]
                for what, rows in self._batch_rows(model, batch, domain, wanted).items():
                    parts[split][what].append(rows)
                done[split] += size
            found = {
                s: {w: torch.cat(p).cpu().numpy() for w, p in own.items() if p} for s, own in parts.items()
            }
        return found if count == 1 else self._gathered(found)

    def _gathered(self, found: dict[str, Rows]) -> dict[str, Rows]:
        """The rows of all processes, of which each has every n-th."""
        every: list[Any] = [None] * self.processes.count
        torch.distributed.all_gather_object(every, found)
        for split, first in every[0].items():
            for what, some in first.items():
                whole = np.zeros((len(self.sets[split].which), *some.shape[1:]), some.dtype)
                for index, other in enumerate(every):
                    whole[index :: len(every)] = other[split].get(what, 0)
                first[what] = whole
        result: dict[str, Rows] = every[0]
        return result

    def _batch_rows(
        self, model: nn.Module, batch: MetaBatch, domain: np.ndarray, wanted: Sequence[str]
    ) -> dict[str, Tensor]:
        y, kind, wide = batch.y, self.task.kind, widest(batch.y.device)
        try:
            with self.autocast():
                output = full_precision(call(model, batch.x))
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"{self.batch_size:,} examples per evaluation batch do not fit in memory; set a smaller one.",
                "eval_batch",
            ) from error
        if kind == "regression":
            predicted, score = output, (output - y).square()
        else:
            predicted = ((output > 0) if kind == "multilabel" else output.argmax(1)).int()
            score = predicted == y
        points = score.to(wide).reshape(len(y), -1).mean(1)
        found = {"y": y, "output": output, "class": predicted, "points": points}
        if "loss" in wanted:
            found["loss"] = self._losses(output, batch, domain).to(wide)
        return {what: found[what] for what in wanted}

    def _losses(self, output: Any, batch: MetaBatch, domain: np.ndarray) -> Tensor:
        """(B, 2): the loss of each example and what the mean divides it by.

        Of a loss whose terms are not known, each example gets the loss of those of its domain in the batch.
        """
        if self.terms is not None:
            both = torch.stack([self.terms.sums(output, batch.y), self.terms.counts(batch.y)], 1)
            return both if batch.weight is None else both * batch.weight[:, None]
        assert self.loss is not None
        both = torch.ones(len(batch.y), 2, dtype=widest(batch.y.device), device=batch.y.device)
        for number in np.unique(domain):
            rows = torch.from_numpy(domain == number).to(batch.y.device)
            both[rows, 0] = self.loss(output[rows], batch.y[rows]).to(both.dtype)
        return both

    def _scores(self, name: str, rows: Rows) -> Scores:
        own, loss = self.sets[name], None
        if "loss" in rows:  # sums and what they are divided by, of each domain
            every, starts = rows["loss"][own.groups.indices], own.groups.offsets[:-1]
            sums, counts = np.add.reduceat(every, starts).T
            loss = mean_over_domains("loss", sums[counts > 0] / counts[counts > 0])
        outcome = Outcome(
            y=rows.get("y", NONE),
            groups=own.groups,
            points=rows["points"],
            predicted=rows.get("class", NONE),
            output=rows.get("output", NONE),
            loss=loss,
            uncounted=self.uncounted,
            full_sizes=own.full_sizes,
        ).in_units(*self.label_scale)
        return scored(outcome, self.task.kind, self.metrics, self.selects, own.sampled, name == "test")


class _Set(NamedTuple):
    """The examples of a split that are scored, in the order of their indices."""

    which: np.ndarray
    """Their indices."""
    groups: Domains
    """The domains, as positions among them."""
    domain: np.ndarray
    """The domain of each, or one of its domains."""
    sampled: tuple[int, int] | None = None
    """How many of how many, where it is not all of them."""
    full_sizes: np.ndarray | None = None
    """Number of examples of each domain, where only a sample is scored."""

    @classmethod
    def of(cls, domains: Domains, full: Domains) -> _Set:
        which = domains.examples()
        groups = Domains(domains.names, domains.offsets, np.searchsorted(which, domains.indices))
        domain = np.zeros(len(which), np.int64)
        domain[groups.indices] = np.repeat(np.arange(len(domains)), domains.sizes)
        if domains is full or (every := len(full.examples())) == len(which):
            return cls(which, groups, domain)
        sizes = full.sizes[[full.number(name) for name in domains.names]]
        return cls(which, groups, domain, (len(which), every), sizes)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode within the block; then every module's own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def sample(domains: Domains, limit: int) -> Domains:
    """About ``limit`` examples, equally many from each domain, chosen at random and the same ones every time.

    What is chosen depends on the examples' numbers alone, not on a seed.
    """
    each, numbers = max(1, -(-limit // len(domains))), np.arange(len(domains))
    if len(domains) > (most := max(limit, MOST_DOMAINS)):
        numbers = np.sort(np.argsort(key(SAMPLE, numbers), kind="stable")[:most])
    found = {}
    for number in numbers.tolist():
        own = domains.indices_of(number)
        chosen = np.argsort(key(SAMPLE, own.astype(np.int64)), kind="stable")[:each]
        found[domains.names[number]] = np.sort(own[chosen])
    return Domains.from_indices(found)


class InOrder:
    """Plans each example once, in order, as a sampler plans steps of one batch; none mixes splits."""

    seed = 0
    domains_per_step = 1

    def __init__(self, which: Mapping[str, np.ndarray], size: int) -> None:
        parts = {name: np.split(w, range(size, len(w), size)) for name, w in which.items() if len(w)}
        self.batches = [(name, len(rows)) for name, batches in parts.items() for rows in batches]
        self._rows = [rows.astype(np.int64)[None] for batches in parts.values() for rows in batches]

    def plans(self, start: int, stop: int) -> tuple[None, list[np.ndarray]]:
        return None, self._rows[start:stop]


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the model's weights and buffers."""
    return {k: v.detach().clone() for k, v in model.state_dict().items()}
