"""Fish: gradient matching between domains, by an inner loop over domains and an interpolation back."""

from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.algorithms.base import Algorithm, Engine, Log, Step
from shoal.data.batch import MetaBatch
from shoal.errors import InputError
from shoal.settings import Count, Range, choice


class Fish(Algorithm):
    """Take an inner step on a batch of each of S domains in random order, then set θ ← θ + ε(θ̃ − θ).

    For a small inner learning rate α and plain SGD, the expected inner loop is

        E[θ − θ̃] = α Σ_i g_i − α²/2 ∇ Σ_{i<j} g_i·g_j

    a descent on the losses and an ascent on the inner products of gradients: a first-order form of IDGM.

    Args:
        meta_lr: ε, as in the formula (the code of the authors divides its setting by S).
        inner_state: ``"carry"`` keeps the moments of the inner optimizer from one inner loop to the next,
            ``"reset"`` resets them; a number resets them every that many steps, as the code of the authors
            does every epoch.
        interpolate_buffers: interpolate floating-point buffers such as BatchNorm statistics like weights, as
            the code of the authors does, which biases running variances low.

    Reference: Shi et al., Gradient Matching for Domain Generalization, 2021.
    """

    family = "gradient matching"
    reference = "Shi et al. 2021"
    min_domains = 2
    meta_lr: Annotated[float, Range(above=0, most=1, search=choice(0.05, 0.1, 0.5))] = 0.5
    inner_state: Literal["carry", "reset"] | Count = "carry"
    interpolate_buffers: bool = False

    def setup(self) -> None:
        state = self.inner_state
        self.reset_every = state if isinstance(state, int) else int(state == "reset")

    def prepare(self, optimizer: Optimizer, lr: float) -> None:
        known = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
        starts_at_zero = known and not any(group.get("dampening") for group in optimizer.param_groups)
        if self.reset_every > 1 and not starts_at_zero:
            raise InputError(
                f"inner_state={self.reset_every} requires Adam, AdamW or SGD without dampening, got "
                f"{type(optimizer).__name__}; inner_state='carry' and 'reset' support any optimizer."
            )

    def step(self, batch: MetaBatch, engine: Engine, step: Step) -> Log:
        state = list(engine.params)
        if self.interpolate_buffers:
            state += [b for b in self.model.buffers() if b.is_floating_point()]
        start = [tensor.detach().clone() for tensor in state]
        self.reset(engine.optimizer, step)
        log = self.inner_loop(batch, engine)
        with torch.no_grad():
            torch._foreach_lerp_(start, state, self.meta_lr)
            torch._foreach_copy_(state, start)
        return log

    def inner_loop(self, batch: MetaBatch, engine: Engine) -> Log:
        """A step of the optimizer on each block."""
        losses = []
        for block in batch.split():
            gradient, log = engine.mean_gradient(block)
            engine.apply(gradient)
            losses.append(log["losses"])
        return {"losses": torch.cat(losses)}

    def reset(self, optimizer: Optimizer, step: Step) -> None:
        """Forgets the moments of the optimizer, where this step begins with new ones."""
        if self.reset_every == 1:
            optimizer.state.clear()
        elif self.reset_every:  # by a factor, which a CUDA graph can have: 0 in these steps, otherwise 1
            factor = step % self.reset_every != 0
            for moment in (m for moments in optimizer.state.values() for m in moments.values()):
                if isinstance(moment, Tensor):
                    moment.mul_(factor)
