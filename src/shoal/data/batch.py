"""What one training step eats, what examples are, and what is to be learned from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, default_collate

from shoal.errors import InputError
from shoal.tensors import map_nest as map_nest
from shoal.tensors import widest as widest

if TYPE_CHECKING:
    from shoal.data.domains import Domains
    from shoal.penalties import Blocks

TASKS = ("classification", "ordinal", "multilabel", "regression")


@dataclass(frozen=True, slots=True)
class MetaBatch:
    """The data of one step: the examples of S blocks, one block after the other.

    Attributes:
        x: inputs: a tensor, or a nested structure (list, tuple, dict) of tensors, with the batch dimension
            first.
        y: labels (B, …).
        domain: number of the domain of each example in its :class:`~shoal.data.Domains`, (B,); where blocks
            mix domains, the number of the block.
        sizes: number of examples of each block.
        weight: sample weights w (B,): the loss of a block is Σ w_i l_i / Σ w_i.
    """

    x: Any
    y: Tensor
    domain: Tensor
    sizes: tuple[int, ...]
    weight: Tensor | None = None

    def __len__(self) -> int:
        return len(self.y)

    @property
    def ids(self) -> Tensor:
        """The domain of each block, (S,)."""
        if len(set(self.sizes)) == 1:
            return self.domain[:: self.sizes[0]]
        starts = accumulate(self.sizes[:-1], initial=0)
        return torch.stack([self.domain[start] for start in starts])

    @property
    def blocks(self) -> Blocks:
        """The domains as the functions of :mod:`shoal.penalties` take them without waiting for the GPU."""
        from shoal.penalties import Blocks

        return Blocks(self.sizes, self.ids)

    @property
    def tensors(self) -> list[Tensor]:
        """All its tensors."""
        return list(tensors_in((self.x, self.y, self.domain, self.weight)))

    def rows(self, rows: slice | Tensor, sizes: tuple[int, ...]) -> MetaBatch:
        """These examples as a batch of blocks of these sizes."""
        weight = None if self.weight is None else self.weight[rows]
        return MetaBatch(cut(self.x, rows), self.y[rows], self.domain[rows], sizes, weight)

    def split(self) -> list[MetaBatch]:
        """One batch per block."""
        if len(self.sizes) == 1:
            return [self]
        ends = accumulate(self.sizes)
        return [self.rows(slice(end - n, end), (n,)) for end, n in zip(ends, self.sizes, strict=True)]

    def merged(self) -> MetaBatch:
        """The same examples as one block."""
        return replace(self, sizes=(len(self.y),))

    def pieces(self, count: int) -> list[MetaBatch]:
        """``count`` batches with consecutive examples of every block, nearly equally many in each."""
        if count == 1:
            return [self]
        places = torch.arange(len(self)).split(list(self.sizes))
        parts = zip(*(place.tensor_split(count) for place in places), strict=True)
        device = self.y.device
        return [self.rows(torch.cat(part).to(device), tuple(map(len, part))) for part in parts]


def leaves(x: Any) -> Iterator[Any]:
    """Every part of a nest that is none itself, in its order."""
    if isinstance(x, (Mapping, list, tuple)):
        for part in x.values() if isinstance(x, Mapping) else x:
            yield from leaves(part)
    else:
        yield x


def tensors_in(x: Any) -> Iterator[Tensor]:
    """Every tensor of a nest, in its order."""
    return (part for part in leaves(x) if isinstance(part, Tensor))


def cut(x: Any, rows: slice | Tensor) -> Any:
    """These examples of a nest; what has no batch dimension, such as a scalar, stays as it is."""
    return map_nest(lambda part: part[rows] if isinstance(part, Tensor) and part.ndim else part, x)


@dataclass(frozen=True)
class Task:
    """What is predicted: the kind of the task, and the numbers of domains and classes.

    The kinds (:data:`TASKS`) are

    * ``classification``: labels (B,), outputs (B, classes)
    * ``ordinal``: as classification, with ordered classes
    * ``multilabel``: 0 or 1 for each of L labels, (B, L), outputs (B, L), the logits; or (B,) for one
    * ``regression``: numbers (B,) or (B, …), outputs of the same shape

    Args:
        domains: number of training domains.
        classes: number of classes, or ``None``.
        features: number of features of a :class:`~shoal.models.FeatureModel`.
        steps: number of training steps.
        kind: kind of the task (default: classification if there are ``classes``, otherwise regression).
    """

    domains: int
    classes: int | None
    features: int | None = None
    steps: int | None = None
    kind: str = ""

    def __post_init__(self) -> None:
        if not self.kind:
            object.__setattr__(self, "kind", "regression" if self.classes is None else "classification")

    @property
    def is_classification(self) -> bool:
        """Whether an output is one logit per class."""
        return self.classes is not None


class Examples(Dataset[Any]):
    """A dataset of examples, each ``(x, y)`` or ``(x, y, weight)``, that declares what else it can do.

    Any :class:`torch.utils.data.Dataset` with ``__len__`` and ``__getitem__`` can be trained on. One that can
    do more derives from this class, or from :class:`InMemory`, and overrides what it can. ::

        class Photos(Examples):
            def evaluation(self):
                return Photos(self.files, augment=False)
    """

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def evaluation(self) -> Examples:
        """The same examples as they are evaluated: nothing about them is random."""
        return self

    def finish(self, x: Any) -> Any:
        """Inputs of a batch, or of one example, as a model takes them: what is left to do on the device."""
        return x

    def in_splits(self, splits: Mapping[str, Domains]) -> Examples:
        """The same examples in other splits, for those that treat training examples apart."""
        return self

    def known_labels(self) -> NDArray[Any] | None:
        """The label of every example (−1: unknown), or ``None`` where that takes reading them."""
        return None

    def path(self, index: int) -> str:
        """The file that an example is in, or ``""``."""
        return ""


class InMemory(Examples):
    """Examples in memory: a batch is one gather, on whatever device they are."""

    def batch(self, indices: Tensor) -> tuple[Any, ...]:
        """The examples at ``indices`` (a LongTensor on the data's device): x, y and, if any, weights."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    def to(self, device: torch.device | str) -> Self:
        """The same examples on another device (itself where they are there already)."""
        raise NotImplementedError


class TensorData(InMemory):
    """Examples in memory as tensors; a batch is gathered with one indexing operation, on their device.

    Args:
        x: inputs (n, …), or a nested structure (list, tuple, dict) of them.
        y: labels (n, …).
        weight: sample weights (n,).
    """

    def __init__(self, x: Any, y: Tensor, weight: Tensor | None = None) -> None:
        for part in leaves(x):
            if len(part) != len(y):
                raise InputError(f"x has {len(part)} examples and y has {len(y)}; the lengths must be equal.")
        if weight is not None and weight.shape != (len(y),):
            raise InputError(f"sample weights have shape {tuple(weight.shape)}; they must be ({len(y)},).")
        self.x, self.y, self.weight = x, y, weight

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: Any) -> tuple[Any, ...]:
        pair = cut(self.x, index), self.y[index]
        return pair if self.weight is None else (*pair, self.weight[index])

    def batch(self, indices: Tensor) -> tuple[Any, ...]:
        return self[indices]

    def known_labels(self) -> NDArray[Any]:
        return self.y.numpy(force=True)

    @property
    def device(self) -> torch.device:
        return self.y.device

    def to(self, device: torch.device | str) -> Self:
        if self.device == torch.device(device):
            return self
        weight = None if self.weight is None else self.weight.to(device)
        return type(self)(map_nest(lambda part: part.to(device), self.x), self.y.to(device), weight)


def evaluation_view(examples: Dataset[Any]) -> Dataset[Any]:
    """The examples as they are evaluated: without what is random about them."""
    return examples.evaluation() if isinstance(examples, Examples) else examples


def finished(examples: Dataset[Any], x: Any) -> Any:
    """Inputs of ``examples`` as a model takes them; to be called where they are computed on."""
    return examples.finish(x) if isinstance(examples, Examples) else x


def known_labels(examples: Dataset[Any]) -> NDArray[Any] | None:
    """The label of every example, −1 where it is unknown; ``None`` where none is known without reading."""
    if not isinstance(examples, ConcatDataset):
        return examples.known_labels() if isinstance(examples, Examples) else None
    several = [known_labels(part) for part in examples.datasets]
    if all(labels is None for labels in several):
        return None
    sizes = np.diff([0, *examples.cumulative_sizes])
    return np.concatenate([np.full(n, -1) if y is None else y for y, n in zip(several, sizes, strict=True)])


def collate_of(dataset: Dataset[Any]) -> Callable[[list[Any]], Any]:
    """What puts its items together: the dataset's own method ``collate`` where it has one, else torch's."""
    own = getattr(dataset, "collate", None)
    return own if callable(own) else default_collate


def batch_of(examples: Dataset[Any], indices: Sequence[int] | NDArray[Any]) -> tuple[Any, ...]:
    """These examples as one batch, gathered where they are in memory, else read one by one."""
    which = [int(i) for i in indices]
    if isinstance(examples, InMemory):
        return examples.batch(torch.tensor(which, device=examples.device))
    return tuple(collate_of(examples)([examples[i] for i in which]))


@dataclass(frozen=True)
class DomainData:
    """A dataset with its splits and domains.

    Args:
        examples: map-style dataset of all examples.
        splits: :class:`~shoal.data.Domains` of ``"train"``, ``"validation"`` and ``"test"``, which index into
            ``examples``. The domains of ``"train"`` are trained on; those of other splits are the groups that
            are scored.
        classes: number of classes, or ``None`` for regression.
        input_shape: shape of an input, without the batch dimension.
        model: name of the default model.
        notes: remarks on splits that are needed to interpret results, such as that a split is sampled from
            the test domain.
        measures: metrics of the dataset; the first one is used for selection (see
            :mod:`shoal.training.metrics`).
        uncounted: groups that are not considered for the worst group.
        class_names: names of the classes, in order.
        inputs: description of the preprocessing of raw tables, images or text, as plain data, with which a
            trained model is applied to new data.
        kind: kind of the task, one of :data:`TASKS` (default: inferred from ``classes``).
        entities: number of the entity of each example, such as a patient, if several examples may be of one;
            entities are independent, their examples are not.
    """

    examples: Dataset[Any]
    splits: Mapping[str, Domains]
    classes: int | None
    input_shape: tuple[int, ...]
    model: str
    notes: Mapping[str, str] = field(default_factory=dict)
    measures: tuple[str, ...] = ()
    uncounted: frozenset[str] = frozenset()
    class_names: tuple[str, ...] = ()
    inputs: Mapping[str, Any] = field(default_factory=dict)
    kind: str | None = None
    entities: NDArray[Any] | None = None

    @property
    def task(self) -> Task:
        return Task(domains=len(self.splits["train"]), classes=self.classes, kind=self.kind or "")

    @property
    def label_scale(self) -> tuple[float, float]:
        """The mean and scale by which the label of a regression was standardized."""
        label = self.inputs.get("label")
        known = label if isinstance(label, Mapping) and self.classes is None else {}
        return float(known.get("mean", 0.0)), float(known.get("scale", 1.0))

    def split_as(self, splits: Mapping[str, Domains], notes: Mapping[str, str]) -> DomainData:
        """Return the same examples with other splits.

        Args:
            splits: domains of each split.
            notes: remarks on the splits.
        """
        examples = self.examples
        if isinstance(examples, Examples):
            examples = examples.in_splits(splits)
        return replace(self, examples=examples, splits=splits, notes=notes)
