"""The options of a training, checked when they are given."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal.algorithms import Loss
from shoal.data.sampler import Draw
from shoal.errors import InputError, check_names, shown
from shoal.training.averaging import SMA, SWAD, Average
from shoal.training.callbacks import Callback, check_callbacks
from shoal.training.engine import HALF, Precision
from shoal.training.metrics import Own, metric
from shoal.training.processes import named_device

ScheduleMaker = Callable[[Optimizer], LRScheduler]
OptimizerMaker = Callable[[Iterable[nn.Parameter]], Optimizer]
Split = Literal["train", "id_validation", "validation", "id_test", "test", "oracle"]

COUNTS = (
    "steps",
    "classes",
    "batch_size",
    "domains_per_step",
    "patience",
    "eval_every",
    "eval_limit",
    "eval_batch",
    "accumulate",
    "average_start",
    "log_every",
    "checkpoint_every",
    "keep",
    "track_every",
    "track_domains",
)
CHOICES = {
    "select": ("best", "last"),
    "precision": get_args(Precision),
    "average": ("sma", "swad"),
    "on_nan": ("stop", "skip"),
}


@dataclass(frozen=True)
class Options:
    """How to train, whatever the algorithm and the data."""

    steps: int
    """Meta-steps, each of ``domains_per_step`` batches of ``batch_size`` examples."""
    batch_size: int = 32
    domains_per_step: int | None = None
    """S; by default every domain where there are at most 16, else 5."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The algorithm's own, such as ``{"meta_lr": 0.1}``."""
    optimizer: OptimizerMaker | None = None
    """Its class, such as ``torch.optim.SGD``, or what makes it from parameters, learning rate included:
    ``lambda p: torch.optim.SGD(p, 0.1)``. Default: Adam."""
    lr: float | None = None
    """Learning rate of the default optimizer (1e-3 if not given) or of an optimizer class (its own)."""
    loss: Loss | None = None
    """``loss(output, y)``, a mean over examples. Default: cross-entropy for integer labels, else squares. One
    that is not the mean of its examples' losses (class weights) cannot be had with ``accumulate``, several
    processes or Fishr."""
    classes: int | None = None
    draw: Draw | None = None
    """How batches are drawn, if not as the algorithm asks; ``"regrouped"`` is the paper's random grouping."""
    seed: int = 0
    """Fixes the order of the data and all random numbers of the training; the initial weights are yours."""
    warm_start: int | float | str | None = None
    """Train with ERM first, a batch a step: for so many steps (500), on so large a share of the data (0.1),
    or until validation stops improving (``"plateau"``), going on from its best weights."""
    patience: int | None = None
    """Stop after so many evaluations without improvement on validation."""
    eval_every: int | None = None
    """Steps between evaluations. By default there are as many (10, 5, 4, 2 or 1) as pass no more examples
    through the model than the training does; always 10 with ``patience`` and ``average="swad"``."""
    eval_limit: int | None = None
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
    workers: int = 0
    """Processes that read examples; whatever their number, the batches are the same."""
    precision: Precision | None = None
    """``"fp32"`` (the default), ``"bf16"`` or ``"fp16"``; what ``accelerate launch`` was told, if it was."""
    clip: float | None = None
    """The largest norm of a gradient that is applied; in Fish, of each inner step's."""
    accumulate: int = 1
    """Take each domain's batch in so many pieces, one after the other: less memory, the same gradient."""
    schedule: ScheduleMaker | None = None
    """Makes a learning-rate scheduler from the optimizer; it steps once a step."""
    average: Literal["sma", "swad"] | None = None
    """Average weights along the way: ``"sma"`` from ``average_start`` on, or ``"swad"``, which finds start
    and end by the validation loss."""
    average_start: int | None = None
    """By default a tenth of the training."""
    on_nan: Literal["stop", "skip"] = "stop"
    """A step that is not finite is never applied; then ``"stop"``, or ``"skip"`` it and go on."""
    deterministic: bool = False
    """Only kernels that give the same bits every time; slower on CUDA, no difference on the CPU."""
    compile: bool = False
    """Compile the model with ``torch.compile``."""
    capture: bool | None = None
    """Replay steps as CUDA graphs; by default wherever that is possible. It changes no evaluation point."""
    eval_batch: int | None = None
    """Examples per batch in evaluation; by default up to 1,024, fewer where the model's largest intermediate
    result (found by a trial on two examples) is large."""
    log_every: int = 50
    """Steps between lines of the log."""
    track_every: int | None = None
    """Steps between measurements of how well the domains' gradients agree (see
    :mod:`shoal.training.agreement`); they change nothing in the training."""
    track_layers: bool = False
    """Measure it in each layer too."""
    track_domains: int | None = None
    """Domains that a measurement compares: by default those of a step, and 2 where a step has one batch."""
    checkpoint_every: int | None = None
    """Steps between checkpoints, in a run with a folder; by default at evaluations and every five minutes."""
    keep: int = 2
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
        for name in COUNTS:
            self._check_whole(name, 1)
        for name in ("workers", "seed"):
            self._check_whole(name, 0, 1000 if name == "workers" else 2**63 - 1)
        for name in ("lr", "clip"):
            value = getattr(self, name)
            number = isinstance(value, Real) and not isinstance(value, bool)
            if value is not None and not (number and value > 0):
                raise InputError(f"{name} must be positive, got {shown(value)}.")
            if value is not None and not value < 1e30:
                raise InputError(f"{name} must be finite and below 1e30, got {shown(value)}.")
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value in known):
                raise InputError(f"{name} must be {' or '.join(map(repr, known))}, got {shown(value)}.")
        for name in ("track_layers", "deterministic", "compile", "capture", "progress", "predictions"):
            value = getattr(self, name)
            also = {"capture": value is None, "progress": callable(value), "predictions": type(value) is str}
            if not (isinstance(value, bool) or also.get(name)):
                raise InputError(f"{name} must be True or False, got {shown(value)}.")
        check_callbacks(self.callbacks)
        self._check_makers()
        self._check_warm_start()
        if not isinstance(self.settings, Mapping):
            raise InputError(f"settings must map names to values, got {shown(self.settings)}.")
        if self.draw is not None:
            check_names("draw", [self.draw], get_args(Draw))
        if self.device is not None:
            named_device(self.device)
        splits = self.eval_splits
        if isinstance(splits, (str, bytes)) or not isinstance(splits, Collection):
            raise InputError(f"eval_splits must be a list of splits' names, got {shown(splits)}.")
        check_names("split", splits, get_args(Split))
        if self.metric is not None:
            metric(self.metric)
        if self.average_start is not None and self.average != "sma":
            raise InputError("average_start belongs to average='sma'.")
        if self.average_start is not None and self.average_start > self.steps:
            raise InputError(f"average_start={self.average_start} is after the last of {self.steps} steps.")
        if self.track_domains == 1:
            raise InputError("track_domains must be at least 2: gradients are compared in pairs.")
        if self.track_every is None and (self.track_layers or self.track_domains):
            raise InputError("track_layers and track_domains belong to track_every, such as track_every=50.")

    def _check_whole(self, name: str, least: int, most: int = 10**9) -> None:
        value = getattr(self, name)
        if value is None and Options.__dataclass_fields__[name].default is None:
            return
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        if not (whole and int(value) >= least):
            raise InputError(f"{name} must be a whole number of at least {least}, got {shown(value)}.")
        if int(value) > most:
            raise InputError(f"{name} must be at most {most:,}, got {shown(value)}.")
        object.__setattr__(self, name, int(value))  # numpy's cannot be written down

    def _check_makers(self) -> None:
        if isinstance(self.optimizer, Optimizer) or not (self.optimizer is None or callable(self.optimizer)):
            raise InputError(
                "optimizer must be a function from parameters to an optimizer, such as "
                "lambda params: torch.optim.SGD(params, lr=0.1)."
            )
        if self.lr is not None and self.optimizer is not None and not _is_class(self.optimizer):
            raise InputError(
                f"lr={self.lr} and an optimizer function, which sets the learning rate itself: give one of "
                "them, or the optimizer's class, such as optimizer=torch.optim.SGD."
            )
        if isinstance(self.schedule, LRScheduler) or not (self.schedule is None or callable(self.schedule)):
            raise InputError(
                "schedule must be a function from an optimizer to a scheduler, such as "
                "lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 1000)."
            )
        if not (self.loss is None or callable(self.loss)):
            raise InputError(f"loss must be a function of output and y, got {shown(self.loss)}.")

    def _check_warm_start(self) -> None:
        warm = self.warm_start
        share = isinstance(warm, float) and 0 < warm <= 1
        count = isinstance(warm, int) and not isinstance(warm, bool) and 1 <= warm <= 10**9
        if not (warm is None or share or count or (isinstance(warm, str) and warm == "plateau")):
            raise InputError(
                f"warm_start must be a number of steps (500), a share of the data (0.1) or 'plateau', "
                f"got {shown(warm)}."
            )

    @classmethod
    def checked(cls, **given: Any) -> Options:
        """Options from keywords; an unknown one is named together with the nearest."""
        check_names("option", given, [f.name for f in fields(cls)])
        if "steps" not in given:
            raise InputError("steps is missing: say how many steps to train, such as steps=1000.")
        return cls(**given)

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
        if self.average == "swad":
            return SWAD()
        if self.average == "sma":
            return SMA(self.average_start or max(1, self.steps // 10))
        return None

    @property
    def chosen_precision(self) -> Precision:
        launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        return self.precision or (launched if launched in HALF else "fp32")  # type: ignore[return-value]

    def warm_steps(self, examples: int) -> tuple[int, int]:
        """How many ERM steps to start with, and how many make one pass over the training examples."""
        one_pass = max(1, math.ceil(examples / self.batch_size))
        if self.warm_start == "plateau":
            return 100 * one_pass, one_pass
        if isinstance(self.warm_start, float):
            return max(1, round(self.warm_start * one_pass)), one_pass
        assert isinstance(self.warm_start, int)
        return self.warm_start, one_pass


def _is_class(maker: Any) -> bool:
    return isinstance(maker, type) and issubclass(maker, Optimizer)
