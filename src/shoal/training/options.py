"""The options of a training, checked when they are given."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_type_hints

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal.algorithms import Loss
from shoal.data.sampler import Draw
from shoal.errors import InputError
from shoal.settings import Head, Kind, Range, Seed, coerce, kinds_of
from shoal.training.averaging import EMA, SMA, SWAD, Average
from shoal.training.callbacks import Callback
from shoal.training.engine import HALF, Precision
from shoal.training.metrics import Own, metric
from shoal.training.processes import named_device

ScheduleMaker = Callable[[Optimizer], LRScheduler]
OptimizerMaker = Callable[[Iterable[nn.Parameter]], Optimizer]
Split = Literal["train", "id_validation", "validation", "id_test", "test", "oracle"]

Count = Annotated[int, Range(1)]
Positive = Annotated[float, Range(above=0, below=1e30, what="positive, a number")]
Share = Annotated[float, Range(above=0, most=1)]
WarmStart = (
    Annotated[int, Range(1, what="a number of steps")]
    | Annotated[float, Range(above=0, most=1, what="a fraction of the data")]
    | Literal["plateau"]
    | Head
)


@dataclass(frozen=True)
class Options:
    """The options of a training, independent of the algorithm and the data."""

    steps: Count
    """Number of training steps, each on ``domains_per_step`` batches of ``batch_size`` examples."""
    batch_size: Count = 32
    """Number of examples per batch."""
    domains_per_step: Count | None = None
    """Number of domains per step, S (default: all if there are at most 16, otherwise 5)."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Hyperparameters of the algorithm, such as ``{"meta_lr": 0.1}``."""
    optimizer: OptimizerMaker | None = None
    """Optimizer class, such as ``torch.optim.SGD``, or function that creates an optimizer from parameters,
    including its learning rate: ``lambda p: torch.optim.SGD(p, 0.1)`` (default: Adam)."""
    lr: Positive | None = None
    """Learning rate of the default optimizer (default: 1e-3) or of an optimizer class (default: its own)."""
    head_lr: Positive | None = None
    """Learning rate of the head: that of a :class:`~shoal.models.FeatureModel`, or the last linear layer.
    Parameter groups of the optimizer keep their other settings."""
    layer_decay: Share | None = None
    """Layer-wise learning rate decay: k layers below the head, the learning rate is multiplied by
    ``layer_decay`` to the power of k; see :func:`shoal.models.layers.find_layers`. BEiT and others use
    0.65 to 0.9 for transformers."""
    loss: Loss | None = None
    """``loss(output, y)``, a mean over examples (default: cross-entropy for classes, binary cross-entropy for
    several labels, otherwise the squared error). Losses of torch, and a ``functools.partial`` of a loss of
    ``torch.nn.functional``, may have class weights, label smoothing and an ``ignore_index`` (labels that
    are neither trained nor scored); batches can then be split exactly (``accumulate``, several processes),
    except with Mixup and Fishr. With any other loss that is not the mean of the losses of the examples,
    batches cannot be split."""
    classes: Count | None = None
    """Number of classes (default: inferred from the data)."""
    draw: Draw | None = None
    """How batches are sampled (default: as the algorithm requires); ``"regrouped"`` is the random grouping of
    the paper."""
    seed: Seed = 0
    """Random seed of the order of the data and of all random numbers in the training, but not of the initial
    weights."""
    warm_start: WarmStart | None = None
    """Train with ERM first, on one batch per step: for a number of steps (500), for a fraction of the data
    (0.1), or until validation stops improving (``"plateau"``). ``"head"`` and ``"head:500"`` train only
    the head of the model (:func:`~shoal.models.head.find_head`), for a tenth of ``steps`` or 500 steps,
    with the rest frozen and in evaluation mode: linear probing before fine-tuning (Kumar et al.,
    Fine-Tuning can Distort Pretrained Features, 2022)."""
    warm_select: Literal["best", "last"] | None = None
    """Continue from the ``"best"`` weights of the warm start on validation, evaluated every ``eval_every``
    steps, or from its ``"last"`` (default: best for ``"plateau"``, otherwise last)."""
    patience: Count | None = None
    """Stop after this number of evaluations without improvement on validation."""
    eval_every: Count | None = None
    """Number of steps between evaluations. By default there are as many evaluations (10, 5, 4, 2 or 1) as
    pass no more examples through the model than the training does; always 10 with ``patience``, and 20
    with SWAD."""
    eval_limit: Count | None = None
    """Maximum number of examples per split to evaluate on, evenly over its domains: a random sample,
    stratified by class if labels are known without reading the examples, and the same for every seed
    (default: all, but about 5,000 for ``train``)."""
    eval_splits: Sequence[Split] = get_args(Split)
    """Splits to evaluate, of those in the data. ``"oracle"`` consists of held-out examples of the test
    domains, ``"id_…"`` of the training domains, as in WILDS."""
    metric: str | Own | None = None
    """Metric for selection and early stopping: a name in :mod:`shoal.training.metrics`, or a function of
    outputs, labels and groups (see :func:`~shoal.training.metrics.metric`) (default: the metric of the
    dataset, otherwise accuracy or the mean squared error)."""
    select: Literal["best", "last"] | None = None
    """Keep the ``"best"`` weights on validation (the default if there is validation data) or the ``"last"``.
    """
    device: str | torch.device | None = None
    """Device (default: CUDA if available)."""
    workers: Annotated[int, Range(0, 1000)] = 0
    """Number of processes that load examples; the batches do not depend on it."""
    precision: Precision | Literal["auto"] | None = None
    """``"fp32"`` (the default), ``"bf16"`` or ``"fp16"``; with ``accelerate launch``, the default is its
    setting. ``"auto"``: fp32 or bf16, whichever is faster on CUDA (see :mod:`shoal.training.formats`),
    otherwise fp32."""
    memory_format: Literal["contiguous", "channels-last", "auto"] | None = None
    """Memory format of images (B, c, h, w) and convolution weights during training: ``"contiguous"`` (the
    default: unchanged), ``"channels-last"``, or ``"auto"`` for whichever is faster on CUDA, otherwise
    contiguous. Results are equal up to rounding."""
    clip: Positive | None = None
    """Maximum norm of the gradient; in Fish, of the gradient of each inner step."""
    accumulate: Count = 1
    """Number of micro-batches that each batch is split into: less memory, the same gradient."""
    schedule: ScheduleMaker | None = None
    """Function that creates a learning rate scheduler from the optimizer; it is called once per step."""
    average: Literal["sma", "ema", "swad", "swad-paper"] | None = None
    """Average the weights: ``"sma"`` from ``average_start`` on; ``"ema"`` exponentially, with
    ``average_decay`` (:class:`~shoal.training.averaging.EMA`); ``"swad"`` between a start and an end
    determined by the validation loss, as in the code of its authors, or ``"swad-paper"``, as in their
    paper. See :class:`~shoal.training.averaging.SWAD`."""
    average_start: Count | None = None
    """Step at which ``"sma"`` starts (default: a tenth of the training)."""
    average_ratio: Positive | None = None
    """SWAD ends after 6 evaluations with a validation loss above this multiple of the loss at its start
    (default: 1.3; its authors use 1.2 for VLCS)."""
    average_decay: Annotated[float, Range(above=0, below=1)] | None = None
    """Decay of ``"ema"`` (default: 0.999, less in the first steps)."""
    wise_ft: Literal["validation"] | Annotated[float, Range(0, 1)] | None = None
    """Interpolate between the initial weights (after a warm start) and the selected weights: α, the fraction
    of the selected ones, or ``"validation"`` for the best of 0, 0.1, …, 1 on validation, the largest in
    case of ties (Wortsman et al., Robust fine-tuning of zero-shot models, 2022). For pretrained models: a
    new head needs ``warm_start="head"``."""
    l2_sp: Annotated[float, Range(0)] | None = None
    """Weight α of the L2-SP penalty α/2 ‖θ − θ₀‖², with θ₀ the initial weights (after a warm start), except
    for the head. Its gradient is added to each gradient that is applied. The paper uses 0.1 with SGD. See
    :class:`~shoal.training.fine_tuning.L2SP`."""
    l2_sp_head: Annotated[float, Range(0)] | None = None
    """Weight β of the penalty β/2 ‖w‖² on the weights of the head, with ``l2_sp`` (default: α; the paper uses
    0.01)."""
    miro: Annotated[float, Range(0)] | None = None
    """Weight λ of the MIRO penalty, which keeps features close to those of the pretrained model, with any
    algorithm; such as 0.1. It costs a forward pass of the pretrained model. See
    :class:`~shoal.training.miro.Miro`."""
    retrain: bool = False
    """After selection, train again from the initial weights on the training and validation examples of the
    training domains, for as many steps as the selected weights were trained, including the warm start;
    keep the last weights, or their average. The last step of ERM++ (see :mod:`shoal.training.retraining`)."""
    on_nan: Literal["stop", "skip"] = "stop"
    """``"stop"`` at a step with a non-finite loss or gradient, or ``"skip"`` it; such a step is never
    applied."""
    deterministic: bool = False
    """Use only deterministic kernels; slower on CUDA, no difference on the CPU."""
    compile: bool = False
    """Compile the model with ``torch.compile``."""
    capture: bool | None = None
    """Replay steps as CUDA graphs (default: if possible). The steps of evaluations do not change."""
    eval_batch: Count | None = None
    """Number of examples per batch in evaluation (default: up to 1,024, fewer if the largest intermediate
    result of the model, measured on two examples, is large)."""
    log_every: Count = 50
    """Number of steps between log entries."""
    track_every: Count | None = None
    """Number of steps between measurements of the gradient agreement between domains (see
    :mod:`shoal.training.agreement`); they do not change the training."""
    track_layers: bool = False
    """Measure gradient agreement per layer as well."""
    track_domains: Count | None = None
    """Number of domains that a measurement compares (default: those of a step, and 2 if a step has one
    batch)."""
    checkpoint_every: Count | None = None
    """Number of steps between checkpoints, in a run with a folder (default: at evaluations and every five
    minutes)."""
    keep: Count = 2
    """Number of checkpoints to keep besides the best weights."""
    progress: bool | Callable[[int, str], None] = True
    """Show a progress line, or a function that is called with the step and a note from time to time."""
    predictions: bool | str = False
    """In a run with a folder, write the predictions of the selected weights for each evaluation split except
    ``train``, in the format of the WILDS leaderboard; a string is the name of the dataset in the file
    names."""

    callbacks: Sequence[Callback] = ()
    """Callbacks, see :class:`~shoal.training.callbacks.Callback`."""

    def __post_init__(self) -> None:
        """Every value is of its type and in its range, whatever was given."""
        for name, kind in _kinds().items():
            object.__setattr__(self, name, coerce(kind, getattr(self, name), name))
        if self.lr is not None and self.optimizer is not None and not _is_class(self.optimizer):
            raise InputError(
                f"lr={self.lr} and an optimizer function, which sets the learning rate itself: give one of "
                "them, or the optimizer's class, such as optimizer=torch.optim.SGD."
            )
        if self.device is not None:
            named_device(self.device)
        if self.metric is not None:
            metric(self.metric)
        if self.average_start is not None and self.average != "sma":
            raise InputError(f"average_start={self.average_start} requires average='sma'.")
        if self.average_ratio is not None and not self.swad:
            raise InputError(f"average_ratio={self.average_ratio:g} requires average='swad' or 'swad-paper'.")
        if self.average_decay is not None and self.average != "ema":
            raise InputError(f"average_decay={self.average_decay:g} requires average='ema'.")
        if self.average_start is not None and self.average_start > self.steps:
            raise InputError(f"average_start={self.average_start} is after the last of {self.steps} steps.")
        if self.warm_select is not None and self.warm_start is None:
            raise InputError("warm_select requires warm_start, such as warm_start=500.")
        if self.l2_sp_head is not None and self.l2_sp is None:
            raise InputError(f"l2_sp_head={self.l2_sp_head:g} requires l2_sp, such as l2_sp=0.1.")
        if self.track_domains == 1:
            raise InputError("track_domains must be at least 2: gradients are compared in pairs.")
        if self.track_every is None and (self.track_layers or self.track_domains):
            raise InputError("track_layers and track_domains require track_every, such as track_every=50.")

    def make_optimizer(self, trained: list[nn.Parameter]) -> Optimizer:
        if not trained:
            raise InputError("the model has no parameter that requires a gradient: nothing to train.")
        try:
            if self.optimizer is None:
                made: Any = torch.optim.Adam(trained, lr=1e-3 if self.lr is None else self.lr)
            else:
                given = {"lr": self.lr} if self.lr is not None else {}
                made = self.optimizer(trained, **given)
        except (TypeError, ValueError) as error:  # torch's own words for a negative rate and the like
            raise InputError(f"invalid options of the optimizer: {error}") from error
        if not isinstance(made, Optimizer):
            raise InputError(f"optimizer must return a torch optimizer, got {type(made).__name__}.")
        for group in made.param_groups:
            if not float(group.get("lr", 1.0)) > 0:  # NaN too
                raise InputError(f"the learning rate must be positive, got lr={group['lr']}.")
        return made

    def make_schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        if self.schedule is None:
            return None
        made = self.schedule(optimizer)
        if not isinstance(made, LRScheduler):
            raise InputError(f"schedule must return a torch scheduler, got {type(made).__name__}.")
        if isinstance(made, ReduceLROnPlateau):
            raise InputError(
                "ReduceLROnPlateau is not supported, because there is no metric after every step."
            )
        return made

    def make_average(self) -> Average | None:
        if self.swad:
            return SWAD(
                ratio=self.average_ratio or 1.3, rule="paper" if self.average == "swad-paper" else "released"
            )
        if self.average == "ema":
            return EMA(self.average_decay or 0.999)
        if self.average == "sma":
            return SMA(self.average_start or max(1, self.steps // 10))
        return None

    @property
    def probes(self) -> bool:
        """Whether the warm start trains only the head."""
        return isinstance(self.warm_start, str) and self.warm_start.startswith("head")

    @property
    def swad(self) -> bool:
        """Whether weights are averaged by the validation loss."""
        return self.average in ("swad", "swad-paper")

    @property
    def chosen_precision(self) -> Precision | Literal["auto"]:
        launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        return self.precision or (launched if launched in HALF else "fp32")  # type: ignore[return-value]

    def warm_steps(self, examples: int) -> tuple[int, int]:
        """How many ERM steps to start with, and how many make one pass over the training examples."""
        one_pass = max(1, math.ceil(examples / self.batch_size))
        if self.probes:
            assert isinstance(self.warm_start, str)
            return int(self.warm_start[5:] or max(1, self.steps // 10)), one_pass
        if self.warm_start == "plateau":
            return 100 * one_pass, one_pass
        if isinstance(self.warm_start, float):
            return max(1, round(self.warm_start * one_pass)), one_pass
        assert isinstance(self.warm_start, int)
        return self.warm_start, one_pass


@cache
def _kinds() -> dict[str, tuple[Kind, ...]]:
    """What each option may be."""
    hints = get_type_hints(Options, localns={"Domains": Any}, include_extras=True)
    return {name: kinds_of(hint) for name, hint in hints.items()}


def _is_class(maker: Any) -> bool:
    return isinstance(maker, type) and issubclass(maker, Optimizer)
