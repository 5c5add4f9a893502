"""PCGrad: what one domain's gradient takes from another is cut away."""

from __future__ import annotations

from shoal.algorithms.base import Algorithm, Batches, Engine, Gradients
from shoal.gradients import pcgrad


class PCGrad(Algorithm):
    """The mean of the domains' gradients after each was made orthogonal to those it conflicts with.

    Gradient i goes through the others in turn; where its product with g_j is negative, its component along
    g_j is removed. The order is round a circle from i on, random because the batches come in random order.

    Reference: Yu et al., Gradient Surgery for Multi-Task Learning, NeurIPS 2020 (which takes the sum).
    """

    family = "gradient surgery"
    reference = "Yu et al. 2020"
    passes = "apart"
    compares_domains = True
    capturable = True

    def gradient(self, batches: Batches, engine: Engine) -> Gradients:
        return self.combined_gradient(batches, engine, pcgrad)
