"""Which algorithm works in a held-out domain: what to run, and what came out of it.

As in DomainBed, a trial is an algorithm, a held-out domain and a seed. Each trial tries a few settings and
takes the best on validation examples of the training domains; the held-out domain chooses nothing. On the
user's own data every seed draws another validation split, the same one for every row.

The question is how an algorithm does in a domain of the future, so domains are the sample: differences are
paired by domain (seeds are averaged within each). :func:`recommendation` is the one rule that decides.
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
from shoal.data import sets
from shoal.data.batch import DomainData
from shoal.errors import InputError, check_names
from shoal.experiments import baselines
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord, judged
from shoal.experiments.results import spread
from shoal.experiments.run import prepare
from shoal.experiments.search import OPTIMIZER_SPACE, PRETRAINED_SPACE, candidates, is_pretrained
from shoal.experiments.selection import lower_is_better
from shoal.training.metrics import metric as metric_of
from shoal.training.predictions import known_labels

BASELINE, MAJORITY = "erm", "majority"
ALGORITHMS = ("erm", "reweighted", "fish", "fish:regrouped", "coral", "groupdro", "vrex", "mixup")
"""What is compared on the user's own data by default, beside the baselines: plain training, one algorithm of
each kind, and the controls that explain a gain (equal weight for every domain, random grouping)."""
COMPLEXITY = (
    (baselines.LOGISTIC, baselines.RIDGE),
    (baselines.BOOSTING,),
    (BASELINE,),
    ("reweighted", "erm-by-domain"),
    ("mixup",),
)
"""From simple to complex; every other algorithm comes last."""
CONTROLS = (MAJORITY, ":regrouped")
"""Names, or how they end: rows that explain a result and are never recommended."""
CRITERIA = ("mean", "worst")
HOLDOUT = 0.2
LEVEL, POWER = 0.95, 0.8
LEAST_DOMAINS = 3
"""With fewer there is neither an interval over domains nor a recommendation."""
LEAST_ROWS = 16
"""A domain with fewer examples is not held out by default: one example would count for over six points."""
RESAMPLES = 2000
NAMED = 8
"""More labels or domains are not named one by one."""


@dataclass(frozen=True)
class Layout:
    """What can be compared on a dataset."""

    left_out: tuple[str | None, ...]
    """Held-out domains for the dataset's option ``test``; ``None``: its own test split is the only one."""
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
    """What was guessed of the user's data, and what to know of the held-out domains, in words."""
    excluded: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Domains that are trained on but not held out, and why."""
    warned: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Held-out domains whose score says little, and why."""


def layout(
    dataset: str, options: Mapping[str, Any], leave_out: Sequence[str] = (), metric: str | None = None
) -> Layout:
    """Looks at the dataset; ``leave_out`` names the domains to hold out in turn.

    By default these are all that can be scored by ``metric``; see :func:`unscorable`. The dataset's own
    validation split is used unless there is a note on it: then it is not like the training domains.
    """
    known = _can_be_left_out(dataset, options)
    left_out: tuple[str | None, ...] = (None,)
    if known is None:
        data = sets.load(dataset, **options)
        if "test" not in data.splits:
            raise InputError(f"dataset {dataset!r} has no test split: nothing is held out.")
        own = data.splits["test"].names
        check_names("domain to hold out:", leave_out, own)
        if leave_out and set(leave_out) != set(own):
            raise InputError(f"the test domains of {dataset!r} cannot be had apart: {', '.join(own)}.")
    else:
        if "test" in options:
            raise InputError("the option test is set for every held-out domain; name them in --held-out.")
        check_names("domain to hold out:", leave_out, known)
        left_out = tuple(dict.fromkeys(leave_out)) or tuple(known)
        data = sets.load(dataset, **{**options, "test": left_out[0]})
    small, flagged, undefined = unscorable(data, metric) if known is not None else ({}, {}, {})
    wrong = small | undefined
    if all(n in wrong for n in left_out):  # where all are small, many of them still make an average
        wrong = undefined
    excluded = {n: why for n, why in wrong.items() if n in left_out and not leave_out}
    if len(excluded) == len(left_out):
        raise InputError(f"no domain can be held out: {'; '.join(by_reason(excluded))}.")
    left_out = tuple(n for n in left_out if n not in excluded)
    warned = {n: why for n, why in (flagged | small | undefined).items() if n in left_out}
    fair = "validation" in data.splits and "validation" not in data.notes
    module = sets.registry.module(dataset)
    suggest = getattr(module, "comparison", None)
    rows = ALGORITHMS if hasattr(module, "domains") else ("all", "fish:regrouped")
    return Layout(
        left_out,
        None if fair else HOLDOUT,
        len(data.splits["train"]),
        data.classes,
        flat=baselines.applies(data),
        usual={"algorithms": rows, **(suggest(data) if suggest else {})},
        said=[
            *(data.notes[name] for name in ("label", "units") if name in data.notes),
            *(
                f"trained on but not held out: {line}; --held-out NAME to do so"
                for line in by_reason(excluded)
            ),
            *(f"warning, held-out domains: {line}" for line in by_reason(warned)),
        ],
        excluded=excluded,
        warned=warned,
    )


def by_reason(reasons: Mapping[str, str]) -> list[str]:
    """A line for each reason, naming its domains."""
    lines = []
    for why in dict.fromkeys(reasons.values()):
        names = [repr(n) for n, other in reasons.items() if other == why]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        lines.append(f"{', '.join(names[:NAMED])}{more} ({why})")
    return lines


def unscorable(data: DomainData, metric: str | None) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Domains whose score says little, with reasons: small ones, constant labels, and an undefined metric.

    Fewer than :data:`LEAST_ROWS` examples are too few. Where all labels of a domain are equal, a constant
    model has an accuracy of 1, and AUC and Pearson r are undefined.
    """
    usual = "accuracy" if data.classes is not None else "mse"
    compared = metric_of(metric or (data.measures[0] if data.measures else usual))
    labels = known_labels(data.examples)
    rows: dict[str, list[Any]] = {}
    for domains in data.splits.values():
        for number, name in enumerate(domains.names):
            rows.setdefault(str(name), []).append(domains.indices_of(number))
    every = {name: np.unique(np.concatenate(parts)) for name, parts in rows.items()}
    few = f"fewer than {LEAST_ROWS} examples are too few to score"
    small = {name: few for name, which in every.items() if len(which) < LEAST_ROWS}
    if labels is None or labels.ndim != 1:
        return small, {}, {}
    equal = [name for name, which in every.items() if len(np.unique(labels[which])) == 1]
    what = "all examples are of one class" if data.classes is not None else "all labels are equal"
    if compared.undefined:
        return small, {}, dict.fromkeys(equal, f"{what}, so {compared.name} is undefined")
    return small, dict.fromkeys(equal, f"{what}, so a constant prediction can be right everywhere"), {}


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
    """Prepares a run with each domain held out: what is wrong with one is said before any is trained.

    Returns what can be trained and yet will surprise: classes that only the held-out domain has.
    """
    said = []
    for domain, config in {c.data_options.get("test"): c for c in reversed(configs)}.items():
        try:
            data = prepare(config, device).data
        except InputError as error:
            raise InputError(f"with {domain!r} held out: {error}") from error
        labels = known_labels(data.examples)
        if domain is None or data.classes is None or labels is None or labels.ndim != 1:
            continue
        there = labels[data.splits["test"].examples()]
        unknown = there[~np.isin(there, labels[data.splits["train"].examples()])]
        if len(unknown):
            names = [repr(data.class_names[n] if data.class_names else n) for n in np.unique(unknown)]
            which = ", ".join(names[:NAMED]) + ", …" * (len(names) > NAMED)
            count = f"{len(unknown):,} of {len(there):,} examples"
            said.append(f"with {domain!r} held out no training example has the label {which} ({count} there)")
    return said


def parted(name: str) -> tuple[str, str | None]:
    """An algorithm and a way of drawing, from ``fish`` or ``fish:regrouped``."""
    algorithm, _, draw = name.partition(":")
    return algorithm, draw or None


def is_control(name: str) -> bool:
    """Whether a row only explains others: the majority class, or random grouping."""
    return name.endswith(CONTROLS)


def for_seed(base: RunConfig, seed: int) -> RunConfig:
    """``base`` with this seed, which also splits off validation in data of the user's own.

    That is where a dataset's module says ``RESPLIT``; a ``seed`` among the data options is left as it is.
    """
    own = getattr(sets.registry.module(base.dataset), "RESPLIT", False)
    if not own or not seed or "seed" in base.data_options:  # 0 is the dataset's default
        return replace(base, seed=seed)
    return replace(base, seed=seed, data_options={**base.data_options, "seed": seed})


def plan(
    base: RunConfig,
    algorithms: Sequence[str],
    left_out: Sequence[str | None],
    seeds: Iterable[int],
    search: int,
) -> list[RunConfig]:
    """Every run of a comparison: one for each held-out domain, seed, algorithm and hyperparameter trial.

    An algorithm with a way of drawing, such as ``fish:regrouped``, is a row of its own. All are ``base`` with
    other settings. Every seed has a random search of its own, so that the spread over seeds includes that of
    the search; the trials come in their order.
    """
    seeds, rate = list(seeds), base.optimizer_options["lr"]
    rates = PRETRAINED_SPACE if is_pretrained(base) else OPTIMIZER_SPACE
    tried = {(a, s): candidates(parted(a)[0], search, rate, s, rates) for a in algorithms for s in seeds}
    return [
        replace(
            own,
            algorithm=parted(algorithm)[0],
            draw=parted(algorithm)[1],
            label=algorithm,
            data_options={**own.data_options, **({} if name is None else {"test": name})},
            settings=candidate.settings,
            optimizer_options={**base.optimizer_options, **candidate.optimizer_options},
            select="best",
        )
        for name in left_out
        for own in (for_seed(base, seed) for seed in seeds)
        for algorithm in algorithms
        for candidate in tried[algorithm, own.seed]
    ]


def plan_baselines(
    base: RunConfig, classes: int | None, left_out: Sequence[str | None], seeds: Iterable[int], search: int
) -> list[RunConfig]:
    """The same for the baselines, on the same splits."""
    seeds = list(seeds)
    return [
        config
        for name in left_out
        for seed in seeds
        for config in baselines.plan(for_seed(base, seed), classes, [name], [seed], search)
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


def _scores(record: RunRecord, split: str) -> Mapping[str, Any]:
    scores: Mapping[str, Any] = record.history[record.selected]["scores"][split]
    return scores


def trials(configs: Sequence[RunConfig], records: Iterable[RunRecord]) -> list[dict[str, Any]]:
    """What each trial chose, and its score in the held-out domain.

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
    """A held-out domain, or several that are held out together."""
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
    configs: Sequence[RunConfig],
    records: Sequence[RunRecord],
    baseline: str = BASELINE,
    criterion: str = "mean",
) -> dict[str, Any]:
    """The comparison as plain data: trials, and a row for each algorithm, best first by ``criterion``.

    Only an algorithm with a score in every trial has a rank: means over other trials are not comparable.
    """
    check_names("criterion", [criterion], CRITERIA)
    every = trials(configs, records)
    metric = next((t["metric"] for t in every if "metric" in t), None)
    lower = metric is not None and lower_is_better(metric)
    names, seeds = _distinct(every, "left_out"), _distinct(every, "seed")
    undefined = _undefined(every)
    rows = [_row(a, every, names, seeds, metric, undefined) for a in _distinct(every, "algorithm")]
    first = next((r for r in rows if r["algorithm"] == baseline), None)
    for row in rows:
        row["difference"] = None if first is None else _difference(row["average"], first["average"], metric)
        row["over_domains"] = None if first is None or row is first else over_domains(row, first)
        row["worst"] = worst(row, lower)
    _rank(rows, metric, criterion)
    gone = sum(len(t["missing"]) for t in every)
    return {
        "dataset": configs[0].dataset,
        "metric": metric,
        "lower_is_better": lower,
        "criterion": criterion,
        "baseline": baseline if first is not None else None,
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
        "undefined": undefined,
        "units": next((note for r in records if (note := r.notes.get("units"))), None),
        "recommendation": None if gone else recommendation(rows, lower, criterion),
        "rows": rows,
        "trials": every,
    }


def _undefined(every: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Measures beside the one compared, each with the domains in which some trial has no value of it."""
    found: dict[str, dict[str, None]] = {}
    for trial in every:
        for name, value in trial.get("also", {}).items():
            if value is None or not math.isfinite(value):
                found.setdefault(name, {})[trial["left_out"]] = None
    return {name: list(domains) for name, domains in found.items()}


def worst(row: Mapping[str, Any], lower: bool) -> dict[str, Any] | None:
    """The held-out domain with the worst mean over seeds, and its scores; ``None`` where a trial has none."""
    means = {name: _whole_mean(row, name) for name in row["domains"]}
    known = {name: value for name, value in means.items() if value is not None}
    if not known or len(known) < len(means):
        return None
    name = (max if lower else min)(known, key=lambda n: known[n])
    return {"domain": name, **row["domains"][name]}


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


def paired(
    one: Mapping[str, Any], other: Mapping[str, Any], lower: bool, criterion: str = "mean"
) -> tuple[float, float]:
    """The difference ``one`` − ``other`` of two rows by a criterion, and its standard error.

    Of averages it is the standard error of the mean of the differences in each domain. A minimum over domains
    has no such formula: there domains, and seeds within each, are resampled with replacement, both rows
    alike, and the standard error is the deviation of the difference over resamples. With few domains that is
    rough, and rather too small than too large.
    """
    a, b = (np.array([row["domains"][n]["values"] for n in one["domains"]], float) for row in (one, other))
    if criterion == "mean":
        values = a.mean(1) - b.mean(1)
        return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))
    end = np.max if lower else np.min
    draw = np.random.default_rng(0)
    domains = draw.integers(len(a), size=(RESAMPLES, len(a), 1))
    seeds = draw.integers(a.shape[1], size=(RESAMPLES, *a.shape))
    drawn = end(a[domains, seeds].mean(2), 1) - end(b[domains, seeds].mean(2), 1)
    return float(end(a.mean(1)) - end(b.mean(1))), float(drawn.std(ddof=1))


def complexity(name: str) -> int:
    """The place in :data:`COMPLEXITY`."""
    return next((n for n, names in enumerate(COMPLEXITY) if name in names), len(COMPLEXITY))


def recommendation(
    rows: Sequence[Mapping[str, Any]], lower: bool, criterion: str = "mean"
) -> dict[str, Any] | None:
    """Which row to use: the simplest within one standard error of the best, the one rule there is.

    The best row has the best average over held-out domains or, with the criterion ``worst``, the best worst
    domain. The standard error is that of the :func:`paired` difference to it. Simple is what comes first in
    :data:`COMPLEXITY`; of equally complex rows the better one is taken. Controls are never recommended.

    ``take`` is the row; ``begin`` the simplest, to begin with where ``take`` is ``None``: with fewer than
    three domains nothing can be concluded. ``majority`` says whether ``take`` is ``better`` than the majority
    class (or, in regression, the mean) by more than one standard error, and whether that is ``sure``: the
    95 % interval of the difference excludes zero. Where ``take`` is the best row, ``simpler`` and ``second``
    are the best of the simpler ones and of all others. ``detectable`` is the difference that so many domains
    would show with 80 % power in a t test at 5 %, for the median standard error of a difference to the best.
    ``other`` is the row that is best by the other criterion, where it differs from ``take`` by more than one
    standard error. ``None`` where no row has all its scores.
    """
    sign = -1.0 if lower else 1.0
    usable = [r for r in rows if r["rank"] is not None and not r["control"]]
    if not usable:
        return None

    def score(row: Mapping[str, Any], by: str = criterion) -> float:
        return sign * float(row["average" if by == "mean" else "worst"]["mean"])

    def simplest(among: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        return min(among, key=lambda r: (complexity(r["algorithm"]), -score(r)))

    def gap(one: Mapping[str, Any], other: Mapping[str, Any], by: str = criterion) -> dict[str, Any]:
        difference, error = paired(one, other, lower, by)
        return {"difference": difference, "se": error, "far": sign * difference > error}

    domains = len(usable[0]["domains"])
    best = max(usable, key=lambda r: (_rounded(score(r)), -complexity(r["algorithm"])))
    about: dict[str, Any] = {
        "take": None,
        "criterion": criterion,
        "begin": simplest(usable)["algorithm"],
        "best": best["algorithm"],
        "domains": domains,
        "needed": LEAST_DOMAINS,
        "among": len(usable),
    }
    if domains < LEAST_DOMAINS:
        return about
    behind = {r["algorithm"]: gap(best, r) for r in usable if r is not best}
    near = [r for r in usable if r is best or not behind[r["algorithm"]]["far"]]
    take = simplest(near)
    rest = [r for r in usable if r is not take]
    if take is best and rest:
        second = max(rest, key=score)["algorithm"]
        about["second"] = {"row": second, **behind[second]}
    simpler = [r for r in rest if complexity(r["algorithm"]) < complexity(take["algorithm"])]
    if simpler:  # none of them is near
        nearest = max(simpler, key=score)["algorithm"]
        about["simpler"] = {"row": nearest, **behind[nearest]}
    about |= {
        "take": take["algorithm"],
        "near": [r["algorithm"] for r in near],
        "behind": behind.get(take["algorithm"]),
        "reference": max(rest, key=score)["algorithm"] if rest else None,
    }
    t = students_t(1 - LEVEL, domains - 1)
    if behind:
        error = statistics.median(b["se"] for b in behind.values())
        about["detectable"] = (t + students_t(2 * (1 - POWER), domains - 1)) * error
    if (majority := next((r for r in rows if r["algorithm"] == MAJORITY), None)) and majority["rank"]:
        found = gap(take, majority)
        reach = t * found["se"]
        about["majority"] = {
            "difference": found["difference"],
            "low": found["difference"] - reach,
            "high": found["difference"] + reach,
            "better": found["far"],
            "sure": sign * found["difference"] > reach,
        }
    other = CRITERIA[1 - CRITERIA.index(criterion)]
    ahead = max(usable, key=lambda r: score(r, other))
    if ahead is not take and (found := gap(ahead, take, other))["far"]:
        about["other"] = {"criterion": other, "row": ahead["algorithm"], **found}
    return about


def usual_settings(
    configs: Sequence[RunConfig], trials: Sequence[Mapping[str, Any]], name: str | None
) -> tuple[RunConfig, int, int] | None:
    """A run of the row ``name`` with the settings that most trials chose, how many did, and of how many."""
    tried = [c for c in configs if c.name == name]
    # Every seed has draws of its own; only the defaults, tried first, are the same in all of them.
    chosen = [(t["settings"], t["lr"]) for t in trials if t["algorithm"] == name and t["chosen"] is not None]
    if not tried or not chosen:
        return None
    best = max([(tried[0].settings, tried[0].optimizer_options["lr"]), *chosen], key=chosen.count)
    config = next(c for c in tried if (c.settings, c.optimizer_options["lr"]) == best)
    return config, chosen.count(best), len(chosen)


def _distinct(every: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    return list(dict.fromkeys(trial[name] for trial in every))


def _row(
    algorithm: str,
    every: Sequence[Mapping[str, Any]],
    names: list[str],
    seeds: list[int],
    metric: str | None,
    undefined: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    mine = {(t["left_out"], t["seed"]): t for t in every if t["algorithm"] == algorithm}

    def mean_of(what: str, part: str | None = None) -> dict[str, Any]:
        """Over domains, seed by seed; without those in which no row can have the measure ``part``."""
        some = [n for n in names if n not in undefined.get(part or "", ())]
        found = [[mine[n, s].get(what) for n in some] for s in seeds]
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
        "control": is_control(algorithm),
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
    return statistics.fmean(known) if known and len(known) == len(values) else None


def _difference(one: Mapping[str, Any], other: Mapping[str, Any], metric: str | None) -> dict[str, Any]:
    """Seed by seed."""
    pairs = zip(one["values"], other["values"], strict=True)
    return spread([None if a is None or b is None else a - b for a, b in pairs], metric)


def _rank(rows: list[dict[str, Any]], metric: str | None, criterion: str = "mean") -> None:
    """Sorts the rows and gives ranks, by the criterion and, averaged, in each domain."""
    sign = 1 if metric is not None and lower_is_better(metric) else -1
    by = "average" if criterion == "mean" else "worst"
    whole = [r for r in rows if None not in r["average"]["values"]]
    averages = [_rounded(sign * r[by]["mean"]) for r in whole]
    names = list(rows[0]["domains"]) if rows else []
    columns = [[_rounded(sign * r["domains"][n]["mean"]) for r in whole] for n in names]
    for i, row in enumerate(whole):
        row["rank"] = 1 + sum(a < averages[i] for a in averages)
        row["mean_rank"] = statistics.fmean(_midrank(column, i) for column in columns)
    rows.sort(key=lambda r: (r["rank"] is None, r["rank"], _known(r) is None, sign * (_known(r) or 0.0)))


def _rounded(value: float) -> float:
    """To twelve digits: averages of the same scores are equal, in whatever order they were added."""
    return float(f"{value:.12g}")


def _known(row: Mapping[str, Any]) -> float | None:
    mean: float | None = row["average"]["mean"]
    return mean


def _midrank(values: Sequence[float], at: int) -> float:
    """Equal values share the mean of their ranks."""
    better, equal = sum(v < values[at] for v in values), sum(v == values[at] for v in values)
    return better + (equal + 1) / 2


def _missing(every: Iterable[Mapping[str, Any]]) -> list[str]:
    """The hyperparameter trials that lack a record."""
    return [
        f"{t['algorithm']}, {t['left_out']} held out, seed {t['seed']}, "
        f"hyperparameter trial{'s' * (len(gone) > 1)} " + ", ".join(map(str, gone))
        for t in every
        if (gone := t["missing"])
    ]
