"""Training a pretrained model: learning rates that differ between its parts, and L2-SP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import InputError
from shoal.models.features import find_head
from shoal.models.layers import depths
from shoal.options import FitOptions


def head_for(options: FitOptions, model: nn.Module, x: Any) -> nn.Module | None:
    """The head of ``model``, where an option needs it; ``x`` is a batch of inputs."""
    named = [name for name in ("head_lr", "layer_decay", "l2_sp") if options.get(name) is not None]
    if not named:
        return None
    try:
        return find_head(model, x)
    except InputError as error:
        raise InputError(str(error), named[0]) from error


def scale_rates(optimizer: Optimizer, options: FitOptions, model: nn.Module, head: nn.Module) -> None:
    """Gives the parts of a model the learning rates of ``head_lr`` and ``layer_decay``.

    Groups of the optimizer are split where their parameters differ in it; ``lr_scale`` is by how much.
    Schedulers must multiply all rates alike.
    """
    levels, own, groups = depths(model, head), set(head.parameters()), list[dict[str, Any]]()
    for group in optimizer.param_groups:
        parts: dict[float, list[nn.Parameter]] = {}
        for p in group["params"]:
            rate = float(group["lr"]) * (options["layer_decay"] or 1.0) ** levels.get(p, 0)
            if options["head_lr"] is not None and p in own:
                rate = options["head_lr"]
            parts.setdefault(rate, []).append(p)
        for rate, params in parts.items():
            groups.append({**group, "params": params, "lr": rate, "lr_scale": rate / float(group["lr"])})
    optimizer.param_groups = groups


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
        self.record_start()

    @torch.no_grad()
    def record_start(self) -> None:
        """The weights are those to stay close to."""
        for p, start in zip(self._weights, self.buffers(), strict=True):
            if p not in self._head:
                start.copy_(p)

    def added(self, params: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> list[Tensor]:
        """To the gradients of ``params``, which stay as they are."""
        start = dict(zip(self._weights, self.buffers(), strict=True))
        pairs = zip(params, gradients, strict=True)
        return [g + self.alpha * (p.detach() - start[p]) if p in start else g for p, g in pairs]
