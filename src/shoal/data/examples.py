"""Examples as datasets give them (pairs, dicts, NumPy, text labels), made into pairs of tensors (x, y).

What the labels are is decided here, once for all domains: whole numbers, booleans and text are classes,
floating numbers are regression, and floating numbers that could be either are refused. Several whole numbers
per example are a class for each position; 0 and 1 for each of several labels must be said to be that.

Sample weights are the third of three arrays (x, y, w), or ``"sample_weight"`` in examples that are dicts.
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
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from shoal.data.batch import TASKS, Examples, TensorData, leaves, map_nest
from shoal.data.domains import Domains
from shoal.data.loader import _as_tensor, concatenate, seeded
from shoal.errors import InputError, check_names, shown
from shoal.settings import coerce

BEYOND = "what an example has beyond (x, y) (a sample weight goes into a dict, as 'sample_weight')"
LABELS = ("label", "labels", "y", "target", "targets")
"""What the label is called in examples that are dicts."""
WEIGHT = "sample_weight"
READ = 4096
"""Examples read to learn every label, where a dataset neither lists its labels nor says its classes."""
SAMPLE, FEW = 256, 16
"""Examples looked at where not every label is needed, and where the dataset lists its labels."""
AMBIGUOUS = 20
"""Up to so many distinct floating labels, all whole numbers, could be classes or quantities."""

NUMBERS = ("regression", "multilabel")
"""Tasks whose targets are floating."""
MULTILABEL = "with task='multilabel' each must be 0 or 1"

Array = NDArray[Any]


@dataclass(frozen=True)
class Understood:
    """Datasets joined into one, and what its labels are; ``classes`` is ``None`` where nothing tells yet."""

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
        """The task, where it is not what ``classes`` says."""
        return None if self.task in ("classification", "regression") else self.task


@dataclass(frozen=True)
class Coding:
    """From a label as the dataset gives it to a tensor; ``names`` number text labels in their order."""

    task: str
    names: tuple[str, ...] = ()
    classes: int | None = None
    text: bool = False

    def __call__(self, label: Any, where: str) -> Tensor:
        value = _label(label, where)
        if (value.dtype.kind == "U") != self.text:
            others = "text" if self.text else "numbers"
            raise InputError(
                f"{where} has the label {label!r}, and other labels are {others}; they must have the same "
                "type."
            )
        if self.text:
            if (text := str(value)) not in self.names:
                some = ", ".join(map(repr, self.names[:10])) + (", …" if len(self.names) > 10 else "")
                raise InputError(f"{where} has the label {text!r}, which is not among the classes {some}.")
            return torch.tensor(self.names.index(text))
        if self.task in NUMBERS:
            if self.task == "multilabel" and not _zero_or_one(value):
                raise InputError(f"{where} has the label {label!r}; {MULTILABEL}.")
            return torch.as_tensor(value).to(torch.get_default_dtype())
        if value.ndim and value.dtype.kind != "f":
            return torch.as_tensor(value.astype(np.int64))
        if value.ndim or (value.dtype.kind == "f" and value != np.floor(value)):
            raise InputError(f"{where} has the label {label!r}; a class is one integer per example.")
        number = int(value)
        if number < 0 or (self.classes is not None and number >= self.classes):
            bound = "" if self.classes is None else f" and below {self.classes}, the number of classes"
            raise InputError(f"{where} has the label {number}; labels must be at least 0{bound}.")
        return torch.tensor(number)


class Items(Examples):
    """A dataset whose examples are pairs of tensors, whatever those of ``source`` are."""

    def __init__(self, source: Any, where: str, coding: Coding, seen: tuple[Array, Array]) -> None:
        self.source, self.where, self.coding = source, where, coding
        self.seen = seen
        """Examples whose class is known before training, and these classes; empty in regression."""

    def __len__(self) -> int:
        return len(self.source)

    def known_labels(self) -> Array:
        labels = np.full(len(self), -1)
        labels[self.seen[0]] = self.seen[1]
        return labels

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        where = f"example {index} of {self.where}"
        found = _apart(self.source[int(index)], where)
        pair = _input(found.x, where), self.coding(found.y, where)
        return pair if found.weight is None else (*pair, _weight(found.weight, where))


class Joined(ConcatDataset[Any]):
    """Several datasets after each other, some of them :class:`Items`."""

    @property
    def seen(self) -> tuple[Array, Array]:
        """As that of :class:`Items`; in-memory labels are checked where they are."""
        starts = [0, *self.cumulative_sizes]
        known = [
            (n, part.seen) for n, part in zip(starts, self.datasets, strict=False) if isinstance(part, Items)
        ]
        return (
            np.concatenate([which + start for start, (which, _) in known]),
            np.concatenate([labels for _, (_, labels) in known]),
        )


def understand(
    parts: Mapping[str, Any],
    *,
    task: str | None = None,
    classes: int | Sequence[str] | None = None,
    count: bool = False,
    default: str | None = None,
    binary: bool = False,
) -> Understood:
    """Joins ``parts``, each a Dataset, a list of examples or a pair of arrays, by what their labels are.

    Args:
        task: one of :data:`~shoal.data.batch.TASKS`; by default as the labels are.
        classes: how many there are, or their names in order.
        count: find out how many there are where the datasets do not say; it reads up to :data:`READ`
            examples, and beyond that ``classes`` must be given.
        default: the task of labels that could be either, which are refused without it.
        binary: the loss is a binary cross-entropy: labels that are all 0 or 1 are the multi-label task.
    """
    if task is not None:
        check_names("task", [task], TASKS)
    classes = coerce(int | Sequence[str] | None, classes, "classes")
    names = tuple(map(str, classes)) if classes is not None and not isinstance(classes, int) else ()
    given = len(names) if names else classes if isinstance(classes, int) else None
    if given is not None and (given < 2 or isinstance(classes, bool)):
        raise InputError(f"classes={classes!r}; there must be at least two.")
    if given and task in NUMBERS:
        raise InputError(f"classes={classes!r} cannot be combined with task={task!r}.")
    count = count and given is None and task not in NUMBERS
    with seeded(0):  # reading an example may draw random numbers
        looks = [
            _look(f"domain {name!r}" if name else "the dataset", part, count, len(parts))
            for name, part in parts.items()
        ]
    known = [look for look in looks if look.signature is not None]
    for look in known:
        if look.signature != known[0].signature:
            raise InputError(
                f"an example is {', '.join(known[0].signature or ())} in {known[0].name} but "
                f"{', '.join(look.signature or ())} in {look.name}; they must have the same shape and type."
            )
    kinds = {look.kind: look.name for look in reversed(looks)}
    if len(kinds) > 1:
        words = {"text": "text", "whole": "whole numbers", "floating": "floating"}
        (a, one), (b, other) = sorted(kinds.items(), key=lambda item: list(words).index(item[0]))[:2]
        raise InputError(
            f"labels are {words[a]} in {one} and {words[b]} in {other}; they must have the same type."
        )
    (kind,) = kinds
    if weights := [look for look in looks if look.weighted]:
        for look in looks:
            if not look.weighted:
                raise InputError(
                    f"{look.name} has no sample weights, but {weights[0].name} has; all or none must have "
                    "them."
                )
    by_loss = binary and task is None and not given and all(_zero_or_one(look.labels) for look in looks)
    if by_loss:
        task = "multilabel"
    task = task or ("classification" if kind != "floating" or given else _floating(looks, default))
    if task in NUMBERS and kind == "text":
        raise InputError(f"labels are text; for task={task!r} they must be numbers.")
    if task == "multilabel":
        _check_multilabel(looks)
    coding = Coding(task) if task in NUMBERS else _classes(looks, kind, names, given, count, task)
    coded = {name: look.coded(coding) for name, look in zip(parts, looks, strict=True)}
    joined: Any
    if len(coded) == 1 or any(isinstance(part, Items) for part in coded.values()):
        joined = Joined(coded.values()) if len(coded) > 1 else next(iter(coded.values()))
        domains = Domains.from_sizes({name: len(part) for name, part in coded.items()})
    else:
        joined, domains = concatenate(coded)
    dropped = "; ".join(dict.fromkeys(look.dropped for look in looks if look.dropped))
    notes = {"example": f"not used: {dropped}"} if dropped else {}
    if by_loss:
        notes["task"] = "multi-label, as the loss is a binary cross-entropy and labels are 0 or 1"
    called = coding.names if len(coding.names) == coding.classes else ()
    return Understood(joined, domains, task, coding.classes, called, looks[0].shape, notes)


def warn_of(notes: Mapping[str, str]) -> None:
    """Tells the caller of the public function what of the examples is not used."""
    if "example" in notes:
        warnings.warn(notes["example"], stacklevel=3)


def _floating(looks: Sequence[_Look], default: str | None) -> str:
    """Floating labels are regression, unless they could as well be classes."""
    if default is not None or any(look.labels.ndim > 1 for look in looks):
        return default or "regression"
    values = np.unique(np.concatenate([look.labels for look in looks]))
    if 1 < len(values) <= AMBIGUOUS and (values == np.floor(values)).all():
        some = ", ".join(f"{v:g}" for v in values[:5]) + (", …" if len(values) > 5 else "")
        raise InputError(
            f"labels are floating point with only integer values ({some}): they may be classes or "
            "quantities; set "
            "task='classification' or task='regression' (or make labels of classes integers: y.long())."
        )
    return "regression"


def _zero_or_one(values: Array) -> bool:
    return values.dtype.kind in "biuf" and bool(((values == 0) | (values == 1)).all())


def _check_multilabel(looks: Sequence[_Look]) -> None:
    for look in looks:
        if not _zero_or_one(look.labels):
            wrong = ((look.labels != 0) & (look.labels != 1)).reshape(len(look.labels), -1)
            at = int(wrong.any(1).argmax())
            value = look.labels[at].reshape(-1)[wrong[at]][0]
            raise InputError(f"example {look.which[at]} of {look.name} has the label {value}; {MULTILABEL}.")


def _classes(
    looks: Sequence[_Look], kind: str, names: tuple[str, ...], given: int | None, count: bool, task: str
) -> Coding:
    for look in looks:
        wrong = kind == "text" or task == "ordinal" or look.labels.dtype.kind == "f"
        if look.labels.ndim > 1 and wrong and not look.opaque:
            raise InputError(
                f"a label in {look.name} has shape {look.labels.shape[1:]}: a class is one number per "
                "example. For several targets make them floating, for a class per position integers."
            )
    every = all(look.whole for look in looks)
    if kind == "text":
        result = {str(v) for look in looks for v in look.labels.tolist()}
        if not names:
            if not every:
                raise InputError(
                    f"labels are text, and to number them more than {READ:,} examples would be read: name "
                    "the classes in their order (classes=[…]), or number the labels in the dataset."
                )
            names = tuple(sorted(result))
        if unknown := sorted(result - set(names)):
            raise InputError(f"the label {unknown[0]!r} is not among classes={list(names)!r}.")
        if len(names) < 2:
            raise InputError(f"the label is {names[0]!r} in every example; at least two classes are needed.")
        return Coding(task, names, len(names), text=True)
    listed = looks[0].called if all(look.called == looks[0].called for look in looks) else ()
    if all(look.labels.dtype.kind == "b" for look in looks):
        return Coding(task, names or ("False", "True"), given or 2)
    if given is None and listed:
        given, names = len(listed), tuple(listed)
    if given is None and count:
        if not every:
            raise InputError(
                "labels are whole numbers, and the dataset does not say how many classes there are; say it: "
                "classes=N (or task='regression')."
            )
        given = max(2, 1 + max(int(look.labels.max()) for look in looks))
    for look in looks:
        if kind == "floating" and (wrong := look.labels != np.floor(look.labels)).any():
            at = int(np.argmax(wrong))
            raise InputError(
                f"example {look.which[at]} of {look.name} has the label {look.labels[at]}; "
                f"with task={task!r} labels must be whole numbers."
            )
    return Coding(task, names if len(names) == given else (), given)


# One dataset


@dataclass(frozen=True)
class _Look:
    """What is known of one dataset before it is trained on."""

    name: str
    source: Any
    labels: Array
    """Of the examples ``which``: booleans, numbers or text."""
    which: Array
    whole: bool
    """Whether these are all examples."""
    shape: tuple[int, ...] = ()
    signature: Any = None
    called: tuple[str, ...] = ()
    """The names that the dataset has for its classes."""
    dropped: str = ""
    opaque: bool = False
    """It follows the loader's own protocol and is taken as it is."""
    weight: Tensor | None = None
    """Of arrays: the sample weights."""
    weighted: bool = False

    @property
    def kind(self) -> str:
        return _kind(self.labels)

    def coded(self, coding: Coding) -> Any:
        """The dataset with its labels as tensors."""
        if self.opaque:
            return self.source
        if isinstance(self.source, Tensor):
            y = self._numbers(coding)
            kind = self.source.dtype if self.source.is_floating_point() else torch.get_default_dtype()
            y = y.to(self.source.device, kind if y.is_floating_point() else None)
            return TensorData(self.source, y, self.weight)
        if coding.task in NUMBERS or self.labels.ndim > 1:
            return Items(self.source, self.name, coding, (self.which[:0], self.which[:0]))
        return Items(self.source, self.name, coding, (self.which, self._numbers(coding).numpy()))

    def _numbers(self, coding: Coding) -> Tensor:
        if self.kind == "text":
            place = {name: n for n, name in enumerate(coding.names)}
            return torch.tensor([place[v] for v in self.labels.tolist()])
        if coding.task in NUMBERS:
            return torch.as_tensor(self.labels).double()
        return torch.as_tensor(self.labels.astype(np.int64))


def _look(name: str, part: Any, count: bool, parts: int) -> _Look:
    if isinstance(part, TensorDataset) and type(part) is TensorDataset and len(part.tensors) == 2:
        part = part.tensors
    if isinstance(part, list) and part and all(isinstance(item, (tuple, Mapping)) for item in part):
        return _sampled(name, part, count, parts)
    if type(part) is TensorData:
        part = (part.x, part.y) if part.weight is None else (part.x, part.y, part.weight)
    if isinstance(part, (tuple, list)):
        if len(part) in (2, 3) and _is_nest(*part[:2]):
            return _sampled(name, Rows(name, *part), count, parts)
        return _arrays(name, part)
    if isinstance(part, IterableDataset) or not (hasattr(part, "__getitem__") and hasattr(part, "__len__")):
        raise InputError(
            f"{name} is a {type(part).__name__}; a dataset that gives any example by its index is needed "
            "(with __getitem__ and __len__)."
        )
    return _sampled(name, part, count, parts)


def _is_nest(x: Any, y: Any) -> bool:
    """Whether ``x`` is several arrays with all examples each, and not a sequence of examples."""
    if isinstance(x, Mapping):
        return True
    arrays = isinstance(x, (tuple, list)) and all(isinstance(v, (Tensor, np.ndarray)) and v.ndim for v in x)
    count = len(y) if hasattr(y, "__len__") else 0
    return arrays and len(x) != count and any(len(v) == count for v in x)


class Rows(Dataset[Any]):
    """The examples of several arrays of inputs, ``((a, b), y)`` or ``({"a": a, "b": b}, y)``."""

    def __init__(self, name: str, x: Any, y: Any, weight: Any = None) -> None:
        self.y = np.asarray(_plain(y))
        count = len(self.y) if self.y.ndim else 0
        for part in leaves(x):
            if not isinstance(part, (Tensor, np.ndarray)) or not part.ndim or len(part) != count:
                got = f"an array of {len(part)}" if hasattr(part, "shape") and part.ndim else shown(part)
                raise InputError(
                    f"{name}: x has several parts, and each must be an array of {count} examples, as y has; "
                    f"got {got}."
                )
        self.x = map_nest(lambda part: _input(part, name), x)
        self.weight = None if weight is None else _weights(weight, count, name)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = {"x": map_nest(lambda part: part[index], self.x), "y": self.y[index]}
        return item if self.weight is None else {**item, WEIGHT: self.weight[index]}


def _arrays(name: str, part: Sequence[Any]) -> _Look:
    """A pair of arrays, or three with sample weights, all of whose labels are known."""
    if len(part) not in (2, 3):
        raise InputError(f"{name} has {len(part)} parts; it must be a dataset, (x, y) or (x, y, weights).")
    try:
        x = _as_tensor(part[0])
        values = np.asarray(_plain(part[1]))
        weight = _weights(part[2], len(x), name).to(x.device) if len(part) == 3 else None
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}: {error}") from error
    if not x.ndim or not values.ndim or len(x) != len(values):
        sizes = [len(v) if v.ndim else 0 for v in (x, values)]
        raise InputError(
            f"{name}: x has {sizes[0]} examples and y has {sizes[1]}; the lengths must be equal."
        )
    if not len(x):
        raise InputError(f"{name} has no examples; remove it.")
    if values.dtype.kind in "OSU":
        values = _together([_label(v, f"example {n} of {name}") for n, v in enumerate(values)], name)
    elif values.dtype.kind not in "biuf":
        raise InputError(f"{name}: labels are {values.dtype}; they must be numbers or text.")
    elif values.dtype.kind != "f" and values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    every = np.arange(len(x))
    shape, weighted = tuple(x.shape[1:]), weight is not None
    return _Look(name, x, values, every, True, shape, _signature(x[0]), weight=weight, weighted=weighted)


def _weights(values: Any, count: int, name: str) -> Tensor:
    """Sample weights, if they can be."""
    weights = np.asarray(_plain(values))
    if weights.dtype.kind not in "biuf" or weights.shape != (count,):
        raise InputError(
            f"{name}: sample weights are {weights.dtype} of shape {weights.shape}; they must be {count} "
            "numbers. Several inputs go into one: a Dataset of ((a, b), y)."
        )
    wrong = ~(np.isfinite(weights) & (weights >= 0))
    if wrong.any():
        at = int(wrong.argmax())
        raise InputError(f"example {at} of {name} has the weight {weights[at]}; it must be at least 0.")
    if not weights.any():
        raise InputError(f"{name}: every sample weight is 0; remove the domain.")
    kind = torch.float64 if weights.dtype == np.float64 and isinstance(values, Tensor) else None
    return torch.as_tensor(weights).to(kind or torch.get_default_dtype())


def _weight(value: Any, where: str) -> Tensor:
    """One sample weight, if it can be."""
    found = np.asarray(_plain(value))
    if found.dtype.kind not in "biuf" or found.size != 1 or not np.isfinite(found).all() or found.item() < 0:
        raise InputError(f"{where} has the {WEIGHT} {value!r}; it must be a number of at least 0.")
    return torch.tensor(found.item(), dtype=torch.get_default_dtype())


def _sampled(name: str, dataset: Any, count: bool, parts: int) -> _Look:
    """A dataset of items: some are read, all where every label is needed and not listed.

    One that puts its batches together itself, or declares more that it can do, is taken as it is.
    """
    size = len(dataset)
    if not size:
        raise InputError(f"{name} has no examples; remove it.")
    opaque = isinstance(dataset, Examples) or callable(getattr(dataset, "collate", None))
    called = _called(dataset)
    which = _spread(size, FEW)
    first = _together([_label(_read(dataset, n, name).y, name) for n in which.tolist()], name)
    listed = _listed(dataset, which, first)
    if listed is None and not opaque:
        read = first.dtype.kind == "U" or (count and not called and first.dtype.kind != "f")
        which = _spread(size, READ if read else max(FEW, SAMPLE // parts))
    labels: list[Array] = []
    signature: tuple[str, ...] | None = None
    dropped = ""
    weighted: set[bool] = set()
    for example in which.tolist():
        where = f"example {example} of {name}"
        x, y, unused, weight = _read(dataset, example, name)
        weighted.add(weight is not None)
        if weight is not None:
            _weight(weight, where)
        if not opaque:
            x, dropped = _input(x, where), dropped or unused
            here = _signature(x)
            if signature not in (None, here):
                raise InputError(
                    f"{where} is {', '.join(here)} and the first is {', '.join(signature or ())}; make "
                    "examples alike (pad sequences), or give the dataset a method `collate`."
                )
            signature = here
        labels.append(_label(y, where))
    if len(weighted) > 1:
        raise InputError(
            f"some examples in {name} have a {WEIGHT} and others have none; all or none must have one."
        )
    result = _together(labels, name)
    if listed is not None:
        result, which = listed, np.arange(size)
    shape = tuple(x.shape) if isinstance(x, Tensor) else ()
    every = len(which) == size
    return _Look(
        *(name, dataset, result, which, every, shape, signature, called, dropped, opaque),
        weighted=True in weighted,
    )


def _spread(size: int, most: int) -> Array:
    """Up to ``most`` examples, evenly over the dataset and the same ones every time."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(np.int64))


def _listed(dataset: Any, which: Array, labels: Array) -> Array | None:
    """The labels of all examples, where the dataset has them in memory and they are those that come out."""
    result = _attribute(dataset)
    if result is None or len(result) != len(dataset) or labels.ndim != 1:
        return None
    same = _kind(result) == _kind(labels) and bool((result[which] == labels).all())
    return result if same else None


def _attribute(dataset: Any) -> Array | None:
    if isinstance(dataset, Subset):
        below = _attribute(dataset.dataset)
        return None if below is None else below[np.asarray(dataset.indices, np.int64)]
    if isinstance(dataset, ConcatDataset):
        several = [_attribute(part) for part in dataset.datasets]
        known = [part for part in several if part is not None]
        alike = len({part.dtype.kind for part in known}) == 1 and len({part.shape[1:] for part in known}) == 1
        return np.concatenate(known) if len(known) == len(several) and alike else None
    if isinstance(dataset, list):
        return None
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list) and hasattr(dataset, "with_format"):  # Hugging Face
        label = [name for name in columns if name in LABELS]
        values: list[Any] = [dataset.with_format(None)[label[0]][:]] if len(label) == 1 else []
    else:
        tensors = getattr(dataset, "tensors", None)
        values = [getattr(dataset, name, None) for name in ("targets", "labels", "y")]
        values += [tensors[1]] if isinstance(tensors, tuple) and len(tensors) > 1 else []
    for value in values:
        result = _plain(value)
        if isinstance(result, (list, tuple)):
            try:
                result = np.asarray(result)
            except ValueError:
                continue
        if isinstance(result, np.ndarray) and result.ndim == 1 and result.dtype.kind in "biufU":
            return result
    return None


def _called(dataset: Any) -> tuple[str, ...]:
    """The names of the classes, as far as the dataset has them."""
    if isinstance(dataset, Subset):
        return _called(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        several = {_called(part) for part in dataset.datasets}
        return several.pop() if len(several) == 1 else ()
    features = getattr(dataset, "features", None)
    if isinstance(features, Mapping):  # Hugging Face
        names = [getattr(kind, "names", None) for name, kind in features.items() if name in LABELS]
        return tuple(map(str, names[0])) if len(names) == 1 and names[0] else ()
    classes = getattr(dataset, "classes", ())
    if isinstance(classes, int) and not isinstance(classes, bool) and classes > 1:
        return tuple(map(str, range(classes)))
    return tuple(map(str, classes)) if isinstance(classes, (list, tuple, np.ndarray)) else ()


def _kind(labels: Array) -> str:
    return {"U": "text", "f": "floating"}.get(labels.dtype.kind, "whole")


# One example


class _Parts(NamedTuple):
    """An example's input and label, in words what else it has, and its weight."""

    x: Any
    y: Any
    dropped: str = ""
    weight: Any = None


def _read(dataset: Any, example: int, name: str) -> _Parts:
    where = f"example {example} of {name}"
    try:
        item = dataset[example]
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{where} cannot be read: {type(error).__name__}: {error}") from error
    return _apart(item, where)


def _apart(item: Any, where: str) -> _Parts:
    if isinstance(item, Mapping):
        return _from_mapping(item, where)
    if not isinstance(item, (tuple, list)) or len(item) < 2:
        got = f"{len(item)} part" if isinstance(item, (tuple, list)) else f"a {type(item).__name__}"
        raise InputError(f"{where} is {got}; an example must be a pair (x, y), or a dict with a label.")
    if len(item) > 2 and np.ndim(_plain(item[1])) and not np.ndim(_plain(item[-1])):
        raise InputError(
            f"{where} has {len(item)} parts, of which the second has shape {np.shape(_plain(item[1]))}; "
            "of (x, y, …) the second is the label. Several inputs go into one: ((a, b), y)."
        )
    return _Parts(item[0], item[1], BEYOND if len(item) > 2 else "")


def _from_mapping(item: Mapping[Any, Any], where: str) -> _Parts:
    label = [key for key in item if key in LABELS]
    if len(label) != 1:
        what = "several of" if label else "none of"
        raise InputError(
            f"{where} is a dict with {', '.join(map(repr, item))}: {what} {', '.join(LABELS)}; the label "
            "must be under one of them, and the rest is the input."
        )
    rest = {key: value for key, value in item.items() if key not in (label[0], WEIGHT)}
    used = {key: value for key, value in rest.items() if value is not None and not isinstance(value, str)}
    if not used:
        some = next((f"; {key!r} is text: tokenize it (or from_hf)" for key in rest), "")
        raise InputError(f"{where} has no input besides its label {label[0]!r}{some}.")
    unused = [repr(key) for key in rest if key not in used]
    dropped = f"{', '.join(unused)} of the examples (no numbers)" if unused else ""
    x = next(iter(used.values())) if len(used) == 1 else used
    return _Parts(x, item[label[0]], dropped, item.get(WEIGHT))


def _plain(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def _label(label: Any, where: str) -> Array:
    """One label as an array of booleans, numbers or text; of one element, without dimensions."""
    value = _plain(label)
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    try:
        result = np.asarray(value)
    except ValueError:
        result = np.asarray(None)
    if result.dtype.kind == "O" and isinstance(
        result.item() if result.size == 1 else None, (str, int, float)
    ):
        result = np.asarray(result.item())
    if result.dtype.kind not in "biufU":
        raise InputError(f"{where} has the label {label!r}; it must be a number or a string.")
    if result.dtype.kind == "f" and not np.isfinite(result).all():
        raise InputError(f"{where} has a label that is not finite; fix or remove it.")
    whole = result.dtype.kind != "f" and result.size == 1
    return result.reshape(()) if whole else result


def _together(labels: Sequence[Array], name: str) -> Array:
    result = {_kind(label) for label in labels}
    if "text" in result and len(result) > 1:
        raise InputError(
            f"some labels in {name} are text and others are numbers; they must have the same type."
        )
    if len(shapes := {label.shape for label in labels}) > 1:
        raise InputError(f"labels in {name} have different shapes: {', '.join(map(str, sorted(shapes)))}.")
    return np.stack(list(labels))


def _input(x: Any, where: str) -> Any:
    """What the model takes: numbers as tensors, in the nest that they are in."""
    if isinstance(x, (np.ndarray, np.generic)):
        if x.dtype.kind not in "biuf":
            raise InputError(f"{where} has an input of {x.dtype}; it must be numbers.")
        return _as_tensor(x)
    if isinstance(x, (int, float)):
        return torch.tensor(x)
    if isinstance(x, str):
        raise InputError(f"{where} has text as its input; tokenize it, or use from_hf(…, tokenizer=…).")
    if hasattr(x, "convert") and hasattr(x, "getbands"):
        raise InputError(
            f"{where} has a Pillow image as its input; convert it to a tensor in the dataset, such as with "
            "torchvision.transforms.ToTensor()."
        )
    if isinstance(x, Mapping):
        used = {key: value for key, value in x.items() if value is not None and not isinstance(value, str)}
        return {key: _input(value, where) for key, value in used.items()}
    if isinstance(x, list) and _numbers(x):
        return _as_tensor(np.asarray(x))
    return map_nest(lambda part: _input(part, where), x) if isinstance(x, (list, tuple)) else x


def _numbers(values: list[Any]) -> bool:
    """Whether a list is an array that was written as one, such as Hugging Face's datasets give."""
    if any(isinstance(v, Tensor) for v in values):
        return False
    try:
        return np.asarray(values).dtype.kind in "biuf"
    except ValueError:
        return False


def _signature(x: Any, key: str = "") -> tuple[str, ...]:
    """Shapes and types in words: what must be the same for examples to be put together."""
    if isinstance(x, Tensor):
        return (f"{key}{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}",)
    if isinstance(x, Mapping):
        return sum((_signature(value, f"{name}: ") for name, value in x.items()), ())
    if isinstance(x, (list, tuple)):
        return sum((_signature(part, key) for part in x), ())
    return (f"{key}{type(x).__name__}",)
