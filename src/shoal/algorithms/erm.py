"""ERM: plain training on the examples of all domains pooled."""

from typing import ClassVar

from shoal.algorithms.base import Algorithm, Draw, Engine, Gradient, Log, Step
from shoal.data.batch import MetaBatch


class ERM(Algorithm):
    """Minimise the mean loss over all training examples, regardless of their domain.

    Batches are sampled from the union of the domains.

    Reference: Vapnik, Statistical Learning Theory, 1998.
    """

    family = "risk"
    reference = "Vapnik 1998"
    draw: ClassVar[Draw] = "pooled"

    def gradient(self, batch: MetaBatch, engine: Engine, step: Step) -> tuple[Gradient, Log]:
        return engine.mean_gradient(batch.merged())
