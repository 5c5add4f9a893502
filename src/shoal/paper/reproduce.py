"""``reproduce``: an experiment of the paper, with the paper's numbers beside ours."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shoal.api.result import Result
from shoal.errors import InputError, check_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shoal.experiments.config import RunConfig
    from shoal.experiments.record import RunRecord
    from shoal.report.tables import Table

Experiment = Literal[
    "linear", "theorem", "cdsprites", "tracking", "grouping", "cost", "domainbed", "wilds", "ablation"
]
RUNS = ("seeds", "device", "jobs", "engine")
USES: Mapping[str, Sequence[str]] = {
    "linear": (),
    "theorem": (),
    "cdsprites": ("only", *RUNS),
    "tracking": ("datasets", "preset", "data_dir", *RUNS),
    "grouping": ("datasets", "preset", "data_dir", *RUNS),
    "cost": ("only", "device"),
    "domainbed": ("datasets", "algorithms", "data_dir", *RUNS),
    "wilds": ("datasets", "algorithms", "preset", "data_dir", *RUNS),
    "ablation": ("only", "datasets", "preset", "data_dir", *RUNS),
}
"""By experiment, which is a module of this package: the options that not every experiment uses."""
SHOWN, WIDTH = 10, 100
"""Failed runs that the text names, and characters of its lines."""


@dataclass(frozen=True)
class Reproduction(Result):
    """The result of :func:`reproduce`.

    Attributes:
        experiment: name of the experiment.
        tables: tables by their headings, with the paper's numbers beside ours.
        text: what the tables show.
        left_out: what a quick run leaves out, and what must not be concluded from it.
        data: the numbers as plain data.
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

    def __str__(self) -> str:
        parts = [f"{heading}:\n\n{t.text()}" if heading else t.text() for heading, t in self.tables.items()]
        quick = [_wrapped(f"Quick run. {self.left_out}")] if self.left_out else []
        names = ", ".join(path.name for path in self.files)
        saved = [f"Saved in {self.files[0].parent}: {names}"] if self.files else []
        failed = ["\n".join(self.failed[:SHOWN])] if self.failed else []
        return "\n\n".join([*parts, _wrapped(self.text), *quick, *failed, *saved])

    def to_dict(self) -> dict[str, Any]:
        about = {"experiment": self.experiment, "left_out": self.left_out, "failed": list(self.failed)}
        return {**about, **self.data, "files": [str(path) for path in self.files]}


def _wrapped(text: str) -> str:
    lines = [(line, "  " if line.startswith(("-", " ")) else "") for line in text.splitlines()]
    return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent=indent) for line, indent in lines)


@dataclass(frozen=True)
class Request:
    """The options of a call of :func:`reproduce`, as the experiments read them."""

    experiment: str
    quick: bool
    out: Path
    progress: bool
    only: Sequence[str]
    datasets: Sequence[str]
    algorithms: Sequence[str]
    seeds: int | None
    preset: str
    device: str | None
    jobs: int | None
    engine: str

    @property
    def name(self) -> str:
        """Of the files that are written."""
        return f"{self.experiment}-quick" if self.quick else self.experiment

    def parts(self, known: Sequence[str]) -> list[str]:
        """The parts that ``only`` selects, all by default."""
        check_names(f"part of {self.experiment}:", self.only, known)
        return [part for part in known if part in (self.only or known)]

    def run(
        self, configs: Sequence[RunConfig], how: Mapping[str, Any] | None = None
    ) -> tuple[list[RunRecord], list[str]]:
        """:func:`run_missing` in the experiment's folder."""
        same: dict[str, Any] = {
            name: getattr(self, name) for name in ("device", "jobs", "engine", "progress")
        }
        return run_missing(configs, self.out / self.name, how=how, **same)

    def result(
        self,
        tables: Mapping[str, Table],
        text: str,
        data: Mapping[str, Any],
        *,
        failed: Sequence[str] = (),
        figures: Mapping[str, Figure] | None = None,
        left_out: str = "",
    ) -> Reproduction:
        """The result, with its tables, data and figures, which have the names of their files, written."""
        from shoal.files import dump_json, write_atomically
        from shoal.report import plots

        left_out = left_out if self.quick else ""
        headed = [(f"{heading}:\n\n" if heading else "", table) for heading, table in tables.items()]
        contents = {
            "md": "\n\n".join([*(heading + t.markdown() for heading, t in headed), text, left_out]).rstrip(),
            "tex": "\n\n".join(t.latex() for t in tables.values()),
            "csv": "\n".join(t.csv() for t in tables.values()),
            "json": dump_json(data).decode(),
        }
        files = [self.out / f"{self.name}.{ending}" for ending in contents]
        for path, content in zip(files, contents.values(), strict=True):
            write_atomically(path, f"{content}\n".encode())
        for name, figure in (figures or {}).items():
            files += plots.save(figure, self.out / f"{name}{'-quick' * self.quick}")
        return Reproduction(self.experiment, tables, text, data, left_out, failed, files)


def run_missing(
    configs: Sequence[RunConfig],
    folder: Path,
    *,
    how: Mapping[str, Any] | None = None,
    device: str | None = None,
    jobs: int | None = None,
    engine: str = "local",
    progress: bool = True,
) -> tuple[list[RunRecord], list[str]]:
    """Do the runs that are missing in a folder.

    Returns:
        The records of all that finished or diverged, and a line for each that failed.
    """
    from shoal.experiments.execute import execute
    from shoal.experiments.store import Store

    where: dict[str, Any] = {"engine": engine, "device": device, "jobs": jobs, "progress": progress}
    outcome = execute(configs, Store(folder), how=how, **where)
    names = {c.identity: f"{c.name} on {c.dataset}, seed {c.seed}" for c in configs}
    return outcome.records, [f"failed: {names[key]}: {error}" for key, error in outcome.failed.items()]


def reproduce(
    experiment: Experiment,
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    datasets: Sequence[str] = (),
    algorithms: Sequence[str] = (),
    seeds: int | None = None,
    preset: Literal["paper", "authors-code"] = "paper",
    data_dir: str | Path | None = None,
    out: str | Path = "shoal-reproduce",
    device: str | None = None,
    jobs: int | None = None,
    engine: Literal["local", "ray"] = "local",
    progress: bool = True,
) -> Reproduction:
    """Reproduce an experiment of the paper (Shi et al., Gradient Matching for Domain Generalization).

    The tables have the paper's numbers beside ours. The same call resumes: finished runs in the output folder
    are not repeated. Datasets that are not available are reported, and the others are used.

    Args:
        experiment: linear (the linear example, step by step), theorem (Fish against gradient matching),
            cdsprites (accuracy by the number of domains), tracking (agreement of gradients in training),
            grouping (Fish with random grouping), cost (time of a step of IDGM against Fish), domainbed and
            wilds (the tables of these benchmarks), or ablation (warm start, learning rates, domains per step
            and SmoothFish on WILDS).
        quick: a small version that ends within two minutes on two cores; the result says what it leaves out.
        only: parts to run. cdsprites: adam, idgm, batch-256, sgd, palette, as-printed; cost: sprite-cnn,
            resnet50; ablation: warm-start, rates, meta-steps, smoothfish (default: all).
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

    check_names("experiment", [experiment], USES)
    only, datasets, algorithms = (
        (names,) if isinstance(names, str) else tuple(names) for names in (only, datasets, algorithms)
    )
    given: dict[str, Any] = {"only": only, "datasets": datasets, "algorithms": algorithms, "seeds": seeds}
    given |= {"preset": preset, "device": device, "jobs": jobs, "engine": engine}
    defaults = inspect.signature(reproduce).parameters
    for name, value in {**given, "data_dir": data_dir}.items():
        if value != defaults[name].default and name not in USES[experiment]:
            users = ", ".join(other for other, options in USES.items() if name in options)
            raise InputError(f"{experiment} does not use it; used by {users}.", option=name)
    for name, number in (("seeds", seeds), ("jobs", jobs)):
        if number is not None and number < 1:
            raise InputError(f"must be at least 1, got {number}.", option=name)
    make_folder(out)
    request = Request(experiment, quick, Path(out), progress, **given)
    with datasets_in(data_dir):
        result: Reproduction = importlib.import_module(f"shoal.paper.{experiment}").reproduce(request)
    return result
