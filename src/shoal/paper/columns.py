"""The paper's tables with one column per dataset: ours, and the paper's numbers beneath."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.errors import InputError
from shoal.experiments import protocol, selection
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.statistics import mean_sd
from shoal.paper import recipes
from shoal.report.tables import Table

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
    metric: str
    paper: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By row: what is printed, and what is printed after ±."""
    runs: Sequence[RunConfig] = ()
    why_not: str = ""
    last: bool = False
    """Whether the last step counts and not the selected one."""
    rows: Mapping[str, str] = field(default_factory=dict)
    """For DomainBed's protocol: names of algorithms by row."""

    def scores(self, records: Sequence[RunRecord]) -> dict[str, list[float | None]]:
        """By row a value per seed: on the test split, or the mean over held-out domains."""
        if self.rows:
            found = selection.results(selection.sweep(self.runs, records), self.dataset)
            values = {row["algorithm"]: row["average"]["values"] for row in found["rows"]}
            return {row: values[algorithm] for row, algorithm in self.rows.items()}
        finished = {r.config.identity: r for r in records if r.status == "finished"}
        result: dict[str, list[float | None]] = {}
        for config in self.runs:
            record = finished.get(config.identity)
            score = record.measure("test", self.metric, last=self.last) if record else None
            result.setdefault(config.name, []).append(score)
        return result

    def entry(self, records: Sequence[RunRecord]) -> dict[str, Any]:
        """The column as plain data."""
        ours = {}
        for row, values in self.scores(records).items() if self.runs else ():
            mean, deviation = mean_sd(values)
            ours[row] = {"values": values, "mean": mean, "deviation": deviation}
        about = {name: getattr(self, name) for name in ("dataset", "title", "metric", "why_not")}
        return {**about, "runs": len(self.runs), "paper": dict(self.paper), "ours": ours}


def column(plan: Callable[[], Sequence[RunConfig]], **options: Any) -> Column:
    """A column with the runs that ``plan`` lists; where files are missing, it says so."""
    try:
        return Column(runs=plan(), **options)
    except InputError as error:
        return Column(why_not=str(error), **options)


def sweep_column(
    name: str, algorithms: Mapping[str, str], request: Request, quick: Mapping[str, Any], **options: Any
) -> Column:
    """A column by DomainBed's protocol; ``algorithms`` by row, ``quick`` are options of the plan."""
    more: dict[str, Any] = dict(options.pop("plan", {}))
    data: dict[str, Any] = {}
    if request.quick:
        from shoal.data.sets import registry

        more |= quick
        if hasattr(registry.module(name), "LAYOUT"):  # an image folder
            data, more["model"] = SMALL_IMAGES, "small-cnn"

    def plan() -> list[RunConfig]:
        return protocol.plan({name: data}, list(algorithms.values()), **more)

    return column(plan, dataset=name, metric="accuracy", rows=algorithms, **options)


# Text


def is_share(metric: str) -> bool:
    """Whether it is shown in percent; a correlation is not."""
    return metric.lower().split()[-1] in ("accuracy", "f1", "recall", "auc")


def unit(metric: str) -> str:
    return f"{metric} (%)" if is_share(metric) else metric


def table(entries: Sequence[Mapping[str, Any]]) -> Table:
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


def run_tables(
    request: Request,
    tables: Mapping[str, Sequence[Column]],
    words: str,
    left_out: str,
    control: tuple[str, str] | None = None,
) -> Reproduction:
    """Runs what the tables are made of; refuses where no dataset is available."""
    columns = [column for own in tables.values() for column in own]
    missing = {c.dataset: c.why_not for c in columns if c.why_not}
    wilds = recipes.datasets()
    server = [SERVER] if any(name in wilds for name in missing) else []
    if not any(c.runs for c in columns):
        named = ", ".join(missing)
        raise InputError("\n".join([f"no data for {named}. {next(iter(missing.values()))}", *server]))
    configs = list({c.identity: c for column in columns for c in column.runs}.values())
    records, failed = request.run(configs, {"predictions": True})
    entries = {heading: [column.entry(records) for column in own] for heading, own in tables.items()}
    lines = [f"{words} Mean ± standard deviation over seeds."]
    lines += [line for own in entries.values() for line in (gain(own, *control) if control else ())]
    lines += [f"{name} was not run: {why}" for name, why in missing.items()] + server
    by_recipe = [name for name in dict.fromkeys(c.dataset for c in columns if c.runs) if name in wilds]
    differs = recipes.differences(by_recipe, request.preset) if by_recipe and not request.quick else []
    if differs:
        source = {"paper": "the paper", "authors-code": "the authors' code"}[request.preset]
        lines.append(f"Differences from {source}, and what it does not specify:")
        lines += [f"- {line}" for line in differs]
    data = {"tables": entries, "differs": differs}
    shown = {heading: table(own) for heading, own in entries.items()}
    return request.result(shown, "\n".join(lines), data, failed=failed, left_out=left_out)
