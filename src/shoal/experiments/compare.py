"""Hold domains out: which algorithm works on a domain that it was not trained on.

Every domain is held out in turn (many domains in groups, the *folds*), or the dataset's own test split is
used. The trial that is best on validation examples of the training domains is selected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shoal import datasets as sets
from shoal.algorithms import display_name, split_draw
from shoal.data.batch import DomainData
from shoal.errors import InputError, check_names
from shoal.experiments import baselines, selection
from shoal.experiments.config import RunConfig
from shoal.experiments.protocol import all_domains
from shoal.experiments.recommend import BASELINE, over_domains, recommendation
from shoal.experiments.record import RunRecord
from shoal.experiments.run import prepare
from shoal.experiments.search import sample, trials, with_model_options
from shoal.experiments.selection import fold_name, lower_is_better, metric_of
from shoal.training.metrics import UNDEFINED
from shoal.training.metrics import metric as find_metric
from shoal.training.recipes import find_recipe

ALGORITHMS = (
    "erm",
    "reweighted",
    "fish",
    "fish:regrouped",
    "hessian-alignment",
    "groupdro",
    "fishr",
    "coral",
)
"""Compared by default, with the baselines: plain training, Fish, the controls that explain a gain (equal
weight for every domain, random grouping), and those with the best mean ranks in docs/evidence/records.md."""
PRETRAINED = ("erm", "swad", "erm++", "coral", "fish", "fish:regrouped", "auto")
"""The same for a pretrained model, with recipes for fine-tuning."""
FOLDS = 10
"""With more domains than this, they are held out in so many folds."""
HOLDOUT = 0.2
LEAST_ROWS = 16
"""A domain with fewer examples is not held out by default: one example would count for over six points."""
PATIENCE = 3
"""Evaluations without improvement after which a training stops; there are ten in it."""
SHOWN = 8
"""Labels that a message lists."""

HeldOut = str | None | Sequence[str]
"""One domain, several of a fold, or ``None`` for the dataset's own test split."""


@dataclass(frozen=True)
class Layout:
    """What can be compared on a dataset."""

    held_out: tuple[str | None, ...]
    """Domains to hold out; ``None``: only the dataset's own test split."""
    holdout: float | None
    """The fraction held out for validation; ``None``: the dataset's own validation split."""
    baselines: Sequence[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The dataset's defaults in a comparison: ``steps`` and ``batch``."""
    messages: Sequence[str] = ()
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Domains that are trained on but not held out, and why."""
    warned: Mapping[str, str] = field(default_factory=dict)
    """Held-out domains whose score is hard to interpret, and why."""
    size: tuple[int, int] | None = None
    """Of a table: the numbers of training rows and of their domains."""


def layout(
    dataset: str, options: Mapping[str, Any], held_out: Sequence[str] = (), metric: str | None = None
) -> Layout:
    """Examine a dataset; ``held_out`` are the domains to hold out, by default all that can be scored.

    The dataset's own validation split is used unless a note says that it is not like the training domains.
    """
    module = sets.registry.module(dataset)
    is_own = hasattr(module, "domains")  # a file or folder of the user's
    known = module.domains(**options) if is_own else getattr(module, "DOMAINS", None)
    names: tuple[str | None, ...] = (None,)
    excluded, warned = dict[str, str](), dict[str, str]()
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
        small, equal, undefined = unscorable(data, metric)
        unfit = small | undefined
        if unfit.keys() >= {*names}:  # many small ones still make an average
            unfit = undefined
        excluded = {n: why for n, why in unfit.items() if n in names and not held_out}
        if len(excluded) == len(names):
            raise InputError(f"no domain can be held out: {'; '.join(dict.fromkeys(excluded.values()))}.")
        names = tuple(n for n in names if n not in excluded)
        warned = {n: why for n, why in (equal | small | undefined).items() if n in names}
    train = data.splits["train"]
    own_validation = "validation" in data.splits and "validation" not in data.notes
    defaults = {"steps": 1000, "batch": 32}
    return Layout(
        held_out=names,
        holdout=None if own_validation else HOLDOUT,
        baselines=baselines.possible(data, is_own),
        defaults=defaults | (module.comparison(data) if hasattr(module, "comparison") else {}),
        messages=[data.notes["label"]] if "label" in data.notes else [],
        excluded=excluded,
        warned=warned,
        size=(len(train.indices), len(train)) if baselines.applies(data) else None,
    )


def unscorable(data: DomainData, metric: str | None) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Domains that are small, have a constant label, or have no value of the metric, each with the reason."""
    default = (data.metrics or ("accuracy" if data.classes is not None else "mse",))[0]
    name, domains, labels = (
        find_metric(metric or default).name,
        all_domains(data),
        data.examples.known_labels(),
    )
    few = f"fewer than {LEAST_ROWS} examples are too few to score"
    small = {n: few for n, size in zip(domains.names, domains.sizes, strict=True) if size < LEAST_ROWS}
    if labels is None or labels.ndim != 1:
        return small, {}, {}
    equal = [n for i, n in enumerate(domains.names) if len(np.unique(labels[domains.indices_of(i)])) == 1]
    what = "all examples are of one class" if data.classes is not None else "all labels are equal"
    if name in UNDEFINED:
        return small, {}, dict.fromkeys(equal, f"{what}, so {name} is undefined")
    return small, dict.fromkeys(equal, f"{what}, so a constant prediction can be correct everywhere"), {}


@dataclass(frozen=True)
class LeaveDomainsOut:
    """The protocol: which runs a comparison has."""

    base: RunConfig
    """The options that all runs share; its seed is the first."""
    rows: Sequence[str]
    """Algorithms, with or without a way of sampling (``fish:regrouped``), recipes and baselines."""
    held_out: Sequence[str | None]
    seeds: int
    search: int
    """Hyperparameter trials of each row and seed, the defaults first."""
    count: int | None = None
    """Number of folds (default: one for each of at most 10 domains, else 10)."""
    given: Sequence[str] = ()
    """Options that the user set; recipes do not change them."""

    @property
    def folds(self) -> list[HeldOut]:
        """What is held out at a time.

        >>> base = RunConfig("table", "erm", 1)
        >>> LeaveDomainsOut(base, ["erm"], ["a", "b", "c"], 1, 1, count=2).folds
        [['a', 'c'], 'b']
        """
        count = min(len(self.held_out), self.count or FOLDS)
        groups: list[Any] = [list(self.held_out[n::count]) for n in range(count)]
        return [group if len(group) > 1 else group[0] for group in groups]

    def plan(self) -> list[RunConfig]:
        """Every run: for each fold, seed and row its hyperparameter trials.

        Every seed has its own random search, so that the deviation over seeds includes that of the search;
        on the user's own data it has its own validation examples too. More seeds or trials add runs and
        change none.
        """
        resplit, configs = getattr(sets.registry.module(self.base.dataset), "RESPLIT", False), []
        for out in self.folds:
            for seed in range(self.base.seed, self.base.seed + self.seeds):
                options = {**self.base.data_options, **({} if out is None else {"held_out": out})}
                if resplit and seed:  # 0 is the dataset's default
                    options = {"seed": seed, **options}
                start = replace(self.base, data_options=options, seed=seed)
                configs += [config for row in self.rows for config in self._trials(start, row)]
        return configs

    def _trials(self, start: RunConfig, row: str) -> list[RunConfig]:
        if row in baselines.SPACES:
            names = ("holdout", "metric", "calibrate", "data_options", "seed")
            same = {name: getattr(start, name) for name in names}
            first = RunConfig(start.dataset, row, start.steps, **same, label=row, select="best")
            space = baselines.SPACES[row]
            others = range(1, self.search if space else 1)
            return [first, *(replace(first, settings=sample(space, start.seed, n)) for n in others)]
        algorithm, draw = split_draw(row)
        same = {"draw": draw or start.draw, "label": display_name(row), "select": start.select or "best"}
        start = replace(start, **same)
        if (recipe := find_recipe(algorithm)) is not None:
            given = {name: getattr(start, name) for name in self.given}
            options = {"patience": None, **recipe.fill(given, start.dataset)}
            start, algorithm = with_model_options(recipe, replace(start, **options)), recipe.algorithm
        return trials(replace(start, algorithm=algorithm), self.search)

    def checked(
        self, device: str | None, required: bool
    ) -> tuple[LeaveDomainsOut, dict[str, str], list[str]]:
        """The protocol without rows that cannot be trained, these with the reasons, and messages.

        One run of each row and of each fold is prepared, so that what is wrong is known before any is
        trained. An error is raised where a row is ``required``, or where no row can be trained.
        """
        short = replace(self, seeds=1, search=1).plan()
        unable, errors, messages = dict[str, str](), list[InputError](), list[str]()
        for config in short[: len(self.rows)]:
            try:
                setup = prepare(config, device).setup
                if setup.task.domains < setup.algorithm.min_domains:
                    unable[config.name] = "needs two training domains"
            except InputError as error:
                errors.append(error)
                unable[config.name] = str(error).rstrip(".")
        able = [row for row in self.rows if display_name(row) not in unable]
        if errors and (required or not able):
            raise errors[0]
        if not able:
            reasons = "; ".join(f"{name} {why}" for name, why in unable.items())
            raise InputError(f"there is nothing to compare: {reasons}.")
        for config in (c for c in short if c.name == display_name(able[0]) and c.held_out is not None):
            fold = fold_name(config.held_out)
            try:
                messages += _unknown_labels(prepare(config, device).setup.data, fold)
            except InputError as error:
                raise InputError(f"with {fold!r} held out: {error}") from error
        return replace(self, rows=able), unable, messages


def _unknown_labels(data: DomainData, fold: str) -> list[str]:
    """A message on classes that only the held-out domains have, and the accuracy that they allow."""
    labels = data.examples.known_labels()
    if data.classes is None or labels is None or labels.ndim != 1:
        return []
    test = labels[data.splits["test"].examples()]
    unknown = test[~np.isin(test, labels[data.splits["train"].examples()])]
    if not len(unknown):
        return []
    names = [repr(data.class_names[n] if data.class_names else n) for n in np.unique(unknown)]
    which = ", ".join(names[:SHOWN]) + ", …" * (len(names) > SHOWN)
    count = f"{len(unknown):,} of {len(test):,} held-out examples"
    most = f"so the accuracy is at most {1 - len(unknown) / len(test):.1%}"
    return [f"with {fold!r} held out no training example has the label {which} ({count}), {most}"]


def is_control(name: str) -> bool:
    """Whether a row only explains others and is never recommended: the majority class, random grouping."""
    return name == baselines.MAJORITY or name.endswith(":regrouped")


def results(
    configs: Sequence[RunConfig],
    records: Iterable[RunRecord],
    failed: Mapping[str, str] | None = None,
    left: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The comparison as plain data: what was selected, and a row for each algorithm, best first.

    ``failed`` are errors by the identity of their runs, ``left`` are rows that have left a race, and how:
    their scores are those of fewer seeds and trials, so that they have no rank.
    """
    done, failed = {r.config.identity: r for r in records if r.status != "failed"}, failed or {}
    cases = selection.trial_cases(configs, done.values(), failed)
    rows = selection.table(cases, lower := lower_is_better(metric_of(cases)), left)
    first = next((row for row in rows if row["algorithm"] == BASELINE), None)
    for row in rows:
        row["control"] = is_control(row["algorithm"])
        row["over_domains"] = None if first is None or row is first else over_domains(row, first)
    missing = sum(config.identity not in done for config in configs)
    found = None if missing else recommendation(rows, lower)
    return selection.summary_of(cases) | {
        "dataset": configs[0].dataset,
        "lower_is_better": lower,
        "baseline": BASELINE if first is not None else None,
        "folds": folds if (folds := cases["fold"].nunique()) < cases["held_out"].nunique() else None,
        "steps": configs[0].steps,
        "runs": len(configs),
        "baseline_fits": sum(baselines.is_one(r.config) for r in done.values()),
        "seconds": round(sum(r.seconds for r in done.values()), 3),
        "devices": sorted({r.environment["device"] for r in done.values() if "device" in r.environment}),
        "runs_missing": missing,
        "failed": {c.name: failed[c.identity] for c in configs if c.identity in failed},
        "undefined": {name: names for name, names in selection.further_metrics(cases)[1].items() if names},
        "units": next((note for r in done.values() if (note := r.notes.get("units"))), None),
        "recommendation": found.to_dict() if found else None,
        "rows": rows,
    }


def selected_trial(
    configs: Sequence[RunConfig], cases: Sequence[Mapping[str, Any]], name: str
) -> RunConfig | None:
    """A run of the trial of a row that was selected in most folds and seeds, of equals the first.

    Every seed has trials of its own, which its folds share; only the defaults are those of all seeds.
    """
    runs = {(c["fold"], c["seed"]): c for c in cases if c["algorithm"] == name and c["trial"] is not None}
    selected = [(case["settings"], case["lr"]) for case in runs.values()]
    best = max(selected, key=selected.count, default=None)
    return next((c for c in configs if c.name == name and (dict(c.settings), c.lr) == best), None)
