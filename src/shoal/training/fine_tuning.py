"""Training a pretrained model: learning rates that differ between its parts."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.errors import InputError
from shoal.models.head import find_head
from shoal.models.layers import find_layers
from shoal.training.options import Options

OPTIONS = ("head_lr", "layer_decay")
"""Those that need a head."""


def head_for(options: Options, model: nn.Module, x: Any) -> nn.Module | None:
    """The head of ``model``, where an option needs it; ``x`` is a batch of inputs."""
    named = [name for name in OPTIONS if getattr(options, name) is not None]
    if not named:
        return None
    try:
        return find_head(model, x)
    except InputError as error:
        raise InputError(f"{named[0]}={getattr(options, named[0])}: {error}") from error


class Rates:
    """The learning rates of an optimizer's parameters: those of ``options`` for the parts of a model.

    Each group of the optimizer is split where its parameters are to have different learning rates, and keeps
    its other settings. Schedulers multiply them all alike.
    """

    def __init__(self, optimizer: Optimizer, options: Options, model: nn.Module, head: nn.Module) -> None:
        self.optimizer = optimizer
        self.base = _rate(optimizer.param_groups[0])
        depths, own = find_layers(model, head).depths(model, head), set(head.parameters())

        def rate(p: nn.Parameter, usual: float) -> float:
            if options.head_lr is not None and p in own:
                return options.head_lr
            return usual * (options.layer_decay or 1.0) ** depths.get(p, 0)

        groups: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            parts: dict[float, list[nn.Parameter]] = {}
            for p in group["params"]:
                parts.setdefault(rate(p, _rate(group)), []).append(p)
            groups += [{**group, "params": params, "lr": lr} for lr, params in parts.items()]
        optimizer.param_groups = groups
        self.first = [_rate(group) for group in groups]

    @property
    def now(self) -> float:
        """The learning rate of what has none of its own."""
        return self.base * (_rate(self.optimizer.param_groups[0]) / self.first[0])

    def check(self, schedule: LRScheduler | None) -> None:
        """Refuses a schedule that gives all parts the same learning rate."""
        factors = [_rate(g) / lr for g, lr in zip(self.optimizer.param_groups, self.first, strict=True)]
        if schedule is not None and not all(math.isclose(f, factors[0], rel_tol=1e-6) for f in factors):
            raise InputError(
                f"schedule: {type(schedule).__name__} sets learning rates itself, whatever head_lr and "
                "layer_decay say; use one that multiplies them, such as CosineAnnealingLR or LambdaLR."
            )


def _rate(group: dict[str, Any]) -> float:
    if "lr" not in group:
        raise InputError("head_lr and layer_decay need an optimizer whose groups of parameters have an 'lr'.")
    return float(group["lr"])
