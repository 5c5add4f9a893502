"""``shoal.compare``: which algorithm works in a held-out domain."""

from __future__ import annotations

import contextlib
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from typing_extensions import Unpack

from shoal.api.result import Result
from shoal.api.source import Source, datasets_in, find_source, listed_names, make_folder
from shoal.api.train import OF_BASELINES, model_fields
from shoal.errors import InputError, TableWarning, check_names
from shoal.files import check_output, dump_json, read_json, write_atomically
from shoal.options import (
    CompareOptions,
    DataOptions,
    ModelOptions,
    Names,
    TrainingOptions,
    as_flags,
    declared,
    public,
    with_defaults,
)
from shoal.settings import Few, Positive, Range

if TYPE_CHECKING:
    import pandas

    from shoal.experiments.compare import Design, Layout
    from shoal.experiments.config import RunConfig
    from shoal.experiments.record import RunRecord
    from shoal.experiments.store import Store

HOME = "shoal-compare"


@dataclass(frozen=True)
class Comparison(Result):
    """The result of :func:`compare`; ``print`` shows it.

    ``recommendation["take"]`` is the recommended algorithm.

    Attributes:
        result: rows, trials and everything else as plain data.
        records: record of each run that did not fail.
        folder: folder of the runs and results.
        text: text that ``print`` shows.
    """

    result: dict[str, Any]
    records: Sequence[RunRecord]
    folder: Path
    text: str

    @property
    def recommendation(self) -> dict[str, Any] | None:
        """The recommendation, see :func:`shoal.experiments.compare.recommendation`."""
        return self.result.get("recommendation")

    @property
    def failed(self) -> dict[str, str]:
        """The errors of algorithms with failed runs; the same call repeats these runs."""
        return self.result.get("failed", {})

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        from shoal.report import compare as view

        return view.as_html(self.result)

    @property
    def problems(self) -> list[str]:
        return [f"{name}: {why}" for name, why in self.failed.items()]

    def to_dict(self) -> dict[str, Any]:
        """Return the results as plain data."""
        return self.result

    def to_frame(self) -> pandas.DataFrame:
        """Return a DataFrame with one row per algorithm, best first: mean and standard deviation, and each
        domain."""
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
                | {name: about["mean"] for name, about in row["domains"].items()}
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
        write_page(self.folder, Path(path), self.result["identities"])
        return Path(path)


@public("steps", "batch_size", "lr", "model", "metric", "device", "jobs")
def compare(
    data: Any,
    *,
    algorithms: Names | None = None,
    baselines: bool = True,
    held_out: Names | None = None,
    folds: Annotated[int, Range(2, 1000)] | None = None,
    seeds: Few = 3,
    search: Few = 3,
    budget: Positive | None = None,
    out: str | Path | None = None,
    **options: Unpack[CompareOptions],
) -> Comparison:
    """Compare algorithms on held-out domains and recommend one.

    Each domain is held out in turn; with more than ten domains, they are held out in ten groups. Every
    algorithm gets the same number of hyperparameter trials: its defaults, then random search. For each seed,
    the trial with the best validation score on the training domains is selected. On tabular data,
    gradient boosting and a linear model are included under the same protocol. The simplest
    algorithm within one standard error of the best is recommended. Finished runs are saved in ``out``; the
    same call runs only those that are missing.

    Args:
        data: name of a dataset (`shoal list datasets`), table (.csv, .tsv, .csv.gz, .parquet, .xlsx), or
            folder of images arranged as folder/domain/class. In Python also a DataFrame, arrays (X, y,
            domains) or a Hugging Face dataset; these are written to ``out`` once.
        algorithms: algorithms to compare, or all (default: all; for your own data a selection with controls,
            and for pretrained models recipes such as erm++); fish:regrouped is the control of Fish with
            random grouping.
        baselines: include baselines, such as the gradient boosting of LightGBM.
        held_out: domains to hold out (default: every domain that can be scored, or the dataset's test
            domain).
        folds: number of groups in which domains are held out (default: one domain at a time if there are at
            most 10, otherwise 10 groups).
        seeds: number of seeds.
        search: number of hyperparameter trials per algorithm and seed: the defaults, then random search.
        budget: time budget in minutes; to meet it, first the number of trials is reduced, then seeds, then
            folds.
        out: folder for runs and results (default: shoal-compare; for your own data, a folder in it).
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
    from shoal.experiments import baselines as plain
    from shoal.experiments import compare as protocol
    from shoal.experiments.config import RunConfig
    from shoal.experiments.search import is_pretrained, with_format, with_rate
    from shoal.experiments.store import Store
    from shoal.training.processes import together

    if together():
        raise InputError("compare starts its own processes; run it without torchrun.")
    if "settings" in options:
        raise InputError("belong to one algorithm, and compare searches them; use shoal.train.", "settings")
    full = with_defaults(options, CompareOptions)
    device, jobs, progress = full["device"], full["jobs"], bool(full["progress"])
    asked, everyone = _algorithms(algorithms)
    of_data: Any = {name: value for name, value in options.items() if name in declared(DataOptions)}
    with datasets_in(options.get("data_dir")), _shown(progress) as say:
        source = find_source(data, folder=out, home=HOME, **of_data)
        (dataset,) = _spelled([source.dataset], "datasets")
        metric: Any = options.get("metric")
        where = protocol.layout(dataset, source.options, listed_names(held_out), metric)
        groups = protocol.folds(where.held_out, folds)
        where = replace(where, domains=where.domains + 1 - max(map(protocol.size_of, groups)))
        per_step = options.get("domains_per_step")
        if per_step is not None and per_step > where.domains:
            raise InputError(
                f"{per_step} is more than the {where.domains} training domains.", "domains_per_step"
            )
        given: dict[str, Any] = {n: v for n, v in options.items() if n in declared(TrainingOptions)}
        steps = given.get("steps") or int(where.usual["steps"])
        usual = {"batch_size": where.usual["batch"], "eval_every": max(1, steps // 10)}
        base = RunConfig(
            dataset=dataset,
            algorithm=protocol.BASELINE,
            data_options=source.options,
            holdout=where.holdout,
            **{**usual, **given, **model_fields(options), "steps": steps},
        )
        base, rate_note = with_rate(with_format(base), base.lr, base.schedule)
        if not algorithms:
            rows = protocol.PRETRAINED if source.own and is_pretrained(base) else where.usual["algorithms"]
            asked, everyone = _algorithms(rows)
        unable = protocol.unable(asked, where)
        able = [name for name in asked if name not in unable]
        design = protocol.Design(base, able, where.held_out, seeds, search, folds, tuple(given))
        refused = protocol.refused(design.configs(), device)
        if refused and (not everyone or len(refused) == len(able)):
            raise next(iter(refused.values()))
        unable |= {name: str(why).rstrip(".") for name, why in refused.items()}
        if not (able := [name for name in able if name not in unable]):
            reasons = "; ".join(f"{name} {why}" for name, why in unable.items())
            raise InputError(f"there is nothing to compare: {reasons}.")
        surprises = protocol.try_each(replace(design, rows=able[:1], seeds=1, search=1).configs(), device)
        say(rate_note, *where.messages, *surprises)
        if where.flat and baselines:
            able = [*plain.names(where.classes), *able]
        elif where.labelled and baselines and source.own:
            able = [protocol.MAJORITY, *able]
        design = replace(design, rows=able)
        folder = Path(out) if out is not None else _folder(source, isinstance(data, (str, Path)))
        job = _Job(source, design, where, folder, Store(folder / "runs"), device, jobs, say)
        with job.disk():
            job.fit_budget(budget)
            how = {name: full[name] for name in ("workers", "compile", "deterministic")}
            return job.results(job.execute(progress, unable, how, full["engine"]), unable)


def _algorithms(asked: Names | None) -> tuple[list[str], bool]:
    """Names as the registry spells them, each once, and whether ``all`` was among them."""
    from shoal.algorithms import registry
    from shoal.data.sampler import Draw
    from shoal.experiments.compare import parted

    names = listed_names(asked)
    check_names("draw", [way for name in names if (way := parted(name)[1])], get_args(Draw))
    every = registry.names() if "all" in names else []
    named = _spelled([name for name in names if name != "all"], "algorithms")
    return list(dict.fromkeys([*every, *named])), bool(every)


def _spelled(names: Sequence[str], what: str) -> list[str]:
    from shoal.algorithms import registry
    from shoal.data import sets
    from shoal.training.recipes import find_recipe

    for name in names:
        own = name.partition(":")[0]
        if what != "algorithms" or find_recipe(own) is None:
            (registry if what == "algorithms" else sets.registry).module(own)
    return list(dict.fromkeys(name.lower().replace("_", "-") for name in names))


def _folder(source: Source, named: bool) -> Path:
    """Of a dataset the folder of all; a file or folder of the user's has its own in it."""
    if not named:
        return Path(source.given).parent
    return Path(HOME) / (Path(source.given).resolve().stem or "data") if source.own else Path(HOME)


@contextlib.contextmanager
def _shown(progress: bool) -> Iterator[Any]:
    """How to tell the user something. Where columns are shown as a report, they are not warned of too."""

    def say(*lines: str) -> None:
        for line in lines:
            if line and progress:
                print(f"{line[:1].upper()}{line[1:].rstrip('.')}.", file=sys.stderr, flush=True)

    with warnings.catch_warnings():
        if progress:
            warnings.simplefilter("ignore", TableWarning)
        yield say


@dataclass
class _Job:
    """A comparison that is planned, and where its runs and results go."""

    source: Source
    design: Design
    where: Layout
    folder: Path
    store: Store
    device: str | None
    jobs: int | None
    say: Any
    configs: list[RunConfig] = field(default_factory=list)
    seconds: float | None = None

    @contextlib.contextmanager
    def disk(self) -> Iterator[None]:
        """What cannot be written is one line, and says that nothing is lost."""
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            message = f"{str(self.folder)!r}: {error.strerror or error}."
            kept = "" if "are saved" in message else " Finished runs are saved; the same command resumes."
            raise InputError(message + kept) from error

    @property
    def parallel(self) -> int:
        from shoal.experiments.execute import PARALLEL, count_cores
        from shoal.training.processes import pick_device

        return self.jobs or (count_cores() if pick_device(self.device).type == "cpu" else PARALLEL)

    def measured(self) -> float:
        """About how many seconds a run takes: of finished ones, else by the first steps of one."""
        from shoal.experiments.compare import seconds_of

        if self.seconds is None:
            done = [r.seconds for r in self.store.found(self.configs)]
            self.seconds = sum(done) / len(done) if done else seconds_of(self.configs[-1], self.device)
        return self.seconds

    def fit_budget(self, minutes: float | None) -> None:
        """Makes the design smaller; what a run takes is kept, so that the same call plans the same runs."""
        self.configs = self.design.configs()
        if minutes is not None:
            path, full, identity = self.folder / "timing.json", self.design, self.design.base.identity
            known = read_json(path) if path.exists() else {}
            self.seconds = known.get(identity) if isinstance(known, dict) else None
            if self.seconds is None:
                make_folder(self.folder, self.source.given)
                write_atomically(path, dump_json({identity: self.measured()}))
            self.design = full.within(60 * minutes * self.parallel / max(self.measured(), 1e-9))
            self.configs = self.design.configs()
            if less := self.design.reductions(full):
                self.say(f"to meet the budget of {minutes:g} minutes: {less}")
        make_folder(self.folder, self.source.given)
        check_output(self.folder / f"{self.name}.csv", [self.source.given])

    @property
    def name(self) -> str:
        return f"compare-{self.design.base.dataset}"

    def counted(self, missing: int) -> str:
        """How many runs there are, of what, how many are not there yet, and how long these take."""
        from shoal.experiments.compare import many
        from shoal.experiments.display import duration

        design = self.design
        folds, domains = len(design.groups), len(design.held_out)
        time = f" Estimated time: {duration(missing * self.measured() / self.parallel)}." if missing else ""
        return (
            f"{many(len(self.configs), 'run')}: {many(len(design.rows), 'algorithm')}, "
            f"{many(domains, 'held-out domain')}{f' in {folds} folds' if folds < domains else ''}, "
            f"{many(design.seeds, 'seed')}, {many(design.search, 'hyperparameter trial')} each; "
            f"{missing:,} remaining.{time}"
        )

    def execute(
        self, progress: bool, unable: Mapping[str, str], how: Mapping[str, Any], engine: str
    ) -> dict[str, str]:
        """Does what is missing; returns the errors of runs that failed, by their identity."""
        from shoal.experiments.execute import execute

        missing = len(self.store.missing(self.configs))
        self.say(*(f"not compared: {name} ({why})" for name, why in unable.items()))
        if not missing:
            return {}
        if (report := self.source.columns()) is not None:
            write_atomically(self.folder / "columns.json", dump_json(report))
        if progress:
            print(*self.source.notes(), sep="\n", end="", file=sys.stderr, flush=True)
            self.say(self.counted(missing))
        where: dict[str, Any] = {"engine": engine, "device": self.device, "jobs": self.jobs}
        return execute(self.configs, self.store, **where, how=how, progress=progress).failed

    def results(self, failed: Mapping[str, str], unable: Mapping[str, str]) -> Comparison:
        """Writes the results down, with a page for data of the user's own."""
        from shoal.experiments.compare import results
        from shoal.report import compare as view
        from shoal.report import plots

        configs, records = self.configs, self.store.found(self.configs)
        result = results(configs, records, failed=failed)
        result |= {"unable": unable, "excluded": dict(self.where.excluded), "warned": dict(self.where.warned)}
        result["identities"] = sorted({c.identity for c in configs})
        if self.source.own:
            result["title"] = Path(self.source.given).name
        for ending, content in view.FILES.items():
            path = self.folder / f"{self.name}{ending}"
            write_atomically(path, content(result).encode(errors="backslashreplace"))
        written = ", ".join(f"{self.name}{ending}" for ending in view.FILES)
        text = f"{view.text(result)}\n\nSaved in {self.folder}: {written}."
        if self.source.own:
            text += f"\n{self.page(result['identities'])}{self.next(result)}"
        try:
            pictures = plots.save(view.figure(result), self.folder / self.name)
            text += f"\n\nFigures: {', '.join(map(str, pictures))}"
        except InputError as error:
            self.say(f"no figure: {error}")
        return Comparison(result, records, self.folder, text)

    def page(self, runs: Sequence[str]) -> str:
        """What is said of the report of these runs, which is made if it can be.

        Others may lie in the folder, such as those of the file before it was changed.
        """
        try:
            return f"Report: {write_page(self.folder, self.folder / 'report.html', runs)}."
        except InputError as error:
            return f"No report was written: {error}"

    def next(self, result: Mapping[str, Any]) -> str:
        """Commands that train the recommended row on every domain, then predict, score and export."""
        from shoal.experiments.baselines import is_one
        from shoal.experiments.compare import many, usual_settings
        from shoal.training.recipes import find_recipe

        about = result["recommendation"] or {}
        if not about.get("majority", {"better": True})["better"]:  # then nothing is recommended
            return ""
        take = about.get("take") or about.get("begin")
        if (chosen := usual_settings(self.configs, result["trials"], take)) is None:
            return ""
        config, times, trials = chosen
        data = {k: v for k, v in config.data_options.items() if k not in ("held_out", "seed")}
        whole = replace(config, data_options=data, seed=0, holdout=None, label="")
        name = str(take if find_recipe(take) else config.algorithm)  # a recipe sets options that have no flag
        folder = f"runs/{name}-{whole.identity[:8]}"  # another file has another
        options = {**declared(ModelOptions), **declared(TrainingOptions)}
        known = [name for name, each in options.items() if "train" in each.option.commands.split()]
        known = [name for name in known if name in OF_BASELINES] if is_one(config) else known
        flags = {name: value for name, value in whole.given().items() if name in known}
        words = ["shoal", "train", name, *self.source.words]
        words += as_flags({"held_out": "none", **flags, "out": folder})
        kind = Path(self.source.given).suffix if Path(self.source.given).is_file() else ""
        commands: list[list[str]] = [words, ["shoal", "predict", folder, f"NEW{kind}"]]
        commands += [["shoal", "score", folder, f"LABELLED{kind}"], ["shoal", "export", folder]]
        how = f"with the hyperparameters selected in {times} of {many(trials, 'split')}"
        first = f"To train {take} on all domains, {how}, and then predict, score and export:"
        return "\n" + "\n  ".join([first, *map(shlex.join, commands)])


def write_page(folder: Path, path: Path, runs: Sequence[str]) -> str:
    """The page of these runs of a folder; returns where it is."""
    from shoal.api.report import write_report

    return str(write_report(folder, path, only=runs).path)
