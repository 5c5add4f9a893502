"""MLDG: meta-learning of steps on some domains that also reduce the loss on others."""

from functools import partial
from typing import Annotated, Literal

import torch

from shoal.algorithms.base import Algorithm, Engine, Gradient, Log, Step
from shoal.data.batch import MetaBatch
from shoal.gradients import curvature, moved
from shoal.replay import preserve_state, random_state
from shoal.settings import Range, choice, log10


class MLDG(Algorithm):
    """Minimise F(θ) + β G(θ − α∇F(θ)), with the losses F and G of different domains of a step.

    The domains of G are chosen at random in every step.

    Args:
        beta: weight β of the held-out domains.
        inner_lr: learning rate α of the virtual step.
        held_out: number of domains of a step in G, but not all of them.
        order: ``"exact"`` differentiates through the virtual step, ∇F + β(I − α∇²F)∇G; ``"first"`` omits
            ∇²F, at half the cost.

    Reference: Li et al., Learning to Generalize: Meta-Learning for Domain Generalization, AAAI 2018.
    """

    family = "meta-learning"
    reference = "Li et al. AAAI 2018"
    min_domains = 2
    per_domain = True
    beta: Annotated[float, Range(0, search=log10(-1, 1))] = 1.0
    inner_lr: Annotated[float, Range(0, search=log10(-2, 0))] = 0.1
    held_out: Annotated[int, Range(1, 1000, search=choice(1, 2))] = 2
    order: Literal["first", "exact"] = "first"

    def setup(self) -> None:
        self.second_order = self.order == "exact"

    def gradient(self, batch: MetaBatch, engine: Engine, step: Step) -> tuple[Gradient, Log]:
        split = max(1, len(batch.sizes) - self.held_out)
        middle = sum(batch.sizes[:split])
        rest = batch.rows(slice(middle), batch.sizes[:split])
        held = batch.rows(slice(middle, None), batch.sizes[split:])
        before = random_state(self.model) if self.second_order else None
        g, log = engine.mean_gradient(rest)
        with moved(engine.params, g, -self.inner_lr):
            h, held_log = engine.mean_gradient(held)
        if self.second_order:
            # In the order of the first pass, for the same dropout masks.
            again = [partial(self.block_loss, engine, block) for block in rest.split()]
            with preserve_state(self.model, since=before):
                product = engine.average(curvature(again, engine.params, h))
            h = [a - self.inner_lr * b for a, b in zip(h, product, strict=True)]
        total = [a + self.beta * b for a, b in zip(g, h, strict=True)]
        return total, {"losses": torch.cat([log["losses"], held_log["losses"]])}
