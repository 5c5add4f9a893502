"""Data of your own as :class:`~shoal.data.DomainData`: a table, arrays, a Dataset of torch or Hugging Face.

Each function splits by domain: those named in ``test`` are left out, and a share of every other domain is
held out for validation. Whatever is fitted (means, categories, words) is fitted to training examples alone.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from shoal.data.batch import DomainData, TensorData
from shoal.data.domains import Domains
from shoal.data.examples import understand, warn_of
from shoal.data.splits import hold_out, leave_out
from shoal.data.table import (
    Columns,
    Preprocessing,
    as_columns,
    check_finite,
    need_column,
    number_text,
    numbers,
    texts,
)
from shoal.errors import InputError, check_names, unknown_name

SHARE = 0.2
TASKS = ("classification", "regression")
MANY_NUMBERS, MANY_TEXTS = 20, 50
"""A label with more different numbers is a quantity if some are not whole; of more whole numbers or texts it
must be said what they are."""
EXACT = 2**53
"""Up to here every whole number is a float64 of its own."""
MODELS = {1: "tabular", 3: "small-cnn"}
"""The default model by the number of an input's dimensions."""

Names = str | float | Iterable[str | float] | None
"""Of domains; numbers as they are in the column."""


def from_table(
    table: Any,
    *,
    label: str,
    domain: str,
    test: Names = None,
    columns: Iterable[str] | None = None,
    drop: Iterable[str] = (),
    kinds: Mapping[str, str] | None = None,
    task: str | None = None,
    validation: float = SHARE,
    seed: int = 0,
) -> DomainData:
    """A CSV or Parquet file, a DataFrame or a mapping of columns, with a column that tells the domain. ::

        data = shoal.data.from_table("patients.csv", label="ill", domain="hospital", test="oslo")
        model = shoal.models.build(data.model, input_shape=data.input_shape, classes=data.classes, seed=0)
        run = shoal.fit("fish", model, data, steps=300)

    Args:
        label: the column to predict. Classes may be numbers or texts; numbers of which some are not whole
            and that take more than 20 values are a quantity.
        domain: the column that says where a row is from; it is no feature.
        test: the domains left out; without any, all are trained on.
        columns: the features; by default every column but ``label``, ``domain`` and those in ``drop``.
        kinds: ``numeric``, ``categorical`` or ``text`` for columns where the guess is wrong.
        task: ``classification`` or ``regression``, by default as the label looks.
        validation: the share of every training domain that is held out.
        seed: for the choice of these examples.

    Numbers are standardised, categories become columns of 0 and 1, texts weighted bags of words (see
    :class:`~shoal.data.table.Preprocessing`). In regression the label is standardised too, by the training
    examples, and errors are in these units.
    """
    content = as_columns(table)
    need_column(label, content, "label")
    need_column(domain, content, "domain")
    if label == domain:
        raise InputError(f"column {label!r} cannot be both the label and the domain.")
    used = _features(content, label, domain, columns, _listed(drop))
    for name in used:
        if (values := numbers(used[name])) is not None:
            check_finite(values, name)
    target = Labels.read(content[label], label, task)
    _check_copy(used, content[label], label)
    splits = split(domains_of(content[domain], domain), test, validation, seed)
    train = splits["train"].examples()
    about = {"name": label, "domain": domain, "task": target.task, **target.scaling(train)}
    how = Preprocessing.fit(used, train, kinds, about)
    x = how.transform(used)
    y = target.numbers(about)
    _warn_of_columns(how)
    notes = _notes(splits, target, how)
    if target.said:
        notes["label"] = target.said
    return DomainData(
        examples=TableRows(torch.from_numpy(x), torch.from_numpy(y), train),
        splits=splits,
        classes=target.classes,
        input_shape=(how.width,),
        model=MODELS[1],
        notes=notes,
        measures=("accuracy", "AUC") if target.classes == 2 else (),
        class_names=target.names,
        inputs=how.to_dict(),
    )


def from_arrays(
    x: Any,
    y: Any,
    domains: Any,
    *,
    test: Names = None,
    task: str | None = None,
    validation: float = SHARE,
    seed: int = 0,
) -> DomainData:
    """Examples in memory, as NumPy arrays or tensors: ``x`` (n, …) of numbers, a label and a domain for each.

    ``x`` is taken as it is, as float32: scale it by training examples, or let :func:`from_table` do so.
    Labels may be texts or any numbers, and are numbered in sorted order (``class_names`` keeps what they
    were); numbers of which some are not whole and that take more than 20 values are a quantity, and stay.
    """
    inputs = _tensor(x)
    column = as_columns({"y": y})["y"]
    names = _domain_names(domains)
    if not len(inputs) == len(column) == len(names):
        raise InputError(
            f"x has {len(inputs)} examples, y {len(column)} and domains {len(names)}; give one for each."
        )
    if not bool((finite := inputs.isfinite().flatten(1).all(1)).all()):
        row = int((~finite).nonzero()[0])
        raise InputError(f"x has a number in example {row} that is not finite; repair or leave it out.")
    target = Labels.read(column, "y", task)
    splits = split(Domains.from_labels(names), test, validation, seed)
    values = target.numbers({})
    return DomainData(
        examples=TensorData(inputs, torch.from_numpy(values)),
        splits=splits,
        classes=target.classes,
        input_shape=tuple(inputs.shape[1:]),
        model=MODELS.get(inputs.ndim - 1, ""),
        notes=_notes(splits, target),
        measures=("accuracy", "AUC") if target.classes == 2 else (),
        class_names=target.names,
    )


def from_dataset(
    dataset: Dataset[Any],
    domains: Any,
    *,
    test: Names = None,
    task: str | None = None,
    classes: int | Sequence[str] | None = None,
    validation: float = SHARE,
    seed: int = 0,
) -> DomainData:
    """Any torch Dataset, or list, of examples, with a domain for each example in ``domains``.

    An example is a pair (x, y) (what follows in a tuple is not used) or a dict with the label under
    ``label``, ``labels``, ``y``, ``target`` or ``targets`` and the input in the rest. NumPy arrays become
    tensors.

    Args:
        test: the domains held out; without any, all are trained on.
        task: ``classification`` or ``regression``. By default whole numbers, booleans and text are classes
            and floating numbers are regression; floating numbers that could be either are refused.
        classes: how many there are, or their names in order. By default what the dataset says (its
            ``classes``, ``targets``, ``labels``, ``y`` or ``tensors``), else up to 4,096 examples are read.
            Text labels are numbered in sorted order and kept in ``class_names``.
        validation: the share of every training domain that is held out.
        seed: for the choice of these examples.
    """
    names = _domain_names(domains)
    found = understand({"": dataset}, task=task, classes=classes, count=True)
    if len(found.domains.indices) != len(names):
        raise InputError(
            f"the dataset has {len(found.domains.indices)} examples and domains {len(names)}; "
            "give one for each."
        )
    warn_of(found.notes)
    return DomainData(
        examples=found.examples,
        splits=split(Domains.from_labels(names), test, validation, seed),
        classes=found.classes,
        input_shape=found.input_shape,
        model=MODELS.get(len(found.input_shape), ""),
        notes=found.notes,
        class_names=found.class_names,
    )


def from_hf(
    dataset: Any,
    *,
    label: str,
    domain: str,
    test: Names = None,
    text: str | None = None,
    image: str | None = None,
    tokenizer: str | None = None,
    max_tokens: int = 128,
    size: int = 64,
    validation: float = SHARE,
    seed: int = 0,
    **options: Any,
) -> DomainData:
    """A ``datasets.Dataset`` of Hugging Face (one split of it): pictures, text for an encoder, or a table.

    Args:
        text: the column whose text goes through ``tokenizer`` (a model's name or folder, which is then the
            default model too), cut off after ``max_tokens``.
        image: the column with pictures, which become (3, ``size``, ``size``); a single column of the type
            Image is found without it.
        options: with neither, the dataset is a table, and these go to :func:`from_table`.
    """
    rows = _hf_rows(dataset)
    if text is not None and image is not None:
        raise InputError(f"text={text!r} and image={image!r}; an example is one or the other.")
    pictures = [name for name, kind in dataset.features.items() if type(kind).__name__ == "Image"]
    if text is None and image is None and len(pictures) == 1:
        image = pictures[0]
    common: dict[str, Any] = {"test": test, "validation": validation, "seed": seed}
    if text is None and image is None:
        table = {name: _hf_column(dataset, name) for name in rows}
        return from_table(table, label=label, domain=domain, **common, **options)
    if options:
        check_names("option of from_hf:", options, ("tokenizer", "max_tokens", "size"))
    for name, what in ((label, "label"), (domain, "domain"), (text or image or "", "input")):
        need_column(name, rows, what)
    named = as_columns({name: _hf_column(dataset, name) for name in dict.fromkeys((label, domain))})
    target = Labels.read(named[label], label, None)
    splits = split(domains_of(named[domain], domain), test, validation, seed)
    y = torch.from_numpy(target.numbers({}))
    data = DomainData(
        dataset, splits, target.classes, (), "", notes=_notes(splits, target), class_names=target.names
    )
    if text is not None:
        return _text_data(data, dataset, text, y, tokenizer, max_tokens)
    assert image is not None
    return _image_data(data, dataset, image, y, size)


# Labels


@dataclass(frozen=True)
class Labels:
    """What is to be predicted, row by row: numbers of classes called ``names``, or quantities."""

    values: NDArray[Any]
    names: tuple[str, ...]
    said: str = ""
    """What was guessed of it, in words."""

    @classmethod
    def read(cls, column: NDArray[Any], name: str, task: str | None) -> Labels:
        if task is not None:
            check_names("task", [task], TASKS)
        known = texts(column)
        if gone := [row for row, text in enumerate(known, 1) if text is None]:
            word = column[gone[0] - 1] if column.dtype == object else None
            which = f" ({word!r} means a missing one)" if word else ""
            raise InputError(f"label {name!r} is missing in {_rows(gone)}{which}; leave these rows out.")
        values = numbers(column)
        said = ""
        if task is None:
            task, said = _guess(known, values, name)
        if task == "classification":
            return cls._classes(known, values, name)
        if values is None:
            wrong = next(t for t in known if numbers(np.array([t], object)) is None)
            raise InputError(f"label {name!r} holds {wrong!r}; for regression it must be numbers.")
        check_finite(values, name)
        return cls(values, (), said)

    @classmethod
    def _classes(cls, known: NDArray[Any], values: NDArray[Any] | None, name: str) -> Labels:
        found = sorted(set(known), key=None if values is None else float)
        if len(found) < 2:
            raise InputError(f"label {name!r} is {found[0]!r} in every row; there must be two classes.")
        place = {text: number for number, text in enumerate(found)}
        return cls(np.array([place[text] for text in known], np.int64), tuple(found))

    @property
    def task(self) -> str:
        return "classification" if self.names else "regression"

    @property
    def classes(self) -> int | None:
        return len(self.names) or None

    def scaling(self, train: NDArray[Any]) -> dict[str, float]:
        """In regression the mean and deviation of training rows, else nothing."""
        if self.names:
            return {}
        some = self.values[train]
        scale = float(some.std())
        if not scale > 0 or not np.isfinite(scale):
            raise InputError(
                f"the label is {some[0]:g} in every training row, or too large to take squares of."
            )
        return {"mean": float(some.mean()), "scale": scale}

    def numbers(self, scaling: Mapping[str, Any]) -> NDArray[Any]:
        if self.names:
            return self.values
        shifted = self.values - scaling.get("mean", 0.0)
        scaled: NDArray[np.float32] = (shifted / scaling.get("scale", 1.0)).astype(np.float32)
        return scaled


def _guess(known: NDArray[Any], values: NDArray[Any] | None, name: str) -> tuple[str, str]:
    """Classes or a quantity, and what to say of that."""
    different = len(set(known))
    if values is not None and different > MANY_NUMBERS and not (np.floor(values) == values).all():
        said = f"label {name!r} has {different:,} different numbers, so it is a quantity: regression"
        return "regression", said
    many = different > MANY_TEXTS and different > len(known) // 2
    if different > MANY_NUMBERS if values is not None else many:
        raise InputError(
            f"label {name!r} has {different:,} different values in {len(known):,} rows: say whether they are "
            "classes or a quantity (--task classification or regression)."
        )
    return "classification", ""


def _rows(which: Sequence[int]) -> str:
    """Row numbers from 1 in words."""
    shown = ", ".join(map(str, which[:5]))
    more = f" and {len(which) - 5:,} more" if len(which) > 5 else ""
    return f"row{'s' * (len(which) > 1)} {shown}{more}"


# Domains and splits


def domains_of(column: NDArray[Any], name: str) -> Domains:
    """Rows by the value of a column; numbers in their order, texts in theirs.

    Words such as NA are names here: only an empty value is a missing one.
    """
    if column.dtype == object:
        known = [v or None for v in column]
    else:
        known = list(texts(column))
        if (wrong := (np.floor(column) != column) & ~np.isnan(column)).any():
            row = int(np.argmax(wrong)) + 1
            raise InputError(
                f"domain {name!r} is {column[row - 1]} in row {row}; use whole numbers or texts."
            )
        if (large := np.abs(column) > EXACT).any():
            row = int(np.argmax(large)) + 1
            raise InputError(
                f"domain {name!r}, row {row}: numbers of this size cannot be told apart; use texts."
            )
    if gone := [row for row, value in enumerate(known, 1) if value is None]:
        raise InputError(f"domain {name!r} is missing in {_rows(gone)}; every row needs one.")
    places: dict[str, list[int]] = {}
    for row, value in enumerate(known):
        places.setdefault(str(value), []).append(row)
    order = sorted(places, key=None if column.dtype == object else float)
    return Domains.from_indices({value: places[value] for value in order})


def split(domains: Domains, test: Names, share: float, seed: int) -> dict[str, Domains]:
    """``test`` left out, and a ``share`` of every other domain held out for validation under its name."""
    left_out = _listed(test)
    for name in left_out:
        if name not in domains.names:
            raise unknown_name("test domain", name, domains.names)
    if left_out and len(domains) < 2:
        raise InputError(
            f"there is only one domain, {domains.names[0]!r}; leaving it out leaves nothing to train on."
        )
    rest, away = leave_out(domains, left_out) if left_out else (domains, None)
    train, validation = hold_out(rest, share, seed)
    found = {"train": train, "validation": validation}
    return found if away is None else {**found, "test": away}


def _listed(names: Names) -> list[str]:
    if names is None:
        return []
    several = [names] if isinstance(names, (str, int, float, np.number)) else list(names)
    return [name if isinstance(name, str) else number_text(float(name)) for name in several]


def _notes(splits: Mapping[str, Domains], target: Labels, how: Preprocessing | None = None) -> dict[str, str]:
    """What a reader of the results must know."""
    notes = {}
    if how is not None:
        away = " and ".join(splits["test"].names) if "test" in splits else ""
        notes["examples"] = (
            f"columns are scaled by training examples{f', none of them of {away}' * bool(away)}"
        )
        if how.dropped:
            notes["columns"] = "; ".join(f"{name!r} {why}" for name, why in how.dropped.items())
        if not target.names:
            notes["units"] = "errors are in units of the deviation of the training labels"
    small = [n for n in splits["train"].names if n not in splits["validation"].names]
    if small:
        shown = ", ".join(map(repr, small[:5])) + (", …" if len(small) > 5 else "")
        notes["domains"] = f"too small to have validation examples: {shown}"
    if target.names and "test" in splits:
        seen = set(target.values[splits["train"].indices].tolist())
        unseen = sorted(set(target.values[splits["test"].indices].tolist()) - seen)
        if unseen:
            shown = ", ".join(repr(target.names[c]) for c in unseen[:5])
            notes["test"] = f"it has classes that no training example has: {shown}"
    return notes


# Columns of a table


class TableRows(TensorData):
    """Rows as numbers that were fitted to some of them; others may not be trained on and then be judged."""

    def __init__(self, x: Tensor, y: Tensor, fitted: NDArray[Any]) -> None:
        super().__init__(x, y)
        self.fitted = fitted

    def to(self, device: torch.device | str) -> TableRows:
        if self.device == torch.device(device):
            return self
        return TableRows(self.x.to(device), self.y.to(device), self.fitted)

    def marked(self, splits: Mapping[str, Domains]) -> TableRows:
        """Itself, in splits of which only ``train`` has rows that it was fitted to."""
        for name, domains in splits.items():
            if name != "train" and np.isin(domains.examples(), self.fitted).any():
                raise InputError(
                    f"split {name!r} would hold rows to which the table's columns are scaled; "
                    "`shoal compare FILE` leaves domains out of that too."
                )
        return self

    def unguarded(self) -> TensorData:
        """For a look at the data that judges no method."""
        return TensorData(self.x, self.y)


def _features(
    content: Columns, label: str, domain: str, columns: Iterable[str] | None, drop: Sequence[str]
) -> Columns:
    for name in drop:
        need_column(name, content, "list of those to drop")
    if columns is None:
        return content.without([label, domain, *drop])
    chosen = _listed(columns)
    for name in chosen:
        need_column(name, content, "features")
        if name in (label, domain):
            what = "label" if name == label else "domain"
            raise InputError(f"column {name!r} is the {what}; it cannot be a feature too.")
    return Columns({name: content[name] for name in dict.fromkeys(chosen) if name not in drop})


def _check_copy(used: Columns, target: NDArray[Any], label: str) -> None:
    """A feature that repeats the label tells nothing about a new row."""
    for name, values in used.items():
        if values.dtype == target.dtype and (values[:100] == target[:100]).all() and (values == target).all():
            raise InputError(f"column {name!r} is a copy of the label {label!r}; drop it.")


def _warn_of_columns(how: Preprocessing) -> None:
    """Says once, not in every worker process, what was taken for an identifier."""
    named = [f"{name!r} {why}" for name, why in how.dropped.items() if "identifier" in why]
    if named and multiprocessing.parent_process() is None:
        warnings.warn(f"not used: {'; '.join(named)}. To keep it, say its kind.", stacklevel=3)


# Arrays and datasets


def _tensor(x: Any) -> Tensor:
    if not isinstance(x, Tensor):
        array = np.asarray(x)
        if array.dtype.kind not in "biuf":
            raise InputError(f"x holds {array.dtype}; it must be numbers. Columns of a table: from_table.")
        x = torch.from_numpy(np.ascontiguousarray(array, np.float32))
    inputs: Tensor = x
    if inputs.ndim < 2 or not len(inputs):
        raise InputError(f"x has shape {tuple(inputs.shape)}; it must be (examples, features) or more.")
    return inputs.detach().float()


def _domain_names(domains: Any) -> Any:
    listed = domains if hasattr(domains, "__len__") else list(domains)
    return np.asarray(listed, object) if isinstance(listed, (list, tuple)) else listed


# Hugging Face


def _hf_rows(dataset: Any) -> list[str]:
    """The names of the columns of a dataset; a dictionary of splits is refused."""
    if isinstance(dataset, Mapping):
        raise InputError(f"this has the splits {', '.join(map(str, dataset))}; give one: dataset['train'].")
    if not (hasattr(dataset, "features") and hasattr(dataset, "column_names")):
        raise InputError(
            f"a Dataset of Hugging Face's datasets is needed (pip install 'shoal[hf]'), got "
            f"{type(dataset).__name__}. Other data: from_table, from_arrays, from_dataset."
        )
    if not hasattr(dataset, "__len__"):
        raise InputError("a dataset that streams cannot be split by domain; load it without streaming.")
    return list(dataset.column_names)


def _hf_column(dataset: Any, name: str) -> list[Any]:
    """A column as plain values; numbers that stand for names become these."""
    values = dataset.with_format(None)[name][:]
    called = getattr(dataset.features[name], "names", None)
    return [None if v is None or v < 0 else called[v] for v in values] if called else list(values)


class Encoded(Dataset[Any]):
    """A column of a dataset, each row made into what a model takes when it is asked for."""

    def __init__(self, rows: Any, column: str, labels: Tensor) -> None:
        self.rows, self.column, self.labels = rows, column, labels

    def __len__(self) -> int:
        return len(self.labels)

    def raw(self, index: int) -> Any:
        value = self.rows[int(index)][self.column]
        if value is None:
            raise InputError(f"column {self.column!r} is empty in row {index + 1}; leave the row out.")
        return value

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        return self.encode(self.raw(index)), self.labels[index]

    def encode(self, value: Any) -> Any:
        raise NotImplementedError


class Pictures(Encoded):
    """PIL pictures as float32 (3, size, size), squashed to a square as image folders are."""

    def __init__(self, rows: Any, column: str, labels: Tensor, size: int) -> None:
        from shoal.data.images import DEVIATION, MEAN, factors, need_pillow

        need_pillow()
        if isinstance(size, bool) or not isinstance(size, int) or size < 8:
            raise InputError(f"size={size!r}; pictures need a whole number of at least 8 pixels.")
        super().__init__(rows, column, labels)
        self.size, (self.scale, self.shift) = size, factors(MEAN, DEVIATION)

    def encode(self, value: Any) -> Tensor:
        from shoal.data.images import _rgb, numbers, resize

        if not hasattr(value, "convert"):
            kind = type(value).__name__
            raise InputError(
                f"column {self.column!r} holds {kind}, not pictures; cast it to datasets.Image()."
            )
        picture = _rgb(value)
        return numbers(resize(picture, self.size, (0, 0, *picture.size)), self.scale, self.shift)


class Texts(Encoded):
    """Texts as token ids; a batch is padded to its longest."""

    def __init__(self, rows: Any, column: str, labels: Tensor, tokenizer: str, max_tokens: int) -> None:
        from shoal.data.text import load_tokenizer

        super().__init__(rows, column, labels)
        self.made, self.max_tokens = load_tokenizer(tokenizer), max_tokens

    def encode(self, value: Any) -> Tensor:
        ids = self.made(str(value), truncation=True, max_length=self.max_tokens)["input_ids"]
        return torch.tensor(ids or [self.filler])  # a model cannot attend to nothing

    @property
    def filler(self) -> int:
        return int(self.made.pad_token_id or 0)

    def collate(self, items: Sequence[tuple[Tensor, Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
        from shoal.data.text import MULTIPLE, padded

        x = padded([ids for ids, _ in items], self.max_tokens, MULTIPLE, self.filler)
        return x, torch.stack([y for _, y in items])


def _text_data(
    data: DomainData, rows: Any, column: str, y: Tensor, tokenizer: str | None, max_tokens: int
) -> DomainData:
    from shoal.data.text import DISTILBERT, described

    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 4:
        raise InputError(f"max_tokens={max_tokens!r}; it must be a whole number of at least 4.")
    name = str(tokenizer or DISTILBERT)
    return replace(
        data,
        examples=Texts(rows, column, y, name, max_tokens),
        input_shape=(max_tokens,),
        model=name,
        inputs=described(name, max_tokens, column=column),
    )


def _image_data(data: DomainData, rows: Any, column: str, y: Tensor, size: int) -> DomainData:
    from shoal.data.images import described

    return replace(
        data,
        examples=Pictures(rows, column, y, size),
        input_shape=(3, size, size),
        model=MODELS[3],
        inputs=described(size),
    )
