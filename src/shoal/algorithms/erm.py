"""Empirical risk minimisation: forget the domains and minimise the mean loss."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shoal.algorithms.base import Algorithm, Log
from shoal.data.batch import DomainBatch, pool


class ERM(Algorithm):
    """Minimises the mean loss over all training examples, whatever domain they come from.

    Batches are drawn from the union of the domains and go through the model together.

    Reference: Vapnik, Statistical Learning Theory, 1998.
    """

    family = "risk"
    reference = "Vapnik 1998"
    draw = "pooled"
    capturable = True

    def objective(self, batches: Sequence[DomainBatch]) -> tuple[Tensor, Log]:
        loss = self.domain_loss(pool(batches))
        return loss, {"losses": loss.detach()[None]}
