"""``shoal.compare``: which algorithm works on a held-out domain."""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typing_extensions import Unpack

from shoal.api.result import Result, messages
from shoal.api.source import Source, datasets_in, find_source, listed_algorithms, listed_names, make_folder
from shoal.api.train import given_options, model_fields
from shoal.errors import InputError
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

    from shoal.experiments.compare import Layout, LeaveDomainsOut
    from shoal.experiments.race import Race, Times
    from shoal.experiments.recommend import Recommendation
    from shoal.experiments.record import RunRecord
    from shoal.trained import Trained

HOME, FILES = "shoal-compare", "comparison.json, comparison.md, comparison.csv, report.html"
Show = Callable[..., None]


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """The result of :func:`compare`; ``print`` shows it, and ``report.html`` in its folder.

    Attributes:
        result: rows, cases and everything else as plain data.
        records: record of each run that did not fail.
        folder: folder of the runs and results.
        options: options that do not change results, such as ``device``.
        fitted: folder of the model that was trained on all domains, if one was.
        not_fitted: why no model was trained, if one was to be.
    """

    result: dict[str, Any]
    records: Sequence[RunRecord]
    folder: Path
    options: Mapping[str, Any] = field(repr=False)
    fitted: Path | None = None
    not_fitted: str = ""

    @property
    def recommendation(self) -> Recommendation | None:
        """The recommendation, whose ``row`` is the algorithm to use; ``None`` while runs are missing."""
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
        on these too. A classifier is calibrated on held-out domains, for which one model per fold is trained
        again (``calibrate=False`` in :func:`compare` avoids it).

        Args:
            out: new folder for the model (default: it is only in ``folder``).
            row: another algorithm of the comparison (default: the recommended one).
        """
        from shoal.api.refit import refit

        return refit(self, out, row)

    def importance(self, *, row: str | None = None) -> pandas.DataFrame:
        """Return which columns of a table matter to the recommended algorithm, and where they mislead.

        The importance of a column in a domain is how much worse the model that was trained without this
        domain scores if the column is shuffled there; one model per fold is trained again. It is negative
        where the column misleads. Columns that carry the same information share it.

        Args:
            row: another algorithm of the comparison (default: the recommended one).

        Returns:
            pandas.DataFrame: for each column, the most important first, the ``mean`` over domains with the
            95 % interval ``low`` to ``high`` (NaN with fewer than three folds), the domains in which it
            significantly ``misleads``, and its importance ``in`` each domain.
        """
        from shoal.api.refit import importance

        return importance(self, row)

    def __str__(self) -> str:
        from shoal.report import compare, model

        lines = [compare.text(self.result), f"\nSaved in {self.folder}: {FILES}."]
        about, importance = self.recommendation, self.folder / "importance.json"
        if self.not_fitted:
            lines.append(self.not_fitted)
        elif self.fitted is not None:
            lines.append(f"Trained on all domains: {self.fitted}. To predict, score and export:")
            place = shlex.quote(str(self.fitted))
            lines += [f"  shoal predict {place} NEW", f"  shoal score {place} LABELLED"]
            lines += [f"  shoal export {place}"]
            if importance.exists():
                found = read_json(importance)
                lines.append(f"\n{model.table(found).text()}\n\n{model.IMPORTANCE.format(**found)}")
        elif about and about.row:
            lines.append(f"To train {about.row} on all domains: the same command with --fit FOLDER.")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from shoal.report import compare as view

        return view.as_html(self.result)

    def to_dict(self) -> dict[str, Any]:
        """Return the results as plain data."""
        return self.result

    def to_frame(self) -> pandas.DataFrame:
        """Return a DataFrame with one row per algorithm, best first: mean and standard deviation, the worst
        domain, the difference to the baseline with its interval, and the mean ``in`` each domain."""
        import pandas

        rows = []
        for row in self.result["rows"]:
            worst, over = row["worst"] or {}, row["over_domains"] or {}
            cells = {"algorithm": row["algorithm"], "rank": row["rank"]}
            cells |= {"mean": row["average"]["mean"], "sd": row["average"]["sd"]}
            cells |= {"worst": worst.get("mean"), "worst_domain": worst.get("domain")}
            cells |= {"difference": over.get("mean"), "low": over.get("low"), "high": over.get("high")}
            rows.append(cells | {f"in {name}": each["mean"] for name, each in row["domains"].items()})
        return pandas.DataFrame(rows).set_index("algorithm")


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
        algorithms: algorithms to compare, or all (default: a selection with controls; for pretrained models
            recipes such as erm++); fish:regrouped is Fish with random grouping, my_algorithm.py an algorithm
            of your own. In Python also classes.
        baselines: include baselines such as gradient boosting.
        held_out: domains to hold out (default: every domain that can be scored, or the test domain).
        folds: number of groups in which domains are held out (default: at most 10).
        seeds: number of seeds (default: up to 3, for about ten minutes on two cores).
        search: number of hyperparameter trials per algorithm and seed: the defaults, then random search
            (default: up to 3, for about ten minutes on two cores).
        budget: minutes, for which the race is planned and after which no stage is started.
        exhaustive: run all trials and seeds of every algorithm (default: 3 of each), as publications require.
        fit: new folder for a model: the recommended algorithm trained on all domains.
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
    from shoal.experiments.compare import layout
    from shoal.experiments.execute import count_jobs
    from shoal.experiments.race import Race, Times, sized
    from shoal.training.processes import together

    if together():
        raise InputError("compare starts its own processes; run it without torchrun.")
    if "settings" in options:
        raise InputError("belong to one algorithm, and compare searches them; use shoal.train.", "settings")
    full, asked = with_defaults(options, CompareOptions), listed_algorithms(algorithms)
    with datasets_in(options.get("data_dir")), messages(bool(full["progress"])) as show:
        of_data: Any = given_options(options, DataOptions)
        source = find_source(data, folder=out, home=HOME, **of_data)
        where = layout(source.dataset, source.options, listed_names(held_out), options.get("metric"))  # type: ignore[arg-type]
        protocol, note = _protocol(source, where, asked, folds, options)
        protocol, unable, notes = protocol.checked(full["device"], bool(asked) and "all" not in asked)
        show(note, *where.messages, *notes, *(f"not compared: {n} ({why})" for n, why in unable.items()))
        if baselines:
            protocol = replace(protocol, rows=[*where.baselines, *protocol.rows])
        table = where.size and not model_fields(options)
        times = Times.of_table(*where.size, protocol.base) if where.size and table else None
        race = sized(Race(protocol, exhaustive), times, seeds, search, budget)
        plan = _plan(race, times, count_jobs(full["device"], full["jobs"]), budget)
        folder = Path(out) if out is not None else _default_folder(source, isinstance(data, str | Path))
        if fit is not None and Path(fit).exists() and not (Path(fit) / "inputs.json").exists():
            raise InputError(f"{str(fit)!r} exists; choose a new folder.", "fit")
        make_folder(folder, source.given, kind="comparison")
        title = Path(source.given).name if source.own else protocol.base.dataset
        before = read_json(path) if (path := folder / "comparison.json").exists() else {}
        if isinstance(data, str | Path) and before.get("title", title) != title:
            other = before["title"]
            raise InputError(f"{str(folder)!r} has the comparison of {other!r}; choose another.", "out")
        if columns := source.columns():
            write_atomically(folder / "columns.json", dump_json(columns))
            every = [(each["column"], text) for each in columns["columns"] for text in each["warnings"]]
            notes += [f"column {n!r}, {text}" for n, text in every if text.startswith("possible leakage")]
        show(*(source.notes() if full["progress"] else ()), plan)
        about = {"title": title, "unable": unable, "excluded": where.excluded, "warned": where.warned}
        found = _run(race, folder, full, about | {"cautions": notes}, show, budget)
        if fit is None:
            return found
        show("training the recommended algorithm on all domains")
        try:
            if found.refit(fit).inputs.get("kind") == "table":
                found.importance()
        except InputError as error:
            return replace(found, not_fitted=f"Not fitted: {error}")
        return replace(found, fitted=Path(fit))


def _protocol(
    source: Source, where: Layout, asked: Sequence[str], folds: int | None, options: Mapping[str, Any]
) -> tuple[LeaveDomainsOut, str]:
    """The protocol, with one seed and one trial, and a message on the learning rate."""
    from shoal.algorithms import registry
    from shoal.experiments.compare import ALGORITHMS, BASELINE, PATIENCE, PRETRAINED, LeaveDomainsOut
    from shoal.experiments.config import RunConfig
    from shoal.experiments.search import weights_of, with_rate

    given = given_options(options, TrainingOptions)
    steps = given.get("steps") or int(where.defaults["steps"])
    fields = {"batch_size": where.defaults["batch"], "eval_every": max(1, steps // 10), "steps": steps}
    fields |= {"data_options": source.options, "holdout": where.holdout}
    if given.get("select") != "last" and given.get("average") is None:
        fields["patience"] = PATIENCE
    fields |= given | model_fields(options)
    base, note = with_rate(RunConfig(spelled(source.dataset), BASELINE, **fields))
    pretrained = source.own and weights_of(base) != "random"
    rows = list(asked or (PRETRAINED if pretrained else ALGORITHMS))
    if "all" in rows:
        rows = list(dict.fromkeys([*registry.names(), *(row for row in rows if row != "all")]))
    return LeaveDomainsOut(base, rows, where.held_out, 1, 1, folds, tuple(given)), note


def _default_folder(source: Source, named: bool) -> Path:
    """Named after the data, of a table by its content; data in memory were saved in it."""
    if not named:
        return Path(source.given).parent
    identity = source.options.get("digest") or str(Path(source.given))
    own = f"-{hashlib.sha256(identity.encode()).hexdigest()[:8]}" * source.own
    return Path(HOME) / f"{Path(source.given).resolve().stem or 'data'}{own}"


def _plan(race: Race, times: Times | None, jobs: int, minutes: float | None) -> str:
    """What will be run and how long it takes, as a sentence; an error if the budget is too small."""
    from shoal.experiments.progress import duration
    from shoal.report.tables import many

    plan, stages = race.protocol, race.stages
    folds, domains = len(plan.folds), len(plan.held_out)
    text = f"{many(domains, 'held-out domain')}{f' in {folds} groups' * (folds < domains)}; "
    text += f"{many(len(plan.rows), 'algorithm')} with up to {many(plan.search, 'trial')} and "
    text += f"{many(plan.seeds, 'seed')}; {many(len(stages), 'stage')}: {', '.join(s.name for s in stages)}"
    if times:
        seconds = [race.seconds(stage, times, jobs) for stage in stages]
        if minutes is not None and 60 * minutes < seconds[0]:
            first = f"the first stage ({stages[0].name}) takes {duration(seconds[0])}"
            raise InputError(f"of {minutes:g} minutes is too small: {first}.", "budget")
        text += f"; up to about {duration(sum(seconds))} with {many(jobs, 'run')} in parallel"
    return text if race.exhaustive else f"{text}. Algorithms that can no longer be recommended leave the race"


def _run(
    race: Race,
    folder: Path,
    options: Mapping[str, Any],
    about: Mapping[str, Any],
    show: Show,
    minutes: float | None,
) -> Comparison:
    """Run the stages, and write the table after each of them."""
    from shoal.experiments.execute import execute
    from shoal.experiments.progress import duration
    from shoal.experiments.store import Store
    from shoal.report import compare as view
    from shoal.training.stopping import Interrupted

    store, stages, start = Store(folder / "runs"), race.stages, time.monotonic()
    how = {name: options[name] for name in ("engine", "device", "jobs")}
    how["options"] = {name: options[name] for name in ("workers", "compile", "deterministic")}
    result, failed = dict[str, Any](), dict[str, str]()
    for number, stage in enumerate(stages, 1):
        began, done = time.monotonic(), f"after stage {number - 1} of {len(stages)}"
        if minutes is not None and number > 1 and began - start > 60 * minutes:
            result["race"]["ended"] = "budget"
            show(f"the budget of {minutes:g} minutes is used up {done}")
            _save(folder, result)
            break
        configs = race.plan(stage)
        if new := bool(store.missing(configs)):
            show(f"stage {number} of {len(stages)}: {stage.name}")
        try:
            failed.update(execute(configs, store, progress=bool(options["progress"]), **how).failed)
        except Interrupted as stop:
            if not result:
                raise
            result["race"]["ended"] = "interrupted"
            _save(folder, result)
            text = f"interrupted. The results {done} are in {folder}; the same command resumes."
            raise Interrupted(text, stop.signal) from stop
        result = race.close(stage, store.found, failed) | dict(about)
        _save(folder, result)
        if new and number < len(stages):
            took = f"after stage {number} of {len(stages)} ({duration(time.monotonic() - began)})"
            show(": ".join([took, *view.recommended(result)[:1]]), f"{view.table(result, most=0).text()}\n")
    return Comparison(result, store.found(race.configs), folder, options)


def _save(folder: Path, result: Mapping[str, Any]) -> None:
    """Write the result and its report."""
    from shoal.api.report import report
    from shoal.report import compare as view

    for name, content in view.files(result).items():
        write_atomically(folder / name, content)
    report(folder)
