"""The paper's tables with one column per dataset: random grouping, DomainBed, WILDS and the ablations.

``presets/tables.yaml`` has their rows and datasets, ``published/*.yaml`` the paper's numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.algorithms import algorithm_class
from shoal.data.sets import registry
from shoal.errors import InputError, check_names
from shoal.experiments import protocol, selection
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.statistics import plus_minus, summarize
from shoal.paper import cdsprites, recipes
from shoal.paper.published import published, read
from shoal.paper.recipes import Variant

if TYPE_CHECKING:
    from shoal.paper.reproduce import Reproduction, Request

SERVER = (
    "The download server of WILDS has been down since 2026. Use a copy that was downloaded before: the "
    "folder of a dataset as WILDS laid it out, such as camelyon17_v1.0, in the folder that data_dir names."
)
SMALL_IMAGES: dict[str, Any] = {"size": 32, "augment": False}
"""Options of image folders in a quick run."""


@dataclass(frozen=True)
class Column:
    """A dataset's runs, or why there are none, and the paper's numbers."""

    dataset: str
    title: str
    rows: Sequence[Variant]
    paper: Mapping[str, Sequence[float]]
    """By row: what is printed, and what is printed after ±."""
    runs: Sequence[RunConfig] = ()
    why_not: str = ""

    @property
    def metric(self) -> str:
        return recipes.headline(self.dataset) if self.dataset in recipes.datasets() else "accuracy"

    def scores(self, records: Mapping[str, RunRecord]) -> dict[str, list[float | None]]:
        """By row a value per seed: on the test split, or the mean over held-out domains."""
        if self.runs and self.runs[0].protocol:
            return sweep_scores(self, records)
        last = self.dataset == "cdsprites"  # whose validation data are sampled like its test domain
        result: dict[str, list[float | None]] = {}
        for config in self.runs:
            record = records.get(config.identity)
            finished = record is not None and record.status == "finished"
            score = record.measure("test", self.metric, last=last) if record and finished else None
            result.setdefault(config.name, []).append(score)
        return result

    def entry(self, records: Mapping[str, RunRecord]) -> dict[str, Any]:
        """The column as plain data."""
        ours = {row: summarize(values, self.metric) for row, values in self.scores(records).items()}
        about = {name: getattr(self, name) for name in ("dataset", "title", "metric", "why_not")}
        return {**about, "runs": len(self.runs), "paper": dict(self.paper), "ours": ours}


def sweep_plan(dataset: str, rows: Sequence[Variant], quick: bool, **options: Any) -> list[RunConfig]:
    """Runs by DomainBed's protocol."""
    data: dict[str, Any] = {}
    if quick and hasattr(registry.module(dataset), "LAYOUT"):  # an image folder
        data, options["model"] = SMALL_IMAGES, "small-cnn"
    return protocol.plan({dataset: data}, [_algorithm(row) for row in rows], **options)


def sweep_scores(column: Column, records: Mapping[str, RunRecord]) -> dict[str, list[float | None]]:
    """By row a value per seed, by training-domain validation."""
    found = selection.results(selection.sweep(column.runs, records.values()), column.dataset)
    values = {row["algorithm"]: row["average"]["values"] for row in found["rows"]}
    return {row.label: values[_algorithm(row)] for row in column.rows}


def _algorithm(row: Variant) -> str:
    return f"{row.algorithm}:{row.draw}" if row.draw else row.algorithm


def _row(name: str, known: Sequence[Variant]) -> Variant:
    """The row of an algorithm, which may name its way of sampling, as in ``fish:regrouped``."""
    algorithm, _, draw = name.partition(":")
    algorithm_class(algorithm)
    new = Variant(name, algorithm, draw=draw or None)
    return next((row for row in known if _algorithm(row) == name), new)


def printed(table: str, dataset: str) -> dict[str, Any]:
    """What the paper says of a dataset in one of its tables; no values where it has no column for it."""
    for claim in (*published("grouping"), *published("domainbed"), *published("wilds")):
        names = claim.get("names", [claim["dataset"]])
        if (claim["table"], claim.get("split", "test")) == (table, "test") and dataset in names:
            return claim
    return {"dataset": dataset, "values": {}}


def columns(name: str, spec: Mapping[str, Any], request: Request) -> list[Column]:
    """The columns of a table; one whose files are missing says so."""
    table, quick = spec["tables"][name], spec["quick"] if request.quick else {}
    rows = [Variant(**row) for row in table["rows"]]
    if algorithms := request.algorithms or quick.get("algorithms"):
        rows = [_row(algorithm, rows) for algorithm in algorithms]
    datasets = request.datasets or quick.get("datasets") or table["datasets"]
    if set(table["datasets"]) <= set(recipes.datasets()):
        check_names("dataset of WILDS:", datasets, recipes.datasets())
    for dataset in datasets:
        registry.module(dataset)
    labels = {row.label.partition(" (")[0] for row in rows}
    result = []
    for dataset in datasets:
        like = spec.get("like", {}).get(dataset, dataset)
        claim = printed(name, like)
        title = claim["dataset"] if like == dataset else f"{dataset} (the paper: {claim['dataset']})"
        paper = {row: values for row, values in claim["values"].items() if row.partition(" (")[0] in labels}
        try:
            result.append(Column(dataset, title, rows, paper, plan(dataset, rows, spec, request)))
        except InputError as error:
            result.append(Column(dataset, title, rows, paper, why_not=str(error)))
    if quick.get("first") and not request.datasets:
        return [column for column in result if column.runs][:1] or result
    return result


def plan(dataset: str, rows: Sequence[Variant], spec: Mapping[str, Any], request: Request) -> list[RunConfig]:
    """The runs of a column."""
    if dataset == "cdsprites":
        size = cdsprites.preset("sizes")["grouping-quick" if request.quick else "grouping"]
        return cdsprites.configs(rows, 10, range(request.seeds or size["seeds"]), size)
    if dataset in recipes.datasets():
        return recipes.runs(dataset, rows, request.preset, request.seeds, request.quick)
    seeds = request.seeds or (1 if request.quick else spec["seeds"])
    options = (spec["quick"] if request.quick else spec)["plan"]
    return sweep_plan(dataset, rows, request.quick, trials=seeds, **options)


def reproduce(request: Request) -> Reproduction:
    """Runs what the tables are made of; refuses where no dataset is available."""
    spec = read("presets/tables.yaml")[request.experiment]
    parts = {name: columns(name, spec, request) for name in request.parts(spec["tables"])}
    every = [column for own in parts.values() for column in own]
    missing = {c.dataset: c.why_not for c in every if c.why_not}
    server = [SERVER] if set(missing) & set(recipes.datasets()) else []
    if not any(column.runs for column in every):
        first = f"no data for {', '.join(missing)}. {next(iter(missing.values()))}"
        raise InputError("\n".join([first, *server]))
    records, failed = request.run((c for column in every for c in column.runs), {"predictions": True})
    entries = {
        spec["tables"][name].get("heading", ""): [column.entry(records) for column in own]
        for name, own in parts.items()
    }
    lines = ["Mean ± standard deviation over seeds."]
    if "difference" in spec:
        lines += [line for own in entries.values() for line in differences(own, *spec["difference"])]
    lines += [f"{name} was not run: {why}" for name, why in missing.items()] + server
    by_recipe = [name for name in recipes.datasets() if any(c.runs and c.dataset == name for c in every)]
    differs = recipes.differences(by_recipe, request.preset) if by_recipe and not request.quick else []
    if differs:
        lines.append(
            f"Preset {request.preset}. It differs from its source, or chooses what that leaves open:"
        )
    lines += [f"- {line}" for line in differs]
    tables = {heading: as_table(own) for heading, own in entries.items()}
    return request.result(tables, {"tables": entries, "differs": differs}, more=lines, failed=failed)


# Text


def is_share(metric: str) -> bool:
    """Whether it is shown in percent; a correlation is not."""
    return metric.lower().split()[-1] in ("accuracy", "f1", "recall", "auc")


def unit(metric: str) -> str:
    return f"{metric} (%)" if is_share(metric) else metric


def score(values: Sequence[float | None], metric: str) -> str:
    """Mean ± standard deviation of scores, in percent where they are shares."""
    share = is_share(metric)
    known = [100 * v if share else v for v in values if v is not None]
    of = f" ({len(known)} of {len(values)})" if 0 < len(known) < len(values) else ""
    return plus_minus(known, 1 if share else 3) + of


def as_table(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """A row per method of ours, and beneath it the paper's."""
    result = []
    titles = [f"{e['title']}, {unit(e['metric'])}" for e in entries]
    for row in dict.fromkeys(row for e in entries for row in (*e["ours"], *e["paper"])):
        ours = [score(e["ours"][row]["values"], e["metric"]) if row in e["ours"] else "–" for e in entries]
        paper = [_printed(e["paper"].get(row, ()), e["metric"]) for e in entries]
        for label, cells in ((row, ours), (f"{row}, the paper", paper)):
            if set(cells) != {"–"}:
                result.append({"": label, **dict(zip(titles, cells, strict=True))})
    return result


def _printed(numbers: Sequence[float], metric: str) -> str:
    return " ± ".join(f"{n:.1f}" if is_share(metric) else f"{n:g}" for n in numbers) or "–"


def differences(entries: Sequence[Mapping[str, Any]], row: str, control: str) -> list[str]:
    """How much better ``row`` is than ``control`` with the same seeds."""
    lines = []
    for entry in entries:
        ours, other = (entry["ours"].get(name, {"values": []})["values"] for name in (row, control))
        both = [(a, b) for a, b in zip(ours, other, strict=False) if None not in (a, b)]
        if both:
            scale, points = (100, "points") if is_share(entry["metric"]) else (1, entry["metric"])
            mean = scale * sum(a - b for a, b in both) / len(both)
            wins = f"better with {sum(a > b for a, b in both)} of {len(both)} seeds"
            lines.append(f"{entry['title']}: {row} against {control} {mean:+.2g} {points}; {wins}.")
    return lines
