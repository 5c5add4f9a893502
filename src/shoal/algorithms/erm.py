"""ERM: plain training on the examples of all domains pooled."""

from __future__ import annotations

from typing import ClassVar

from shoal.algorithms.base import Algorithm, Batches, Engine, Gradients
from shoal.data.batch import pool
from shoal.data.sampler import Draw


class ERM(Algorithm):
    """Minimise the mean loss over all training examples, regardless of their domain.

    Batches are sampled from the union of the domains.

    Reference: Vapnik, Statistical Learning Theory, 1998.
    """

    family = "risk"
    reference = "Vapnik 1998"
    draw: ClassVar[Draw] = "pooled"
    additive = True
    capturable = True

    def gradient(self, batches: Batches, engine: Engine) -> Gradients:
        return engine.gradients(self, [pool(batches)])
