"""EQRM: a low loss with a given probability over domains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.algorithms.base import Algorithm, Batches, DomainBed, Engine, Log, Loss, Outputs
from shoal.algorithms.penalty import PASSES, SHARE, STEPS, USUAL_STEPS, BatchNorm, PenaltyWeight
from shoal.data.batch import Task
from shoal.errors import InputError
from shoal.penalties import Blocks, quantile_risk
from shoal.settings import Range, log10, uniform

START = log10(2.5, 3.5)._replace(of=USUAL_STEPS)


class EQRM(Algorithm):
    """Minimise the α-quantile of the losses of the domains, after a start with their mean.

        L = F⁻¹(α),  F the distribution of L_1 … L_S, a kernel density estimate: :func:`quantile_risk`

    α = 1/2 is about the mean; towards 1 it is the worst case. DomainBed differentiates only the ends of its
    search for the quantile, the lowest and the highest loss; here all losses count, as in the formula.

    Args:
        quantile: quantile α.
        start: number of steps for which the mean loss is minimised; a float is a fraction of the training.
        quantile_lr: learning rate after ``start``; ``None``: unchanged. A schedule applies to both.
        batch_norm: whether BatchNorm statistics are computed over all domains or per domain, see
            :mod:`shoal.penalties`.

    Reference: Eastwood et al., Probable Domain Generalization via Quantile Risk Minimization, NeurIPS 2022.
    """

    family = "risk extrapolation"
    reference = "Eastwood et al. 2022"
    compares_domains = True
    capturable = True

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        task: Task,
        *,
        quantile: Annotated[float, Range(above=0, below=1, search=uniform(0.5, 0.99))] = 0.75,
        start: Annotated[int, STEPS] | Annotated[float, replace(SHARE, search=START)] = 0.5,
        quantile_lr: Annotated[float | None, Range(above=0, most=1e6, search=log10(-7, -5))] = None,
        batch_norm: BatchNorm = "pooled",
    ) -> None:
        super().__init__(model, loss, task)
        self.passes = PASSES[batch_norm]
        self.quantile = quantile
        self.quantile_lr = quantile_lr
        self.started = PenaltyWeight(1.0, start, steps=task.steps)
        self.ratios: list[float] = []
        """The learning rate after the start over that before, of each parameter."""

    @classmethod
    def domainbed(cls, settings: Mapping[str, Any]) -> DomainBed:
        """Its learning rate after the start is 1e-6 where none was sampled."""
        return DomainBed({**settings, "quantile_lr": settings["quantile_lr"] or 1e-6})

    def wrap(self, optimizer: Optimizer, domains_per_step: int) -> Optimizer:
        self.ratios = []
        if self.quantile_lr is not None:
            for group in optimizer.param_groups:
                rate = float(group.get("initial_lr", group["lr"]))
                if rate == 0:
                    raise InputError(
                        f"quantile_lr={self.quantile_lr:g} of EQRM requires an optimizer with lr above 0."
                    )
                self.ratios += [self.quantile_lr / rate for p in group["params"] if p.requires_grad]
        return optimizer

    def objective(self, outputs: Outputs) -> tuple[Tensor, Log]:
        losses = self.losses(outputs)
        found = quantile_risk(losses, Blocks([1] * len(losses)), self.quantile)  # one mean loss per domain
        total = torch.where(self.started.next() > 0, found, losses.mean())
        return total, {"losses": losses.detach(), "quantile": found.detach()}

    def step(self, batches: Batches, engine: Engine) -> Log:
        """The step of an optimizer is as long as its learning rate: a share of it is that of a lower one."""
        if not self.ratios:
            return super().step(batches, engine)
        before = [p.detach().clone() for p in engine.params]
        log = super().step(batches, engine)
        late = self.started.count > self.started.start
        with torch.no_grad():
            for p, old, ratio in zip(engine.params, before, self.ratios, strict=True):
                p.copy_(torch.where(late, torch.lerp(old, p, ratio), p))
        return log
