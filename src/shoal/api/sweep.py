"""``shoal.sweep``: algorithms on datasets by DomainBed's protocol."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from shoal.api.source import make_folder
from shoal.errors import InputError, check_names
from shoal.settings import Count, Few, Range, checked

if TYPE_CHECKING:
    import pandas

    from shoal.experiments import selection
    from shoal.experiments.config import RunConfig

FORMATS = {"md": "markdown", "tex": "latex", "csv": "csv", "html": "html"}
SHOWN = 10
"""Failed or unreadable runs that a text names."""


@dataclass(frozen=True)
class Sweep:
    """Scores of every algorithm in every held-out domain, by each rule of selection.

    It shows itself as tables in a notebook, and as text with ``print``.
    """

    rules: Sequence[str]
    found: selection.Sweep
    """Which runs there should be, and what those that are there measured."""
    missing: int = 0
    """Runs that were still to do before this call."""
    seconds: float | None = None
    """About how long those take one after another; ``None`` where nothing like them has been run."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Identities of the runs that failed, with the error; the same call runs them again."""
    problems: Sequence[str] = ()
    saved: list[Path] = field(default_factory=list)
    """The folders that :meth:`save` has written to."""

    @cached_property
    def results(self) -> dict[str, list[dict[str, Any]]]:
        """By rule, one result per dataset as plain data (:func:`shoal.experiments.selection.results`)."""
        from shoal.experiments import selection

        names = self.found.datasets
        return {rule: [selection.results(self.found, n, rule) for n in names] for rule in self.rules}

    @property
    def plan(self) -> str:
        """How many runs there are, how many are to do, and about how long these take."""
        from shoal.report.compare import _hours

        about = f" (about {_hours(self.seconds)} of training)" if self.seconds and self.missing else ""
        return f"{len(self.found.planned):,} runs, of which {self.missing:,} are still to do{about}."

    def _shown(self, rule: str, form: str = "text") -> tuple[list[str], list[str]]:
        """Tables, one per dataset and one over several, and how their numbers came about."""
        from shoal.report import domainbed as view

        results = self.results[rule]
        tables = [view.dataset_table(result) for result in results]
        tables += [view.overall_table(results)] if len(results) > 1 else []
        return [getattr(table, form)() for table in tables], view.words(results)

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
            tables, notes = self._shown(rule)
            parts += [f"{rule}:", *tables, "\n".join(notes)]
        names = ", ".join(f"sweep-{rule}.{{{','.join(FORMATS)}}}" for rule in self.rules)
        saved = [f"Saved in {folder}: {names}, sweep.json." for folder in self.saved[-1:]]
        return "\n\n".join([*parts, *self.troubles[:SHOWN], *saved])

    def _repr_html_(self) -> str:
        parts = []
        for rule in self.rules:
            tables, notes = self._shown(rule, "html")
            parts += [f"<h4>{escape(rule)}</h4>", *tables, *(f"<p>{escape(note)}</p>" for note in notes)]
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

        folder = Path(path)
        make_folder(folder)
        for rule in self.rules:
            for ending, form in FORMATS.items():
                tables, notes = self._shown(rule, form)
                text = "\n\n".join([*tables, *(notes if ending == "md" else [])])
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
    precision: Literal["fp32", "bf16", "fp16", "auto"] | None = None,
    memory_format: Literal["contiguous", "channels-last", "auto"] | None = None,
    data_options: Mapping[str, Any] | None = None,
    domainbed: str | Path | None = None,
    out: str | Path = "shoal-sweep",
    device: str | None = None,
    jobs: Few | None = None,
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
    gpus_per_run: Annotated[float, Range(0)] | None = None,
    cpus_per_run: Annotated[float, Range(above=0)] | None = None,
    budget: Annotated[float, Range(above=0)] | None = None,
    run: bool = True,
    progress: bool = True,
) -> Sweep:
    """Compares algorithms on datasets by DomainBed's protocol.

    Every domain is held out in turn; each seed splits the data anew and tries the default hyperparameters and
    those of a random search. The same call again does what is missing, failed runs included.

    Args:
        datasets: names; see `shoal list datasets`.
        algorithms: names; see `shoal list algorithms`. fish:regrouped is Fish on random groups of examples.
        seeds: how many, each with a split of its own.
        search: hyperparameters that each seed tries, the defaults first.
        rules: how hyperparameters and step are chosen: training, leave-one-out (many more runs) or oracle
            (default: training oracle).
        steps: of every run.
        eval_every: steps between evaluations (default: 100, large images 300, DomainNet 1,000).
        model: one of Shoal's, of timm's, or a text encoder (default: each dataset's own; for VLCS, PACS,
            Office-Home, TerraIncognita and DomainNet resnet50.tv_in1k, with torchvision's weights).
        model_options: the model's options.
        weights: a file of weights to start from.
        precision: of the forward pass; auto takes fp32 or bf16, whichever is faster on CUDA (default: fp32,
            as in DomainBed).
        memory_format: of images and convolutions; auto takes what is faster on CUDA (default: contiguous, as
            in DomainBed).
        data_options: the datasets' options.
        domainbed: the folder of a sweep that DomainBed itself has run: the tables that its own program would
            make of it, and nothing is run.
        out: the folder for runs and tables.
        device: cpu, cuda, cuda:1 … (default: cuda where there is one).
        jobs: runs in parallel (default: one per core, or one per GPU).
        engine: processes on this machine, or a Ray cluster.
        address: Ray: 'auto', HOST:PORT or ray://HOST:PORT (default: one on this machine).
        gpus_per_run: Ray: such as 0.25 (default: 1, on the CPU 0).
        cpus_per_run: Ray: CPUs of a run (default: 1).
        budget: minutes after which no further run is started.
        run: whether to run what is missing; else nothing is run or written.
        progress: whether to show on stderr how the runs come along.

    Returns:
        A :class:`Sweep`; its tables are of the runs that did not fail.

    Examples:
        >>> import shoal
        >>> result = shoal.sweep("linear", ["erm", "fish"], out="new", run=False)
        >>> print(result.plan)
        360 runs, of which 360 are still to do.
    """
    from shoal.experiments import protocol, selection
    from shoal.experiments.display import Display
    from shoal.experiments.domainbed import read
    from shoal.experiments.execute import Store, make_executor

    datasets, algorithms, rules = (
        [names] if isinstance(names, str) else list(names) for names in (datasets, algorithms, rules)
    )
    check_names("rule", rules, selection.RULES)
    if domainbed is not None:
        found, problems = read(domainbed)
        result = Sweep(rules, found, problems=problems)
        result.save(out)
        return result
    if not datasets or not algorithms:
        raise InputError("say which: datasets= and algorithms=, such as rotated-mnist with erm and fish.")
    needs: Any = {"address": address, "gpus_per_run": gpus_per_run, "cpus_per_run": cpus_per_run}
    executor = make_executor(engine, device=device, jobs=jobs, **needs)
    options: dict[str, Any] = {"model": model, "model_options": dict(model_options or {})}
    options |= {"precision": precision, "memory_format": memory_format}
    options |= {"weights": None if weights is None else str(weights)}
    options |= {"trials": seeds, "draws": search, "steps": steps, "eval_every": eval_every}
    pairs = any(selection.RULES[rule].pairs for rule in rules)
    configs = protocol.plan(dict.fromkeys(datasets, data_options or {}), algorithms, pairs=pairs, **options)
    store = Store(Path(out) / "runs")
    missing = list({c.identity: c for c in store.missing(configs)}.values())
    records = store.found(configs)
    seconds = protocol.expected_seconds(missing, records)
    result = Sweep(rules, selection.sweep(configs, records), len(missing), seconds)
    if not run:
        return result
    make_folder(out)
    if progress and seconds:
        print(result.plan, file=sys.stderr, flush=True)
    display = Display(configs, len(missing)) if progress else None
    failed, left = _run(missing, store, executor, display, budget, jobs or os.cpu_count() or 1)
    if left and progress:
        print(f"The budget is spent; {left:,} runs are still to do, by the same call.", file=sys.stderr)
    result = replace(result, found=selection.sweep(configs, store.found(configs)), failed=failed)
    if failed and not result.found.runs:
        raise ChildProcessError(f"every run failed, such as: {next(iter(failed.values()))}")
    result.save(out)
    return result


def _run(
    missing: Sequence[RunConfig], store: Any, executor: Any, display: Any, budget: float | None, portion: int
) -> tuple[dict[str, str], int]:
    """What failed, and how many were not run: with a budget, each portion is as large as its time allows."""
    from shoal.experiments.execute import execute

    show = {"tell": display.tell, "done": display.done} if display else {}
    end = time.monotonic() + 60 * (budget or 0)
    portion = len(missing) if budget is None else portion
    failed: dict[str, str] = {}
    while missing and portion > 0:
        began = time.monotonic()
        failed |= execute(missing[:portion], store, executor, **show).failed
        each = (time.monotonic() - began) / len(missing[:portion])
        missing, portion = missing[portion:], int((end - time.monotonic()) / max(each, 1e-3))
    return failed, len(missing)
