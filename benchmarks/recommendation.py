"""The rule of `shoal compare`, simulated as it is run: what it recommends, and how often it is right.

    OMP_NUM_THREADS=1 python benchmarks/recommendation.py --tables 1000 > results.md

A table has nine rows and a constant prediction. The score of row r in domain d with seed s is

    70 + gain_r + 8 b_d + 2 e_rd + m_rf + u_rds      points of accuracy,

with the effect of the domain b, that of method × domain e (sd 2), that of the model of a fold m (sd 1 where
there are folds) and the noise of seeds u (sd 1; none in the linear model and boosting). Without a true
difference all gains are 0; else one row gains twice the standard deviation of its method × domain effect.
*Race*: every row once; then hyperparameter trials and two further seeds only for rows that can still be
recommended; the others are out. The rule of 0.3 (the simplest within one standard error of the
best) stands beside it. Biases are without the mean of b, which is in every estimate alike.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy

import shoal
from shoal.experiments import recommend
from shoal.experiments.recommend import Difference, Recommendation, complexity, recommendation
from shoal.experiments.statistics import mean_interval
from shoal.report.tables import Table

ROWS = ("logistic-regression", "gradient-boosting", "erm", "reweighted", "mixup", "fish", "coral", "groupdro")
ROWS += ("vrex",)
LEVEL_OF_SCORE, DOMAIN_SD, EFFECT_SD, FOLD_SD, SEED_SD, SEEDS = 70.0, 8.0, 2.0, 1.0, 1.0, 3
KINDS = ("normal", "networks alike", "unequal noise", "heavy tails")
UNEQUAL = np.array([2, 2, 1, 0.5, 1, 1, 0.5, 1, 2])
"""Relative noise of rows."""
Random = np.random.Generator
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """How tables are made."""

    kind: str
    domains: int
    better: int | None = None
    """The row that is better."""
    folds: int | None = None
    tuned: float = 0.0
    """What networks gain by further hyperparameter trials, in points."""
    seeds: float = SEED_SD
    """Standard deviation of the noise of seeds."""
    noise: bool = False
    """Whether no row is better than a constant prediction."""

    @property
    def scale(self) -> Any:
        return EFFECT_SD * (UNEQUAL if self.kind == "unequal noise" else np.ones(len(ROWS)))

    @property
    def gains(self) -> Any:
        gains = np.zeros(len(ROWS))
        if self.better is not None:
            gains[self.better] = 2 * math.sqrt((self.scale[0] ** 2 + self.scale[self.better] ** 2) / 2)
        return gains

    def effects(self, rng: Random, domains: int) -> Any:
        """Method × domain, (rows, domains)."""
        shape = (len(ROWS), domains)
        effects = (
            rng.standard_t(4, shape) / math.sqrt(2) if self.kind == "heavy tails" else rng.normal(size=shape)
        )
        if self.kind == "networks alike":
            effects[2:] = math.sqrt(0.7) * rng.normal(size=domains) + math.sqrt(0.3) * effects[2:]
        return self.scale[:, None] * effects

    def table(self, rng: Random) -> tuple[Any, Any, float, Any]:
        """Scores (rows, domains, seeds), folds, the mean effect of the domains, and the constant's scores."""
        common = DOMAIN_SD * rng.normal(size=self.domains)
        folds = np.arange(self.domains) % (self.folds or self.domains)
        models = FOLD_SD * rng.normal(size=(len(ROWS), self.domains))[:, folds] if self.folds else 0.0
        seeds = self.seeds * rng.normal(size=(len(ROWS), self.domains, SEEDS))
        seeds[:2] = 0.0
        means = LEVEL_OF_SCORE + self.gains[:, None] + common + self.effects(rng, self.domains) + models
        constant = LEVEL_OF_SCORE - 15 * (not self.noise) + common + 4 * rng.normal(size=self.domains)
        return means[..., None] + seeds, folds, float(common.mean()), constant

    def new(self, rng: Random, row: int) -> float:
        """The score of a model in a new domain."""
        own = (
            DOMAIN_SD * rng.normal()
            + self.effects(rng, 1)[row, 0]
            + FOLD_SD * rng.normal() * bool(self.folds)
        )
        return float(LEVEL_OF_SCORE + self.gains[row] + own + self.seeds * rng.normal() * (row > 1))


def rows_of(scores: Any, folds: Any, constant: Any, seeds: int, left: dict[str, str]) -> Rows:
    """The rows that the rule takes, with the first ``seeds`` seeds."""
    every = [*zip(ROWS, scores, strict=True), ("majority", constant[:, None])]
    return [
        {
            "algorithm": name,
            "control": name == "majority",
            "rank": None if name in left else 1,
            "left": left.get(name),
            "average": {"metric": "points"},
            "domains": {
                str(d): {"values": list(v[:seeds]), "fold": str(f)}
                for d, (v, f) in enumerate(zip(values, folds, strict=True))
            },
        }
        for name, values in every
    ]


def full(case: Case, table: tuple[Any, ...]) -> tuple[Rows, int]:
    """All seeds of all rows, and their number."""
    scores, folds, _, constant = table
    return rows_of(scores, folds, constant, SEEDS, {}), SEEDS * len(ROWS)


def race(case: Case, table: tuple[Any, ...]) -> tuple[Rows, int]:
    """Every row once; hyperparameter trials of those that stay; further seeds of those that then stay."""
    scores, folds, _, constant = table
    untuned, left = scores.copy(), dict[str, str]()
    untuned[2:] -= case.tuned
    rows, count = rows_of(untuned, folds, constant, 1, left), len(ROWS)
    for seeds in (1, SEEDS):
        left |= {name: how for name, (_, how) in recommend.leaving(rows, False).items()}
        rows = rows_of(scores, folds, constant, seeds, left)
        count += (seeds - 1) * (len(ROWS) - len(left))
    return rows, count


def before(rows: Rows) -> Recommendation:
    """The rule of 0.3: the simplest row within one standard error of the best; its average and interval."""
    values = {r["algorithm"]: np.array([np.mean(d["values"]) for d in r["domains"].values()]) for r in rows}
    folds = [d["fold"] for d in rows[0]["domains"].values()]
    means = {name: float(v.mean()) for name, v in values.items() if name != "majority"}
    best = max(means, key=lambda name: means[name])
    behind = {name: mean_interval(values[best] - values[name], folds) for name in means}
    near = [name for name, found in behind.items() if found.mean <= (found.se or 0.0)]
    row = min(near, key=lambda name: (complexity(name), -means[name]))
    level, to = mean_interval(values[row], folds), "erm" if row != "erm" else ROWS[0]
    against = mean_interval(values[row] - values[to], folds)
    gain = mean_interval(values[row] - values["majority"], folds)
    found = recommendation(rows, False)
    assert found is not None
    none = gain.mean <= (gain.se or 0.0)
    state: Any = "majority" if none else "use"
    difference = Difference(to, against.mean, against.low, against.high)
    ends: Any = level.low, level.high
    about = {"average": level.mean, "expected": level.mean, "mean": ends, "new_domain": None}
    return replace(found, row=None if none else row, state=state, nearest=row, reference=difference, **about)


WAYS = {"0.3": (full, before), "new": (full, None), "new, race": (race, None)}
COLUMNS = (
    "simplest",
    "found",
    "none",
    "bias",
    "bias of average",
    "mean",
    "new domain",
    "reference",
    "seeds",
    "against (a)",
)


def measure(case: Case, way: str, tables: int, seed: int) -> dict[str, float]:
    """Shares in percent, biases in points."""
    rng, (collect, rule) = np.random.default_rng(seed), WAYS[way]
    found: list[list[float]] = []
    for _ in range(tables):
        table = case.table(rng)
        rows, count = collect(case, table)
        about = rule(rows) if rule else recommendation(rows, False)
        assert about is not None
        row, gains = ROWS.index(about.nearest), case.gains
        truth = LEVEL_OF_SCORE + gains[row]
        averages = {
            r["algorithm"]: np.mean([np.mean(d["values"]) for d in r["domains"].values()]) for r in rows
        }
        in_race = [r["algorithm"] for r in rows if r["rank"] is not None and not r["control"]]
        worse = [n for n in in_race if complexity(n) < complexity(about.nearest)]
        worse = [n for n in [*worse, "majority"] if averages[n] > averages[about.nearest] + 1e-9]
        (low, high), other, new = about.mean, about.alternative, case.new(rng, row)  # type: ignore[misc]
        other = about.reference or other
        difference = 0.0 if other is None else gains[row] - gains[ROWS.index(other.to)]
        found.append(
            [
                row == 0,
                row == case.better,
                about.row is None,
                about.expected - truth - table[2],
                about.average - truth - table[2],
                low <= truth <= high,
                math.nan if about.new_domain is None else about.new_domain[0] <= new <= about.new_domain[1],
                math.nan if other is None else other.low <= difference <= other.high,  # type: ignore[operator]
                count / 100,
                about.row is not None and bool(worse),
            ]
        )
    means = np.nanmean(found, 0)
    percent = np.where([name.startswith("bias") for name in COLUMNS], 1.0, 100.0)
    return dict(zip(COLUMNS, (percent * means).tolist(), strict=True))


def show(title: str, cases: dict[str, Case], tables: int, ways: Iterable[str] = tuple(WAYS)) -> None:
    table = Table(["tables", "rule", *COLUMNS])
    for number, (name, case) in enumerate(cases.items()):
        for way in ways:
            found = measure(case, way, tables, number)
            signs = ["+.2f" if column.startswith("bias") else ".1f" for column in COLUMNS]
            cells = [
                "–" if math.isnan(value) else f"{value:{sign}}"
                for value, sign in zip(found.values(), signs, strict=True)
            ]
            table.add(name, way, *cells)
    print(f"## {title}\n\n{table.markdown()}\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=int, default=1000)
    args, start = parser.parse_args(), time.process_time()
    versions = f"shoal {shoal.__version__}, SciPy {scipy.__version__}, NumPy {np.__version__}"
    print(f"{versions}, Python {platform.python_version()}; one core; {args.tables:,} tables per line.\n")
    null = {f"{kind}, {s} domains": Case(kind, s) for kind in KINDS for s in (4, 6, 10, 20)}
    null |= {f"20 domains in {f} folds": Case("normal", 20, folds=f) for f in (4, 10)}
    show("No true difference", null, args.tables)
    better = {
        f"{ROWS[n]}: {kind}, {s} domains": Case(kind, s, n)
        for s, kinds in ((10, KINDS), (4, KINDS[:1]), (6, KINDS[:1]), (20, KINDS[:1]))
        for kind in kinds
        for n in (1, 2, 5)
    }
    better["fish: 20 domains in 10 folds"] = Case("normal", 20, 5, folds=10)
    better["fish: 10 domains, noise of seeds 3 points"] = Case("normal", 10, 5, seeds=3.0)
    better["fish: 10 domains, networks gain 1 point by tuning"] = Case("normal", 10, 5, tuned=1.0)
    show("One row is better by two standard deviations", better, args.tables)
    noise = {f"{s} domains": Case("normal", s, noise=True) for s in (4, 10, 20)}
    show("No row is better than a constant prediction", noise, args.tables)
    for chance in (0.05, 0.1, 0.2):  # the trade-off
        recommend.CHANCE = chance
        some = {f"no true difference, {s} domains": Case("normal", s) for s in (4, 10)}
        some |= {f"{ROWS[n]} better, {s} domains": Case("normal", s, n) for n in (1, 5) for s in (4, 10)}
        show(f"With a level of {chance:g}", some, args.tables, ["new"])
    print(f"{time.process_time() - start:.0f} CPU-seconds.")


if __name__ == "__main__":
    main()
