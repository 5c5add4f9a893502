"""Inter-domain Mixup: training on weighted averages of examples from two domains."""

from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from shoal.algorithms.base import Algorithm, Engine, Gradient, Log, Outputs, Step
from shoal.data.batch import MetaBatch, tensors_in
from shoal.errors import InputError
from shoal.models.calling import arguments
from shoal.models.feature_model import FeatureModel
from shoal.models.features import FeatureExtractor
from shoal.penalties import mixup, mixup_shares
from shoal.settings import Range, log10


class Mixup(Algorithm):
    """Mix the examples of each domain with those of another, λ x_i + (1 − λ) x_j, and their losses alike.

    The S batches of a step, in random order, are paired cyclically: :func:`shoal.penalties.mixup`. Each pair
    has a forward pass of its own.

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
    sample_weights = False
    per_domain = True
    min_domains = 2
    alpha: Annotated[float, Range(above=0, search=log10(-1, 1))] = 0.2
    where: Literal["input", "features"] = "input"

    def check_input(self, x: Any) -> None:
        if self.where == "features" and not isinstance(self.model, FeatureModel):
            with FeatureExtractor(self.model) as extractor:
                args, kwargs = arguments(self.model, x)
                if not extractor.find(*args, **kwargs).is_output:
                    raise InputError(
                        "where='features' needs a model whose output is that of its last linear layer, and "
                        f"{extractor.layer!r} is followed by something else; or a shoal.models.FeatureModel."
                    )
        numbers = all(t.is_floating_point() or t.dtype == torch.uint8 for t in tensors_in(x))
        if self.where == "input" and not numbers:
            raise InputError(
                "Mixup mixes inputs, and these hold whole numbers (token ids?), which have nothing between "
                "them: mix features instead (where='features'), or train with 'fish'."
            )

    def gradient(self, batch: MetaBatch, engine: Engine, step: Step) -> tuple[Gradient, Log]:
        shares = engine.broadcast(mixup_shares(len(batch.sizes), self.alpha, engine.params[0].device))
        forward, objective = partial(self.forward_mixed, engine, shares), partial(self.mixed_loss, shares)
        return engine.mean_gradient(batch, objective, forward)

    def forward_mixed(self, engine: Engine, shares: Tensor, batch: MetaBatch) -> Outputs:
        """One output per pair, with the other targets in the place of features."""
        model: Any = self.model
        parts = self.where == "features" and isinstance(model, FeatureModel)
        if self.where == "features":
            batch = replace(batch, x=engine.forward(batch, model.features if parts else None).output)
        x, y, y_other, _ = mixup(batch.x, batch.y, batch.blocks, shares=shares)
        pairs = zip(batch.sizes, [*batch.sizes[1:], batch.sizes[0]], strict=True)
        mixed = MetaBatch(x, y, batch.domain[: len(y)], tuple(min(pair) for pair in pairs))
        if self.where == "features" and not parts:  # outputs, which are linear in the features
            return Outputs(x, y_other, mixed)
        return Outputs(engine.forward(mixed, model.head if parts else None).output, y_other, mixed)

    def mixed_loss(self, shares: Tensor, out: Outputs) -> tuple[Tensor, Log]:
        found = []
        for share, each in zip(shares, out.split(), strict=True):
            own, other = self.loss(each.output, each.y), self.loss(each.output, each.features)
            found.append(torch.lerp(other, own, share.to(own.dtype)))
        losses = torch.stack(found)
        return losses.mean(), {"losses": losses.detach()}
