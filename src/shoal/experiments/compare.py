"""Which algorithm works in a held-out domain: what to run, and what came out of it.

As in DomainBed, a trial is an algorithm, a held-out domain and a seed. Each trial tries a few hyperparameters
and takes the best on validation examples of the training domains; the held-out domain chooses nothing. On the
user's own data every seed draws another validation split, the same one for every row. Of many domains several
are held out together (grouped K-fold), and each still has a score of its own.

The question is how an algorithm does in a domain of the future, so domains are the sample: differences are
paired by domain (seeds are averaged within each). :func:`recommendation` is the one rule that decides.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shoal.algorithms import algorithm_class
from shoal.data import sets
from shoal.data.batch import DomainData, known_labels
from shoal.errors import InputError, check_names
from shoal.experiments import baselines
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord, selection_score
from shoal.experiments.run import prepare, run
from shoal.experiments.search import candidates, draw, with_model_options
from shoal.experiments.selection import lower_is_better
from shoal.experiments.statistics import mean_of, paired_interval, summarize, t_limit
from shoal.training.metrics import metric as metric_of
from shoal.training.recipes import find_recipe

BASELINE, MAJORITY = "erm", "majority"
ALGORITHMS = ("erm", "reweighted", "fish", "fish:regrouped", "coral", "groupdro", "vrex", "mixup")
"""What is compared on the user's own data by default, beside the baselines: plain training, one algorithm of
each kind, and the controls that explain a gain (equal weight for every domain, random grouping)."""
PRETRAINED = ("erm", "swad", "erm++", "coral", "fish", "fish:regrouped", "auto")
"""The same for a pretrained model, with recipes for fine-tuning."""
COMPLEXITY = (
    (baselines.LOGISTIC, baselines.RIDGE),
    (baselines.BOOSTING,),
    (BASELINE,),
    ("reweighted", "erm-by-domain", "swad", "lp-ft"),
    ("mixup", "erm++", "miro", "auto"),
)
"""From simple to complex; every other algorithm comes last."""
CONTROLS = (MAJORITY, ":regrouped")
"""Names, or how they end: rows that explain a result and are never recommended."""
FOLDS = 10
"""More domains than this are held out in so many folds."""
HOLDOUT = 0.2
LEVEL, POWER = 0.95, 0.8
LEAST_DOMAINS = 3
"""With fewer there is neither an interval over domains nor a recommendation."""
LEAST_ROWS = 16
"""A domain with fewer examples is not held out by default: one example would count for over six points."""
NAMED = 8
"""More labels or domains are not named one by one."""
TIMED_STEPS, TIMED_SECONDS = 30, 5.0
"""How much of a run is done to tell how long it takes, at most."""
STATES = ("scored", "failed", "missing", "diverged", "undefined")

HeldOut = str | None | Sequence[str | None]
"""One domain, the dataset's own test split, or several domains together."""
Row = Mapping[str, Any]


# What is run


@dataclass(frozen=True)
class Layout:
    """What can be compared on a dataset."""

    held_out: tuple[str | None, ...]
    """Domains to hold out (the dataset's option); ``None``: its own test split is the only one."""
    holdout: float | None
    """The share to hold out for validation; ``None``: the dataset's own validation split."""
    domains: int
    """How many are trained on."""
    classes: int | None
    flat: bool = field(default=False, compare=False)
    """Whether examples are rows of numbers, so that baselines belong to the comparison."""
    labelled: bool = field(default=False, compare=False)
    """Whether labels are known without reading examples, so that the majority class does."""
    usual: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """What the dataset's own module has a comparison use unless it is told: ``steps``, ``batch`` …"""
    messages: Sequence[str] = field(default=(), compare=False)
    """What was guessed of the user's data, and what to know of the held-out domains."""
    excluded: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Domains that are trained on but not held out, and why."""
    warned: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Held-out domains whose score says little, and why."""


def layout(
    dataset: str, options: Mapping[str, Any], held_out: Sequence[str] = (), metric: str | None = None
) -> Layout:
    """Looks at the dataset; ``held_out`` names the domains to hold out, by default all that can be scored.

    The dataset's own validation split is used unless there is a note on it: then it is not like the training
    domains.
    """
    module = sets.registry.module(dataset)
    own = hasattr(module, "domains")  # data of the user's, which has to look for them
    known = module.domains(**options) if own else getattr(module, "DOMAINS", None)
    names: tuple[str | None, ...] = (None,)
    if known is None:
        data = sets.load(dataset, **options)
        if "test" not in data.splits:
            raise InputError(f"dataset {dataset!r} has no test split, so nothing can be held out.")
        there = data.splits["test"].names
        check_names("domain to hold out:", held_out, there)
        if held_out and set(held_out) != set(there):
            raise InputError(f"the test domains of {dataset!r} cannot be separated: {', '.join(there)}.")
    else:
        if "held_out" in options:
            raise InputError("is set by a comparison; do not set it in data_options.", "held_out")
        if not known:
            raise InputError(f"there is no domain in {options.get('folder', dataset)!r}.")
        check_names("domain to hold out:", held_out, known)
        names = tuple(dict.fromkeys(held_out)) or tuple(known)
        data = sets.load(dataset, **{**options, "held_out": names[0]})
    small, constant, undefined = unscorable(data, metric) if known is not None else ({}, {}, {})
    wrong = small | undefined
    if all(n in wrong for n in names):  # where all are small, many of them still make an average
        wrong = undefined
    excluded = {n: why for n, why in wrong.items() if n in names and not held_out}
    if len(excluded) == len(names):
        raise InputError(f"no domain can be held out: {'; '.join(by_reason(excluded))}.")
    names = tuple(n for n in names if n not in excluded)
    warned = {n: why for n, why in (constant | small | undefined).items() if n in names}
    suggest = getattr(module, "comparison", None)
    rows = ALGORITHMS if own else ("all", "fish:regrouped")
    messages = [data.notes[name] for name in ("label", "units") if name in data.notes]
    messages += [
        f"not held out, only trained on: {line}; domains that are named are held out all the same"
        for line in by_reason(excluded)
    ]
    messages += [f"warning, held-out domains: {line}" for line in by_reason(warned)]
    return Layout(
        names,
        None if "validation" in data.splits and "validation" not in data.notes else HOLDOUT,
        len(data.splits["train"]),
        data.classes,
        flat=baselines.applies(data),
        labelled=baselines.labels_alone(data) is not None,
        usual={"steps": 1000, "batch": 32, "algorithms": rows, **(suggest(data) if suggest else {})},
        messages=messages,
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

    Where all labels of a domain are equal, a constant model has an accuracy of 1, and AUC and Pearson r are
    undefined.
    """
    usual = "accuracy" if data.classes is not None else "mse"
    compared = metric_of(metric or (data.measures[0] if data.measures else usual))
    labels = known_labels(data.examples)
    parts: dict[str, list[Any]] = {}
    for domains in data.splits.values():
        for number, name in enumerate(domains.names):
            parts.setdefault(str(name), []).append(domains.indices_of(number))
    rows = {name: np.unique(np.concatenate(own)) for name, own in parts.items()}
    few = f"fewer than {LEAST_ROWS} examples are too few to score"
    small = {name: few for name, which in rows.items() if len(which) < LEAST_ROWS}
    if labels is None or labels.ndim != 1:
        return small, {}, {}
    equal = [name for name, which in rows.items() if len(np.unique(labels[which])) == 1]
    what = "all examples are of one class" if data.classes is not None else "all labels are equal"
    if compared.undefined:
        return small, {}, dict.fromkeys(equal, f"{what}, so {compared.name} is undefined")
    return small, dict.fromkeys(equal, f"{what}, so a constant prediction can be correct everywhere"), {}


def unable(algorithms: Iterable[str], where: Layout) -> dict[str, str]:
    """Algorithms that cannot do the task, and why."""
    reasons = {}
    for name in algorithms:
        try:
            recipe = find_recipe(parted(name)[0])
            cls = algorithm_class(recipe.algorithm if recipe else parted(name)[0])
        except InputError as error:  # one of all, from a package that cannot be imported
            reasons[name] = str(error).rstrip(".")
            continue
        if where.classes is None and "regression" not in cls.tasks:
            reasons[name] = "needs classes"
        elif where.domains < 2 and cls.compares_domains:
            reasons[name] = "needs two training domains"
    return reasons


def refused(configs: Sequence[RunConfig], device: str | None = None) -> dict[str, InputError]:
    """Rows whose first run cannot be prepared, each with its error."""
    errors = {}
    for name, config in {c.name: c for c in reversed(configs)}.items():
        try:
            prepare(config, device)
        except InputError as error:
            errors[name] = error
    return errors


def try_each(configs: Sequence[RunConfig], device: str | None = None) -> list[str]:
    """Prepares a run for each held-out domain or fold: what is wrong with one is said before any is trained.

    Returns what can be trained and yet will surprise: classes that only the held-out domain has.
    """
    messages = []
    for fold, config in {named(c.data_options.get("held_out")): c for c in reversed(configs)}.items():
        where = f"with {fold!r} held out"
        try:
            data = prepare(config, device).data
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        labels = known_labels(data.examples)
        if (
            "held_out" not in config.data_options
            or data.classes is None
            or labels is None
            or labels.ndim != 1
        ):
            continue
        there = labels[data.splits["test"].examples()]
        unknown = there[~np.isin(there, labels[data.splits["train"].examples()])]
        if len(unknown):
            names = [repr(data.class_names[n] if data.class_names else n) for n in np.unique(unknown)]
            which = ", ".join(names[:NAMED]) + ", …" * (len(names) > NAMED)
            count = f"{len(unknown):,} of {len(there):,} examples"
            messages.append(f"{where} no training example has the label {which} ({count} there)")
    return messages


def parted(name: str) -> tuple[str, str | None]:
    """An algorithm and a way of drawing, from ``fish`` or ``fish:regrouped``."""
    algorithm, _, way = name.partition(":")
    return algorithm, way or None


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


def folds(names: Sequence[str | None], count: int | None = None) -> list[HeldOut]:
    """What is held out at a time: each domain, or of more than ``count`` (10 by default) so many groups.

    >>> folds(["a", "b", "c"]), folds(["a", "b", "c"], 2)
    (['a', 'b', 'c'], [['a', 'c'], 'b'])
    """
    groups = [list(names[n :: count or FOLDS]) for n in range(min(len(names), count or FOLDS))]
    return [group if len(group) > 1 else group[0] for group in groups]


def size_of(held_out: HeldOut) -> int:
    """How many domains are held out together."""
    return 1 if held_out is None or isinstance(held_out, str) else len(held_out)


def plan(
    base: RunConfig,
    rows: Sequence[str],
    held_out: Sequence[HeldOut],
    seeds: Iterable[int],
    search: int,
    given: Iterable[str] = (),
) -> list[RunConfig]:
    """Every run of a comparison: one for each held-out domain or fold, seed, row and hyperparameter trial.

    A row is an algorithm, one with a way of drawing such as ``fish:regrouped``, or a baseline. All are
    ``base`` with other settings. Every seed has a random search of its own, so that the spread over seeds
    includes that of the search; the trials come in their order, the defaults first. Recipes do not change the
    options ``given``.
    """
    each = [
        for_seed(
            replace(base, data_options={**base.data_options, **({} if out is None else {"held_out": out})}),
            seed,
        )
        for out in held_out
        for seed in seeds
    ]
    return [config for own in each for row in rows for config in _tried(own, row, search, given)]


def _tried(own: RunConfig, row: str, search: int, given: Iterable[str]) -> list[RunConfig]:
    """The runs of one trial."""
    if row in baselines.SPACES:
        same = {name: getattr(own, name) for name in ("holdout", "metric", "data_options", "seed")}
        plain = RunConfig(own.dataset, row, own.steps, **same, label=row, select="best")
        space = baselines.SPACES[row]
        count = max(1, search) if space else 1
        return [replace(plain, settings=draw(space, own.seed, n) if n else {}) for n in range(count)]
    algorithm, way = parted(row)
    own = replace(own, draw=way or own.draw, label=row, select=own.select or "best")
    if (recipe := find_recipe(algorithm)) is not None:
        own = with_model_options(
            recipe, replace(own, **recipe.fill({name: getattr(own, name) for name in given}))
        )
        algorithm = recipe.algorithm
    own = replace(own, algorithm=algorithm)
    return [replace(own, settings=settings, **rate) for settings, rate in candidates(own, search)]


@dataclass(frozen=True)
class Design:
    """What decides how many runs a comparison has."""

    base: RunConfig
    rows: Sequence[str]
    held_out: Sequence[str | None]
    seeds: int
    search: int
    folds: int | None = None
    given: Sequence[str] = ()
    """Options that the user gave, which no recipe changes."""

    @property
    def seed_numbers(self) -> range:
        return range(self.base.seed, self.base.seed + self.seeds)

    @property
    def groups(self) -> list[HeldOut]:
        return folds(self.held_out, self.folds)

    def configs(self) -> list[RunConfig]:
        return plan(self.base, self.rows, self.groups, self.seed_numbers, self.search, self.given)

    def within(self, runs: float) -> Design:
        """With at most so many runs, if it can: fewer hyperparameter trials, then seeds, then folds."""
        smaller = replace(self, folds=len(self.groups))
        for name, least in (("search", 1), ("seeds", 1), ("folds", LEAST_DOMAINS)):
            while (now := getattr(smaller, name)) > least and len(smaller.configs()) > runs:
                smaller = replace(smaller, **{name: now - 1})
        return smaller

    def reductions(self, full: Design) -> str:
        """In what it is smaller than ``full``, in words; empty where it is not."""
        pairs = [
            (self.search, full.search, "hyperparameter trial"),
            (self.seeds, full.seeds, "seed"),
            (len(self.groups), len(full.groups), "fold"),
        ]
        return ", ".join(f"{many(now, what)} instead of {was}" for now, was, what in pairs if now < was)


def many(number: int, what: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{number:,} {what}{'s' * (number != 1)}"


class _Enough(Exception):
    """A run has gone on for long enough to be timed."""


def seconds_of(config: RunConfig, device: str | None = None) -> float:
    """About how long a run takes, by its first steps and one evaluation."""
    steps, ticks = min(config.steps, TIMED_STEPS), [(0, time.perf_counter())]

    def tell(step: int, note: str) -> None:
        ticks.append((step, time.perf_counter()))
        if ticks[-1][1] - ticks[0][1] > TIMED_SECONDS:
            raise _Enough

    how = {"checkpoint_every": max(1, steps // 3)}  # where it is looked at the clock; nothing is written
    with contextlib.suppress(_Enough):
        run(replace(config, steps=steps, eval_every=steps), device, tell, how=how)
    first = ticks[1 if len(ticks) > 2 else 0]  # the data are read before
    before, last = ticks[-2 if len(ticks) > 3 else -1], ticks[-1]
    pace = (before[1] - first[1]) / max(1, before[0] - first[0])
    evaluation = max(0.0, last[1] - before[1] - pace * (last[0] - before[0]))
    return pace * config.steps + evaluation * config.steps / (config.eval_every or config.steps)


# What came out


def choose(records: Sequence[RunRecord]) -> int | None:
    """Which record is the best on validation; of equals the first, and ``None`` where none has a score."""
    scores = {n: score for n, r in enumerate(records) if (score := validation_score(r)) is not None}
    if not scores:
        return None
    lower = lower_is_better(selection_score(_scores(records[next(iter(scores))], "validation"))[0])
    return min(scores, key=lambda n: (scores[n] if lower else -scores[n], n))


def validation_score(record: RunRecord) -> float | None:
    """The mean over validation domains at the selected step, or what else selects; ``None`` without one."""
    score = _on_validation(record)
    return score if score is not None and math.isfinite(score) else None


def _on_validation(record: RunRecord) -> float | None:
    """Infinite where the run diverged; ``None`` or NaN where the measure is undefined."""
    if record.status != "finished":
        return math.inf
    scores = _scores(record, "validation")
    return (
        selection_score(scores)[1] if scores.get("selects") else statistics.fmean(scores["domains"].values())
    )


def _scores(record: RunRecord, split: str) -> Mapping[str, Any]:
    """At the selected step; on validation of a run that was retrained on it, the best of its search."""
    found: list[Mapping[str, Any]] = [m["scores"][split] for m in record.history if split in m["scores"]]
    chosen: Mapping[str, Any] = record.history[record.selected]["scores"]
    if split in chosen or not found:
        scores: Mapping[str, Any] = chosen[split]
        return scores
    best = min if lower_is_better(selection_score(found[0])[0]) else max
    return best(found, key=lambda scores: selection_score(scores)[1] or 0.0)


def _in_domain(record: RunRecord, domain: str | None) -> tuple[str, float | None, dict[str, float | None]]:
    """What the test split is scored by, its value, and other measures; in one ``domain`` of a fold."""
    scores = _scores(record, "test")
    if domain is None:
        metric, value = selection_score(scores)
        every = {scores["metric"]: scores["average"], **(scores.get("metrics") or {})}
        return metric, value, {name: v for name, v in every.items() if name != metric}
    every = {scores["metric"]: scores["domains"].get(domain)}
    every |= {name: values.get(domain) for name, values in (scores.get("by_domain") or {}).items()}
    metric = str(scores.get("selects") or scores["metric"])
    return metric, every.pop(metric, None), every


def trials(
    configs: Sequence[RunConfig], records: Iterable[RunRecord], failed: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """What each trial chose, and its score in the held-out domain; several of a fold share their runs.

    ``status`` is ``scored``; ``missing`` where not all its runs are there, for the best of some is not the
    best of all, or ``failed`` where one of these is in ``failed``; ``diverged``; or ``undefined`` where runs
    finished without a score: AUC of one class.
    """
    finished = {r.config.identity: r for r in records if r.status != "failed"}
    own, lost = _own_test(finished.values()), set(failed)
    groups: dict[tuple[str, str, int], list[RunConfig]] = {}
    for config in configs:
        fold = named(config.data_options.get("held_out", own))
        groups.setdefault((config.name, fold, config.seed), []).append(config)
    return [
        {"algorithm": algorithm, "held_out": domain or fold, "seed": seed, "fold": fold}
        | _trial(tried, finished, domain, lost)
        for (algorithm, fold, seed), tried in groups.items()
        for domain in _together(tried[0].data_options.get("held_out"))
    ]


def _own_test(records: Iterable[RunRecord]) -> str:
    """What to call a dataset's own test split: its domain, if it has one alone."""
    for record in records:
        if record.history:
            names = list(_scores(record, "test")["domains"])
            return names[0] if len(names) == 1 else "test"
    return "test"


def named(held_out: Any) -> str:
    """A held-out domain, or several that are held out together."""
    return " and ".join(map(str, held_out)) if isinstance(held_out, (list, tuple)) else str(held_out)


def _together(held_out: Any) -> Sequence[str | None]:
    return held_out if isinstance(held_out, (list, tuple)) and len(held_out) > 1 else (None,)


def _trial(
    tried: Sequence[RunConfig], finished: Mapping[str, RunRecord], domain: str | None, failed: set[str]
) -> dict[str, Any]:
    records = [r for config in tried if (r := finished.get(config.identity)) is not None]
    gone = [number for number, config in enumerate(tried) if config.identity not in finished]
    lost = sum(_is_lost(_on_validation(r)) for r in records)
    status = "failed" if any(tried[n].identity in failed for n in gone) else "missing"
    trial = {"status": status, "tried": len(tried), "missing": gone, "diverged": lost, "chosen": None}
    if gone:
        return trial
    number = choose(records)
    if number is None:
        return trial | {"status": "diverged" if lost else "undefined"}
    config, record = tried[number], records[number]
    metric, test, others = _in_domain(record, domain)
    known = test is not None and math.isfinite(test)
    return trial | {
        "status": "scored" if known else "diverged" if _is_lost(test) else "undefined",
        "chosen": number,
        "run": config.identity,
        "settings": dict(config.settings),
        "lr": config.lr,
        "step": record.history[record.selected]["step"],
        "metric": metric,
        "validation": validation_score(record),
        "test": test if known else None,
        "also": others,
    }


def _is_lost(score: float | None) -> bool:
    return score is not None and math.isinf(score)


def results(
    configs: Sequence[RunConfig],
    records: Sequence[RunRecord],
    baseline: str = BASELINE,
    failed: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The comparison as plain data: trials, and a row for each algorithm, best first.

    Only an algorithm with a score in every trial has a rank: means over other trials are not comparable.
    ``failed`` are errors by the identity of their runs.
    """
    failed = {r.config.identity: r.error for r in records if r.status == "failed"} | dict(failed or {})
    every = trials(configs, records, failed)
    metric = next((t["metric"] for t in every if "metric" in t), None)
    lower = metric is not None and lower_is_better(metric)
    names, seeds, several = (_distinct(every, what) for what in ("held_out", "seed", "fold"))
    if len(several) < len(names):  # folds have an order of their own
        names.sort()
    undefined = _undefined(every)
    rows = [_row(a, every, names, seeds, metric, undefined) for a in _distinct(every, "algorithm")]
    first = next((r for r in rows if r["algorithm"] == baseline), None)
    for row in rows:
        row["difference"] = None if first is None else _difference(row["average"], first["average"], metric)
        row["over_domains"] = None if first is None or row is first else over_domains(row, first)
        row["worst"] = worst(row, lower)
    _rank(rows, lower)
    done = {r.config.identity: r for r in records if r.status != "failed"}
    gone = sum(c.identity not in done for c in configs)
    why = {c.name: failed[c.identity] for c in reversed(configs) if c.identity in failed}
    return {
        "dataset": configs[0].dataset,
        "metric": metric,
        "lower_is_better": lower,
        "baseline": baseline if first is not None else None,
        "held_out": names,
        "folds": len(several) if len(several) < len(names) else None,
        "seeds": seeds,
        "search": max(t["tried"] for t in every),
        "steps": configs[0].steps,
        "runs": len(configs),
        "fits": sum(baselines.is_one(r.config) for r in done.values()),
        "seconds": round(sum(r.seconds for r in done.values()), 3),
        "devices": sorted({r.environment["device"] for r in done.values() if "device" in r.environment}),
        "runs_missing": gone,
        "missing": _missing(every),
        "failed": dict(reversed(why.items())),
        "undefined": undefined,
        "units": next((note for r in done.values() if (note := r.notes.get("units"))), None),
        "recommendation": None if gone else recommendation(rows, lower),
        "rows": rows,
        "trials": every,
    }


def _undefined(every: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Measures beside the one compared, each with the domains in which some trial has no value of it."""
    domains: dict[str, dict[str, None]] = {}
    for trial in every:
        for name, value in trial.get("also", {}).items():
            if value is None or not math.isfinite(value):
                domains.setdefault(name, {})[trial["held_out"]] = None
    return {name: list(where) for name, where in domains.items()}


def worst(row: Row, lower: bool) -> dict[str, Any] | None:
    """The held-out domain with the worst mean over seeds, and its scores; ``None`` where a trial has none."""
    means = {name: mean_of(about["values"]) for name, about in row["domains"].items()}
    known = {name: value for name, value in means.items() if value is not None}
    if not known or len(known) < len(means):
        return None
    name = (max if lower else min)(known, key=lambda n: known[n])
    return {"domain": name, **row["domains"][name]}


def over_domains(one: Row, other: Row, level: float = LEVEL) -> dict[str, Any] | None:
    """The difference ``one`` − ``other`` domain by domain, its mean, and where that is with ``level``.

    ``low`` and ``high`` are ``None`` with fewer than three domains; ``None`` where a trial has no score.
    """
    names = list(one["domains"])
    means = ([mean_of(row["domains"][n]["values"]) for n in names] for row in (one, other))
    a, b = ([value for value in own if value is not None] for own in means)
    if not names or len(a) + len(b) < 2 * len(names):
        return None
    values = {name: x - y for name, x, y in zip(names, a, b, strict=True)}
    low = high = None
    if len(values) >= LEAST_DOMAINS:
        _, low, high, _ = paired_interval(a, b, level)
    return {"values": values, "mean": mean_of(values.values()), "low": low, "high": high, "level": level}


def paired(one: Row, other: Row) -> tuple[float, float]:
    """The mean of the differences ``one`` − ``other`` in each domain, and its standard error."""
    a, b = (np.array([row["domains"][n]["values"] for n in one["domains"]], float) for row in (one, other))
    values = a.mean(1) - b.mean(1)
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def complexity(name: str) -> int:
    """The place in :data:`COMPLEXITY`."""
    return next((n for n, names in enumerate(COMPLEXITY) if name in names), len(COMPLEXITY))


def recommendation(rows: Sequence[Row], lower: bool) -> dict[str, Any] | None:
    """Which row to use: the simplest within one standard error of the best, the one rule there is.

    The best row has the best average over held-out domains; the standard error is that of the :func:`paired`
    difference to it. Simple is what comes first in :data:`COMPLEXITY`; of equally complex rows the better one
    is taken. Controls are never recommended.

    ``take`` is the row; ``begin`` the simplest, to begin with where ``take`` is ``None``: with fewer than
    three domains nothing can be concluded. ``majority`` says whether ``take`` is ``better`` than the majority
    class (or, in regression, the mean) by more than one standard error, and whether that is ``sure``: the
    95 % interval of the difference excludes zero. Where ``take`` is the best row, ``simpler`` and ``second``
    are the best of the simpler ones and of all others. ``detectable`` is the difference that so many domains
    would show with 80 % power in a t test at 5 %, for the median standard error of a difference to the best.
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

    def gap(one: Row, other: Row) -> dict[str, Any]:
        difference, error = paired(one, other)
        return {"difference": difference, "se": error, "far": sign * difference > error}

    domains = len(usable[0]["domains"])
    best = max(usable, key=lambda r: (_rounded(score(r)), -complexity(r["algorithm"])))
    about: dict[str, Any] = {
        "take": None,
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
    simpler = [r for r in rest if complexity(r["algorithm"]) < complexity(take["algorithm"])]
    # None of the simpler ones is near.
    for what, among in (("second", rest if take is best else []), ("simpler", simpler)):
        if among:
            name = max(among, key=score)["algorithm"]
            about[what] = {"row": name, **behind[name]}
    about |= {
        "take": take["algorithm"],
        "near": [r["algorithm"] for r in near],
        "behind": behind.get(take["algorithm"]),
        "reference": max(rest, key=score)["algorithm"] if rest else None,
    }
    t = t_limit(LEVEL, domains - 1)
    if behind:
        error = statistics.median(b["se"] for b in behind.values())
        if error > 0:  # equal rows say nothing of how rows scatter
            about["detectable"] = (t + t_limit(2 * POWER - 1, domains - 1)) * error
    if (majority := next((r for r in rows if r["algorithm"] == MAJORITY), None)) and majority["rank"]:
        lead = gap(take, majority)
        reach = t * lead["se"]
        about["majority"] = {
            "difference": lead["difference"],
            "low": lead["difference"] - reach,
            "high": lead["difference"] + reach,
            "better": lead["far"],
            "sure": sign * lead["difference"] > reach,
        }
    return about


def usual_settings(
    configs: Sequence[RunConfig], trials: Sequence[Mapping[str, Any]], name: str | None
) -> tuple[RunConfig, int, int] | None:
    """A run of the row ``name`` with the settings that most trials chose, how many did, and of how many."""
    tried = [c for c in configs if c.name == name]
    # Every seed has draws of its own; only the defaults, tried first, are the same in all of them.
    own = [t for t in trials if t["algorithm"] == name and t["chosen"] is not None]
    chosen = [(t["settings"], t["lr"]) for t in _runs(own)]
    if not tried or not chosen:
        return None
    best = max([(tried[0].settings, tried[0].lr), *chosen], key=chosen.count)
    config = next(c for c in tried if (c.settings, c.lr) == best)
    return config, chosen.count(best), len(chosen)


def _runs(some: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One of the trials that share their runs: the domains of a fold."""
    return list({(t["algorithm"], t.get("fold", n), t.get("seed")): t for n, t in enumerate(some)}.values())


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
    mine = {(t["held_out"], t["seed"]): t for t in every if t["algorithm"] == algorithm}

    def states(some: Iterable[Mapping[str, Any]]) -> dict[str, int]:
        status = [t["status"] for t in some]
        return {state: status.count(state) for state in STATES}

    def average(what: str, part: str | None = None) -> dict[str, Any]:
        """Over domains, seed by seed; without those in which no row can have the measure ``part``."""
        some = [n for n in names if n not in undefined.get(part or "", ())]
        values = [[mine[n, s].get(what) for n in some] for s in seeds]
        if part is not None:
            values = [[(value or {}).get(part) for value in own] for own in values]
        return summarize([mean_of(v) for v in values], part or metric) | {"trials": states(mine.values())}

    def in_domain(name: str) -> dict[str, Any]:
        own = [mine[name, s] for s in seeds]
        return summarize([t.get("test") for t in own], metric) | {"trials": states(own)}

    runs = _runs(mine.values())
    chosen = [t["chosen"] for t in runs if t["chosen"] is not None]
    also = dict.fromkeys(name for t in mine.values() for name in t.get("also", ()))
    return {
        "algorithm": algorithm,
        "control": is_control(algorithm),
        "rank": None,
        "mean_rank": None,
        "domains": {name: in_domain(name) for name in names},
        "average": average("test"),
        "validation": average("validation"),
        "also": {name: average("also", name) for name in also},
        "chosen": {str(n): chosen.count(n) for n in sorted(set(chosen))},
        "runs_diverged": sum(t["diverged"] for t in runs),
    }


def _difference(one: Row, other: Row, metric: str | None) -> dict[str, Any]:
    """Seed by seed."""
    pairs = zip(one["values"], other["values"], strict=True)
    return summarize([None if a is None or b is None else a - b for a, b in pairs], metric)


def _rank(rows: list[dict[str, Any]], lower: bool) -> None:
    """Sorts the rows and gives ranks, by the average and, averaged with shared ranks, in each domain."""
    sign = 1 if lower else -1
    whole = [r for r in rows if None not in r["average"]["values"]]

    def column(values: Iterable[Row]) -> Any:
        return np.array([_rounded(sign * about["mean"]) for about in values])

    if whole:
        scores = column(r["average"] for r in whole)
        columns = [column(r["domains"][name] for r in whole) for name in whole[0]["domains"]]
        for i, row in enumerate(whole):
            row["rank"] = 1 + int((scores < scores[i]).sum())
            ranks = [(c < c[i]).sum() + ((c == c[i]).sum() + 1) / 2 for c in columns]
            row["mean_rank"] = float(np.mean(ranks))

    def place(row: Row) -> tuple[Any, ...]:
        mean = row["average"]["mean"]
        return row["rank"] is None, row["rank"], mean is None, sign * (mean or 0.0)

    rows.sort(key=place)


def _rounded(value: float) -> float:
    """To twelve digits: averages of the same scores are equal, in whatever order they were added."""
    return float(f"{value:.12g}")


def _missing(every: Iterable[Mapping[str, Any]]) -> list[str]:
    """The hyperparameter trials that lack a record."""
    return [
        f"{t['algorithm']}, {t['fold']} held out, seed {t['seed']}, "
        f"hyperparameter trial{'s' * (len(gone) > 1)} " + ", ".join(map(str, gone))
        for t in _runs(every)
        if (gone := t["missing"])
    ]
