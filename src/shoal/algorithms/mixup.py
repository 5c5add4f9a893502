"""Inter-domain Mixup: training on weighted averages of examples from two domains."""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise
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
from shoal.data.batch import Task, cut, pool, tensors_in
from shoal.errors import InputError
from shoal.models import FeatureExtractor, FeatureModel
from shoal.models.calling import arguments
from shoal.penalties import Blocks, mixup, mixup_shares
from shoal.settings import Range, log10


class Mixup(Algorithm):
    """Mix the examples of each domain with those of another, λ x_i + (1 − λ) x_j, and their losses alike.

    The S batches of a step, in random order, are paired cyclically, each with the next; λ is sampled for
    every pair from Beta(α, α): :func:`shoal.penalties.mixup`.

    Args:
        alpha: parameter α of the Beta distribution; small values mix little.
        where: ``"input"``, or ``"features"`` where inputs cannot be mixed themselves, such as token ids:
            what a :class:`~shoal.models.FeatureModel` has between its parts, or what enters the last linear
            layer of any other model, whose outputs are then mixed: W(λ z_i + (1 − λ) z_j) + b is the same
            average of W z_i + b and W z_j + b.

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
        self.alpha = alpha
        self.where = where

    def check_input(self, x: Any) -> None:
        if self.where == "features" and not isinstance(self.model, FeatureModel):
            with FeatureExtractor(self.model) as extractor:
                args, kwargs = arguments(self.model, x)
                if not extractor.find(*args, **kwargs).is_output:
                    raise InputError(
                        "where='features' needs a model whose output is that of its last linear layer, and "
                        f"{extractor.layer!r} is followed by something else; or a shoal.models.FeatureModel."
                    )
        if self.where == "input" and not all(
            t.is_floating_point() or t.dtype == torch.uint8 for t in tensors_in(x)
        ):
            raise InputError(
                "Mixup mixes inputs, and these hold whole numbers (token ids?), which have nothing between "
                "them: mix features instead (where='features'), or train with 'fish'."
            )

    def gradient(self, batches: Batches, engine: Engine) -> Gradients:
        shares = engine.agree(mixup_shares(len(batches), self.alpha, engine.params[0].device))
        return engine.gradients(
            self,
            batches,
            forward=partial(self.forward_mixed, shares),
            objective=partial(self.mixed_loss, shares),
        )

    def forward_mixed(self, shares: Tensor, batches: Batches) -> list[DomainOutput]:
        """One output per pair, with the targets of both."""
        model: Any = self.model
        in_two_parts = isinstance(model, FeatureModel)
        if self.where == "features" and in_two_parts:
            with self.autocast():
                batches = [b._replace(x=model.features(b.x)) for b in batches]
        elif self.where == "features":
            batches = [b._replace(x=self(b.x)) for b in batches]
        else:
            self.check_input(batches[0].x)
        sizes = [len(b.y) for b in batches]
        whole = pool(batches)
        x, y, y_other, _ = mixup(whole.x, whole.y, Blocks(sizes), shares=shares)
        pairs = zip(sizes, [*sizes[1:], sizes[0]], strict=True)
        ends = pairwise(accumulate((min(pair) for pair in pairs), initial=0))
        outputs = []
        for batch, (start, end) in zip(batches, ends, strict=True):
            span = slice(start, end)
            mixed = cut(x, span)
            if self.where == "features" and in_two_parts:
                with self.autocast():
                    output = full_precision(model.head(mixed))
            else:
                output = mixed if self.where == "features" else self(mixed)
            outputs.append(DomainOutput(output, y[span], batch.domain, y_other[span]))
        return outputs

    def mixed_loss(self, shares: Tensor, outputs: Outputs) -> tuple[Tensor, Log]:
        found = []
        for share, each in zip(shares, outputs, strict=True):
            own, others = self.loss(each.output, each.y), self.loss(each.output, each.features)
            found.append(torch.lerp(others, own, share.to(own.dtype)))
        losses = torch.stack(found)
        return losses.mean(), {"losses": losses.detach()}
