"""Runs → one page of HTML that needs nothing else: what was compared, tables, curves, every run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import shoal
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord, selection_score
from shoal.experiments.statistics import t_limit
from shoal.experiments.store import row_of
from shoal.report import charts, columns, figures
from shoal.report.compare import _hours, _many, _spread, _troubles, recommended, words
from shoal.report.groups import Group, Run, Trouble, called, listed, plain, strange, test_domains
from shoal.terminal import clean

PANELS, MATRICES = 24, 6
"""How many figures of a kind a group of runs gets."""
LINES = 8
"""Training domains that have a learning curve each."""
GROUPS, ROWS = 20, 500
"""Groups with tables and figures, domains in a table."""


@dataclass(frozen=True)
class Content:
    groups: Sequence[Group]
    columns: Sequence[Mapping[str, Any]] = ()
    """What became of the columns of files: ``file``, ``rows`` and ``columns``, as in ``columns.json``."""
    troubles: Sequence[Trouble] = ()
    title: str = "Runs"
    made: str = ""


def render(content: Content) -> str:
    """The page; whatever goes into the template is escaped, without control characters."""
    import jinja2
    from markupsafe import Markup

    def safe(value: Any) -> Any:
        return clean(value, "\n") if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=safe,
    )
    environment.filters["number"] = _number
    return environment.get_template("page.html").render(context(content))


def context(content: Content) -> dict[str, Any]:
    """All that the template says, as plain data; figures are SVG."""
    runs = list({id(run): run for group in content.groups for run in group.runs}.values())  # some are in two
    states = Counter(run.record.status for run in runs).items()
    counted = ", ".join(f"{n:,} {state}" for state, n in states)
    took = _hours(sum(run.record.seconds for run in runs))
    chosen = frozenset[str]().union(*(g.chosen for g in content.groups))
    return vars(content) | {
        "version": shoal.__version__,
        "counted": f"{_many(len(runs), 'run')} ({counted}), {took} of training.",
        "groups": [_group(g, f"g{n}") for n, g in enumerate(content.groups[:GROUPS])],
        "groups_left": max(0, len(content.groups) - GROUPS),
        "columns": [_columns(c) for c in content.columns],
        "runs": [_run(run) | {"chosen": run.identity in chosen} for run in runs],
        "any_chosen": bool(chosen),
    }


def lead(group: Group) -> list[str]:
    """What comes first: which algorithm to use and how sure that is, in the terminal's own sentences."""
    result = group.result
    if group.kind == "runs":
        of = {"test": "", "validation": "validation examples of ", "train": "the training examples of "}
        where = of.get(result["split"], f"{result['split']} of ") + listed(result["held_out"])
        names, seeds = _algorithms(result), _many(len(result["seeds"]), "seed")
        about = f"{_many(len(group.runs), 'run')} of {names}, scored on {where}, {seeds}."
        return [clean(about), f"This is not a comparison: {_why_not(result)}."]
    if lines := recommended(result):
        return lines
    if missing := result.get("runs_missing"):
        return [f"No recommendation yet: {missing:,} of {result['runs']:,} runs are missing."]
    return ["No recommendation: no algorithm has a score in every case."]


def compared(group: Group) -> str:
    """What was compared, on which held-out domains, and how hyperparameters were chosen."""
    result, names = group.result, list(group.result["held_out"])
    own = max((test_domains(r.record) for r in group.runs), key=len, default=[])
    names = own if len(own) > 1 == len(names) else names  # of one test split its own domains
    where = f"held-out domain{'s' * (len(names) > 1)} {listed(names)}"
    seeds = _many(len(result["seeds"]), "seed")
    return f"{_algorithms(result)} were compared on the {where}, with {seeds}. {group.rule}"


def _algorithms(result: Mapping[str, Any]) -> str:
    return listed(row["algorithm"] for row in result["rows"])


def _why_not(result: Mapping[str, Any]) -> str:
    if len(result["rows"]) < 2:
        return "there is only one algorithm"
    if all(row["average"]["mean"] is None for row in result["rows"]):
        return "no run has a score"
    if not result["several"]:
        return "there is only one algorithm, with several settings"
    return "these runs do not share a validation split and a test split"


def _group(group: Group, name: str) -> dict[str, Any]:
    result = group.result
    if group.kind == "runs":
        rows = [row for row in result["rows"] if row["runs_diverged"]]
        lost = ", ".join(f"{row['algorithm']} {row['runs_diverged']}" for row in rows)
        more = [f"Diverged runs: {lost}."] if lost else []
    else:
        more = words(result) if group.kind == "comparison" else _troubles(result)
        more = [line for line in more if line not in recommended(result)]
        units = dict.fromkeys(note for r in group.runs if (note := r.record.notes.get("units")))
        more += [line for note in units if (line := f"{note[:1].upper()}{note[1:]}.") not in more]
    about = result.get("recommendation") or {}
    first = about.get("take") or about.get("begin") or result["baseline"]  # what others are held against
    several = len(result["held_out"]) > 1
    return {
        "id": name,
        "title": result.get("title") or result["dataset"],
        "apart": group.apart,
        "lead": lead(group),
        "decision": _decision(result),
        "compared": "" if group.kind == "runs" else compared(group),
        "words": more,
        "table": _table(result, several),
        "differences": _differences(result, first),
        "by_domain": charts.domains(result, first) if result["metric"] and result["held_out"] else None,
        "each": _each_domain(result) if several else None,
        "metric": figures.unit(result["metric"])[1],
        "lower": result["lower_is_better"],
        **_figures(group, name),
    }


def _table(result: Mapping[str, Any], several: bool) -> dict[str, Any]:
    """A row for every algorithm: the average and the worst held-out domain before anything else."""
    unit, names = figures.unit(result["metric"])[1], result["held_out"]
    every = [(name, v) for row in result["rows"] for name, v in row.get("also", {}).items()]
    also = dict.fromkeys(name for name, v in every if v["mean"] is not None)
    columns = [("average", unit), ("worst domain", unit)] if several else [(n, unit) for n in names]
    columns += [(figures.unit(name)[1], "average") if several else (name, "") for name in also]
    rows = []
    for row in result["rows"]:
        cells = [_cell(row["average"])] if names else []
        cells += [_cell(row["worst"]) | {"n": (row["worst"] or {}).get("domain", "")}] if several else []
        cells += [_cell(row.get("also", {}).get(name)) for name in also]
        rows.append({"algorithm": row["algorithm"], "cells": cells, "mark": _mark(row, result)})
    return {"columns": columns, "rows": rows}


def _mark(row: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    name, about = row["algorithm"], result.get("recommendation") or {}
    if name == about.get("take") and _is_better(about):
        return "recommended"
    return "control" if row["control"] else "baseline" if name == result["baseline"] else ""


def _is_better(about: Mapping[str, Any]) -> bool:
    """Whether what is recommended is better than the majority class, as far as that was compared."""
    return bool(about.get("majority", {"better": True})["better"])


def _cell(values: Mapping[str, Any] | None, sd: bool = True) -> dict[str, Any]:
    """Mean ± deviation, of how many if not of all, and a number to sort by; or why there is nothing."""
    if values is None:
        return {"text": "–", "value": None, "n": ""}
    known, every = sum(v is not None for v in values["values"]), len(values["values"])
    if not known:
        states = [name for name, count in (values.get("trials") or {}).items() if count]
        states += values.get("status", ())
        why = next((state for state in ("diverged", "undefined", "failed") if state in states), "–")
        return {"text": why, "value": None, "n": ""}
    text = _spread(values if sd else {**values, "sd": None})
    return {"text": text, "value": values["mean"], "n": "" if known == every else f"n = {known} of {every}"}


def _each_domain(result: Mapping[str, Any]) -> dict[str, Any]:
    """A row for every domain and a column for every algorithm, averages and worst domains on top.

    With many algorithms there is room for means alone.
    """
    rows, sd, names = result["rows"], len(result["rows"]) <= charts.COLOURS, result["held_out"][:ROWS]
    top = {"average": "average", "worst domain": "worst"}
    return {
        "columns": [(row["algorithm"], _mark(row, result)) for row in rows],
        "top": [(name, [_cell(row[key], sd) for row in rows]) for name, key in top.items()],
        "rows": [(name, [_cell(row["domains"][name], sd) for row in rows]) for name in names],
        "left": len(result["held_out"]) - len(names),
    }


def _decision(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """The difference that decides: the recommended row against the best of the others.

    Where that is not shown to be better than the majority class, it is the difference to that.
    """
    from shoal.experiments import compare

    about = result.get("recommendation") or {}
    rows = {row["algorithm"]: row for row in result["rows"]}
    other = about.get("reference") if _is_better(about) else compare.MAJORITY
    take = about.get("take")
    if take not in rows or other not in rows:
        return None
    found = compare.over_domains(rows[take], rows[other])
    if found is None or found["low"] is None:
        return None
    found["se"] = (found["high"] - found["mean"]) / t_limit(compare.LEVEL, len(found["values"]) - 1)
    chart = charts.differences({f"{take} − {other}": found}, result["metric"])
    side = "left" if result["lower_is_better"] else "right"
    text = (
        f"Difference in {chart['unit']} of the average over domains. Dark: one standard error; light: 95 % "
        f"interval; small dots: the held-out domains. To the {side} of zero {take} is better."
    )
    return chart | {"text": text}


def _differences(result: Mapping[str, Any], name: str | None) -> dict[str, Any] | None:
    """Every row against the first one, paired by domain."""
    from shoal.experiments import compare

    rows = {str(row["algorithm"]): row for row in result["rows"]}
    if name not in rows:
        return None
    pairs = {n: compare.over_domains(row, rows[name]) for n, row in rows.items() if n != name}
    found = {n: about for n, about in pairs.items() if about is not None}
    return charts.differences(found, result["metric"]) | {"to": name} if found else None


class Drawn:
    """Figures with names of their own on the page."""

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0

    def __call__(self, figure: Any, title: str) -> Any:
        from markupsafe import Markup

        self.count += 1
        return Markup(figures.svg(figure, title, f"{self.name}p{self.count}"))


def _figures(group: Group, name: str) -> dict[str, Any]:
    """Learning curves of the chosen runs, and of all runs of an algorithm of which none was."""
    draw, chosen = Drawn(name), {r.record.config.name for r in group.runs if r.identity in group.chosen}
    shown = [r for r in group.runs if r.identity in group.chosen or r.record.config.name not in chosen]
    names = called(shown) if group.kind == "runs" else [run.record.config.name for run in shown]
    panels: dict[str, list[RunRecord]] = {row["algorithm"]: [] for row in group.result["rows"]}
    for own, run in zip(names, shown, strict=True):
        panels.setdefault(own, []).append(run.record)
    records = [record for own in panels.values() for record in own]
    metric = next((m for r in records if (m := _curves_metric(r))), group.result["metric"])
    limits = _limits(records)
    made = [(n, learning_curves(own, str(n), limits)) for n, own in list(panels.items())[:PANELS]]
    return {
        "curves": [draw(figure, f"{metric} of {n} by step and domain") for n, figure in made if figure],
        "curves_left": max(0, len(panels) - PANELS),
        "curves_metric": figures.unit(metric)[1],
        "curves_of": "the runs selected on validation" if group.chosen else "all runs",
        **_agreement([r.record for r in shown], draw),
    }


def _limits(records: Iterable[RunRecord]) -> tuple[float, float] | None:
    """The same for all panels, so that they can be compared, if all values are between 0 and 1."""
    points = [s for r in records for m in r.history for s in m["scores"].values()]
    found = [
        v for s in points for v in ([selection_score(s)[1]] if s.get("selects") else s["domains"].values())
    ]
    values = [v for v in found if v is not None and math.isfinite(v)]
    if not values or min(values) < 0 or max(values) > 1:
        return None
    return min(values) - 0.02, max(values) + 0.02


def learning_curves(
    records: Sequence[RunRecord], title: str = "", limits: tuple[float, float] | None = None
) -> Any:
    """Plot the scores of every domain by step, dashed for training domains.

    Training domains are scored on validation, unless validation consists of other domains. They are one curve
    if there are many, if the runs hold out different domains, or if the metric is measured on all examples
    together, such as AUC. Held-out domains are one curve if there are many.

    Args:
        records: runs.
        title: title of the figure.
        limits: lowest and highest value to show.

    Returns:
        A matplotlib figure, or ``None`` if there are fewer than two evaluations.
    """
    measured = [r for r in records if any(m["scores"] for m in r.history)]
    if all(len(r.history) < 2 for r in measured):
        return None
    metric = str(_curves_metric(measured[0]))
    held_out: dict[str, list[Any]] = {}
    trained: dict[str, list[Any]] = {}
    places = {tuple(test_domains(r)) for r in measured}
    crowd = len({name for names in places for name in names}) > LINES
    for record in measured:
        splits, tests = record.history[-1]["scores"], test_domains(record)
        whole = {split for split, scores in splits.items() if scores.get("selects")}
        if "test" in splits and ("test" in whole or crowd):
            name = tests[0] if len(tests) == 1 and not crowd else "held-out domains"
            held_out.setdefault(name, []).append(_curve(record, "test", None, metric))
        elif "test" in splits:
            for name in tests:
                held_out.setdefault(name, []).append(_curve(record, "test", name, metric))
        own = "validation" if "validation" in splits and not strange(record) else "train"
        names = list(splits[own]["domains"]) if own in splits else []
        if names and (own in whole or len(places) > 1 or len(names) > LINES):
            trained.setdefault(f"{own}, all domains", []).append(_curve(record, own, None, metric))
        else:
            for name in names:
                trained.setdefault(f"{name} ({own})", []).append(_curve(record, own, name, metric))
    return figures.curves(held_out | trained, metric, title, list(trained), limits)


def _curves_metric(record: RunRecord) -> str | None:
    """What curves are of: the metric that the run selects by."""
    return next((selection_score(s)[0] for m in record.history for s in m["scores"].values()), None)


def _curve(
    record: RunRecord, split: str, domain: str | None, metric: str
) -> tuple[list[float], list[float | None]]:
    points = [(m["step"], m["scores"][split]) for m in record.history if split in m["scores"]]
    same = [(step, scores) for step, scores in points if selection_score(scores)[0] == metric]
    values = [selection_score(s)[1] if domain is None else s["domains"].get(domain) for _, s in same]
    return [step for step, _ in same], values


AGREEMENT = {"mean_cosine": "mean cosine", "sign_agreement": "sign agreement"}


def _agreement(records: Sequence[RunRecord], draw: Callable[[Any, str], Any]) -> dict[str, Any]:
    """How well gradients agreed by step, and the last matrix of cosines of one run of each algorithm."""
    curves: list[Any] = []
    for key, label in AGREEMENT.items():
        lines: dict[str, list[Any]] = {}
        for record in records:
            points = [p for p in record.agreement if p.get(key) is not None]
            if points:
                line = [p["step"] for p in points], [p[key] for p in points]
                lines.setdefault(record.config.name, []).append(line)
        if lines:
            title = f"{label} of gradients"
            curves.append(draw(figures.curves(lines, label, title), f"{title} by step and algorithm"))
    matrices: dict[str, Any] = {}
    for record in records:
        name, seed = record.config.name, record.config.seed
        known = ((p["step"], m) for p in reversed(record.agreement) if (m := cosines_of(record, p)))
        if name not in matrices and len(matrices) < MATRICES and (last := next(known, None)):
            step, cosines = last
            figure = figures.matrix(*cosines, f"{figures.short(name)}, seed {seed}, step {step:,}")
            matrices[name] = draw(
                figure, f"cosine similarity of gradients between domains, {name}, seed {seed}"
            )
    return {"agreement": curves, "matrices": list(matrices.values())}


def cosines_of(record: RunRecord, point: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]] | None:
    """The domains of a measurement, in the order of the training split, and a row for each."""
    content = point.get("matrix")
    matrix = content if isinstance(content, Mapping) else {**point, "values": content}
    names, values = (list(matrix.get(key) or ()) for key in ("domains", "values"))
    if not names or len(values) != len(names) or any(len(row) != len(names) for row in values):
        return None
    splits = record.history[-1]["scores"] if record.history else {}
    known = list(splits.get("train", splits.get("validation", {})).get("domains", ()))
    order = sorted(range(len(names)), key=lambda i: [*known, *names].index(names[i]))
    return [names[i] for i in order], [[values[i][j] for j in order] for i in order]


def _columns(report: Mapping[str, Any]) -> dict[str, Any]:
    """Warnings, then a row for every column, those with warnings first."""
    table = columns.table({**report, "columns": sorted(report["columns"], key=lambda c: not c["warnings"])})
    return {"file": report["file"], "warnings": columns.remarks(report), "table": table}


USUAL = {f.name: getattr(RunConfig("", "", 1), f.name) for f in fields(RunConfig)}
ALWAYS = ("dataset", "algorithm", "steps", "seed", "lr")


def _run(run: Run) -> dict[str, Any]:
    record, row = run.record, row_of(run.record)
    metric, test = row.get("metric", "score"), row.get("test")
    if test is not None and record.chosen["test"].get("selects"):
        metric, test = selection_score(record.chosen["test"])
    settings = []
    for name, value in record.config.to_dict().items():
        if value != USUAL[name] or name in ALWAYS:
            parts = (
                {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {name: value}
            )
            settings += [(k, plain(v)) for k, v in parts.items()]
    return vars(run) | {
        "row": row,
        "value": test,
        "test": "–" if test is None else f"{metric} {test:{'.3f' if metric == 'accuracy' else '.4g'}}",
        "settings": settings,
        "python": "" if run.command else python(record.config),
    }


def python(config: RunConfig) -> str:
    """The run as a call, for one whose command was not kept."""
    from shoal.experiments import baselines

    if config.dataset == "(python)":
        return "shoal.fit(…), with data from Python"
    options = ", ".join(f"{k}={v!r}" for k, v in config.to_dict().items() if v != USUAL[k])
    module = "baselines" if baselines.is_one(config) else "run"
    return f"shoal.experiments.{module}.run(RunConfig({options}))"


def _number(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.4g}"
