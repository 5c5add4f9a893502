"""Fish: gradient matching between domains, by an inner loop over domains and an interpolation back."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.algorithms.base import Algorithm, Batches, Engine, Log, Loss
from shoal.data.batch import Task
from shoal.optim import Fish as FishOptimizer
from shoal.settings import Range, choice


class Fish(Algorithm):
    """One inner step on a batch of each of S domains in random order, then θ ← θ + ε(θ̃ − θ).

    For small inner rates α and plain SGD the expected update is, beside α times the summed gradient,
    α²/2 times the gradient of the summed inner products between domains: the first-order way to maximise
    what IDGM maximises directly.

    Args:
        meta_lr: ε, exactly as written (the authors' program divides its setting by S before use).
        inner_state: ``"carry"`` or ``"reset"`` the inner optimizer's moments at the start of every walk.
        buffers: ``"walk"`` leaves buffers such as BatchNorm's statistics as the walk left them;
            ``"interpolate"`` blends floating ones like weights, as the authors' program does, which biases
            running variances low. Integer buffers are never blended.

    Reference: Shi et al., Gradient Matching for Domain Generalization, 2021.
    """

    family = "gradient matching"
    reference = "Shi et al. 2021"
    passes = "apart"
    compares_domains = True
    capturable = True

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        task: Task,
        *,
        meta_lr: Annotated[float, Range(above=0, most=1, search=choice(0.05, 0.1, 0.5))] = 0.5,
        inner_state: Literal["carry", "reset"] = "carry",
        buffers: Literal["walk", "interpolate"] = "walk",
    ) -> None:
        super().__init__(model, loss, task)
        self.settings: dict[str, Any] = {"meta_lr": meta_lr, "inner_state": inner_state}
        self.buffers_mode = buffers

    def wrap(self, optimizer: Optimizer, domains_per_step: int) -> Optimizer:
        return FishOptimizer(optimizer, inner_steps=domains_per_step, **self.settings)

    def step(self, batches: Batches, engine: Engine) -> Log:
        before = self._floating_buffers() if self.buffers_mode == "interpolate" else []
        losses = []
        for batch in batches:
            gradients, log = self.mean_gradient([batch], engine)
            engine.apply(gradients)
            losses.append(log["losses"])
        with torch.no_grad():
            for buffer, start in before:
                buffer.copy_(torch.lerp(start, buffer, self.settings["meta_lr"]))
        return {"losses": torch.cat(losses)}

    def _floating_buffers(self) -> list[tuple[Tensor, Tensor]]:
        return [(b, b.clone()) for b in self.model.buffers() if b.is_floating_point()]
