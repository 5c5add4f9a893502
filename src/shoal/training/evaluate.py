"""Scores of a model in every domain."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.algorithms.base import Loss, full_precision
from shoal.data.batch import Task
from shoal.data.domains import Domains
from shoal.data.loader import InOrder, MetaBatchLoader
from shoal.errors import InputError, unknown_name
from shoal.losses import find_terms
from shoal.models.calling import call
from shoal.training.metrics import METRICS, Array, Metric, Outcome, default_metric, mean_over_domains
from shoal.training.processes import Processes

MOST_DOMAINS = 5000
"""A sample of a split with more domains than this, and than its limit, is of some of the domains only."""
FEW_DOMAINS = 1000
"""Metrics in each domain are computed of test splits with no more domains."""


@dataclass(frozen=True)
class Scores:
    """The scores of a split: by domain the mean squared error in regression, otherwise accuracy.

    Attributes:
        metric: ``mse`` or ``accuracy``.
        names: names of the domains.
        values: score of each domain.
        sizes: number of examples of each domain.
        average: over examples, each counted once (estimated, if only a sample was scored).
        loss: mean over domains of the mean loss of their examples.
        more: further metrics by name; see :mod:`shoal.training.metrics`.
        selects: metric in ``more`` that selects steps; ``None``: the mean over domains.
        higher: whether higher values of that metric are better.
        sampled: how many examples of how many were scored, where it was not all of them.
        by_domain: metrics in each domain of a test split, by name and domain.
    """

    metric: str
    names: tuple[str, ...]
    values: tuple[float, ...]
    sizes: tuple[int, ...]
    average: float
    loss: float | None = None
    more: Mapping[str, float] = field(default_factory=dict)
    selects: str | None = None
    higher: bool | None = None
    sampled: tuple[int, int] | None = None
    by_domain: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)

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
        names = ("metric", "average", "mean", "loss", "selects", "higher", "sampled", "by_domain")
        found: dict[str, Any] = {name: getattr(self, name) for name in names}
        found |= {"domains": dict(zip(self.names, self.values, strict=True)), "sizes": list(self.sizes)}
        found["sampled"] = list(self.sampled or ()) or None
        found["metrics"] = {k: v if math.isfinite(v) else None for k, v in self.more.items()}
        return {k: v for k, v in found.items() if k == "loss" or v not in (None, {})}

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
    metrics: Iterable[Metric],
    selects: Metric | None,
    sampled: tuple[int, int] | None = None,
    by_domain: bool = False,
) -> Scores:
    """The scores of an outcome, by domain and by every metric; ``by_domain``: also metrics in each domain."""
    metrics, groups = list(metrics), outcome.groups
    each: dict[str, dict[str, float | None]] = {}
    if by_domain and 1 < len(groups) <= FEW_DOMAINS:
        single = {name: outcome.of_group(number) for number, name in enumerate(groups.names)}
        for m in metrics:
            if m.name in METRICS and m.over_groups is None and m.name != "loss":
                values = {name: m(one) for name, one in single.items()}
                each[m.name] = {name: v if math.isfinite(v) else None for name, v in values.items()}
    return Scores(
        metric=default_metric(outcome.kind),
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
    limits: Mapping[str, int] = field(default_factory=dict)
    processes: Processes = field(default_factory=lambda: Processes("cpu"))
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    metrics: Sequence[Metric] = ()
    selects: Metric | None = None
    excluded_groups: frozenset[str] = frozenset()
    watch: Callable[[str, int, int], Any] = lambda *_: None
    enter: Callable[[Any], Any] = lambda x: x
    label_scale: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        limits = self.limits
        self.domains = {n: sample(d, limits[n]) if n in limits else d for n, d in self.splits.items()}
        self.which = {name: domains.examples() for name, domains in self.domains.items()}
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
        """The scores on every split."""
        found = {}
        for name, outcome in self.outcomes(model).items():
            part, whole = len(self.which[name]), len(self.splits[name].examples())
            sampled = (part, whole) if part < whole else None
            found[name] = scored(outcome, self.metrics, self.selects, sampled, by_domain=name == "test")
        return found

    def outcomes(self, model: nn.Module) -> dict[str, Outcome]:
        """The results on the examples of every split, in order of index."""
        parts: dict[str, list[dict[str, Tensor]]] = {split: [] for split in self.splits}
        done, count = dict.fromkeys(self.splits, 0), self.processes.count
        with torch.inference_mode(), evaluating(model):
            for (split, size), batch in zip(self.plan.batches, self.loader, strict=True):
                self.watch(split, done[split] * count, len(self.which[split]))
                weight = {} if batch.weight is None else {"weight": batch.weight}
                parts[split].append({"y": batch.y, "output": self._output(model, batch.x), **weight})
                done[split] += size
            columns = {
                split: {name: torch.cat([b[name] for b in batches]).cpu().numpy() for name in batches[0]}
                for split, batches in parts.items()
                if batches
            }
            return {split: self._outcome(split, own) for split, own in self._gathered(columns).items()}

    def _output(self, model: nn.Module, x: Any) -> Tensor:
        try:
            with self.autocast():
                output: Tensor = full_precision(call(model, x))
                return output
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"{self.batch_size:,} examples per evaluation batch do not fit in memory; set a smaller one.",
                "eval_batch",
            ) from error

    def _gathered(self, own: dict[str, dict[str, Array]]) -> dict[str, dict[str, Array]]:
        """The columns of all processes, of which each has every n-th example."""
        if self.processes.count == 1:
            return own
        every: list[Any] = [None] * self.processes.count
        torch.distributed.all_gather_object(every, own)
        for split, columns in every[0].items():
            for name, column in columns.items():
                whole = np.zeros((len(self.which[split]), *column.shape[1:]), column.dtype)
                for index, other in enumerate(every):
                    if split in other:  # there may be fewer examples than processes
                        whole[index :: len(every)] = other[split][name]
                columns[name] = whole
        found: dict[str, dict[str, Array]] = every[0]
        return found

    def _outcome(self, split: str, columns: Mapping[str, Array]) -> Outcome:
        domains, full = self.domains[split], self.splits[split]
        places = np.searchsorted(self.which[split], domains.indices)
        groups = Domains(domains.names, domains.offsets, places)
        sizes = None if domains is full else full.sizes[[full.number(name) for name in domains.names]]
        loss = self._loss(groups, **columns)
        y, output = columns["y"], columns["output"]
        outcome = Outcome(y, output, groups, self.task.kind, loss, self.excluded_groups, sizes)
        return outcome.in_units(*self.label_scale)

    def _loss(self, groups: Domains, y: Array, output: Array, weight: Array | None = None) -> float | None:
        """The mean over domains of the loss on their examples."""
        if self.loss is None:
            return None
        device = self.processes.device  # that of class weights, too
        outputs, labels = torch.from_numpy(output).to(device), torch.from_numpy(y).to(device)
        if (terms := find_terms(self.loss)) is None:
            rows = [groups.indices_of(number) for number in range(len(groups))]
            return mean_over_domains("loss", [float(self.loss(outputs[own], labels[own])) for own in rows])
        each = torch.stack([terms.sums(outputs, labels), terms.counts(labels)], 1).cpu().double().numpy()
        each = each if weight is None else each * weight[:, None]
        sums, counts = np.add.reduceat(each[groups.indices], groups.offsets[:-1]).T
        return mean_over_domains("loss", sums[counts > 0] / counts[counts > 0])


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

    Domains choose by the same random order of all examples, so that they share what they can.
    """
    draw, each = np.random.default_rng(0), max(1, -(-limit // len(domains)))
    place = draw.permutation(int(domains.indices.max()) + 1)
    numbers = np.sort(draw.permutation(len(domains))[: max(limit, MOST_DOMAINS)])
    found = {}
    for number in numbers.tolist():
        own = domains.indices_of(number)
        found[domains.names[number]] = np.sort(own[np.argsort(place[own], kind="stable")[:each]])
    return Domains.from_indices(found)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the model's weights and buffers."""
    return {k: v.detach().clone() for k, v in model.state_dict().items()}
