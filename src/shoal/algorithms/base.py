"""What an algorithm is. Override the smallest of three seams: objective, gradient, step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.data.batch import TASKS, DomainBatch, Task, cut, pool
from shoal.data.sampler import Draw
from shoal.errors import InputError
from shoal.losses import UNKNOWN_LOSS, find_terms, shown_loss
from shoal.losses import Loss as Loss
from shoal.models import FeatureExtractor, FeatureModel
from shoal.models.calling import arguments, call
from shoal.settings import checked

Log = dict[str, Tensor]

LARGEST_STATE = 2 * 2**30
"""Bytes that an algorithm may keep for all domains together."""


class DomainOutput(NamedTuple):
    """The output of the model for a batch.

    Attributes:
        output: output of the model.
        y: labels of the batch.
        domain: index of the domain, or ``None`` for a mixed batch.
        features: features, if the algorithm uses them.
        weight: sample weights of the batch (see :class:`~shoal.data.DomainBatch`).
        normalizer: normalizer of the batch (see :class:`~shoal.data.DomainBatch`).
    """

    output: Any
    y: Tensor
    domain: int | Tensor | None
    features: Any = None
    weight: Tensor | None = None
    normalizer: Tensor | None = None


Batches = Sequence[DomainBatch]
Outputs = Sequence[DomainOutput]
Gradients = tuple[list[Tensor], Log]
"""A gradient for every parameter, and what to log."""
Forward = Callable[[Batches], list[DomainOutput]]
Objective = Callable[[Outputs], tuple[Tensor, Log]]


class Engine(Protocol):
    """The operations with which an algorithm trains (see :mod:`shoal.training.engine`)."""

    params: list[nn.Parameter]
    processes: int

    def gradients(
        self,
        algorithm: Algorithm,
        batches: Batches,
        *,
        objective: Objective | None = None,
        forward: Forward | None = None,
        additive: bool | None = None,
    ) -> Gradients:
        """The gradient of the algorithm's objective on these batches, and its log.

        The objective sees whole batches, however they are spread over processes and pieces. An ``additive``
        one is a mean over examples: each piece is then taken on its own, which is cheaper.
        """

    def parts(self, batches: Batches) -> list[tuple[float, list[DomainBatch]]]:
        """The pieces in which batches are taken, with their weights; mostly a single one."""

    def average(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Means over processes, weighted by how many examples each holds."""

    def agree(self, tensor: Tensor) -> Tensor:
        """What the first process has, in all of them: for random numbers that must be the same."""

    def apply(
        self,
        gradients: Sequence[Tensor],
        losses: Tensor | None = None,
        auxiliary: str | None = None,
        *,
        shift: Sequence[Tensor] | None = None,
    ) -> None:
        """One step of the optimizer along these gradients; none where they or ``losses`` are not finite.

        With ``auxiliary``, of the algorithm's own optimizer of that name. ``shift`` is added to the
        parameters before the step, if there is one.
        """


class DomainBed(NamedTuple):
    """How DomainBed's protocol trains an algorithm."""

    settings: Mapping[str, Any]
    optimizer: Mapping[str, Any] = {}
    """Options of its Adam, beside those that the protocol searches."""


class Algorithm(nn.Module):
    """Base class of algorithms, which train ``model`` on lists of S :class:`~shoal.data.DomainBatch`.

    A subclass overrides one of

    * :meth:`objective` if the algorithm is a loss,
    * :meth:`gradient` if it combines the gradients of the domains,
    * :meth:`step` if it is an update rule,

    and sets how its batches are sampled. Its hyperparameters are keyword arguments of ``__init__``, annotated
    with their ranges (:mod:`shoal.settings`) and with the defaults of the paper; they are checked before
    ``__init__`` is called. State between steps must be in parameters or buffers, so that it is saved with the
    model; state per domain is indexed by :meth:`ids`.

    Args:
        model: model to train.
        loss: ``loss(output, y)``, a *mean* over examples.
        task: number of domains and classes, and kind of the task.
        features: for algorithms that use features: name of the layer that returns them (default: the input of
            the last linear layer).
    """

    family: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    draw: ClassVar[Draw] = "domains"
    passes: Literal["together", "apart"] = "together"
    """Whether a step's batches go through the model as one or one by one: BatchNorm sees the difference."""
    additive: ClassVar[bool] = False
    """The objective is a mean over examples."""
    compares_domains: ClassVar[bool] = False
    """Meaningless with fewer than two training domains."""
    knows_domains: ClassVar[bool] = False
    """Keeps something for each domain, by its number."""
    needs_features: ClassVar[bool] = False
    """Uses features: what a :class:`~shoal.models.FeatureModel` has between its parts, and what a
    :class:`~shoal.models.FeatureExtractor` records of any other model."""
    trains_discriminator: ClassVar[bool] = False
    mean_of_examples: ClassVar[bool] = False
    """Takes the loss of a batch for the mean of its examples' losses."""
    tasks: ClassVar[frozenset[str]] = frozenset(TASKS)
    """What it can be trained for (see :class:`~shoal.data.Task`)."""
    sample_weights: ClassVar[bool] = True
    """Examples may have weights: it takes every loss from :meth:`losses` or :meth:`domain_loss`."""
    instead: ClassVar[Sequence[str]] = ()
    """Algorithms to name where this one cannot be had."""
    by_engine: ClassVar[bool] = True
    """All its gradients come from ``engine.gradients``, where a penalty can be added."""
    second_order: ClassVar[bool] = False
    repeats_passes: ClassVar[bool] = False
    """Passes a minibatch through the model more than once a step (see :mod:`shoal.replay`)."""
    draws_numbers: ClassVar[bool] = False
    """Draws random numbers of its own."""
    capturable: ClassVar[bool] = False
    """A step is the same sequence of tensor operations whatever the batches hold, their domain included."""

    numbers: Tensor

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "__init__" in vars(cls):
            cls.__init__ = checked(cls.__init__)  # type: ignore[method-assign]

    def __init__(self, model: nn.Module, loss: Loss, task: Task, *, features: str | None = None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.task = task
        self.extractor: FeatureExtractor | None = None
        if self.needs_features and (features is not None or not isinstance(model, FeatureModel)):
            self.extractor = FeatureExtractor(model, features)
            self.extractor.close()
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        """The precision in which the engine wants the model to compute."""
        if self.knows_domains:
            self.register_buffer("numbers", torch.arange(task.domains), persistent=False)

    @classmethod
    def domainbed(cls, settings: Mapping[str, Any]) -> DomainBed:
        """How DomainBed trains it with these ``settings`` of its search space."""
        return DomainBed(settings)

    def auxiliary_optimizers(self) -> dict[str, Optimizer]:
        """Optimizers of its own, by name, for modules that the user's optimizer is not to train."""
        return {}

    def wrap(self, optimizer: Optimizer, domains_per_step: int) -> Optimizer:
        """The optimizer to train with, made from the user's."""
        return optimizer

    def check_step(self, domains_per_step: int) -> None:
        """Raises InputError where its settings do not go with so many domains per step."""

    def check_input(self, x: Any) -> None:
        """Raises InputError for inputs (two examples as a batch) that it cannot work with."""
        if self.extractor is not None:
            args, kwargs = arguments(self.model, x)
            self.extractor.find(*args, **kwargs)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While it trains, what records the model's features is attached to the model."""
        if self.extractor is None:
            yield
            return
        self.extractor.attach()
        with self.extractor:
            yield

    def forward(self, x: Any) -> Any:
        """The model's output, computed in the engine's precision and handed over in full."""
        with self.autocast():
            output = call(self.model, x)
        return full_precision(output)

    def output_and_features(self, x: Any) -> tuple[Any, Any]:
        """Output and features (``None`` unless they are asked for)."""
        if not self.needs_features:
            return self(x), None
        if self.extractor is not None:
            self.extractor.attach()  # also before and after a training
            return self(x), full_precision(self.extractor.take())
        model: Any = self.model
        with self.autocast():
            features = model.features(x)
            output = model.head(features)
        return full_precision(output), full_precision(features)

    def forward_batches(self, batches: Batches) -> list[DomainOutput]:
        """What the model makes of each batch."""
        if self.passes == "apart" or len(batches) == 1:
            seen = [self.output_and_features(b.x) for b in batches]
        else:
            whole = self.output_and_features(pool(batches).x)
            ends = accumulate((len(b.y) for b in batches), initial=0)
            seen = [cut(whole, slice(a, b)) for a, b in pairwise(ends)]
        return [
            DomainOutput(output, b.y, b.domain, features, b.weight, b.normalizer)
            for (output, features), b in zip(seen, batches, strict=True)
        ]

    def ids(self, outputs: Outputs) -> Tensor:
        """The domains' numbers, (S,); a batch that mixes domains goes by its place in the step."""
        known = [place if v.domain is None else v.domain for place, v in enumerate(outputs)]
        return torch.stack([n if isinstance(n, Tensor) else self.numbers[n] for n in known])

    def domain_loss(self, batch: DomainBatch) -> Tensor:
        return self.batch_loss(DomainOutput(self(batch.x), *batch[1:3], None, *batch[3:]))

    def batch_loss(self, each: DomainOutput) -> Tensor:
        """The mean loss of a batch, with its sample weights where it has some."""
        if each.weight is None and each.normalizer is None:
            return self.loss(each.output, each.y)
        terms = find_terms(self.loss)
        if terms is None:
            raise InputError(UNKNOWN_LOSS.format("sample weights need", shown_loss(self.loss)))
        return terms.mean(each.output, each.y, each.weight, each.normalizer)

    def losses(self, outputs: Outputs) -> Tensor:
        """One mean loss a batch, (S,)."""
        return torch.stack([self.batch_loss(v) for v in outputs])

    def mean_loss(self, outputs: Outputs) -> tuple[Tensor, Log]:
        losses = self.losses(outputs)
        return losses.mean(), {"losses": losses.detach()}

    def objective(self, outputs: Outputs) -> tuple[Tensor, Log]:
        """The scalar to minimise, and what to log of it; ``losses`` holds one number a batch."""
        return self.mean_loss(outputs)

    def mean_gradient(self, batches: Batches, engine: Engine) -> Gradients:
        """Of the mean loss of these batches."""
        return engine.gradients(self, batches, objective=self.mean_loss, additive=True)

    def domain_gradients(self, batches: Batches, engine: Engine) -> tuple[list[list[Tensor]], Log]:
        """One gradient for each batch."""
        found = [self.mean_gradient([batch], engine) for batch in batches]
        return [g for g, _ in found], {"losses": torch.cat([log["losses"] for _, log in found])}

    def combined_gradient(
        self, batches: Batches, engine: Engine, combine: Callable[[list[list[Tensor]]], list[Tensor]]
    ) -> Gradients:
        """One gradient made of those of the batches; of a single batch its own."""
        gradients, log = self.domain_gradients(batches, engine)
        return gradients[0] if len(gradients) == 1 else combine(gradients), log

    def parts(self, batches: Batches, engine: Engine) -> list[Callable[[], Tensor]]:
        """Each batch's mean loss as :mod:`shoal.gradients` takes it for second derivatives."""
        return [partial(self._whole_loss, engine.parts([batch])) for batch in batches]

    def _whole_loss(self, parts: list[tuple[float, list[DomainBatch]]]) -> Tensor:
        return torch.stack([weight * self.domain_loss(part) for weight, (part,) in parts]).sum()

    def gradient(self, batches: Batches, engine: Engine) -> Gradients:
        return engine.gradients(self, batches)

    def step(self, batches: Batches, engine: Engine) -> Log:
        gradients, log = self.gradient(batches, engine)
        engine.apply(gradients, log.get("losses"))
        return log


def trained_parameters(algorithm: Algorithm, auxiliary: Mapping[str, Optimizer]) -> list[nn.Parameter]:
    """What the user's optimizer is to train: everything but what the algorithm's own ones do."""
    own = {id(p) for h in auxiliary.values() for group in h.param_groups for p in group["params"]}
    return [p for p in algorithm.parameters() if p.requires_grad and id(p) not in own]


def check_state(algorithm: str, domains: int, numbers: int, what: str) -> None:
    """Refuses to keep ``numbers`` numbers for each of the domains where they would fill the memory."""
    if (size := 4 * domains * numbers) > LARGEST_STATE:
        raise InputError(
            f"{algorithm} keeps {what} for each of {domains:,} domains: {numbers:,} numbers each, "
            f"{size / 2**30:.1f} GiB in all. Merge domains, or use an algorithm that keeps nothing per "
            "domain."
        )


def full_precision(output: Any) -> Any:
    """Half-precision tensors of a nest as float32; everything else as it is.

    Not by torch's pytree, to which a subclass of dict, such as an output of transformers, may be a leaf.
    """
    if isinstance(output, Tensor):
        return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*(full_precision(part) for part in output))
    if isinstance(output, (list, tuple)):
        return type(output)(full_precision(part) for part in output)
    if isinstance(output, dict):
        return type(output)({name: full_precision(part) for name, part in output.items()})
    return output
