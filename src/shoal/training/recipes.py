"""Recipes: an algorithm with options of a training that belong together, and the stages they consist of.

The named ones are data, in recipes.yaml. A :class:`Job` trains one stage after the other: a warm start, the
training itself, and again both on all data.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.torch import save
from torch import Tensor, nn

from shoal.algorithms import Algorithm
from shoal.data.batch import DomainData
from shoal.data.domains import Domains
from shoal.errors import InputError
from shoal.files import read_yaml
from shoal.models.features import find_head
from shoal.options import FitOptions
from shoal.registry import spelled
from shoal.training.callbacks import Point
from shoal.training.checkpoint import load_weights
from shoal.training.evaluate import snapshot
from shoal.training.processes import Processes
from shoal.training.setup import Setup
from shoal.training.trainer import Trainer

if TYPE_CHECKING:
    from shoal.training.folder import RunFolder

INITIAL = "stages/initial.safetensors"
"""Where a run that is retrained keeps its initial weights."""
RELEASED_HEAD_STEPS = 500
"""For so many steps the released ERM++ trains the head alone."""


@dataclass(frozen=True)
class Recipe:
    """How to train a pretrained model. ``shoal.train``, ``shoal.fit`` and ``shoal.compare`` take its name.

    Attributes:
        options: fields of :class:`~shoal.options.TrainingOptions`; what the caller gives wins.
        pretrained: whether it makes sense for pretrained weights only.
        model: options of a backbone that is built by its name.
        freeze_batchnorm: whether :func:`shoal.fit` calls :func:`shoal.models.freeze_batchnorm` on a model of
            the caller's own; backbones built by their names have BatchNorm frozen by default.
        datasets: options that the authors use for single datasets, by their names.
    """

    name: str
    summary: str
    reference: str
    algorithm: str
    options: Mapping[str, Any]
    pretrained: bool = True
    model: Mapping[str, Any] = field(default_factory=dict)
    freeze_batchnorm: bool = False
    datasets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def fill(self, given: Mapping[str, Any], dataset: str = "") -> dict[str, Any]:
        """``given``, with the recipe's value for every option that was not given."""
        return {**self.options, **self.datasets.get(spelled(dataset), {}), **given}


@cache
def recipes() -> Mapping[str, Recipe]:
    """All of them, by name."""
    content = read_yaml(Path(__file__).with_name("recipes.yaml"))
    return {name: Recipe(name=name, **about) for name, about in content.items()}


def find_recipe(name: Any) -> Recipe | None:
    """The recipe of this name, in any spelling; ``None`` where there is none."""
    return recipes().get(spelled(name)) if isinstance(name, str) else None


class Job:
    """All stages of a training. Their options are checked when it is made, before any step."""

    def __init__(
        self,
        algorithm: str | type[Algorithm],
        model: nn.Module,
        data: DomainData,
        options: FitOptions,
        label: str | None = None,
        processes: Processes | None = None,
    ) -> None:
        if options["retrain"]:
            with_validation(data)
        self.setup = Setup(algorithm, model, data, options, label, processes=processes)
        self.trainer = Trainer(self.setup)
        self.warm = _warm_start(self.setup, "warm start")
        self.retraining: Trainer | None = None
        self.seconds = 0.0

    def run(self, folder: RunFolder | None = None) -> Point:
        """Trains, or resumes; the model then has the selected weights."""
        began, retrain = time.monotonic(), self.setup.options["retrain"]
        try:
            initial = _initial_weights(self.setup, folder) if retrain else {}
            _run(self.warm, folder)
            self.trainer.run(folder)
            if retrain:
                self.setup.model.load_state_dict(initial)
                again = self._retraining()
                _run(_warm_start(again, "retrain warm start"), folder)
                self.retraining = Trainer(again)
                _run(self.retraining, folder)
            return self.selected[0]
        finally:
            self.seconds = max(time.monotonic() - began, self.trainer.seconds)

    def _retraining(self) -> Setup:
        """On training and validation examples, for as many steps as the selected weights took.

        Weights are averaged over the same steps, and interpolated alike. This is the last part of ERM++
        (Teterwak et al., ERM++: An Improved Baseline for Domain Generalization, 2023).
        """
        setup, search = self.setup, self.trainer.selection
        steps, average, warm = search.selected[0].step, setup.options["average"], setup.options["warm_start"]
        if search.swad is not None:
            mean = search.swad.mean() or {"first": steps, "last": steps}
            steps, average = mean["last"], f"sma:{mean['first']}"
        elif search.average is not None and average is not None and average.startswith("sma"):
            first = search.average.start  # the selected weights may be from before it
            average = f"sma:{first}" if first <= steps else None
        if self.warm is not None:
            number, kind = self.warm.selected[0].step, str(warm).partition(":")[0]
            warm = f"{kind}:{number}" if kind.startswith("head") else number
        changes: Any = {"steps": steps, "average": average, "warm_start": warm, "eval_every": steps}
        changes |= {"wise_ft": search.interpolation.get("alpha"), "patience": None, "track_every": None}
        changes |= {"retrain": False, "select": "last"}
        return Setup(
            type(setup.algorithm),
            setup.model,
            with_validation(setup.data),
            {**setup.options, **changes},
            "retraining",
            "retrain",
            setup.processes,
            horizon=setup.task.steps,
        )

    @property
    def selected(self) -> tuple[Point, str]:
        """The point whose weights count, and the rule that chose it."""
        point, rule = self.trainer.selected
        if self.retraining is None or not self.retraining.history:
            return point, rule
        again, how = self.retraining.selected
        return again, f"retrained with the validation data, {how} (the search: {rule})"

    @property
    def points(self) -> list[Point]:
        """All that was measured: the history, and the final weights where they are not of a step in it."""
        found = list(self.trainer.history)
        final = (self.trainer.selected[0], self.selected[0]) if found else ()
        return list({id(point): point for point in (*found, *final)}.values())


def _run(trainer: Trainer | None, folder: RunFolder | None) -> None:
    """A stage, in a folder of its own; one that is over returns at once."""
    if trainer is not None:
        with nullcontext() if folder is None else folder.stage(trainer.setup.stage) as own:
            trainer.run(own)


def _warm_start(setup: Setup, stage: str) -> Trainer | None:
    """ERM before the training, of the whole model or of its head, where that is asked for.

    A head is trained on one pooled batch per step, with the rest in evaluation mode; with ``head-train``, as
    in the released ERM++, on the batches of the training, with the rest in training mode.
    """
    options, start = setup.options, setup.options["warm_start"]
    if start is None:
        return None
    kind, _, number = start.partition(":") if isinstance(start, str) else ("", "", "")
    one_pass = -(-len(setup.data.splits["train"].examples()) // options["batch_size"])
    off = ("warm_start", "schedule", "average", "wise_ft", "miro", "l2_sp", "track_every", "patience")
    changes: dict[str, Any] = dict.fromkeys(off) | {"retrain": False, "track_after": False, "settings": {}}
    if kind != "head-train":
        changes |= {"draw": None, "domains_per_step": 1}
    if kind == "plateau":
        changes |= {"steps": 100 * one_pass, "eval_every": max(1, one_pass // 10), "patience": 5}
        changes["select"] = "best"
    else:
        defaults = {"head": max(1, options["steps"] // 10), "head-train": RELEASED_HEAD_STEPS}
        steps = int(number or defaults[kind]) if isinstance(start, str) else int(start)
        if isinstance(start, float):  # a fraction of a pass
            steps = max(1, round(start * one_pass))
        changes |= {"steps": steps, "eval_every": steps, "select": "last"}
    head = None
    if kind.startswith("head"):
        try:
            head = find_head(setup.model, setup.example)
        except InputError as error:
            raise InputError(f"trains only the head: {error}", "warm_start") from error
    warm: Any = {**options, **changes}
    mode: Any = "train" if kind == "head-train" else "eval"
    return Trainer(
        Setup("erm", setup.model, setup.data, warm, stage, stage, setup.processes, only=head, frozen=mode)
    )


def with_validation(data: DomainData) -> DomainData:
    """``data`` with the validation examples of the training domains in ``train``, and no validation."""
    train, validation = data.splits["train"], data.splits.get("validation")
    if validation is None or not {*validation.names} & {*train.names}:
        raise InputError(
            "retrain=True needs validation examples of the training domains, under the same names."
        )
    parts = {name: [train.indices_of(number)] for number, name in enumerate(train.names)}
    for number, name in enumerate(validation.names):
        if name in parts:
            parts[name].append(validation.indices_of(number))
    every = Domains.from_indices({name: np.sort(np.concatenate(own)) for name, own in parts.items()})
    splits = {split: every if split == "train" else domains for split, domains in data.splits.items()}
    del splits["validation"]
    return data.split_as(splits, {k: v for k, v in data.notes.items() if k != "validation"})


def _initial_weights(setup: Setup, folder: RunFolder | None) -> dict[str, Tensor]:
    """The weights before any stage, which a run that is resumed has in its folder."""
    weights = {name: value.cpu() for name, value in snapshot(setup.model).items()}
    if folder is None:
        return weights
    path = folder.path / INITIAL
    if setup.processes.gather(path.exists())[0]:
        return load_weights(path)
    folder.write(INITIAL, save(weights))
    return weights
