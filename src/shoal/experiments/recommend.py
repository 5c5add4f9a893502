"""Which row of a comparison to use: the rule, as a function of rows, and the intervals that it is based on.

A row has the scores of an algorithm in each held-out domain, see :func:`shoal.experiments.compare.results`.
Seeds are averaged within each domain; differences are paired by domain, and domains of one fold are not
independent, for they share their models.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.experiments import baselines
from shoal.experiments.statistics import Interval, mean_interval, mean_of, t_limit

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
LEAST_DOMAINS = 3
"""With fewer domains or folds there is neither an interval nor a recommendation."""

Row = Mapping[str, Any]


def rounded(value: float) -> float:
    """To twelve digits: averages of the same scores are equal, whatever the order of the sum."""
    return float(f"{value:.12g}")


def paired(one: Row, other: Row, level: float = LEVEL) -> tuple[dict[str, float], Interval] | None:
    """The difference ``one`` − ``other`` in each domain, and its mean with an interval; ``None`` where a case
    has no score.

    Seeds are averaged within a domain. Domains of a fold share their models and are one cluster.
    """
    means = [{n: mean_of(about["values"]) for n, about in row["domains"].items()} for row in (one, other)]
    values = {n: a - b for n, a in means[0].items() if a is not None and (b := means[1][n]) is not None}
    if not values or len(values) < len(means[0]):
        return None
    return values, mean_interval([*values.values()], _clusters(one), level)


def _clusters(row: Row) -> list[str]:
    return [str(about.get("fold", name)) for name, about in row["domains"].items()]


def over_domains(one: Row, other: Row, level: float = LEVEL) -> dict[str, Any] | None:
    """:func:`paired` as plain data; ``low`` and ``high`` are ``None`` with fewer than three folds."""
    if (found := paired(one, other, level)) is None:
        return None
    values, interval = found
    few = len(set(_clusters(one))) < LEAST_DOMAINS
    ends = {name: None if few else getattr(interval, name) for name in ("low", "high", "se")}
    return {"values": values, "mean": interval.mean, **ends, "level": level}


def complexity(name: str) -> int:
    """The place in :data:`COMPLEXITY`."""
    return next((n for n, names in enumerate(COMPLEXITY) if name in names), len(COMPLEXITY))


def recommendation(rows: Sequence[Row], lower: bool) -> dict[str, Any] | None:
    """Which row to use: the simplest within one standard error of the best.

    The best row has the best average over held-out domains; the standard error is that of the :func:`paired`
    difference to it. Simple is what comes first in :data:`COMPLEXITY`; of equally complex rows the better one
    is used. Controls are never recommended.

    ``take`` is the row; ``begin`` the simplest, for a start where ``take`` is ``None``: with fewer than three
    domains or folds nothing can be concluded. ``majority`` says whether ``take`` is ``better`` than the
    majority class (or, in regression, the mean) by more than one standard error, and whether that is
    ``sure``: the 95 % interval of the difference excludes zero. Where ``take`` is the best row, ``simpler``
    and ``second`` are the best of the simpler ones and of all others. ``detectable`` is the difference that a
    t test at 5 % would detect with 80 % power, for the median standard error of a difference to the best.
    ``None`` where no row has all its scores.
    """
    sign = -1.0 if lower else 1.0
    usable = [r for r in rows if r["rank"] is not None and not r["control"]]
    if not usable:
        return None

    def score(row: Row) -> float:
        return sign * float(row["average"]["mean"])

    def simplest(among: Sequence[Row]) -> Row:
        return min(among, key=lambda r: (complexity(r["algorithm"]), -score(r)))

    def gap(one: Row, other: Row) -> Interval:
        found = paired(one, other)
        assert found is not None  # both have a rank
        return found[1]

    def exceeds(interval: Interval) -> bool:
        """Whether the difference is more than one standard error."""
        return sign * interval.mean > (interval.se or 0.0)

    def plain(interval: Interval) -> dict[str, Any]:
        return {"difference": interval.mean, "se": interval.se, "far": exceeds(interval)}

    independent = len(set(_clusters(usable[0])))
    best = max(usable, key=lambda r: (rounded(score(r)), -complexity(r["algorithm"])))
    about: dict[str, Any] = {
        "take": None,
        "begin": simplest(usable)["algorithm"],
        "best": best["algorithm"],
        "domains": len(usable[0]["domains"]),
        "folds": independent,
        "needed": LEAST_DOMAINS,
        "among": len(usable),
    }
    if independent < LEAST_DOMAINS:
        return about
    behind = {r["algorithm"]: gap(best, r) for r in usable if r is not best}
    near = [r for r in usable if r is best or not exceeds(behind[r["algorithm"]])]
    take = simplest(near)
    rest = [r for r in usable if r is not take]
    simpler = [r for r in rest if complexity(r["algorithm"]) < complexity(take["algorithm"])]
    for what, among in (("second", rest if take is best else []), ("simpler", simpler)):
        if among:  # none of the simpler ones is near
            name = max(among, key=score)["algorithm"]
            about[what] = {"row": name, **plain(behind[name])}
    about |= {
        "take": take["algorithm"],
        "near": [r["algorithm"] for r in near],
        "behind": None if take is best else plain(behind[take["algorithm"]]),
        "reference": max(rest, key=score)["algorithm"] if rest else None,
    }
    error = statistics.median(b.se or 0.0 for b in behind.values()) if behind else 0.0
    if error > 0:  # equal rows say nothing about the scatter
        limits = t_limit(LEVEL, independent - 1) + t_limit(2 * POWER - 1, independent - 1)
        about["detectable"] = limits * error
    majority = next((r for r in rows if r["algorithm"] == baselines.MAJORITY), None)
    if majority is not None and majority["rank"]:
        lead = gap(take, majority)
        about["majority"] = {
            "difference": lead.mean,
            "low": lead.low,
            "high": lead.high,
            "better": exceeds(lead),
            "sure": (lead.high or 0.0) < 0 if lower else (lead.low or 0.0) > 0,
        }
    return about
