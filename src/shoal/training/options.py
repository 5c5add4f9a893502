"""What the options of a training (:mod:`shoal.options`) mean: optimizer and schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from typing_extensions import Unpack

from shoal.errors import InputError, shown
from shoal.options import FitOptions, declared, with_defaults
from shoal.settings import coerce
from shoal.training.averaging import make_average
from shoal.training.callbacks import Callback
from shoal.training.metrics import metric

OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
LR = 1e-3
"""Default learning rate of an optimizer that is given by name."""
SPLITS = ("train", "id_validation", "validation", "id_test", "test", "oracle")
"""Splits that are evaluated, of those in the data."""


def complete(**options: Unpack[FitOptions]) -> FitOptions:
    """The options of a training, checked and with their defaults."""
    known = declared(FitOptions)
    checked = {name: coerce(known[name].type, value, name) for name, value in options.items()}
    full = cast(FitOptions, with_defaults(checked, FitOptions))
    if full["lr"] is not None and callable(full["optimizer"]) and not isinstance(full["optimizer"], type):
        raise InputError(
            f"{full['lr']} and an optimizer function, which sets the learning rate itself; give one of them, "
            "or the optimizer's class, such as torch.optim.SGD.",
            "lr",
        )
    if full["metric"] is not None:
        metric(full["metric"])
    for callback in full["callbacks"]:
        if not isinstance(callback, Callback):
            raise InputError(f"must be instances of shoal.Callback, got {shown(callback)}.", "callbacks")
    make_average(full["average"], full["steps"])
    return full


def make_optimizer(options: FitOptions, parameters: list[nn.Parameter]) -> Optimizer:
    if not parameters:
        raise InputError("the model has no parameter that requires a gradient: nothing to train.")
    optimizer, arguments = options["optimizer"], dict(options["optimizer_options"])
    if options["lr"] is not None:
        arguments["lr"] = options["lr"]
    if isinstance(optimizer, str):
        optimizer, arguments = OPTIMIZERS[optimizer], {"lr": LR, **arguments}
    try:
        made = optimizer(parameters, **arguments)
    except (TypeError, ValueError) as error:  # torch's own words for a negative momentum and the like
        raise InputError(f"invalid options of the optimizer: {error}") from error
    if not isinstance(made, Optimizer):
        raise InputError(f"must return a torch optimizer, got {type(made).__name__}.", "optimizer")
    given = set(parameters)
    for group in made.param_groups:
        if not given.issuperset(group["params"]):
            raise InputError("must train the parameters that it is given, and no others.", "optimizer")
        if not learning_rate(group) > 0:  # NaN too
            raise InputError(f"the learning rate must be positive, got lr={group['lr']}.")
    return made


def learning_rate(group: Mapping[str, Any]) -> float:
    """That of a group of an optimizer's parameters, without what is scaled for its layer; 1 without any."""
    return float(group.get("lr", 1.0)) / float(group.get("lr_scale", 1.0))


def make_schedule(options: FitOptions, optimizer: Optimizer) -> LRScheduler | None:
    schedule = options["schedule"]
    if schedule is None or schedule == "constant":
        return None
    if isinstance(schedule, str):
        return LambdaLR(optimizer, partial(schedule_factor, schedule, options["steps"]))
    made = schedule(optimizer)
    if not isinstance(made, LRScheduler) or isinstance(made, ReduceLROnPlateau):
        got = f"which is stepped after every step and needs no metric; got {type(made).__name__}"
        raise InputError(f"must return a torch scheduler, {got}.", "schedule")
    return made


def schedule_factor(schedule: str, steps: int, step: int) -> float:
    """By what a schedule multiplies the learning rate at ``step``, counted from 0."""
    factor = 1.0
    for part in schedule.split(","):
        kind, *numbers = part.split(":")
        if kind == "warmup":
            factor *= min(1.0, (step + 1) / int(numbers[0]))
        elif kind == "step":
            factor *= float(numbers[0]) ** (step // int(numbers[1]))
        elif kind == "cosine":
            factor *= (1 + math.cos(math.pi * step / steps)) / 2
        elif kind == "linear":
            factor *= 1 - step / steps
    return factor


def uses_swad(options: FitOptions) -> bool:
    """Whether weights are averaged by the validation loss."""
    return (options["average"] or "").startswith("swad")


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it; of functions and objects, their names."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    return getattr(value, "__qualname__", None) or type(value).__qualname__
