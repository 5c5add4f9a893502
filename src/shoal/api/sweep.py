"""``shoal.sweep``: algorithms on datasets by DomainBed's protocol."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from shoal.errors import InputError, check_names
from shoal.settings import Count, Range, checked

if TYPE_CHECKING:
    import pandas

    from shoal.experiments import selection
    from shoal.experiments.config import RunConfig
    from shoal.experiments.execute import Executor, Store
    from shoal.report.tables import Table

FORMATS = ("md", "tex", "csv", "html")
SHOWN = 10
"""Failed or unreadable runs that a text names."""
Few = Annotated[int, Range(1, 1000)]


@dataclass(frozen=True)
class Sweep:
    """Scores of every algorithm in every held-out domain, by each rule of selection.

    It shows itself as tables in a notebook, and as text with ``print``.
    """

    rules: Sequence[str]
    found: selection.Sweep
    """Which runs there should be, and what those that are there measured."""
    runs: int
    missing: int = 0
    """Runs that were still to do before this call."""
    seconds: float | None = None
    """About how long those take one after another; ``None`` where nothing like them has been run."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Identities of the runs that failed, with the error; the same call runs them again."""
    problems: Sequence[str] = ()
    published: Sequence[Mapping[str, Any]] = ()
    saved: list[Path] = field(default_factory=list)
    """The folders that :meth:`save` has written to."""

    @cached_property
    def results(self) -> dict[str, list[dict[str, Any]]]:
        """By rule, one result per dataset as plain data (:func:`shoal.experiments.selection.results`)."""
        from shoal.experiments import selection

        return {
            rule: [selection.results(self.found, dataset, rule) for dataset in self.found.datasets]
            for rule in self.rules
        }

    @property
    def plan(self) -> str:
        """How many runs there are, how many are to do, and about how long these take."""
        from shoal.report.compare import _hours

        about = f" (about {_hours(self.seconds)} of training)" if self.seconds and self.missing else ""
        return f"{self.runs:,} runs, of which {self.missing:,} are still to do{about}."

    def tables(self, rule: str) -> list[Table]:
        """One per dataset, and one over all where there are several."""
        from shoal.report import domainbed as view

        results = self.results[rule]
        tables = [view.dataset_table(result, self.published) for result in results]
        return tables + ([view.overall_table(results, self.published)] if len(results) > 1 else [])

    def notes(self, rule: str) -> list[str]:
        """How the numbers of a rule came about, and which are missing."""
        from shoal.report import domainbed as view

        return view.words(self.results[rule], self.published)

    @property
    def troubles(self) -> list[str]:
        """What failed or could not be read, a line each."""
        failed = [f"failed: {error}" for error in self.failed.values()]
        if failed:
            failed.insert(SHOWN - 1, "The same call runs these again, from their last checkpoints.")
        return [*self.problems, *failed]

    def __str__(self) -> str:
        parts = []
        for rule in self.rules:
            parts += [f"{rule}:", *(table.text() for table in self.tables(rule)), "\n".join(self.notes(rule))]
        names = ", ".join(f"sweep-{rule}.{{{','.join(FORMATS)}}}" for rule in self.rules)
        saved = [f"Saved in {folder}: {names}, sweep.json." for folder in self.saved[-1:]]
        return "\n\n".join([*parts, *self.troubles[:SHOWN], *saved])

    def _repr_html_(self) -> str:
        from html import escape

        parts = []
        for rule in self.rules:
            lines = "".join(f"<p>{escape(line)}</p>" for line in self.notes(rule))
            parts += [f"<h4>{escape(rule)}</h4>", *(table.html() for table in self.tables(rule)), lines]
        return "\n".join([*parts, *(f"<p>{escape(line)}</p>" for line in self.troubles[:SHOWN])])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as ``--json`` prints it."""
        return {"rules": self.results, "failed": dict(self.failed), "troubles": self.troubles}

    def to_frame(self) -> pandas.DataFrame:
        """What each seed chose and scored: a row per rule, dataset, algorithm, held-out domain and seed."""
        import pandas

        rows = [
            {"rule": rule, "dataset": result["dataset"], **choice, "missing": len(choice["missing"])}
            for rule, results in self.results.items()
            for result in results
            for choice in result["choices"]
        ]
        names = {"left_out": "held_out", "trial": "seed", "draw": "trial", "judged": "selected_by"}
        return pandas.DataFrame(rows).rename(columns=names)

    def save(self, path: str | Path) -> Path:
        """Writes the tables as Markdown, LaTeX, CSV and HTML, and ``sweep.json``, into a folder."""
        from shoal.files import dump_json, write_atomically

        folder = _folder(path)
        for rule in self.rules:
            tables = self.tables(rule)
            forms = ([t.markdown() for t in tables], [t.latex() for t in tables])
            forms += ([t.csv() for t in tables], [t.html() for t in tables])
            for ending, parts in zip(FORMATS, forms, strict=True):
                text = "\n\n".join([*parts, *(self.notes(rule) if ending == "md" else [])])
                write_atomically(folder / f"sweep-{rule}.{ending}", f"{text}\n".encode())
        write_atomically(folder / "sweep.json", dump_json(self.results))
        self.saved.append(folder)
        return folder


@checked
def sweep(
    datasets: str | Sequence[str] = (),
    algorithms: str | Sequence[str] = (),
    *,
    seeds: Few = 3,
    search: Few = 20,
    rules: str | Sequence[str] = ("training", "oracle"),
    steps: Count = 5001,
    eval_every: Count | None = None,
    model: str | None = None,
    model_options: Mapping[str, Any] | None = None,
    weights: str | Path | None = None,
    precision: str | None = None,
    data_options: Mapping[str, Any] | None = None,
    domainbed: str | Path | None = None,
    published: Sequence[Mapping[str, Any]] = (),
    out: str | Path = "shoal-sweep",
    device: str | None = None,
    jobs: Few | None = None,
    engine: str = "local",
    address: str | None = None,
    gpus_per_run: float | None = None,
    cpus_per_run: float | None = None,
    budget: Annotated[float, Range(above=0)] | None = None,
    run: bool = True,
    progress: bool = True,
) -> Sweep:
    """Compares algorithms on datasets by DomainBed's protocol.

    Every domain is held out in turn; each seed splits the data anew and tries the default hyperparameters and
    those of a random search. The same call again does what is missing, failed runs included.

    Args:
        datasets: Names of datasets.
        algorithms: Names of algorithms; ``fish:regrouped`` is Fish on random groups of examples.
        seeds: How many seeds, each with a split of its own.
        search: How many hyperparameters each seed tries, the defaults first.
        rules: How hyperparameters and step are chosen: ``training``, ``leave-one-out`` (many more runs) or
            ``oracle``; see :mod:`shoal.experiments.selection`.
        steps: Steps per run.
        eval_every: Steps between evaluations; by default as in DomainBed.
        model: The model of all runs; by default each dataset's own.
        model_options: The model's options.
        weights: A file of weights to start from.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        data_options: Options of the datasets.
        domainbed: The folder of a sweep that DomainBed itself has run: its tables, and nothing is run.
        published: A paper's numbers to show beside ours; see :mod:`shoal.report.domainbed`.
        out: Where runs and tables are kept.
        device: ``cpu``, ``cuda``, ``cuda:1`` …
        jobs: How many runs are done in parallel.
        engine: ``local``, processes on this machine; or ``ray``.
        address: Ray's address.
        gpus_per_run: GPUs that Ray gives a run.
        cpus_per_run: CPUs that Ray gives a run.
        budget: Minutes after which no further run is started.
        run: Whether to run what is missing; else nothing is run or written.
        progress: Whether to say on stderr how the runs come along.

    Returns:
        A :class:`Sweep`. Runs that failed are in ``failed``, and the tables are of the others.

    Example:
        >>> import shoal
        >>> found = shoal.sweep("linear", ["erm", "fish"], run=False)
        >>> print(found.plan)
        360 runs, of which 360 are still to do.
    """
    from shoal.experiments import protocol, selection

    rules = [rules] if isinstance(rules, str) else list(rules)
    check_names("rule", rules, selection.RULES)
    if domainbed is not None:
        from shoal.experiments.domainbed import read

        found, problems = read(domainbed)
        result = Sweep(rules, found, len(found.planned), problems=problems, published=published)
        result.save(out)
        return result
    from shoal.experiments.execute import Store, make_executor

    names = {"address": address, "gpus_per_run": gpus_per_run, "cpus_per_run": cpus_per_run}
    executor = make_executor(engine, device=device, jobs=jobs, **names)
    options = {"model": model, "model_options": dict(model_options or {}), "precision": precision}
    options["weights"] = None if weights is None else str(weights)
    pairs = any(selection.RULES[rule].pairs for rule in rules)
    configs = protocol.plan(
        *_named(datasets, algorithms, data_options or {}),
        trials=seeds, draws=search, pairs=pairs, steps=steps, eval_every=eval_every, **options,
    )  # fmt: skip
    store = Store(Path(out) / "runs")
    missing = list({c.identity: c for c in store.missing(configs)}.values())
    before = store.found(configs)
    seconds = protocol.expected_seconds(missing, before)
    failed: dict[str, str] = {}
    if run:
        _folder(out)
        if progress and seconds and missing:
            print(f"The runs to do take about {seconds / 60:.0f} min in all.", file=sys.stderr, flush=True)
        failed = _run(configs, missing, store, executor, budget, jobs, progress)
    done = selection.sweep(configs, store.found(configs) if run else before)
    if failed and not done.runs:
        raise ChildProcessError(f"every run failed, such as: {next(iter(failed.values()))}")
    result = Sweep(rules, done, len(configs), len(missing), seconds, failed, published=published)
    if run:
        result.save(out)
    return result


def _named(
    datasets: str | Sequence[str], algorithms: str | Sequence[str], options: Mapping[str, Any]
) -> tuple[dict[str, Mapping[str, Any]], list[str]]:
    from shoal.algorithms import registry as known_algorithms
    from shoal.data.sets import registry as known_datasets

    datasets, algorithms = (
        [names] if isinstance(names, str) else list(names) for names in (datasets, algorithms)
    )
    if not datasets or not algorithms:
        raise InputError("say which datasets and algorithms, such as rotated-mnist with erm and fish.")
    for name in algorithms:
        known_algorithms.module(name.partition(":")[0])
    for name in datasets:
        known_datasets.module(name)
    return dict.fromkeys(datasets, options), algorithms


def _run(
    configs: Sequence[RunConfig],
    missing: Sequence[RunConfig],
    store: Store,
    executor: Executor,
    budget: float | None,
    jobs: int | None,
    progress: bool,
) -> dict[str, str]:
    """Runs what is missing; with a budget in portions, the next as large as its time allows."""
    from shoal.experiments.display import Display
    from shoal.experiments.execute import execute

    display = Display(configs, len(missing)) if progress else None
    show = {"tell": display.tell, "done": display.done} if display else {}
    end = time.monotonic() + 60 * (budget or 0)
    portion = len(missing) if budget is None else jobs or os.cpu_count() or 1
    failed: dict[str, str] = {}
    while missing and portion > 0:
        began = time.monotonic()
        failed |= execute(missing[:portion], store, executor, **show).failed
        now = time.monotonic()
        each = (now - began) / min(portion, len(missing))
        missing = missing[portion:]
        portion = int((end - now) / max(each, 1e-3))
    if missing and progress:
        text = f"The budget is spent; {len(missing):,} runs are still to do, by the same call."
        print(text, file=sys.stderr, flush=True)
    return failed


def _folder(path: str | Path) -> Path:
    """The folder that results go to, made now rather than after the work."""
    path = Path(path).expanduser()
    if (path / "config.yaml").exists():
        raise InputError(f"out={str(path)!r} holds a single run; choose another folder.")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"out={str(path)!r} cannot be a folder: {error.strerror}.") from error
    if not os.access(path, os.W_OK):
        raise InputError(f"out={str(path)!r} cannot be written to.")
    return path
