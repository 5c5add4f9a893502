"""SAM: sharpness-aware minimization, a low loss in a neighbourhood of the weights."""

from contextlib import AbstractContextManager
from typing import Annotated, ClassVar

import torch

from shoal.algorithms.base import Algorithm, Draw, Engine, Gradient, Log, Step
from shoal.data.batch import MetaBatch
from shoal.gradients import inner_product, moved
from shoal.settings import Range, log10


class SAM(Algorithm):
    """Use the gradient of the mean loss at θ + ρ g/‖g‖, in the direction of steepest ascent from θ.

    Batches are those of ERM. The cost is twice that of ERM: two ordinary passes, each of which updates
    BatchNorm statistics and draws its own dropout masks, as in the released code.

    Args:
        rho: radius ρ; with 0 it is ERM.

    Reference: Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization, ICLR 2021.
    """

    family = "flat minima"
    reference = "Foret et al. 2021"
    draw: ClassVar[Draw] = "pooled"
    rho: Annotated[float, Range(0, search=log10(-2, 0))] = 0.05

    def gradient(self, batch: MetaBatch, engine: Engine, step: Step) -> tuple[Gradient, Log]:
        g, log = engine.mean_gradient(batch.merged())
        with self.perturbed(engine, g):
            return engine.mean_gradient(batch.merged())[0], log

    def perturbed(self, engine: Engine, g: Gradient, descent: float = 0.0) -> AbstractContextManager[None]:
        """Within the block the weights are θ + (ρ/‖g‖ − ``descent``) g; a gradient of zero moves nothing."""
        length = inner_product(g, g).sqrt()
        by = torch.where(length == 0, 0.0, self.rho / torch.where(length == 0, 1.0, length)) - descent
        return moved(engine.params, g, by)
