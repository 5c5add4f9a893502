"""What an algorithm is. Override the smallest of three seams: objective, gradient, step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.data.batch import TASKS, MetaBatch, Task
from shoal.errors import InputError
from shoal.losses import Loss as Loss
from shoal.losses import find_terms
from shoal.models.calling import arguments
from shoal.models.feature_model import FeatureModel
from shoal.models.features import FeatureExtractor
from shoal.options import Draw as Draw
from shoal.tensors import map_nest

if TYPE_CHECKING:
    from shoal.penalties import Blocks

Log = dict[str, Tensor]
Gradient = list[Tensor]
Step = int | Tensor
"""The number of a step, counted from 0; while a CUDA graph is made of it, a tensor on the device."""


class Outputs(NamedTuple):
    """What a forward pass of a meta-batch returns: output, features (B, d) if used, and the batch."""

    output: Any
    features: Any
    batch: MetaBatch

    @property
    def y(self) -> Tensor:
        return self.batch.y

    @property
    def blocks(self) -> Blocks:
        """The domains of the examples, as the functions of :mod:`shoal.penalties` take them."""
        return self.batch.blocks

    @property
    def logits(self) -> Tensor:
        """The output, which must be one tensor."""
        if not isinstance(self.output, Tensor):
            kind = type(self.output).__name__
            raise InputError(f"the algorithm needs a model that returns one tensor, not a {kind}.")
        return self.output

    def split(self) -> list[Outputs]:
        """One for each block."""
        if len(self.batch.sizes) == 1:
            return [self]
        whole = MetaBatch((self.output, self.features), self.y, self.y, self.batch.sizes)
        return [Outputs(o.x[0], o.x[1], b) for o, b in zip(whole.split(), self.batch.split(), strict=True)]


Objective = Callable[[Outputs], tuple[Tensor, Log]]
Forward = Callable[[MetaBatch], Outputs]


class Engine(Protocol):
    """What an algorithm trains with; :class:`shoal.training.engine.Engine` is the one that does it.

    ``params`` is what the optimizer trains; a gradient is a list with one tensor for each. ``alone`` says
    that no other process has a part of the batches.
    """

    params: list[Tensor]
    optimizer: Optimizer
    alone: bool

    def forward(self, batch: MetaBatch, part: nn.Module | None = None) -> Outputs:
        """A forward pass of the model, or a part of it, in the precision of the training; outputs in fp32."""

    def mean_gradient(
        self, batch: MetaBatch, objective: Objective | None = None, forward: Forward | None = None
    ) -> tuple[Gradient, Log]:
        """The gradient of a mean over examples, by default the mean over blocks of their mean losses."""

    def gradient(self, batch: MetaBatch, objective: Objective) -> tuple[Gradient, Log]:
        """The gradient of any objective, which gets the outputs of the whole meta-batch."""

    def gather(self, out: Outputs) -> Outputs:
        """The outputs of the whole meta-batch, of which each process has a part."""

    def average(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Means over processes."""

    def broadcast(self, tensor: Tensor) -> Tensor:
        """What the first process has, in all of them: for random numbers that must be the same."""

    def apply(self, gradient: Sequence[Tensor], auxiliary: str | None = None) -> None:
        """One step of the optimizer, or of an auxiliary one of this name."""


class DomainBed(NamedTuple):
    """How DomainBed's protocol trains an algorithm, and options of its Adam beside those that it searches."""

    settings: Mapping[str, Any]
    optimizer: Mapping[str, Any] = {}


class Algorithm(nn.Module):
    """Base class of algorithms, which train ``model`` on one :class:`~shoal.data.MetaBatch` per step.

    A subclass overrides one of

    * :meth:`objective` if the algorithm is a loss,
    * :meth:`gradient` if it combines the gradients of the domains,
    * :meth:`step` if it is an update rule,

    and sets how its batches are sampled. Its hyperparameters are attributes of the class, annotated with
    their ranges (:mod:`shoal.settings`), with the defaults of the paper; :func:`shoal.algorithms.build`
    checks what is given instead. What is made from them is made in :meth:`setup`. State between steps must be
    in parameters or buffers, so that it is saved with the model. Steps are counted from 0; while a step is
    made a CUDA graph, its number is a tensor on the device.

    Args:
        model: model to train.
        loss: ``loss(output, y)``, a *mean* over examples.
        task: number of domains and classes, and kind of the task.
        features: for algorithms that use features: name of the layer that returns them (default: the input of
            the last linear layer).
        **settings: hyperparameters.
    """

    family: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    draw: ClassVar[Draw] = "domains"
    """How batches are sampled (see :class:`~shoal.data.DomainBatchSampler`)."""
    needs_features: ClassVar[bool] = False
    """Uses ``out.features``: of a :class:`~shoal.models.FeatureModel` its features, of others what a
    :class:`~shoal.models.FeatureExtractor` records."""
    min_domains: ClassVar[int] = 1
    """Domains that a step needs."""
    tasks: ClassVar[frozenset[str]] = frozenset(TASKS)
    """What it can be trained for (see :class:`~shoal.data.Task`)."""
    sample_weights: ClassVar[bool] = True
    """Examples may have weights: it takes every loss from :meth:`losses`."""
    plain_mean: ClassVar[bool] = False
    """Takes the loss for the plain mean of its examples' losses: no class weights, for instance."""
    second_order = False
    """Differentiates the model twice, by itself: compiled models and the penalty of MIRO cannot be used."""
    per_domain = False
    """One forward pass per domain, so that BatchNorm computes its statistics per domain."""
    features: str | None = None

    def __init__(self, model: nn.Module, loss: Loss, task: Task, **settings: Any) -> None:
        super().__init__()
        self.model, self.loss, self.task = model, loss, task
        self.terms = find_terms(loss)
        for name, value in settings.items():
            setattr(self, name, value)
        self.extractor: FeatureExtractor | None = None
        if self.needs_features and (self.features is not None or not isinstance(model, FeatureModel)):
            self.extractor = FeatureExtractor(model, self.features)
            self.extractor.close()
        self.setup()

    def setup(self) -> None:
        """Make what the steps need from the hyperparameters, at the end of the construction."""

    # The three seams, from the smallest on

    def objective(self, out: Outputs, step: Step) -> tuple[Tensor, Log]:
        """The loss to minimise, and a log with ``losses``, the mean loss of each block (S,)."""
        losses = self.losses(out)
        return losses.mean(), {"losses": losses.detach()}

    def gradient(self, batch: MetaBatch, engine: Engine, step: Step) -> tuple[Gradient, Log]:
        """The gradient to step along, one tensor for each of ``engine.params``, and the log."""
        if type(self).objective is Algorithm.objective:
            return engine.mean_gradient(batch)
        return engine.gradient(batch, lambda out: self.objective(out, step))

    def step(self, batch: MetaBatch, engine: Engine, step: Step) -> Log:
        """One update of the model; the log."""
        gradient, log = self.gradient(batch, engine, step)
        engine.apply(gradient)
        return log

    # What they use

    def losses(self, out: Outputs) -> Tensor:
        """The mean loss of each block, (S,), with sample weights where there are any."""
        return torch.stack([self.mean_loss(part) for part in out.split()])

    def mean_loss(self, out: Outputs) -> Tensor:
        """The mean loss of a batch, with its sample weights."""
        if out.batch.weight is None:
            return self.loss(out.output, out.batch.y)
        assert self.terms is not None  # checked with the data
        return self.terms.mean(out.output, out.batch.y, out.batch.weight)

    def domain_gradients(self, batch: MetaBatch, engine: Engine) -> tuple[list[Gradient], Log]:
        """The gradient of each block's mean loss."""
        found = [engine.mean_gradient(block) for block in batch.split()]
        return [g for g, _ in found], {"losses": torch.cat([log["losses"] for _, log in found])}

    def block_loss(self, engine: Engine, batch: MetaBatch) -> Tensor:
        """The mean loss of a batch, from a forward pass of its own."""
        return self.mean_loss(engine.forward(batch))

    # What the trainer calls before and around the steps

    def prepare(self, optimizer: Optimizer, lr: float) -> None:
        """Called before the first step, with the optimizer and its learning rate."""

    def auxiliary_optimizers(self) -> dict[str, Optimizer]:
        """Optimizers of its own, by name, for modules that the user's optimizer is not to train."""
        return {}

    def check_input(self, x: Any) -> None:
        """Raises InputError for inputs (two examples as a batch) that it cannot work with."""
        if self.extractor is not None:
            args, kwargs = arguments(self.model, x)
            self.extractor.find(*args, **kwargs)

    @classmethod
    def domainbed(cls, settings: Mapping[str, Any]) -> DomainBed:
        """How DomainBed trains it with these ``settings`` of its search space."""
        return DomainBed(settings)


class Surgery(Algorithm):
    """Base class of algorithms that :meth:`combine` the gradients of the domains."""

    family = "gradient surgery"
    min_domains = 2

    def combine(self, gradients: list[Gradient]) -> Gradient:
        """One gradient made of those of several domains."""
        raise NotImplementedError

    def gradient(self, batch: MetaBatch, engine: Engine, step: Step) -> tuple[Gradient, Log]:
        gradients, log = self.domain_gradients(batch, engine)
        return gradients[0] if len(gradients) == 1 else self.combine(gradients), log


def trained_parameters(algorithm: Algorithm, auxiliary: Mapping[str, Optimizer]) -> list[nn.Parameter]:
    """What the user's optimizer is to train: everything but what the algorithm's own ones do."""
    own = {id(p) for h in auxiliary.values() for group in h.param_groups for p in group["params"]}
    return [p for p in algorithm.parameters() if p.requires_grad and id(p) not in own]


def full_precision(output: Any) -> Any:
    """Half-precision tensors of a nest as float32; everything else as it is."""
    half = (torch.bfloat16, torch.float16)
    return map_nest(lambda v: v.float() if isinstance(v, Tensor) and v.dtype in half else v, output)
