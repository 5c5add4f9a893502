"""PyTorch losses per example, for sample weights and for batches that are split into parts.

The mean that a PyTorch loss returns is Σ_i a_i / Σ_i c_i over the examples i. With class weights v, c_i is
v_y for the label y of example i; otherwise it is the number of terms of the example, such as outputs of a
regression. With sample weights w the loss is Σ_i w_i a_i / Σ_i w_i c_i.

>>> terms = find_terms(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])))
>>> terms.counts(torch.tensor([0, 1, 1]))
tensor([1., 3., 3.])
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[Any, Tensor], Tensor]
UNKNOWN_LOSS = (
    "{} a loss whose terms are known: a loss of torch, such as nn.CrossEntropyLoss(weight=…), or a "
    "functools.partial of one of torch.nn.functional, with its mean; not {}."
)
OF_CLASSES = (F.cross_entropy, F.nll_loss)
OF_NUMBERS = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss, F.poisson_nll_loss)
BINARY = (F.binary_cross_entropy_with_logits,)
PROBABILITIES = (F.binary_cross_entropy,)
FUNCTIONS = (*OF_CLASSES, *OF_NUMBERS, *BINARY, *PROBABILITIES)
MODULES = {nn.CrossEntropyLoss: F.cross_entropy, nn.NLLLoss: F.nll_loss, nn.MSELoss: F.mse_loss}
MODULES |= {nn.L1Loss: F.l1_loss, nn.SmoothL1Loss: F.smooth_l1_loss, nn.HuberLoss: F.huber_loss}
MODULES |= {nn.SoftMarginLoss: F.soft_margin_loss, nn.PoissonNLLLoss: F.poisson_nll_loss}
MODULES |= {nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits, nn.BCELoss: F.binary_cross_entropy}


@dataclass(frozen=True)
class Terms:
    """A PyTorch loss without its reduction: ``each(output, y)`` returns one number per term."""

    function: Callable[..., Tensor]
    """The corresponding function of ``torch.nn.functional``."""
    each: Loss
    class_weight: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether every example has the same weight in the mean, whatever its label."""
        return self.class_weight is None

    def sums(self, output: Any, y: Tensor) -> Tensor:
        """The sum of each example's terms, a_i, (B,)."""
        return self.each(output, y).reshape(len(y), -1).sum(1)

    def counts(self, y: Tensor) -> Tensor:
        """The weight of each example in the mean, c_i, (B,)."""
        if self.class_weight is not None and not y.is_floating_point():
            return self.class_weight.to(y.device)[y]
        terms = 1 if self.function in OF_CLASSES else y[:1].numel()
        return torch.full((len(y),), float(terms), device=y.device)

    def normalizer(self, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Σ_i w_i c_i."""
        counts = self.counts(y)
        return counts.sum() if weight is None else (counts * weight).sum()

    def mean(
        self, output: Any, y: Tensor, weight: Tensor | None = None, normalizer: Tensor | None = None
    ) -> Tensor:
        """Σ_i w_i a_i / Σ_i w_i c_i, or divided by ``normalizer``; 0 if every weight is zero."""
        sums = self.sums(output, y)
        total = (sums if weight is None else sums * weight.to(sums.dtype)).sum()
        by = self.normalizer(y, weight) if normalizer is None else normalizer
        return total / by.to(sums.dtype).clamp(min=torch.finfo(sums.dtype).tiny)


def find_terms(loss: Any) -> Terms | None:
    """The terms of a PyTorch loss, or of a ``functools.partial`` of one; ``None`` for any other loss."""
    if isinstance(loss, nn.Module):
        function, keywords = MODULES.get(type(loss)), vars(loss) | dict(loss.named_buffers())
        each: Any = copy.copy(loss)
        each.reduction = "none"
    else:
        function = loss.func if isinstance(loss, functools.partial) and not loss.args else loss
        keywords = dict(getattr(loss, "keywords", {}))
        each = functools.partial(loss, reduction="none")
    other_mean = keywords.get("reduction", "mean") != "mean" or {"size_average", "reduce"} & set(keywords)
    ignores = keywords.get("ignore_index", -100) != -100  # torch's default, which is no label here
    if function is None or function not in FUNCTIONS or other_mean or ignores:
        return None
    return Terms(function, each, keywords.get("weight") if function in OF_CLASSES else None)


def shown_loss(loss: Any) -> str:
    """The name of a loss in a message."""
    if isinstance(loss, functools.partial):
        return f"a partial of {shown_loss(loss.func)}"
    return getattr(loss, "__name__", None) or f"a {type(loss).__name__}"
