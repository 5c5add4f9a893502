"""``shoal.compare``: which algorithm works on a held-out domain."""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typing_extensions import Unpack

from shoal.api.result import Result, write_files
from shoal.api.source import Source, datasets_in, find_source, listed_algorithms, listed_names, make_folder
from shoal.api.train import OF_BASELINES, model_fields
from shoal.errors import InputError, TableWarning
from shoal.files import dump_json, read_json, write_atomically
from shoal.options import (
    Algorithms,
    CompareOptions,
    DataOptions,
    ModelOptions,
    Names,
    TrainingOptions,
    TrainOptions,
    as_flags,
    declared,
    public,
    with_defaults,
)
from shoal.registry import spelled
from shoal.settings import Few, Positive, Range

if TYPE_CHECKING:
    import pandas

    from shoal.experiments.compare import Layout
    from shoal.experiments.config import RunConfig
    from shoal.experiments.race import Race, Stage, Times
    from shoal.experiments.recommend import Recommendation
    from shoal.experiments.record import RunRecord
    from shoal.experiments.store import Store

HOME = "shoal-compare"


@dataclass(frozen=True)
class Comparison(Result):
    """The result of :func:`compare`; ``print`` shows it.

    ``recommendation.row`` is the recommended algorithm.

    Attributes:
        result: rows, cases and everything else as plain data.
        records: record of each run that did not fail.
        folder: folder of the runs and results.
        text: text that ``print`` shows.
    """

    result: dict[str, Any]
    records: Sequence[RunRecord]
    folder: Path
    text: str

    @property
    def recommendation(self) -> Recommendation | None:
        """The recommendation, ``None`` while runs are missing."""
        from shoal.experiments.recommend import Recommendation

        about = self.result.get("recommendation")
        return about and Recommendation.from_dict(about)

    @property
    def failed(self) -> dict[str, str]:
        """The errors of algorithms with failed runs; the same call repeats these runs."""
        return self.result.get("failed", {})

    @property
    def problems(self) -> list[str]:
        return [f"{name}: {why}" for name, why in self.failed.items()]

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        from shoal.report import compare as view

        return view.as_html(self.result)

    def to_dict(self) -> dict[str, Any]:
        """Return the results as plain data."""
        return self.result

    def to_frame(self) -> pandas.DataFrame:
        """Return a DataFrame with one row per algorithm, best first: mean and standard deviation, the worst
        domain, the difference to the baseline with its interval, and each domain."""
        import pandas

        rows = []
        for row in self.result["rows"]:
            worst, over = row["worst"] or {}, row["over_domains"] or {}
            rows.append(
                {name: row[name] for name in ("algorithm", "rank")}
                | {name: row["average"][name] for name in ("mean", "sd")}
                | {"worst": worst.get("mean"), "worst_domain": worst.get("domain")}
                | {"difference": over.get("mean"), "low": over.get("low"), "high": over.get("high")}
                | {"validation": row["validation"]["mean"]}
                | {name: summary["mean"] for name, summary in row["domains"].items()}
            )
        return pandas.DataFrame(rows).set_index("algorithm")

    def save(self, path: str | Path) -> Path:
        """Write the results.

        Args:
            path: file with the extension .md, .csv (one line per case), .json or .html.
        """
        from shoal.report import compare as view

        path, ending = Path(path), Path(path).suffix.lower()
        if ending == ".html":
            return self.report(path)
        if ending not in view.FILES:
            raise InputError(f"{str(path)!r} must end in .md, .csv, .json or .html.")
        write_atomically(path, view.FILES[ending](self.result).encode(errors="backslashreplace"))
        return path

    def figure(self) -> Any:
        """Return a matplotlib figure of every algorithm on every held-out domain."""
        from shoal.report import compare as view

        return view.figure(self.result)

    def report(self, path: str | Path) -> Path:
        """Write an HTML report of this comparison.

        Args:
            path: file to write.
        """
        from shoal.api.report import write_page

        return write_page(self.folder, path).path


@public("steps", "batch_size", "lr", "model", "metric", "device", "jobs")
def compare(
    data: Any,
    *,
    algorithms: Algorithms | None = None,
    baselines: bool = True,
    held_out: Names | None = None,
    folds: Annotated[int, Range(2, 1000)] | None = None,
    seeds: Few | None = None,
    search: Few | None = None,
    budget: Positive | None = None,
    exhaustive: bool = False,
    fit: str | Path | None = None,
    out: str | Path | None = None,
    **options: Unpack[CompareOptions],
) -> Comparison:
    """Compare algorithms on held-out domains and recommend one.

    Each domain is held out in turn; with more than ten domains, they are held out in ten groups. The
    comparison is a race: first the baselines (on tabular data a linear model and gradient boosting), then
    every algorithm once with its defaults, then hyperparameter trials and further seeds of those that can
    still be recommended. For each seed, the trial and the step with the best validation score on the training
    domains are selected. The simplest algorithm is recommended that no other beats by more than chance. Each
    stage has a complete table. Finished runs are saved in ``out``; the same call runs only those that are
    missing.

    Args:
        data: name of a dataset (`shoal list datasets`), table (.csv, .tsv, .csv.gz, .parquet, .xlsx), or
            folder of images arranged as folder/domain/class. In Python also a DataFrame, arrays (X, y,
            domains) or a Hugging Face dataset; these are written to ``out`` once.
        algorithms: algorithms to compare, or all (default: all; for your own data a selection with controls,
            and for pretrained models recipes such as erm++); fish:regrouped is the control of Fish with
            random grouping, my_algorithm.py a file with an algorithm of your own. In Python also classes.
        baselines: include baselines such as gradient boosting.
        held_out: domains to hold out (default: every domain that can be scored, or the dataset's test
            domain).
        folds: number of groups in which domains are held out (default: one domain at a time if there are at
            most 10, otherwise 10 groups).
        seeds: number of seeds (default: up to 3, for about ten minutes on two cores).
        search: number of hyperparameter trials per algorithm and seed: the defaults, then random search
            (default: up to 3, for about ten minutes on two cores).
        budget: time budget in minutes, for which the race is planned and after which no stage is started.
        exhaustive: run all trials and seeds of every algorithm (default: 3 of each), as publications require.
        fit: folder of a model that is trained on all domains with the recommended algorithm.
        out: folder for runs and results (default: a folder in shoal-compare named after the data).
        **options: options of every run, see :class:`~shoal.options.CompareOptions`.

    Examples:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> x = rng.normal(size=(120, 3))
        >>> y = np.where(x[:, 0] + rng.normal(size=120) > 0, "yes", "no")
        >>> data = x, y, np.repeat(["oslo", "lima", "rome"], 40)
        >>> found = compare(data, algorithms="erm", seeds=1, search=1, steps=30, progress=False)
        >>> [row["rank"] is not None for row in found.result["rows"]]
        [True, True, True, True]
    """
    from shoal.experiments.compare import LeaveDomainsOut, layout
    from shoal.experiments.race import Race, Times, sized
    from shoal.training.processes import together

    if together():
        raise InputError("compare starts its own processes; run it without torchrun.")
    if "settings" in options:
        raise InputError("belong to one algorithm, and compare searches them; use shoal.train.", "settings")
    full, asked = with_defaults(options, CompareOptions), listed_algorithms(algorithms)
    of_data: Any = {name: value for name, value in options.items() if name in declared(DataOptions)}
    metric: Any = options.get("metric")
    with datasets_in(options.get("data_dir")), _messages(bool(full["progress"])) as show:
        source = find_source(data, folder=out, home=HOME, **of_data)
        where = layout(source.dataset, source.options, listed_names(held_out), metric)
        base, note = _base(source, where, options)
        given = tuple(name for name in options if name in declared(TrainingOptions))
        rows = _rows(asked, base, where, source.own)
        protocol = LeaveDomainsOut(base, rows, where.held_out, 1, 1, folds, given)
        protocol, unable, notes = protocol.checked(full["device"], bool(asked) and "all" not in asked)
        show(note, *where.messages, *notes, *(f"not compared: {n} ({why})" for n, why in unable.items()))
        if baselines:
            protocol = replace(protocol, rows=[*where.baselines, *protocol.rows])
        times = Times.of_table(*where.size, base) if where.size and not model_fields(options) else None
        race = sized(Race(protocol, exhaustive), times, seeds, search, budget)
        folder = Path(out) if out is not None else _folder(source, isinstance(data, (str, Path)))
        about: dict[str, Any] = {"title": Path(source.given).name if source.own else base.dataset}
        about |= {"unable": unable, "excluded": where.excluded, "warned": where.warned, "cautions": notes}
        _make_folder(folder, source, about["title"])
        return _Job(source, race, times, folder, full, about, show).run(budget)


def _base(source: Source, where: Layout, options: Mapping[str, Any]) -> tuple[RunConfig, str]:
    """The options that all runs share, and a message on the learning rate."""
    from shoal.experiments.compare import BASELINE, PATIENCE
    from shoal.experiments.config import RunConfig
    from shoal.experiments.search import with_rate

    given = {name: value for name, value in options.items() if name in declared(TrainingOptions)}
    steps = given.get("steps") or int(where.defaults["steps"])
    fields = {"batch_size": where.defaults["batch"], "eval_every": max(1, steps // 10), "steps": steps}
    fields |= {"data_options": source.options, "holdout": where.holdout}
    if given.get("select") != "last" and given.get("average") is None:
        fields["patience"] = PATIENCE
    return with_rate(RunConfig(spelled(source.dataset), BASELINE, **fields | given | model_fields(options)))


def _rows(asked: Sequence[str], base: RunConfig, where: Layout, own: bool) -> list[str]:
    """The algorithms to compare, with all of them in place of ``all``."""
    from shoal.algorithms import registry
    from shoal.experiments.compare import PRETRAINED
    from shoal.experiments.search import weights_of

    pretrained = own and weights_of(base) != "random"
    rows = asked or (PRETRAINED if pretrained else where.defaults["algorithms"])
    every = registry.names() if "all" in rows else []
    return list(dict.fromkeys([*every, *(row for row in rows if row != "all")]))


def _folder(source: Source, named: bool) -> Path:
    """A folder named after the data: of a table by its content, of other data of one's own by their place.

    Data in memory were written to it.
    """
    if not named:
        return Path(source.given).parent
    identity = source.options.get("digest") or str(Path(source.given))
    own = f"-{hashlib.sha256(identity.encode()).hexdigest()[:8]}" * source.own
    return Path(HOME) / f"{Path(source.given).resolve().stem or 'data'}{own}"


def _make_folder(folder: Path, source: Source, title: str) -> None:
    """Make the folder, which must not contain another experiment."""
    make_folder(folder, source.given, kind="comparison")
    if (path := folder / "comparison.json").exists():
        before = read_json(path)
        other = before.get("title") if isinstance(before, dict) else "another file"
        if other != title and not str(other).startswith("data-"):
            raise InputError(f"{str(folder)!r} has the comparison of {other!r}; choose another.", "out")


@contextlib.contextmanager
def _messages(progress: bool) -> Iterator[Callable[..., None]]:
    """Shows messages to the user. Where the columns of a table are shown, there are no warnings of them."""

    def show(*lines: str) -> None:
        for line in filter(None, lines if progress else ()):
            end = "\n" if "\n" in line else ".\n"
            print(f"{line[:1].upper()}{line[1:].rstrip('.')}", end=end, file=sys.stderr, flush=True)

    with warnings.catch_warnings():
        if progress:
            warnings.simplefilter("ignore", TableWarning)
        yield show


def many(number: int, what: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{number:,} {what}{'s' * (number != 1)}"


@dataclass
class _Job:
    """A race that is planned, and where its runs and tables go."""

    source: Source
    race: Race
    times: Times | None
    folder: Path
    options: Mapping[str, Any]
    about: Mapping[str, Any]
    show: Callable[..., None]

    @property
    def store(self) -> Store:
        from shoal.experiments.store import Store

        return Store(self.folder / "runs")

    def run(self, minutes: float | None) -> Comparison:
        """Run the stages, and write the table after each of them."""
        from shoal.experiments.execute import execute
        from shoal.training.stopping import Interrupted

        start, stages = time.monotonic(), self.race.stages
        result, failed = dict[str, Any](), dict[str, str]()
        self._announce(minutes)
        about = {**self.about, "cautions": [*self.about["cautions"], *self._leaks()]}
        how = {name: self.options[name] for name in ("engine", "device", "jobs")}
        how["options"] = {name: self.options[name] for name in ("workers", "compile", "deterministic")}
        for number, stage in enumerate(stages):
            began = time.monotonic()
            if minutes is not None and number and began - start > 60 * minutes:
                result["race"]["ended"] = "budget"
                self.show(
                    f"the budget of {minutes:g} minutes is used up after stage {number} of {len(stages)}"
                )
                break
            configs = self.race.plan(stage)
            new = bool(self.store.missing(configs))
            if new:
                self.show(f"stage {number + 1} of {len(stages)}: {self._described(stage)}")
            try:
                progress = bool(self.options["progress"])
                failed.update(execute(configs, self.store, progress=progress, **how).failed)
            except Interrupted as stop:
                if not result:
                    raise
                result["race"]["ended"] = "interrupted"
                self._written(result)
                where = f"after stage {number} of {len(stages)} are in {self.folder}"
                raise Interrupted(
                    f"interrupted. The results {where}; the same command resumes.", stop.signal
                ) from stop
            result = self.race.close(stage, self.store.found, failed) | about
            self._tables(result)
            if new and number + 1 < len(stages):
                self._show_stage(number, result, time.monotonic() - began)
        return self._written(result)

    def _announce(self, minutes: float | None) -> None:
        """Say what will be run and how long it takes, and on which columns of a table."""
        from shoal.experiments.execute import count_jobs
        from shoal.experiments.progress import duration

        race, protocol, stages = self.race, self.race.protocol, self.race.stages
        if not self.store.missing(race.plan(stages[-1])):
            return
        jobs = count_jobs(self.options["device"], self.options["jobs"])
        times = [race.seconds(stage, self.times, jobs) for stage in stages] if self.times else []
        if times and minutes is not None and 60 * minutes < times[0]:
            about = f"{self._described(stages[0])}, takes about {duration(times[0])}"
            raise InputError(f"of {minutes:g} minutes is too small: the first stage, {about}.", "budget")
        if (report := self.source.columns()) is not None:
            write_files(self.folder, {"columns.json": dump_json(report)})
        self.show(*self.source.notes())
        folds, domains = len(protocol.folds), len(protocol.held_out)
        groups = f" in {folds} groups" if folds < domains else ""
        each = [f"({duration(seconds)})" for seconds in times] or [""] * len(stages)
        parts = [f"{self._described(stage)} {time}".strip() for stage, time in zip(stages, each, strict=True)]
        some = "" if race.exhaustive else "; algorithms that can no longer be recommended leave the race"
        total = f", about {duration(sum(times))} with {many(jobs, 'run')} in parallel" if times else ""
        self.show(
            f"{many(domains, 'held-out domain')}{groups}; {many(len(stages), 'stage')}{total}: "
            f"{'; '.join(f'{n}. {part}' for n, part in enumerate(parts, 1))}{some}"
        )

    def _leaks(self) -> list[str]:
        """Columns of a table that may contain the label."""
        if not (path := self.folder / "columns.json").exists():
            return []
        found = [
            (column["column"], text)
            for column in read_json(path)["columns"]
            for text in column["warnings"]
            if text.startswith("possible leakage")
        ]
        return [f"column {name!r}, {text}" for name, text in found]

    def _described(self, stage: Stage) -> str:
        """What a stage runs."""
        count = len([row for row in stage.rows if row not in self.race.left])
        if stage.name in ("baselines", "algorithms"):
            return f"{many(count, stage.name[:-1])} once, with the defaults"
        every = "all algorithms" if self.race.exhaustive else "those that can still be recommended"
        more = f"{stage.search} trials" if stage.name == "hyperparameters" else f"{stage.seeds} seeds"
        return f"{more} of {every}"

    def _show_stage(self, number: int, result: Mapping[str, Any], seconds: float) -> None:
        """The table of a stage that is not the last."""
        from shoal.experiments.progress import duration
        from shoal.report import compare as view

        first = f"after stage {number + 1} of {len(self.race.stages)} ({duration(seconds)})"
        self.show("\n".join([f"{first}: {line}" for line in view.recommended(result)[:1]] or [first]))
        self.show(f"{view.table(result, most=0).text()}\n")

    def _tables(self, result: Mapping[str, Any]) -> list[str]:
        """Write the tables; returns the names of the files."""
        from shoal.report import compare as view

        files = {f"comparison{ending}": content(result) for ending, content in view.FILES.items()}
        write_files(self.folder, {n: text.encode(errors="backslashreplace") for n, text in files.items()})
        return list(files)

    def _written(self, result: dict[str, Any]) -> Comparison:
        """The result, with its tables, figure and report in the folder."""
        from shoal.api.report import write_page
        from shoal.report import compare as view
        from shoal.report import plots

        written = self._tables(result)
        try:
            written += [path.name for path in plots.save(view.figure(result), self.folder / "comparison")]
            written.append(write_page(self.folder).path.name)
        except InputError as error:
            self.show(str(error))
        configs = self.race.configs
        commands = _commands(self.source, configs, result)
        text = f"{view.text(result)}\n\nSaved in {self.folder}: {', '.join(written)}.{commands}"
        return Comparison(result, self.store.found(configs), self.folder, text)


def _commands(source: Source, configs: Sequence[RunConfig], result: Mapping[str, Any]) -> str:
    """Commands that train the recommended row on every domain, then predict, score and export."""
    from shoal.experiments.compare import selected_trial

    about = result["recommendation"]
    if not source.own or not about or about["state"] == "majority":
        return ""
    name = about["nearest"]
    if (selected := selected_trial(configs, result["cases"], name)) is None:
        return ""
    config, times, cases = selected
    folder = f"runs/{name.lower()}-{config.identity[:8]}"
    kind = Path(source.given).suffix if Path(source.given).is_file() else ""
    lines = [
        f"To train {name} on all domains, with the hyperparameters selected in {times} of "
        f"{many(cases, 'split')}, and then predict, score and export:",
        train_command(config, source, folder),
        shlex.join(["shoal", "predict", folder, f"NEW{kind}"]),
        shlex.join(["shoal", "score", folder, f"LABELLED{kind}"]),
        shlex.join(["shoal", "export", folder]),
    ]
    return "\n" + "\n  ".join(lines)


def train_command(config: RunConfig, source: Source, folder: str) -> str:
    """The shell command that trains a run of a comparison on all domains, with the same options.

    It calls Python where an option has no flag.
    """
    from shoal.experiments.baselines import is_one
    from shoal.training.recipes import find_recipe

    recipe = find_recipe(config.name)
    algorithm = recipe.name if recipe else config.algorithm.partition("@")[0]
    known = {*declared(ModelOptions), *declared(TrainingOptions)}
    known &= set(OF_BASELINES) if is_one(config) else known
    implied = {**(recipe.options if recipe else {}), "seed": config.seed}
    options = {n: v for n, v in config.given().items() if n in known and implied.get(n) != v}
    options = {**source.arguments, "held_out": "none", **options, "out": folder}
    flags = [n for n, each in declared(TrainOptions).items() if "train" in each.option.commands.split()]
    if options.keys() <= {*flags, "held_out", "out"}:
        return shlex.join(["shoal", "train", algorithm, source.given, *as_flags(options)])
    arguments = ", ".join([repr(algorithm), repr(source.given), *(f"{n}={v!r}" for n, v in options.items())])
    return shlex.join(["python", "-c", f"import shoal; shoal.train({arguments})"])
