"""Agr-Rand: gradient surgery that replaces components whose signs differ by noise."""

from __future__ import annotations

from shoal.algorithms.base import Algorithm, Engine, Gradient, Log, Step
from shoal.data.batch import MetaBatch
from shoal.gradients import agr_rand


class AgrRand(Algorithm):
    """Average the gradients of the domains, with noise for the components whose signs differ between domains.

        g_k = mean_i g_ik   if sign(g_1k) = … = sign(g_Sk),   else N(0, σ²),

    where σ is the mean absolute value of the components that are kept.

    Reference: Mansilla et al., Domain Generalization via Gradient Surgery, ICCV 2021 (which takes the sum).
    """

    family = "gradient surgery"
    reference = "Mansilla et al. 2021"
    min_domains = 2

    def gradient(self, batch: MetaBatch, engine: Engine, step: Step) -> tuple[Gradient, Log]:
        combined, log = self.combined_gradient(batch, engine, agr_rand)
        return [engine.broadcast(g) for g in combined], log  # the same noise in all processes
