"""What one training step eats, what examples are, and what is to be learned from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from shoal.errors import InputError
from shoal.tensors import map_nest

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
        return torch.stack([self.domain[start] for start in accumulate(self.sizes[:-1], initial=0)])

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
        """Return these examples as a batch of blocks of these sizes."""
        weight = None if self.weight is None else self.weight[rows]
        return MetaBatch(cut(self.x, rows), self.y[rows], self.domain[rows], sizes, weight)

    def split(self) -> list[MetaBatch]:
        """Return one batch per block."""
        if len(self.sizes) == 1:
            return [self]
        ends = accumulate(self.sizes)
        return [self.rows(slice(end - n, end), (n,)) for end, n in zip(ends, self.sizes, strict=True)]

    def merged(self) -> MetaBatch:
        """Return the same examples as one block."""
        return replace(self, sizes=(len(self),))

    def pieces(self, count: int) -> list[MetaBatch]:
        """Return ``count`` batches with consecutive examples of every block, nearly equally many in each."""
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
    """These examples of a nest."""
    return map_nest(lambda part: part[rows] if isinstance(part, Tensor) else part, x)


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


class Examples(Dataset[Any]):
    """Any map-style dataset, whose examples are ``(x, y)`` or ``(x, y, weight)``.

    One that can do more is a subclass, and overrides what it can. ::

        class Photos(Examples):
            def evaluation(self):
                return Photos(self.files, augment=False)

    Args:
        dataset: the dataset; if it has a method ``collate``, this makes batches of its items.
    """

    dataset: Any = None

    def __init__(self, dataset: Any) -> None:
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            kind = type(dataset).__name__
            raise InputError(f"{kind} has no __getitem__ and __len__; a map-style dataset is needed.")
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def collate(self, items: list[Any]) -> Any:
        """Join examples to a batch."""
        own = getattr(self.dataset, "collate", None)
        return own(items) if callable(own) else default_collate(items)

    def batch(self, indices: Any) -> tuple[Any, ...]:
        """Return some examples as one batch: x, y and, if there are any, weights."""
        return self.collated([self[int(index)] for index in indices])

    def collated(self, items: list[Any]) -> tuple[Any, ...]:
        """Join examples to a batch, or say why they do not fit together."""
        try:
            parts = self.collate(items)
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            advice = "make them the same shape, or give the dataset a method `collate`"
            raise InputError(f"the examples of a batch do not fit together ({why}); {advice}.") from error
        several = isinstance(parts, (list, tuple))
        weights = parts[2:] if several else ()
        good = all(isinstance(w, Tensor) and w.ndim == 1 and w.is_floating_point() for w in weights)
        if several and len(parts) in (2, 3) and good:
            return tuple(parts)
        got = f"{len(parts)} parts" if several else type(parts).__name__
        raise InputError(
            f"an item of the dataset must be a pair (x, y), got {got}; a third part is a sample weight, one "
            "floating-point number."
        )

    def evaluation(self) -> Examples:
        """Return the same examples without random changes."""
        return self

    def with_splits(self, splits: Mapping[str, Domains]) -> Examples:
        """Return the same examples for other splits: some datasets augment those of ``"train"`` only."""
        return self

    def known_labels(self) -> NDArray[Any] | None:
        """Return the label of every example, or ``None`` if only reading the examples can tell."""
        return None

    def path(self, index: int) -> str:
        """Return the file of an example, or ``""``."""
        return ""


class TensorData(Examples):
    """Examples in memory as tensors; a batch is gathered by indexing, on their device.

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

    def batch(self, indices: Any) -> tuple[Any, ...]:
        return self[torch.as_tensor(indices, device=self.device).long()]

    def known_labels(self) -> NDArray[Any]:
        return self.y.numpy(force=True)

    @property
    def device(self) -> torch.device:
        return self.y.device

    def to(self, device: torch.device | str) -> Self:
        """The same examples on another device; itself if they are there."""
        if self.device == torch.device(device):
            return self
        weight = None if self.weight is None else self.weight.to(device)
        return type(self)(map_nest(lambda part: part.to(device), self.x), self.y.to(device), weight)


def as_examples(dataset: Any) -> Examples:
    """Any map-style dataset as :class:`Examples`."""
    return dataset if isinstance(dataset, Examples) else Examples(dataset)


@dataclass(frozen=True)
class DomainData:
    """A dataset with its splits and domains.

    Args:
        examples: map-style dataset of all examples; it becomes :class:`Examples`.
        splits: :class:`~shoal.data.Domains` of ``"train"``, ``"validation"`` and ``"test"``, which index into
            ``examples``. Domains of ``"train"`` are trained on; those of other splits are scored.
        classes: number of classes, or ``None`` for regression.
        input_shape: shape of an input, without the batch dimension.
        model: name of the default model.
        notes: remarks that are needed to interpret results.
        metrics: names of metrics (see :mod:`shoal.training.metrics`); the first one is used for selection.
        excluded_groups: groups that are not considered for the worst group.
        class_names: names of the classes, in order.
        inputs: the preprocessing of raw tables, images or text, as plain data, for new data.
        kind: kind of the task, one of :data:`TASKS` (default: inferred from ``classes``).
        entities: number of the entity of each example, such as a patient, if several may be of one.
    """

    examples: Any
    splits: Mapping[str, Domains]
    classes: int | None
    input_shape: tuple[int, ...]
    model: str
    notes: Mapping[str, str] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    excluded_groups: frozenset[str] = frozenset()
    class_names: tuple[str, ...] = ()
    inputs: Mapping[str, Any] = field(default_factory=dict)
    kind: str | None = None
    entities: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "examples", as_examples(self.examples))
        count = len(self.examples)
        for name, domains in self.splits.items():
            if (top := int(domains.indices.max())) >= count:
                message = f"split {name!r} has example {top}, but the dataset has {count} examples"
                raise InputError(f"{message}, which count from 0.")
        if "train" not in self.splits:
            raise InputError(f"splits are {', '.join(self.splits) or 'empty'}; there must be 'train'.")

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
        """Return the same examples with other splits, and remarks on them."""
        return replace(self, examples=self.examples.with_splits(splits), splits=splits, notes=notes)
