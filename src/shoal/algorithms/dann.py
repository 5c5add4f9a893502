"""DANN: features from which the domain cannot be predicted."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.algorithms.base import Algorithm, DomainBed, Engine, Gradient, Log, Outputs, Step
from shoal.algorithms.penalty import BatchNorm, Schedule, Steps
from shoal.data.batch import MetaBatch
from shoal.errors import InputError
from shoal.gradients import gradient
from shoal.penalties import DomainDiscriminator
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
        form: ``"joint"`` updates both in every step, the discriminator first, on the same features; by the
            rule of DomainBed, ``"domainbed"``, of 1 + ``discriminator_steps`` steps the last updates the
            model and the others the discriminator, and the model ascends the gradient penalty too.
        discriminator_steps: number of discriminator steps per model step.
        gradient_penalty: weight p of the gradient penalty of the discriminator.
        discriminator_lr: learning rate of the Adam optimizer of the discriminator.
        discriminator_weight_decay: its weight decay.
        beta1: its β₁; β₂ is 0.9.
        width: width of the discriminator, a :class:`shoal.penalties.DomainDiscriminator`.
        depth: its depth.
        dropout: its dropout rate.
        batch_norm: BatchNorm statistics over all domains or per domain (see :mod:`shoal.penalties`).

    Reference: Ganin et al., Domain-Adversarial Training of Neural Networks, JMLR 2016.
    """

    family = "adversarial"
    reference = "Ganin et al. 2016"
    min_domains = 2
    needs_features = True
    weight: Annotated[float, Range(0, search=log10(-2, 2))] = 1.0
    start: Steps = 0
    ramp: Steps = 0
    form: Literal["joint", "domainbed"] = "joint"
    discriminator_steps: Annotated[int, Range(1, 100, search=log2(0, 3))] = 1
    gradient_penalty: Annotated[float, Range(0, search=log10(-2, 1))] = 0.0
    discriminator_lr: Annotated[float, RATE] = 1e-3
    discriminator_weight_decay: Annotated[float, Range(0, 1e6, search=log10(-6, -2))] = 0.0
    beta1: Annotated[float, Range(0, below=1, search=choice(0.0, 0.5))] = 0.5
    width: Annotated[int, Range(1, 2**14, search=log2(6, 10))] = 256
    depth: Annotated[int, Range(1, 100, search=choice(3, 4, 5))] = 3
    dropout: Annotated[float, Range(0, below=1, search=choice(0.0, 0.1, 0.5))] = 0.0
    batch_norm: BatchNorm = "pooled"
    conditional: ClassVar[bool] = False
    """The discriminator also gets the class."""

    def setup(self) -> None:
        task, options = self.task, {"width": self.width, "depth": self.depth, "dropout": self.dropout}
        self.per_domain, self.alternates = self.batch_norm == "per-domain", self.form == "domainbed"
        self.schedule = Schedule(self.weight, self.start, self.ramp, steps=task.steps)
        if task.features is None:
            raise InputError(f"{type(self).__name__} requires the number of features: Task(…, features=…).")
        classes = task.classes if self.conditional else None
        made = DomainDiscriminator(task.features, task.domains, classes=classes, **options)  # type: ignore[arg-type]
        dtypes = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        self.discriminator = made.to(next(dtypes, torch.float32))

    @classmethod
    def domainbed(cls, settings: Mapping[str, Any]) -> DomainBed:
        """Its rule, and β₁ and β₂ of the discriminator for the model too."""
        return DomainBed({**settings, "form": "domainbed"}, {"betas": [settings["beta1"], 0.9]})

    def auxiliary_optimizers(self) -> dict[str, Optimizer]:
        options: Any = {"lr": self.discriminator_lr, "weight_decay": self.discriminator_weight_decay}
        adam = torch.optim.Adam(self.discriminator.parameters(), betas=(self.beta1, 0.9), **options)
        return {"discriminator": adam}

    def step(self, batch: MetaBatch, engine: Engine, step: Step) -> Log:
        if self.alternates and (int(step) + 1) % (1 + self.discriminator_steps) != self.discriminator_steps:
            with torch.no_grad():
                out = engine.gather(engine.forward(batch))
            loss = self.train_discriminator(engine, out)
            return {"losses": self.losses(out).detach(), "discriminator": loss}
        return super().step(batch, engine, step)

    def gradient(self, batch: MetaBatch, engine: Engine, step: Step) -> tuple[Gradient, Log]:
        def both(out: Outputs) -> tuple[Tensor, Log]:
            for _ in range(0 if self.alternates else self.discriminator_steps):
                self.train_discriminator(engine, out)
            return self.objective(out, step)

        return engine.gradient(batch, both)

    def train_discriminator(self, engine: Engine, out: Outputs) -> Tensor:
        """One step of the discriminator; its loss before."""
        loss = self.discriminator_loss(out, out.features.detach(), self.gradient_penalty)
        # Processes that draw different dropout masks have different gradients.
        engine.apply(engine.average(gradient(loss, list(self.discriminator.parameters()))), "discriminator")
        return loss.detach()

    def objective(self, out: Outputs, step: Step) -> tuple[Tensor, Log]:
        losses = self.losses(out)
        loss = self.discriminator_loss(out, out.features, self.gradient_penalty if self.alternates else 0.0)
        total = losses.mean() - self.schedule.times(loss, step)
        return total, {"losses": losses.detach(), "discriminator": loss.detach()}

    def discriminator_loss(self, out: Outputs, features: Tensor, penalty: float) -> Tensor:
        return self.discriminator.loss(features, out.blocks, gradient_penalty=penalty)
