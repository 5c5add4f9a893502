"""The results of a diagnosis, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Domain:
    """A domain, its examples in the sample, and its labels: shares of classes, or mean and deviation."""

    name: str
    size: int
    taken: int
    labels: Mapping[str, float]


@dataclass(frozen=True)
class Question:
    """One test: what was ``found``, and its mean (``chance``) and ``deviation`` under the null hypothesis."""

    name: str
    measure: str
    found: float
    chance: float
    deviation: float
    p: float
    adjusted: float = 1.0
    """p after Holm's correction over all questions."""
    alarm: bool = False


@dataclass(frozen=True)
class Gap:
    """ERM's generalization gap in a domain: its score with the domain in training less that without.

    Accuracy, or the squared error in units of the labels' variance. ``low`` to ``high`` is a 95 % interval.
    """

    name: str
    in_domain: float
    held_out: float
    gap: float
    low: float
    high: float


@dataclass(frozen=True)
class Column:
    """A column of the inputs: whether its distribution and its relation to the label differ by domain."""

    name: str
    share: float
    """Of its variance, between domains."""
    p: float
    differs: bool
    how: Mapping[str, Any]
    """Where it differs most: the ``domain``, what (``part``), its value ``there`` and ``elsewhere``."""
    relation_p: float
    changes: bool
    flips: bool
    """Whether its correlation with the label is significantly positive and negative in some domain each."""
    label: str
    """The class that ``correlations`` are with; empty in regression."""
    correlations: Mapping[str, float]


@dataclass(frozen=True)
class Agreement:
    """Cosines between the domains' gradients, and which domains agree with the others less than chance."""

    matrix: tuple[tuple[float, ...], ...]
    mean: float
    by_chance: float
    lowest: str
    """The domain with the lowest mean cosine with the others, and that cosine."""
    cosine: float
    pair: tuple[str, str]
    pair_cosine: float
    conflicting: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """The results of a diagnosis as plain data; :mod:`shoal.report.diagnose` formats them.

    Attributes:
        task: ``classification`` or ``regression``.
        table: whether columns have names, so that they can be dropped by name.
        domains: size and labels of each domain.
        too_small: domains that are too small to test, with their sizes.
        not_drawn: number of domains that were large enough but not sampled.
        examples: number of examples sampled.
        examples_in_all: number of all examples.
        overlapping: number of examples in several domains; each is counted in the smallest of them.
        questions: the tests.
        effects: effect sizes.
        columns: differences per column.
        confusion: for each domain, the fraction of its examples that the classifier assigns to each domain.
        gaps: generalization gap of ERM per domain.
        average: average generalization gap.
        gradients: gradient agreement at the start and after training.
        reduced: what was reduced to meet the time budget.
        settings: options of the diagnosis.
        seconds: duration.
    """

    task: str
    table: bool
    """Whether columns have names, so that they can be dropped by name."""
    domains: tuple[Domain, ...]
    too_small: Mapping[str, int]
    not_drawn: int
    """Domains that were large enough but not drawn."""
    examples: int
    examples_in_all: int
    overlapping: int
    """Examples in several domains; each counts in the smallest of them."""
    questions: tuple[Question, ...]
    effects: Mapping[str, float]
    columns: tuple[Column, ...]
    confusion: tuple[tuple[float, ...], ...]
    """For each domain, the share of its examples that the probe assigns to each."""
    gaps: tuple[Gap, ...]
    average: Gap
    gradients: Mapping[str, Agreement]
    reduced: tuple[str, ...] = ()
    """What was cut down to keep to the budget."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def alarms(self) -> tuple[str, ...]:
        """The tests that are significant after correction."""
        return tuple(q.name for q in self.questions if q.alarm)

    def __getitem__(self, question: str) -> Question:
        return next(q for q in self.questions if q.name == question)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {**asdict(self), "alarms": list(self.alarms)}
