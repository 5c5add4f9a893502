"""Predictions as files, in the form and under the names that WILDS' leaderboard takes, and their scores.

A file has one line for each example of a split, in the order of the examples' indices: its class, or in
regression its number. ``fmow_split:id_val_seed:0_epoch:best_pred.csv`` says which split of what it is; a
dataset that is repeated over folds, not seeds, has ``fold:A`` there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.batch import DomainData, known_labels
from shoal.data.domains import Domains
from shoal.data.wilds import SPLITS
from shoal.errors import InputError, check_names
from shoal.files import write_atomically
from shoal.training.evaluate import Scores, scored
from shoal.training.metrics import NONE, Metric, Outcome, metric

if TYPE_CHECKING:
    from shoal.training.setup import Setup

Array = NDArray[Any]
THEIRS = {ours: theirs for theirs, ours in SPLITS.items()}
NAME = re.compile(
    r"(?P<dataset>.+?)_split[:-](?P<split>.+?)_(?P<kind>seed|fold)[:-](?P<which>[^_]+)_epoch[:-].+_pred\.csv"
)


class Named(NamedTuple):
    """What a file's name says; ``split`` is as we call it, ``kind`` is ``seed`` or ``fold``."""

    dataset: str
    split: str
    kind: str
    which: str


def file_name(named: Named) -> str:
    dataset, split, kind, which = named
    return f"{dataset}_split:{THEIRS.get(split, split)}_{kind}:{which}_epoch:best_pred.csv"


def parse_name(name: str) -> Named | None:
    """What such a name says, with - for : too; ``None`` for any other name."""
    found = NAME.fullmatch(name)
    if found is None:
        return None
    return Named(found["dataset"], SPLITS.get(found["split"], found["split"]), found["kind"], found["which"])


def write(training: Setup, folder: Path, dataset: str, replicate: tuple[str, str]) -> list[Path]:
    """The predictions of a training's model as it is, into ``folder``; ``replicate`` is such as (seed, 0)."""
    trained = ("train", "validation") if training.options["retrain"] else ("train",)
    splits = [split for split in training.splits if split not in trained]
    if not splits:
        return []
    found = training.evaluator_of(splits, None).predict(training.model)
    if not training.processes.main:
        return []
    return [
        _written(folder, file_name(Named(dataset, split, *replicate)), as_text(values).encode())
        for split, values in found.items()
    ]


def as_text(values: Array) -> str:
    """One example a line: whole numbers, or reals in as few digits as give the same number again."""
    rows = values.reshape(len(values), -1)
    return "".join(",".join(map(str, row)) + "\n" for row in rows)


def _written(folder: Path, name: str, content: bytes) -> Path:
    for path in (folder / name, folder / name.replace(":", "-")):  # some systems have no colons in names
        try:
            write_atomically(path, content)
        except OSError as error:
            failed = error
        else:
            return path
    raise InputError(f"the predictions could not be written to {folder} ({failed.strerror}).") from failed


def read(path: Path, classes: int | None) -> Array:
    """A file's predictions: classes, or reals where ``classes`` is ``None``. Empty lines do not count."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise InputError(f"{str(path)!r} cannot be read: {why}.") from error
    right = "a finite number" if classes is None else f"a class, a whole number from 0 to {classes - 1}"
    values = []
    for number, text in enumerate(map(str.strip, lines), 1):
        value = float(text) if re.fullmatch(r"[+-]?[0-9.]+([eE][+-]?[0-9]+)?", text) else None
        whole = value is not None and 0 <= value < (classes or math.inf) and value == int(value)
        if whole or (classes is None and value is not None and math.isfinite(value)):
            values.append(value)
        elif text:
            shown = text if len(text) <= 40 else f"{text[:39]}…"
            raise InputError(f"{str(path)!r}, line {number}: {shown!r} is not {right}.")
    return np.array(values, np.float64 if classes is None else np.int64)


def labels_of(examples: Any, which: Array) -> Array:
    """The labels of these examples; nothing else of them is read where the examples know them by heart."""
    known = known_labels(examples)
    if known is not None and (known.dtype.kind == "f" or bool((known[which] >= 0).all())):
        return known[which]
    found = (examples[int(i)][1] for i in which)
    return np.stack([np.asarray(y.detach().cpu() if isinstance(y, Tensor) else y) for y in found])


def split_of(data: DomainData, split: str) -> tuple[str, Domains]:
    """A split by our name or WILDS'."""
    ours = split if split in data.splits else SPLITS.get(split, split)
    check_names("split of this dataset:", [ours], data.splits)
    return ours, data.splits[ours]


def measured(data: DomainData) -> list[Metric]:
    """What predictions alone can be judged by: not what needs a score for each class, nor the loss."""
    usual = metric("accuracy" if data.classes is not None else "mse")
    every = [metric(name) for name in data.measures]
    needs = ("points", "class") if data.classes is not None else ("points", "output")
    return [m for m in every if m.needs in needs] or [usual]


def evaluate(data: DomainData, split: str, predicted: Array) -> tuple[Scores, Mapping[str, Array]]:
    """Scores of predictions for a split's examples in order of index, and other measures by group."""
    _, domains = split_of(data, split)
    which = domains.examples()
    if len(predicted) != len(which):
        raise InputError(
            f"there are {len(predicted):,} predictions for {len(which):,} examples of split {split!r}; "
            "there must be one line for each."
        )
    y = labels_of(data.examples, which)
    predicted = np.asarray(predicted).reshape(y.shape)
    classification = data.classes is not None
    points = (predicted == y).astype(np.float64) if classification else np.square(predicted - y)
    outcome = Outcome(
        y=y,
        groups=Domains(domains.names, domains.offsets, np.searchsorted(which, domains.indices)),
        points=points if points.ndim == 1 else points.reshape(len(points), -1).mean(1),
        predicted=predicted if classification else NONE,
        output=NONE if classification else predicted,
        uncounted=data.uncounted,
    )
    every = measured(data)
    usual = "accuracy" if classification else "mse"
    others = {m.of_groups: m.by_group(outcome) for m in every if m.by_group and m.of_groups != usual}
    return scored(outcome, data.task.kind, every, every[0] if every else None), others
