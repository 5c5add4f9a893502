"""``reproduce``: an experiment of the paper, with the paper's numbers beside ours."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shoal.api.result import Result
from shoal.errors import InputError, check_names
from shoal.paper import read
from shoal.settings import Few, checked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shoal.experiments.config import RunConfig
    from shoal.experiments.record import RunRecord
    from shoal.report.tables import Table

Experiment = Literal[
    "linear", "theorem", "cdsprites", "tracking", "grouping", "domainbed", "wilds", "ablation"
]
Names = str | Sequence[str]


@dataclass(frozen=True, repr=False)
class Reproduction(Result):
    """The result of :func:`reproduce` and of :func:`~shoal.paper.demo.demo`.

    Attributes:
        experiment: name of the experiment.
        tables: tables by their headings, with the paper's numbers beside ours.
        text: what the tables show.
        data: the numbers as plain data.
        left_out: what a quick run leaves out, and what must not be concluded from it.
        failed: failed runs, one line each; the same call repeats them.
        files: tables, data and figures that were written.
    """

    experiment: str
    tables: Mapping[str, Table]
    text: str
    data: Mapping[str, Any]
    left_out: str = ""
    failed: Sequence[str] = ()
    files: Sequence[Path] = ()

    @property
    def problems(self) -> Sequence[str]:
        return self.failed

    def document(self, form: Literal["text", "markdown"]) -> str:
        """The tables, what they show, and what was left out."""
        parts = []
        for heading, table in self.tables.items():
            parts += [f"{heading}:"] * bool(heading) + [getattr(table, form)()]
        quick = [f"Quick run. {self.left_out}"] if self.left_out else []
        return "\n\n".join([*parts, self.text, *quick])

    def __str__(self) -> str:
        names = ", ".join(path.name for path in self.files)
        saved = [f"Saved in {self.files[0].parent}: {names}"] if self.files else []
        return "\n\n".join([self.document("text"), *self.failed, *saved])

    def to_dict(self) -> dict[str, Any]:
        about = {"experiment": self.experiment, "left_out": self.left_out, "failed": list(self.failed)}
        return {**about, **self.data, "files": [str(path) for path in self.files]}


@dataclass(frozen=True)
class Request:
    """The options of a call, as the experiments read them."""

    experiment: str
    out: Path
    quick: bool = False
    only: Sequence[str] = ()
    datasets: Sequence[str] = ()
    algorithms: Sequence[str] = ()
    seeds: int | None = None
    preset: str = "paper"
    data_dir: str | Path | None = None
    device: str | None = None
    jobs: int | None = None
    engine: str = "local"
    progress: bool = True

    @property
    def name(self) -> str:
        """Of the files that are written."""
        return f"{self.experiment}-quick" if self.quick else self.experiment

    def parts(self, known: Iterable[str]) -> list[str]:
        """The parts that ``only`` selects, all by default."""
        check_names(f"part of {self.experiment}:", self.only, known := list(known))
        return [part for part in known if part in (self.only or known)]

    def run(
        self, configs: Iterable[RunConfig], options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, RunRecord], list[str]]:
        """Do the runs that are missing in the experiment's folder.

        Returns:
            By identity, the records of all that finished or diverged; and a line for each that failed.
        """
        from shoal.experiments.execute import execute
        from shoal.experiments.store import Store

        unique = {config.identity: config for config in configs}
        where: dict[str, Any] = {k: getattr(self, k) for k in ("engine", "device", "jobs", "progress")}
        outcome = execute(list(unique.values()), Store(self.out / self.name), options=options, **where)
        failed = [
            f"failed: {unique[key].name} on {unique[key].dataset}, seed {unique[key].seed}: {error}"
            for key, error in outcome.failed.items()
        ]
        return {record.config.identity: record for record in outcome.records}, failed

    def result(
        self,
        tables: Mapping[str, Sequence[Mapping[str, object]]],
        data: Mapping[str, Any],
        values: Mapping[str, Any] | None = None,
        *,
        more: Sequence[str] = (),
        figures: Mapping[str, Figure] | None = None,
        failed: Sequence[str] = (),
    ) -> Reproduction:
        """The result, with its tables, data and figures, which have the names of their files, written.

        A table is a list of rows with the same columns. ``values`` are filled into the text of the
        experiment, and ``more`` are lines beneath it.
        """
        from shoal.files import dump_json, write_atomically
        from shoal.report import plots
        from shoal.report.tables import Table

        about = _experiments()[self.experiment]
        text = "\n".join([about["text"].format_map(values or {}), *more])
        made = {heading: Table([*rows[0]]) for heading, rows in tables.items()}
        for heading, rows in tables.items():
            for row in rows:
                made[heading].add(*row.values())
        left_out = about["left_out"] if self.quick else ""
        result = Reproduction(self.experiment, made, text, data, left_out, failed)
        files = [self.out / f"{self.name}.{ending}" for ending in ("md", "json")]
        for path, content in zip(files, (result.document("markdown").encode(), dump_json(data)), strict=True):
            write_atomically(path, content + b"\n")
        for name, figure in (figures or {}).items():
            files += plots.save(figure, self.out / f"{name}{'-quick' * self.quick}")
        return replace(result, files=files)


def _experiments() -> dict[str, dict[str, Any]]:
    """By experiment: its module, the options it uses, its text and what a quick run leaves out."""
    found: dict[str, dict[str, Any]] = read("presets/experiments.yaml")
    return found


@checked
def reproduce(
    experiment: Experiment,
    *,
    quick: bool = False,
    only: Names = (),
    datasets: Names = (),
    algorithms: Names = (),
    seeds: Few | None = None,
    preset: Literal["paper", "authors-code"] = "paper",
    data_dir: str | Path | None = None,
    out: str | Path = "shoal-reproduce",
    device: str | None = None,
    jobs: Few | None = None,
    engine: Literal["local", "ray"] = "local",
    progress: bool = True,
) -> Reproduction:
    """Reproduce an experiment of the paper (Shi et al., Gradient Matching for Domain Generalization).

    The tables have the paper's numbers beside ours. The same call resumes: finished runs in the output folder
    are not repeated. Datasets that are not available are reported, and the others are used.

    Args:
        experiment: linear (the linear example, step by step), theorem (Fish against gradient matching),
            cdsprites (accuracy by the number of domains), tracking (agreement of gradients in training),
            grouping (Fish with random grouping), domainbed and wilds (the tables of these benchmarks), or
            ablation (warm start, learning rates, domains per step and SmoothFish on WILDS).
        quick: a small version that ends within two minutes on two cores; the result says what it leaves out.
        only: parts to run. cdsprites: adam, idgm, long-idgm, batch-256, sgd, palette, as-printed; ablation:
            warm-start, rates, meta-steps, smoothfish (default: all).
        datasets: names of datasets, for tracking, grouping, domainbed, wilds and ablation (default: those of
            the paper).
        algorithms: names of algorithms, for domainbed and wilds (default: those of the paper).
        seeds: number of seeds, starting at 0 (default: as in the paper).
        preset: on WILDS, hyperparameters of the paper or of its authors' code.
        data_dir: folder that contains the datasets (default: $SHOAL_DATA).
        out: folder for runs, tables and figures.
        device: device, such as cpu or cuda (default: cuda if available).
        jobs: number of runs in parallel (default: one per core, or one per GPU).
        engine: run on this machine or on a Ray cluster.
        progress: show progress on stderr.

    Returns:
        Reproduction: tables, the numbers as data, and the files that were written.

    Examples:
        >>> result = reproduce("theorem", out="theorem", progress=False)
        >>> [round(row["slope"], 1) for row in result.data["rows"]]
        [2.0, 2.0, 2.0]
    """
    from shoal.api.source import datasets_in, make_folder

    names = {"only": only, "datasets": datasets, "algorithms": algorithms}
    options: dict[str, Any] = {k: (v,) if isinstance(v, str) else tuple(v) for k, v in names.items()}
    options |= {"seeds": seeds, "preset": preset, "data_dir": data_dir, "device": device, "jobs": jobs}
    request = Request(experiment, Path(out), quick, engine=engine, progress=progress, **options)
    about = _experiments()[experiment]
    for name in (*options, "engine"):
        if name not in about.get("uses", ()) and getattr(request, name) != getattr(Request, name):
            raise InputError(f"{experiment} does not use it.", option=name)
    make_folder(out)
    module = importlib.import_module(f"shoal.paper.{about['module']}")
    with datasets_in(data_dir):
        result: Reproduction = module.reproduce(request)
    return result
