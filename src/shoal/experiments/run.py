"""RunConfig → RunRecord."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal import datasets as sets
from shoal import models
from shoal.algorithms import REFERENCE, algorithm_class, check_settings, registry
from shoal.data.batch import DomainData, TensorData
from shoal.data.download import VARIABLE
from shoal.data.splits import hold_out_examples
from shoal.errors import InputError, check_names, unknown_name
from shoal.experiments.config import RunConfig, check_same_run
from shoal.experiments.frozen import features_of
from shoal.experiments.protocol import resplit
from shoal.experiments.record import RunRecord, read_record
from shoal.models import build
from shoal.models.backbones import Backbone, fitting
from shoal.options import FitOptions, TrainingOptions, declared
from shoal.training.calibration import calibrated
from shoal.training.card import model_files
from shoal.training.checkpoint import load_weights
from shoal.training.folder import RunFolder, check_files
from shoal.training.options import complete
from shoal.training.processes import Processes
from shoal.training.progress import Progress
from shoal.training.recipes import Job, recipes
from shoal.training.setup import Setup
from shoal.training.stopping import Diverged, Signals
from shoal.training.summary import summary, surroundings

Report = Callable[[int, str], None]
"""Called with the step and a note on progress."""
EXECUTION = {*declared(FitOptions)} - {*declared(TrainingOptions), "device", "progress"}
"""Options that do not change results, such as ``workers`` or ``checkpoint_every``."""


@lru_cache(maxsize=1)
def _loaded(dataset: str, options: str, holdout: float | None, device: torch.device, root: Any) -> DomainData:
    """The last dataset is kept, where it is used: neighbouring runs of a comparison mostly share it.

    ``root`` is where files were looked for.
    """
    data = sets.load(dataset, **json.loads(options))
    if holdout is not None:
        data = validated(data, holdout)
    examples = data.examples
    return replace(data, examples=examples.to(device)) if isinstance(examples, TensorData) else data


def validated(data: DomainData, share: float) -> DomainData:
    """``data`` with a share of every training domain for validation, in place of the split it came with."""
    train, validation = hold_out_examples(data.splits["train"], share, seed=0)
    notes = {split: note for split, note in data.notes.items() if split != "validation"}
    return data.split_as({**data.splits, "train": train, "validation": validation}, notes)


def data_of(config: RunConfig, device: torch.device) -> DomainData:
    """The data of a run, in its splits."""
    options = json.dumps(dict(config.data_options), sort_keys=True)
    data = _loaded(config.dataset, options, config.holdout, device, os.environ.get(VARIABLE))
    if config.protocol:  # not kept: all held-out domains and seeds share the examples
        data = resplit(data, config.protocol["held_out"], config.protocol["seed"])
    return data


def prepare(
    config: RunConfig,
    device: str | None = None,
    progress: Report | bool = False,
    options: Mapping[str, Any] | None = None,
    resumed: bool = False,
) -> Job:
    """The training that a configuration describes, checked and ready.

    ``options`` are those of :data:`EXECUTION`. A run that is ``resumed`` will get its weights from a
    checkpoint.
    """
    check_names("option that does not change results:", options or {}, EXECUTION)
    processes = Processes(device)
    where = processes.device
    with Progress(config.name, config.steps, progress is True and processes.main).phase("reading data"):
        data = data_of(config, where)
    name, options_of_model = config.model or data.model, dict(config.model_options)
    if config.weights and models.names_weights(name):
        options_of_model.setdefault("pretrained", False)  # a file's, in place of those that the name says
    if "class_names" in models.options_of(name):  # for the prompts of a zero-shot head
        options_of_model.setdefault("class_names", list(data.class_names))
    shape, classes = data.input_shape, data.classes
    model = build(name, input_shape=shape, classes=classes, seed=config.seed, **options_of_model)
    frozen = bool(config.model_options.get("frozen"))
    if config.weights and (frozen or not resumed):
        start_from(model, config.weights)
    if frozen:
        if not isinstance(model.features, Backbone):
            raise InputError("requires a timm model.", "freeze_backbone")
        data = replace(data, examples=features_of(data, model, where, bool(progress)))
    chosen = {name: getattr(config, name) for name in declared(TrainingOptions)}
    whole = complete(**{**chosen, "device": device, "progress": progress, **(options or {})})
    return Job(config.algorithm, model, data, whole, label=config.name)


def start_from(model: nn.Module, path: str) -> None:
    """Puts the weights in a file into ``model``; those of a bare backbone leave its head as it is."""
    try:
        model.load_state_dict(fitting(load_weights(path), model))
    except RuntimeError as error:  # names or shapes
        first = "; ".join(line.strip()[:200] for line in str(error).splitlines()[1:3])
        raise InputError(f"the weights in {path!r} do not fit the model: {first}") from error
    if isinstance(features := getattr(model, "features", None), Backbone):
        features.has_weights()
        model.weights = Path(path).name  # type: ignore[assignment]


def run(
    config: RunConfig,
    device: str | None = None,
    folder: Path | None = None,
    *,
    progress: Report | bool = False,
    options: Mapping[str, Any] | None = None,
    weights: bool = True,
    wandb: str | None = None,
) -> RunRecord:
    """Train and record one run, or return the record of a run that has ended.

    Args:
        config: configuration of the run.
        device: device, such as ``cpu`` or ``cuda`` (default: CUDA if available).
        folder: folder of the log and checkpoints; a run that was interrupted there is resumed.
        progress: show progress on stderr, or a function that is called with the step and a note.
        options: options that do not change results, see :data:`EXECUTION`.
        weights: keep the selected weights and the record in the folder.
        wandb: project of Weights & Biases.

    Returns:
        The record of the run.
    """
    from shoal.experiments import baselines  # which imports this module

    options = dict(options or {})
    if baselines.is_one(config):
        return baselines.train(config, folder) if folder is not None and weights else baselines.run(config)
    if folder is None:
        return _train(config, prepare(config, device, progress, options), None)
    if (ended := of_same_run(folder, config)) is not None:
        if options.get("predictions") and not (folder / "predictions").is_dir() and ended.files:
            setup = prepare(config, device, options=options, resumed=True).setup
            check_files(folder, ended.files)
            setup.model.load_state_dict(load_weights(RunFolder(folder).model))
            _predict(setup, config, folder)
        return ended
    resumed = RunFolder(folder).resumable
    try:
        job = prepare(config, device, progress, options, resumed)
    except InputError:
        with suppress(OSError):
            folder.rmdir()  # it was made for this run and nothing is in it
        raise
    return _run_in_folder(config, job, folder, options, weights, wandb)


def _run_in_folder(
    config: RunConfig,
    job: Job,
    folder: Path,
    options: Mapping[str, Any],
    weights: bool,
    wandb: str | None,
) -> RunRecord:
    """Train with a log and checkpoints; with ``weights`` the folder keeps the weights and the record too."""
    setup = job.setup
    metadata = surroundings(setup.device, setup.processes.count)
    metadata["environment"] |= _origins(config, setup.model)
    metadata |= {"run": config.to_dict(), "options": dict(options)}
    with Signals(), RunFolder(folder, setup.processes, wandb=wandb) as run_folder:
        run_folder.write_config(metadata)
        record = _train(config, job, run_folder)
        finished, content = record.status == "finished", record.to_dict()
        if finished and setup.options["predictions"]:
            _predict(setup, config, folder)
        if finished and weights:
            model = {"name": config.model or setup.data.model, "options": config.model_options}
            files = partial(model_files, setup, model, content, metadata, calibrated(setup))
            record = replace(record, files=run_folder.finish(setup.model.state_dict(), content, files))
        elif weights:
            run_folder.write_record(content)
    return record


def _train(config: RunConfig, job: Job, folder: RunFolder | None) -> RunRecord:
    """A loss that is no longer finite is a result too, not an error."""
    status, error = "finished", ""
    try:
        job.run(folder)
    except Diverged as stop:
        status, error = "diverged", str(stop)
    measured = summary(job, status, error)
    measured["environment"] |= _origins(config, job.setup.model)
    return RunRecord(config=config, **measured)


def _origins(config: RunConfig, model: nn.Module) -> dict[str, str]:
    """The versions of installed packages that add the run's algorithm, dataset or model, and which weights
    the training began with: timm's by their full name, or a file and its SHA-256."""
    named = ((registry, config.algorithm), (sets.registry, config.dataset), (models.registry, config.model))
    packages = [which.package_of(name) for which, name in named if name]
    found = dict(package.rpartition(" ")[::2] for package in packages if package)
    if weights := getattr(model, "weights", ""):
        found["weights"] = weights
    if config.weights:
        with suppress(OSError), open(config.weights, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            found["weights"] = f"{Path(config.weights).name}, sha256 {digest}"
    return found


def _predict(setup: Setup, config: RunConfig, folder: Path) -> None:
    """Write predictions as WILDS wants them; a dataset with an option ``fold`` is named by that and not by
    seeds."""
    from shoal.training import predictions

    dataset = str(config.dataset).lower().replace("_", "-")
    options = inspect.signature(sets.registry.module(dataset).load).parameters
    replicate = ("seed", str(config.seed))
    if "fold" in options:
        replicate = ("fold", str(config.data_options.get("fold", options["fold"].default)))
    predictions.write(setup, folder / "predictions", dataset, replicate)


def of_same_run(folder: Path, config: RunConfig) -> RunRecord | None:
    """The record in ``folder`` if its run has ended; an error if it holds another run than ``config``."""
    kept = RunFolder(folder)
    check_same_run(folder, config)
    record = read_record(kept.record, config) if kept.finished else None
    return None if record is None or record.status == "failed" else record


def check(config: RunConfig) -> None:
    """Raises InputError for a configuration with a name that is not known, before others are started."""
    from shoal.experiments import baselines  # which imports this module

    sets.registry.module(config.dataset)
    if baselines.is_one(config):
        baselines.check_baseline(config)
        return
    named = not REFERENCE.fullmatch(str(config.algorithm))
    if named and str(config.algorithm).lower().replace("_", "-") not in (known := registry.names()):
        raise unknown_name(registry.kind, config.algorithm, [*known, *baselines.SPACES, *recipes()])
    check_settings(algorithm_class(config.algorithm), config.settings)
    sets.check_options(config.dataset, config.data_options)
    if config.model is not None:
        models.check_options(config.model, config.model_options)
