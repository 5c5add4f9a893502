"""The paper's tables with one column per dataset: random grouping, DomainBed, WILDS and the ablations.

``presets/tables.yaml`` has their rows and datasets, ``published/*.yaml`` the paper's numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shoal.datasets import registry
from shoal.errors import InputError, check_names
from shoal.experiments import protocol, selection
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.paper import cdsprites, columns, read, recipes
from shoal.paper.columns import Column, Scores
from shoal.paper.recipes import Variant
from shoal.paper.reproduce import Reproduction, Request

SERVER = (
    "The download server of WILDS has been down since 2026. Use a copy that was downloaded before: the "
    "folder of a dataset as WILDS laid it out, such as camelyon17_v1.0, in the folder that data_dir names."
)


def sweep_scores(column: Column, rows: Sequence[Variant], records: Iterable[RunRecord]) -> Scores:
    """The mean over held-out domains, by training-domain validation."""
    (found,) = selection.sweep_results(column.runs, list(records))
    values = {row["algorithm"]: row["average"]["values"] for row in found["rows"]}
    return {row.label: values[row.name] for row in rows}


def published(table: str, dataset: str) -> dict[str, Any]:
    """What the paper says of a dataset in one of its tables; no values where it has no column for it."""
    for file in ("grouping", "domainbed", "wilds"):
        for claim in read(f"published/{file}.yaml"):
            names = claim.get("names", [claim["dataset"]])
            if (claim["table"], claim.get("split", "test")) == (table, "test") and dataset in names:
                return dict(claim)
    return {"dataset": dataset, "values": {}}


def rows_of(name: str, spec: Mapping[str, Any], request: Request) -> list[Variant]:
    """The rows of a table, for the algorithms that are asked for."""
    rows = [Variant(**row) for row in spec["tables"][name]["rows"]]
    algorithms = request.algorithms or (spec["quick"].get("algorithms") if request.quick else None)
    known = {row.name: row for row in rows}
    return [known.get(each) or Variant.of(each) for each in algorithms] if algorithms else rows


def make_columns(
    name: str, rows: Sequence[Variant], spec: Mapping[str, Any], request: Request
) -> list[Column]:
    """The columns of a table; one whose files are missing says so."""
    table, wilds, result = spec["tables"][name], recipes.datasets(), []
    quick = spec["quick"].get("datasets") if request.quick else None
    datasets = request.datasets or quick or table["datasets"]
    if set(table["datasets"]) <= set(wilds):
        check_names("dataset of WILDS:", datasets, wilds)
    labels = {row.label.partition(" (")[0] for row in rows}
    for dataset in datasets:
        registry.module(dataset)  # which refuses unknown names
        claim = published(name, dataset)
        paper = {row: values for row, values in claim["values"].items() if row.partition(" (")[0] in labels}
        metric = recipes.headline(dataset) if dataset in wilds else "accuracy"
        column = Column(dataset, claim["dataset"], metric, paper)
        try:
            result.append(replace(column, runs=plan(dataset, rows, spec, request)))
        except InputError as error:
            result.append(replace(column, why_not=str(error)))
    return result


def plan(dataset: str, rows: Sequence[Variant], spec: Mapping[str, Any], request: Request) -> list[RunConfig]:
    """The runs of a column."""
    if dataset == "cdsprites":
        size = cdsprites.preset("sizes")["grouping-quick" if request.quick else "grouping"]
        return cdsprites.configs(rows, 10, range(request.seeds or size["seeds"]), size)
    if dataset in recipes.datasets():
        return recipes.runs(dataset, rows, request.preset, request.seeds, request.quick)
    seeds = request.seeds or (1 if request.quick else spec["seeds"])
    options, data = dict((spec["quick"] if request.quick else spec)["plan"]), {}
    if request.quick and hasattr(registry.module(dataset), "LAYOUT"):  # an image folder
        data, options["model"] = {"size": 32, "augment": False}, "small-cnn"
    return protocol.plan({dataset: data}, [row.name for row in rows], seeds=seeds, **options)


def reproduce(request: Request) -> Reproduction:
    """Runs what the tables are made of; refuses where no dataset is available."""
    spec = read("presets/tables.yaml")[request.experiment]
    rows = {name: rows_of(name, spec, request) for name in request.parts(spec["tables"])}
    parts = {name: make_columns(name, own, spec, request) for name, own in rows.items()}
    every = [column for own in parts.values() for column in own]
    missing = {c.dataset: c.why_not for c in every if c.why_not}
    server = [SERVER] if set(missing) & set(recipes.datasets()) else []
    if not any(column.runs for column in every):
        first = f"no data for {', '.join(missing)}. {next(iter(missing.values()))}"
        raise InputError("\n".join([first, *server]))
    records, failed = request.run((c for column in every for c in column.runs), {"predictions": True})
    entries: dict[str, list[dict[str, Any]]] = {}
    for name, own in parts.items():
        heading = spec["tables"][name].get("heading", "")
        for column in own:
            if column.runs and column.runs[0].protocol:
                scores = sweep_scores(column, rows[name], records.values())
            else:  # the last step of CdSprites: its validation data are sampled like its test domain
                scores = column.scores(records, last=column.dataset == "cdsprites")
            entries.setdefault(heading, []).append(column.entry(scores))
    lines = ["Mean ± standard deviation over seeds."]
    if "difference" in spec:
        lines += [line for own in entries.values() for line in columns.differences(own, *spec["difference"])]
    lines += [f"{name} was not run: {why}" for name, why in missing.items()] + server
    by_recipe = [name for name in recipes.datasets() if any(c.runs and c.dataset == name for c in every)]
    differs = recipes.differences(by_recipe, request.preset) if by_recipe and not request.quick else []
    if differs:
        lines.append(f"Preset {request.preset} differs from its source, or chooses what that leaves open:")
    lines += [f"- {line}" for line in differs]
    tables = {heading: columns.table(own) for heading, own in entries.items()}
    return request.result(tables, {"tables": entries, "differs": differs}, more=lines, failed=failed)
