"""DANN: features from which the domain cannot be predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.algorithms.base import (
    Algorithm,
    Batches,
    DomainBed,
    Engine,
    Gradients,
    Log,
    Loss,
    Outputs,
    check_state,
)
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

RATE = Range(above=0, most=1e6, search=log10(-4.5, -2.5), large=(5e-5, log10(-5, -3.5)))


class DANN(Algorithm):
    """Train a discriminator to predict the domain from the features, and the model to increase its loss.

        discriminator   min  D + p · mean ‖∂CE/∂z‖²,    D = mean CE(a(z), domain), z the features
        model           min  1/S Σ_i L_i − λ D

    Args:
        weight: weight λ of the discriminator loss.
        start: number of steps for which λ is 0.
        ramp: number of steps over which λ then rises linearly.
        form: ``"joint"`` updates both in every step, the discriminator first, on the same features;
            ``"domainbed"`` is the rule of DomainBed: of 1 + ``discriminator_steps`` steps the last updates
            the model and the others the discriminator (the first round is one step short), and the model
            ascends the gradient penalty too, minimising 1/S Σ_i L_i − λ(D + p · mean ‖∂CE/∂z‖²).
        discriminator_steps: number of discriminator steps per model step.
        gradient_penalty: weight p of the gradient penalty of the discriminator.
        discriminator_lr: learning rate of the Adam optimizer of the discriminator.
        discriminator_weight_decay: its weight decay.
        beta1: its β₁; β₂ is 0.9.
        width: width of the discriminator, a :class:`shoal.penalties.DomainDiscriminator`.
        depth: its depth.
        dropout: its dropout rate.
        batch_norm: whether BatchNorm statistics are computed over all domains or per domain, see
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
        form: Literal["joint", "domainbed"] = "joint",
        discriminator_steps: Annotated[int, Range(1, 100, search=log2(0, 3))] = 1,
        gradient_penalty: Annotated[float, Range(0, search=log10(-2, 1))] = 0.0,
        discriminator_lr: Annotated[float, RATE] = 1e-3,
        discriminator_weight_decay: Annotated[float, Range(0, 1e6, search=log10(-6, -2))] = 0.0,
        beta1: Annotated[float, Range(0, below=1, search=choice(0.0, 0.5))] = 0.5,
        width: Annotated[int, Range(1, 2**14, search=log2(6, 10))] = 256,
        depth: Annotated[int, Range(1, 100, search=choice(3, 4, 5))] = 3,
        dropout: Annotated[float, Range(0, below=1, search=choice(0.0, 0.1, 0.5))] = 0.0,
        batch_norm: BatchNorm = "pooled",
        features: str | None = None,
    ) -> None:
        super().__init__(model, loss, task, features=features)
        self.passes = PASSES[batch_norm]
        assert task.features is not None
        self.weight = PenaltyWeight(weight, start, ramp, steps=task.steps)
        self.alternates = form == "domainbed"
        self.capturable = not self.alternates  # type: ignore[misc]
        self.discriminator_steps, self.gradient_penalty = discriminator_steps, gradient_penalty
        self.dropout = dropout
        self.adam: dict[str, Any] = {
            "lr": discriminator_lr,
            "weight_decay": discriminator_weight_decay,
            "betas": (beta1, 0.9),
        }
        last = width if depth > 1 else task.features
        check_state(type(self).__name__, task.domains, last, "an output of the discriminator")
        classes = task.classes if self.conditional else None
        example = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
        self.discriminator = DomainDiscriminator(
            task.features, task.domains, width=width, depth=depth, dropout=dropout, classes=classes
        ).to(example.dtype)

    @classmethod
    def domainbed(cls, settings: Mapping[str, Any]) -> DomainBed:
        """Its rule, and β₁ and β₂ of the discriminator for the model too."""
        return DomainBed({**settings, "form": "domainbed"}, {"betas": [settings["beta1"], 0.9]})

    def auxiliary_optimizers(self) -> dict[str, Optimizer]:
        return {"discriminator": torch.optim.Adam(self.discriminator.parameters(), **self.adam)}

    def step(self, batches: Batches, engine: Engine) -> Log:
        if self.moves_model():
            return super().step(batches, engine)
        log = engine.gradients(self, batches, objective=partial(self.leave_model, engine))[1]
        return {**log, "norms": log["losses"].new_zeros(1)}  # of what moved the model: nothing

    def moves_model(self) -> bool:
        """Whether this step does."""
        steps = self.discriminator_steps
        return not self.alternates or (int(self.weight.count) + 1) % (1 + steps) == steps

    def gradient(self, batches: Batches, engine: Engine) -> Gradients:
        both = None if self.alternates else partial(self.move_both, engine)
        return engine.gradients(self, batches, objective=both)

    def move_both(self, engine: Engine, outputs: Outputs) -> tuple[Tensor, Log]:
        for _ in range(self.discriminator_steps):
            self.train_discriminator(engine, outputs)
        return self.objective(outputs)

    def leave_model(self, engine: Engine, outputs: Outputs) -> tuple[Tensor, Log]:
        """A step of the discriminator alone; the model has nothing to minimise."""
        self.weight.next()
        loss, losses = self.train_discriminator(engine, outputs), self.losses(outputs)
        return 0 * engine.params[0].sum(), {"losses": losses.detach(), "discriminator": loss.detach()}

    def train_discriminator(self, engine: Engine, outputs: Outputs) -> Tensor:
        """One step of the discriminator; its loss before."""
        features, domain, y = self.discriminator_input(outputs)
        loss = self.discriminator_loss(features.detach(), domain, y, self.gradient_penalty)
        found: Sequence[Tensor] = gradient(loss, list(self.discriminator.parameters()))
        if self.dropout:  # processes draw different masks
            found = engine.average(found)
        engine.apply(found, auxiliary="discriminator")
        return loss

    def objective(self, outputs: Outputs) -> tuple[Tensor, Log]:
        penalty = self.gradient_penalty if self.alternates else 0.0
        losses, loss = (
            self.losses(outputs),
            self.discriminator_loss(*self.discriminator_input(outputs), penalty),
        )
        total = losses.mean() - self.weight.next().to(loss.dtype) * loss
        return total, {"losses": losses.detach(), "discriminator": loss.detach()}

    def discriminator_loss(
        self, features: Tensor, domain: Blocks, y: Tensor | None, penalty: float
    ) -> Tensor:
        if y is None or not self.alternates:
            return self.discriminator.loss(features, domain, y, gradient_penalty=penalty)
        # DomainBed divides by the largest label in the batch plus one, not by the number of classes in it.
        share = len(y.unique()) / (y.max() + 1).to(features.dtype)
        return share * self.discriminator.loss(features, domain, y, gradient_penalty=penalty / share)

    def discriminator_input(self, outputs: Outputs) -> tuple[Tensor, Blocks, Tensor | None]:
        """The features, their domains and, where it gets them, the classes."""
        y = pooled_targets(outputs) if self.conditional else None
        return pooled_features(outputs), blocks(outputs, self.ids(outputs)), y
