"""``shoal.fit``: train a model with any algorithm, in our loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from shoal.algorithms import Algorithm
from shoal.data.batch import DomainData
from shoal.data.domains import Domains
from shoal.data.examples import understand, warn_of
from shoal.errors import InputError, unknown_name
from shoal.settings import coerce
from shoal.training import predictions
from shoal.training.card import beside
from shoal.training.evaluate import Scores
from shoal.training.folder import RunFolder
from shoal.training.history import Point
from shoal.training.journal import Journal
from shoal.training.loop import Training
from shoal.training.options import Options
from shoal.training.processes import Processes
from shoal.training.summary import describe, summary


@dataclass
class Fit:
    """A finished training. The model, in eval mode, holds the weights of ``selected``, chosen by ``rule``."""

    model: nn.Module
    algorithm: Algorithm
    history: list[Point]
    warm_up: list[Point]
    selected: Point
    rule: str
    seconds: float
    captured: bool
    agreement: list[dict[str, Any]] = field(default_factory=list)
    """How well the domains' gradients agreed, where it was tracked."""

    @property
    def last(self) -> Point:
        return self.history[-1]

    def scores(self, split: str = "test") -> Scores:
        """Of every domain of a split, at the selected step."""
        found = self.selected.scores
        if split not in found:
            raise unknown_name("split", split, found)
        return found[split]

    def accuracy(self, name: str = "test") -> float:
        """Of a domain, or of all examples of a split, at the selected step."""
        scores = self._scores_with(name)
        if scores.metric != "accuracy":
            raise InputError(f"a regression has no accuracy; score({name!r}) gives its {scores.metric}.")
        return scores[name] if name in scores.names else scores.average

    def score(self, name: str = "test") -> float:
        """What the training was judged by (accuracy, AUC, mse …), of a domain or a split."""
        scores = self._scores_with(name)
        if name not in scores.names or scores.names == (name,):
            return scores.judged
        if scores.selects not in (None, scores.metric):
            raise InputError(
                f"{scores.selects} was measured per split, not per domain: score('test'), or "
                f"scores(SPLIT)[{name!r}] for the {scores.metric}."
            )
        return scores[name]

    def _scores_with(self, name: str) -> Scores:
        """Those of the split called ``name``, or of the first split that has such a domain."""
        found = self.selected.scores
        if name in found:
            return found[name]
        for split in ("test", "validation", "id_test", "id_validation", "train"):
            if split in found and name in found[split].names:
                return found[split]
        raise unknown_name("domain or split", name, [n for s in found for n in (s, *found[s].names)])

    def __repr__(self) -> str:
        scores = self.selected.scores.items()
        parts = [f"{split} {s.selects or s.metric} {s.judged:.3f}" for split, s in scores]
        return f"Fit({type(self.algorithm).__name__}, {self.rule}: {', '.join(parts)})"


def fit(
    algorithm: str | type[Algorithm],
    model: nn.Module,
    train: DomainData | Mapping[str, Any],
    *,
    validation: Mapping[str, Any] | None = None,
    test: Mapping[str, Any] | None = None,
    task: str | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    wandb: str | None = None,
    **options: Any,
) -> Fit:
    """Trains ``model`` in place with an algorithm and tells how well it does in every domain. ::

        run = shoal.fit("fish", model, train={"art": art, "photo": photo}, test={"sketch": sketch}, steps=500)
        print(run.accuracy("sketch"))

    Args:
        algorithm: a name (``shoal list algorithms``) or a subclass of :class:`~shoal.algorithms.Algorithm`.
        train, validation, test: datasets by domain name, each a pair of arrays or tensors, or a ``Dataset``
            or list of examples, as :func:`~shoal.data.from_dataset` takes them; or one
            :class:`~shoal.data.DomainData` that holds all of it.
        task: ``classification`` or ``regression``, where labels are not what they look like: whole numbers,
            booleans and text are classes, floating numbers are regression.
        folder: where to keep the log, checkpoints and the trained weights. Ctrl-C and SIGTERM then finish
            the step and save it.
        resume: go on from the folder's newest checkpoint; all else must be given as it was.
        wandb: a project of Weights & Biases to log to as well, for a run with a folder.
        options: the fields of :class:`~shoal.training.options.Options`, of which ``steps`` must be given.

    Random state outside is left as it was found.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model must be an nn.Module, got {type(model).__name__}; build one of ours with "
            "shoal.models.build(NAME, input_shape=…, classes=…, seed=0)."
        )
    folder = coerce(str | Path | None, folder, "folder")
    resume, wandb = coerce(bool, resume, "resume"), coerce(str | None, wandb, "wandb")
    checked = Options.checked(**options)
    own_loss = checked.loss is not None
    data = _as_domain_data(train, validation, test, task, classes=checked.classes, own_loss=own_loss)
    if data is not train:
        warn_of(data.notes)
    if folder is None:
        if resume or wandb or checked.predictions:
            raise InputError("resume, wandb and predictions need the folder of the run.")
        return run(Training(algorithm, model, data, checked))
    kept = RunFolder(folder)
    # The main process answers for all, before it writes anything.
    started, finished = Processes(checked.device).told((kept.started, kept.finished))
    if started and not resume:
        state = "a finished run" if finished else "a run that is not finished"
        raise InputError(f"{str(folder)!r} holds {state}: choose another folder, or go on with resume=True.")
    training = Training(algorithm, model, data, checked)
    config = describe(training)
    going_on = f"shoal.fit(…, folder={str(folder)!r}, resume=True)"
    keep = training.options.keep
    with Journal(
        folder, training.processes, keep=keep, wandb=wandb, config=config, going_on=going_on
    ) as journal:
        journal.begin(config)
        found = run(training, journal)
        if name := training.options.predictions:
            journal.hold()
            seed = ("seed", str(training.options.seed))
            predictions.write(training, Path(folder) / "predictions", "data" if name is True else name, seed)
        record = {**summary(training), "config": config}
        recipe = getattr(model, "recipe", None)
        journal.finish(model.state_dict(), record, partial(beside, training, recipe, record, journal))
    return found


def run(training: Training, journal: Journal | None = None) -> Fit:
    """Takes a training to its end and puts the selected weights into the model."""
    training.run(journal)
    selected = training.restore_selected()
    return Fit(
        model=training.model,
        algorithm=training.algorithm,
        history=training.history,
        warm_up=training.warm.history if training.warm else [],
        selected=selected,
        rule=training.selected[1],
        seconds=training.seconds,
        captured=training.unroll > 0,
        agreement=list(training.agreement),
    )


def _as_domain_data(
    train: DomainData | Mapping[str, Any],
    validation: Mapping[str, Any] | None,
    test: Mapping[str, Any] | None,
    task: str | None = None,
    *,
    classes: int | None = None,
    own_loss: bool = False,
) -> DomainData:
    if isinstance(train, DomainData):
        if validation is not None or test is not None or task is not None:
            raise InputError("train is a DomainData, which holds its own task, validation and test domains.")
        return train
    sets: dict[str, Any] = {}
    members: dict[str, list[str]] = {}
    for split, named in (("train", train), ("validation", validation), ("test", test)):
        if named is None:
            continue
        if not isinstance(named, Mapping) or not named:
            raise InputError(f"{split} must map names of domains to datasets, got {type(named).__name__}.")
        members[split] = [str(name) for name in named]
        sets |= {f"{split}: {name}": dataset for name, dataset in named.items()}
    # With a loss of their own, users have said what floating targets are.
    default = "regression" if own_loss else None
    found = understand(sets, task=task, classes=classes, default=default)
    every = found.domains
    splits = {
        split: Domains.from_indices({n: every.indices_of(every.number(f"{split}: {n}")) for n in names})
        for split, names in members.items()
    }
    return DomainData(
        found.examples,
        splits,
        found.classes,
        found.input_shape,
        model="",
        notes=found.notes,
        class_names=found.class_names,
    )
