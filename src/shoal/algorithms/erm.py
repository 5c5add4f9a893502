"""ERM: plain training on the examples of all domains pooled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from shoal.algorithms.base import Algorithm, Engine, Log
from shoal.data.batch import DomainBatch, pool
from shoal.data.sampler import Draw


class ERM(Algorithm):
    """Minimises the mean loss over all training examples, whatever domain they come from.

    Batches are drawn from the union of the domains and go through the model together.

    Reference: Vapnik, Statistical Learning Theory, 1998.
    """

    family = "risk"
    reference = "Vapnik 1998"
    draw: ClassVar[Draw] = "pooled"
    additive = True
    capturable = True

    def gradient(self, batches: Sequence[DomainBatch], engine: Engine) -> tuple[list[Tensor], Log]:
        return engine.gradients(self, [pool(batches)])
