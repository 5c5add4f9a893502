"""The gradient family since 2021, written the slow and obvious way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Batches = Sequence[tuple[Tensor, Tensor]]


def agreement(gradients: Sequence[Tensor]) -> tuple[Tensor, list[bool]]:
    """Mean of flat gradients where all signs agree, and where that is."""
    mean, kept = torch.zeros_like(gradients[0]), []
    for k in range(len(mean)):
        signs = {float(torch.sign(g[k])) for g in gradients}
        kept.append(len(signs) == 1 and 0.0 not in signs)
        if kept[-1]:
            mean[k] = sum(g[k] for g in gradients) / len(gradients)
    return mean, kept


def disam(
    model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], rho: float, weight: float
) -> list[Tensor]:
    """The gradient at the perturbed weights; the weights are put back."""
    params = list(model.parameters())
    losses = [cross_entropy(model(x), y) for x, y in batches]
    mean = sum(losses) / len(losses)
    variance = sum((loss - mean) ** 2 for loss in losses) / len(losses)
    direction = torch.autograd.grad(mean - weight * variance, params)
    norm = sum((g**2).sum() for g in direction) ** 0.5
    start = [p.detach().clone() for p in params]
    with torch.no_grad():
        for p, g in zip(params, direction, strict=True):
            p += rho * g / norm
    found = torch.autograd.grad(sum(cross_entropy(model(x), y) for x, y in batches) / len(batches), params)
    with torch.no_grad():
        for p, s in zip(params, start, strict=True):
            p.copy_(s)
    return list(found)


def principal_update(points: Sequence[np.ndarray], count: int) -> np.ndarray:
    """‖θ_0 − θ_n‖ Σ λ_k u_k / ‖λ‖ from the singular vectors of the centred points."""
    whole = points[0] - points[-1]
    centred = np.stack(points) - np.mean(points, axis=0)
    _, singular, rows = np.linalg.svd(centred, full_matrices=False)
    values, update = singular[:count] ** 2, np.zeros_like(whole)
    for value, direction in zip(values, rows[:count], strict=True):
        sign = 1.0 if whole @ direction > 0 else -1.0
        update += sign * value * direction
    return np.linalg.norm(whole) * update / np.linalg.norm(values)


def hessian_alignment(
    model: nn.Module,
    head: nn.Linear,
    batches: Sequence[tuple[Tensor, Tensor]],
    form: str,
    alpha: float,
    beta: float,
) -> Tensor:
    """The loss with whole Hessian matrices of the head, by autograd."""
    params = list(head.parameters())

    def derivatives(loss: Tensor) -> tuple[Tensor, Tensor]:
        flat = torch.cat([g.flatten() for g in torch.autograd.grad(loss, params, create_graph=True)])
        rows = [torch.autograd.grad(g, params, create_graph=True, retain_graph=True) for g in flat]
        return flat, torch.stack([torch.cat([r.flatten() for r in row]) for row in rows])

    losses = [cross_entropy(model(x), y) for x, y in batches]
    mean = sum(losses) / len(losses)
    middle, curvature = derivatives(mean)

    def aligned(gradient: Tensor, hessian: Tensor) -> Tensor:
        return hessian @ gradient if form == "hgp" else hessian.diagonal()

    penalty = torch.zeros(())
    for loss in losses:
        gradient, hessian = derivatives(loss)
        difference = aligned(gradient, hessian) - aligned(middle, curvature).detach()
        slopes = gradient - middle.detach()
        penalty = penalty + (alpha * (difference**2).sum() + beta * (slopes**2).sum()) / len(losses)
    return mean + penalty
