"""Which algorithm works in a domain that was left out: what to run, and what came out of it.

As in DomainBed, a trial is an algorithm, a domain left out and a seed. Each trial tries a few settings and
takes the best on held-out examples of the training domains; the domain left out chooses nothing.

What is to be known is how an algorithm does in a domain of the future, so domains are the sample: differences
are taken domain by domain (the mean over seeds in each), and their interval is Student's t over domains.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from shoal.algorithms import algorithm_class
from shoal.bench import baselines
from shoal.bench.config import RunConfig
from shoal.bench.record import RunRecord
from shoal.bench.results import spread
from shoal.bench.run import prepare
from shoal.bench.search import candidates
from shoal.bench.selection import lower_is_better
from shoal.data import sets
from shoal.errors import InputError, check_names
from shoal.training.predictions import known_labels

BASELINE = "erm"
PLAIN = (BASELINE, baselines.BOOSTING)
"""What is recommended unless another is shown to be better than the better of them."""
HOLDOUT = 0.2
LEVEL = 0.95
LEAST_DOMAINS = 3
"""With fewer there is no interval over domains."""
NAMED = 8
"""More labels or domains are not named one by one."""


@dataclass(frozen=True)
class Layout:
    """What can be compared on a dataset."""

    left_out: tuple[str | None, ...]
    """Domains for the dataset's option ``test``; ``None``: its own test split is the only one."""
    holdout: float | None
    """The share to hold out for validation; ``None``: the dataset's own validation split."""
    domains: int
    """How many are trained on."""
    classes: int | None
    flat: bool = field(default=False, compare=False)
    """Whether examples are rows of numbers, so that scikit-learn's baselines belong to the comparison."""
    usual: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """What the dataset's own module has a comparison use unless it is told: ``steps``, ``batch`` …"""
    said: Sequence[str] = field(default=(), compare=False)
    """What was guessed of the user's data, in words."""


def layout(dataset: str, options: Mapping[str, Any], leave_out: Sequence[str] = ()) -> Layout:
    """Looks at the dataset; ``leave_out`` names domains to leave out in turn, by default every one.

    Its own validation split is used unless there is a note on it: then it is not like the training domains.
    """
    known = _can_be_left_out(dataset, options)
    left_out: tuple[str | None, ...] = (None,)
    if known is None:
        data = sets.load(dataset, **options)
        if "test" not in data.splits:
            raise InputError(f"dataset {dataset!r} has no test split: nothing is left out.")
        own = data.splits["test"].names
        check_names("domain to leave out:", leave_out, own)
        if leave_out and set(leave_out) != set(own):
            raise InputError(f"the test domains of {dataset!r} cannot be had apart: {', '.join(own)}.")
    else:
        if "test" in options:
            raise InputError("the option test is set for every domain left out; name them in --leave-out.")
        check_names("domain to leave out:", leave_out, known)
        left_out = tuple(dict.fromkeys(leave_out)) or tuple(known)
        data = sets.load(dataset, **{**options, "test": left_out[0]})
    fair = "validation" in data.splits and "validation" not in data.notes
    suggest = getattr(sets.registry.module(dataset), "comparison", None)
    return Layout(
        left_out,
        None if fair else HOLDOUT,
        len(data.splits["train"]),
        data.classes,
        flat=baselines.applies(data),
        usual=suggest(data) if suggest else {},
        said=[data.notes[name] for name in ("label", "units") if name in data.notes],
    )


def _can_be_left_out(dataset: str, options: Mapping[str, Any]) -> Sequence[str] | None:
    """The domains that the option ``test`` may name; a set of the user's files looks for them there."""
    module = sets.registry.module(dataset)
    if not hasattr(module, "domains"):
        return getattr(module, "DOMAINS", None)
    found: Sequence[str] | None = module.domains(**options)
    return found


def unable(algorithms: Iterable[str], where: Layout) -> dict[str, str]:
    """Algorithms that cannot do the task, and why."""
    found = {}
    for name in algorithms:
        cls = algorithm_class(parted(name)[0])
        if where.classes is None and not cls.regression:
            found[name] = "needs classes"
        elif where.domains < 2 and cls.compares_domains:
            found[name] = "needs two training domains"
    return found


def refused(configs: Sequence[RunConfig], device: str | None = None) -> dict[str, InputError]:
    """Rows whose first run cannot be prepared, each with what is said of it."""
    found = {}
    for name, config in {c.name: c for c in reversed(configs)}.items():
        try:
            prepare(config, device)
        except InputError as error:
            found[name] = error
    return found


def try_each(configs: Sequence[RunConfig], device: str | None = None) -> list[str]:
    """Prepares a run with each domain left out: what is wrong with one is said before any is trained.

    Returns what can be trained and yet will surprise: classes that only the domain left out has.
    """
    said = []
    for domain, config in {c.data_options.get("test"): c for c in reversed(configs)}.items():
        try:
            data = prepare(config, device).data
        except InputError as error:
            raise InputError(f"with {domain!r} left out: {error}") from error
        labels = known_labels(data.examples)
        if domain is None or data.classes is None or labels is None or labels.ndim != 1:
            continue
        there = labels[data.splits["test"].examples()]
        unknown = there[~np.isin(there, labels[data.splits["train"].examples()])]
        if len(unknown):
            names = [repr(data.class_names[n] if data.class_names else n) for n in np.unique(unknown)]
            which = ", ".join(names[:NAMED]) + ", …" * (len(names) > NAMED)
            count = f"{len(unknown):,} of {len(there):,} examples"
            said.append(f"with {domain!r} left out nothing to train on has the label {which} ({count} there)")
    return said


def parted(name: str) -> tuple[str, str | None]:
    """An algorithm and a way of drawing, from ``fish`` or ``fish:regrouped``."""
    algorithm, _, draw = name.partition(":")
    return algorithm, draw or None


def plan(
    base: RunConfig,
    algorithms: Sequence[str],
    left_out: Sequence[str | None],
    seeds: Iterable[int],
    search: int,
) -> list[RunConfig]:
    """Every run of a comparison: one for each domain left out, algorithm, seed and candidate.

    An algorithm with a way of drawing, such as ``fish:regrouped``, is a row of its own. All are ``base`` with
    other settings. Every trial draws candidates of its own, so that the spread over seeds holds the luck of
    the search too; they come in their order.
    """
    seeds, rate = list(seeds), base.optimizer_options["lr"]
    tried = {(a, s): candidates(parted(a)[0], search, rate, s) for a in algorithms for s in seeds}
    return [
        replace(
            base,
            algorithm=parted(algorithm)[0],
            draw=parted(algorithm)[1],
            label=algorithm,
            data_options={**base.data_options, **({} if name is None else {"test": name})},
            settings=candidate.settings,
            optimizer_options={**base.optimizer_options, **candidate.optimizer_options},
            seed=seed,
            select="best",
        )
        for name in left_out
        for algorithm in algorithms
        for seed in seeds
        for candidate in tried[algorithm, seed]
    ]


def choose(records: Sequence[RunRecord]) -> int | None:
    """Which record is the best on validation; of equals the first, and ``None`` where none has a score."""
    found = {n: score for n, r in enumerate(records) if (score := validation_score(r)) is not None}
    if not found:
        return None
    lower = lower_is_better(judged(_scores(records[next(iter(found))], "validation"))[0])
    return min(found, key=lambda n: (found[n] if lower else -found[n], n))


def validation_score(record: RunRecord) -> float | None:
    """The mean over validation domains at the selected step, or what else selects; ``None`` without one."""
    score = _on_validation(record)
    return score if score is not None and math.isfinite(score) else None


def _on_validation(record: RunRecord) -> float | None:
    """Infinite where the run diverged; ``None`` or NaN where the measure is undefined."""
    if record.status != "finished":
        return math.inf
    found = _scores(record, "validation")
    return judged(found)[1] if found.get("selects") else statistics.fmean(found["domains"].values())


def judged(scores: Mapping[str, Any]) -> tuple[str, float | None]:
    """What a split is judged by and how well: the average, unless the training was to select by another."""
    if name := scores.get("selects"):
        return name, scores["metrics"][name]
    return scores["metric"], scores["average"]


def _scores(record: RunRecord, split: str) -> Mapping[str, Any]:
    scores: Mapping[str, Any] = record.history[record.selected]["scores"][split]
    return scores


def trials(configs: Sequence[RunConfig], records: Iterable[RunRecord]) -> list[dict[str, Any]]:
    """What each trial chose, and its score in the domain left out.

    ``status`` is ``scored``; ``missing`` where not all its runs are there, for the best of some is not the
    best of all; ``diverged``; or ``undefined`` where runs finished without a score: AUC of one class.
    """
    found = {r.config.identity: r for r in records}
    own = _own_test(found.values())
    groups: dict[tuple[str, str, int], list[RunConfig]] = {}
    for config in configs:
        name = named(config.data_options.get("test", own))
        groups.setdefault((config.name, name, config.seed), []).append(config)
    return [
        {"algorithm": algorithm, "left_out": name, "seed": seed, **_trial(tried, found)}
        for (algorithm, name, seed), tried in groups.items()
    ]


def _own_test(records: Iterable[RunRecord]) -> str:
    """What to call a dataset's own test split: its domain, if it has one alone."""
    for record in records:
        if record.history:
            names = list(_scores(record, "test")["domains"])
            return names[0] if len(names) == 1 else "test"
    return "test"


def named(test: Any) -> str:
    """A domain left out, or several that are left out together."""
    return " and ".join(map(str, test)) if isinstance(test, (list, tuple)) else str(test)


def _trial(tried: Sequence[RunConfig], found: Mapping[str, RunRecord]) -> dict[str, Any]:
    records = [r for config in tried if (r := found.get(config.identity)) is not None]
    gone = [number for number, config in enumerate(tried) if config.identity not in found]
    lost = sum(_is_lost(_on_validation(r)) for r in records)
    trial = {"status": "missing", "tried": len(tried), "missing": gone, "diverged": lost, "chosen": None}
    if gone:
        return trial
    number = choose(records)
    if number is None:
        return trial | {"status": "diverged" if lost else "undefined"}
    (metric, test), config = judged(_scores(records[number], "test")), tried[number]
    known = test is not None and math.isfinite(test)
    return trial | {
        "status": "scored" if known else "diverged" if _is_lost(test) else "undefined",
        "chosen": number,
        "settings": dict(config.settings),
        "lr": config.optimizer_options["lr"],
        "step": records[number].history[records[number].selected]["step"],
        "metric": metric,
        "validation": validation_score(records[number]),
        "test": test if known else None,
        "also": _others(_scores(records[number], "test"), metric),
    }


def _is_lost(score: float | None) -> bool:
    return score is not None and math.isinf(score)


def _others(scores: Mapping[str, Any], judged_by: str) -> dict[str, float | None]:
    """What else was measured, such as AUC beside accuracy."""
    every = {scores["metric"]: scores["average"], **(scores.get("metrics") or {})}
    return {name: value for name, value in every.items() if name != judged_by}


def results(
    configs: Sequence[RunConfig], records: Sequence[RunRecord], baseline: str = BASELINE
) -> dict[str, Any]:
    """The comparison as plain data: trials, and a row for each algorithm, best first.

    Only an algorithm with a score in every trial has a rank: means over other trials are not comparable.
    """
    every = trials(configs, records)
    metric = next((t["metric"] for t in every if "metric" in t), None)
    names, seeds = _distinct(every, "left_out"), _distinct(every, "seed")
    rows = [_row(a, every, names, seeds, metric) for a in _distinct(every, "algorithm")]
    base = next((r["average"] for r in rows if r["algorithm"] == baseline), None)
    for row in rows:
        row["difference"] = None if base is None else _difference(row["average"], base, metric)
    first = next((r for r in rows if r["algorithm"] == baseline), None)
    for row in rows:
        row["over_domains"] = None if first is None or row is first else over_domains(row, first)
    _rank(rows, metric)
    lower = metric is not None and lower_is_better(metric)
    gone = sum(len(t["missing"]) for t in every)
    return {
        "dataset": configs[0].dataset,
        "metric": metric,
        "lower_is_better": lower,
        "baseline": baseline if base is not None else None,
        "left_out": names,
        "seeds": seeds,
        "search": max(t["tried"] for t in every),
        "steps": configs[0].steps,
        "runs": len(configs),
        "fits": sum(baselines.is_one(r.config) for r in records),
        "seconds": round(sum(r.seconds for r in records), 3),
        "devices": sorted({r.environment["device"] for r in records if "device" in r.environment}),
        "runs_missing": gone,
        "missing": _missing(every),
        "recommendation": None if gone else recommendation(rows, lower),
        "rows": rows,
        "trials": every,
    }


def over_domains(
    one: Mapping[str, Any], other: Mapping[str, Any], level: float = LEVEL
) -> dict[str, Any] | None:
    """The difference ``one`` − ``other`` domain by domain, its mean, and where that is with ``level``.

    ``low`` and ``high`` are ``None`` with fewer than three domains; ``None`` where a trial has no score.
    """
    pairs = {name: (_whole_mean(one, name), _whole_mean(other, name)) for name in one["domains"]}
    values = {name: a - b for name, (a, b) in pairs.items() if a is not None and b is not None}
    if not values or len(values) < len(pairs):
        return None
    mean, low, high = statistics.fmean(values.values()), None, None
    if len(values) >= LEAST_DOMAINS:
        error = statistics.stdev(values.values()) / math.sqrt(len(values))
        reach = error * students_t(1 - level, len(values) - 1)
        low, high = mean - reach, mean + reach
    return {"values": values, "mean": mean, "low": low, "high": high, "level": level}


def _whole_mean(row: Mapping[str, Any], name: str) -> float | None:
    """Over seeds in a domain, if every seed has a score there."""
    return _mean(row["domains"][name]["values"])


@lru_cache
def students_t(chance: float, freedom: int) -> float:
    """The limit that |t| exceeds with this chance, by halving.

    With x = √ν tan θ Student's density becomes cosᵛ⁻¹ θ, up to a factor: smooth, and on a finite interval.
    """
    top, pieces = math.pi / 2, 2000

    def inside(end: float) -> float:
        width = end / pieces
        return width * sum(math.cos((i + 0.5) * width) ** (freedom - 1) for i in range(pieces))

    low, high, whole = 0.0, top, inside(top)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - inside(middle) / whole > chance else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def recommendation(rows: Sequence[Mapping[str, Any]], lower: bool) -> dict[str, Any] | None:
    """Which to take: the better of plain training and boosting, unless another is shown to be better.

    Another is, if the interval of its difference to that one, domain by domain, lies on the better side of
    zero. Every row is a chance to be lucky, so with m of them the intervals are those of 1 − 0.05 / m
    (Bonferroni). ``None`` without a plain one that has a score in every trial.
    """
    sign = -1.0 if lower else 1.0
    whole = [row for row in rows if row["rank"] is not None]
    plain = [row for row in whole if row["algorithm"] in PLAIN]
    if not plain:
        return None
    first = max(plain, key=lambda row: sign * row["average"]["mean"])
    others = [row for row in whole if row is not first]
    level = 1 - (1 - LEVEL) / max(1, len(others))
    found = {row["algorithm"]: over_domains(row, first, level) for row in others}
    shown = {
        name: about
        for name, about in found.items()
        if about is not None and about["low"] is not None and sign * about["mean"] > 0
        if about["low"] > 0 or about["high"] < 0
    }
    best = max(shown, key=lambda name: sign * shown[name]["mean"]) if shown else None
    return {
        "take": best or first["algorithm"],
        "reference": first["algorithm"],
        "among": [row["algorithm"] for row in plain],
        "compared": len(others),
        "level": level,
        "domains": len(first["domains"]),
        "interval": shown[best] if best else None,
    }


def _distinct(every: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    return list(dict.fromkeys(trial[name] for trial in every))


def _row(
    algorithm: str, every: Sequence[Mapping[str, Any]], names: list[str], seeds: list[int], metric: str | None
) -> dict[str, Any]:
    mine = {(t["left_out"], t["seed"]): t for t in every if t["algorithm"] == algorithm}

    def mean_of(what: str, part: str | None = None) -> dict[str, Any]:
        """Over domains, seed by seed."""
        found = [[mine[n, s].get(what) for n in names] for s in seeds]
        if part is not None:
            found = [[(value or {}).get(part) for value in values] for values in found]
        return spread([_mean(v) for v in found], part or metric) | {"trials": _states(mine.values())}

    def in_domain(name: str) -> dict[str, Any]:
        own = [mine[name, s] for s in seeds]
        return spread([t.get("test") for t in own], metric) | {"trials": _states(own)}

    chosen = [t["chosen"] for t in mine.values() if t["chosen"] is not None]
    also = dict.fromkeys(name for t in mine.values() for name in t.get("also", ()))
    return {
        "algorithm": algorithm,
        "rank": None,
        "mean_rank": None,
        "domains": {name: in_domain(name) for name in names},
        "average": mean_of("test"),
        "validation": mean_of("validation"),
        "also": {name: mean_of("also", name) for name in also},
        "chosen": {str(n): chosen.count(n) for n in sorted(set(chosen))},
        "runs_diverged": sum(t["diverged"] for t in mine.values()),
    }


def _states(some: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    found = [t["status"] for t in some]
    return {state: found.count(state) for state in ("scored", "missing", "diverged", "undefined")}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def _difference(one: Mapping[str, Any], other: Mapping[str, Any], metric: str | None) -> dict[str, Any]:
    """Seed by seed."""
    pairs = zip(one["values"], other["values"], strict=True)
    return spread([None if a is None or b is None else a - b for a, b in pairs], metric)


def _rank(rows: list[dict[str, Any]], metric: str | None) -> None:
    """Sorts the rows and gives ranks, by the average and, averaged, in each domain."""
    sign = 1 if metric is not None and lower_is_better(metric) else -1
    whole = [r for r in rows if None not in r["average"]["values"]]
    averages = [sign * r["average"]["mean"] for r in whole]
    names = list(rows[0]["domains"]) if rows else []
    columns = [[sign * r["domains"][n]["mean"] for r in whole] for n in names]
    for i, row in enumerate(whole):
        row["rank"] = 1 + sum(a < averages[i] for a in averages)
        row["mean_rank"] = statistics.fmean(_midrank(column, i) for column in columns)
    rows.sort(key=lambda r: (r["rank"] is None, _known(r) is None, sign * (_known(r) or 0.0)))


def _known(row: Mapping[str, Any]) -> float | None:
    mean: float | None = row["average"]["mean"]
    return mean


def _midrank(values: Sequence[float], at: int) -> float:
    """Equal values share the mean of their ranks."""
    better, equal = sum(v < values[at] for v in values), sum(v == values[at] for v in values)
    return better + (equal + 1) / 2


def _missing(every: Iterable[Mapping[str, Any]]) -> list[str]:
    """The candidates that lack a record, by trial."""
    return [
        f"{t['algorithm']}, {t['left_out']} left out, seed {t['seed']}, candidate{'s' * (len(gone) > 1)} "
        + ", ".join(map(str, gone))
        for t in every
        if (gone := t["missing"])
    ]
