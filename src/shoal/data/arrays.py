"""Arrays, datasets and lists of examples as :class:`~shoal.data.DomainData`.

An example is a pair (x, y), or a dict with its label under one of :data:`LABELS`. Integers, booleans and text
are classes, floating-point numbers are regression; floating-point numbers that may be either are refused.
Sample weights are the third of three arrays (x, y, w), or under ``"sample_weight"`` in a dict.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from shoal.data.batch import TASKS, DomainData, Examples, TensorData, leaves
from shoal.data.domains import Domains
from shoal.data.loader import _as_tensor, concatenate, seeded
from shoal.data.splits import split
from shoal.data.tables import SHARE, Column, Labels, Names, names_of, plain, split_notes
from shoal.errors import InputError, check_names, listed, shown
from shoal.settings import checked, coerce

LABELS = ("label", "labels", "y", "target", "targets")
WEIGHT = "sample_weight"
FEW, SOME, READ = 16, 256, 4096
"""Examples that are read of a dataset: if it lists its labels, if it does not, and to find every class."""
AMBIGUOUS = 20
"""Up to so many different floating-point labels, all integers, may be classes or quantities."""
NUMBERS = ("regression", "multilabel")
"""Tasks whose targets are floating-point."""
KINDS = {"U": "text", "f": "floating"}
"""Labels by the kind of their dtype; all others are whole numbers."""
MODELS = {1: "tabular", 3: "small-cnn"}
"""The default model by the number of an input's dimensions."""

Array = NDArray[Any]


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
        x: inputs (n, …), which become float32. They are not scaled: scale them on training examples, or use
            :func:`from_table`.
        y: label of each example. Classes may be strings or numbers and are numbered in sorted order
            (``class_names`` contains the original values); numbers that are not all integers and have more
            than 20 values are a regression target.
        domains: domain of each example, an integer or a string.
        held_out: held-out domains (default: none; train on all domains).
        task: ``classification`` or ``regression`` (default: inferred from the labels).
        validation: fraction of each training domain that is held out for validation.
        seed: random seed of the validation split.

    Returns:
        The dataset.
    """
    inputs = x.detach() if isinstance(x, Tensor) else np.asarray(x)
    if isinstance(inputs, np.ndarray):
        if inputs.dtype.kind not in "biuf":
            raise InputError(f"x is {inputs.dtype}; it must be numbers. For columns of a table: from_table.")
        inputs = torch.from_numpy(np.ascontiguousarray(inputs, np.float32))
    if inputs.ndim < 2 or not len(inputs):
        raise InputError(f"x has shape {tuple(inputs.shape)}; it must be (examples, features) or more.")
    inputs, column, names = inputs.float(), Column(plain(y, "y")), _domain_names(domains)
    if not len(inputs) == len(column) == len(names):
        count = f"x has {len(inputs)} examples, y {len(column)} and domains {len(names)}"
        raise InputError(f"{count}; the lengths must be equal.")
    if not bool((finite := inputs.isfinite().flatten(1).all(1)).all()):
        raise InputError(f"x has a number in example {int((~finite).nonzero()[0])} that is not finite.")
    target = Labels.read(column, "y", task)
    splits = split(Domains.from_labels(names), names_of(held_out, "names of domains"), validation, seed)
    return DomainData(
        examples=TensorData(inputs, torch.from_numpy(target.numbers({}))),
        splits=splits,
        classes=target.classes,
        input_shape=tuple(inputs.shape[1:]),
        model=MODELS.get(inputs.ndim - 1, ""),
        notes=split_notes(splits, target),
        measures=("accuracy", "AUC") if target.classes == 2 else (),
        class_names=target.names,
    )


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
    ``label``, ``labels``, ``y``, ``target`` or ``targets`` and the input in the other keys. NumPy arrays
    become tensors.

    Args:
        dataset: map-style dataset or list of examples.
        domains: domain of each example, an integer or a string.
        held_out: held-out domains (default: none; train on all domains).
        task: ``classification`` or ``regression``. By default integers, booleans and strings are classes and
            floating-point numbers are regression; ambiguous floating-point labels raise an error.
        classes: number of classes, or their names in order. By default as defined by the dataset (its
            ``classes``, ``targets``, ``labels``, ``y`` or ``tensors``), otherwise up to 4,096 examples are
            read. String labels are numbered in sorted order and kept in ``class_names``.
        validation: fraction of each training domain that is held out for validation.
        seed: random seed of the validation split.

    Returns:
        The dataset.
    """
    names = _domain_names(domains)
    found = read_examples({"": dataset}, task=task, classes=classes, count=True)
    if len(found.domains.indices) != len(names):
        count = f"the dataset has {len(found.domains.indices)} examples and domains {len(names)}"
        raise InputError(f"{count}; the lengths must be equal.")
    warn_of(found.notes)
    return DomainData(
        examples=found.examples,
        splits=split(Domains.from_labels(names), names_of(held_out, "names of domains"), validation, seed),
        classes=found.classes,
        input_shape=found.input_shape,
        model=MODELS.get(len(found.input_shape), ""),
        notes=found.notes,
        class_names=found.class_names,
        kind=found.kind,
    )


def _domain_names(domains: Any) -> Any:
    if hasattr(domains, "iloc") or (isinstance(domains, (np.ndarray, Tensor)) and domains.ndim == 1):
        return domains
    return np.asarray(listed(domains, "domains"), object)


@dataclass(frozen=True)
class Coding:
    """From labels to the tensor that is trained on; ``names`` number text labels, in their order."""

    task: str
    classes: int | None = None
    names: tuple[str, ...] = ()
    text: bool = False

    def __call__(self, labels: Array, where: str, dtype: torch.dtype) -> Tensor:
        if (_kind(labels) == "text") != self.text:
            raise InputError(f"{where} has the label {labels[0]!r}; other labels have another type.")
        if self.text:
            number = {name: n for n, name in enumerate(self.names)}
            if unknown := [text for text in labels.tolist() if text not in number]:
                known = f"{list(self.names[:10])!r}{'…' * (len(self.names) > 10)}"
                raise InputError(f"{where} has the label {unknown[0]!r}, which is none of classes={known}.")
            return torch.tensor([number[text] for text in labels.tolist()])
        if self.task in NUMBERS:
            wrong, right = ~_zero_or_one(labels) & (self.task == "multilabel"), "each must be 0 or 1"
        else:
            wrong, right = labels != np.floor(labels), "labels of classes must be whole numbers"
        if wrong.any():
            example = "" if len(labels) == 1 else f"example {int(wrong.nonzero()[0][0])} of "
            message = f"{example}{where} has the label {labels[wrong][0]}; with task={self.task!r} {right}."
            raise InputError(message)
        y = torch.as_tensor(labels)
        return y.to(dtype) if self.task in NUMBERS else y.long()


class Items(Examples):
    """A dataset whose examples are tensors (x, y) or (x, y, weight), whatever those of ``source`` are."""

    def __init__(self, source: Any, where: str, coding: Coding, known: Array) -> None:
        self.source, self.where, self.coding, self.known = source, where, coding, known

    def __len__(self) -> int:
        return len(self.source)

    def known_labels(self) -> Array:
        return self.known

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        where = f"example {index} of {self.where}"
        found = _example(self.source[int(index)], where)
        x, most = _input(found.x, where), self.coding.classes
        y = self.coding(_labels([found.y], where), where, _dtype(x))[0]
        if y.ndim == 0 and self.coding.task not in NUMBERS and not 0 <= y < (most or 2**62):
            raise InputError(f"{where} has the label {y}; it must be at least 0{_below(most)}.")
        if found.weight is None:
            return x, y
        return x, y, _weights([found.weight], 1, where)[0].to(_dtype(x))


def _below(classes: int | None) -> str:
    return "" if classes is None else f" and below {classes}, the number of classes"


@dataclass(frozen=True)
class Joined:
    """Several datasets as one, and what their labels are; ``classes`` is ``None`` where nothing tells yet."""

    examples: Dataset[Any]
    domains: Domains
    """One domain per dataset."""
    task: str
    classes: int | None
    class_names: tuple[str, ...]
    input_shape: tuple[int, ...]
    notes: Mapping[str, str]

    @property
    def kind(self) -> str | None:
        """The task, where ``classes`` does not imply it."""
        return None if self.task in ("classification", "regression") else self.task


def read_examples(
    parts: Mapping[str, Any],
    *,
    task: str | None = None,
    classes: int | Sequence[str] | None = None,
    count: bool = False,
    default: str | None = None,
    binary: bool = False,
) -> Joined:
    """Join datasets, each a ``Dataset``, a list of examples or a tuple of arrays, by what their labels are.

    Args:
        parts: datasets by name.
        task: one of :data:`~shoal.data.batch.TASKS` (default: as the labels are).
        classes: number of classes, or their names in order.
        count: find out the number of classes by reading up to :data:`READ` examples of each dataset.
        default: task of floating-point labels that may be either; they are refused without it.
        binary: the loss is a binary cross-entropy: labels that are all 0 or 1 are the multi-label task.
    """
    if task is not None:
        check_names("task", [task], TASKS)
    classes = coerce(int | Sequence[str] | None, classes, "classes")
    if classes is not None and (
        task in NUMBERS or (classes if isinstance(classes, int) else len(classes)) < 2
    ):
        why = f"not be set with task={task!r}" if task in NUMBERS else "be at least two"
        raise InputError(f"must {why}, got {classes!r}.", "classes")
    with seeded(0):  # reading an example may draw random numbers
        found = [
            _part(f"domain {name!r}" if name else "the dataset", part, count and classes is None)
            for name, part in parts.items()
        ]
    _check_alike(found)
    notes = {"example": f"not used: {found[0].unused}"} if found[0].unused else {}
    if binary and task is None and not classes and all(_zero_or_one(part.labels).all() for part in found):
        task = "multilabel"
        notes["task"] = "multi-label, as the loss is a binary cross-entropy and labels are 0 or 1"
    kind = _kind(found[0].labels)
    task = task or ("classification" if kind != "floating" or classes else _floating(found, default))
    if task in NUMBERS and kind == "text":
        raise InputError(f"labels are text; for task={task!r} they must be numbers.")
    coding = Coding(task) if task in NUMBERS else _classes(found, task, classes, count)
    coded = {name: part.coded(coding) for name, part in zip(parts, found, strict=True)}
    examples, domains = concatenate(coded)
    names = coding.names if len(coding.names) == coding.classes else ()
    return Joined(examples, domains, task, coding.classes, names, found[0].shape, notes)


def warn_of(notes: Mapping[str, str]) -> None:
    """Warn of what is not used of the examples."""
    if "example" in notes:
        warnings.warn(notes["example"], stacklevel=3)


def _check_alike(parts: Sequence[Part]) -> None:
    """Refuse datasets whose examples or labels are of different types."""
    first = parts[0]
    for part in parts:
        for ours, theirs, what in (
            (first.form, part.form, "an example is"),
            (_kind(first.labels), _kind(part.labels), "labels are"),
            (*("weighted" if each.weighted else "not weighted" for each in (first, part)), "examples are"),
        ):
            if None not in (ours, theirs) and ours != theirs:
                kinds = f"{ours} in {first.name} and {theirs} in {part.name}"
                raise InputError(f"{what} {kinds}; all domains must be alike.")


def _floating(parts: Sequence[Part], default: str | None) -> str:
    """The task of floating-point labels: regression, unless they may as well be classes."""
    values = np.unique(np.concatenate([part.labels.reshape(-1) for part in parts]))
    ambiguous = 1 < len(values) <= AMBIGUOUS and bool((values == np.floor(values)).all())
    if ambiguous and default is None and parts[0].labels.ndim == 1:
        some = ", ".join(f"{v:g}" for v in values[:5]) + (", …" if len(values) > 5 else "")
        raise InputError(
            f"labels are floating-point numbers with only integer values ({some}): set task='classification' "
            "or task='regression', or make classes integers (y.long())."
        )
    return default or "regression"


def _classes(parts: Sequence[Part], task: str, classes: int | Sequence[str] | None, count: bool) -> Coding:
    """The classes as they are named, as the datasets name them, or as the labels are."""
    names = () if classes is None or isinstance(classes, int) else tuple(map(str, classes))
    number = len(names) if names else classes if isinstance(classes, int) else None
    first, complete = parts[0], all(part.complete for part in parts)
    text = _kind(first.labels) == "text"
    if first.labels.ndim > 1 and first.form is not None and (text or task == "ordinal"):
        raise InputError(f"a label has shape {first.labels.shape[1:]}; a class is one label per example.")
    if not number and not text:
        names = first.class_names if all(part.class_names == first.class_names for part in parts) else ()
        if all(part.labels.dtype.kind == "b" for part in parts):
            names = ("False", "True")
        number = len(names) or None
    if not number and (text or count):
        if not complete:
            raise InputError(
                f"the number of classes is not known after {READ:,} examples: set classes=N or, in the order "
                "of their numbers, classes=[…] (or task='regression')."
            )
        if text:
            names = tuple(sorted({label for part in parts for label in part.labels.tolist()}))
            if len(names) < 2:
                raise InputError(f"the label is {names[0]!r} in every example; there must be two classes.")
        number = len(names) or max(2, 1 + max(int(part.labels.max()) for part in parts))
    return Coding(task, number, names, text)


# One dataset


class Example(NamedTuple):
    """An example: its input, label and weight, and what is not used of it."""

    x: Any
    y: Any
    weight: Any = None
    unused: str = ""


@dataclass(frozen=True)
class Part:
    """A dataset before training; ``labels`` are those of the examples ``rows``."""

    name: str
    source: Any
    labels: Array
    rows: Array
    form: str | None = None
    """Shapes and types of an example's input; ``None`` for a dataset that makes its batches itself."""
    shape: tuple[int, ...] = ()
    class_names: tuple[str, ...] = ()
    weighted: bool = False
    unused: str = ""

    @property
    def complete(self) -> bool:
        return len(self.rows) == len(self.source)

    def coded(self, coding: Coding) -> Any:
        """The dataset with its labels as tensors."""
        if self.form is None:
            return self.source
        data = self.source
        y = coding(self.labels, self.name, _dtype(getattr(data, "x", None)))
        if isinstance(data, TensorData):
            return TensorData(data.x, y.to(data.device), data.weight)
        known = np.full(len(self.source), -1)
        if coding.task not in NUMBERS and y.ndim == 1:
            if (wrong := y < 0).any():
                at = int(wrong.nonzero()[0])
                raise InputError(f"example {self.rows[at]} of {self.name} has the label {y[at]}, below 0.")
            known[self.rows] = y
        return Items(self.source, self.name, coding, known)


def _part(name: str, part: Any, count: bool) -> Part:
    if type(part) is TensorDataset and len(part.tensors) == 2:
        part = part.tensors
    elif type(part) is TensorData:
        part = (part.x, part.y) if part.weight is None else (part.x, part.y, part.weight)
    examples = isinstance(part, list) and part and all(isinstance(each, (tuple, Mapping)) for each in part)
    if isinstance(part, (tuple, list)) and not examples:
        return _arrays(name, part)
    if isinstance(part, IterableDataset) or not (hasattr(part, "__getitem__") and hasattr(part, "__len__")):
        kind = type(part).__name__
        raise InputError(f"{name} is a {kind}; it must be a dataset with __getitem__ and __len__.")
    return _dataset(name, part, count)


def _arrays(name: str, part: Sequence[Any]) -> Part:
    """A tuple of arrays (x, y) or (x, y, weights); x may be several arrays in a tuple or mapping."""
    if len(part) not in (2, 3):
        raise InputError(f"{name} has {len(part)} parts; it must be a dataset, (x, y) or (x, y, weights).")
    labels = _labels(part[1], name)
    count = len(labels)
    several = isinstance(part[0], Mapping) or (
        isinstance(part[0], (tuple, list))
        and len(part[0]) != count
        and any(np.ndim(_numpy(each)) and len(each) == count for each in part[0])
    )
    try:
        x = _input(part[0] if several else _as_tensor(part[0]), name)
    except (TypeError, RuntimeError) as error:
        raise InputError(f"{name}: {error}") from error
    for each in leaves(x):
        if not each.ndim or len(each) != count:
            size = len(each) if each.ndim else 0
            raise InputError(f"{name}: x has {size} examples and y has {count}; the lengths must be equal.")
    if not count:
        raise InputError(f"{name} has no examples; remove it.")
    device = next(leaves(x)).device
    weight = _weights(part[2], count, name).to(device, _dtype(x)) if len(part) == 3 else None
    data = TensorData(x, torch.zeros(count, device=device), weight)
    shape = tuple(x.shape[1:]) if isinstance(x, Tensor) else ()
    form = _form(data[0][0])
    return Part(name, data, labels, np.arange(count), form, shape, weighted=weight is not None)


def _dataset(name: str, dataset: Any, count: bool) -> Part:
    """A dataset that is indexed; of one that does not list its labels, some examples are read."""
    size = len(dataset)
    if not size:
        raise InputError(f"{name} has no examples; remove it.")
    own = isinstance(dataset, Examples) or callable(getattr(dataset, "collate", None))
    names, rows = _class_names(dataset), _spread(size, FEW)
    examples = [_read(dataset, row, name) for row in rows.tolist()]
    labels, listed = _labels([each.y for each in examples], name, rows), _listed_labels(dataset)
    if listed is not None and _kind(listed) == _kind(labels) and np.array_equal(listed[rows], labels):
        labels, known = listed, np.arange(size)
    else:
        whole = _kind(labels) == "whole numbers" and count and not names
        known = rows = rows if own else _spread(size, READ if whole or _kind(labels) == "text" else SOME)
        examples = [_read(dataset, row, name) for row in rows.tolist()]
        labels = _labels([each.y for each in examples], name, rows)
    form: str | None = None
    shape: tuple[int, ...] = ()
    weighted = {each.weight is not None for each in examples}
    if len(weighted) > 1:
        raise InputError(f"{name}: all examples must have a {WEIGHT}, or none.")
    for row, each in zip(rows.tolist(), examples, strict=True):
        where = f"example {row} of {name}"
        if each.weight is not None:
            _weights([each.weight], 1, where)
        x = each.x if own else _input(each.x, where)
        shape = tuple(x.shape) if isinstance(x, Tensor) else ()
        if own:
            continue
        form = form or _form(x)
        if _form(x) != form:
            raise InputError(
                f"{where} is {_form(x)} and the first is {form}; pad them to the same shape, or give the "
                "dataset a method `collate`."
            )
    return Part(name, dataset, labels, known, form, shape, names, True in weighted, examples[0].unused)


def _spread(size: int, most: int) -> Array:
    """Up to ``most`` examples, evenly over the dataset and the same ones every time."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(np.int64))


def _listed_labels(dataset: Any) -> Array | None:
    """The labels of all examples, where the dataset has them in memory."""
    if isinstance(dataset, Subset):
        below = _listed_labels(dataset.dataset)
        return None if below is None else below[np.asarray(dataset.indices, np.int64)]
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list):  # Hugging Face
        found = [dataset.with_format(None)[name][:] for name in columns if name in LABELS]
    elif isinstance(tensors := getattr(dataset, "tensors", None), tuple):
        found = list(tensors[1:2])
    else:
        found = [getattr(dataset, name) for name in ("targets", "labels", "y") if hasattr(dataset, name)]
    if not found or not isinstance(found[0], (list, tuple, Tensor, np.ndarray)):
        return None
    array = np.asarray(_numpy(found[0]))
    return array if array.shape == (len(dataset),) and array.dtype.kind in "biufU" else None


def _class_names(dataset: Any) -> tuple[str, ...]:
    """The names of the classes, if the dataset has them."""
    if isinstance(dataset, Subset):
        return _class_names(dataset.dataset)
    names = getattr(dataset, "classes", ())
    if isinstance(features := getattr(dataset, "features", None), Mapping):  # Hugging Face
        names = next((getattr(features[name], "names", ()) for name in LABELS if name in features), ())
    return tuple(map(str, names)) if isinstance(names, (list, tuple, np.ndarray)) else ()


# One example


def _read(dataset: Any, index: int, name: str) -> Example:
    where = f"example {index} of {name}"
    try:
        item = dataset[index]
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{where} cannot be read: {type(error).__name__}: {error}") from error
    return _example(item, where)


def _example(item: Any, where: str) -> Example:
    if isinstance(item, Mapping):
        return _from_mapping(item, where)
    if not isinstance(item, (tuple, list)) or len(item) < 2:
        raise InputError(f"{where} is {shown(item)}; it must be a pair (x, y), or a dict with a label.")
    if len(item) > 2 and np.ndim(_numpy(item[1])) and not np.ndim(_numpy(item[-1])):
        raise InputError(f"{where} has {len(item)} parts; put several inputs into one: ((a, b), y).")
    unused = f"what an example has beyond (x, y) (a sample weight goes into a dict, as {WEIGHT!r})"
    return Example(item[0], item[1], None, unused if len(item) > 2 else "")


def _from_mapping(item: Mapping[Any, Any], where: str) -> Example:
    label = [key for key in item if key in LABELS]
    if len(label) != 1:
        keys = f"a dict with {', '.join(map(repr, item))}"
        raise InputError(f"{where} is {keys}; the label must be under one of {', '.join(LABELS)}.")
    rest = {key: value for key, value in item.items() if key not in (label[0], WEIGHT)}
    used = {key: value for key, value in rest.items() if value is not None and not isinstance(value, str)}
    if not used:
        raise InputError(f"{where} has no numbers besides its label; tokenize text, or use from_hf.")
    unused = ", ".join(repr(key) for key in rest if key not in used)
    x = next(iter(used.values())) if len(used) == 1 else used
    return Example(x, item[label[0]], item.get(WEIGHT), f"{unused} of the examples" if unused else "")


def _input(x: Any, where: str) -> Any:
    """What the model takes: numbers as tensors, in the tuple, list or mapping that they are in."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, Mapping):
        return {key: _input(part, where) for key, part in x.items()}
    if isinstance(x, (tuple, list)) and any(isinstance(part, (Tensor, np.ndarray)) for part in x):
        parts = [_input(part, where) for part in x]
        return parts if isinstance(x, list) else tuple(parts)
    try:
        array = np.asarray(None if hasattr(x, "getbands") else x)
    except ValueError:
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise InputError(
            f"{where} has {type(x).__name__} as an input; it must be numbers: convert images to tensors "
            "(torchvision's ToTensor), tokenize text or use from_hf."
        )
    return _as_tensor(array)


def _dtype(x: Any) -> torch.dtype:
    """The type of floating-point targets and weights: that of the inputs, if they are floating-point."""
    kinds = [part.dtype for part in leaves(x) if isinstance(part, Tensor) and part.is_floating_point()]
    return kinds[0] if kinds else torch.get_default_dtype()


def _form(x: Any) -> str:
    """Shapes and types in words: what must be the same for examples to be put together."""
    if isinstance(x, Mapping):
        return ", ".join(f"{key}: {_form(part)}" for key, part in x.items())
    if isinstance(x, (tuple, list)):
        return f"({', '.join(map(_form, x))})"
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def _numpy(value: Any) -> Any:
    """A tensor as an array; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def _kind(labels: Array) -> str:
    return KINDS.get(labels.dtype.kind, "whole numbers")


def _labels(values: Any, where: str, rows: Array | None = None) -> Array:
    """Labels as an array of booleans, finite numbers or text; of one number each, one-dimensional."""
    labels = _numpy(values)
    if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "biufU":
        items = [_numpy(value) for value in listed(values, f"labels of {where}")]
        text = {isinstance(item, str) for item in items}
        if len(text) > 1:
            raise InputError(f"some labels of {where} are text and others are not.")
        try:
            labels = np.asarray(items)
        except ValueError:
            raise InputError(f"labels of {where} have different shapes.") from None
        if labels.dtype.kind not in "biufU":
            wrong = next(n for n, item in enumerate(items) if np.asarray(item).dtype.kind not in "biufU")
            what = f"example {wrong if rows is None else rows[wrong]} of {where}"
            raise InputError(f"{what} has the label {shown(items[wrong])}; it must be a number or text.")
    if labels.dtype.kind == "f" and not (finite := np.isfinite(labels)).all():
        wrong = int((~finite).nonzero()[0][0])
        what = f"example {wrong if rows is None else rows[wrong]} of {where}"
        raise InputError(f"{what} has a label that is not finite; fix or remove it.")
    squeeze = labels.ndim > 1 and labels[0].size == 1 and labels.dtype.kind != "f"
    return labels.reshape(-1) if squeeze else labels


def _zero_or_one(labels: Array) -> NDArray[np.bool_]:
    """Which labels are 0 or 1."""
    known: NDArray[np.bool_] = np.isin(labels, (0, 1)) if labels.dtype.kind != "U" else labels != labels
    return known


def _weights(values: Any, count: int, where: str) -> Tensor:
    """Sample weights, at least 0 and not all 0."""
    weights = np.asarray(_numpy(values if not isinstance(values, list) else list(map(_numpy, values))))
    if weights.dtype.kind not in "biuf" or weights.shape != (count,):
        shape = f"{weights.dtype} of shape {weights.shape}"
        raise InputError(f"{where}: sample weights are {shape}; they must be {count} numbers.")
    if (wrong := ~(np.isfinite(weights) & (weights >= 0))).any():
        at = int(wrong.argmax())
        which = where if count == 1 else f"example {at} of {where}"
        raise InputError(f"{which} has the weight {weights[at]}; it must be at least 0.")
    if count > 1 and not weights.any():
        raise InputError(f"{where}: every sample weight is 0; remove the domain.")
    return torch.as_tensor(weights)
