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
    | Annotated[float, Range(above=0, most=1, what="a share of the data")]
    | Literal["plateau"]
    | Head
)


@dataclass(frozen=True)
class Options:
    """How to train, whatever the algorithm and the data."""

    steps: Count
    """Meta-steps, each of ``domains_per_step`` batches of ``batch_size`` examples."""
    batch_size: Count = 32
    domains_per_step: Count | None = None
    """S; by default every domain where there are at most 16, else 5."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The algorithm's own, such as ``{"meta_lr": 0.1}``."""
    optimizer: OptimizerMaker | None = None
    """Its class, such as ``torch.optim.SGD``, or what makes it from parameters, learning rate included:
    ``lambda p: torch.optim.SGD(p, 0.1)``. Default: Adam."""
    lr: Positive | None = None
    """Learning rate of the default optimizer (1e-3 if not given) or of an optimizer class (its own)."""
    head_lr: Positive | None = None
    """Learning rate of the model's head: that of a :class:`~shoal.models.FeatureModel`, or its last linear
    layer. Of an optimizer's own groups of parameters each keeps its other settings."""
    layer_decay: Share | None = None
    """What is k layers below the head is trained with the learning rate times ``layer_decay`` to the power of
    k; see :func:`shoal.models.layers.find_layers`. BEiT and others take 0.65 to 0.9 for transformers."""
    loss: Loss | None = None
    """``loss(output, y)``, a mean over examples. Default: cross-entropy for classes, binary cross-entropy for
    several labels, else squares. Those of torch, and a ``functools.partial`` of one of
    ``torch.nn.functional``, may have class weights, label smoothing and an ``ignore_index`` (the labels that
    are neither trained nor scored); batches can then still be divided exactly (``accumulate``, several
    processes), but by Mixup and Fishr. Any other that is not the mean of its examples' losses cannot."""
    classes: Count | None = None
    draw: Draw | None = None
    """How batches are drawn, if not as the algorithm asks; ``"regrouped"`` is the paper's random grouping."""
    seed: Seed = 0
    """Fixes the order of the data and all random numbers of the training; the initial weights are yours."""
    warm_start: WarmStart | None = None
    """Train with ERM first, a batch a step: for so many steps (500), on so large a share of the data (0.1),
    or until validation stops improving (``"plateau"``). ``"head"`` and ``"head:500"`` train only the model's
    head (:func:`~shoal.models.head.find_head`), for a tenth of ``steps`` or 500, while the rest is frozen and
    in evaluation mode: a linear probe before fine-tuning (Kumar et al., Fine-Tuning can Distort Pretrained
    Features, 2022)."""
    warm_select: Literal["best", "last"] | None = None
    """Train on from the warm start's ``"best"`` weights on validation, evaluated every ``eval_every`` steps,
    or from its ``"last"``. By default the best of a ``"plateau"``, else the last."""
    patience: Count | None = None
    """Stop after so many evaluations without improvement on validation."""
    eval_every: Count | None = None
    """Steps between evaluations. By default there are as many (10, 5, 4, 2 or 1) as pass no more examples
    through the model than the training does; always 10 with
    ``patience``, and 20 with SWAD."""
    eval_limit: Count | None = None
    """Evaluate on about so many examples of each split, evenly over its domains: a random sample, stratified
    by class where labels are known without reading the examples, and the same for every seed. By default on
    all, but of ``train`` on about 5,000; scores say what they are a sample of."""
    eval_splits: Sequence[Split] = get_args(Split)
    """Those of them that the data have. ``"oracle"`` is held-out examples of the test domains, ``"id_…"`` of
    the training domains, as in WILDS."""
    metric: str | Own | None = None
    """What selects weights, and says when to stop: a name of :mod:`shoal.training.metrics`, or a function of
    outputs, truths and groups (see :func:`~shoal.training.metrics.metric`). By default what the dataset is
    judged by, else accuracy or the mean squared error."""
    select: Literal["best", "last"] | None = None
    """Keep the ``"best"`` weights on validation (the default where there is some) or the ``"last"``."""
    device: str | torch.device | None = None
    """By default CUDA where there is one."""
    workers: Annotated[int, Range(0, 1000)] = 0
    """Processes that read examples; whatever their number, the batches are the same."""
    precision: Precision | Literal["auto"] | None = None
    """``"fp32"`` (the default), ``"bf16"`` or ``"fp16"``; what ``accelerate launch`` was told, if it was.
    ``"auto"``: fp32 or bf16, whichever is faster on CUDA (see :mod:`shoal.training.formats`), else fp32."""
    memory_format: Literal["contiguous", "channels-last", "auto"] | None = None
    """How images (B, c, h, w) and the weights of convolutions lie in memory while the model is trained:
    ``"contiguous"`` (the default: as they are), ``"channels-last"``, or with ``"auto"`` whichever is faster
    on CUDA, else contiguous. Results are the same up to rounding."""
    clip: Positive | None = None
    """The largest norm of a gradient that is applied; in Fish, of each inner step's."""
    accumulate: Count = 1
    """Take each domain's batch in so many pieces, one after the other: less memory, the same gradient."""
    schedule: ScheduleMaker | None = None
    """Makes a learning-rate scheduler from the optimizer; it steps once a step."""
    average: Literal["sma", "ema", "swad", "swad-paper"] | None = None
    """Average weights along the way: ``"sma"`` from ``average_start`` on; ``"ema"`` exponentially, by
    ``average_decay`` (:class:`~shoal.training.averaging.EMA`); ``"swad"`` finds start and end by
    the validation loss as its authors' program does, ``"swad-paper"`` as their paper says. See
    :class:`~shoal.training.averaging.SWAD`."""
    average_start: Count | None = None
    """Of ``"sma"``; by default a tenth of the training."""
    average_ratio: Positive | None = None
    """Of SWAD: averaging ends after 6 evaluations whose loss is above so many times that at its start. By
    default 1.3; its authors took 1.2 for VLCS."""
    average_decay: Annotated[float, Range(above=0, below=1)] | None = None
    """Of ``"ema"``: the share of the mean before in each mean, by default 0.999; less in the first steps."""
    wise_ft: Literal["validation"] | Annotated[float, Range(0, 1)] | None = None
    """The final weights are (1 − α) of those at the start, after a warm start, and α of the selected ones:
    α itself or, with ``"validation"``, the best of 0, 0.1, …, 1 on validation, of equal ones the largest
    (Wortsman et al., Robust fine-tuning of zero-shot models, 2022). For pretrained models: a new head needs
    ``warm_start="head"`` first."""
    l2_sp: Annotated[float, Range(0)] | None = None
    """L2-SP: α in the penalty α/2 ‖θ − θ₀‖² for leaving the weights θ₀ at the start of the training, after a
    warm start. It is for all weights but the head's. The penalty's gradient is added to each gradient that is
    applied. Its paper takes 0.1 with SGD. See :class:`~shoal.training.fine_tuning.L2SP`."""
    l2_sp_head: Annotated[float, Range(0)] | None = None
    """β in the penalty β/2 ‖w‖² for the weights of the head, which belongs to ``l2_sp``. By default α; the
    paper takes 0.01."""
    miro: Annotated[float, Range(0)] | None = None
    """λ: keep features close to those of the pretrained model, beside any algorithm; such as 0.1. See
    :class:`~shoal.training.miro.Miro`. It costs a forward pass of the pretrained model."""
    retrain: bool = False
    """Then train again on the training and validation examples of the training domains, from the same initial
    weights and for as many steps as the selected ones have, warm start included; these weights, or their
    average, are the result. The last step of ERM++ (see :mod:`shoal.training.retraining`)."""
    on_nan: Literal["stop", "skip"] = "stop"
    """A step that is not finite is never applied; then ``"stop"``, or ``"skip"`` it and go on."""
    deterministic: bool = False
    """Only kernels that give the same bits every time; slower on CUDA, no difference on the CPU."""
    compile: bool = False
    """Compile the model with ``torch.compile``."""
    capture: bool | None = None
    """Replay steps as CUDA graphs; by default wherever that is possible. It changes no evaluation point."""
    eval_batch: Count | None = None
    """Examples per batch in evaluation; by default up to 1,024, fewer where the model's largest intermediate
    result (found by a trial on two examples) is large."""
    log_every: Count = 50
    """Steps between lines of the log."""
    track_every: Count | None = None
    """Steps between measurements of how well the domains' gradients agree (see
    :mod:`shoal.training.agreement`); they change nothing in the training."""
    track_layers: bool = False
    """Measure it in each layer too."""
    track_domains: Count | None = None
    """Domains that a measurement compares: by default those of a step, and 2 where a step has one batch."""
    checkpoint_every: Count | None = None
    """Steps between checkpoints, in a run with a folder; by default at evaluations and every five minutes."""
    keep: Count = 2
    """How many checkpoints stay, beside the best weights."""
    progress: bool | Callable[[int, str], None] = True
    """Show a progress line, or call this with the step and a note now and then."""
    predictions: bool | str = False
    """In a run with a folder, write what the selected weights predict in each evaluation split but ``train``,
    as WILDS' leaderboard takes it; a text is what the files call the data."""

    callbacks: Sequence[Callback] = ()
    """What is called along the way; see :class:`~shoal.training.callbacks.Callback`."""

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
            raise InputError(f"average_start={self.average_start} is for average='sma'.")
        if self.average_ratio is not None and not self.swad:
            raise InputError(f"average_ratio={self.average_ratio:g} is for average='swad' and 'swad-paper'.")
        if self.average_decay is not None and self.average != "ema":
            raise InputError(f"average_decay={self.average_decay:g} is for average='ema'.")
        if self.average_start is not None and self.average_start > self.steps:
            raise InputError(f"average_start={self.average_start} is after the last of {self.steps} steps.")
        if self.warm_select is not None and self.warm_start is None:
            raise InputError("warm_select belongs to warm_start, such as warm_start=500.")
        if self.l2_sp_head is not None and self.l2_sp is None:
            raise InputError(f"l2_sp_head={self.l2_sp_head:g} belongs to l2_sp, such as l2_sp=0.1.")
        if self.track_domains == 1:
            raise InputError("track_domains must be at least 2: gradients are compared in pairs.")
        if self.track_every is None and (self.track_layers or self.track_domains):
            raise InputError("track_layers and track_domains belong to track_every, such as track_every=50.")

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
            raise InputError(f"optimizer refuses its settings: {error}") from error
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
            raise InputError("ReduceLROnPlateau waits for a measure after every step, and there is none.")
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
