"""Arrays, datasets and lists of examples as :class:`~shoal.data.DomainData`.

An example is a pair (x, y), or a dict with its label under one of :data:`LABELS`. Integers, booleans and text
are classes, floating-point numbers are regression; floating-point numbers that may be either are refused.
Sample weights are the third of three arrays (x, y, w), or under ``"sample_weight"`` in a dict.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from shoal.data.batch import TASKS, DomainData, Examples, TensorData, known_labels, leaves
from shoal.data.domains import Domains
from shoal.data.loader import seeded
from shoal.data.splits import SHARE, Names, domain_names, split, split_notes
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
ALIKE = ("labels are", "sample weights are", "an example is")
"""What must be the same for all domains, as :attr:`Part.form` lists it."""
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
        y: label of each example. Integers, booleans and strings are classes, numbered in sorted order
            (``class_names`` contains the original values); floating-point numbers are a regression target.
        domains: domain of each example, an integer or a string.
        held_out: held-out domains (default: none; train on all domains).
        task: ``classification`` or ``regression``, where labels may be either.
        validation: fraction of each training domain that is held out for validation.
        seed: random seed of the validation split.

    Returns:
        The dataset.
    """
    inputs, (labels, names) = _tensor(x, "x").detach().float(), numbered(y, "y", task)
    if inputs.ndim < 2:
        raise InputError(f"x has shape {tuple(inputs.shape)}; it must be (examples, features) or more.")
    data = TensorData(inputs, labels)
    found = DomainData(data, {}, len(names) or None, tuple(inputs.shape[1:]), "", class_names=names)
    return _divided(found, domains, held_out, validation, seed)


def numbered(y: Any, where: str, task: str | None = None) -> tuple[Tensor, tuple[str, ...]]:
    """Labels as numbers of classes and the names of these, in sorted order; or quantities, and no names."""
    labels = _labels(y, where)
    if task is not None:
        check_names("task", [task], ("classification", "regression"))
    different, numbers = np.unique(labels, return_inverse=True)
    if task is None and labels.dtype.kind in "iu" and len(different) > AMBIGUOUS:
        count = f"{where} has {len(different):,} different whole numbers"
        raise InputError(f"{count}; set task='classification' or task='regression'.")
    if (task or _task_of(labels)) == "regression":
        return Coding("regression")(labels, where, torch.float32), ()
    _check_two(names := tuple(map(str, different.tolist())))
    return torch.from_numpy(numbers.reshape(labels.shape)), names


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
    found = read_examples({"": dataset}, task=task, classes=classes, count=True)
    return _divided(found, domains, held_out, validation, seed)


def _divided(data: DomainData, groups: Any, held_out: Names, share: float, seed: int) -> DomainData:
    domains, size = Domains.from_labels(groups), len(data.examples)  # type: ignore[arg-type]
    if len(domains.indices) != size:
        count = f"there are {size} examples and {len(domains.indices)} domains"
        raise InputError(f"{count}; give the domain of each example.")
    splits = split(domains, domain_names(held_out), share, seed)
    labels = known_labels(data.examples)
    complete = labels is not None and labels.ndim == 1 and (labels >= 0).all()
    notes = {**data.notes, **split_notes(splits, labels if complete else None, data.class_names)}
    return replace(data, splits=splits, notes=notes, model=MODELS.get(len(data.input_shape), ""))


@checked
def concatenate(datasets: Mapping[str, Any]) -> tuple[Dataset[Any], Domains]:
    """Concatenate one dataset per domain.

    If all are tensors or arrays, the result is a :class:`TensorData`. If all have a method ``collate``, that
    of the first is used.

    >>> import torch
    >>> oslo, rome = (torch.zeros(2, 3), torch.zeros(2)), (torch.ones(1, 3), torch.ones(1))
    >>> data, domains = concatenate({"oslo": oslo, "rome": rome})
    >>> len(data), domains.names
    (3, ('oslo', 'rome'))

    Args:
        datasets: by domain, a dataset or a pair ``(x, y)`` of arrays.

    Returns:
        The dataset and its :class:`Domains`.
    """
    if not datasets:
        raise InputError("no datasets; at least one domain is required, such as {'art': (x, y)}.")
    parts: dict[str, Any] = {str(name): _in_memory(f"domain {name!r}", p) for name, p in datasets.items()}
    domains = Domains.from_sizes({name: len(part) for name, part in parts.items()})
    first, *others = parts.values()
    if not others:
        return first, domains
    if not all(type(part) is TensorData and isinstance(part.x, Tensor) for part in parts.values()):
        joined: Any = ConcatDataset(parts.values())
        if all(getattr(part, "collate", None) for part in parts.values()):
            joined.collate = first.collate
        return joined, domains
    for name, part in parts.items():
        for what, a, b in (("x", first.x, part.x), ("y", first.y, part.y)):
            if a.shape[1:] != b.shape[1:] or a.dtype != b.dtype:
                raise InputError(
                    f"{what} of an example is {tuple(a.shape[1:])} {a.dtype} in domain {domains.names[0]!r} "
                    f"but {tuple(b.shape[1:])} {b.dtype} in domain {name!r}; all domains must be alike."
                )
        if (part.weight is None) != (first.weight is None):
            raise InputError(f"some domains have sample weights and others, such as {name!r}, do not.")
    columns = zip(*((part.x, part.y, part.weight) for part in parts.values()), strict=True)
    return TensorData(*(None if c[0] is None else torch.cat(c) for c in columns)), domains  # type: ignore[arg-type]


def _in_memory(name: str, part: Any) -> Any:
    """A pair of tensors or arrays as :class:`TensorData`; a dataset as it is."""
    if isinstance(part, TensorDataset) and len(part.tensors) == 2:
        part = part.tensors
    if isinstance(part, (tuple, list)):
        if len(part) not in (2, 3):
            raise InputError(
                f"{name} has {len(part)} parts; it must be a dataset, (x, y) or (x, y, weights)."
            )
        x, y = _tensor(part[0], name), _tensor(part[1], name)
        if len(x) != len(y):
            raise InputError(
                f"{name}: x has {len(x)} examples and y has {len(y)}; the lengths must be equal."
            )
        part = TensorData(x, y, *(_tensor(weight, name) for weight in part[2:]))
    if not (hasattr(part, "__getitem__") and hasattr(part, "__len__")) or isinstance(part, IterableDataset):
        raise InputError(
            f"{name} is a {type(part).__name__}; it must be a dataset with __getitem__ and __len__."
        )
    if not len(part):
        raise InputError(f"{name} has no examples; remove it.")
    return part


# What the labels are


@dataclass(frozen=True)
class Coding:
    """From labels to the tensor that is trained on; ``names`` number text labels, in their order."""

    task: str
    classes: int | None = None
    names: tuple[str, ...] = ()

    def __call__(self, labels: Array, where: str, dtype: torch.dtype) -> Tensor:
        """``where`` names the dataset, or the example if there is one only."""
        text = labels.dtype.kind == "U"
        if text and self.task in NUMBERS:
            message = f"the labels of {where} are text"
            raise InputError(f"{message}; for task={self.task!r} they must be numbers.")
        if text:
            number = {name: n for n, name in enumerate(self.names)}
            known = ", ".join(self.names[:10]) + ", …" * (len(self.names) > 10)
            wrong, right = ~np.isin(labels, self.names), f"it must be one of {known}"
        elif self.task in NUMBERS:
            wrong, right = ~_zero_or_one(labels) & (self.task == "multilabel"), "it must be 0 or 1"
        else:
            wrong, right = labels != np.floor(labels), "labels of classes must be whole numbers"
        if wrong.any():
            example = f"example {int(wrong.nonzero()[0][0])} of " if len(labels) > 1 else ""
            message = f"{example}{where} has the label {labels[wrong][0]}; with task={self.task!r} {right}."
            raise InputError(message)
        if text:
            return torch.tensor([number[label] for label in labels.tolist()])
        return torch.as_tensor(labels).to(dtype if self.task in NUMBERS else torch.long)


def _task_of(labels: Array, default: str | None = None) -> str:
    """The task by the type of labels; ``default``: of floating-point ones that may be classes too."""
    if labels.dtype.kind != "f":
        return "classification"
    values = np.unique(labels)
    ambiguous = 1 < len(values) <= AMBIGUOUS and bool((values == np.floor(values)).all())
    if ambiguous and default is None and labels.ndim == 1:
        some = ", ".join(f"{v:g}" for v in values[:5]) + (", …" if len(values) > 5 else "")
        raise InputError(
            f"labels are floating-point numbers with only integer values ({some}): set task='classification' "
            "or task='regression', or make classes integers (y.long())."
        )
    return default or "regression"


def _check_two(names: Sequence[str]) -> None:
    if len(names) < 2:
        raise InputError(f"the label is {names[0]!r} in every example; there must be two classes.")


def _coding(parts: Sequence[Part], task: str, classes: int | Sequence[str] | None, count: bool) -> Coding:
    """The classes as they are named, as the datasets name them, or as the labels are."""
    if task in NUMBERS:
        return Coding(task)
    text = parts[0].labels.dtype.kind == "U"
    if isinstance(classes, int):
        return Coding(task, classes)
    names = tuple(classes or ())
    if not names and not text:
        names = parts[0].class_names if all(p.class_names == parts[0].class_names for p in parts) else ()
    if names or not (text or count):
        return Coding(task, len(names) or None, names)
    if not all(part.complete for part in parts):
        raise InputError(
            f"the number of classes is not known after {READ:,} examples: set classes=N or, in the order "
            "of their numbers, classes=[…] (or task='regression')."
        )
    values = np.unique(np.concatenate([part.labels.reshape(-1) for part in parts]))
    if not text:
        return Coding(task, max(2, 1 + int(values[-1])))
    _check_two(names := tuple(values.tolist()))
    return Coding(task, len(names), names)


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
        count = count and classes is None
        found = [_part(f"domain {n!r}" if n else "the dataset", part, count) for n, part in parts.items()]
    first, notes = found[0], dict[str, str]()
    for part in found:
        for what, ours, theirs in zip(ALIKE, first.form, part.form, strict=True):
            if ours != theirs:
                each = f"{ours} in {first.name} and {theirs} in {part.name}"
                raise InputError(f"{what} {each}; all domains must be alike.")
    if first.unused:
        notes["example"] = f"not used: {first.unused}"
        warnings.warn(notes["example"], stacklevel=4)
    if binary and task is None and not classes and all(_zero_or_one(part.labels).all() for part in found):
        task = "multilabel"
        notes["task"] = "multi-label, as the loss is a binary cross-entropy and labels are 0 or 1"
    if task is None and first.labels.ndim == 1 and not classes:
        task = _task_of(np.concatenate([part.labels for part in found]), default)
    task = task or ("classification" if classes else _task_of(first.labels, default))
    coding = _coding(found, task, classes, count)
    coded = {name: part.coded(coding) for name, part in zip(parts, found, strict=True)}
    examples, domains = concatenate(coded)
    return DomainData(
        examples,
        {"train": domains},
        coding.classes,
        tuple(first.x.shape) if isinstance(first.x, Tensor) else (),
        model="",
        notes=notes,
        class_names=coding.names,
        kind=None if task in ("classification", "regression") else task,
    )


# One dataset


@dataclass(frozen=True)
class Part:
    """A dataset before training: the labels of some examples, or of all, and its first input."""

    name: str
    data: Any
    labels: Array
    rows: Array
    x: Any
    class_names: tuple[str, ...] = ()
    weighted: bool = False
    unused: str = ""

    @property
    def form(self) -> tuple[str, ...]:
        tensors = [x for x in leaves(self.x) if isinstance(x, Tensor)]
        shapes = [f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in tensors]
        return _kind(self.labels), "given" if self.weighted else "missing", ", ".join(shapes)

    @property
    def complete(self) -> bool:
        return len(self.labels) == len(self.data)

    def coded(self, coding: Coding) -> Any:
        """The dataset with its labels as tensors; one that makes its batches itself stays as it is."""
        if type(self.data) not in (TensorData, Items):
            return self.data
        y = coding(self.labels, self.name, _dtype(self.x))
        if isinstance(self.data, TensorData):
            return TensorData(self.data.x, y.to(self.data.device), self.data.weight)
        self.data.coding = coding
        if coding.task not in NUMBERS and y.ndim == 1:
            if (wrong := y < 0).any():
                at = int(wrong.nonzero()[0])
                raise InputError(f"example {self.rows[at]} of {self.name} has the label {y[at]}, below 0.")
            self.data.known[self.rows] = y
        return self.data


class Items(Examples):
    """A dataset whose examples are tensors (x, y) or (x, y, weight), whatever those of ``source`` are."""

    def __init__(self, source: Any, name: str) -> None:
        self.source, self.name = source, name
        self.coding, self.known = Coding("regression"), np.full(len(source), -1)

    def __len__(self) -> int:
        return len(self.source)

    def known_labels(self) -> Array:
        return self.known

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        where = f"example {index} of {self.name}"
        found = _example(self.source[int(index)], where)
        x, most = _input(found.x, where), self.coding.classes
        y = self.coding(_labels([found.y], where), where, _dtype(x))[0]
        if y.ndim == 0 and self.coding.task not in NUMBERS and not 0 <= y < (most or 2**62):
            below = "" if most is None else f" and below {most}, the number of classes"
            raise InputError(f"{where} has the label {y}; it must be at least 0{below}.")
        if found.weight is None:
            return x, y
        return x, y, _weights([found.weight], 1, where)[0].to(_dtype(x))


def _part(name: str, part: Any, count: bool) -> Part:
    if type(part) is TensorDataset and len(part.tensors) == 2:
        part = part.tensors
    elif type(part) is TensorData:
        part = (part.x, part.y) if part.weight is None else (part.x, part.y, part.weight)
    examples = isinstance(part, list) and part and all(isinstance(each, (tuple, Mapping)) for each in part)
    if isinstance(part, (tuple, list)) and not examples and len(part) in (2, 3):
        return _arrays(name, *part)
    return _dataset(name, part if examples else _in_memory(name, part), count)


def _arrays(name: str, x: Any, y: Any, weight: Any = None) -> Part:
    """Arrays; x may be several arrays in a tuple or mapping."""
    labels = _labels(y, name)
    count = len(labels)
    x = _input(x, name) if isinstance(x, Mapping) or len(x) != count else _tensor(x, name)
    for each in leaves(x):
        if not each.ndim or len(each) != count:
            size = len(each) if each.ndim else 0
            raise InputError(f"{name}: x has {size} examples and y has {count}; the lengths must be equal.")
    if not count:
        raise InputError(f"{name} has no examples; remove it.")
    device = next(leaves(x)).device
    w = None if weight is None else _weights(weight, count, name).to(device, _dtype(x))
    data = TensorData(x, torch.zeros(count, device=device), w)
    names = ("False", "True") if labels.dtype.kind == "b" else ()
    return Part(name, data, labels, np.arange(count), data[0][0], names, w is not None)


def _dataset(name: str, dataset: Any, count: bool) -> Part:
    """A dataset that is indexed; of one that does not list its labels, some examples are read."""
    own = isinstance(dataset, Examples) or callable(getattr(dataset, "collate", None))
    names, size = _class_names(dataset), len(dataset)

    def read(most: int) -> tuple[Array, list[Example], Array]:
        rows = np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(np.int64))
        examples = []
        for row in rows.tolist():
            try:
                examples.append(_example(dataset[row], f"example {row} of {name}"))
            except InputError:
                raise
            except Exception as error:  # of a stranger's dataset
                why = f"{type(error).__name__}: {error}"
                raise InputError(f"example {row} of {name} cannot be read: {why}") from error
        return rows, examples, _labels([each.y for each in examples], name, rows)

    rows, examples, labels = read(FEW)
    every = _listed_labels(dataset)
    if every is not None and _kind(every) == _kind(labels) and (every[rows] == labels).all():
        labels, rows = every, np.arange(size)
    elif not own:
        rows, examples, labels = read(READ if _kind(labels) == "text" or (count and not names) else SOME)
    if len({each.weight is not None for each in examples}) > 1:
        raise InputError(f"{name}: all examples must have a {WEIGHT}, or none.")
    if labels.dtype.kind == "b" and not names:
        names = ("False", "True")
    first = examples[0]
    x = first.x if own else _input(first.x, f"example 0 of {name}")
    data = dataset if own else Items(dataset, name)
    return Part(name, data, labels, rows, x, names, first.weight is not None, first.unused)


def _listed_labels(dataset: Any) -> Array | None:
    """The labels of all examples, where the dataset has them in memory."""
    if isinstance(dataset, Subset):
        below = _listed_labels(dataset.dataset)
        return None if below is None else below[np.asarray(dataset.indices, np.int64)]
    tensors = getattr(dataset, "tensors", ())
    listed = [*tensors[1:2], *(getattr(dataset, name, None) for name in ("targets", "labels", "y"))]
    found = next((each for each in listed if isinstance(each, (list, tuple, Tensor, np.ndarray))), ())
    array = np.asarray(_numpy(found))
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


class Example(NamedTuple):
    """An example: its input, label and weight, and what is not used of it."""

    x: Any
    y: Any
    weight: Any = None
    unused: str = ""


def _example(item: Any, where: str) -> Example:
    if isinstance(item, Mapping):
        label = [key for key in item if key in LABELS]
        if len(label) != 1:
            keys = f"a dict with {', '.join(map(repr, item))}"
            raise InputError(f"{where} is {keys}; the label must be under one of {', '.join(LABELS)}.")
        rest = {key: value for key, value in item.items() if key not in (label[0], WEIGHT)}
        used = {key: value for key, value in rest.items() if value is not None and not isinstance(value, str)}
        if not used:
            raise InputError(f"{where} has no numbers besides its label; tokenize text, or use from_hf.")
        x = next(iter(used.values())) if len(used) == 1 else used
        unused = ", ".join(repr(key) for key in rest if key not in used)
        return Example(x, item[label[0]], item.get(WEIGHT), unused and f"{unused} of the examples")
    if not isinstance(item, (tuple, list)) or len(item) < 2:
        raise InputError(f"{where} is {shown(item)}; it must be a pair (x, y), or a dict with a label.")
    if len(item) > 2 and np.ndim(_numpy(item[1])) and not np.ndim(_numpy(item[-1])):
        raise InputError(f"{where} has {len(item)} parts; put several inputs into one: ((a, b), y).")
    unused = f"what an example has beyond (x, y) (a sample weight goes into a dict, as {WEIGHT!r})"
    return Example(item[0], item[1], None, unused if len(item) > 2 else "")


def _input(x: Any, where: str) -> Any:
    """What the model takes: numbers as tensors, in the tuple, list or mapping that they are in."""
    if isinstance(x, Mapping):
        return {key: _input(part, where) for key, part in x.items()}
    if isinstance(x, (tuple, list)) and any(isinstance(part, (Tensor, np.ndarray)) for part in x):
        return type(x)(_input(part, where) for part in x)
    return _tensor(x, where)


def _tensor(values: Any, where: str) -> Tensor:
    """A tensor as it is; an array with NumPy's usual float64 in torch's usual type, which models have."""
    if isinstance(values, Tensor):
        return values
    try:
        array = np.asarray(None if hasattr(values, "getbands") else values)
    except (ValueError, TypeError):
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        what = f"an array of {values.dtype}" if isinstance(values, np.ndarray) else type(values).__name__
        raise InputError(
            f"{where} has {what} as an input; it must be numbers: convert images to tensors "
            "(torchvision's ToTensor), tokenize text or use from_hf; for columns of a table: from_table."
        )
    tensor = torch.as_tensor(array)
    return tensor.to(torch.get_default_dtype()) if tensor.dtype == torch.float64 else tensor


def _dtype(x: Any) -> torch.dtype:
    """The type of floating-point targets and weights: that of the inputs, if they are floating-point."""
    kinds = [part.dtype for part in leaves(x) if isinstance(part, Tensor) and part.is_floating_point()]
    return kinds[0] if kinds else torch.get_default_dtype()


def _numpy(value: Any) -> Any:
    """A tensor as an array; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def _kind(labels: Array) -> str:
    return {"U": "text", "f": "floating"}.get(labels.dtype.kind, "whole numbers")


def _labels(values: Any, where: str, rows: Array | None = None) -> Array:
    """Labels as an array of booleans, finite numbers or text; of one number each, one-dimensional."""
    labels = _numpy(values)
    if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "biufU":
        items = [_numpy(value) for value in listed(values, f"labels of {where}")]
        if len({isinstance(item, str) for item in items}) > 1:
            raise InputError(f"some labels of {where} are text and others are not.")
        try:
            labels = np.asarray(items)
        except ValueError:
            raise InputError(f"labels of {where} have different shapes.") from None
    wrong = np.zeros(len(labels), bool)
    if labels.dtype.kind == "f":
        wrong = ~np.isfinite(labels.reshape(len(labels), -1)).all(1)
    elif labels.dtype.kind not in "biuU":
        wrong = np.array([np.asarray(item).dtype.kind not in "biufU" or item != item for item in labels])
    if wrong.any():
        n = int(wrong.argmax())
        which = "" if len(labels) == 1 else f"example {n if rows is None else rows[n]} of "
        label = shown(labels[n].item() if hasattr(labels[n], "item") and not labels[n].ndim else labels[n])
        message = f"{which}{where} has the label {label}; it must be text or a finite number."
        raise InputError(message)
    squeeze = labels.ndim > 1 and labels[0].size == 1 and labels.dtype.kind != "f"
    return labels.reshape(-1) if squeeze else labels


def _zero_or_one(labels: Array) -> Array:
    return np.isin(labels, (0, 1)) if labels.dtype.kind != "U" else np.zeros(labels.shape, bool)


def _weights(values: Any, count: int, where: str) -> Tensor:
    """Sample weights, at least 0 and not all 0."""
    weights = np.asarray(_numpy(values if not isinstance(values, list) else list(map(_numpy, values))))
    if weights.dtype.kind not in "biuf" or weights.shape != (count,):
        shape = f"{weights.dtype} of shape {weights.shape}"
        raise InputError(f"{where}: sample weights are {shape}; they must be {count} numbers.")
    if (wrong := ~(np.isfinite(weights) & (weights >= 0))).any():
        which = where if count == 1 else f"example {int(wrong.argmax())} of {where}"
        raise InputError(f"{which} has the weight {weights[wrong][0]}; it must be at least 0.")
    if count > 1 and not weights.any():
        raise InputError(f"{where}: every sample weight is 0; remove the domain.")
    return torch.as_tensor(weights)
