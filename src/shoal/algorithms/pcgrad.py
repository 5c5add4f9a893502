"""PCGrad: removal of conflicting components from the gradients of the domains."""

from __future__ import annotations

from shoal.algorithms.base import Algorithm, Engine, Gradient, Log, Step
from shoal.data.batch import MetaBatch
from shoal.gradients import pcgrad


class PCGrad(Algorithm):
    """Average the gradients of the domains after projecting each to be orthogonal to those it conflicts with.

    For each gradient g_i and every other g_j in turn, if their inner product is negative, the component of
    g_i along g_j is removed. The order is cyclic from i on, and random because the batches are in random
    order.

    Reference: Yu et al., Gradient Surgery for Multi-Task Learning, NeurIPS 2020 (which takes the sum).
    """

    family = "gradient surgery"
    reference = "Yu et al. 2020"
    min_domains = 2

    def gradient(self, batch: MetaBatch, engine: Engine, step: Step) -> tuple[Gradient, Log]:
        return self.combined_gradient(batch, engine, pcgrad)
