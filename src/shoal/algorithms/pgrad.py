"""PGrad: steps along the principal directions of a trajectory through the domains."""

from typing import Annotated

import torch
from torch import Tensor

from shoal.algorithms.base import Algorithm, Engine, Log, Step
from shoal.data.batch import MetaBatch
from shoal.errors import InputError
from shoal.settings import Range, choice, log10


class PGrad(Algorithm):
    """Follow the domains one after the other like Fish, and step along the trajectory's main directions.

    The trajectory θ_0 … θ_n takes n = R·S steps of the optimizer, each on one of R parts of the batch of one
    domain. Its centred points have principal directions u_k of length 1, with eigenvalues λ_k, taken so
    that (θ_0 − θ_n)·u_k > 0. Then

        θ ← θ_0 − ε ‖θ_0 − θ_n‖ Σ_{k ≤ K} λ_k u_k / ‖(λ_1, …, λ_K)‖

    Fish uses the end point alone: θ ← θ_0 − ε (θ_0 − θ_n). The state of the optimizer is kept between steps.
    A trajectory is kept in memory: n + 1 copies of the parameters.

    Args:
        meta_lr: ε.
        rollouts: R, number of passes through the domains, each on a part of at least two examples.
        directions: K, number of principal directions.

    Reference: Wang et al., PGrad: Learning Principal Gradients for Domain Generalization, ICLR 2023.
    """

    family = "gradient matching"
    reference = "Wang et al. 2023"
    min_domains = 2
    meta_lr: Annotated[float, Range(above=0, search=log10(-2, 0))] = 0.1
    rollouts: Annotated[int, Range(1, search=choice(1, 3))] = 3
    directions: Annotated[int, Range(1)] = 4

    def step(self, batch: MetaBatch, engine: Engine, step: Step) -> Log:
        if not engine.alone and self.rollouts > 1:
            raise InputError(f"pgrad with rollouts={self.rollouts} runs in one process; use rollouts=1.")
        rollouts = min(self.rollouts, max(1, min(batch.sizes) // 2))
        points, losses = [_flat(engine.params)], []
        for number, part in enumerate(batch.pieces(rollouts)):
            blocks = part.split()
            for place in range(len(blocks)):  # the sampler's random order of domains, rotated
                gradient, log = engine.mean_gradient(blocks[(place + number) % len(blocks)])
                engine.apply(gradient)
                points.append(_flat(engine.params))
                losses.append(log["losses"])
        update = self.meta_lr * principal_direction(torch.stack(points), self.directions)
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(points[0] - update, engine.params)
        first = torch.cat(losses[: len(batch.sizes)])
        return {"losses": first}


def principal_direction(points: Tensor, count: int) -> Tensor:
    """‖θ_0 − θ_n‖ Σ_k λ_k u_k / ‖λ‖ over the first ``count`` principal directions of points (n + 1, P)."""
    whole = points[0] - points[-1]
    centred = points - points.mean(0)
    values, vectors = torch.linalg.eigh(centred @ centred.T)
    values, vectors = values.flip(0)[:count], vectors.flip(1)[:, :count]
    directions = centred.T @ vectors
    directions = directions / directions.norm(dim=0).clamp_min(torch.finfo(points.dtype).tiny)
    signs = torch.where(whole @ directions > 0, 1.0, -1.0).to(points.dtype)
    values = values.clamp_min(0)
    weights = values / values.norm().clamp_min(torch.finfo(points.dtype).tiny)
    return whole.norm() * (directions @ (signs * weights))


def _flat(params: list[Tensor]) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in params])
