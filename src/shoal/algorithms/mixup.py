"""Inter-domain Mixup: training on weighted averages of examples from two domains."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from shoal.algorithms.base import (
    Algorithm,
    Batches,
    DomainOutput,
    Engine,
    Gradients,
    Log,
    Loss,
    Outputs,
    full_precision,
)
from shoal.data.batch import Task, tensors_in, widest
from shoal.errors import InputError
from shoal.models import FeatureModel
from shoal.settings import Range, log10


class Mixup(Algorithm):
    """Mixes each domain's examples with another's, λ x_i + (1 − λ) x_j, and their losses alike.

    The S batches of a step, which come in random order, are paired round a circle, each with the next; λ is
    drawn for every pair from Beta(α, α).

    Args:
        alpha: of the Beta distribution; small values mix little.
        where: ``"input"``, or ``"features"`` to mix what a :class:`~shoal.models.FeatureModel` makes of
            inputs that cannot be mixed themselves, such as token ids.

    Reference: Xu et al., Adversarial Domain Adaptation with Domain Mixup, AAAI 2020; Zhang et al., mixup:
    Beyond Empirical Risk Minimization, ICLR 2018; Verma et al., Manifold Mixup, ICML 2019 (for features).
    """

    family = "augmentation"
    reference = "Xu et al. 2020"
    additive = True
    sample_weights = False
    passes = "apart"
    compares_domains = True
    draws_numbers = True
    capturable = True

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        task: Task,
        *,
        alpha: Annotated[float, Range(above=0, search=log10(-1, 1))] = 0.2,
        where: Literal["input", "features"] = "input",
    ) -> None:
        super().__init__(model, loss, task)
        if where == "features" and not isinstance(model, FeatureModel):
            raise InputError(
                "where='features' needs a shoal.models.FeatureModel(features, head), your model in two "
                f"parts, not a {type(model).__name__}."
            )
        self.alpha = alpha
        self.where = where

    def check_input(self, x: Any) -> None:
        if self.where == "input" and not all(t.is_floating_point() for t in tensors_in(x)):
            raise InputError(
                "Mixup mixes inputs, and these hold whole numbers (token ids?), which have nothing between "
                "them: mix features instead (where='features', with a FeatureModel), or train with 'fish'."
            )

    def gradient(self, batches: Batches, engine: Engine) -> Gradients:
        shares = engine.agree(self.shares(len(batches), engine.params[0].device))
        return engine.gradients(
            self,
            batches,
            forward=partial(self.forward_mixed, shares),
            objective=partial(self.mixed_loss, shares),
        )

    def shares(self, count: int, device: torch.device) -> Tensor:
        """Draws from Beta(α, α), as X/(X + Y) of two from Gamma(α), by their logarithms: those of a small α
        are often below what a number can hold. A Gamma(α) is a Gamma(α + 1) times U^(1/α).
        """
        alphas = torch.full((count, 2), self.alpha, dtype=widest(device), device=device)
        logs = torch._standard_gamma(alphas + 1).log() + torch.rand_like(alphas).log() / alphas
        return torch.sigmoid(logs[:, 0] - logs[:, 1])

    def forward_mixed(self, shares: Tensor, batches: Batches) -> list[DomainOutput]:
        """One output per pair, with the targets of both."""
        model: Any = self.model
        if self.where == "features":
            with self.autocast():
                found = [model.features(b.x) for b in batches]
        else:
            self.check_input(batches[0].x)
            found = [b.x for b in batches]
        outputs = []
        for place, batch in enumerate(batches):
            other = (place + 1) % len(batches)
            size = min(len(batch.y), len(batches[other].y))
            mixed = _mix(found[place], found[other], shares[place], size)
            if self.where == "features":
                with self.autocast():
                    output = full_precision(model.head(mixed))
            else:
                output = self(mixed)
            outputs.append(DomainOutput(output, batch.y[:size], batch.domain, batches[other].y[:size]))
        return outputs

    def mixed_loss(self, shares: Tensor, outputs: Outputs) -> tuple[Tensor, Log]:
        found = []
        for share, each in zip(shares, outputs, strict=True):
            own, others = self.loss(each.output, each.y), self.loss(each.output, each.features)
            found.append(torch.lerp(others, own, share.to(own.dtype)))
        losses = torch.stack(found)
        return losses.mean(), {"losses": losses.detach()}


def _mix(a: Any, b: Any, share: Tensor, size: int) -> Any:
    if isinstance(a, Tensor):
        return torch.lerp(b[:size], a[:size], share.to(a.dtype))
    if isinstance(a, Mapping):
        return type(a)({k: _mix(a[k], b[k], share, size) for k in a})  # type: ignore[call-arg]
    if isinstance(a, tuple) and hasattr(a, "_fields"):
        return type(a)(*(_mix(x, y, share, size) for x, y in zip(a, b, strict=True)))
    return type(a)(_mix(x, y, share, size) for x, y in zip(a, b, strict=True))
