"""Agr-Rand: gradient surgery that replaces components whose signs differ by noise."""

from shoal.algorithms.base import Engine, Gradient, Log, Step, Surgery
from shoal.data.batch import MetaBatch
from shoal.gradients import agr_rand


class AgrRand(Surgery):
    """Average the gradients of the domains, with noise for the components whose signs differ between domains.

    See :func:`shoal.gradients.agr_rand`.

    Reference: Mansilla et al., Domain Generalization via Gradient Surgery, ICCV 2021 (which takes the sum).
    """

    reference = "Mansilla et al. 2021"

    def gradient(self, batch: MetaBatch, engine: Engine, step: Step) -> tuple[Gradient, Log]:
        combined, log = super().gradient(batch, engine, step)
        return [engine.broadcast(g) for g in combined], log  # the same noise in all processes

    def combine(self, gradients: list[Gradient]) -> Gradient:
        return agr_rand(gradients)
