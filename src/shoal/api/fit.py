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
from shoal.models.batchnorm import freeze_batchnorm
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
    """A finished training, the result of :func:`fit`.

    Attributes:
        model: trained model, in eval mode, with the weights of ``selected``.
        algorithm: algorithm that trained it.
        history: evaluations during the training.
        warm_up: evaluations during the warm start.
        selected: evaluation whose weights were selected.
        rule: selection rule.
        seconds: duration of the training.
        captured: whether steps were replayed as CUDA graphs.
        agreement: gradient agreement between domains, if it was tracked.
        record: everything that was measured, as plain data: the content of ``record.json``.
    """

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
        """Return the scores of every domain of a split at the selected step.

        Args:
            split: name of the split.
        """
        found = self.selected.scores
        if split not in found:
            raise unknown_name("split", split, found)
        return found[split]

    def accuracy(self, name: str = "test") -> float:
        """Return the accuracy on a domain or a split at the selected step.

        Args:
            name: name of the domain or split.
        """
        scores = self._scores_with(name)
        if scores.metric != "accuracy":
            raise InputError(
                f"accuracy is not defined for regression; use score({name!r}) for the {scores.metric}."
            )
        return scores[name] if name in scores.names else scores.average

    def score(self, name: str = "test") -> float:
        """Return the metric of the training (accuracy, AUC, mse …) on a domain or a split.

        Args:
            name: name of the domain or split.
        """
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
        """Predict the class of each example (by name, if classes have names), or its value in regression.

        With several labels, the prediction is 0 or 1 for each; with dense outputs, a class for each position.

        Args:
            source: array or tensor of inputs or, for data that Shoal has read (tables, images, text),
                anything that :meth:`shoal.Trained.predict` takes.
            batch_size: number of examples per batch.
        """
        return self.trained().predict(source, batch_size=batch_size)

    def trained(self) -> Trained:
        """Return the model with its preprocessing, as :func:`shoal.load` does."""
        from shoal.trained import About, Trained

        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="shoal-")
            self._write(Path(self._folder.name))
        place = Path(self._folder.name)
        return Trained(self.model, About.read(place / "inputs.json"), place, self.record)

    def save(self, path: str | Path) -> Path:
        """Save the model, its preprocessing, model card and record to a folder, for :func:`shoal.load`.

        Args:
            path: new folder.
        """
        folder = Path(path).expanduser()
        if RunFolder(folder).started or RunFolder(folder).finished:
            raise InputError(f"path={str(path)!r} contains a run; choose another folder.")
        self._write(folder)
        return folder

    def _write(self, folder: Path) -> None:
        weights = {k: v.detach().cpu().clone().contiguous() for k, v in self.model.state_dict().items()}
        files = {**self._beside(), "model.safetensors": save(weights)}
        for name, content in files.items():
            write_atomically(folder / name, content)
        write_atomically(folder / "record.json", json.dumps(self.record, default=dict).encode())

    def export(self, path: str | Path, format: str = "onnx", *, prepared: bool = False) -> Exported:
        """Export the model for use without Shoal; see :func:`shoal.export.export`.

        Args:
            path: file to write.
            format: ``"onnx"``, ``"torch-export"`` or ``"safetensors"``.
            prepared: for ONNX of a table model, take preprocessed inputs instead of raw columns.
        """
        from shoal.export import export

        return export(self.trained(), path, format, prepared=prepared)

    def to_frame(self) -> pandas.DataFrame:
        """Return a DataFrame with one row per evaluation, split and domain."""
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
            raise InputError("steps is missing; set the number of training steps, such as steps=1000.")
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
    """Train ``model`` in place with an algorithm and evaluate it on every domain. ::

        run = shoal.fit("fish", model, train={"art": art, "photo": photo}, test={"sketch": sketch}, steps=500)
        print(run.accuracy("sketch"))
        labels = run.predict(new_images)

    The options from ``steps`` on are the fields of :class:`~shoal.training.options.Options`. Random state
    outside of the training is not changed.

    Args:
        algorithm: name of an algorithm (``shoal list algorithms``), subclass of
            :class:`~shoal.algorithms.Algorithm`, or recipe for a pretrained model (``"auto"``, ``"erm++"``,
            ``"swad"``, ``"lp-ft"``, ``"miro"``). A recipe sets options that are left at their defaults;
            ``"auto"`` also calls :func:`shoal.models.freeze_batchnorm` on the model.
        model: any network, with its initial weights; it is trained in place.
        train: datasets by domain name, each a pair of arrays or tensors, or a ``Dataset`` or list of examples
            as in :func:`~shoal.data.from_dataset`; or one :class:`~shoal.data.DomainData` with all splits.
            Several inputs are one nested structure, ((a, b), y), and one argument of the model: ``a, b = x``.
            Sample weights w are the third of three arrays, (x, y, w), or ``"sample_weight"`` of examples that
            are dicts: the loss of a batch is Σ w_i l_i / Σ w_i, also in evaluation; other metrics do not use
            them.
        validation: validation datasets by domain name, as in ``train``.
        test: test datasets by domain name, as in ``train``.
        task: kind of the task, if it is not inferred correctly from the labels: integers, booleans and
            strings are classes (``classification``), several of them per example, (B, H, W) or (B, L), with
            outputs (B, classes, …) are one class per position (``dense``), floating-point numbers are
            ``regression``. ``multilabel`` is 0 or 1 for each of several labels, (B, L), or for one, (B,),
            with one logit each; it is inferred from a binary cross-entropy as ``loss``. ``ordinal`` is
            classification with ordered classes, which adds two metrics.
        folder: folder for the log, checkpoints, trained weights and record, which ``shoal results`` and
            ``shoal report`` read. Ctrl-C and SIGTERM then finish the step and save it.
        resume: resume from the latest checkpoint in the folder; all other arguments must be the same.
        wandb: Weights & Biases project to log to, for a run with a folder.
        steps: number of training steps, each on ``domains_per_step`` batches of ``batch_size`` examples.
        batch_size: number of examples per batch.
        domains_per_step: number of domains per step, S (default: all if there are at most 16, otherwise 5).
        settings: hyperparameters of the algorithm, such as ``{"meta_lr": 0.1}``.
        optimizer: optimizer class, such as ``torch.optim.SGD``, or function that creates an optimizer from
            parameters, including its learning rate: ``lambda p: torch.optim.SGD(p, 0.1)`` (default: Adam).
        lr: learning rate of the default optimizer (default: 1e-3) or of an optimizer class (default: its
            own).
        head_lr: learning rate of the head: that of a :class:`~shoal.models.FeatureModel`, or the last linear
            layer. Parameter groups of the optimizer keep their other settings.
        layer_decay: layer-wise learning rate decay: k layers below the head, the learning rate is multiplied
            by ``layer_decay`` to the power of k; see :func:`shoal.models.layers.find_layers`. BEiT and others
            use 0.65 to 0.9 for transformers.
        loss: ``loss(output, y)``, a mean over examples (default: cross-entropy for classes, binary
            cross-entropy for several labels, otherwise the squared error). Losses of torch, and a
            ``functools.partial`` of a loss of ``torch.nn.functional``, may have class weights, label
            smoothing and an ``ignore_index`` (labels that are neither trained nor scored); batches can then
            be split exactly (``accumulate``, several processes), except with Mixup and Fishr. With any other
            loss that is not the mean of the losses of the examples, batches cannot be split.
        classes: number of classes (default: inferred from the data).
        draw: how batches are sampled (default: as the algorithm requires); ``"regrouped"`` is the random
            grouping of the paper.
        seed: random seed of the order of the data and of all random numbers in the training, but not of the
            initial weights.
        warm_start: train with ERM first, on one batch per step: for a number of steps (500), for a fraction
            of the data (0.1), or until validation stops improving (``"plateau"``). ``"head"`` and
            ``"head:500"`` train only the head of the model (:func:`~shoal.models.head.find_head`), for a
            tenth of ``steps`` or 500 steps, with the rest frozen and in evaluation mode: linear probing
            before fine-tuning (Kumar et al., Fine-Tuning can Distort Pretrained Features, 2022).
        warm_select: continue from the ``"best"`` weights of the warm start on validation, evaluated every
            ``eval_every`` steps, or from its ``"last"`` (default: best for ``"plateau"``, otherwise last).
        patience: stop after this number of evaluations without improvement on validation.
        eval_every: number of steps between evaluations. By default there are as many evaluations (10, 5, 4, 2
            or 1) as pass no more examples through the model than the training does; always 10 with
            ``patience``, and 20 with SWAD.
        eval_limit: maximum number of examples per split to evaluate on, evenly over its domains: a random
            sample, stratified by class if labels are known without reading the examples, and the same for
            every seed (default: all, but about 5,000 for ``train``).
        eval_splits: splits to evaluate, of those in the data. ``"oracle"`` consists of held-out examples of
            the test domains, ``"id_…"`` of the training domains, as in WILDS.
        metric: metric for selection and early stopping: a name in :mod:`shoal.training.metrics`, or a
            function of outputs, labels and groups (see :func:`~shoal.training.metrics.metric`) (default: the
            metric of the dataset, otherwise accuracy or the mean squared error).
        select: keep the ``"best"`` weights on validation (the default if there is validation data) or the
            ``"last"``.
        device: device (default: CUDA if available).
        workers: number of processes that load examples; the batches do not depend on it.
        precision: ``"fp32"`` (the default), ``"bf16"`` or ``"fp16"``; with ``accelerate launch``, the default
            is its setting. ``"auto"``: fp32 or bf16, whichever is faster on CUDA (see
            :mod:`shoal.training.formats`), otherwise fp32.
        memory_format: memory format of images (B, c, h, w) and convolution weights during training:
            ``"contiguous"`` (the default: unchanged), ``"channels-last"``, or ``"auto"`` for whichever is
            faster on CUDA, otherwise contiguous. Results are equal up to rounding.
        clip: maximum norm of the gradient; in Fish, of the gradient of each inner step.
        accumulate: number of micro-batches that each batch is split into: less memory, the same gradient.
        schedule: function that creates a learning rate scheduler from the optimizer; it is called once per
            step.
        average: average the weights: ``"sma"`` from ``average_start`` on; ``"ema"`` exponentially, with
            ``average_decay`` (:class:`~shoal.training.averaging.EMA`); ``"swad"`` between a start and an end
            determined by the validation loss, as in the code of its authors, or ``"swad-paper"``, as in their
            paper. See :class:`~shoal.training.averaging.SWAD`.
        average_start: step at which ``"sma"`` starts (default: a tenth of the training).
        average_ratio: SWAD ends after 6 evaluations with a validation loss above this multiple of the loss at
            its start (default: 1.3; its authors use 1.2 for VLCS).
        average_decay: decay of ``"ema"`` (default: 0.999, less in the first steps).
        wise_ft: interpolate between the initial weights (after a warm start) and the selected weights: α, the
            fraction of the selected ones, or ``"validation"`` for the best of 0, 0.1, …, 1 on validation, the
            largest in case of ties (Wortsman et al., Robust fine-tuning of zero-shot models, 2022). For
            pretrained models: a new head needs ``warm_start="head"``.
        miro: weight λ of the MIRO penalty, which keeps features close to those of the pretrained model, with
            any algorithm; such as 0.1. It costs a forward pass of the pretrained model. See
            :class:`~shoal.training.miro.Miro`.
        l2_sp: weight α of the L2-SP penalty α/2 ‖θ − θ₀‖², with θ₀ the initial weights (after a warm start),
            except for the head. Its gradient is added to each gradient that is applied. The paper uses 0.1
            with SGD. See :class:`~shoal.training.fine_tuning.L2SP`.
        l2_sp_head: weight β of the penalty β/2 ‖w‖² on the weights of the head, with ``l2_sp`` (default: α;
            the paper uses 0.01).
        retrain: after selection, train again from the initial weights on the training and validation examples
            of the training domains, for as many steps as the selected weights were trained, including the
            warm start; keep the last weights, or their average. The last step of ERM++ (see
            :mod:`shoal.training.retraining`).
        on_nan: ``"stop"`` at a step with a non-finite loss or gradient, or ``"skip"`` it; such a step is
            never applied.
        deterministic: use only deterministic kernels; slower on CUDA, no difference on the CPU.
        compile: compile the model with ``torch.compile``.
        capture: replay steps as CUDA graphs (default: if possible). The steps of evaluations do not change.
        eval_batch: number of examples per batch in evaluation (default: up to 1,024, fewer if the largest
            intermediate result of the model, measured on two examples, is large).
        log_every: number of steps between log entries.
        track_every: number of steps between measurements of the gradient agreement between domains (see
            :mod:`shoal.training.agreement`); they do not change the training.
        track_layers: measure gradient agreement per layer as well.
        track_domains: number of domains that a measurement compares (default: those of a step, and 2 if a
            step has one batch).
        checkpoint_every: number of steps between checkpoints, in a run with a folder (default: at evaluations
            and every five minutes).
        keep: number of checkpoints to keep besides the best weights.
        progress: show a progress line, or a function that is called with the step and a note from time to
            time.
        predictions: in a run with a folder, write the predictions of the selected weights for each evaluation
            split except ``train``, in the format of the WILDS leaderboard; a string is the name of the
            dataset in the file names.
        callbacks: callbacks, see :class:`~shoal.training.callbacks.Callback`.

    Returns:
        Fit: the trained model with its scores.
    """
    given = {name: value for name, value in locals().items() if name in OPTIONS}
    label = None
    if (recipe := find_recipe(algorithm)) is not None:
        algorithm, label, given = recipe.algorithm, recipe.name, recipe.fill(given, DEFAULTS)
    options = Options(**given)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model must be an nn.Module, got {type(model).__name__}; build a model of Shoal with "
            "shoal.models.build(NAME, input_shape=…, classes=…, seed=0)."
        )
    if recipe is not None and recipe.freeze_batchnorm:
        freeze_batchnorm(model)
    folder = coerce(str | Path | None, folder, "folder")
    resume, wandb = coerce(bool, resume, "resume"), coerce(str | None, wandb, "wandb")
    data = as_domain_data(train, validation, test, task, classes=options.classes, loss=options.loss)
    if data is not train:
        warn_of(data.notes)
    if folder is None:
        if resume or wandb or options.predictions:
            raise InputError("resume, wandb and predictions require folder=.")
        return run(Training(algorithm, model, data, options, label))
    kept = RunFolder(folder)
    # The main process answers for all, before it writes anything.
    started, finished = Processes(options.device).told((kept.started, kept.finished))
    if started and not resume:
        state = "a finished run" if finished else "a run that is not finished"
        raise InputError(
            f"{str(folder)!r} contains {state}; choose another folder, or resume it with resume=True."
        )
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
            raise InputError(
                "train is a DomainData, which already defines the task and the validation and test domains."
            )
        return train
    sets: dict[str, Any] = {}
    members: dict[str, list[str]] = {}
    for split, named in (("train", train), ("validation", validation), ("test", test)):
        if named is None:
            continue
        if not isinstance(named, Mapping):
            raise InputError(f"{split} must map names of domains to datasets, got {type(named).__name__}.")
        if not named:
            raise InputError(f"{split} is empty; it must map names of domains to datasets.")
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
