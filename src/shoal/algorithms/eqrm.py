"""EQRM: a low loss with a given probability over domains."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.algorithms.base import Algorithm, DomainBed, Engine, Log, Outputs, Step
from shoal.algorithms.penalty import FRACTION, STEPS, USUAL_STEPS, BatchNorm, Schedule
from shoal.data.batch import MetaBatch
from shoal.penalties import Blocks, quantile_risk
from shoal.settings import Range, log10, uniform

START = {"log10": [2.5, 3.5], "of": USUAL_STEPS}


class EQRM(Algorithm):
    """Minimise the α-quantile of the losses of the domains, after a start with their mean.

    The quantile is :func:`shoal.penalties.quantile_risk`: α = 1/2 is about the mean, towards 1 the worst
    case. DomainBed differentiates the lowest and the highest loss only; here all count.

    Args:
        quantile: quantile α.
        start: number of steps for which the mean loss is minimised; a float is a fraction of the training.
        quantile_lr: learning rate after ``start``; ``None``: unchanged. A schedule applies to both, and parts
            of the model with a learning rate of their own keep its ratio to the others.
        batch_norm: BatchNorm statistics over all domains or per domain (see :mod:`shoal.penalties`).

    Reference: Eastwood et al., Probable Domain Generalization via Quantile Risk Minimization, NeurIPS 2022.
    """

    family = "risk extrapolation"
    reference = "Eastwood et al. 2022"
    min_domains = 2
    quantile: Annotated[float, Range(above=0, below=1, search=uniform(0.5, 0.99))] = 0.75
    start: Annotated[int, STEPS] | Annotated[float, replace(FRACTION, search=START)] = 0.5
    quantile_lr: Annotated[float | None, Range(above=0, most=1e6, search=log10(-7, -5))] = None
    batch_norm: BatchNorm = "pooled"

    def setup(self) -> None:
        self.per_domain = self.batch_norm == "per-domain"
        self.schedule = Schedule(1.0, self.start, steps=self.task.steps)
        self.ratio = 1.0  # of the learning rate after the start to that before

    @classmethod
    def domainbed(cls, settings: Mapping[str, Any]) -> DomainBed:
        """Its learning rate after the start is 1e-6 where none was sampled."""
        return DomainBed({**settings, "quantile_lr": settings["quantile_lr"] or 1e-6})

    def prepare(self, optimizer: Optimizer, lr: float) -> None:
        self.ratio = (self.quantile_lr or lr) / lr

    def objective(self, out: Outputs, step: Step) -> tuple[Tensor, Log]:
        losses = self.losses(out)
        quantile = quantile_risk(losses, Blocks([1] * len(losses)), self.quantile)
        total = losses.mean() + self.schedule.times(quantile - losses.mean(), step)
        return total, {"losses": losses.detach(), "quantile": quantile.detach()}

    def step(self, batch: MetaBatch, engine: Engine, step: Step) -> Log:
        """The step of an optimizer is as long as its learning rate: a share of it is that of a lower one."""
        if self.ratio == 1:
            return super().step(batch, engine, step)
        before = [p.detach().clone() for p in engine.params]
        log = super().step(batch, engine, step)
        with torch.no_grad():
            for p, old in zip(engine.params, before, strict=True):
                p.add_(self.schedule.times((self.ratio - 1) * (p - old), step))
        return log
