"""IDGM: inter-domain gradient matching, optimised directly."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from torch import nn

from shoal.algorithms.base import Algorithm, Batches, Engine, Gradients, Loss
from shoal.algorithms.penalty import PenaltyWeight, Steps
from shoal.data.batch import Task
from shoal.gradients import Method, match
from shoal.settings import Range, choice, log10


class IDGM(Algorithm):
    """Minimises the mean loss minus γ times the mean inner product of the domains' gradients.

        L = 1/S Σ_i L_i − γ/(S(S−1)) Σ_{i≠j} g_i·g_j

    Either form of the matching term has a trivial maximum, to which plain descent on L goes straight: inner
    products grow with being wrong everywhere alike, and cosines are 1 for a constant classifier. Hence
    ``trust``: the term's gradient is shortened to at most this share of the mean gradient's length. With a
    share below 1 every step still descends on the mean loss, so that being constant or wrong is never an
    end, and matching decides only among the directions that lower the loss.

    Args:
        gamma: γ, the weight of the matching term.
        normalize: match cosines instead of inner products, as the paper does in its experiments.
        trust: the largest ratio of the matching term's gradient to the mean gradient; ``None``: unlimited,
            the paper's objective as printed.
        start, ramp: γ is 0 for ``start`` steps and then grows linearly for ``ramp`` steps.
        method: ``"exact"`` Hessian-vector products, or ``"finite-difference"`` for large models.
        softening: δ in ĝ = g/√(‖g‖² + δ²): bounds the normalised term's slope where gradients vanish.

    Reference: Shi et al., Gradient Matching for Domain Generalization, 2021. The trust ratio is ours.
    """

    family = "gradient matching"
    reference = "Shi et al. 2021"
    passes = "apart"
    compares_domains = True
    capturable = True
    second_order = True
    by_engine = False

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        task: Task,
        *,
        gamma: Annotated[float, Range(0, search=log10(-2, 1))] = 1.0,
        normalize: bool = True,
        trust: Annotated[float | None, Range(above=0, search=choice(0.5, 0.8, 0.9))] = 0.9,
        start: Steps = 0,
        ramp: Steps = 0,
        method: Method = "exact",
        softening: Annotated[float, Range(0)] = 0.0,
    ) -> None:
        super().__init__(model, loss, task)
        self.trust = trust
        self.repeats_passes = method == "finite-difference"  # type: ignore[misc]
        self.gamma = PenaltyWeight(gamma, start, ramp, steps=task.steps)
        self.matching = partial(match, normalize=normalize, method=method, softening=softening, model=model)

    def gradient(self, batches: Batches, engine: Engine) -> Gradients:
        average = engine.average if engine.processes > 1 else None
        found = self.matching(self.parts(batches, engine), engine.params, average=average)
        total = found.gradient(-self.gamma.next(), self.trust)
        return total, {"losses": found.losses, "gip": found.value}
