"""``shoal.sweep``: algorithms on datasets by DomainBed's protocol."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import Unpack

from shoal.api.result import Result, messages
from shoal.api.source import datasets_in, listed_algorithms, listed_names, make_folder
from shoal.api.train import given_options, model_fields
from shoal.errors import InputError
from shoal.files import dump_json, write_atomically
from shoal.options import Algorithms, Names, SweepOptions, TrainingOptions, public, with_defaults
from shoal.settings import Few, Positive

if TYPE_CHECKING:
    import pandas

    from shoal.experiments.record import RunRecord

Rule = Literal["training", "leave-one-out", "oracle"]
FORMATS = {"md": "markdown", "tex": "latex"}
SHOWN = 10
"""Failed runs that a text lists."""


@dataclass(frozen=True, repr=False)
class Sweep(Result):
    """The result of :func:`sweep`: scores of every algorithm on every held-out domain, by selection rule.

    Attributes:
        results: results by rule, one per dataset, as plain data: rows and cases.
        records: record of each run that did not fail.
        folder: folder of the runs and tables.
        failed: identities of failed runs, with their errors; the same call repeats them.
    """

    results: Mapping[str, Sequence[Mapping[str, Any]]]
    records: Sequence[RunRecord]
    folder: Path
    failed: Mapping[str, str] = field(default_factory=dict)

    def _document(self, rule: str, form: str = "text") -> list[str]:
        """Tables, one per dataset and one over several, and, but for LaTeX, how their numbers came about."""
        from shoal.report import runs as view

        results = self.results[rule]
        tables = [view.dataset_table(result) for result in results]
        tables += [view.overall_table(results)] if len(results) > 1 else []
        notes = [] if form == "latex" else ["\n".join(view.sweep_notes(results))]
        return [*(getattr(table, form)() for table in tables), *notes]

    @property
    def problems(self) -> list[str]:
        """The errors of failed runs; the same call repeats these runs."""
        return [f"failed: {error}" for error in self.failed.values()]

    def __str__(self) -> str:
        parts = [part for rule in self.results for part in (f"{rule}:", *self._document(rule))]
        names = ", ".join(f"sweep-{rule}.{{{','.join(FORMATS)}}}" for rule in self.results)
        return "\n\n".join([*parts, *self.problems[:SHOWN], f"Saved in {self.folder}: {names}, sweep.json."])

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as ``--json`` prints it."""
        return {"rules": dict(self.results), "failed": dict(self.failed)}

    def to_frame(self) -> pandas.DataFrame:
        """Return a DataFrame with one row per rule, dataset, algorithm, held-out domain and seed."""
        import pandas

        return pandas.DataFrame(
            {"rule": rule, "dataset": result["dataset"], **case, "missing": len(case["missing"])}
            for rule, results in self.results.items()
            for result in results
            for case in result["cases"]
        )


@public("steps", "model", "device", "jobs")
def sweep(
    datasets: Names,
    *,
    algorithms: Algorithms,
    seeds: Few = 3,
    search: Few = 20,
    rules: Sequence[Rule] = ("training", "oracle"),
    data_options: Mapping[str, Any] | None = None,
    data_dir: str | Path | None = None,
    budget: Positive | None = None,
    out: str | Path = "shoal-sweep",
    **options: Unpack[SweepOptions],
) -> Sweep:
    """Compare algorithms on datasets with the protocol of DomainBed.

    Each domain is held out in turn. Each seed has its own split of the data and its own random search, which
    starts with the default hyperparameters. The same call runs what is missing, including failed runs.

    Args:
        datasets: names of datasets (`shoal list datasets`).
        algorithms: algorithms (`shoal list algorithms`), or files of your own such as my_algorithm.py;
            fish:regrouped is Fish with random grouping. In Python also classes.
        seeds: number of seeds, each with its own split of the data.
        search: number of hyperparameter trials per seed: the defaults, then random search.
        rules: model selection rules: training, leave-one-out (many more runs) or oracle.
        data_options: options of the datasets.
        data_dir: folder that contains the datasets (default: $SHOAL_DATA).
        budget: minutes, after which no further runs are started.
        out: folder for runs and tables.
        **options: options of every run, see :class:`~shoal.options.SweepOptions`. Those that the protocol
            searches (lr, batch_size, settings) cannot be set.
    """
    from shoal.experiments import protocol
    from shoal.experiments.execute import execute
    from shoal.experiments.selection import sweep_results
    from shoal.experiments.store import Store

    for name in ("lr", "batch_size", "settings", "seed", "select"):
        if name in options:
            raise InputError("is set by the protocol of DomainBed; use shoal.compare.", name)
    names, rows = listed_names(datasets), listed_algorithms(algorithms)
    for name, values in (("datasets", names), ("algorithms", rows), ("rules", rules)):
        if not values:
            raise InputError("must not be empty.", name)
    if own := [name for name in names if Path(name).is_file()]:
        raise InputError(f"{own[0]!r} is a file; compare algorithms on it with `shoal compare`.")
    full, out = with_defaults(options, SweepOptions), Path(out)
    where = {name: full[name] for name in ("engine", "device", "jobs")}
    plan: Any = {**given_options(options, TrainingOptions), **model_fields(options)}
    plan |= {"seeds": seeds, "search": search, "pairs": "leave-one-out" in rules}
    with datasets_in(data_dir), messages(bool(full["progress"])) as show:
        configs = protocol.plan(dict.fromkeys(names, data_options or {}), rows, **plan)
        make_folder(out, kind="sweep")
        until = None if budget is None else time.monotonic() + 60 * budget
        progress = bool(full["progress"])
        outcome = execute(configs, Store(out / "runs"), until=until, progress=progress, **where)
        if left := outcome.remaining:
            show(f"the time budget is used up; {left:,} runs remain. The same call continues")
    if outcome.failed and not outcome.records:
        raise ChildProcessError(f"every run failed, such as: {next(iter(outcome.failed.values()))}")
    results: dict[str, Any] = {rule: sweep_results(configs, outcome.records, rule) for rule in rules}
    result = Sweep(results, outcome.records, out, outcome.failed)
    write_atomically(out / "sweep.json", dump_json(results))
    for rule in rules:
        for ending, form in FORMATS.items():
            text = "\n\n".join(result._document(rule, form))
            write_atomically(out / f"sweep-{rule}.{ending}", f"{text}\n".encode())
    return result
