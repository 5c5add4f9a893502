"""What an algorithm is. Override the smallest of three seams: objective, gradient, step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.data.batch import DomainBatch, Task
from shoal.data.sampler import Draw

Loss = Callable[[Any, Tensor], Tensor]
Log = dict[str, Tensor]


class Engine(Protocol):
    """The verbs an algorithm trains with (see :mod:`shoal.training.engine`)."""

    params: list[nn.Parameter]

    def gradients(self, loss: Tensor) -> list[Tensor]:
        """The gradient of ``loss`` with respect to the trained parameters, averaged over processes."""

    def apply(self, gradients: Sequence[Tensor]) -> None:
        """One step of the optimizer along these gradients."""


class Algorithm(nn.Module):
    """Trains ``model`` on meta-batches: lists of S :class:`~shoal.data.DomainBatch`.

    A subclass overrides one of

    * :meth:`objective` if the algorithm is a loss,
    * :meth:`gradient` if it combines the domains' gradients,
    * :meth:`step` if it is an update rule,

    and states how its batches are drawn. Its settings are keyword arguments of ``__init__`` with the paper's
    defaults. Whatever it remembers between steps is a parameter or a buffer, so that it is saved with the
    rest. ``loss(output, y)`` is a *mean* over examples.
    """

    family: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    draw: ClassVar[Draw] = "domains"
    compares_domains: ClassVar[bool] = False
    """Meaningless with fewer than two training domains."""
    second_order: ClassVar[bool] = False
    repeats_passes: ClassVar[bool] = False
    """Passes a minibatch through the model more than once a step (see :mod:`shoal.replay`)."""
    capturable: ClassVar[bool] = False
    """A step is the same sequence of tensor operations whatever the batches hold, their domain included."""
    search_space: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, model: nn.Module, loss: Loss, task: Task) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.task = task

    def wrap(self, optimizer: Optimizer, domains_per_step: int) -> Optimizer:
        """The optimizer to train with, made from the user's."""
        return optimizer

    def domain_loss(self, batch: DomainBatch) -> Tensor:
        return self.loss(self.model(batch.x), batch.y)

    def objective(self, batches: Sequence[DomainBatch]) -> tuple[Tensor, Log]:
        """The scalar to minimise, and what to log of it; ``losses`` holds one number a batch."""
        losses = torch.stack([self.domain_loss(b) for b in batches])
        return losses.mean(), {"losses": losses.detach()}

    def gradient(self, batches: Sequence[DomainBatch], engine: Engine) -> tuple[list[Tensor], Log]:
        objective, log = self.objective(batches)
        return engine.gradients(objective), log

    def step(self, batches: Sequence[DomainBatch], engine: Engine) -> Log:
        gradients, log = self.gradient(batches, engine)
        engine.apply(gradients)
        return log
