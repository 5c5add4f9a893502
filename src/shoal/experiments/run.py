"""RunConfig → RunRecord."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal import models
from shoal.algorithms import algorithm_class, check_settings, registry
from shoal.data import sets
from shoal.data.batch import DomainData, InMemory
from shoal.data.folders import VARIABLE
from shoal.data.images import ImageFiles
from shoal.data.splits import hold_out_examples
from shoal.errors import InputError, check_names, unknown_name
from shoal.experiments.config import RunConfig, check_same_run
from shoal.experiments.frozen import features_of
from shoal.experiments.protocol import resplit
from shoal.experiments.record import RunRecord, read_record
from shoal.files import open_regular
from shoal.models import build, lora
from shoal.models.backbones import Backbone
from shoal.models.weights import fitting
from shoal.options import FitOptions, TrainingOptions, declared
from shoal.training import predictions
from shoal.training.card import beside
from shoal.training.checkpoint import Checkpoints, load_weights
from shoal.training.folder import RunFolder, check_files
from shoal.training.journal import Journal
from shoal.training.loop import Training
from shoal.training.options import complete
from shoal.training.processes import Processes
from shoal.training.progress import Progress
from shoal.training.recipes import recipes
from shoal.training.stopping import Diverged, Signals
from shoal.training.summary import summary, surroundings
from shoal.training.world import world

Tell = Callable[[int, str], None]


@lru_cache(maxsize=1)
def _loaded(
    dataset: str, options: str, holdout: float | None, device: torch.device, root: str | None
) -> DomainData:
    """The last dataset is kept, where it is used: neighbouring runs of a comparison mostly share it.

    ``root`` is where files were looked for.
    """
    data = sets.load(dataset, **json.loads(options))
    if holdout is not None:
        data = validated(data, holdout)
    examples: Any = data.examples
    return replace(data, examples=examples.to(device)) if isinstance(examples, InMemory) else data


def validated(data: DomainData, share: float) -> DomainData:
    """``data`` with a share of every training domain for validation, in place of the split it came with."""
    train, validation = hold_out_examples(data.splits["train"], share, seed=0)
    splits = {"train": train, "validation": validation}
    notes = {split: note for split, note in data.notes.items() if split != "validation"}
    return data.split_as(splits | {k: v for k, v in data.splits.items() if k not in splits}, notes)


def data_of(config: RunConfig, device: torch.device) -> DomainData:
    """The data of a run, in its splits."""
    options = json.dumps(dict(config.data_options), sort_keys=True)
    data = _loaded(config.dataset, options, config.holdout, device, os.environ.get(VARIABLE))
    if config.protocol:  # not kept: all held-out domains and trials share the examples
        data = resplit(data, config.protocol["held_out"], config.protocol["trial"])
    return data


def prepare(
    config: RunConfig,
    device: str | None = None,
    tell: Tell | bool = False,
    how: Mapping[str, Any] | None = None,
    begun: bool = False,
) -> Training:
    """The training that a configuration describes, checked and ready.

    ``how`` are options of the loop that change no result, such as ``workers`` or ``checkpoint_every``. A run
    that has ``begun`` will get its weights from a checkpoint.
    """
    check_names("option of how a run is done:", how or {}, HOW)
    processes = Processes(device)
    where = processes.device
    with Progress(config.name, config.steps, tell is True and processes.main).phase("reading data"):
        data = data_of(config, where)
    name, options_of_model = config.model or data.model, dict(config.model_options)
    if config.weights and models.names_weights(name):
        options_of_model.setdefault("pretrained", False)  # a file's, in place of those that the name says
    shape, classes = data.input_shape, data.classes
    model = build(name, input_shape=shape, classes=classes, seed=config.seed, **options_of_model)
    frozen = bool(config.model_options.get("frozen"))
    if config.weights and (frozen or not begun):
        start_from(model, config.weights)
    if frozen:
        data = replace(data, examples=features_of(data, model, where, bool(tell)))
    else:
        data = _finished_on_device(config, data, where)
    chosen = {name: getattr(config, name) for name in declared(TrainingOptions)}
    options = complete(**{**chosen, "device": device, "progress": tell, **(how or {})})
    return Training(config.algorithm, model, data, options, label=config.name)


def _finished_on_device(config: RunConfig, data: DomainData, device: torch.device) -> DomainData:
    """``data`` with images that are normalised and recoloured on the device, if they are to be."""
    if not isinstance(data.examples, ImageFiles):
        return data
    usual = "device" if device.type == "cuda" and config.memory_format == "auto" else "cpu"
    on_device = (data.examples.augment_on or usual) == "device"
    return replace(data, examples=data.examples.on_device()) if on_device else data


HOW = {*declared(FitOptions)} - {*declared(TrainingOptions), "device", "progress"}
"""Options that change no result."""


def start_from(model: nn.Module, path: str) -> None:
    """Puts the weights in a file into ``model``; those of a bare backbone leave its head as it is."""
    found = load_weights(path)
    whole = model.state_dict().keys() == found.keys()
    try:
        with nullcontext() if whole else lora.without_adapters(model):
            model.load_state_dict(fitting(found, model))
    except InputError as error:
        raise InputError(f"the weights in {path!r} do not fit: {error}") from error
    except RuntimeError as error:  # shapes
        first = "; ".join(line.strip() for line in str(error).splitlines()[1:3])
        raise InputError(f"the weights in {path!r} do not fit the model: {first}") from error
    if isinstance(features := getattr(model, "features", None), Backbone):
        features.has_weights()


def run(config: RunConfig, *args: Any, **more: Any) -> RunRecord:
    """Train and record one run.

    Args:
        config: configuration of the run.
        *args: as for :class:`Turns`: device, progress, folder, options that do not change results, and
            Weights & Biases project.
        **more: the same by name.

    Returns:
        The record of the run.
    """
    from shoal.experiments import baselines  # which imports this module

    options = inspect.signature(Turns).bind(config, *args, **more).arguments
    if not baselines.is_one(config):
        return Turns(config, *args, **more).to_the_end()
    if (folder := options.get("folder")) is None or not options.get("weights", True):
        return baselines.run(config)
    return baselines.train(config, folder)


SHORT = 10.0
"""Seconds of training that are not worth a checkpoint where the record alone is kept."""


class Working(Journal):
    """The journal of a run of which the record alone is kept."""

    def __init__(self, signals: Signals, always: bool, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.signals, self.always, self.last = signals, always, time.monotonic()

    def checkpoint(self, *args: Any) -> bool:
        if not (self.always or self.signals.asked or time.monotonic() - self.last > SHORT):
            return False
        self.last = time.monotonic()
        return super().checkpoint(*args)


class Turns:
    """A run that can take turns with others (see :meth:`Training.stages`).

    In a ``folder`` it has a log and checkpoints, and resumes what is there. With ``weights`` the folder keeps
    the selected weights and the record too; else it is only for the time of the run.
    """

    def __init__(
        self,
        config: RunConfig,
        device: str | None = None,
        tell: Tell | bool = False,
        folder: Path | None = None,
        how: Mapping[str, Any] | None = None,
        wandb: str | None = None,
        resume_hint: str | None = None,
        weights: bool = True,
    ) -> None:
        self.config, self.folder, self.how, self.wandb = config, folder, dict(how or {}), wandb
        self.resume_hint, self.weights = resume_hint, weights
        self.record = of_same_run(folder, config) if folder is not None else None
        self.training: Training | None = None
        if self.record is None:
            begun = folder is not None and Checkpoints(folder / "checkpoints").latest() is not None
            try:
                self.training = prepare(config, device, tell, how, begun)
            except InputError:
                if folder is not None:
                    with suppress(OSError):
                        folder.rmdir()  # it was made for this run and nothing is in it
                raise
        elif folder is not None and self.how.get("predictions"):
            self._predict(folder, device)

    def _predict(self, folder: Path, device: str | None) -> None:
        """For a finished run of which predictions were not asked for before."""
        if RunFolder(folder).model.exists() and not (folder / "predictions").is_dir():
            training = prepare(self.config, device, how=self.how, begun=True)
            check_files(folder, self.record.files if self.record else {})
            training.model.load_state_dict(load_weights(RunFolder(folder).model))
            write_predictions(training, self.config, folder)

    def to_the_end(self) -> RunRecord:
        if self.training is not None:
            where, deterministic = self.training.device, self.training.options["deterministic"]
            with Signals(self.folder is not None) as signals, world(where, deterministic):
                for _ in self.take(signals):
                    pass
        assert self.record is not None
        return self.record

    def take(self, signals: Signals) -> Iterator[None]:
        """Turns until ``record`` is there."""
        if self.training is None:
            return
        if self.folder is None:
            yield from self._train(self.training, None, signals)
            return
        training, processes = self.training, self.training.processes
        where = surroundings(training.device, processes.count)
        where["environment"] |= packages(self.config) | first_weights(self.config, training.model)
        written = {"run": self.config.to_dict(), "how": self.how, **where}
        make: Any = Journal
        if not self.weights:
            make = partial(Working, signals, bool(self.how.get("checkpoint_every")))
        more = {"wandb": self.wandb, "resume_hint": self.resume_hint}
        with make(self.folder, processes, config=written, **more) as journal:
            journal.begin(written)
            yield from self._train(training, journal, signals)
            assert self.record is not None
            finished = self.record.status == "finished"
            if finished:
                training.restore_selected()
                if training.options["predictions"]:
                    journal.hold()
                    write_predictions(training, self.config, self.folder)
            if finished and self.weights:
                record = self.record.to_dict()
                model = self.config.model or training.data.model
                recipe = {"name": model, "options": self.config.model_options}
                files = partial(beside, training, recipe, record, written)
                checksums = journal.finish(training.model.state_dict(), record, files)
                self.record = replace(self.record, files=checksums)
            elif self.weights:
                journal.record(self.record.to_dict())

    def _train(self, training: Training, journal: Journal | None, signals: Signals) -> Iterator[None]:
        """A loss that is no longer finite is a result too, not an error."""
        status, error = "finished", ""
        try:
            yield from training.stages(journal, signals)
        except Diverged as stop:
            status, error = "diverged", str(stop)
        measured = summary(training, status, error)
        measured["environment"] |= packages(self.config) | first_weights(self.config, training.model)
        self.record = RunRecord(config=self.config, **measured)


def packages(config: RunConfig) -> dict[str, str]:
    """The installed packages, with their versions, that add the run's algorithm, dataset or model."""
    named = ((registry, config.algorithm), (sets.registry, config.dataset), (models.registry, config.model))
    found = [which.package_of(name) for which, name in named if name]
    return {package.name: package.version for package in found if package}


def first_weights(config: RunConfig, model: nn.Module) -> dict[str, str]:
    """Which weights the training began with: timm's by their full name, or a file and its SHA-256."""
    found = getattr(model, "weights", "")
    if config.weights:
        with suppress(OSError), open_regular(config.weights) as file:
            found = f"{Path(config.weights).name}, sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}"
    return {"weights": found} if found else {}


def write_predictions(training: Training, config: RunConfig, folder: Path) -> None:
    """In WILDS' form; a dataset with an option ``fold`` is told apart by that and not by seeds."""
    dataset = str(config.dataset).lower().replace("_", "-")
    options = inspect.signature(sets.registry.module(dataset).load).parameters
    replicate = ("seed", str(config.seed))
    if "fold" in options:
        replicate = ("fold", str(config.data_options.get("fold", options["fold"].default)))
    predictions.write(training, folder / "predictions", dataset, replicate)


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
    if str(config.algorithm).lower().replace("_", "-") not in (known := registry.names()):
        raise unknown_name(registry.kind, config.algorithm, [*known, *baselines.SPACES, *recipes()])
    algorithm = algorithm_class(config.algorithm)
    check_settings(algorithm, config.settings)
    sets.check_options(config.dataset, config.data_options)
    if config.model is not None:
        models.check_options(config.model, config.model_options)
    else:
        lora.check(config.model_options)
