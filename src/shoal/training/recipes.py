"""Recipes by name: an algorithm and the options of a training that belong to it, as data in recipes.yaml."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from shoal.algorithms import Algorithm
from shoal.data.batch import DomainData
from shoal.errors import InputError
from shoal.files import parse_yaml
from shoal.models.head import find_head
from shoal.options import FitOptions
from shoal.registry import spelled
from shoal.training.callbacks import Point
from shoal.training.evaluate import snapshot
from shoal.training.options import probes_head, warm_steps
from shoal.training.processes import Processes
from shoal.training.retraining import plan, with_validation
from shoal.training.setup import Setup
from shoal.training.trainer import Trainer

if TYPE_CHECKING:
    from shoal.training.journal import Journal

NOT_WARM: FitOptions = {
    **{"draw": None, "warm_start": None, "schedule": None, "average": None, "wise_ft": None},
    **{"miro": None, "l2_sp": None, "retrain": False, "track_every": None, "track_after": False},
}
"""Options that a warm start does without."""


@dataclass(frozen=True)
class Recipe:
    """How to train a pretrained model. ``shoal.train``, ``shoal.fit`` and ``shoal.compare`` take its name."""

    name: str
    summary: str
    reference: str
    algorithm: str
    options: Mapping[str, Any]
    """Fields of :class:`~shoal.options.TrainingOptions`; what the caller gives wins."""
    pretrained: bool = True
    """Whether it makes sense for pretrained weights only."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Options of a backbone that is built by its name; they do not apply to a model of the caller's own."""
    freeze_batchnorm: bool = False
    """Whether :func:`shoal.fit` calls :func:`shoal.models.freeze_batchnorm` on a model of the caller's own.
    Backbones built by their names have BatchNorm frozen by default."""

    def fill(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """``given``, with the recipe's value for every option that was not given."""
        return {**self.options, **given}


@cache
def recipes() -> Mapping[str, Recipe]:
    """All of them, by name."""
    text = resources.files("shoal.training").joinpath("recipes.yaml").read_text(encoding="utf-8")
    return {name: Recipe(name=name, **content) for name, content in parse_yaml(text).items()}


def find_recipe(name: Any) -> Recipe | None:
    """The recipe of this name, in any spelling; ``None`` where there is none."""
    return recipes().get(spelled(name)) if isinstance(name, str) else None


class Job:
    """The stages of one training: a warm start, the training, and again both on all data.

    The setups of the first two are made, and checked, at once; the third follows from what was selected.
    """

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
        self.options, self.label = options, label
        self.initial: dict[str, Tensor] | None = None
        self.setup = Setup(algorithm, model, data, options, label, processes=processes)
        self.trainer = Trainer(self.setup, last=not options["retrain"])
        self.warm = self._warm(self.setup, "warm start")
        self.retraining: Trainer | None = None
        self.plan: dict[str, Any] = {}
        self.seconds = 0.0

    def _warm(self, setup: Setup, stage: str) -> Trainer | None:
        """The training with ERM that comes before, where there is one."""
        if setup.options["warm_start"] is None:
            return None
        model, only = setup.model, None
        if probes_head(setup.options):
            only = _probed_head(model, setup)
        warm = Setup("erm", model, setup.data, self._warm_options(setup), stage, stage, setup.processes, only)
        return Trainer(warm, last=False)

    def _warm_options(self, setup: Setup) -> FitOptions:
        options = setup.options
        steps, one_pass = warm_steps(options, len(setup.data.splits["train"].examples()))
        plateau = options["warm_start"] == "plateau"
        return {
            **options,
            **NOT_WARM,
            "steps": steps,
            "domains_per_step": 1,
            "settings": {},
            "patience": 5 if plateau else None,
            "select": "best" if plateau else "last",
            "eval_every": max(1, one_pass // 10) if plateau else steps,
        }

    def run(self, journal: Journal | None = None) -> Point:
        """Trains; the model then has the selected weights."""
        began = time.monotonic()
        model = self.setup.model
        try:
            if self.options["retrain"]:
                self.initial = {k: v.cpu() for k, v in snapshot(model).items()}
            _run(self.warm, journal)
            point = self.trainer.run(journal)
            if not self.options["retrain"]:
                return point
            self.plan = plan(self)
            model.load_state_dict(self.initial or {})
            setup = Setup(
                type(self.setup.algorithm),
                model,
                with_validation(replace(self.setup.data, examples=self.setup.examples)),
                self._retrain_options(self.plan["options"]),
                "retraining",
                "retrain",
                self.setup.processes,
                horizon=self.setup.task.steps,
            )
            self.retraining = Trainer(setup)
            _run(self._warm(setup, "retrain warm start"), journal)
            return _run(self.retraining, journal) or point
        finally:
            self.seconds = max(time.monotonic() - began, self.trainer.seconds)

    def _retrain_options(self, found: FitOptions) -> FitOptions:
        once: FitOptions = {"patience": None, "track_every": None, "retrain": False, "select": "last"}
        return {**self.options, **found, **once, "eval_every": found["steps"]}

    @property
    def selected(self) -> tuple[Point, str]:
        """The point whose weights count, and the rule that chose it."""
        if self.retraining is None or not self.retraining.history:
            return self.trainer.selected
        point, rule = self.retraining.selected
        return point, f"retrained with the validation data, {rule} (the search: {self.plan['rule']})"

    @property
    def points(self) -> list[Point]:
        """All that was measured: the history, and the final weights where they are not of a step in it."""
        found = list(self.trainer.history)
        for point in (self.trainer.selected[0], self.selected[0]) if found else ():
            if all(point is not other for other in found):
                found.append(point)
        return found

    @property
    def notes(self) -> dict[str, str]:
        return self.trainer.selection.notes

    @property
    def interpolation(self) -> dict[str, Any]:
        return self.trainer.selection.interpolation


def _run(trainer: Trainer | None, journal: Journal | None) -> Point | None:
    """A stage of its own, in a folder of its own."""
    if trainer is None:
        return None
    if journal is None:
        return trainer.run()
    with journal.stage(trainer.setup.stage) as own:
        return trainer.run(own)


def _probed_head(model: nn.Module, setup: Setup) -> nn.Module:
    """The head of ``model``, to be trained alone."""
    option = f"warm_start={setup.options['warm_start']!r}"
    try:
        head = find_head(model, setup.example)
    except InputError as error:
        raise InputError(f"{option} trains only the head: {error}") from error
    own = {id(p) for p in head.parameters()}
    if not any(p.requires_grad for p in head.parameters()):
        raise InputError(f"{option} trains only the head, and no parameter of it requires a gradient.")
    if all(id(p) in own for p in model.parameters()):
        raise InputError(
            f"{option} trains only the head, and {type(model).__name__} has no other parameters."
        )
    return head
