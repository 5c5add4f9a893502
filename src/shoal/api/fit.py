"""``shoal.fit``: train a model with any algorithm, in our loop."""

from __future__ import annotations

import functools
import html
import inspect
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, get_args

import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import nn

from shoal.algorithms import Algorithm, Loss
from shoal.data.batch import DomainData
from shoal.data.domains import Domains
from shoal.data.examples import understand, warn_of
from shoal.data.sampler import Draw
from shoal.errors import InputError, check_names, unknown_name
from shoal.experiments.config import OPTIMIZERS, RunConfig
from shoal.experiments.record import PYTHON, RunRecord
from shoal.files import write_atomically
from shoal.losses import BINARY, find_terms
from shoal.settings import coerce
from shoal.training import predictions as written
from shoal.training.callbacks import Callback
from shoal.training.card import beside
from shoal.training.engine import Precision
from shoal.training.evaluate import Scores
from shoal.training.folder import RunFolder
from shoal.training.history import Point
from shoal.training.journal import Journal
from shoal.training.loop import Training
from shoal.training.metrics import METRICS, Own
from shoal.training.options import OptimizerMaker, Options, ScheduleMaker, Split
from shoal.training.processes import Processes
from shoal.training.recipes import find_recipe
from shoal.training.summary import describe, summary

if TYPE_CHECKING:
    import pandas

    from shoal.export import Exported
    from shoal.trained import Trained

P = ParamSpec("P")
R = TypeVar("R")


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
    record: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Everything measured, as plain data: what ``record.json`` in a run's folder holds."""
    _beside: Callable[[], dict[str, bytes]] = field(default=dict, repr=False)
    _folder: Any = field(default=None, repr=False)

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

    def predict(self, source: Any, *, batch_size: int = 256) -> NDArray[Any]:
        """The class of each example (by name, where classes have names), or in regression its value.

        Of several labels it is 0 or 1 for each; of dense outputs a class for each position.

        ``source`` is an array or a tensor of inputs, or, for data that Shoal has read itself (tables, images,
        text), anything that :meth:`shoal.Trained.predict` takes.
        """
        return self.trained().predict(source, batch_size=batch_size)

    def trained(self) -> Trained:
        """The model with all that it takes to use it, as :func:`shoal.load` gives it."""
        from shoal.trained import About, Trained

        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="shoal-")
            self._write(Path(self._folder.name))
        place = Path(self._folder.name)
        return Trained(self.model, About.read(place / "inputs.json"), place, self.record)

    def save(self, path: str | Path) -> Path:
        """Writes the model, how to use it, its card and the record to a folder, for :func:`shoal.load`."""
        folder = Path(path).expanduser()
        if RunFolder(folder).started or RunFolder(folder).finished:
            raise InputError(f"path={str(path)!r} holds a run; choose another folder.")
        self._write(folder)
        return folder

    def _write(self, folder: Path) -> None:
        weights = {k: v.detach().cpu().clone().contiguous() for k, v in self.model.state_dict().items()}
        files = {**self._beside(), "model.safetensors": save(weights)}
        for name, content in files.items():
            write_atomically(folder / name, content)
        write_atomically(folder / "record.json", json.dumps(self.record, default=dict).encode())

    def export(self, path: str | Path, format: str = "onnx", *, prepared: bool = False) -> Exported:
        """Writes the model for use without Shoal; see :func:`shoal.export.export`."""
        from shoal.export import export

        return export(self.trained(), path, format, prepared=prepared)

    def to_frame(self) -> pandas.DataFrame:
        """One row for each evaluation, split and domain."""
        import pandas

        rows = [
            (point.step, point is self.selected, split, domain, scores.metric, value)
            for point in self.history
            for split, scores in point.scores.items()
            for domain, value in zip(scores.names, scores.values, strict=True)
        ]
        return pandas.DataFrame(rows, columns=["step", "selected", "split", "domain", "metric", "value"])

    def __getstate__(self) -> dict[str, Any]:
        made = self._beside()
        return {**self.__dict__, "_beside": functools.partial(dict, made), "_folder": None}

    def __repr__(self) -> str:
        scores = self.selected.scores.items()
        parts = [f"{split} {s.selects or s.metric} {s.judged:.3f}" for split, s in scores]
        return f"Fit({type(self.algorithm).__name__}, {self.rule}: {', '.join(parts)})"

    def _repr_html_(self) -> str:
        rows = [("split", "domain", "metric", "score")]
        for split, scores in self.selected.scores.items():
            shown = [("all", scores.average), *zip(scores.names[:20], scores.values, strict=False)]
            rows += [(split, name, scores.metric, f"{value:.4g}") for name, value in shown]
        cells = ["".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows]
        return (
            f"<table><caption>{html.escape(repr(self))}</caption><tr>{'</tr><tr>'.join(cells)}</tr></table>"
        )


def _named(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, with our words for keywords that it does not take or that are missing."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        known = inspect.signature(function).parameters
        check_names("option", kwargs, known)
        if "steps" not in kwargs:
            raise InputError("steps is missing: say how many steps to train, such as steps=1000.")
        return function(*args, **kwargs)

    return wrapped


@_named
def fit(
    algorithm: str | type[Algorithm],
    model: nn.Module,
    train: DomainData | Mapping[str, Any],
    *,
    validation: Mapping[str, Any] | None = None,
    test: Mapping[str, Any] | None = None,
    task: Literal["classification", "ordinal", "dense", "multilabel", "regression"] | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    wandb: str | None = None,
    steps: int,
    batch_size: int = 32,
    domains_per_step: int | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
    optimizer: OptimizerMaker | None = None,
    lr: float | None = None,
    head_lr: float | None = None,
    layer_decay: float | None = None,
    loss: Loss | None = None,
    classes: int | None = None,
    draw: Draw | None = None,
    seed: int = 0,
    warm_start: int | float | str | None = None,
    warm_select: Literal["best", "last"] | None = None,
    patience: int | None = None,
    eval_every: int | None = None,
    eval_limit: int | None = None,
    eval_splits: Sequence[str] = get_args(Split),
    metric: str | Own | None = None,
    select: Literal["best", "last"] | None = None,
    device: str | torch.device | None = None,
    workers: int = 0,
    precision: Precision | Literal["auto"] | None = None,
    memory_format: Literal["contiguous", "channels-last", "auto"] | None = None,
    clip: float | None = None,
    accumulate: int = 1,
    schedule: ScheduleMaker | None = None,
    average: Literal["sma", "ema", "swad", "swad-paper"] | None = None,
    average_start: int | None = None,
    average_ratio: float | None = None,
    average_decay: float | None = None,
    wise_ft: float | Literal["validation"] | None = None,
    miro: float | None = None,
    l2_sp: float | None = None,
    l2_sp_head: float | None = None,
    retrain: bool = False,
    on_nan: Literal["stop", "skip"] = "stop",
    deterministic: bool = False,
    compile: bool = False,
    capture: bool | None = None,
    eval_batch: int | None = None,
    log_every: int = 50,
    track_every: int | None = None,
    track_layers: bool = False,
    track_domains: int | None = None,
    checkpoint_every: int | None = None,
    keep: int = 2,
    progress: bool | Callable[[int, str], None] = True,
    predictions: bool | str = False,
    callbacks: Sequence[Callback] = (),
) -> Fit:
    """Trains ``model`` in place with an algorithm and says how well it does in every domain. ::

        run = shoal.fit("fish", model, train={"art": art, "photo": photo}, test={"sketch": sketch}, steps=500)
        print(run.accuracy("sketch"))
        labels = run.predict(new_images)

    Args:
        algorithm: a name (``shoal list algorithms``), a subclass of :class:`~shoal.algorithms.Algorithm`, or
            a recipe for a pretrained model (``"auto"``, ``"erm++"``, ``"swad"``, ``"lp-ft"``, ``"miro"``). A
            recipe sets the options that are left at their defaults here.
        model: any network; its initial weights are yours.
        train, validation, test: datasets by domain name, each a pair of arrays or tensors, or a ``Dataset``
            or list of examples, as :func:`~shoal.data.from_dataset` takes them; or one
            :class:`~shoal.data.DomainData` that holds all of it. Several inputs are one nest, ((a, b), y),
            and one argument of the model: ``a, b = x``. Sample weights w are the third of three arrays,
            (x, y, w), or ``"sample_weight"`` of examples that are dicts: a batch's loss is
            Σ w_i l_i / Σ w_i, also in evaluation; other metrics do not look at them.
        task: where labels are not what they look like: whole numbers, booleans and text are classes
            (``classification``), several of them per example, (B, H, W) or (B, L), with outputs
            (B, classes, …) are a class per position (``dense``), floating numbers are ``regression``.
            ``multilabel`` is 0 or 1 for each of several labels, (B, L), or for one, (B,), with a logit each;
            it need not be said with a binary cross-entropy as ``loss``. ``ordinal`` is classification whose
            classes have an order, which two more metrics look at.
        folder: where to keep the log, checkpoints, the trained weights and the record, which ``shoal
            results`` and ``shoal report`` read. Ctrl-C and SIGTERM then finish the step and save it.
        resume: continue from the folder's newest checkpoint; all else must be given as it was.
        wandb: a project of Weights & Biases to log to as well, for a run with a folder.

    All other arguments are the fields of :class:`~shoal.training.options.Options`, which says what each of
    them means; ``steps`` must be given. Random state outside is left as it was found.
    """
    given = {name: value for name, value in locals().items() if name in OPTIONS}
    label = None
    if (recipe := find_recipe(algorithm)) is not None:
        algorithm, label, given = recipe.algorithm, recipe.name, recipe.fill(given, DEFAULTS)
    options = Options(**given)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model must be an nn.Module, got {type(model).__name__}; build one of ours with "
            "shoal.models.build(NAME, input_shape=…, classes=…, seed=0)."
        )
    folder = coerce(str | Path | None, folder, "folder")
    resume, wandb = coerce(bool, resume, "resume"), coerce(str | None, wandb, "wandb")
    data = as_domain_data(train, validation, test, task, classes=options.classes, loss=options.loss)
    if data is not train:
        warn_of(data.notes)
    if folder is None:
        if resume or wandb or options.predictions:
            raise InputError("resume, wandb and predictions need the folder of the run.")
        return run(Training(algorithm, model, data, options, label))
    kept = RunFolder(folder)
    # The main process answers for all, before it writes anything.
    started, finished = Processes(options.device).told((kept.started, kept.finished))
    if started and not resume:
        state = "a finished run" if finished else "a run that is not finished"
        raise InputError(f"{str(folder)!r} holds {state}: choose another folder, or go on with resume=True.")
    training = Training(algorithm, model, data, options, label)
    config = describe(training)
    going_on = f"shoal.fit(…, folder={str(folder)!r}, resume=True)"
    with Journal(
        folder, training.processes, keep=options.keep, wandb=wandb, config=config, going_on=going_on
    ) as journal:
        journal.begin(config)
        result = run(training, journal)
        if name := options.predictions:
            journal.hold()
            called = "data" if name is True else str(name)
            written.write(training, Path(folder) / "predictions", called, ("seed", str(options.seed)))
        journal.finish(model.state_dict(), result.record, result._beside)
    return result


OPTIONS = {each.name for each in fields(Options)}
DEFAULTS = {name: each.default for name, each in inspect.signature(fit).parameters.items()}


def run(training: Training, journal: Journal | None = None) -> Fit:
    """Takes a training to its end and puts the selected weights into the model."""
    training.run(journal)
    selected = training.restore_selected()
    record = RunRecord(config=_config(training), **summary(training)).to_dict()
    config = journal.begun() if journal and training.processes.main else describe(training, where=False)
    recipe = getattr(training.model, "recipe", None)
    return Fit(
        model=training.model,
        algorithm=(training.retraining or training).algorithm,
        history=training.history,
        warm_up=training.warm.history if training.warm else [],
        selected=selected,
        rule=training.selected[1],
        seconds=training.seconds,
        captured=training.unroll > 0,
        agreement=list(training.agreement),
        record=record,
        _beside=functools.partial(beside, training, recipe, record, config),
    )


def _config(training: Training) -> RunConfig:
    """What was trained, as far as a run's configuration can say it; ``dataset`` is "python".

    Data and models are not part of it: readers tell these runs apart by their folders.
    """
    optimizer = training.engine.optimizer
    kind = type(getattr(optimizer, "inner", optimizer)).__name__
    names = {theirs: ours for ours, theirs in OPTIMIZERS.items()}
    first = optimizer.param_groups[0]
    lr = training.rates.base if training.rates else first.get("initial_lr", first["lr"])
    settings: dict[str, Any] = {"lr": float(lr)}
    same = ["steps", "batch_size", "settings", "draw", "seed", "warm_start", "patience", "precision", "clip"]
    same += ["accumulate", "average", "average_start", "average_ratio", "on_nan", "eval_limit", "warm_select"]
    same += ["average_decay", "wise_ft", "miro", "l2_sp", "l2_sp_head", "memory_format", "retrain"]
    same += ["head_lr", "layer_decay"]
    selects = training.selects.name if training.selects else None
    plain = describe(training, where=False)
    return RunConfig(
        dataset=PYTHON,
        algorithm=training.label,
        data_options={"domains": plain["domains"]},
        model=plain["model"],
        optimizer=names.get(kind, "adam"),
        optimizer_options=settings if kind in names else {"class": kind, **settings},
        domains_per_step=training.sampler.domains_per_step,
        eval_every=training.eval_every,
        select=training.select,
        metric=selects if selects in METRICS else None,
        eval_splits=list(training.splits),
        **{name: plain["options"][name] for name in same},
    )


def as_domain_data(
    train: DomainData | Mapping[str, Any],
    validation: Mapping[str, Any] | None,
    test: Mapping[str, Any] | None,
    task: str | None = None,
    *,
    classes: int | None = None,
    loss: Loss | None = None,
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
    terms = find_terms(loss) if loss is not None else None
    found = understand(
        sets,
        task=task,
        classes=classes,
        default="regression" if loss is not None else None,
        binary=terms is not None and terms.function in BINARY,
    )
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
        kind=found.kind,
    )
