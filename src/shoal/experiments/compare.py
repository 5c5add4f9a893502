"""Hold domains out: which algorithm works on a domain that it was not trained on.

Every domain is held out in turn (many domains in groups, the *folds*), or the dataset's own test split is
used. For each algorithm, fold and seed, a few hyperparameter trials are run, and the best on validation
examples of the training domains is selected; the held-out domain selects nothing. On the user's own data
every seed has its own validation split, the same for every algorithm.

:class:`LeaveDomainsOut` plans the runs, :func:`results` reads the table off their records, and
:mod:`shoal.experiments.recommend` has the rule that picks a row of it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from shoal.algorithms import display_name, split_draw
from shoal.data import sets
from shoal.data.batch import DomainData, known_labels
from shoal.errors import InputError, check_names
from shoal.experiments import baselines
from shoal.experiments.config import RunConfig
from shoal.experiments.protocol import all_domains
from shoal.experiments.recommend import BASELINE as BASELINE
from shoal.experiments.recommend import LEAST_DOMAINS, over_domains, recommendation, rounded
from shoal.experiments.recommend import LEVEL as LEVEL
from shoal.experiments.record import RunRecord, selection_score
from shoal.experiments.run import prepare, run
from shoal.experiments.search import sample, trials, with_model_options
from shoal.experiments.selection import lower_is_better
from shoal.experiments.statistics import mean_of, summarize
from shoal.training.metrics import metric as metric_of
from shoal.training.recipes import find_recipe

MAJORITY = baselines.MAJORITY
ALGORITHMS = ("erm", "reweighted", "fish", "fish:regrouped", "coral", "groupdro", "vrex", "mixup")
"""Compared by default on the user's own data, with the baselines: plain training, one algorithm of each kind,
and the controls that explain a gain (equal weight for every domain, random grouping)."""
PRETRAINED = ("erm", "swad", "erm++", "coral", "fish", "fish:regrouped", "auto")
"""The same for a pretrained model, with recipes for fine-tuning."""
CONTROLS = (MAJORITY, ":regrouped")
"""Names, or how they end: rows that explain a result and are never recommended."""
FOLDS = 10
"""With more domains than this, they are held out in so many folds."""
HOLDOUT = 0.2
LEAST_ROWS = 16
"""A domain with fewer examples is not held out by default: one example would count for over six points."""
SHOWN = 8
"""Labels or domains that a message lists."""
TIMED_STEPS, TIMED_SECONDS = 4, 20.0
"""Steps by which a run is timed, and after how many seconds no further algorithm is."""
STATES = ("scored", "failed", "missing", "diverged", "undefined")

HeldOut = str | None | Sequence[str]
"""One domain, several of a fold, or ``None`` for the dataset's own test split."""
Row = Mapping[str, Any]


# The dataset


@dataclass(frozen=True)
class Layout:
    """What can be compared on a dataset."""

    held_out: tuple[str | None, ...]
    """Domains to hold out; ``None``: only the dataset's own test split."""
    holdout: float | None
    """The fraction held out for validation; ``None``: the dataset's own validation split."""
    classes: int | None
    flat: bool = False
    """Whether examples are rows of numbers, so that the baselines take part."""
    labelled: bool = False
    """Whether labels are known without reading examples, so that the majority class takes part."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The dataset's defaults in a comparison: ``steps``, ``batch`` and ``algorithms``."""
    messages: Sequence[str] = ()
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Domains that are trained on but not held out, and why."""
    warned: Mapping[str, str] = field(default_factory=dict)
    """Held-out domains whose score is hard to interpret, and why."""


def layout(
    dataset: str, options: Mapping[str, Any], held_out: Sequence[str] = (), metric: str | None = None
) -> Layout:
    """Examines a dataset; ``held_out`` are the domains to hold out, by default all that can be scored.

    The dataset's own validation split is used unless it has a note, which says that it is not like the
    training domains.
    """
    module = sets.registry.module(dataset)
    is_own = hasattr(module, "domains")  # a file or folder of the user's
    known = module.domains(**options) if is_own else getattr(module, "DOMAINS", None)
    names: tuple[str | None, ...] = (None,)
    excluded, warned = {}, {}
    if known is None:
        data = sets.load(dataset, **options)
        if "test" not in data.splits:
            raise InputError(f"dataset {dataset!r} has no test split, so nothing can be held out.")
        test = data.splits["test"].names
        check_names("domain to hold out:", held_out, test)
        if held_out and set(held_out) != set(test):
            raise InputError(f"the test domains of {dataset!r} cannot be separated: {', '.join(test)}.")
    else:
        if "held_out" in options:
            raise InputError("is set by a comparison; do not set it in data_options.", "held_out")
        if not known:
            raise InputError(f"there is no domain in {options.get('folder', dataset)!r}.")
        check_names("domain to hold out:", held_out, known)
        names = tuple(dict.fromkeys(held_out)) or tuple(known)
        data = sets.load(dataset, **{**options, "held_out": names[0]})
        small, constant, undefined = unscorable(data, metric)
        unfit = small | undefined
        if all(name in unfit for name in names):  # many small ones still make an average
            unfit = undefined
        excluded = {n: why for n, why in unfit.items() if n in names and not held_out}
        if len(excluded) == len(names):
            raise InputError(f"no domain can be held out: {'; '.join(by_reason(excluded))}.")
        names = tuple(n for n in names if n not in excluded)
        warned = {n: why for n, why in (constant | small | undefined).items() if n in names}
    rows = ALGORITHMS if is_own else ("all", "fish:regrouped")
    suggested = module.comparison(data) if hasattr(module, "comparison") else {}
    messages = [data.notes["label"]] if "label" in data.notes else []
    messages += [
        f"not held out, only trained on: {line}; use held_out to hold them out"
        for line in by_reason(excluded)
    ]
    messages += [f"warning, held-out domains: {line}" for line in by_reason(warned)]
    return Layout(
        names,
        None if "validation" in data.splits and "validation" not in data.notes else HOLDOUT,
        data.classes,
        flat=baselines.applies(data),
        labelled=baselines.labels_alone(data) is not None,
        defaults={"steps": 1000, "batch": 32, "algorithms": rows, **suggested},
        messages=messages,
        excluded=excluded,
        warned=warned,
    )


def by_reason(reasons: Mapping[str, str]) -> list[str]:
    """A line for each reason, with its domains."""
    lines = []
    for why in dict.fromkeys(reasons.values()):
        names = [repr(n) for n, other in reasons.items() if other == why]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        lines.append(f"{', '.join(names[:SHOWN])}{more} ({why})")
    return lines


def unscorable(data: DomainData, metric: str | None) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Domains that are small, have a constant label, or have no value of the metric, each with the reason."""
    compared = metric_of(metric or (data.measures or ("accuracy" if data.classes is not None else "mse",))[0])
    domains, labels = all_domains(data), known_labels(data.examples)
    few = f"fewer than {LEAST_ROWS} examples are too few to score"
    small = {n: few for n, size in zip(domains.names, domains.sizes, strict=True) if size < LEAST_ROWS}
    if labels is None or labels.ndim != 1:
        return small, {}, {}
    equal = [n for i, n in enumerate(domains.names) if len(np.unique(labels[domains.indices_of(i)])) == 1]
    what = "all examples are of one class" if data.classes is not None else "all labels are equal"
    if compared.undefined:
        return small, {}, dict.fromkeys(equal, f"{what}, so {compared.name} is undefined")
    return small, dict.fromkeys(equal, f"{what}, so a constant prediction can be correct everywhere"), {}


# The plan


@dataclass(frozen=True)
class LeaveDomainsOut:
    """The protocol: which runs a comparison has."""

    base: RunConfig
    rows: Sequence[str]
    """Algorithms, with or without a way of sampling (``fish:regrouped``), recipes and baselines."""
    held_out: Sequence[str | None]
    seeds: int
    search: int
    """Hyperparameter trials of each row and seed, the defaults first."""
    folds: int | None = None
    given: Sequence[str] = ()
    """Options that the user set; recipes do not change them."""

    @property
    def groups(self) -> list[HeldOut]:
        return folds(self.held_out, self.folds)

    def plan(self) -> list[RunConfig]:
        seeds = range(self.base.seed, self.base.seed + self.seeds)
        return plan(self.base, self.rows, self.groups, seeds, self.search, self.given)

    def checked(
        self, device: str | None, required: bool
    ) -> tuple[LeaveDomainsOut, dict[str, str], list[str]]:
        """The protocol without rows that cannot be trained, these with the reasons, and messages.

        One run of each row and of each fold is prepared, so that what is wrong is known before any is
        trained. An error is raised where a row is ``required``, or where no row can be trained.
        """
        short = replace(self, seeds=1, search=1).plan()
        rows = {display_name(row): row for row in self.rows}
        unable: dict[str, str] = {}
        errors: list[InputError] = []
        for config in short[: len(rows)]:
            try:
                if why := _checked(config, device)[1]:
                    unable[config.name] = why
            except InputError as error:
                errors.append(error)
                unable[config.name] = str(error).rstrip(".")
        able = [row for name, row in rows.items() if name not in unable]
        if errors and (required or not able):
            raise errors[0]
        if not able:
            reasons = "; ".join(f"{name} {why}" for name, why in unable.items())
            raise InputError(f"there is nothing to compare: {reasons}.")
        messages = []
        for config in (c for c in short if c.name == display_name(able[0]) and "held_out" in c.data_options):
            fold = fold_name(config.data_options["held_out"])
            try:
                data, _ = _checked(config, device)
            except InputError as error:
                raise InputError(f"with {fold!r} held out: {error}") from error
            messages += _unknown_labels(data, fold) if data else []
        return replace(self, rows=able), unable, messages

    def seconds(self, per_run: Mapping[str, float]) -> float:
        """The duration of all runs, one after another."""
        return sum(per_run[config.name] for config in self.plan())

    def within(self, per_run: Mapping[str, float], seconds: float) -> LeaveDomainsOut:
        """A smaller plan of at most that duration, if possible: fewer trials, then seeds, then folds."""
        smaller = replace(self, folds=len(self.groups))
        for name, least in (("search", 1), ("seeds", 1), ("folds", LEAST_DOMAINS)):
            while (now := getattr(smaller, name)) > least and smaller.seconds(per_run) > seconds:
                smaller = replace(smaller, **{name: now - 1})
        return smaller

    def reductions(self, full: LeaveDomainsOut) -> str:
        """In what it is smaller than ``full``; empty if it is not."""
        pairs = [
            (self.search, full.search, "hyperparameter trial"),
            (self.seeds, full.seeds, "seed"),
            (len(self.groups), len(full.groups), "fold"),
        ]
        return ", ".join(f"{many(now, what)} instead of {was}" for now, was, what in pairs if now < was)


def many(number: int, what: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def folds(names: Sequence[str | None], count: int | None = None) -> list[HeldOut]:
    """What is held out at a time: each domain, or of more than ``count`` (10 by default) so many groups.

    >>> folds(["a", "b", "c"]), folds(["a", "b", "c"], 2)
    (['a', 'b', 'c'], [['a', 'c'], 'b'])
    """
    groups: list[Any] = [list(names[n :: count or FOLDS]) for n in range(min(len(names), count or FOLDS))]
    return [group if len(group) > 1 else group[0] for group in groups]


def plan(
    base: RunConfig,
    rows: Sequence[str],
    held_out: Sequence[HeldOut],
    seeds: Iterable[int],
    search: int,
    given: Iterable[str] = (),
) -> list[RunConfig]:
    """Every run of a comparison: for each fold, seed and row its hyperparameter trials.

    Every seed has its own random search, so that the deviation over seeds includes that of the search.
    """
    starts = []
    for out in held_out:
        options = {**base.data_options, **({} if out is None else {"held_out": out})}
        starts += [for_seed(replace(base, data_options=options), seed) for seed in seeds]
    return [config for start in starts for row in rows for config in _trials(start, row, search, given)]


def for_seed(base: RunConfig, seed: int) -> RunConfig:
    """``base`` with this seed, which also selects the validation examples in data of the user's own."""
    resplit = getattr(sets.registry.module(base.dataset), "RESPLIT", False)
    if not resplit or not seed or "seed" in base.data_options:  # 0 is the dataset's default
        return replace(base, seed=seed)
    return replace(base, seed=seed, data_options={**base.data_options, "seed": seed})


def _trials(start: RunConfig, row: str, search: int, given: Iterable[str]) -> list[RunConfig]:
    """The hyperparameter trials of a row."""
    if row in baselines.SPACES:
        same = {name: getattr(start, name) for name in ("holdout", "metric", "data_options", "seed")}
        first = RunConfig(start.dataset, row, start.steps, **same, label=row, select="best")
        space = baselines.SPACES[row]
        others = range(1, search if space else 1)
        return [first, *(replace(first, settings=sample(space, start.seed, n)) for n in others)]
    algorithm, draw = split_draw(row)
    start = replace(start, draw=draw or start.draw, label=display_name(row), select=start.select or "best")
    if (recipe := find_recipe(algorithm)) is not None:
        options = recipe.fill({name: getattr(start, name) for name in given}, start.dataset)
        start, algorithm = with_model_options(recipe, replace(start, **options)), recipe.algorithm
    return trials(replace(start, algorithm=algorithm), search)


def _checked(config: RunConfig, device: str | None) -> tuple[DomainData | None, str]:
    """The data of a run that can be trained, or why it cannot."""
    setup = prepare(config, device).setup
    if setup.task.domains < setup.algorithm.min_domains:
        return None, "needs two training domains"
    return setup.data, ""


def _unknown_labels(data: DomainData, fold: str) -> list[str]:
    """A message on classes that only the held-out domain has."""
    labels = known_labels(data.examples)
    if data.classes is None or labels is None or labels.ndim != 1:
        return []
    test = labels[data.splits["test"].examples()]
    unknown = test[~np.isin(test, labels[data.splits["train"].examples()])]
    if not len(unknown):
        return []
    names = [repr(data.class_names[n] if data.class_names else n) for n in np.unique(unknown)]
    which = ", ".join(names[:SHOWN]) + ", …" * (len(names) > SHOWN)
    count = f"{len(unknown):,} of {len(test):,} held-out examples"
    return [f"with {fold!r} held out no training example has the label {which} ({count})"]


def time_runs(configs: Sequence[RunConfig], device: str | None, threads: int | None) -> dict[str, float]:
    """The estimated duration of a run of each row, in seconds.

    Networks are trained for a few steps and for three times as many; the difference is the time per step, the
    rest that of an evaluation. Baselines are fitted. ``threads`` is how many threads a run will have.
    """
    seconds: dict[str, float] = {}
    before, start = torch.get_num_threads(), time.monotonic()
    torch.set_num_threads(threads or before)
    try:
        for name, config in {c.name: c for c in reversed(configs)}.items():
            if seconds and time.monotonic() - start > TIMED_SECONDS:
                seconds[name] = statistics.fmean(seconds.values())
            elif baselines.is_one(config):
                seconds[name] = run(config).seconds
            else:
                seconds[name] = _timed(config, device, warm_up=not seconds)
    finally:
        torch.set_num_threads(before)
    return seconds


def _timed(config: RunConfig, device: str | None, warm_up: bool) -> float:
    def duration(steps: int) -> float:
        return run(replace(config, steps=steps, eval_every=steps), device).seconds

    if warm_up:
        duration(1)
    short, long = duration(TIMED_STEPS), duration(3 * TIMED_STEPS)
    pace = max(long - short, 0.1 * long) / (2 * TIMED_STEPS)
    evaluation = max(0.0, short - pace * TIMED_STEPS)
    return pace * config.steps + evaluation * config.steps / (config.eval_every or config.steps)


# The table


def fold_name(held_out: Any) -> str:
    """A held-out domain, or those of a fold."""
    return " and ".join(map(str, held_out)) if isinstance(held_out, (list, tuple)) else str(held_out)


def is_control(name: str) -> bool:
    """Whether a row only explains others: the majority class, or random grouping."""
    return name.endswith(CONTROLS)


def select(
    configs: Sequence[RunConfig], records: Iterable[RunRecord], failed: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Which trial each row selects, for every held-out domain and seed, and its score there.

    ``status`` is ``scored``; ``missing`` where not all runs are there, for the best of some is not the best
    of all, or ``failed`` where one of these is in ``failed``; ``diverged``; or ``undefined`` where runs
    finished without a score, such as AUC of one class. Domains of one fold share their runs.
    """
    done = {r.config.identity: r for r in records if r.status != "failed"}
    own_test, lost = _own_test(done.values()), set(failed)
    groups: dict[tuple[str, str, int], list[RunConfig]] = {}
    for config in configs:
        fold = fold_name(config.data_options.get("held_out", own_test))
        groups.setdefault((config.name, fold, config.seed), []).append(config)
    cases = []
    for (algorithm, fold, seed), tried in groups.items():
        names = tried[0].data_options.get("held_out")
        several = names if isinstance(names, (list, tuple)) and len(names) > 1 else (None,)
        for domain in several:
            case = {"algorithm": algorithm, "held_out": domain or fold, "seed": seed, "fold": fold}
            cases.append(case | _select(tried, done, domain, lost))
    return cases


def _own_test(records: Iterable[RunRecord]) -> str:
    """The name of a dataset's own test split: its domain, if it has only one."""
    for record in records:
        if record.history:
            names = list(_scores(record, "test")["domains"])
            return names[0] if len(names) == 1 else "test"
    return "test"


def _select(
    tried: Sequence[RunConfig], done: Mapping[str, RunRecord], domain: str | None, failed: set[str]
) -> dict[str, Any]:
    missing = [number for number, config in enumerate(tried) if config.identity not in done]
    records = [done[config.identity] for config in tried if config.identity in done]
    scores = [validation_score(record) for record in records]
    diverged = sum(score == math.inf for score in scores)
    status = "failed" if any(tried[n].identity in failed for n in missing) else "missing"
    case = {"tried": len(tried), "missing": missing, "diverged": diverged, "chosen": None}
    if missing:
        return case | {"status": status}
    number = best_trial(records)
    if number is None:
        return case | {"status": "diverged" if diverged else "undefined"}
    config, record = tried[number], records[number]
    metric, test, also = _in_domain(record, domain)
    known = test is not None and math.isfinite(test)
    infinite = test is not None and math.isinf(test)
    return case | {
        "status": "scored" if known else "diverged" if infinite else "undefined",
        "chosen": number,
        "run": config.identity,
        "settings": dict(config.settings),
        "lr": config.lr,
        "step": record.history[record.selected]["step"],
        "metric": metric,
        "validation": scores[number],
        "test": test if known else None,
        "also": also,
    }


def best_trial(records: Sequence[RunRecord]) -> int | None:
    """The best record on validation; of equals the first, and ``None`` where none has a score."""
    scores = {n: v for n, r in enumerate(records) if (v := validation_score(r)) is not None}
    scores = {n: v for n, v in scores.items() if math.isfinite(v)}
    if not scores:
        return None
    lower = lower_is_better(selection_score(_scores(records[min(scores)], "validation"))[0])
    return min(scores, key=lambda n: (scores[n] if lower else -scores[n], n))


def validation_score(record: RunRecord) -> float | None:
    """The selection score on validation; infinite if the run diverged."""
    return math.inf if record.status != "finished" else selection_score(_scores(record, "validation"))[1]


def _scores(record: RunRecord, split: str) -> Mapping[str, Any]:
    """At the selected step; on validation of a run that was retrained on it, the best of its search."""
    selected: Mapping[str, Any] = record.history[record.selected]["scores"]
    every: list[Mapping[str, Any]] = [m["scores"][split] for m in record.history if split in m["scores"]]
    if split in selected or not every:
        scores: Mapping[str, Any] = selected[split]
        return scores
    best = min if lower_is_better(selection_score(every[0])[0]) else max
    return best(every, key=lambda scores: selection_score(scores)[1] or 0.0)


def _in_domain(record: RunRecord, domain: str | None) -> tuple[str, float | None, dict[str, float | None]]:
    """The metric of the test split, its value and other metrics; of a fold, in one ``domain``."""
    scores = _scores(record, "test")
    metric, value = selection_score(scores)
    if domain is None:
        values = {scores["metric"]: scores["average"], **(scores.get("metrics") or {})}
        return metric, value, {name: v for name, v in values.items() if name != metric}
    values = {scores["metric"]: scores["domains"].get(domain)}
    values |= {name: each.get(domain) for name, each in (scores.get("by_domain") or {}).items()}
    return metric, values.pop(metric, None), values


def results(
    configs: Sequence[RunConfig],
    records: Sequence[RunRecord],
    baseline: str = BASELINE,
    failed: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The comparison as plain data: what was selected, and a row for each algorithm, best first.

    Only an algorithm with a score in every case has a rank: means over other cases are not comparable.
    ``failed`` are errors by the identity of their runs.
    """
    errors = {r.config.identity: r.error for r in records if r.status == "failed"} | dict(failed or {})
    cases = select(configs, records, errors)
    metric = next((c["metric"] for c in cases if "metric" in c), None)
    lower = metric is not None and lower_is_better(metric)
    names, seeds, groups, rows_of = (_distinct(cases, n) for n in ("held_out", "seed", "fold", "algorithm"))
    if len(groups) < len(names):  # folds have their own order
        names.sort()
    undefined = _undefined(cases)
    rows = [_row(a, cases, names, seeds, metric, undefined) for a in rows_of]
    first = next((r for r in rows if r["algorithm"] == baseline), None)
    for row in rows:
        row["difference"] = None if first is None else _difference(row["average"], first["average"], metric)
        row["over_domains"] = None if first is None or row is first else over_domains(row, first)
        row["worst"] = worst(row, lower)
    _rank(rows, lower)
    done = {r.config.identity: r for r in records if r.status != "failed"}
    missing = sum(c.identity not in done for c in configs)
    return {
        "dataset": configs[0].dataset,
        "metric": metric,
        "lower_is_better": lower,
        "baseline": baseline if first is not None else None,
        "held_out": names,
        "folds": len(groups) if len(groups) < len(names) else None,
        "seeds": seeds,
        "search": max(c["tried"] for c in cases),
        "steps": configs[0].steps,
        "runs": len(configs),
        "fits": sum(baselines.is_one(r.config) for r in done.values()),
        "seconds": round(sum(r.seconds for r in done.values()), 3),
        "devices": sorted({r.environment["device"] for r in done.values() if "device" in r.environment}),
        "runs_missing": missing,
        "missing": [
            f"{c['algorithm']}, {c['fold']} held out, seed {c['seed']}, "
            f"hyperparameter trial{'s' * (len(c['missing']) > 1)} {', '.join(map(str, c['missing']))}"
            for c in _per_fold(cases)
            if c["missing"]
        ],
        "failed": {c.name: errors[c.identity] for c in configs if c.identity in errors},
        "undefined": undefined,
        "units": next((note for r in done.values() if (note := r.notes.get("units"))), None),
        "recommendation": None if missing else recommendation(rows, lower),
        "rows": rows,
        "trials": cases,
    }


def _distinct(cases: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    return list(dict.fromkeys(case[name] for case in cases))


def _per_fold(cases: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One case of each algorithm, fold and seed: those of a fold's domains share their runs."""
    return list({(c["algorithm"], c["fold"], c["seed"]): c for c in cases}.values())


def _undefined(cases: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Further metrics, each with the domains in which some case has no value of it."""
    domains: dict[str, dict[str, None]] = {}
    for case in cases:
        for name, value in case.get("also", {}).items():
            if value is None or not math.isfinite(value):
                domains.setdefault(name, {})[case["held_out"]] = None
    return {name: list(where) for name, where in domains.items()}


def _row(
    algorithm: str,
    cases: Sequence[Mapping[str, Any]],
    names: list[str],
    seeds: list[int],
    metric: str | None,
    undefined: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    own = {(c["held_out"], c["seed"]): c for c in cases if c["algorithm"] == algorithm}

    def states(some: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
        status = [c["status"] for c in some]
        return {"trials": {state: status.count(state) for state in STATES}}

    def average(what: str, also: str = "") -> dict[str, Any]:
        """Over domains, seed by seed; of a further metric, over those in which every row has it."""
        some = [n for n in names if n not in undefined.get(also, ())]
        values = [[own[n, s].get(what) for n in some] for s in seeds]
        if also:
            values = [[(value or {}).get(also) for value in each] for each in values]
        return summarize([mean_of(v) for v in values], also or metric) | states(own.values())

    def in_domain(name: str) -> dict[str, Any]:
        each = [own[name, s] for s in seeds]
        return summarize([c.get("test") for c in each], metric) | states(each) | {"fold": each[0]["fold"]}

    runs = _per_fold(own.values())
    chosen = [c["chosen"] for c in runs if c["chosen"] is not None]
    also = dict.fromkeys(name for c in own.values() for name in c.get("also", ()))
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
        "runs_diverged": sum(c["diverged"] for c in runs),
    }


def _difference(one: Row, other: Row, metric: str | None) -> dict[str, Any]:
    """Seed by seed."""
    pairs = zip(one["values"], other["values"], strict=True)
    return summarize([None if a is None or b is None else a - b for a, b in pairs], metric)


def _rank(rows: list[dict[str, Any]], lower: bool) -> None:
    """Sorts the rows; ranks by the average, and the mean of the ranks in each domain."""
    sign = 1 if lower else -1
    whole = [r for r in rows if None not in r["average"]["values"]]

    def column(summaries: Iterable[Row]) -> Any:
        return np.array([rounded(sign * summary["mean"]) for summary in summaries])

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


def worst(row: Row, lower: bool) -> dict[str, Any] | None:
    """The held-out domain with the worst mean over seeds, and its scores; ``None`` where a case has none."""
    means = {name: mean_of(about["values"]) for name, about in row["domains"].items()}
    if not means or None in means.values():
        return None
    name = (max if lower else min)(means, key=lambda n: means[n] or 0.0)
    return {"domain": name, **row["domains"][name]}


def selected_trial(
    configs: Sequence[RunConfig], cases: Sequence[Mapping[str, Any]], name: str | None
) -> tuple[RunConfig, int, int] | None:
    """The trial of a row that was selected most often, in how many folds and seeds, and of how many.

    Every seed has trials of its own, which its folds share; only the defaults are those of all seeds. Of
    equals the first is used.
    """
    tried = [c for c in configs if c.name == name]
    own = [c for c in _per_fold(cases) if c["algorithm"] == name and c["chosen"] is not None]
    chosen = [(c["settings"], c["lr"]) for c in own]
    if not tried or not chosen:
        return None
    best = max(chosen, key=chosen.count)
    config = next(c for c in tried if (dict(c.settings), c.lr) == best)
    return config, chosen.count(best), len(chosen)
