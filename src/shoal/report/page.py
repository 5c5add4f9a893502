"""One page of HTML, which loads nothing, for a comparison, a sweep, a diagnosis or a run with its seeds."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import shoal
from shoal.experiments.progress import duration
from shoal.experiments.record import RunRecord
from shoal.experiments.statistics import summarize
from shoal.files import dump_yaml
from shoal.report import charts, compare, diagnose, model, runs
from shoal.report import columns as of_columns
from shoal.report.tables import Table, cell, clean, listed, many

TEMPLATES = Path(__file__).parent
Result = Mapping[str, Any]
Records = Sequence[RunRecord]


def comparison_page(
    result: Result,
    records: Records,
    columns: Result | None = None,
    notes: Sequence[str] = (),
    importance: Result | None = None,
    calibration: Result | None = None,
) -> str:
    """The page of a comparison, from its plain data and the records of its runs.

    ``columns`` is the report on the columns of a table, ``notes`` names files that could not be read,
    ``importance`` is that of the columns, and ``calibration`` that of the model that was trained.
    """
    from shoal.experiments.recommend import over_domains

    rows, held_out, metric = {r["algorithm"]: r for r in result["rows"]}, result["held_out"], result["metric"]
    advice = result.get("recommendation") or {}
    first = advice.get("nearest") or result["baseline"] or next(iter(rows))
    pairs = {name: pair for name in rows if name != first and (pair := over_domains(rows[name], rows[first]))}
    marks = {name: "control" if row["control"] else "" for name, row in rows.items()}
    marks |= {result["baseline"]: "baseline"} | ({advice["row"]: "recommended"} if advice.get("row") else {})
    scores = compare.table(result, most=0)
    why = ": no algorithm has a score in every case"
    if result["runs_missing"]:
        why = f" yet: {result['runs_missing']:,} of {result['runs']:,} runs are missing"
    seeds = many(len(result["seeds"]), "seed")
    parts: dict[str, Any] = {
        "lead": compare.recommended(result) or [f"No recommendation{why}."],
        "compared": f"{listed(list(rows))} on {listed(held_out)}, {seeds}.",
        "unit": charts.unit(metric)[1] + ", lower is better" * result["lower_is_better"],
        "scores": {
            "columns": scores.columns[1:],
            "rows": [[(row[1], marks[row[1]]), *row[2:]] for row in scores.rows],
        },
        "by_domain": charts.domains(result, first),
        "protocol": compare.protocol(result),
    }
    if pairs:
        parts["signed"] = charts.differences(pairs, metric) | {"title": f"Differences to {first}"}
        parts["signed"]["note"] = "paired by held-out domain"
    if len(held_out) > 1:
        each = [[name, *(cell(row["domains"][name]) for row in rows.values())] for name in held_out]
        parts["each"] = {"columns": ["domain", *((row, marks[row]) for row in rows)], "rows": each}
    if importance:
        text = model.IMPORTANCE.format(**importance)
        parts["importance"] = {"text": text, "table": model.table(importance)}
    title, selected = result.get("title") or result["dataset"], {case["run"] for case in result["cases"]}
    shown = [record for record in records if record.config.identity in selected]
    panels = {name: [record for record in shown if record.config.name == name] for name in rows}
    notes = [*compare.notes({**result, "failed": {}}), *notes]
    return _page(f"Report on {title}", records, panels, selected, columns, notes, calibration, **parts)


def sweep_page(results: Mapping[str, Sequence[Result]], records: Records, notes: Sequence[str] = ()) -> str:
    """The page of a sweep, from its results by selection rule and the records of its runs."""
    first = next(iter(results.values()))
    tables, protocol, panels = list[tuple[str, Table]](), list[str](), dict[str, list[RunRecord]]()
    for rule, found in results.items():
        tables += [(f"{each['dataset']}, {each['rule_name']}", runs.dataset_table(each)) for each in found]
        tables += [(f"All datasets, {rule}", runs.overall_table(found))] if len(found) > 1 else []
        protocol += runs.sweep_notes(found)
    selected = {case["run"] for each in first for case in each["cases"]}
    for record in records:
        if record.config.identity in selected:
            panels.setdefault(f"{record.config.name} on {record.config.dataset}", []).append(record)
    title = f"Sweep of {listed([each['dataset'] for each in first])}"
    return _page(title, records, panels, selected, None, notes, tables=tables, protocol=protocol)


def runs_page(
    records: Records,
    columns: Result | None = None,
    notes: Sequence[str] = (),
    calibration: Result | None = None,
) -> str:
    """The page of a run, or of the same run with several seeds; ``calibration`` is that of the first."""
    finished = [record for record in records if record.status == "finished"]
    name = f"{records[0].config.name} on {records[0].config.dataset}"
    lead = f"{name}, {many(len(records), 'run')}, {len(finished):,} finished."
    if scores := [record.headline for record in finished if record.headline is not None]:
        metric = scores[0][0]
        found = cell(summarize([value for _, value in scores], metric))
        lead += f" Test {metric}: {found}{' %' * (metric == 'accuracy')}."
    tables = [("", runs.run_table([record.to_dict() for record in finished]))] if finished else []
    parts: dict[str, Any] = {"lead": [lead], "tables": tables}
    return _page(f"Report on {name}", records, {name: finished}, (), columns, notes, calibration, **parts)


def diagnosis_page(found: Result, columns: Result | None = None, notes: Sequence[str] = ()) -> str:
    """The page of a diagnosis, from its plain data."""
    lines = found.get("reading") or diagnose.reading(found)
    names = [domain["name"] for domain in found["domains"]]
    cosines = found["gradients"]["matrix"]
    parts: dict[str, Any] = {
        "lead": lines[:1],
        "reading": lines[1:],
        "tables": [("", table) for table in diagnose.tables(found)],
        "matrices": [
            {"title": "Cosines of gradients", "names": names, "rows": cosines},
        ],
    }
    if found["average"]:
        gaps = {row["name"]: {**row, "mean": row["gap"]} for row in [*found["gaps"], found["average"]]}
        metric = "accuracy" if found["task"] == "classification" else "R²"
        parts["signed"] = charts.differences(gaps, metric) | {
            "title": f"Generalization gap of {found['model']['name']}",
            "note": "score in training minus that on the held-out domain",
        }
    title = f"Diagnosis of {found.get('dataset') or 'the data'}"
    return _page(title, (), {}, (), columns, notes, **parts)


def _page(
    title: str,
    records: Records,
    panels: Mapping[str, Records],
    selected: Collection[str],
    columns: Result | None,
    notes: Sequence[str],
    calibration: Result | None = None,
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
        {"matrices": matrices} | parts,
        title=title,
        notes=notes,
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        curves=charts.learning_curves(panels),
        agreement=agreement,
        calibration=model.calibration(calibration) if calibration else None,
        columns=columns and {"table": of_columns.table(columns), "warnings": of_columns.remarks(columns)},
        runs=[(r, _held_out(r), dump_yaml(r.config.given()), r.config.identity in selected) for r in order],
        counted=f"{many(len(records), 'run')}, {took} of training. " if records else "",
        made=f"{time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())} with shoal {shoal.__version__}",
    )


def _held_out(record: RunRecord) -> str:
    names = record.config.held_out or record.scores.get("test", {}).get("domains", ())
    return listed([names] if isinstance(names, str) else list(map(str, names)))
