"""SmoothFish: Fish with the weight of gradient matching as a hyperparameter."""

from typing import Annotated, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.algorithms.base import Engine, Log
from shoal.algorithms.fish import Fish
from shoal.data.batch import MetaBatch
from shoal.replay import preserve_state
from shoal.settings import Range, choice


class SmoothFish(Fish):
    """Update θ ← θ − ε G with G = D + γ((θ − θ̃) − D): γ = 1 is Fish, γ = 0 plain training.

    θ̃ is the end of the inner loop of Fish. D is the displacement of the same inner optimizer, from the same
    state, with the S gradients all computed at θ: with plain SGD, γ = 0 is a step of ERM with learning rate
    εαS. The cost is a second pass per domain and a copy of the state of the inner optimizer.

    Args:
        gamma: weight γ of the matching term.

    Reference: Shi et al., Gradient Matching for Domain Generalization, 2021, appendix B. The signs in its
    algorithm box contradict its text; this follows the text.
    """

    gamma: Annotated[float, Range(0, 1, search=choice(0.1, 0.2, 0.5, 0.8))] = 0.5

    def inner_loop(self, batch: MetaBatch, engine: Engine) -> Log:
        start, moments = [p.detach().clone() for p in engine.params], _copied(engine.optimizer)
        with preserve_state(self.model):  # the inner loop below has the same dropout masks
            gradients, _ = self.domain_gradients(batch, engine)
        for gradient in gradients:
            engine.apply(gradient)
        plain = [p.detach().clone() for p in engine.params]
        _put_back(engine.optimizer, moments)
        with torch.no_grad():
            torch._foreach_copy_(engine.params, start)
        log = super().inner_loop(batch, engine)
        with torch.no_grad():
            torch._foreach_lerp_(plain, engine.params, self.gamma)
            torch._foreach_copy_(engine.params, plain)
        return log


def _copied(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    return {
        p: {name: v.clone() if isinstance(v, Tensor) else v for name, v in moments.items()}
        for p, moments in optimizer.state.items()
    }


def _put_back(optimizer: Optimizer, before: dict[Tensor, dict[str, Any]]) -> None:
    """In place, since a CUDA graph reads and writes the optimizer's own tensors."""
    for p, moments in list(optimizer.state.items()):
        if p not in before:  # made in between, and made again
            del optimizer.state[p]
            continue
        for name, value in before[p].items():
            if isinstance(value, Tensor):
                moments[name].copy_(value)
            else:
                moments[name] = value
