"""``shoal.compare``: which algorithm works on a held-out domain."""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typing_extensions import Unpack

from shoal.api.result import Result, write_files
from shoal.api.source import Source, datasets_in, find_source, listed_algorithms, listed_names, make_folder
from shoal.api.train import given_options, model_fields
from shoal.errors import InputError, TableWarning
from shoal.files import dump_json, read_json, write_atomically
from shoal.options import (
    Algorithms,
    CompareOptions,
    DataOptions,
    Names,
    TrainingOptions,
    public,
    with_defaults,
)
from shoal.registry import spelled
from shoal.settings import Few, Positive, Range

if TYPE_CHECKING:
    import pandas

    from shoal.api.refit import Importance
    from shoal.experiments.compare import Layout
    from shoal.experiments.config import RunConfig
    from shoal.experiments.race import Race, Stage, Times
    from shoal.experiments.recommend import Recommendation
    from shoal.experiments.record import RunRecord
    from shoal.trained import Trained

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
        options: options that do not change results, such as ``device``.
        not_fitted: why no model was trained, if one was to be.
    """

    result: dict[str, Any]
    records: Sequence[RunRecord]
    folder: Path
    text: str
    options: Mapping[str, Any] = field(repr=False)
    not_fitted: str = ""

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
        failed = [f"{name}: {why}" for name, why in self.failed.items()]
        return [*failed, *([self.not_fitted] if self.not_fitted else [])]

    def refit(self, out: str | Path | None = None, *, row: str | None = None) -> Trained:
        """Train the recommended algorithm on all domains, with the hyperparameters that were selected. ::

            model = comparison.refit("model")
            model.predict(new_patients)

        The number of steps is selected on validation examples of all domains, and the model is then trained
        on these too. The probabilities of a classifier are calibrated on held-out domains: this trains one
        model per fold again (``calibrate=False`` in :func:`compare` avoids it).

        Args:
            out: new folder for the model, which :func:`shoal.load` and the commands take (default: it is only
                in ``folder``).
            row: another algorithm of the comparison (default: the recommended one).
        """
        from shoal.api.refit import refit

        model = refit(self, out, row)
        self.report(self.folder / "report.html")
        return model

    def importance(self, *, row: str | None = None) -> Importance:
        """Return which columns of a table matter to the recommended algorithm, and where they mislead.

        One model per fold is trained again, and scored on its held-out domains with each column shuffled. The
        result is in the report too.

        Args:
            row: another algorithm of the comparison (default: the recommended one).
        """
        from shoal.api.refit import importance

        found = importance(self, row)
        write_files(self.folder, {"importance.json": dump_json(found.to_dict())})
        self.report(self.folder / "report.html")
        return found

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
        """Write the results to a file that ends in .md, .csv (one line per case), .json or .html."""
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
        """Write an HTML report of this comparison to a file."""
        from shoal.api.report import report

        return report(self.folder, path).path


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
            domains) or a Hugging Face dataset; these are saved in ``out``.
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
        fit: new folder for a model: the recommended algorithm trained on all domains. In Python see also
            ``Comparison.refit``.
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
    with datasets_in(options.get("data_dir")), _messages(bool(full["progress"])) as show:
        of_data: Any = given_options(options, DataOptions)
        source = find_source(data, folder=out, home=HOME, **of_data)
        where = layout(source.dataset, source.options, listed_names(held_out), options.get("metric"))  # type: ignore[arg-type]
        base, note = _base(source, where, options)
        rows = _rows(asked, base, where, source.own)
        given = tuple(given_options(options, TrainingOptions))
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
        _make_folder(folder, source, about["title"], fit)
        found = _Job(source, race, times, folder, full, about, show).run(budget)
        return _fitted(found, fit, show)


def _base(source: Source, where: Layout, options: Mapping[str, Any]) -> tuple[RunConfig, str]:
    """The options that all runs share, and a message on the learning rate."""
    from shoal.experiments.compare import BASELINE, PATIENCE
    from shoal.experiments.config import RunConfig
    from shoal.experiments.search import with_rate

    given = given_options(options, TrainingOptions)
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

    Data in memory are saved in it.
    """
    if not named:
        return Path(source.given).parent
    identity = source.options.get("digest") or str(Path(source.given))
    own = f"-{hashlib.sha256(identity.encode()).hexdigest()[:8]}" * source.own
    return Path(HOME) / f"{Path(source.given).resolve().stem or 'data'}{own}"


def _make_folder(folder: Path, source: Source, title: str, fit: str | Path | None) -> None:
    """Make the folder, which must not contain another experiment; that of a model may be new or its own."""
    if fit is not None and Path(fit).exists() and not (Path(fit) / "inputs.json").exists():
        raise InputError(f"{str(fit)!r} exists; choose a new folder.", "fit")
    make_folder(folder, source.given, kind="comparison")
    if (path := folder / "comparison.json").exists():
        before = read_json(path)
        other = before.get("title") if isinstance(before, dict) else "another file"
        if other != title and not str(other).startswith("data-"):
            raise InputError(f"{str(folder)!r} has the comparison of {other!r}; choose another.", "out")


def _fitted(found: Comparison, folder: str | Path | None, show: Callable[..., None]) -> Comparison:
    """The comparison, after the recommended algorithm was trained on all domains, or with how to do that."""
    if folder is None:
        about, text = found.recommendation, found.text
        if about and about.row:
            text += f"\nTo train {about.row} on all domains: the same command with --fit FOLDER."
        return replace(found, text=text)
    show("training the recommended algorithm on all domains")
    try:
        model = found.refit(folder)
    except InputError as error:
        problem = f"Not fitted: {error}"
        return replace(found, text=f"{found.text}\n{problem}", not_fitted=problem)
    name = shlex.quote(str(folder))
    lines = [f"Trained on all domains: {folder}. To predict, score and export:"]
    lines += [f"  shoal {words}" for words in (f"predict {name} NEW", f"score {name} LABELLED")]
    text = "\n".join([found.text, *lines, f"  shoal export {name}"])
    if model.inputs.get("kind") == "table":
        text += f"\n\n{found.importance()}"
    return replace(found, text=text)


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

    def __post_init__(self) -> None:
        from shoal.experiments.store import Store

        self.store = Store(self.folder / "runs")

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
            began, of = time.monotonic(), f"of {len(stages)}"
            if minutes is not None and number and began - start > 60 * minutes:
                result["race"]["ended"] = "budget"
                self.show(f"the budget of {minutes:g} minutes is used up after stage {number} {of}")
                break
            configs = self.race.plan(stage)
            if new := bool(self.store.missing(configs)):
                self.show(f"stage {number + 1} {of}: {self._described(stage)}")
            try:
                progress = bool(self.options["progress"])
                failed.update(execute(configs, self.store, progress=progress, **how).failed)
            except Interrupted as stop:
                if not result:
                    raise
                result["race"]["ended"] = "interrupted"
                self._written(result)
                where = f"after stage {number} {of} are in {self.folder}"
                text = f"interrupted. The results {where}; the same command resumes."
                raise Interrupted(text, stop.signal) from stop
            result = self.race.close(stage, self.store.found, failed) | about
            self._tables(result)
            if new and number + 1 < len(stages):
                self._show_stage(number, result, time.monotonic() - began)
        return self._written(result)

    def _announce(self, minutes: float | None) -> None:
        """Say what will be run and how long it takes, and on which columns of a table."""
        from shoal.experiments.execute import count_jobs
        from shoal.experiments.progress import duration
        from shoal.report.tables import many

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
        from shoal.report.tables import many

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
        from shoal.api.report import report
        from shoal.report import compare as view
        from shoal.report import plots

        written = self._tables(result)
        try:
            written += [path.name for path in plots.save(view.figure(result), self.folder / "comparison")]
            written.append(report(self.folder).path.name)
        except InputError as error:
            self.show(str(error))
        text = f"{view.text(result)}\n\nSaved in {self.folder}: {', '.join(written)}."
        records = self.store.found(self.race.configs)
        return Comparison(result, records, self.folder, text, self.options)
