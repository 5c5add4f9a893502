"""DANN: features from which the domain cannot be predicted."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.algorithms.base import Algorithm, Batches, Engine, Gradients, Log, Loss, Outputs, check_state
from shoal.algorithms.penalty import PenaltyWeight, Steps, flat
from shoal.data.batch import Task, widest
from shoal.gradients import gradient
from shoal.settings import Range, choice, log2, log10


class DANN(Algorithm):
    """Trains an adversary to predict the domain from the features, and the model to increase its loss.

        adversary   min  CE(a(features), domain) + penalty · ‖∂CE/∂features‖²
        model       min  1/S Σ_i L_i − λ CE(a(features), domain)

    Both move in every step, the adversary first, on the same features.

    Args:
        weight: λ.
        start, ramp: λ is 0 for ``start`` steps and then rises linearly for ``ramp`` steps.
        adversary_steps: the adversary's for each of the model's.
        gradient_penalty: keeps the adversary smooth.
        adversary_lr, beta1: of the adversary's own Adam.
        width, depth: of the adversary, a multilayer perceptron.

    Reference: Ganin et al., Domain-Adversarial Training of Neural Networks, JMLR 2016.
    """

    family = "adversarial"
    reference = "Ganin et al. 2016"
    compares_domains = True
    knows_domains = True
    needs_features = True
    trains_adversary = True
    capturable = True

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        task: Task,
        *,
        weight: Annotated[float, Range(0, search=log10(-2, 2))] = 1.0,
        start: Steps = 0,
        ramp: Steps = 0,
        adversary_steps: Annotated[int, Range(1, 100, search=log2(0, 3))] = 1,
        gradient_penalty: Annotated[float, Range(0, search=log10(-2, 1))] = 0.0,
        adversary_lr: Annotated[float, Range(above=0, most=1e6, search=log10(-4.5, -2.5))] = 1e-3,
        beta1: Annotated[float, Range(0, below=1, search=choice(0.0, 0.5))] = 0.5,
        width: Annotated[int, Range(1, 2**14)] = 256,
        depth: Annotated[int, Range(1, 100)] = 3,
        features: str | None = None,
    ) -> None:
        super().__init__(model, loss, task, features=features)
        assert task.features is not None
        self.weight = PenaltyWeight(weight, start, ramp, steps=task.steps)
        self.adversary_steps, self.gradient_penalty = adversary_steps, gradient_penalty
        self.adversary_lr, self.beta1 = adversary_lr, beta1
        widths = [task.features, *[width] * (depth - 1)]
        check_state(type(self).__name__, task.domains, widths[-1], "an output of the adversary")
        layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
        example = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
        self.adversary = nn.Sequential(*layers, nn.Linear(widths[-1], task.domains)).to(example.dtype)

    def auxiliary_optimizers(self) -> dict[str, Optimizer]:
        betas = (self.beta1, 0.9)
        return {"adversary": torch.optim.Adam(self.adversary_parameters(), lr=self.adversary_lr, betas=betas)}

    def adversary_parameters(self) -> list[nn.Parameter]:
        """What the adversary's optimizer trains."""
        return list(self.adversary.parameters())

    def gradient(self, batches: Batches, engine: Engine) -> Gradients:
        return engine.gradients(self, batches, objective=partial(self.train_adversary, engine))

    def train_adversary(self, engine: Engine, outputs: Outputs) -> tuple[Tensor, Log]:
        """The adversary's steps, and then the objective."""
        seen = [v._replace(features=flat(v).detach()) for v in outputs]
        for _ in range(self.adversary_steps):
            loss = self.adversary_loss(seen)
            if self.gradient_penalty:
                loss = loss + self.gradient_penalty * self.gradient_norm(seen)
            engine.apply(gradient(loss, self.adversary_parameters()), auxiliary="adversary")
        return self.objective(outputs)

    def objective(self, outputs: Outputs) -> tuple[Tensor, Log]:
        losses, loss = self.losses(outputs), self.adversary_loss(outputs)
        total = losses.mean() - self.weight.next().to(loss.dtype) * loss
        return total, {"losses": losses.detach(), "adversary": loss.detach()}

    def adversary_loss(self, outputs: Outputs) -> Tensor:
        """The adversary's weighted loss over all examples."""
        each, y = self.example_losses(outputs, torch.cat([flat(v) for v in outputs]))
        return (self.example_weights(y).to(each.dtype) * each).sum()

    def gradient_norm(self, outputs: Outputs) -> Tensor:
        """The gradient penalty: the mean squared norm of the gradient of the loss by the features."""
        features = torch.cat([flat(v) for v in outputs]).requires_grad_()
        each, _ = self.example_losses(outputs, features)
        (slope,) = torch.autograd.grad(each.sum(), features, create_graph=True)
        return slope.square().sum(1).mean()

    def example_losses(self, outputs: Outputs, features: Tensor) -> tuple[Tensor, Tensor]:
        """The adversary's loss on every example, and the examples' labels."""
        y = torch.cat([v.y for v in outputs])
        domain = torch.cat([n.expand(len(v.y)) for n, v in zip(self.ids(outputs), outputs, strict=True)])
        logits = self.adversary(self.adversary_input(features, y))
        return nn.functional.cross_entropy(logits, domain, reduction="none"), y

    def adversary_input(self, features: Tensor, y: Tensor) -> Tensor:
        """What the adversary classifies."""
        return features

    def example_weights(self, y: Tensor) -> Tensor:
        """The weight of each example; the sum is 1."""
        return torch.full((len(y),), 1 / len(y), dtype=widest(y.device), device=y.device)
