"""What Shoal computes, written the slow and obvious way: double loops, whole graphs, copied models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Gradients = Sequence[Sequence[Tensor]]


def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    return torch.dot(torch.cat([x.reshape(-1) for x in a]), torch.cat([y.reshape(-1) for y in b]))


def mean_inner_product(gradients: Gradients) -> Tensor:
    """1/(S(S−1)) Σ_{i≠j} g_i·g_j over ordered pairs."""
    total, pairs = 0.0, 0
    for i, a in enumerate(gradients):
        for j, b in enumerate(gradients):
            if i != j:
                total, pairs = total + dot(a, b), pairs + 1
    return total / pairs


def mean_cosine(gradients: Gradients, softening: float = 0.0) -> Tensor:
    """1/(S(S−1)) Σ_{i≠j} g_i·g_j / (n_i n_j) with n = √(‖g‖² + δ²)."""
    total, pairs = 0.0, 0
    for i, a in enumerate(gradients):
        for j, b in enumerate(gradients):
            if i != j:
                lengths = (dot(a, a) + softening**2).sqrt() * (dot(b, b) + softening**2).sqrt()
                total, pairs = total + dot(a, b) / lengths, pairs + 1
    return total / pairs


def match(
    losses: Sequence[Tensor], params: Sequence[Tensor], *, normalize: bool = False, softening: float = 0.0
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """ḡ, the GIP (or cosine) and its gradient, by autograd through the double loop over all S graphs."""
    gradients = [_gradient(loss, params, create_graph=True) for loss in losses]
    value = mean_cosine(gradients, softening) if normalize else mean_inner_product(gradients)
    slope = [torch.zeros_like(p) for p in params]
    if value.requires_grad:
        slope = _gradient(value, params)
    mean = [sum(g[n] for g in gradients).detach() / len(gradients) for n in range(len(params))]
    return mean, value.detach(), slope


def _gradient(loss: Tensor, params: Sequence[Tensor], create_graph: bool = False) -> list[Tensor]:
    grads = torch.autograd.grad(loss, params, create_graph=create_graph, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(grads, params, strict=True)]


class CopyingFish:
    """Fish as the paper's algorithm box has it: copy the model, walk the copy, blend, load back.

    ``optimizer_of(parameters)`` makes the walking optimizer; with ``carry`` its state goes from copy to copy.
    A batch of ``None`` stands for a step that was skipped.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_of: Callable[[list[nn.Parameter]], Optimizer],
        meta_lr: float,
        inner_state: str = "carry",
    ) -> None:
        self.model, self.optimizer_of = model, optimizer_of
        self.meta_lr, self.inner_state = meta_lr, inner_state
        self.saved: dict | None = None

    def walk(
        self,
        batches: Sequence,
        loss: Callable[[nn.Module, object], Tensor],
        before_step: Callable[[nn.Module, Optimizer], None] = lambda model, optimizer: None,
        after_step: Callable[[nn.Module, Optimizer], None] = lambda model, optimizer: None,
    ) -> None:
        """One walk over ``batches``: S inner steps on a copy, then θ ← lerp(θ, θ̃, ε)."""
        fast = copy.deepcopy(self.model)
        optimizer = self.optimizer_of(list(fast.parameters()))
        if self.inner_state == "carry" and self.saved is not None:
            optimizer.load_state_dict(self.saved)
        for batch in batches:
            optimizer.zero_grad()
            if batch is not None:
                loss(fast, batch).backward()
                before_step(fast, optimizer)
                optimizer.step()
            after_step(fast, optimizer)
        self.saved = copy.deepcopy(optimizer.state_dict())
        with torch.no_grad():
            blended = [
                torch.lerp(slow, walked, self.meta_lr)
                for slow, walked in zip(self.model.parameters(), fast.parameters(), strict=True)
            ]
            for slow, new in zip(self.model.parameters(), blended, strict=True):
                slow.copy_(new)
