"""DANN: features from which the domain cannot be predicted."""

from __future__ import annotations

from functools import partial
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.algorithms.base import Algorithm, Batches, Engine, Gradients, Log, Loss, Outputs, check_state
from shoal.algorithms.penalty import (
    PASSES,
    BatchNorm,
    PenaltyWeight,
    Steps,
    blocks,
    pooled_features,
    pooled_targets,
)
from shoal.data.batch import Task
from shoal.gradients import gradient
from shoal.penalties import Blocks, DomainDiscriminator
from shoal.settings import Range, choice, log2, log10


class DANN(Algorithm):
    """Trains a discriminator to predict the domain from the features, and the model to increase its loss.

        discriminator   min  CE(a(features), domain) + penalty · ‖∂CE/∂features‖²
        model           min  1/S Σ_i L_i − λ CE(a(features), domain)

    Both move in every step, the discriminator first, on the same features.

    Args:
        weight: λ.
        start, ramp: λ is 0 for ``start`` steps and then rises linearly for ``ramp`` steps.
        discriminator_steps: the discriminator's for each of the model's.
        gradient_penalty: keeps the discriminator smooth.
        discriminator_lr, beta1: of the discriminator's own Adam.
        width, depth: of the discriminator, a :class:`shoal.penalties.DomainDiscriminator`.
        batch_norm: whether BatchNorm takes its statistics over the domains pooled or per domain, see
            :mod:`shoal.penalties`.

    Reference: Ganin et al., Domain-Adversarial Training of Neural Networks, JMLR 2016.
    """

    family = "adversarial"
    reference = "Ganin et al. 2016"
    compares_domains = True
    knows_domains = True
    needs_features = True
    trains_discriminator = True
    capturable = True
    conditional: ClassVar[bool] = False
    """The discriminator also gets the class."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        task: Task,
        *,
        weight: Annotated[float, Range(0, search=log10(-2, 2))] = 1.0,
        start: Steps = 0,
        ramp: Steps = 0,
        discriminator_steps: Annotated[int, Range(1, 100, search=log2(0, 3))] = 1,
        gradient_penalty: Annotated[float, Range(0, search=log10(-2, 1))] = 0.0,
        discriminator_lr: Annotated[float, Range(above=0, most=1e6, search=log10(-4.5, -2.5))] = 1e-3,
        beta1: Annotated[float, Range(0, below=1, search=choice(0.0, 0.5))] = 0.5,
        width: Annotated[int, Range(1, 2**14)] = 256,
        depth: Annotated[int, Range(1, 100)] = 3,
        batch_norm: BatchNorm = "pooled",
        features: str | None = None,
    ) -> None:
        super().__init__(model, loss, task, features=features)
        self.passes = PASSES[batch_norm]
        assert task.features is not None
        self.weight = PenaltyWeight(weight, start, ramp, steps=task.steps)
        self.discriminator_steps, self.gradient_penalty = discriminator_steps, gradient_penalty
        self.discriminator_lr, self.beta1 = discriminator_lr, beta1
        last = width if depth > 1 else task.features
        check_state(type(self).__name__, task.domains, last, "an output of the discriminator")
        classes = task.classes if self.conditional else None
        example = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
        self.discriminator = DomainDiscriminator(
            task.features, task.domains, width=width, depth=depth, classes=classes
        ).to(example.dtype)

    def auxiliary_optimizers(self) -> dict[str, Optimizer]:
        parameters, betas = self.discriminator.parameters(), (self.beta1, 0.9)
        return {"discriminator": torch.optim.Adam(parameters, lr=self.discriminator_lr, betas=betas)}

    def gradient(self, batches: Batches, engine: Engine) -> Gradients:
        return engine.gradients(self, batches, objective=partial(self.train_discriminator, engine))

    def train_discriminator(self, engine: Engine, outputs: Outputs) -> tuple[Tensor, Log]:
        """The discriminator's steps, and then the objective."""
        features, domain, y = self.discriminator_input(outputs)
        features = features.detach()
        for _ in range(self.discriminator_steps):
            loss = self.discriminator.loss(features, domain, y)
            if self.gradient_penalty:
                penalty = self.discriminator.gradient_penalty(features, domain, y)
                loss = loss + self.gradient_penalty * penalty
            engine.apply(gradient(loss, list(self.discriminator.parameters())), auxiliary="discriminator")
        return self.objective(outputs)

    def objective(self, outputs: Outputs) -> tuple[Tensor, Log]:
        losses, loss = self.losses(outputs), self.discriminator.loss(*self.discriminator_input(outputs))
        total = losses.mean() - self.weight.next().to(loss.dtype) * loss
        return total, {"losses": losses.detach(), "discriminator": loss.detach()}

    def discriminator_input(self, outputs: Outputs) -> tuple[Tensor, Blocks, Tensor | None]:
        """The features, their domains and, where it gets them, the classes."""
        y = pooled_targets(outputs) if self.conditional else None
        return pooled_features(outputs), blocks(outputs, self.ids(outputs)), y
