"""The paper's tables with one column per dataset (random grouping, WILDS and its ablations), beside ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from shoal import models
from shoal.errors import InputError
from shoal.experiments import protocol, selection
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.statistics import mean_sd
from shoal.paper import cdsprites, recipes
from shoal.paper.published import claims
from shoal.report.tables import Table

GROUPING = {"Fish": "fish", "Fish, RG": "fish:regrouped", "ERM": "erm"}
"""Random grouping: methods as the paper calls them, and as Shoal does."""
GROUPING_VARIANTS = [
    recipes.Variant("Fish"),
    recipes.Variant("Fish, RG", draw="regrouped"),
    recipes.Variant("ERM", "erm"),
]
SPRITES = (cdsprites.FISH, replace(cdsprites.REGROUPED, label="Fish, RG"), cdsprites.ERM)
ROWS = {"fish": "Fish", "irm": "IRM", "coral": "Coral", "reweighted": "Reweighted", "groupdro": "GroupDRO"}
"""What the paper calls methods that it does not call as Shoal does; its own training of ERM is ours too."""
OURS, THEIRS = "ERM (ours)", "erm, by WILDS"

Scores = Callable[["Column", Sequence[RunRecord]], Mapping[str, Sequence[float | None]]]


def test_split_scores(column: Column, records: Sequence[RunRecord]) -> dict[str, list[float | None]]:
    """On the test split: a value for every run that a row's name is the label of."""
    finished = {r.config.identity: r for r in records if r.status == "finished"}
    result: dict[str, list[float | None]] = {}
    for config in column.runs:
        record = finished.get(config.identity)
        score = record.measure("test", column.metric, last=column.last) if record else None
        result.setdefault(config.name, []).append(score)
    return result


@dataclass(frozen=True)
class Column:
    """A dataset's runs, or why there are none, and the paper's numbers."""

    dataset: str
    title: str
    metric: str
    paper: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By row: what is printed, and what is printed after ±."""
    runs: Sequence[RunConfig] = ()
    why_not: str = ""
    last: bool = False
    """Whether the last step counts and not the selected one."""
    scores: Scores = test_split_scores

    def entry(self, records: Sequence[RunRecord]) -> dict[str, Any]:
        """The column as plain data, for tables."""
        own = {c.identity for c in self.runs}
        mine = [r for r in records if r.config.identity in own]
        ours = {}
        for row, values in self.scores(self, mine).items() if own else ():
            mean, deviation = mean_sd(values)
            ours[row] = {"values": list(values), "mean": mean, "deviation": deviation}
        about = {name: getattr(self, name) for name in ("dataset", "title", "metric", "why_not")}
        counts = {"runs": len(own), "missing": len(own) - len(mine)}
        return {**about, **counts, "paper": dict(self.paper), "ours": ours}


def _column(plan: Callable[[], Sequence[RunConfig]], **options: Any) -> Column:
    """A column whose runs ``plan`` lists; where that is refused, such as for want of files, it says why."""
    try:
        return Column(runs=plan(), **options)
    except InputError as error:
        return Column(why_not=str(error), **options)


# Random grouping


def grouping_claims() -> dict[str, dict[str, Any]]:
    """The paper's table of random grouping, one column at a time, by the names of datasets."""
    every = claims("grouping") + claims("domainbed")
    return {claim["names"][0]: claim for claim in every if claim["table"] == "random grouping"}


@dataclass(frozen=True)
class Settings:
    seeds: int = 3
    steps: int = protocol.STEPS
    """On DomainBed's datasets."""
    passes: int = cdsprites.PASSES
    """On CdSprites."""
    size: int = 64
    model: str = "resnet50.tv_in1k"
    """On DomainBed's datasets; with torchvision's weights, unless ``weights`` are given."""
    weights: str | None = None
    trials: int = 1
    """Of hyperparameters."""
    data: Mapping[str, Any] = field(default_factory=dict)
    changes: recipes.Changes = field(default_factory=recipes.Changes)
    """On WILDS' datasets."""
    preset: str = "paper"


def grouping(settings: Settings, only: Sequence[str] | None = None) -> list[Column]:
    """Fish, Fish on the same examples in random groups, and ERM, on the paper's datasets or any others."""
    paper, result = grouping_claims(), []
    for name in only or paper:
        claim = paper.get(name, {"dataset": name, "metric": "accuracy", "values": {}})
        options: dict[str, Any] = {"dataset": name, "title": claim["dataset"], "metric": claim["metric"]}
        if name == "cdsprites":  # at the last step: what it validates on is drawn like its test domain
            deal: dict[str, Any] = {"passes": settings.passes, "size": settings.size, "eval_limit": 5000}
            plan = partial(cdsprites.configs, SPRITES, [10], range(settings.seeds), **deal)
            options["last"] = True
        elif name in recipes.datasets():
            preset, changes = settings.preset, settings.changes
            plan = partial(recipes.runs, name, GROUPING_VARIANTS, preset=preset, changes=changes)
            options["metric"] = recipes.headline(name)
        else:
            plan = partial(_domainbed_runs, name, settings)
            options["scores"] = _domainbed_scores
        result.append(_column(plan, paper=claim["values"], **options))
    return result


def _domainbed_runs(dataset: str, settings: Settings) -> list[RunConfig]:
    pretrained = settings.weights is None and "pretrained" in models.options_of(settings.model)
    return protocol.plan(
        {dataset: settings.data},
        list(GROUPING.values()),
        trials=settings.seeds,
        draws=settings.trials,
        steps=settings.steps,
        model=settings.model,
        model_options={"pretrained": True} if pretrained else {},
        weights=settings.weights,
    )


def _domainbed_scores(column: Column, records: Sequence[RunRecord]) -> dict[str, list[float | None]]:
    """Averages over the held-out domains, chosen by training-domain validation."""
    result = selection.results(selection.sweep(column.runs, records), column.dataset)
    rows = {row["algorithm"]: row["average"]["values"] for row in result["rows"]}
    return {title: rows[name] for title, name in GROUPING.items()}


# WILDS


def wilds_claim(table: str, dataset: str) -> dict[str, Any]:
    """What the paper says of a dataset in one of its tables; nothing where it has no column for it."""
    for claim in claims("wilds"):
        if (claim["table"], claim["dataset"], claim["split"]) == (table, dataset, "test"):
            return claim
    return {"metric": recipes.headline(dataset), "values": {}}


def wilds(
    which: str, names: Sequence[str], preset: str, changes: recipes.Changes, algorithms: Sequence[str] = ()
) -> list[Column]:
    """The table ``main`` with a row for every algorithm, or that of an ablation."""
    result = []
    for name in names:
        variants = [recipes.Variant(ROWS.get(algorithm, algorithm), algorithm) for algorithm in algorithms]
        variants = variants if which == "main" else recipes.ablation(which, name, preset)
        claim = wilds_claim(which, name)
        plan = partial(recipes.runs, name, variants, preset=preset, changes=changes)
        paper = wilds_rows(claim["values"], [v.label for v in variants])
        result.append(_column(plan, dataset=name, title=name, metric=claim["metric"], paper=paper))
    return result


def wilds_rows(values: Mapping[str, Any], rows: Sequence[str]) -> dict[str, Any]:
    """The paper's numbers for ``rows``. ERM is as its authors trained it, with WILDS' own beside it."""
    named = {("erm" if k == OURS else THEIRS if k == "ERM" else k): v for k, v in values.items()}
    return {k: v for k, v in named.items() if k in rows or (k == THEIRS and "erm" in rows)}


def rivals(table: str, dataset: str) -> list[str]:
    """The rows beside Fish's in one of the paper's tables that we train ourselves."""
    named = ["erm" if row == OURS else row for row in wilds_claim(table, dataset)["values"]]
    return [row for row in named if row not in ("Fish", "ERM")]


# As text


def is_share(metric: str) -> bool:
    """Whether it is shown in percent; a correlation is not."""
    return metric.lower().split()[-1] in ("accuracy", "f1", "recall", "auc")


def unit(metric: str) -> str:
    return f"{metric} (%)" if is_share(metric) else metric


def table(entries: Sequence[Mapping[str, Any]]) -> Table:
    """``entries`` are the columns (see :meth:`Column.entry`); the paper's numbers stand beneath ours."""
    result = Table(["", *(f"{e['title']}, {unit(e['metric'])}" for e in entries)])
    for row in dict.fromkeys(row for e in entries for row in (*e["ours"], *e["paper"])):
        if any(row in e["ours"] for e in entries):
            result.add(row, *(_ours(e["ours"].get(row), e["metric"]) for e in entries))
        if any(row in e["paper"] for e in entries):
            printed = [(e["paper"].get(row, ()), e["metric"]) for e in entries]
            cells = [" ± ".join(_number(n, metric) for n in numbers) or "–" for numbers, metric in printed]
            result.add(f"{row}, the paper", *cells)
    return result


def _number(value: float, metric: str, scale: float = 1.0) -> str:
    return f"{scale * value:.1f}" if is_share(metric) else f"{value:.3g}"


def _ours(values: Mapping[str, Any] | None, metric: str) -> str:
    if values is None or values["mean"] is None:
        return "–"
    known, every = sum(v is not None for v in values["values"]), len(values["values"])
    spread = "" if values["deviation"] is None else f" ± {_number(values['deviation'], metric, 100)}"
    of = f" ({known} of {every})" if known < every else ""
    return f"{_number(values['mean'], metric, 100)}{spread}{of}"


def gaps(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was not run, and why; how many runs are missing."""
    lines = [f"{e['title']}: not run: {e['why_not']}" for e in entries if e["why_not"]]
    some = [e for e in entries if e["missing"] and not e["why_not"]]
    return lines + [f"{e['title']}: {e['missing']} of {e['runs']} runs are missing." for e in some]


def gain(entries: Sequence[Mapping[str, Any]], row: str, control: str) -> list[str]:
    """How much better ``row`` is than ``control`` with the same seeds."""
    lines = []
    for entry in entries:
        ours, other = entry["ours"].get(row), entry["ours"].get(control)
        pairs = zip(ours["values"], other["values"], strict=True) if ours and other else ()
        both = [(a, b) for a, b in pairs if None not in (a, b)]
        if both:
            scale, points = (100, "points") if is_share(entry["metric"]) else (1, entry["metric"])
            mean = scale * sum(a - b for a, b in both) / len(both)
            wins = f"better with {sum(a > b for a, b in both)} of {len(both)} seeds"
            lines.append(f"{entry['title']}: {row} against {control} {mean:+.2g} {points}; {wins}.")
    return lines
