"""Training a pretrained model: learning rates that differ between its parts, and L2-SP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.errors import InputError
from shoal.models.features import find_head
from shoal.models.layers import depths
from shoal.options import FitOptions

OPTIONS = ("head_lr", "layer_decay", "l2_sp")
"""Those that need a head."""


def head_for(options: FitOptions, model: nn.Module, x: Any) -> nn.Module | None:
    """The head of ``model``, where an option needs it; ``x`` is a batch of inputs."""
    named = [name for name in OPTIONS if options.get(name) is not None]
    if not named:
        return None
    try:
        return find_head(model, x)
    except InputError as error:
        raise InputError(str(error), named[0]) from error


class Rates:
    """The learning rates of an optimizer's parameters: those of ``options`` for the parts of a model.

    Groups of the optimizer are split where their parameters differ in it, and keep their other settings.
    Schedulers multiply all rates alike.
    """

    def __init__(self, optimizer: Optimizer, options: FitOptions, model: nn.Module, head: nn.Module) -> None:
        if any("lr" not in group for group in optimizer.param_groups):
            raise InputError(
                "has groups of parameters without an 'lr', for head_lr and layer_decay.", "optimizer"
            )
        self.optimizer, self.base = optimizer, float(optimizer.param_groups[0]["lr"])
        levels, own = depths(model, head), set(head.parameters())
        groups: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            parts: dict[float, list[nn.Parameter]] = {}
            for p in group["params"]:
                rate = float(group["lr"]) * (options["layer_decay"] or 1.0) ** levels.get(p, 0)
                if options["head_lr"] is not None and p in own:
                    rate = options["head_lr"]
                parts.setdefault(rate, []).append(p)
            groups += [{**group, "params": params, "lr": rate} for rate, params in parts.items()]
        optimizer.param_groups = groups
        self.first = [group["lr"] for group in groups]

    @property
    def now(self) -> float:
        """The learning rate of what has none of its own."""
        return self.base * (float(self.optimizer.param_groups[0]["lr"]) / self.first[0])

    def check(self, schedule: LRScheduler | None) -> None:
        """Refuses a schedule that gives all parts the same learning rate."""
        now = [float(group["lr"]) for group in self.optimizer.param_groups]
        factors = [lr / first for lr, first in zip(now, self.first, strict=True)]
        if schedule is not None and not all(math.isclose(f, factors[0], rel_tol=1e-6) for f in factors):
            raise InputError(
                f"{type(schedule).__name__} sets learning rates itself, whatever head_lr and layer_decay "
                "say; use one that multiplies them, such as CosineAnnealingLR or LambdaLR.",
                "schedule",
            )


class L2SP(nn.Module):
    """The gradient of α/2 (‖θ − θ₀‖² + ‖w‖²), for what is pretrained, θ, and the weights w of the head.

    As in the authors' program only weights are penalized: parameters with two dimensions or more, not biases
    and not those of norms. θ₀ are the weights at the start of the training, after a warm start; they are
    buffers, and saved with the algorithm, of which this is a part.

    Reference: Li, Grandvalet and Davoine, Explicit Inductive Bias for Transfer Learning with Convolutional
    Networks, ICML 2018.
    """

    def __init__(self, model: nn.Module, head: nn.Module, alpha: float) -> None:
        super().__init__()
        self.alpha, self._head = alpha, set(head.parameters())
        self._weights = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
        for n, p in enumerate(self._weights):
            self.register_buffer(f"start_{n}", torch.zeros_like(p))
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """The weights are those to stay close to."""
        for p, start in zip(self._weights, self.buffers(), strict=True):
            if p not in self._head:
                start.copy_(p)

    def added(self, params: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> list[Tensor]:
        """To the gradients of ``params``, which stay as they are."""
        start = dict(zip(self._weights, self.buffers(), strict=True))
        pairs = zip(params, gradients, strict=True)
        return [g + self.alpha * (p.detach() - start[p]) if p in start else g for p, g in pairs]
