"""IGA: gradients that vary little between domains."""

from functools import partial
from typing import Annotated

from shoal.algorithms.base import Algorithm, Engine, Gradient, Log, Step
from shoal.algorithms.penalty import Schedule, Steps
from shoal.data.batch import MetaBatch
from shoal.gradients import Method, match
from shoal.settings import Range, log10


class IGA(Algorithm):
    """Minimise the mean loss plus λ times the trace of the covariance of the gradients of the domains.

        L = 1/S Σ_i L_i + λ/S Σ_i ‖g_i − ḡ‖²

    While IDGM rewards gradients with the same direction, this penalizes every difference, also in norm.

    Args:
        weight: weight λ.
        start: number of steps for which λ is 0.
        ramp: number of steps over which λ then rises linearly.
        method: ``"exact"`` Hessian-vector products, or ``"finite-difference"`` for large models.

    Reference: Koyama and Yamaguchi, When is invariance useful in an out-of-distribution generalization
    problem?, 2020.
    """

    family = "gradient matching"
    reference = "Koyama & Yamaguchi 2020"
    min_domains = 2
    second_order = True
    weight: Annotated[float, Range(0, 1e30, search=log10(1, 5))] = 1000.0
    start: Steps = 0
    ramp: Steps = 0
    method: Method = "exact"

    def setup(self) -> None:
        self.schedule = Schedule(self.weight, self.start, self.ramp, steps=self.task.steps)
        self.matching = partial(match, measure="variance", method=self.method, model=self.model)

    def gradient(self, batch: MetaBatch, engine: Engine, step: Step) -> tuple[Gradient, Log]:
        losses = [partial(self.block_loss, engine, block) for block in batch.split()]
        found = self.matching(losses, engine.params, average=engine.average)
        return found.gradient(self.schedule(step)), {"losses": found.losses, "penalty": found.value}
