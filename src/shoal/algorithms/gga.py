"""GGA: early in training, a local search for parameters where the gradients of the domains agree."""

from typing import Annotated

import torch
from torch import Tensor

from shoal.algorithms.base import Algorithm, Engine, Gradient, Log, Step
from shoal.algorithms.penalty import Steps, in_steps
from shoal.data.batch import MetaBatch
from shoal.gradients import cosine_matrix, moved
from shoal.replay import preserve_state, random_state
from shoal.settings import Range, log10


class GGA(Algorithm):
    """Minimise the mean loss; in an early window, start each step with a random search around θ.

    For ``length`` steps from ``start`` on, ``trials`` perturbations θ' = θ + u are tried on the step's
    batches, with u uniform in [−ρ, ρ] for each parameter. Of those with

        mean L_i(θ') < mean L_i(θ) + tolerance    and    min_{i≠j} cos(g_i, g_j) larger than at θ

    the one with the largest minimum is kept; if there is none, θ is kept. An ordinary step follows. With the
    defaults, a training costs six times ERM. The code of the authors perturbs the featurizer, starting from
    the last rejected perturbation.

    Args:
        start: first step of the window; a float is a fraction of the training.
        length: length of the window; a float is a fraction of the training.
        trials: number of perturbations per step.
        radius: size ρ of the perturbations.
        tolerance: maximum increase of the mean loss.

    Reference: Ballas & Diou, Gradient-Guided Annealing for Domain Generalization, CVPR 2025.
    """

    family = "gradient matching"
    reference = "Ballas & Diou 2025"
    min_domains = 2
    start: Steps = 0.02
    length: Steps = 0.02
    trials: Annotated[int, Range(1, 10**6)] = 250
    radius: Annotated[float, Range(0, search=log10(-6, -4))] = 1e-6
    tolerance: Annotated[float, Range(0)] = 0.1

    def setup(self) -> None:
        self.first = in_steps(self.start, self.task.steps)
        self.end = self.first + in_steps(self.length, self.task.steps)

    def step(self, batch: MetaBatch, engine: Engine, step: Step) -> Log:
        if len(batch.sizes) > 1 and self.first <= int(step) < self.end:
            self.search(batch, engine)
        return super().step(batch, engine, step)

    @torch.no_grad()
    def search(self, batch: MetaBatch, engine: Engine) -> None:
        """Moves the parameters to the best of the perturbations, if any is better than none."""
        device = engine.params[0].device
        seeds = engine.broadcast(torch.randint(2**62, (self.trials,)).to(device)).tolist()
        before = random_state(self.model)
        found = [self.agreement(batch, engine, before)]
        for seed in seeds:
            with moved(engine.params, self.noise(engine, seed), by=1.0):
                found.append(self.agreement(batch, engine, before))
        loss, cosine = torch.stack(found).unbind(1)
        better = (loss < loss[0] + self.tolerance) & (cosine > cosine[0])
        best = torch.where(better, cosine, -2.0).argmax() * better.any()  # 0 is θ itself
        if chosen := int(engine.broadcast(best)):
            torch._foreach_add_(engine.params, self.noise(engine, seeds[chosen - 1]))

    @torch.enable_grad()
    def agreement(self, batch: MetaBatch, engine: Engine, since: list[Tensor]) -> Tensor:
        """The mean loss, and the least cosine of two domains' gradients; ``since`` decides dropout masks."""
        with preserve_state(self.model, since=since):
            gradients, log = self.domain_gradients(batch, engine)
        (losses,) = engine.average([log["losses"]])
        cosine = cosine_matrix(gradients).min()
        return torch.stack([losses.mean().to(cosine.dtype), cosine])

    def noise(self, engine: Engine, seed: int) -> Gradient:
        """A perturbation, which is the same for the same seed: none has to be kept."""
        draw, r = torch.Generator(engine.params[0].device).manual_seed(seed), self.radius
        return [torch.empty_like(p).uniform_(-r, r, generator=draw) for p in engine.params]
