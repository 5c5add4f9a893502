"""Tables with a column a dataset: WILDS, its ablations, random grouping, DomainBed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from shoal.experiments import selection
from shoal.experiments.record import RunRecord
from shoal.paper.evidence.records import Kept, Records
from shoal.paper.evidence.verdicts import (
    NOT_JUDGED,
    NOT_RUN,
    Check,
    Judged,
    Options,
    judged,
    span,
    spread,
    unjudged,
)
from shoal.paper.published import claims as read_claims

FOLDERS = {"main": "wilds", "random grouping": "grouping"}
"""Where the records of a table are, if not in a folder of its name."""


class Cell(NamedTuple):
    """Our values for a row of a table on a dataset, and the paper's number with what it prints after ±."""

    dataset: str
    metric: str
    row: str
    values: Sequence[float]
    paper: Sequence[float] | None
    smaller: str = ""
    """What is not as in the paper's experiment; nothing where all is."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def digits(self) -> int:
        return 1 if shares(self.metric) else 3

    @property
    def printed(self) -> str:
        return "–" if self.paper is None else " ± ".join(f"{v:.{self.digits}f}" for v in self.paper)


def shares(metric: str) -> bool:
    """Whether it is shown in percent; a correlation is not."""
    return metric.lower().split()[-1] in ("accuracy", "f1", "recall", "auc")


def cells(records: Records, table: str) -> tuple[list[Cell], list[Kept]]:
    """From the runs in the folders in which `shoal reproduce` keeps those of this table."""
    from shoal.paper import recipes

    folder = FOLDERS.get(table, table)
    mine = [k for k in records.runs if k.path.parent.name == folder]
    found: list[Cell] = []
    used: list[Kept] = []
    for dataset in dict.fromkeys(k.content.config.dataset for k in mine):
        own = [k for k in mine if k.content.config.dataset == dataset]
        if dataset in recipes.datasets():
            found += _of_recipe(table, dataset, [k.content for k in own])
        elif all(k.content.config.protocol for k in own):
            found += _of_protocol(dataset, [k.content for k in own], table)
        else:
            continue  # CdSprites, which has claims of its own
        used += own
    return found, used


def _of_recipe(table: str, dataset: str, records: Sequence[RunRecord]) -> list[Cell]:
    from shoal.paper import grouping, recipes, wilds

    labels = list(dict.fromkeys(r.config.name for r in records))
    metric = recipes.judged(dataset)
    if FOLDERS.get(table) == "grouping":
        paper = grouping.said().get(dataset, {"values": {}})["values"]
    else:
        said = wilds.said(table, dataset)
        metric, paper = said["metric"], wilds._named(said["values"], labels)
    models = {recipes.settings(dataset, p)["model"] for p in recipes.PRESETS}
    found = []
    for label in labels:
        own = [r for r in records if r.config.name == label and r.status == "finished"]
        scores = [s for r in own if (s := r.measure("test", metric)) is not None]
        others = sorted({str(r.config.model) for r in own if r.config.model not in models})
        others += [f"{n:,} examples a split" for n in {r.config.eval_limit for r in own} if n]
        trials = [(r.config.seed, r.config.data_options.get("fold")) for r in own]
        others += ["several settings in one folder"] * (len(set(trials)) < len(trials))
        scale = 100 if shares(metric) else 1
        values = [scale * s for s in scores]
        found.append(Cell(dataset, metric, label, values, paper.get(label), ", ".join(others)))
    return found


def _of_protocol(dataset: str, records: Sequence[RunRecord], table: str) -> list[Cell]:
    """DomainBed's: the average over the domains left out, by training-domain validation, a value a trial."""
    from shoal.experiments.protocol import STEPS

    most = max(r.config.steps for r in records)
    own = [r for r in records if r.config.steps == most]
    result = selection.results(selection.sweep([r.config for r in own], own), dataset)
    said = next(
        (c for c in read_claims("domainbed") if _is(dataset, c["names"]) and c["table"] == table), None
    )
    titles = {plain(said.get("rows", {}).get(t, t)): t for t in said["values"]} if said else {}
    smaller = f"{most:,} of {STEPS:,} steps" if most < STEPS else ""
    order = {title: place for place, title in enumerate(said["values"] if said else ())}
    found = []
    for row in result["rows"]:
        values = [100 * v for v in row["average"]["values"] if v is not None]
        title = titles.get(plain(row["algorithm"]), row["algorithm"])
        paper = said["values"].get(title) if said else None
        found.append(Cell(dataset, result["metric"] or "accuracy", title, values, paper, smaller))
    return sorted(found, key=lambda cell: order.get(cell.row, len(order)))


def plain(name: str) -> str:
    """Spelling and hyphens do not count; a way of drawing does."""
    return "".join(c for c in name.lower() if c.isalnum() or c == ":")


def _is(dataset: str, names: Iterable[str]) -> bool:
    return plain(dataset) in map(plain, names)


def _table(
    found: Sequence[Cell],
    used: Sequence[Kept],
    checks: Sequence[Check],
    ours: str,
    missing: Sequence[str] = (),
) -> Judged:
    rows = [
        [c.dataset, c.metric, c.row, spread(c.values, c.digits), c.printed, str(len(c.values))] for c in found
    ]
    every = [*checks, *(Check(name, None) for name in missing)]
    made = judged(
        every,
        ours=ours or "–",
        seeds=span(len(c.values) for c in found),
        columns=("dataset", "metric", "row", "ours", "the paper", "seeds"),
        rows=rows,
        used=used,
        data=list(found),
    )
    small = dict.fromkeys(f"{c.dataset} ({c.smaller})" for c in found if c.smaller)
    if small:
        return unjudged(made, f"Run in a smaller setting than the paper's: {', '.join(small)}.")
    return made


def _close(cell: Cell, within: float) -> bool:
    own = within if shares(cell.metric) else within / 100
    printed = cell.paper or (math.nan,)
    return abs(cell.mean - printed[0]) <= max(own, printed[1] if len(printed) > 1 else 0.0)


def table_values(records: Records, options: Options) -> Judged:
    return _values(*cells(records, options["table"]), options["within"], _datasets(options["table"]))


def _values(found: Sequence[Cell], used: Sequence[Kept], within: float, wanted: Sequence[str]) -> Judged:
    told = [c for c in found if c.values and c.paper is not None]
    checks = [Check(f"{c.dataset}, {c.row}", _close(c, within)) for c in told]
    holding = sum(bool(c.holds) for c in checks)
    ours = f"{holding} of {len(checks)} numbers agree" if checks else ""
    missing = [name for name in wanted if name not in {c.dataset for c in told}]
    return _table(found, used, checks, ours, missing)


def _datasets(table: str) -> list[str]:
    """Those that the paper's table has a column for."""
    return [c["dataset"] for c in read_claims("wilds") if (c["table"], c["split"]) == (table, "test")]


def table_ahead(records: Records, options: Options) -> Judged:
    """That ``row`` is above the rows ``than``, or above all others, on each of ``datasets``."""
    found, used = cells(records, options["table"])
    checks, ours = [], []
    for dataset in options["datasets"]:
        own = {c.row: c for c in found if c.dataset == dataset and c.values}
        others = [own[r] for r in options.get("than") or own if r in own and r != options["row"]]
        if options["row"] not in own or not others:
            checks.append(Check(dataset, None))
            continue
        mine, best = own[options["row"]], max(others, key=lambda c: c.mean)
        checks.append(Check(f"{dataset} against {best.row}", mine.mean > best.mean))
        ours.append(f"{dataset} {mine.mean - best.mean:+.{mine.digits}f} against {best.row}")
    return _table(found, used, checks, "; ".join(ours))


def table_flat(records: Records, options: Options) -> Judged:
    found, used = cells(records, options["table"])
    checks, ours = [], []
    for dataset in dict.fromkeys(c.dataset for c in found):
        own = [c for c in found if c.dataset == dataset and c.values and c.row not in options["but"]]
        if len(own) < 2:
            checks.append(Check(dataset, None))
            continue
        apart = max(c.mean for c in own) - min(c.mean for c in own)
        checks.append(
            Check(dataset, apart <= (options["within"] if shares(own[0].metric) else options["within"] / 100))
        )
        ours.append(f"{dataset}: within {apart:.{own[0].digits}f}")
    return _table(found, used, checks, "; ".join(ours))


def table_shown(records: Records, options: Options) -> Judged:
    found, used = cells(records, options["table"])
    if not any(c.values for c in found):
        return Judged(NOT_RUN)
    made = _table(found, used, [Check("shown", True)], f"{len(found)} rows")
    return replace(made, verdict=NOT_JUDGED, reason="The paper prints no numbers and draws no conclusion.")


def _swept(records: Records, table: str) -> tuple[list[Cell], list[Kept], list[str]]:
    """Records of sweeps on the datasets of DomainBed's table, and those it wants."""
    wanted = [c for c in read_claims("domainbed") if c["table"] == table and c["names"]]
    found: list[Cell] = []
    used: list[Kept] = []
    missing = []
    for claim in wanted:
        own = [
            k
            for k in records.runs
            if k.content.config.protocol
            and k.path.parent.name != FOLDERS["random grouping"]
            and _is(k.content.config.dataset, claim["names"])
        ]
        for dataset in dict.fromkeys(k.content.config.dataset for k in own):
            found += _of_protocol(
                dataset, [k.content for k in own if k.content.config.dataset == dataset], table
            )
        used += own
        missing += [] if own else [claim["names"][0]]
    return found, used, missing


def domainbed_values(records: Records, options: Options) -> Judged:
    found, used, missing = _swept(records, options["table"])
    return _values(found, used, options["within"], missing)


def domainbed_rank(records: Records, options: Options) -> Judged:
    found, used, missing = _swept(records, options["table"])
    average = next(c for c in read_claims("domainbed") if c["table"] == options["table"] and not c["names"])
    if missing:
        return Judged(NOT_RUN, reason=f"It needs all of the datasets; no record of: {', '.join(missing)}.")
    means = {}
    datasets = {c.dataset for c in found}
    for row in average["values"]:
        own = [c.mean for c in found if c.row == row and c.values]
        if len(own) == len(datasets):
            means[row] = statistics.fmean(own)
    order = sorted(means, key=lambda r: -means[r])
    whole = len(order) == len(average["values"])
    checks = [
        Check(
            f"rank {options['rank']}", order.index(options["row"]) + 1 == options["rank"] if whole else None
        ),
        Check(
            "above ERM",
            means[options["row"]] > means["ERM"] if {"ERM", options["row"]} <= set(means) else None,
        ),
    ]
    return _table(found, used, checks, ", ".join(f"{r} {means[r]:.2f}" for r in order[:3]))
