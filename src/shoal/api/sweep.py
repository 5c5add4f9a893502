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
    """The result of :func:`sweep`: scores of every algorithm on every held-out domain, by selection rule.

    Attributes:
        rules: model selection rules.
        found: planned runs, and the scores of finished ones.
        missing: number of runs that were missing before this call.
        seconds: estimated duration of the missing runs, one after another; ``None`` if unknown.
        failed: identities of failed runs, with their errors; the same call repeats them.
        problems: records that could not be read.
        saved: folders that :meth:`save` has written to.
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
        """The results of each rule, one per dataset, as plain data
        (:func:`shoal.experiments.selection.results`)."""
        from shoal.experiments import selection

        names = self.found.datasets
        return {rule: [selection.results(self.found, n, rule) for n in names] for rule in self.rules}

    @property
    def plan(self) -> str:
        """The numbers of runs and of remaining runs, and their estimated duration."""
        from shoal.report.compare import _hours

        about = f" (about {_hours(self.seconds)} of training)" if self.seconds and self.missing else ""
        return f"{len(self.found.planned):,} runs, {self.missing:,} remaining{about}."

    def _shown(self, rule: str, form: str = "text") -> tuple[list[str], list[str]]:
        """Tables, one per dataset and one over several, and how their numbers came about."""
        from shoal.report import domainbed as view

        results = self.results[rule]
        tables = [view.dataset_table(result) for result in results]
        tables += [view.overall_table(results)] if len(results) > 1 else []
        return [getattr(table, form)() for table in tables], view.words(results)

    @property
    def troubles(self) -> list[str]:
        """What failed or could not be read, one line each."""
        failed = [f"failed: {error}" for error in self.failed.values()]
        if failed:
            failed.insert(SHOWN - 1, "The same call repeats these runs from their last checkpoints.")
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
        """Return plain data, as ``--json`` prints it."""
        return {"rules": self.results, "failed": dict(self.failed), "troubles": self.troubles}

    def to_frame(self) -> pandas.DataFrame:
        """Return a DataFrame with one row per rule, dataset, algorithm, held-out domain and seed."""
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
        """Write the tables as Markdown, LaTeX, CSV and HTML, and ``sweep.json``.

        Args:
            path: folder to write to.
        """
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
    """Compare algorithms on datasets with the protocol of DomainBed.

    Each domain is held out in turn. Each seed has its own split of the data and its own random search, which
    starts with the default hyperparameters. The same call runs what is missing, including failed runs.

    Args:
        datasets: names of datasets (`shoal list datasets`).
        algorithms: names of algorithms (`shoal list algorithms`); fish:regrouped is the control of Fish with
            random grouping.
        seeds: number of seeds, each with its own split of the data.
        search: number of hyperparameter trials per seed: the defaults, then random search (default: 20).
        rules: model selection rules: training, leave-one-out (many more runs) or oracle (default: training
            oracle).
        steps: number of training steps per run.
        eval_every: number of steps between evaluations (default: 100; 300 for large images, 1,000 for
            DomainNet).
        model: name of a model of Shoal or timm, or name or folder of a text encoder (default: the dataset's
            model; for VLCS, PACS, Office-Home, TerraIncognita and DomainNet resnet50.tv_in1k with the weights
            of torchvision).
        model_options: options of the model.
        weights: file of initial weights: .safetensors, or a .pt file that contains only weights; for timm
            models, parameter names of timm or torchvision.
        precision: precision of the forward pass; auto: fp32 or bf16, whichever is faster on CUDA (default:
            fp32, as in DomainBed).
        memory_format: memory format of images and convolutions; auto: whichever is faster on CUDA (default:
            contiguous, as in DomainBed).
        data_options: options of the dataset.
        domainbed: folder of a sweep that was run with DomainBed: make the tables that DomainBed would make of
            it, without any runs.
        out: folder for runs and tables.
        device: device, such as cpu, cuda or cuda:1 (default: cuda if available).
        jobs: number of runs in parallel (default: one per core; on CUDA 10, or one per GPU if there are
            several).
        engine: run on this machine or on a Ray cluster.
        address: address of the Ray cluster: auto, HOST:PORT or ray://HOST:PORT (default: start Ray on this
            machine).
        gpus_per_run: GPUs per run on Ray, such as 0.25 (default: 1, or 0 without GPUs).
        cpus_per_run: CPUs per run on Ray (default: 1).
        budget: time in minutes after which no further runs are started.
        run: if ``False``, start no runs and write nothing.
        progress: show progress on stderr.

    Returns:
        Sweep: tables of the runs that did not fail.

    Examples:
        >>> import shoal
        >>> result = shoal.sweep("linear", ["erm", "fish"], out="new", run=False)
        >>> print(result.plan)
        360 runs, 360 remaining.
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
    if own := [name for name in datasets if Path(name).suffix and Path(name).is_file()]:
        raise InputError(f"a sweep takes built-in datasets, and {own[0]!r} is a file; use `shoal compare`.")
    if not datasets or not algorithms:
        raise InputError("datasets= and algorithms= are required, such as rotated-mnist with erm and fish.")
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
        print(f"The time budget is used up; {left:,} runs remain. The same call continues.", file=sys.stderr)
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
