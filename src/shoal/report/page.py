"""Runs → one page of HTML that needs nothing else: what was compared, tables, curves, every run."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import shoal
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord, row_of
from shoal.report import charts, columns, figures
from shoal.report.compare import _hours, _spread, _troubles, recommended, words
from shoal.report.groups import (
    Group,
    Run,
    Trouble,
    called,
    judged_by,
    listed,
    metric_of,
    plain,
    strange,
    test_domains,
)
from shoal.terminal import clean

PANELS, MATRICES = 24, 6
"""How many pictures of a kind a group of runs gets."""
DOMAINS = 10
"""Domains of a split that are named with a run."""
LINES = 8
"""Domains trained on that have a learning curve each."""
GROUPS, ROWS = 20, 500
"""Groups with tables and pictures, domains in a table."""


@dataclass(frozen=True)
class Strip:
    """A few images of a domain, with what a model makes of them."""

    domain: str
    words: str
    images: Sequence[Mapping[str, Any]]
    """``png`` as base64, ``wrong``, and ``words`` on it."""


@dataclass(frozen=True)
class Samples:
    path: str
    strips: Sequence[Strip] = ()
    error: str = ""


@dataclass(frozen=True)
class Content:
    groups: Sequence[Group]
    columns: Sequence[Mapping[str, Any]] = ()
    """What became of the columns of files: ``file``, ``rows`` and ``columns``, as in ``columns.json``."""
    samples: Sequence[Samples] = ()
    troubles: Sequence[Trouble] = ()
    title: str = "Runs"
    made: str = ""
    sources: Sequence[str] = field(default_factory=tuple)


def render(content: Content) -> str:
    """The page."""
    need_report()
    return filled("page.html", context(content))


def need_report() -> None:
    """Both packages are asked for at once, before anything is drawn."""
    if any(importlib.util.find_spec(name) is None for name in ("jinja2", "matplotlib")):
        raise InputError("a report needs jinja2 and matplotlib: pip install 'shoal[report]'.")


def filled(name: str, values: Mapping[str, Any]) -> str:
    """One of the templates in this folder; whatever goes into it is escaped."""
    import jinja2

    folder = [Path(__file__).parent, Path(__file__).parents[1] / "paper" / "views"]
    surroundings = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return surroundings.get_template(name).render(values)


def context(content: Content) -> dict[str, Any]:
    """All that the template says, as plain data; pictures are SVG."""
    runs = list({id(run): run for group in content.groups for run in group.runs}.values())  # some are in two
    records = [run.record for run in runs]
    states = {s: sum(r.status == s for r in records) for s in dict.fromkeys(r.status for r in records)}
    chosen = frozenset().union(*(g.chosen for g in content.groups))
    return {
        "title": clean(content.title),
        "version": shoal.__version__,
        "made": content.made,
        "sources": [clean(s) for s in content.sources],
        "counted": _counted(records, states),
        "groups": [_group(g, n) for n, g in enumerate(content.groups[:GROUPS])],
        "groups_left": max(0, len(content.groups) - GROUPS),
        "columns": [_columns(c) for c in content.columns],
        "samples": [_samples(s) for s in content.samples],
        "runs": [_run(run, chosen) for run in runs],
        "any_chosen": bool(chosen),
        "troubles": [{"words": clean(t.words), "more": _lines(t.more)} for t in content.troubles],
    }


def _counted(records: Sequence[RunRecord], states: Mapping[str, int]) -> str:
    said = ", ".join(f"{n:,} {state}" for state, n in states.items())
    took = _hours(sum(r.seconds for r in records))
    return clean(f"{_many(len(records), 'run')} ({said}), {took} of training.")


def _lines(text: str) -> str:
    return "\n".join(map(clean, text.splitlines()))


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def lead(group: Group) -> list[str]:
    """What comes first: which algorithm to use and how sure that is, in the terminal's own sentences."""
    result = group.result
    if group.kind == "runs":
        of = {"test": "", "validation": "validation examples of ", "train": "the training examples of "}
        where = of.get(result["split"], f"{result['split']} of ") + _held_out(group)
        names = listed(row["algorithm"] for row in result["rows"])
        seeds = _many(len(result["seeds"]), "seed")
        what = f"{_many(len(group.runs), 'run')} of {names}, scored on {where}, {seeds}."
        return [clean(what), "This is not a comparison: " + _why_not(result)]
    found = recommended(result)
    if not found and (missing := result.get("runs_missing")):
        found = [f"No recommendation yet: {missing:,} of {result['runs']:,} runs are missing."]
    return [clean(line) for line in found or ["No recommendation: no algorithm has a score in every trial."]]


def compared(group: Group) -> str:
    """What was compared, on which held-out domains, and by which rule settings were chosen."""
    result, one = group.result, _one(group)
    names, where = listed(row["algorithm"] for row in result["rows"]), _held_out(group)
    domains = f"held-out domain{'s' * (len(_together(group)) > 1)} {where}"
    return clean(
        f"{names} were compared on the {domains}, with {_many(len(result['seeds']), one)}. {group.rule}"
    )


def _one(group: Group) -> str:
    return "trial" if group.kind == "sweep" else "seed"


def _together(group: Group) -> list[str]:
    """The held-out domains; of one test split its own domains."""
    names = list(group.result["left_out"])
    own = max((test_domains(r.record) for r in group.runs), key=len, default=[])
    return own if len(own) > 1 == len(names) else names


def _held_out(group: Group) -> str:
    names = _together(group) if group.kind != "runs" else group.result["left_out"]
    return listed(names) or "no domain with a score"


def _why_not(result: Mapping[str, Any]) -> str:
    if len(result["rows"]) < 2:
        return "there is one algorithm alone."
    if all(row["average"]["mean"] is None for row in result["rows"]):
        return "no run has a score."
    if not result["several"]:
        return "there is one algorithm alone, with several settings."
    return (
        "these runs do not share a validation split to choose by and a test split to judge by, so nothing "
        "is said about which algorithm is better."
    )


def _group(group: Group, number: int) -> dict[str, Any]:
    result, first = group.result, lead(group)
    more = words(result) if group.kind == "comparison" else _troubles(result)
    more = [line for line in more if line not in recommended(result)]
    units = dict.fromkeys(note for r in group.runs if (note := r.record.notes.get("units")))
    more += [line for note in units if (line := f"{note[:1].upper()}{note[1:]}.") not in more]
    if group.kind == "runs":
        lost = {row["algorithm"]: n for row in result["rows"] if (n := row["runs_diverged"])}
        more = [f"Runs that diverged: {', '.join(f'{k} {n}' for k, n in lost.items())}."] if lost else []
    drawn = result["metric"] is not None and bool(result["left_out"])
    return {
        "id": f"g{number}",
        "title": _title(group),
        "apart": clean(group.apart),
        "lead": first,
        "decision": _decision(result),
        "compared": "" if group.kind == "runs" else compared(group),
        "words": [clean(line) for line in more],
        "table": _table(result),
        "differences": _differences(result),
        "by_domain": charts.domains(result, _first(result)) if drawn else None,
        "each": _each_domain(result) if len(result["left_out"]) > 1 else None,
        "metric": clean(figures.unit(result["metric"])[1]),
        "lower": result["lower_is_better"],
        "over": f"{_one(group)}s",
        **_pictures(group, f"g{number}"),
    }


def _title(group: Group) -> str:
    return clean(str(group.result.get("title") or group.result["dataset"]))


def _first(result: Mapping[str, Any]) -> str | None:
    """The row that others are held against: the recommended one, or else the one to begin with."""
    about = result.get("recommendation") or {}
    return about.get("take") or about.get("begin") or result["baseline"]


def _table(result: Mapping[str, Any]) -> dict[str, Any]:
    """A row for every algorithm: the average and the worst held-out domain before anything else."""
    unit, names = clean(figures.unit(result["metric"])[1]), result["left_out"]
    several = len(names) > 1
    columns = (
        [("average", unit), ("worst domain", unit)] if several else [(clean(str(n)), unit) for n in names]
    )
    also = dict.fromkeys(
        name for row in result["rows"] for name, v in row.get("also", {}).items() if v["mean"] is not None
    )
    columns += [(clean(figures.unit(name)[1]), "average") if several else (clean(name), "") for name in also]
    rows = []
    for row in result["rows"]:
        cells = [_cell(row["average"])] if names else []
        if several:
            cells.append(
                {**_cell(row["worst"]), "n": clean(row["worst"]["domain"])} if row["worst"] else NOTHING
            )
        cells += [_cell(row["also"][name]) if name in row.get("also", {}) else NOTHING for name in also]
        rows.append({"algorithm": clean(str(row["algorithm"])), "cells": cells, "mark": _mark(row, result)})
    return {"columns": columns, "rows": rows}


def _mark(row: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    name, about = row["algorithm"], result.get("recommendation") or {}
    if name == about.get("take") and _is_better(about):
        return "recommended"
    return "control" if row["control"] else "baseline" if name == result["baseline"] else ""


def _is_better(about: Mapping[str, Any]) -> bool:
    """Whether what is recommended is better than the majority class, as far as that was compared."""
    return bool(about.get("majority", {"better": True})["better"])


NOTHING: Mapping[str, Any] = {"text": "–", "value": None, "n": ""}


def _cell(values: Mapping[str, Any], spread: bool = True) -> Mapping[str, Any]:
    """Mean ± deviation, of how many if not of all, and a number to sort by; or why there is nothing."""
    known, every = sum(v is not None for v in values["values"]), len(values["values"])
    if not known:
        why = [w for w in ("diverged", "undefined") if (values.get("trials") or {}).get(w)]
        return {**NOTHING, "text": why[0]} if why else NOTHING
    of = "" if known == every else f"n = {known} of {every}"
    shown = _spread(values if spread else {**values, "sd": None})
    return {"text": shown, "value": values["mean"], "n": of}


def _each_domain(result: Mapping[str, Any]) -> dict[str, Any]:
    """A row for every domain and a column for every algorithm, averages and worst domains on top.

    With many algorithms there is room for means alone.
    """
    rows, spread = result["rows"], len(result["rows"]) <= charts.COLOURS
    lowest = [_cell(row["worst"], spread) if row["worst"] else NOTHING for row in rows]
    names = result["left_out"][:ROWS]
    return {
        "columns": [(clean(str(row["algorithm"])), _mark(row, result)) for row in rows],
        "top": [("average", [_cell(row["average"], spread) for row in rows]), ("worst domain", lowest)],
        "rows": [(clean(str(name)), [_cell(row["domains"][name], spread) for row in rows]) for name in names],
        "left": len(result["left_out"]) - len(names),
    }


def _decision(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """The difference that decides: the recommended row against the best of the others.

    Where that is not shown to be better than the majority class, it is the difference to that.
    """
    from shoal.experiments import compare

    about = result.get("recommendation") or {}
    rows = {row["algorithm"]: row for row in result["rows"]}
    other = about.get("reference") if _is_better(about) else compare.MAJORITY
    pair = [rows[name] for name in (about.get("take"), other) if name in rows]
    if len(pair) < 2:
        return None
    take, other = (clean(str(row["algorithm"])) for row in pair)
    mean, error = compare.paired(pair[0], pair[1], result["lower_is_better"], about["criterion"])
    reach = error * compare.t_limit(compare.LEVEL, about["domains"] - 1)
    found = {"mean": mean, "se": error, "low": mean - reach, "high": mean + reach, "values": {}}
    what, dots = "worst domains", ""
    if about["criterion"] == "mean":
        found["values"] = (compare.over_domains(*pair) or found)["values"]
        what, dots = "average over domains", " Small dots: the held-out domains."
    chart = charts.differences({f"{take} − {other}": found}, result["metric"])
    side = "left" if result["lower_is_better"] else "right"
    text = (
        f"Difference in {chart['unit']} of the {what}. Dark: one standard error; light: 95 % interval.{dots} "
        f"To the {side} of zero {take} is better."
    )
    return chart | {"text": text}


def _differences(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Every row against the first one, paired by domain."""
    from shoal.experiments import compare

    name = _first(result)
    first = next((row for row in result["rows"] if row["algorithm"] == name), None)
    if first is None:
        return None
    found = {
        str(row["algorithm"]): about
        for row in result["rows"]
        if row is not first and (about := compare.over_domains(row, first)) is not None
    }
    return charts.differences(found, result["metric"]) | {"to": clean(str(name))} if found else None


class Drawn:
    """Pictures with names of their own on the page."""

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0

    def __call__(self, figure: Any, title: str) -> Any:
        from markupsafe import Markup

        self.count += 1
        return Markup(figures.svg(figure, title, f"{self.name}p{self.count}"))


def _pictures(group: Group, name: str) -> dict[str, Any]:
    draw, result = Drawn(name), group.result
    metric, rows = result["metric"], result["rows"]
    shown = _shown(group)
    names = called(shown) if group.kind == "runs" else [run.record.config.name for run in shown]
    panels: dict[str, list[Run]] = {row["algorithm"]: [] for row in rows}
    for own, run in zip(names, shown, strict=True):
        panels.setdefault(own, []).append(run)
    drawn = next((m for runs in panels.values() for r in runs if (m := curves_metric(r.record))), metric)
    limits = _limits(r.record for runs in panels.values() for r in runs)
    curves = [
        draw(figure, f"{drawn} of {algorithm} by step and domain")
        for algorithm, runs in list(panels.items())[:PANELS]
        if (figure := learning_curves([r.record for r in runs], str(algorithm), limits)) is not None
    ]
    return {
        "curves": curves,
        "curves_left": max(0, len(panels) - PANELS),
        "curves_metric": figures.unit(drawn)[1],
        "curves_of": "the runs that validation chose" if group.chosen else "all runs",
        **_agreement(group, draw),
    }


def _shown(group: Group) -> list[Run]:
    """The chosen runs, and all of an algorithm of which none was."""
    chosen = {id(r) for r in group.runs if r.identity in group.chosen}
    names = {r.record.config.name for r in group.runs if id(r) in chosen}
    return [r for r in group.runs if id(r) in chosen or r.record.config.name not in names]


def _limits(records: Iterable[RunRecord]) -> tuple[float, float] | None:
    """The same for all panels, so that they can be compared, if all values are between 0 and 1."""
    points = [s for r in records for m in r.history for s in m["scores"].values()]
    found = [v for s in points for v in ([judged_by(s)] if s.get("selects") else s["domains"].values())]
    values = [v for v in found if v is not None and math.isfinite(v)]
    if not values or min(values) < 0 or max(values) > 1:
        return None
    return min(values) - 0.02, max(values) + 0.02


def learning_curves(
    records: Sequence[RunRecord], title: str = "", limits: tuple[float, float] | None = None
) -> Any:
    """Scores of every domain by step, dashed for training domains; ``None`` where nothing was measured twice.

    Training domains are measured on validation, unless that is of other domains. They are one curve where
    there are many, where the runs hold out different domains, and where a metric that is measured on all
    examples together was judged by, such as AUC. So are held-out domains where there are many.
    """
    measured = [r for r in records if any(m["scores"] for m in r.history)]
    if all(len(r.history) < 2 for r in measured):
        return None
    metric = str(curves_metric(measured[0]))
    lines: dict[str, list[Any]] = {}
    seen: dict[str, list[Any]] = {}
    places = {tuple(test_domains(r)) for r in measured}
    crowd = len({name for names in places for name in names}) > LINES
    for record in measured:
        splits = record.history[-1]["scores"]
        whole = {split for split, scores in splits.items() if scores.get("selects")}
        own = "validation" if "validation" in splits and not strange(record) else "train"
        held_out: list[str | None] = [None] if "test" in whole or crowd else list(test_domains(record))
        for name in held_out if "test" in splits else ():
            alone = (
                test_domains(record)[0]
                if len(test_domains(record)) == 1 and not crowd
                else "held-out domains"
            )
            lines.setdefault(name or alone, []).append(_curve(record, "test", name, metric))
        if own not in splits:
            continue
        names = list(splits[own]["domains"])
        if own in whole or len(places) > 1 or len(names) > LINES:
            seen.setdefault(f"{own}, all domains", []).append(_curve(record, own, None, metric))
        else:
            for name in names:
                seen.setdefault(f"{name} ({own})", []).append(_curve(record, own, name, metric))
    return figures.curves(lines | seen, metric, title, list(seen), limits)


def curves_metric(record: RunRecord) -> str | None:
    """What curves are of: what the run was judged by."""
    return next((metric_of(s) for m in record.history for s in m["scores"].values()), None)


def _curve(
    record: RunRecord, split: str, domain: str | None, metric: str
) -> tuple[list[float], list[float | None]]:
    steps: list[float] = []
    values: list[float | None] = []
    for point in record.history:
        scores = point["scores"].get(split)
        if scores is not None and metric_of(scores) == metric:
            steps.append(point["step"])
            values.append(judged_by(scores) if domain is None else scores["domains"].get(domain))
    return steps, values


AGREEMENT = {"mean_cosine": "mean cosine", "sign_agreement": "sign agreement"}


def agreement_of(record: RunRecord) -> list[Mapping[str, Any]]:
    """What a run has measured of its domains' gradients; nothing in most."""
    found = getattr(record, "agreement", None) or ()
    return [point for point in found if isinstance(point, Mapping) and "step" in point]


def _agreement(group: Group, draw: Drawn) -> dict[str, Any]:
    runs = [r for r in _shown(group) if agreement_of(r.record)]
    curves = []
    for key, label in AGREEMENT.items():
        lines = agreement_curves([r.record for r in runs], key)
        if lines:
            title = f"{label} of gradients"
            curves.append(draw(figures.curves(lines, label, title), f"{title} by step and algorithm"))
    matrices: list[Any] = []
    firsts = {r.record.config.name: r for r in reversed(runs)}  # one of each algorithm
    for run in reversed(firsts.values()):
        found = (
            (p["step"], m) for p in reversed(agreement_of(run.record)) if (m := cosines_of(run.record, p))
        )
        last = next(found, None)
        if last is None or len(matrices) == MATRICES:
            continue
        config, (step, (names, values)) = run.record.config, last
        title = f"{figures.short(config.name)}, seed {config.seed}, step {step:,}"
        picture = figures.matrix(names, values, title)
        said = f"cosines between domains' gradients, {config.name}, seed {config.seed}"
        matrices.append(draw(picture, said))
    return {"agreement": curves, "matrices": matrices}


def cosines_of(record: RunRecord, point: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]] | None:
    """The domains of a measurement, in the order of the training split, and a row for each."""
    content = point.get("matrix")
    within = isinstance(content, Mapping)
    names = list((content if within else point).get("domains") or ())  # type: ignore[union-attr]
    values = list((content["values"] if within else content) or ())  # type: ignore[index]
    if not names or len(values) != len(names) or any(len(row) != len(names) for row in values):
        return None
    splits = record.history[-1]["scores"] if record.history else {}
    known = list(splits.get("train", splits.get("validation", {})).get("domains", ()))
    place = {name: n for n, name in enumerate([*known, *(n for n in names if n not in known)])}
    order = sorted(range(len(names)), key=lambda i: place[names[i]])
    return [names[i] for i in order], [[values[i][j] for j in order] for i in order]


def agreement_curves(records: Iterable[RunRecord], key: str = "mean_cosine") -> dict[str, list[Any]]:
    """By algorithm, as :func:`shoal.report.figures.curves` takes them."""
    lines: dict[str, list[Any]] = {}
    for record in records:
        points = [p for p in agreement_of(record) if p.get(key) is not None]
        if points:
            lines.setdefault(record.config.name, []).append(
                ([p["step"] for p in points], [p[key] for p in points])
            )
    return lines


def _columns(report: Mapping[str, Any]) -> dict[str, Any]:
    """Warnings, then a row for every column, those with warnings first."""
    report = {**report, "columns": sorted(report["columns"], key=lambda c: not c["warnings"])}
    shown = columns.table(report)
    return {
        "file": clean(str(report["file"])),
        "warnings": columns.remarks(report),
        "heads": shown.columns,
        "rows": shown.rows,
    }


def _samples(found: Samples) -> dict[str, Any]:
    strips = [{"domain": clean(s.domain), "words": clean(s.words), "images": s.images} for s in found.strips]
    return {"path": clean(found.path), "strips": strips, "error": clean(found.error)}


USUAL = {f.name: getattr(RunConfig("", "", 1), f.name) for f in fields(RunConfig)}


def _run(run: Run, chosen: frozenset[str]) -> dict[str, Any]:
    record, row = run.record, row_of(run.record)
    metric, test = row.get("metric", "score"), row.get("test")
    if test is not None and (scores := record.history[record.selected]["scores"]["test"]).get("selects"):
        metric, test = metric_of(scores), judged_by(scores)
    at, last = row.get("step"), record.config.steps
    return {
        "dataset": clean(str(row["dataset"])),
        "algorithm": clean(str(row["name"])),
        "seed": row["seed"],
        "left_out": clean(row.get("left_out", "")) or "–",
        "test": None if test is None else f"{test:.3f}" if metric == "accuracy" else f"{test:.4g}",
        "value": test,
        "metric": clean(metric),
        "step": at,
        "steps": last,
        "seconds": record.seconds,
        "status": clean(record.status),
        "finished": record.status == "finished",
        "chosen": run.identity in chosen,
        "path": clean(run.path),
        "rule": clean(record.rule),
        "settings": _settings(record.config),
        "command": clean(run.command),
        "python": "" if run.command else clean(python(record.config)),
        "environment": clean(", ".join(f"{k} {v}" for k, v in record.environment.items())),
        "error": _lines(record.error),
        "skipped": record.skipped,
        "scores": _scores(record),
        "notes": [clean(f"{split}: {note}") for split, note in record.notes.items()],
    }


ALWAYS = ("dataset", "algorithm", "steps", "seed", "optimizer_options")


def _settings(config: RunConfig) -> list[tuple[str, str]]:
    """What is not at its default, options by option."""
    found = []
    for name, value in config.to_dict().items():
        if value == USUAL[name] and name not in ALWAYS:
            continue
        parts = {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {name: value}
        found += [(clean(k), clean(plain(v))) for k, v in parts.items()]
    return found


def python(config: RunConfig) -> str:
    """The run as a call, for one whose command was not kept."""
    given = {k: v for k, v in config.to_dict().items() if v != USUAL[k]}
    said = ", ".join(f"{k}={v!r}" for k, v in given.items())
    from shoal.experiments import baselines

    module = "baselines" if baselines.is_one(config) else "run"
    return f"shoal.experiments.{module}.run(RunConfig({said}))"


def _scores(record: RunRecord) -> list[tuple[str, str]]:
    """By split, at the selected step: the average and the first domains."""
    if not record.history:
        return []
    found = []
    for split, scores in record.history[record.selected]["scores"].items():
        parts = [f"{scores['metric']} {_number(scores['average'])}"]
        parts += [
            f"{k} {_number(v)}" for k, v in (scores.get("metrics") or {}).items() if k != scores["metric"]
        ]
        names = list(scores["domains"].items())
        parts += [f"{n} {_number(v)}" for n, v in names[:DOMAINS] if len(names) > 1]
        parts += [f"… {len(names) - DOMAINS:,} more"] * (len(names) > DOMAINS)
        found.append((clean(split), clean(", ".join(parts))))
    return found


def _number(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.4g}"
