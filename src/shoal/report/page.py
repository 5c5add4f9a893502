"""One page of HTML, which loads nothing, for a comparison, a sweep, a diagnosis or a run with its seeds."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import shoal
from shoal.experiments.progress import duration
from shoal.experiments.record import RunRecord
from shoal.experiments.statistics import summarize
from shoal.report import charts, compare, diagnose, model, runs
from shoal.report import columns as of_columns
from shoal.report.tables import cell, clean, listed, many

TEMPLATES = Path(__file__).parent
Result = Mapping[str, Any]
Records = Sequence[RunRecord]


def comparison_page(
    result: Result,
    records: Records,
    columns: Result | None = None,
    title: str | None = None,
    notes: Sequence[str] = (),
    importance: Result | None = None,
    calibration: Result | None = None,
) -> str:
    """The page of a comparison, from its plain data and the records of its runs.

    ``columns`` is the report on the columns of a table, ``notes`` names files that could not be read,
    ``importance`` is that of the columns, and ``calibration`` that of the model that was trained.
    """
    from shoal.experiments.recommend import over_domains

    rows, held_out = {row["algorithm"]: row for row in result["rows"]}, result["held_out"]
    metric, about = result["metric"], result.get("recommendation") or {}
    take, recommended = about.get("nearest"), about.get("row") is not None
    first = take or result["baseline"] or next(iter(rows))
    versus = about.get("alternative" if recommended else "majority")
    pairs = {name: pair for name in rows if name != first and (pair := over_domains(rows[name], rows[first]))}
    marks = {name: "control" if row["control"] else "" for name, row in rows.items()}
    marks |= {result["baseline"]: "baseline"} | ({take: "recommended"} if recommended else {})
    scores = compare.table(result, most=0)
    selected = {case["run"] for case in result["cases"]}
    shown = [record for record in records if record.config.identity in selected]
    lost = f"{result['runs_missing']:,} of {result['runs']:,} runs are missing"
    why = f" yet: {lost}" if result["runs_missing"] else ": no algorithm has a score in every case"
    parts: dict[str, Any] = {
        "lead": compare.recommended(result) or [f"No recommendation{why}."],
        "compared": f"{listed(list(rows))} on {listed(held_out)}, {many(len(result['seeds']), 'seed')}.",
        "unit": charts.unit(metric)[1] + ", lower is better" * result["lower_is_better"],
        "scores": {
            "columns": scores.columns[1:],
            "rows": [[(row[1], marks[row[1]]), *row[2:]] for row in scores.rows],
        },
        "first": first,
        "differences": pairs and charts.differences(pairs, metric),
        "by_domain": charts.domains(result, first),
        "each": {
            "columns": ["domain", *((row, marks[row]) for row in rows)],
            "rows": [
                [name, *(cell(row["domains"][name]) for row in rows.values())]
                for name in held_out * (len(held_out) > 1)
            ],
        },
        "protocol": compare.protocol(result),
    }
    if importance:
        parts["importance"] = {"of": importance["algorithm"], "metric": importance["metric"]}
        parts["importance"] |= {"table": model.table(importance)}
    if calibration:
        parts["calibration"] = model.calibration(calibration)
    pair = over_domains(rows[first], rows[versus["to"]]) if versus else None
    if versus and pair and pair["low"] is not None:
        parts["decision"] = charts.differences({f"{first} − {versus['to']}": pair}, metric)
        side = "left" if result["lower_is_better"] else "right"
        parts["better"] = f"To the {side} of zero {first} is better."
    title = title or f"Report on {result.get('title') or result['dataset']}"
    panels = {name: [record for record in shown if record.config.name == name] for name in rows}
    notes = [*compare.notes({**result, "failed": {}}), *notes]
    return _page(title, records, panels, selected, columns, notes, **parts)


def sweep_page(
    results: Mapping[str, Sequence[Result]],
    records: Records,
    title: str | None = None,
    notes: Sequence[str] = (),
) -> str:
    """The page of a sweep, from its results by selection rule and the records of its runs."""
    first = next(iter(results.values()))
    tables, protocol = [], list[str]()
    for rule, found in results.items():
        tables += [(f"{own['dataset']}, {own['rule_name']}", runs.dataset_table(own)) for own in found]
        tables += [(f"All datasets, {rule}", runs.overall_table(found))] if len(found) > 1 else []
        protocol += runs.sweep_notes(found)
    selected = {case["run"] for own in first for case in own["cases"]}
    panels: dict[str, list[RunRecord]] = {}
    for record in records:
        if record.config.identity in selected:
            panels.setdefault(f"{record.config.name} on {record.config.dataset}", []).append(record)
    title = title or f"Sweep of {listed([own['dataset'] for own in first])}"
    return _page(title, records, panels, selected, None, notes, tables=tables, protocol=protocol)


def runs_page(
    records: Records,
    title: str | None = None,
    columns: Result | None = None,
    notes: Sequence[str] = (),
    calibration: Result | None = None,
) -> str:
    """The page of a run, or of the same run with several seeds; ``calibration`` is that of the first."""
    finished = [record for record in records if record.status == "finished"]
    name = f"{records[0].config.name} on {records[0].config.dataset}"
    lead, tables = f"{name}, {many(len(records), 'run')}, {len(finished):,} finished.", []
    if finished:
        tables = [("", runs.run_table([record.to_dict() for record in finished]))]
    scores = [record.headline for record in finished]
    if known := [score for score in scores if score is not None]:
        metric = known[0][0]
        lead += f" Test {metric}: {cell(summarize([value for _, value in known], metric))}"
        lead += " %." if metric == "accuracy" else "."
    title = title or f"Report on {name}"
    parts = {"calibration": model.calibration(calibration)} if calibration else {}
    return _page(title, records, {name: finished}, (), columns, notes, lead=[lead], tables=tables, **parts)


def diagnosis_page(
    found: Result, title: str | None = None, columns: Result | None = None, notes: Sequence[str] = ()
) -> str:
    """The page of a diagnosis, from its plain data."""
    lines = found.get("reading") or diagnose.reading(found)
    name, file = str(found.get("dataset") or "the data"), io.BytesIO()
    diagnose.figure(found, name).savefig(file, format="svg")
    figure = "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()
    parts = {"lead": lines[:1], "reading": lines[1:], "figure": figure}
    tables = [("", table) for table in diagnose.tables(found)]
    return _page(title or f"Diagnosis of {name}", (), {}, (), columns, notes, tables=tables, **parts)


def _page(
    title: str,
    records: Records,
    panels: Mapping[str, Records],
    selected: Collection[str],
    columns: Result | None,
    notes: Sequence[str],
    **parts: Any,
) -> str:
    """The template with these parts; whatever goes into it is escaped, without control characters.

    ``panels`` are the runs whose curves are drawn, and ``selected`` the identities of marked runs.
    """
    import jinja2
    from markupsafe import Markup

    def safe(value: Any) -> Any:
        return clean(value, "\n") if isinstance(value, str) and not isinstance(value, Markup) else value

    loader = jinja2.FileSystemLoader(TEMPLATES)
    template = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=safe
    )
    template.filters["number"] = lambda value: "–" if value is None else f"{value:.4g}"
    script = (TEMPLATES / "script.html").read_text(encoding="utf-8")
    agreement, matrices = charts.agreement(panels)
    order = sorted(records, key=lambda r: (r.config.dataset, r.config.name, _held_out(r), r.config.seed))
    took = duration(sum(record.seconds for record in records))
    return template.get_template("page.html").render(
        parts,
        title=title,
        notes=notes,
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        curves=charts.learning_curves(panels),
        agreement=agreement,
        matrices=matrices,
        columns=columns and {"table": of_columns.table(columns), "warnings": of_columns.remarks(columns)},
        runs=[(r, _held_out(r), _settings(r), r.config.identity in selected) for r in order],
        counted=f"{many(len(records), 'run')}, {took} of training. " if records else "",
        made=f"{time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())} with shoal {shoal.__version__}",
    )


def _held_out(record: RunRecord) -> str:
    config = record.config
    names = config.data_options.get("held_out") or config.protocol.get("held_out")
    names = [names] if isinstance(names, str) else names or record.scores.get("test", {}).get("domains", ())
    return listed(list(map(str, names)))


def _settings(record: RunRecord) -> list[str]:
    """The fields of the configuration that are not at their defaults."""
    lines = []
    for name, value in record.config.given().items():
        parts = {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {name: value}
        lines += [f"{k}: {v if isinstance(v, str) else json.dumps(v, default=str)}" for k, v in parts.items()]
    return lines
