"""Arrays, datasets and lists of examples as :class:`~shoal.data.DomainData`.

An example is a pair (x, y), or a dict with its label under one of :data:`LABELS`. Integers, booleans and text
are classes, floating-point numbers are regression; floating-point numbers that may be either are refused.
Sample weights are the third of three arrays (x, y, w), or under ``"sample_weight"`` in a dict.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from shoal.data.batch import TASKS, DomainData, Examples, TensorData, as_examples, leaves, tensors_in
from shoal.data.domains import Domains
from shoal.data.loader import seeded
from shoal.data.splits import SHARE, Names, split, split_notes
from shoal.errors import InputError, check_names, listed, shown
from shoal.settings import checked, coerce
from shoal.tensors import map_nest

Array = NDArray[Any]
LABELS = ("label", "labels", "y", "target", "targets")
WEIGHT = "sample_weight"
FEW, READ = 16, 4096
"""Examples that are read of a dataset: if it lists its labels, and if it does not."""
AMBIGUOUS = 20
"""Up to so many different floating-point labels, all integers, may be classes or quantities."""
NUMBERS = ("regression", "multilabel")
"""Tasks whose targets are floating-point."""
MODELS = {1: "tabular", 3: "small-cnn"}
"""The default model by the number of an input's dimensions."""


@checked
def from_arrays(
    x: Any,
    y: Any,
    domains: Any,
    *,
    held_out: Names = None,
    task: str | None = None,
    validation: float = SHARE,
    seed: int = 0,
) -> DomainData:
    """Load examples from NumPy arrays or tensors.

    >>> import numpy as np
    >>> data = from_arrays(np.zeros((4, 2)), list("abab"), [0, 0, 1, 1], held_out="1", validation=0.5)
    >>> data.class_names, data.splits["test"].names
    (('a', 'b'), ('1',))

    Args:
        x: inputs (n, …), which become float32. They are not scaled; :func:`from_table` scales columns.
        y: labels. Integers, booleans and strings are classes, numbered in sorted order; floating-point
            numbers are a regression target.
        domains: domain of each example, an integer or a string.
        held_out: held-out domains (default: none; train on all domains).
        task: ``classification`` or ``regression``, where labels may be either.
        validation: fraction of each training domain that is held out for validation.
        seed: random seed of the validation split.
    """
    inputs, (labels, names) = as_tensor(x, "x").detach().float(), numbered(y, "y", task)
    if inputs.ndim < 2:
        raise InputError(f"x has shape {tuple(inputs.shape)}; it must be (examples, features) or more.")
    every = {"train": Domains.from_sizes({"all": len(inputs)})}
    shape, data = tuple(inputs.shape[1:]), TensorData(inputs, labels)
    whole = DomainData(data, every, len(names) or None, shape, "", class_names=names)
    return _split(whole, domains, held_out, validation, seed)


def numbered(y: Any, where: str, task: str | None = None) -> tuple[Tensor, tuple[str, ...]]:
    """Labels as numbers of classes and the names of these, in sorted order; or quantities, and no names."""
    labels = _labels(y, where)
    if task is not None:
        check_names("task", [task], ("classification", "regression"))
    values, numbers = np.unique(labels, return_inverse=True)
    if task is None and labels.dtype.kind in "iu" and len(values) > AMBIGUOUS:
        count = f"{where} has {len(values):,} different whole numbers"
        raise InputError(f"{count}; set task='classification' or task='regression'.")
    if (task or task_of([labels])) == "regression":
        return Target("regression").encode(labels, where, torch.float32), ()
    return torch.from_numpy(numbers.reshape(labels.shape)), _names_of(values)


@checked
def from_dataset(
    dataset: Dataset[Any],
    domains: Any,
    *,
    held_out: Names = None,
    task: str | None = None,
    classes: int | Sequence[str] | None = None,
    validation: float = SHARE,
    seed: int = 0,
) -> DomainData:
    """Load examples from a torch ``Dataset`` or a list.

    An example is a pair (x, y) (further elements of a tuple are not used) or a dict with the label under
    ``label``, ``labels``, ``y``, ``target`` or ``targets`` and the input in the other keys.

    Args:
        dataset: map-style dataset or list of examples.
        domains: domain of each example, an integer or a string.
        held_out: held-out domains (default: none; train on all domains).
        task: ``classification`` or ``regression``, where labels may be either.
        classes: number of classes, or their names in order. By default as the dataset says (its ``classes``,
            ``targets``, ``labels``, ``y`` or ``tensors``); otherwise up to 4,096 examples are read.
        validation: fraction of each training domain that is held out for validation.
        seed: random seed of the validation split.
    """
    whole = read_examples({"": dataset}, task=task, classes=classes, count=True)
    return _split(whole, domains, held_out, validation, seed)


def _split(data: DomainData, groups: Any, held_out: Names, share: float, seed: int) -> DomainData:
    domains, size = Domains.from_labels(groups), len(data.examples)
    if len(domains.indices) != size:
        count = f"there are {size} examples and {len(domains.indices)} domains"
        raise InputError(f"{count}; give the domain of each example.")
    splits, labels = split(domains, held_out, share, seed), data.examples.known_labels()
    notes = split_notes(splits, labels if labels is not None and labels.ndim == 1 else None, data.class_names)
    model = MODELS.get(len(data.input_shape), "")
    return replace(data, splits=splits, notes={**data.notes, **notes}, model=model)


def read_examples(
    parts: Mapping[str, Any],
    *,
    task: str | None = None,
    classes: int | Sequence[str] | None = None,
    count: bool = False,
    default: str | None = None,
    binary: bool = False,
) -> DomainData:
    """Join datasets, each a ``Dataset``, a list of examples or a tuple of arrays, by what their labels are.

    Args:
        parts: datasets by name; they become the domains of the split "train".
        task: one of :data:`~shoal.data.batch.TASKS` (default: as the labels are).
        classes: number of classes, or their names in order.
        count: the number of classes must be found.
        default: task of floating-point labels that may be either; they are refused without it.
        binary: the loss is a binary cross-entropy: labels that are all 0 or 1 are the multi-label task.
    """
    if not parts:
        raise InputError("no datasets; at least one domain is required, such as {'art': (x, y)}.")
    if task is not None:
        check_names("task", [task], TASKS)
    classes = coerce(int | Sequence[str] | None, classes, "classes")
    if classes is not None:
        if task in NUMBERS:
            raise InputError(f"must not be set with task={task!r}, got {classes!r}.", "classes")
        if (classes if isinstance(classes, int) else len(classes)) < 2:
            raise InputError(f"must be at least two, got {classes!r}.", "classes")
        task = task or "classification"
    with seeded(0):  # reading an example may draw random numbers
        opened = [_open(f"domain {name!r}" if name else "the dataset", p) for name, p in parts.items()]
    first, labels, notes = opened[0], [part.labels for part in opened], dict[str, str]()
    for part in opened:
        if (ours := first.form()) != (theirs := part.form()):
            raise InputError(f"{first.where} has {ours} and {part.where} {theirs}; all must be alike.")
    if task is None and binary and all(np.isin(each, (0, 1)).all() for each in labels):
        task = "multilabel"
        notes["task"] = "multi-label, as the loss is a binary cross-entropy and labels are 0 or 1"
    target = Target(task or task_of(labels, default))
    if target.task not in NUMBERS:
        target = replace(target, **_classes(opened, classes, count))
    examples, shape = [part.encoded(target) for part in opened], getattr(first.example[0], "shape", ())
    return DomainData(
        _joined(examples),
        {"train": Domains.from_sizes({str(n): len(p) for n, p in zip(parts, examples, strict=True)})},
        target.classes,
        tuple(shape),
        model="",
        notes=notes,
        class_names=target.names,
        kind=None if target.task in ("classification", "regression") else target.task,
    )


def _joined(parts: list[Examples]) -> Examples:
    """All in one dataset; of tensors in one tensor."""
    if len(parts) == 1:
        return parts[0]
    tensors = [part for part in parts if isinstance(part, TensorData)]
    if len(tensors) < len(parts):
        return Joined(parts)
    inputs = iter([torch.cat(each) for each in zip(*(leaves(part.x) for part in tensors), strict=True)])
    weights = [part.weight for part in tensors if part.weight is not None]
    x, y = map_nest(lambda _: next(inputs), tensors[0].x), torch.cat([part.y for part in tensors])
    return TensorData(x, y, torch.cat(weights) if weights else None)


class Joined(Examples):
    """Datasets one after the other; the first makes the batches."""

    def __init__(self, parts: list[Examples]) -> None:
        super().__init__(ConcatDataset(parts))
        self.parts = parts

    def collate(self, items: list[Any]) -> Any:
        return self.parts[0].collate(items)

    def evaluation(self) -> Examples:
        return Joined([part.evaluation() for part in self.parts])

    def known_labels(self) -> Array | None:
        known = [labels for part in self.parts if (labels := part.known_labels()) is not None]
        return np.concatenate(known) if len(known) == len(self.parts) else None


# What the labels are


def task_of(labels: Sequence[Array], default: str | None = None) -> str:
    """The task by the type of labels; ``default``: of floating-point ones that may be classes too."""
    if labels[0].dtype.kind != "f":
        return "classification"
    if default is None and labels[0].ndim == 1:
        values = np.unique(np.concatenate(labels))
        if 1 < len(values) <= AMBIGUOUS and (values == np.floor(values)).all():
            raise InputError(
                f"labels are floating-point numbers with only integer values ({shown(values.tolist()[:5])}): "
                "set task='classification' or task='regression', or make classes integers (y.long())."
            )
    return default or "regression"


@dataclass(frozen=True)
class Target:
    """What labels become: numbers of classes, or quantities."""

    task: str
    classes: int | None = None
    names: tuple[str, ...] = ()

    def encode(self, labels: Array, where: str, dtype: torch.dtype) -> Tensor:
        if labels.dtype.kind == "U":
            right = f"one of {shown(list(self.names))}" if self.names else "a number"
            _check(labels, np.isin(labels, self.names), where, right)
            place = {name: n for n, name in enumerate(self.names)}
            return torch.tensor([place[label] for label in labels.tolist()])
        if self.task == "multilabel":
            _check(labels, np.isin(labels, (0, 1)), where, "0 or 1")
        elif self.task != "regression":
            _check(labels, labels == np.floor(labels), where, "a whole number")
        return torch.as_tensor(labels).to(dtype if self.task in NUMBERS else torch.long)


def _check(labels: Array, valid: Array, where: str, right: str, rows: Array | None = None) -> None:
    """Refuse the first label that is not valid; ``rows`` are the places of the examples in their dataset."""
    if not valid.all():
        n = int(np.argmin(valid.reshape(len(labels), -1).all(1)))
        which = f"example {n if rows is None else rows[n]} of " if len(labels) > 1 else ""
        label = shown(labels[n : n + 1].tolist()[0])
        raise InputError(f"{which}{where} has the label {label}; it must be {right}.")


def _classes(parts: list[Part], classes: int | Sequence[str] | None, count: bool) -> dict[str, Any]:
    """The number of classes and their names: as they are given, as the datasets say, or as labels are."""
    if isinstance(classes, int):
        return {"classes": classes}
    text, named = parts[0].labels.dtype.kind == "U", {part.class_names for part in parts}
    names = tuple(classes or (named.pop() if len(named) == 1 and not text else ()))
    if names or not (text or count):
        return {"classes": len(names) or None, "names": names}
    if any(len(part.labels) < len(part.data) for part in parts):
        raise InputError(
            f"the number of classes is not known after {READ:,} examples: set classes=N or, in the order of "
            "their numbers, classes=[…] (or task='regression')."
        )
    values = np.unique(np.concatenate([part.labels.reshape(-1) for part in parts]))
    if not text:
        return {"classes": max(2, 1 + int(values[-1]))}
    return {"classes": len(values), "names": _names_of(values)}


def _names_of(values: Array) -> tuple[str, ...]:
    if len(values) < 2:
        raise InputError(f"the label is {str(values[0])!r} in every example; there must be two classes.")
    return tuple(map(str, values.tolist()))


# One dataset


@dataclass(frozen=True)
class Part:
    """A dataset before training: the labels of all its examples, or of some, and its first example."""

    where: str
    data: Examples
    labels: Array
    example: tuple[Any, ...]
    class_names: tuple[str, ...] = ()

    def form(self) -> str:
        """What must be the same in all domains."""
        x, _, *weight = self.example
        kind = {"U": "text", "f": "floating-point numbers"}.get(self.labels.dtype.kind, "whole numbers")
        shapes = map_nest(lambda t: f"{tuple(t.shape)} {str(t.dtype)[6:]}" if isinstance(t, Tensor) else t, x)
        return ", ".join([f"x {shapes}", f"{kind} as labels", *["sample weights"] * len(weight)])

    def encoded(self, target: Target) -> Examples:
        """The dataset with its labels as tensors; one that makes its batches itself stays as it is."""
        data = self.data
        if not isinstance(data, TensorData | Items):
            return data
        y = target.encode(self.labels, self.where, _dtype(self.example[0]))
        if isinstance(data, TensorData):
            return TensorData(data.x, y.to(data.device), data.weight)
        data.target, data.known = target, y.numpy() if len(y) == len(data) else None
        return data


class Items(Examples):
    """A dataset whose examples become tensors (x, y) or (x, y, weight)."""

    def __init__(self, dataset: Any, where: str) -> None:
        super().__init__(dataset)
        self.where, self.target = where, Target("regression")
        self.known: Array | None = None

    def known_labels(self) -> Array | None:
        return self.known

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        where = f"example {index} of {self.where}"
        x, label, *weight = _example(self.dataset[int(index)], where)
        y = self.target.encode(_labels([label], where), where, _dtype(x))[0]
        if (count := self.target.classes) is not None and not 0 <= y < count:
            raise InputError(
                f"{where} has the label {y}; with {count} classes it must be from 0 to {count - 1}."
            )
        return (x, y, *(each.to(_dtype(x)) for each in weight))


def _open(where: str, part: Any) -> Part:
    if type(part) is TensorDataset and len(part.tensors) == 2:
        part = part.tensors
    elif type(part) is TensorData:
        part = (part.x, part.y) if part.weight is None else (part.x, part.y, part.weight)
    if not (hasattr(part, "__getitem__") and hasattr(part, "__len__")) or isinstance(part, IterableDataset):
        kind = type(part).__name__
        raise InputError(f"{where} is a {kind}; it must be a dataset with __getitem__ and __len__.")
    if not len(part):
        raise InputError(f"{where} has no examples; remove it.")
    examples = isinstance(part, list) and all(isinstance(each, (tuple, Mapping)) for each in part)
    if not isinstance(part, (tuple, list)) or examples:
        return _of_dataset(where, part)
    if len(part) not in (2, 3):
        parts = f"{where} has {len(part)} parts"
        raise InputError(f"{parts}; it must be a dataset, (x, y) or (x, y, weights).")
    return _of_arrays(where, *part)


def _of_arrays(where: str, x: Any, y: Any, weight: Any = None) -> Part:
    """Arrays; x may be several arrays in a tuple or mapping."""
    labels = _labels(y, where)
    several = isinstance(x, Mapping) or (isinstance(x, (tuple, list)) and len(x) != len(labels))
    x = _input(x, where) if several else as_tensor(x, where)
    if not len(labels):
        raise InputError(f"{where} has no examples; remove it.")
    device = next(leaves(x)).device
    w = None if weight is None else as_tensor(weight, f"the weight of {where}").to(device, _dtype(x))
    data = TensorData(x, torch.zeros(len(labels), device=device), w)
    return Part(where, data, labels, data[0])


def _of_dataset(where: str, dataset: Any) -> Part:
    """A dataset that is indexed; of one that does not list its labels, more examples are read."""
    own = isinstance(dataset, Examples) or callable(getattr(dataset, "collate", None))
    every, names = _listed(dataset)
    rows, labels, first = _read(dataset, FEW, where, own)
    if every is not None and np.array_equal(every[rows], labels):
        labels = every
    elif not own:
        rows, labels, first = _read(dataset, READ, where, own)
    return Part(where, as_examples(dataset) if own else Items(dataset, where), labels, first, names)


def _read(dataset: Any, most: int, where: str, own: bool) -> tuple[Array, Array, tuple[Any, ...]]:
    """The places and labels of at most so many examples from all over a dataset, and the first of them."""
    rows = np.linspace(0, len(dataset) - 1, min(most, len(dataset))).round().astype(np.int64)
    examples = []
    for row in rows.tolist():
        try:
            examples.append(_example(dataset[row], f"example {row} of {where}", own))
        except InputError:
            raise
        except Exception as error:  # of a stranger's dataset
            why = f"{type(error).__name__}: {error}"
            raise InputError(f"example {row} of {where} cannot be read: {why}") from error
    return rows, _labels([each[1] for each in examples], where, rows), examples[0]


def _example(item: Any, where: str, own: bool = False) -> tuple[Any, ...]:
    """x, y and, if there is one, the weight; x as tensors, unless the dataset has its ``own`` form."""
    if isinstance(item, Mapping):
        label = [key for key in item if key in LABELS]
        if len(label) != 1:
            keys = f"a dict with {', '.join(map(repr, item))}"
            raise InputError(f"{where} is {keys}; the label must be under one of {', '.join(LABELS)}.")
        used = {key: value for key, value in item.items() if key not in (*label, WEIGHT)}
        x, y = next(iter(used.values())) if len(used) == 1 else used, item[label[0]]
        weight = [as_tensor(item[WEIGHT], f"the weight of {where}")] if WEIGHT in item else []
        return x if own else _input(x, where), y, *weight
    if not isinstance(item, (tuple, list)) or len(item) < 2:
        raise InputError(f"{where} is {shown(item)}; it must be a pair (x, y), or a dict with a label.")
    if len(item) > 2:
        label, last = np.shape(_numpy(item[1])), np.asarray(_numpy(item[2]))
        if last.ndim == 0 and last.dtype.kind == "f":
            raise InputError(f"{where} has 3 parts; a sample weight goes into a dict, as {WEIGHT!r}.")
        if label and not last.shape:
            raise InputError(f"{where} has {len(item)} parts; put several inputs into one: ((a, b), y).")
    return item[0] if own else _input(item[0], where), item[1]


def _listed(dataset: Any) -> tuple[Array | None, tuple[str, ...]]:
    """The labels of all examples and the names of classes, where a dataset has them in memory."""
    rows = np.arange(len(dataset))
    while isinstance(dataset, Subset):
        rows, dataset = np.asarray(dataset.indices, np.int64)[rows], dataset.dataset
    lists = [getattr(dataset, name, None) for name in ("targets", "labels", "y")]
    lists += getattr(dataset, "tensors", ())[1:2]
    values = next((each for each in lists if isinstance(each, (list, tuple, Tensor, np.ndarray))), ())
    labels = np.asarray(_numpy(values))
    known = labels.shape == (len(dataset),) and labels.dtype.kind in "biufU"
    names = getattr(dataset, "classes", ())
    names = tuple(map(str, names)) if isinstance(names, (list, tuple, np.ndarray)) else ()
    return labels[rows] if known else None, names


# Values as tensors


def _input(x: Any, where: str) -> Any:
    """What the model takes: numbers as tensors, in the tuple, list or mapping that they are in."""
    if isinstance(x, Mapping):
        return {key: _input(part, f"{key!r} of {where}") for key, part in x.items()}
    if isinstance(x, (tuple, list)) and any(isinstance(part, (Tensor, np.ndarray)) for part in x):
        return type(x)(_input(part, where) for part in x)
    return as_tensor(x, where)


def as_tensor(values: Any, where: str) -> Tensor:
    """A tensor as it is; an array with NumPy's usual float64 in torch's usual type, which models have."""
    if isinstance(values, Tensor) and values.layout == torch.strided:
        return values
    array = np.asarray(None)
    if not isinstance(values, Tensor) and not hasattr(values, "getbands"):  # no image of Pillow's
        with contextlib.suppress(ValueError, TypeError):
            array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        what = (
            f"an array of {values.dtype}" if isinstance(values, np.ndarray) else f"a {type(values).__name__}"
        )
        raise InputError(
            f"{where} has {what} as an input; it must be numbers: convert images to tensors "
            "(torchvision's ToTensor), tokenize text or use from_hf; for columns of a table: from_table."
        )
    tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))  # pandas' are read-only
    return tensor.to(torch.get_default_dtype()) if tensor.dtype == torch.float64 else tensor


def _dtype(x: Any) -> torch.dtype:
    """The type of floating-point targets and weights: that of the inputs, if they are floating-point."""
    kinds = (part.dtype for part in tensors_in(x) if part.is_floating_point())
    return next(kinds, torch.get_default_dtype())


def _numpy(value: Any) -> Any:
    """A tensor as an array; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy(force=True)


def _labels(values: Any, where: str, rows: Array | None = None) -> Array:
    """Labels as an array of whole or finite numbers, or of text."""
    labels: Array = _numpy(values)
    if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "biufU":
        items = [_numpy(value) for value in listed(values, f"labels of {where}")]
        if len({isinstance(item, str) for item in items}) > 1:
            raise InputError(f"some labels of {where} are text and others are not.")
        try:
            labels = np.asarray(items)
        except ValueError:
            raise InputError(f"labels of {where} have different shapes.") from None
    if labels.dtype.kind in "biufU":
        valid = np.ones(len(labels), bool) if labels.dtype.kind != "f" else np.isfinite(labels)
    else:
        valid = np.array([isinstance(each, int | float) and abs(each) < 2**63 for each in labels])
    _check(labels, valid, where, "text or a finite number", rows)
    return labels
