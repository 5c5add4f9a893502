"""SmoothFish: Fish with the weight of gradient matching as a hyperparameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.algorithms.base import Batches, Engine, Log, Loss
from shoal.algorithms.fish import Fish
from shoal.data.batch import Task
from shoal.optim import Fish as FishOptimizer
from shoal.optim import clone_state, copy_where
from shoal.replay import leaves_no_trace
from shoal.settings import Range, choice


class SmoothFish(Fish):
    """Update θ ← θ − ε G with G = D + γ((θ − θ̃) − D): γ = 1 is Fish, γ = 0 plain training.

    θ̃ is the end of the inner loop of Fish. D is the displacement of the same inner optimizer, from the same
    state, with the S gradients all computed at θ: with plain SGD it is αS times the mean gradient, so that γ
    = 0 is a step of ERM with learning rate εαS. (θ − θ̃) − D is the matching term. The cost is a second
    forward and backward pass per domain and a copy of the state of the inner optimizer.

    Args:
        gamma: weight γ of the matching term.
        **fish_settings: hyperparameters of :class:`Fish`.

    Reference: Shi et al., Gradient Matching for Domain Generalization, 2021, appendix B. The signs in its
    algorithm box contradict its text; this follows the text.
    """

    repeats_passes = True

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        task: Task,
        *,
        gamma: Annotated[float, Range(0, 1, search=choice(0.1, 0.2, 0.5, 0.8))] = 0.5,
        **fish_settings: Any,
    ) -> None:
        super().__init__(model, loss, task, **fish_settings)
        self.gamma = gamma

    def make_walks(self, optimizer: Optimizer, inner_steps: int) -> FishOptimizer:
        made = _TwoWalks(optimizer, inner_steps, **self.settings)
        made.gamma = self.gamma
        return made

    def walk(self, batches: Batches, engine: Engine) -> Log:
        assert isinstance(self.walks, _TwoWalks)
        with leaves_no_trace(self.model):  # so that the walk below draws the same dropout masks
            at_start = [self.mean_gradient([b], engine) for b in batches]
        with self.walks.rehearsal():
            for gradients, _ in at_start:
                engine.apply(gradients)
        log = super().walk(batches, engine)
        rehearsed = torch.cat([first["losses"] for _, first in at_start])
        # A loss that was not finite only in the rehearsal spoils the step just as well, and is to be known.
        return {**log, "losses": torch.where(rehearsed.isfinite(), log["losses"], rehearsed)}


class _TwoWalks(FishOptimizer):
    """Fish whose blend aims between the ends of two walks: γ of the real one, 1 − γ of a rehearsed one."""

    gamma: float
    rehearsing = False

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Steps in this block start a walk from here; its end is kept, parameters and state are put back."""
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        start = [p.detach().clone() for p in params]
        self._unshare()
        state = self.inner.state
        self.inner.state = clone_state(self._fresh if self.inner_state == "reset" else state)
        self.rehearsing = True
        try:
            yield
            self.rehearsed = [p.detach().clone() for p in params]
        finally:
            self.rehearsing = False
            self.inner.state = state
            with torch.no_grad():
                torch._foreach_copy_(params, start)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if self.rehearsing:
            return self._inner_step(closure)
        return super().step(closure)

    def blend(self) -> None:
        if self._spoilt is not None:
            copy_where(self._spoilt, self.rehearsed, self._left())
        torch._foreach_lerp_(self.rehearsed, self._walking(), self.gamma)
        torch._foreach_copy_(self._walking(), self.rehearsed)
        super().blend()
