"""Which row of a comparison to use: the rule, as a pure function of rows, and the score expected of it.

A row has the scores of an algorithm in each held-out domain, see :func:`shoal.experiments.compare.results`.
Seeds are averaged within each domain; differences are paired by domain, and domains of one fold are not
independent, for they share their models.

**The rule.** Of the rows that beat the majority class on average, the simplest is used, unless another one
beats it by *more than chance*: a paired t test, one-sided at 10 % for the whole table (Bonferroni: at 10 %
divided by the number of other rows). Then the simplest row is used that itself beats the simplest of all by
more than chance, that no simpler row beats on average, and that none beats by more than chance; if there is
no such row, the one with the best average. The result must also beat the majority class: one-sided at 5 %.

**The expected score** is halfway between the row's average, which is too high since the best was selected on
the same domains, and the cross-fitted score, which is too low since fewer domains miss more differences: the
rule is applied without one fold, and the row that it finds is scored on that fold, for every fold in turn.
``benchmarks/recommendation.py`` simulates the rule.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from shoal.experiments import baselines
from shoal.experiments.statistics import codes_of, mean_interval, t_limit

BASELINE = "erm"
COMPLEXITY = (
    (baselines.LOGISTIC, baselines.RIDGE),
    (baselines.BOOSTING,),
    (BASELINE,),
    ("reweighted", "erm-by-domain", "swad", "lp-ft"),
    ("mixup", "erm++", "miro", "auto"),
)
"""From simple to complex; every other algorithm comes last."""
LEVEL, POWER = 0.95, 0.8
CHANCE, CHANCE_OF_MAJORITY = 0.1, 0.05
"""One-sided levels: for all rows of a table together, and against the majority class."""
SHARES = ("accuracy", "AUC", "F1", "recall", "IoU", "precision", "match")
"""Endings of metrics between 0 and 1, where intervals end."""
LEAST_DOMAINS, MOST_DOMAINS = 3, 1000
"""With fewer domains or folds there is neither an interval nor a recommendation; no more are suggested."""

Row = Mapping[str, Any]
Array = NDArray[Any]


@dataclass(frozen=True)
class Difference:
    """The mean difference to another row over held-out domains, with its 95 % interval."""

    to: str
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Recommendation:
    """What a comparison recommends; all numbers are in units of the metric.

    Attributes:
        row: row to use; ``None`` where none can be recommended. The numbers are then those of ``nearest``.
        state: ``use``; ``tied``: other rows, none of them simpler, cannot be told apart from ``row``;
            ``majority``: no row is shown to beat a constant prediction; ``few``: too few domains or folds.
        nearest: ``row``, or the row that would come first if it could be recommended.
        simplest: simplest row that beats the majority class on average.
        tied: rows that cannot be told apart from ``nearest``, the simplest first.
        rows: number of rows without controls.
        domains: number of held-out domains.
        folds: number of independent folds of domains.
        average: average score over held-out domains.
        expected: expected score in a new domain, corrected for the selection of the row.
        mean: 95 % interval of the expected score.
        new_domain: 95 % prediction interval of the score of one model in one new domain.
        majority: difference to the majority class.
        reference: difference to ERM; that of ERM is to the simplest row.
        alternative: difference to the best other row.
        detectable: size of a difference between two rows that is told apart with 80 % power.
        domains_needed: number of domains with which ``alternative`` is told apart with 80 % power; ``None``
            where it is already, or where over 1,000 are needed.
    """

    row: str | None
    state: Literal["use", "tied", "majority", "few"]
    nearest: str
    simplest: str
    tied: tuple[str, ...]
    rows: int
    domains: int
    folds: int
    average: float
    expected: float
    mean: tuple[float, float] | None = None
    new_domain: tuple[float, float] | None = None
    majority: Difference | None = None
    reference: Difference | None = None
    alternative: Difference | None = None
    detectable: float | None = None
    domains_needed: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recommendation:
        """Return the object of :meth:`to_dict`, or of JSON."""
        return TypeAdapter(cls).validate_python(values)


def rounded(value: float) -> float:
    """To twelve digits: averages of the same scores are equal, whatever the order of the sum."""
    return float(f"{value:.12g}")


def complexity(name: str) -> int:
    """The place in :data:`COMPLEXITY`."""
    return next((n for n, names in enumerate(COMPLEXITY) if name in names), len(COMPLEXITY))


def over_domains(one: Row, other: Row) -> dict[str, Any] | None:
    """The difference ``one`` − ``other`` in each domain, and its mean with a 95 % interval; ``None`` where a
    case has no score. Of more seeds than the other row has, the first are used.

    ``low`` and ``high`` are ``None`` with fewer than three folds.
    """
    seeds = min(len(domain["values"]) for row in (one, other) for domain in row["domains"].values())
    first, second = _domain_means(one, seeds), _domain_means(other, seeds)
    if not first.keys() <= second.keys() or None in (*first.values(), *second.values()):
        return None
    values = {name: a - second[name] for name, a in first.items()}  # type: ignore[operator]
    interval, folds = mean_interval([*values.values()], _folds(one), LEVEL), len(set(_folds(one)))
    ends = {name: getattr(interval, name) for name in ("low", "high", "se")}
    ends = ends if folds >= LEAST_DOMAINS else dict.fromkeys(ends)
    return {"values": values, "mean": interval.mean, **ends, "level": LEVEL}


def _domain_means(row: Row, seeds: int | None = None) -> dict[str, float | None]:
    every = {name: domain["values"][:seeds] for name, domain in row["domains"].items()}
    return {name: None if None in values else statistics.fmean(values) for name, values in every.items()}


def _folds(row: Row) -> list[str]:
    return [str(domain.get("fold", name)) for name, domain in row["domains"].items()]


@dataclass(frozen=True)
class Scores:
    """The scores of rows on held-out domains, higher is better, as :func:`choose` takes them."""

    values: Array
    """(rows, domains)."""
    folds: NDArray[np.int64]
    """(domains,): the fold of each, numbered from 0."""
    complexity: NDArray[np.int64]
    """(rows,)."""
    tried: int
    """Number of rows, with those that left a race."""
    majority: Array | None = None
    """(domains,): the scores of a constant prediction."""

    @property
    def count(self) -> int:
        """Number of folds."""
        return int(self.folds.max()) + 1

    def without(self, fold: int) -> Scores:
        kept = self.folds != fold
        majority = None if self.majority is None else self.majority[kept]
        folds = self.folds[kept] - (self.folds[kept] > fold)
        return Scores(self.values[:, kept], folds, self.complexity, self.tried, majority)

    def differences(self) -> tuple[Array, Array]:
        """The mean difference of each row to each other one and its standard error, as in
        :func:`~shoal.experiments.statistics.mean_interval`."""
        means = self.values.mean(1)
        sums = (self.values - means[:, None]) @ np.eye(self.count)[self.folds]
        squares = ((sums[:, None] - sums[None]) ** 2).sum(-1) * self.count / max(self.count - 1, 1)
        return np.round(means[:, None] - means, 12), np.sqrt(squares) / self.values.shape[1]

    def limit(self, folds: int) -> float:
        """The t statistic that differences to the other rows exceed by chance, in one table of ten."""
        return t_limit(1 - 2 * CHANCE / max(self.tried - 1, 1), folds - 1)

    def detectable(self, folds: int) -> float:
        """The difference that exceeds :meth:`limit` with 80 % power, in standard errors."""
        return self.limit(folds) + t_limit(2 * POWER - 1, folds - 1)

    def useful(self) -> NDArray[np.bool_]:
        """(rows,): whether they beat the majority class on average."""
        if self.majority is None:
            return np.ones(len(self.values), bool)
        return np.round((self.values - self.majority).mean(1), 12) > 0

    def simplest_first(self) -> list[int]:
        """Numbers of rows, of equally complex ones the better first."""
        return [int(n) for n in np.lexsort((-np.round(self.values.mean(1), 12), self.complexity))]


def choose(scores: Scores) -> int | None:
    """The number of the row to use by the rule; ``None`` where none beats the majority class on average."""
    gap, se = scores.differences()
    beats = gap > scores.limit(scores.count) * se
    simpler = scores.complexity[:, None] < scores.complexity
    behind, useful = np.any((gap > 0) & simpler, axis=0), scores.useful()
    order = [row for row in scores.simplest_first() if useful[row]]
    if not order:
        return None
    first = order[0]
    for row in order:
        if not behind[row] and not beats[:, row].any() and (row == first or beats[row, first]):
            return row
    return max([row for row in order if not behind[row]] or [first], key=lambda r: gap[r, 0])


def cross_fitted(scores: Scores, row: int) -> Array:
    """The score in each domain of the row that is chosen without its fold; of ``row`` if none is."""
    values = np.empty(len(scores.folds))
    for fold in range(scores.count):
        found, held_out = choose(scores.without(fold)), scores.folds == fold
        values[held_out] = scores.values[row if found is None else found, held_out]
    return values


def recommendation(rows: Sequence[Row], lower: bool) -> Recommendation | None:
    """Apply the rule to the rows of a comparison; ``None`` where no row has all its scores.

    Args:
        rows: rows with ``algorithm``, ``control`` (never recommended), ``rank`` (``None`` where scores are
            missing) and ``domains``; in a race also ``left``, see :func:`leaving`: these rows only count.
        lower: whether lower scores are better.
    """
    usable = [row for row in rows if row["rank"] is not None and not row["control"]]
    if not usable:
        return None
    scores, sign = _scores(usable, rows, lower), -1.0 if lower else 1.0
    names, means, useful = [row["algorithm"] for row in usable], scores.values.mean(1), scores.useful()
    order = sorted(scores.simplest_first(), key=lambda n: not useful[n])
    few = scores.count < LEAST_DOMAINS
    chosen = None if few else choose(scores)
    row = order[0] if chosen is None else chosen
    fields: dict[str, Any] = {"nearest": names[row], "simplest": names[order[0]], "rows": scores.tried}
    fields |= {"domains": len(scores.folds), "folds": scores.count, "average": sign * float(means[row])}
    if few:
        return Recommendation(None, "few", tied=(), expected=fields["average"], **fields)

    def difference(to: Row) -> Difference | None:
        found = over_domains(usable[row], to)
        return found and Difference(to["algorithm"], found["mean"], found["low"], found["high"])  # type: ignore[return-value]

    gap, se = scores.differences()
    limit, state = scores.limit(scores.count), "use"
    if scores.majority is not None:
        fields["majority"] = difference(_constant(rows)[0])
        gain = mean_interval(scores.values[row] - scores.majority, scores.folds)
        needed = t_limit(1 - 2 * CHANCE_OF_MAJORITY, scores.count - 1) * (gain.se or 0.0)
        state = "use" if rounded(gain.mean) > needed else "majority"
    expected = sign * (float(means[row]) - _optimism(usable[row], rows, lower) / 2)
    share = str((usable[row].get("average") or {}).get("metric")).endswith(SHARES)
    lowest, highest = 0.0 if lower or share else -math.inf, 1.0 if share else math.inf
    for name, reach in zip(("mean", "new_domain"), _reaches(usable[row], scores, row), strict=True):
        fields[name] = max(expected - reach, lowest), min(expected + reach, highest)
    others = [each for each in rows if each["algorithm"] != names[row] and not each["control"]]
    if others:  # ERM; for ERM the simplest other one
        erm = [each for each in others if each["algorithm"] == BASELINE]
        fields["reference"] = difference(min(erm or others, key=lambda each: complexity(each["algorithm"])))
    if rivals := [n for n in range(len(usable)) if n != row]:
        best = max(rivals, key=lambda n: means[n])
        fields["alternative"] = difference(usable[best])
        fields["detectable"] = scores.detectable(scores.count) * float(np.median(se[row, rivals])) or None
        fields["domains_needed"] = _domains_needed(scores, abs(gap[row, best]), se[row, best])
    tied = [names[n] for n in order if n != row and useful[n] and gap[row, n] <= limit * se[row, n]]
    tied += [r["algorithm"] for r in rows if r.get("left") == "average" and not r["control"]]
    tied.sort(key=complexity)
    if state == "use" and tied and complexity(tied[0]) >= complexity(names[row]):
        state = "tied"
    recommended = None if state == "majority" else names[row]
    return Recommendation(recommended, state, tied=tuple(tied), expected=expected, **fields)  # type: ignore[arg-type]


def _constant(rows: Sequence[Row]) -> list[Row]:
    return [r for r in rows if r["algorithm"] == baselines.MAJORITY and r["rank"] is not None]


def _optimism(row: Row, rows: Sequence[Row], lower: bool) -> float:
    """By how much the average of a row exceeds its cross-fitted score, with the seeds that all rows have."""
    every = [r for r in rows if not r["control"] and None not in _domain_means(r).values()]
    seeds = min(len(domain["values"]) for r in every for domain in r["domains"].values())
    scores, number = _scores(every, rows, lower, seeds), every.index(row)
    return float(scores.values[number].mean() - cross_fitted(scores, number).mean())


def leaving(rows: Sequence[Row], lower: bool) -> dict[str, tuple[str, str]]:
    """Rows of a race that are not worth further seeds, each with the row that beats it and how:

    - ``majority``: the majority class is better on average;
    - ``chance``: a row is better by more than chance;
    - ``average``: the row that is recommended is better on average, or a simpler one by one standard error.

    Where the majority class is better than all, the best row stays. With fewer than three folds nothing can
    be concluded, and no row leaves.
    """
    usable = [row for row in rows if row["rank"] is not None and not row["control"]]
    if not usable or (scores := _scores(usable, rows, lower)).count < LEAST_DOMAINS:
        return {}
    (gap, se), chosen = scores.differences(), choose(scores)
    if chosen is None:
        chosen = int(np.argmax(gap[:, 0]))
    beaten = {"chance": gap > scores.limit(scores.count) * se}
    simpler = scores.complexity[:, None] < scores.complexity
    beaten["average"] = (gap > 0) & ((gap > se) & simpler | (np.arange(len(gap)) == chosen)[:, None])
    left = dict[str, tuple[str, str]]()
    for n, (row, useful) in enumerate(zip(usable, scores.useful(), strict=True)):
        how = next((how for how, by in beaten.items() if by[:, n].any()), None)
        if n == chosen:
            continue
        if not useful:
            left[row["algorithm"]] = baselines.MAJORITY, "majority"
        elif how is not None:
            by = int(np.argmax(np.where(beaten[how][:, n], gap[:, n], -np.inf)))
            left[row["algorithm"]] = usable[by]["algorithm"], how
    return left


def _scores(usable: Sequence[Row], rows: Sequence[Row], lower: bool, seeds: int | None = None) -> Scores:
    """The scores of usable rows, and the majority's of all rows; with the first seeds."""

    def values(row: Row) -> Array:
        return (-1.0 if lower else 1.0) * np.array([*_domain_means(row, seeds).values()], float)

    constant = [values(row) for row in _constant(rows)]
    names = [row["algorithm"] for row in usable]
    away = sum(bool(r.get("left")) and not r["control"] and r["algorithm"] not in names for r in rows)
    folds = _folds(usable[0])
    return Scores(
        np.stack([values(row) for row in usable]),
        codes_of(folds, len(folds)),
        np.array([complexity(name) for name in names]),
        len(usable) + away,
        constant[0] if constant else None,
    )


def _reaches(row: Row, scores: Scores, number: int) -> tuple[float, float]:
    """Half the widths of the intervals of the mean, and of the score of one model in one new domain.

    The variance of the latter is that of domains, with the part of the variance over seeds that averaging
    has removed, and the squared standard error, where folds count. The degrees of freedom are by
    Satterthwaite's formula, for two parts that are not independent: S − 1 without folds.
    """
    values, seeds = scores.values[number], [domain["values"] for domain in row["domains"].values()]
    found, repeats = mean_interval(values, scores.folds, LEVEL), len(seeds[0])
    of_seeds = float(np.mean([np.var(v, ddof=1) for v in seeds])) if repeats > 1 else 0.0
    spread = float(np.var(values, ddof=1)) + of_seeds * (1 - 1 / repeats)
    error = (found.se or 0.0) ** 2
    parts = spread / math.sqrt(len(values) - 1) + error / math.sqrt(scores.count - 1)
    freedom = ((spread + error) / parts) ** 2 if parts else 1.0
    return (found.high or 0.0) - found.mean, t_limit(LEVEL, freedom) * math.sqrt(spread + error)


def _domains_needed(scores: Scores, gap: float, se: float) -> int | None:
    """With how many domains a difference is told apart; ``None`` if it is already, or with too many."""
    domains, count = len(scores.folds), scores.count
    if gap > scores.limit(count) * se:
        return None
    for folds in range(count + 1, MOST_DOMAINS * count // domains + 1):
        if gap >= scores.detectable(folds) * se * math.sqrt(count / folds):
            return math.ceil(folds * domains / count)
    return None
