"""What an algorithm is. Override the smallest of three seams: objective, gradient, step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.data.batch import DomainBatch, Task
from shoal.data.sampler import Draw

Loss = Callable[[Any, Tensor], Tensor]
Log = dict[str, Tensor]


Objective = Callable[[Sequence[DomainBatch]], tuple[Tensor, Log]]


class Engine(Protocol):
    """The verbs an algorithm trains with (see :mod:`shoal.training.engine`)."""

    params: list[nn.Parameter]
    processes: int

    def gradients(self, objective: Objective, batches: Sequence[DomainBatch]) -> tuple[list[Tensor], Log]:
        """The gradient of ``objective(batches)`` and its log.

        Averaged over processes and over parts of the batches, each of which holds the same share of every
        batch: exact for what is a mean over examples, and therefore to be called before anything non-linear
        is done with gradients.
        """

    def parts(self, batches: Sequence[DomainBatch]) -> list[tuple[float, list[DomainBatch]]]:
        """The pieces in which ``gradients`` takes batches, with their weights; mostly a single one."""

    def average(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Means over processes, weighted by how many examples each holds."""

    def apply(self, gradients: Sequence[Tensor], losses: Tensor | None = None) -> None:
        """One step of the optimizer along these gradients; none where they or ``losses`` are not finite."""


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
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        """The precision in which the engine wants the model to compute."""

    def wrap(self, optimizer: Optimizer, domains_per_step: int) -> Optimizer:
        """The optimizer to train with, made from the user's."""
        return optimizer

    def forward(self, x: Any) -> Any:
        """The model's output, computed in the engine's precision and handed over in full."""
        with self.autocast():
            output = self.model(x)
        return full_precision(output)

    def domain_loss(self, batch: DomainBatch) -> Tensor:
        return self.loss(self(batch.x), batch.y)

    def objective(self, batches: Sequence[DomainBatch]) -> tuple[Tensor, Log]:
        """The scalar to minimise, and what to log of it; ``losses`` holds one number a batch."""
        if len(batches) == 1:
            loss = self.domain_loss(batches[0])
            return loss, {"losses": loss.detach()[None]}
        losses = torch.stack([self.domain_loss(b) for b in batches])
        return losses.mean(), {"losses": losses.detach()}

    def gradient(self, batches: Sequence[DomainBatch], engine: Engine) -> tuple[list[Tensor], Log]:
        return engine.gradients(self.objective, batches)

    def step(self, batches: Sequence[DomainBatch], engine: Engine) -> Log:
        gradients, log = self.gradient(batches, engine)
        engine.apply(gradients, log["losses"])
        return log


def full_precision(output: Any) -> Any:
    """Half-precision tensors of a nest as float32; everything else as it is."""
    if isinstance(output, Tensor):
        return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*(full_precision(part) for part in output))
    if isinstance(output, (list, tuple)):
        return type(output)(full_precision(part) for part in output)
    if isinstance(output, dict):
        return type(output)({name: full_precision(part) for name, part in output.items()})
    return output
