"""Fish: gradient matching between domains, by an inner loop over domains and an interpolation back."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.algorithms.base import Algorithm, Batches, Engine, Log, Loss
from shoal.data.batch import Task
from shoal.errors import InputError
from shoal.optim import Fish as FishOptimizer
from shoal.settings import Count, Range, choice


class Fish(Algorithm):
    """Take an inner step on a batch of each of S domains in random order, then set θ ← θ + ε(θ̃ − θ).

    For a small inner learning rate α and plain SGD, the expected update is α times the summed gradient plus
    α²/2 times the gradient of the summed inner products between domains: a first-order approximation of IDGM.

    Args:
        meta_lr: ε, as in the formula (the code of the authors divides its setting by S).
        inner_state: ``"carry"`` keeps the moments of the inner optimizer from one inner loop to the next,
            ``"reset"`` resets them; a number resets them every that many steps, as the code of the authors
            does every epoch.
        buffers: ``"walk"`` keeps buffers such as BatchNorm statistics as they are after the inner loop;
            ``"interpolate"`` interpolates floating-point buffers like weights, as the code of the authors
            does, which biases running variances low. Integer buffers are never interpolated.

    Reference: Shi et al., Gradient Matching for Domain Generalization, 2021.
    """

    family = "gradient matching"
    reference = "Shi et al. 2021"
    passes = "apart"
    compares_domains = True
    capturable = True
    taken: Tensor

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        task: Task,
        *,
        meta_lr: Annotated[float, Range(above=0, most=1, search=choice(0.05, 0.1, 0.5))] = 0.5,
        inner_state: Literal["carry", "reset"] | Count = "carry",
        buffers: Literal["walk", "interpolate"] = "walk",
    ) -> None:
        super().__init__(model, loss, task)
        self.reset_every = None if isinstance(inner_state, str) else inner_state
        self.settings: dict[str, Any] = {"meta_lr": meta_lr}
        self.settings["inner_state"] = "carry" if self.reset_every else inner_state
        self.buffers_mode = buffers
        if self.reset_every:  # counted on the device, where a CUDA graph can
            self.register_buffer("taken", torch.zeros((), dtype=torch.int64))

    def wrap(self, optimizer: Optimizer, domains_per_step: int) -> Optimizer:
        if self.reset_every and not _starts_at_zero(optimizer):
            raise InputError(
                f"inner_state={self.reset_every} requires Adam, AdamW or SGD without dampening, got "
                f"{type(optimizer).__name__}; inner_state='carry' and 'reset' support any optimizer."
            )
        self.walks = self.make_walks(optimizer, domains_per_step)
        return self.walks

    def make_walks(self, optimizer: Optimizer, inner_steps: int) -> FishOptimizer:
        return FishOptimizer(optimizer, inner_steps, **self.settings)

    def step(self, batches: Batches, engine: Engine) -> Log:
        self.count()
        return self.walk(batches, engine)

    def count(self) -> None:
        """Counts meta-steps, where the inner optimizer's moments are to be reset by their number."""
        if self.reset_every:
            self.walks.forget(self.taken % self.reset_every == 0)
            self.taken += 1

    def walk(self, batches: Batches, engine: Engine) -> Log:
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


def _starts_at_zero(optimizer: Optimizer) -> bool:
    """Whether moments of zero are what the optimizer begins with."""
    known = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
    return known and not any(group.get("dampening") for group in optimizer.param_groups)
