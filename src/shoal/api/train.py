"""``shoal.train``: one algorithm on a dataset or a user's own data, in a folder that can be resumed."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

from shoal.api.result import Result, messages, score_frame
from shoal.api.source import Source, datasets_in, find_source, make_folder
from shoal.errors import InputError
from shoal.options import (
    DataOptions,
    ModelOptions,
    Names,
    TrainingOptions,
    TrainOptions,
    declared,
    public,
    with_defaults,
)
from shoal.settings import Few

if TYPE_CHECKING:
    import pandas

    from shoal.experiments.config import RunConfig
    from shoal.experiments.record import RunRecord
    from shoal.report.tables import Table
    from shoal.trained import Trained

OF_BASELINES = ("settings", "seed", "metric", "calibrate")
"""What a baseline takes; other options belong to the training of a network."""


@dataclass(frozen=True, repr=False)
class Run(Result):
    """The result of :func:`train`: one run, or several with different seeds.

    Attributes:
        records: record of each run.
        folder: folder of the run, or of the runs.
    """

    records: Sequence[RunRecord]
    folder: Path

    @property
    def record(self) -> RunRecord:
        """The record of the first run."""
        return self.records[0]

    @property
    def problems(self) -> list[str]:
        """The errors of runs that did not finish."""
        lost = [r for r in self.records if r.status != "finished"]
        return [f"seed {r.config.seed}: {r.error}" if len(self.records) > 1 else r.error for r in lost]

    @property
    def finished(self) -> list[RunRecord]:
        """The records of finished runs."""
        return [r for r in self.records if r.status == "finished"]

    def table(self) -> Table:
        """Return a table of each metric and domain; for several seeds, mean ± standard deviation and each
        seed."""
        from shoal.report.runs import run_table

        if not self.finished:
            raise InputError("no run finished. " + " ".join(self.problems[:2]))
        return run_table([record.to_dict() for record in self.finished])

    def load(self, device: str = "cpu") -> Trained:
        """Load the trained model of the first seed.

        Args:
            device: device of the model.
        """
        from shoal.experiments.store import Store
        from shoal.trained import load

        if len(self.records) == 1:
            return load(self.folder, device=device)
        return load(Store(self.folder, weights=True).workplace(self.finished[0].config), device=device)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as ``--json`` prints it."""
        records = [r.to_dict() for r in self.records]
        return records[0] if len(records) == 1 else {"records": records}

    def to_frame(self) -> pandas.DataFrame:
        """Return a DataFrame with one row per seed, split and domain."""
        return score_frame(({"seed": r.config.seed}, r.scores) for r in self.finished)

    def __str__(self) -> str:
        if not self.finished:
            return "\n".join(self.problems)
        first, lines = self.finished[0], self.problems
        how = f"{first.rule} (step {first.history[first.selected]['step']:,})"
        if len(self.records) > 1:
            how = f"{first.rule.split(',')[0]}; mean ± standard deviation over {len(self.finished)} seeds"
        if first.rule.startswith("best") and (note := first.notes.get("validation")):
            lines.append(f"Validation is {note}.")
        seconds = sum(r.seconds for r in self.records)
        done = f"{first.config.name} on {first.config.dataset}, {how}, {seconds:.1f} s of training."
        return "\n".join([self.table().text(), "", f"{done} Saved in {self.folder}.", *lines])

    def _repr_html_(self) -> str:
        return self.table().html()


@public("steps", "batch_size", "lr", "settings", "seed", "model", "metric", "device")
def train(
    algorithm: str | type,
    data: Any,
    *,
    held_out: Names | None = None,
    seeds: Few | None = None,
    out: str | Path | None = None,
    **options: Unpack[TrainOptions],
) -> Run:
    """Train one algorithm on a dataset or on your own data, and save the run in a folder. ::

        run = shoal.train("fish", "patients.csv", label="ill", domain="hospital", held_out="B", steps=500)
        print(run)
        model = run.load()

    The same call resumes an interrupted run. To train a model of your own in Python, see :func:`shoal.fit`.

    Args:
        algorithm: name of an algorithm, a baseline, or a recipe for pretrained models such as auto or erm++
            (`shoal list algorithms`), or my_algorithm.py, a file with an algorithm of your own. In Python
            also a class.
        data: name of a dataset (`shoal list datasets`), table (.csv, .tsv, .csv.gz, .parquet, .xlsx), or
            folder of images arranged as folder/domain/class. In Python also a DataFrame, arrays (X, y,
            domains), a mapping of columns, or a Hugging Face dataset.
        held_out: test domains, which are not trained on; none: train on all domains of your own data
            (default: the dataset's test domains).
        seeds: number of runs, with seeds SEED, SEED+1, …
        out: folder of the run (default: a folder in runs/ named after the run).
        **options: see :class:`~shoal.options.TrainOptions`.
    """
    from shoal.experiments.run import EXECUTION, run
    from shoal.training.processes import together

    full = with_defaults(options, TrainOptions)
    if seeds and together():
        raise InputError("trains several models in parallel; run it without torchrun.", "seeds")
    if seeds and full["wandb"]:
        raise InputError("logs a single run; use seed instead of seeds.", "wandb")
    with datasets_in(options.get("data_dir")), messages(bool(full["progress"])) as show:
        config, source, rate = _configuration(algorithm, data, held_out, options)
        method = config.name.lower() if "." in config.algorithm else config.algorithm
        name = f"{method}-{config.dataset}-{config.identity[:8]}" + "-seeds" * bool(seeds)
        folder = Path(out or Path("runs") / name)
        make_folder(folder, source.given, run=not seeds)
        show(*(source.notes() if full["progress"] else ()), rate)
        same = {name: value for name, value in full.items() if name in EXECUTION - {"wandb"}}
        try:
            if seeds:
                configs = [replace(config, seed=config.seed + n) for n in range(seeds)]
                return Run(_several(configs, folder, full, same), folder)
            log = {"progress": full["progress"], "wandb": full["wandb"]}
            return Run([run(config, full["device"], folder, options=same, **log)], folder)
        except InputError:
            for path in (folder, *([folder.parent] if out is None else [])):
                with contextlib.suppress(OSError):
                    path.rmdir()  # it was made for this run, if nothing is in it
            raise


def _configuration(
    algorithm: str | type, data: Any, held_out: Names | None, options: Mapping[str, Any]
) -> tuple[RunConfig, Source, str]:
    """The run that is asked for, its data, and what was chosen for the learning rate."""
    from shoal.algorithms import REFERENCE, display_name, reference
    from shoal.experiments import baselines
    from shoal.experiments.config import RunConfig
    from shoal.experiments.run import check
    from shoal.experiments.search import with_model_options, with_rate
    from shoal.registry import spelled
    from shoal.training.recipes import find_recipe

    rate, label, recipe = "", "", find_recipe(algorithm)
    if recipe is not None:
        algorithm, label = recipe.algorithm, recipe.name
        options = recipe.fill(options, data if isinstance(data, str) else "")
    algorithm = reference(algorithm)
    if REFERENCE.fullmatch(algorithm):
        label = display_name(algorithm)
    else:
        algorithm = spelled(algorithm)
    source = find_source(data, held_out=held_out, **given_options(options, DataOptions))
    fields: dict[str, Any] = {"data_options": source.options, "label": label}
    if algorithm in baselines.SPACES:
        for name, value in options.items():
            known = name in (*OF_BASELINES, *declared(DataOptions), "progress")
            if not known and (name, value) != ("device", "cpu"):
                its = ", ".join(baselines.SPACES[algorithm]) or "none"
                why = f"is an option of neural networks, and {algorithm} is not one"
                raise InputError(f"{why}; its settings are: {its}.", name)
        fields |= {name: options[name] for name in OF_BASELINES if name in options}
        steps = baselines.TREES if algorithm == baselines.BOOSTING else 1
        config = RunConfig(source.dataset, algorithm, steps, select="best", **fields)
    else:
        fields |= {"steps": 1000, **given_options(options, TrainingOptions), **model_fields(options)}
        config = RunConfig(source.dataset, algorithm, **fields)
        config, rate = with_rate(config if recipe is None else with_model_options(recipe, config))
    check(config)
    return config, source, rate


def given_options(options: Mapping[str, Any], of: type) -> dict[str, Any]:
    """The options of one kind that were given."""
    return {name: value for name, value in options.items() if name in declared(of)}


def model_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The model in a run configuration, where a frozen backbone is one of its options."""
    fields = given_options(options, ModelOptions)
    if fields.pop("freeze_backbone", False):
        own = fields.get("model_options", {})
        if not own.get("frozen", True):
            raise InputError("contradicts frozen=False in model_options.", "freeze_backbone")
        if fields.get("model") is None:
            raise InputError("requires a timm model, such as model='mobilenetv2_100'.", "freeze_backbone")
        fields["model_options"] = {**own, "frozen": True}
    return fields


def _several(
    configs: Sequence[RunConfig], folder: Path, full: Mapping[str, Any], same: Mapping[str, Any]
) -> list[RunRecord]:
    """Each seed in a folder of its own; the records include those of failed runs."""
    from shoal.experiments.execute import execute
    from shoal.experiments.store import Store

    store = Store(folder, weights=True)
    where = {name: full[name] for name in ("engine", "device", "jobs")}
    outcome = execute(configs, store, options=same, progress=bool(full["progress"]), **where)
    if outcome.failed and not outcome.records and not any(folder.glob("seed-*/config.yaml")):
        for config in configs:  # no run could start
            shutil.rmtree(store.workplace(config), ignore_errors=True)
        raise InputError(next(iter(outcome.failed.values())).removeprefix("InputError: "))
    return [record for config in configs if (record := store.read(config)) is not None]
