"""IDGM: inter-domain gradient matching, optimised directly."""

from functools import partial
from typing import Annotated

from shoal.algorithms.base import Algorithm, Engine, Gradient, Log, Step
from shoal.algorithms.penalty import Schedule, Steps
from shoal.data.batch import MetaBatch
from shoal.gradients import Measure, Method, match
from shoal.settings import Range, choice, log10


class IDGM(Algorithm):
    """Minimise the mean loss minus γ times the mean inner product of the gradients of the domains.

        L = 1/S Σ_i L_i − γ/(S(S−1)) Σ_{i≠j} g_i·g_j

    Each pair counts once, as in the paper, whose factor is 2/(S(S−1)) for the sum over pairs. Both forms of
    the matching term have a trivial maximum, which descent on L finds: inner products grow with the loss if
    all domains are misclassified alike, and cosines are 1 for a constant classifier, to which training on
    CdSprites collapses. Therefore ``trust`` limits the norm of the gradient of this term relative to the mean
    gradient: with a ratio below 1, every step still descends on the mean loss. ``trust=None`` is the paper's
    algorithm.

    Args:
        gamma: weight γ of the matching term.
        normalize: match cosines instead of inner products, as the paper does in its experiments.
        trust: maximum ratio of the norms of the gradient of the matching term and of the mean gradient;
            ``None``: unlimited, as in the paper.
        start: number of steps for which γ is 0.
        ramp: number of steps over which γ then rises linearly.
        method: ``"exact"`` Hessian-vector products, or ``"finite-difference"`` for large models.

    Reference: Shi et al., Gradient Matching for Domain Generalization, 2021. The trust ratio is ours.
    """

    family = "gradient matching"
    reference = "Shi et al. 2021"
    min_domains = 2
    second_order = True
    gamma: Annotated[float, Range(0, 1e30, search=log10(-2, 1))] = 1.0
    normalize: bool = True
    trust: Annotated[float | None, Range(above=0, search=choice(0.5, 0.8, 0.9))] = 0.9
    start: Steps = 0
    ramp: Steps = 0
    method: Method = "exact"

    def setup(self) -> None:
        self.schedule = Schedule(self.gamma, self.start, self.ramp, steps=self.task.steps)
        measure: Measure = "cosine" if self.normalize else "gip"
        self.matching = partial(match, measure=measure, method=self.method, model=self.model)

    def gradient(self, batch: MetaBatch, engine: Engine, step: Step) -> tuple[Gradient, Log]:
        losses = [partial(self.block_loss, engine, block) for block in batch.split()]
        found = self.matching(losses, engine.params, average=engine.average)
        return found.gradient(-self.schedule(step), self.trust), {"losses": found.losses, "gip": found.value}
