"""Predictions as files, in the format and under the names that WILDS' leaderboard takes, and their scores.

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
from shoal.datasets.wilds import SPLITS
from shoal.errors import InputError, check_names, shown
from shoal.files import write_atomically
from shoal.training.evaluate import Scores, scored
from shoal.training.metrics import NONE, Metric, Outcome, default_metric, metric

if TYPE_CHECKING:
    from shoal.training.setup import Setup

Array = NDArray[Any]
THEIRS = {ours: theirs for theirs, ours in SPLITS.items()}
NAME = re.compile(
    r"(?P<dataset>.+?)_split[:-](?P<split>.+?)_(?P<kind>seed|fold)[:-](?P<which>[^_]+)_epoch[:-].+_pred\.csv"
)


class Named(NamedTuple):
    """What the name of a file says; ``split`` is as we call it, ``kind`` is ``seed`` or ``fold``."""

    dataset: str
    split: str
    kind: str
    which: str


def file_name(named: Named) -> str:
    dataset, split, kind, which = named
    return f"{dataset}_split:{THEIRS.get(split, split)}_{kind}:{which}_epoch:best_pred.csv"


def parse_name(name: str) -> Named | None:
    """What such a name says, also with - for :; ``None`` for any other name."""
    found = NAME.fullmatch(name)
    return found and Named(found[1], SPLITS.get(found[2], found[2]), found[3], found[4])


def write(setup: Setup, folder: Path, dataset: str, replicate: tuple[str, str]) -> list[Path]:
    """Write the predictions of a model as it is to ``folder``; ``replicate`` is such as (seed, 0)."""
    trained = ("train", "validation") if setup.options["retrain"] else ("train",)
    splits = [split for split in setup.splits if split not in trained]
    found = setup.evaluator_of(splits, None).predict(setup.model) if splits else {}
    if not setup.processes.main:
        return []
    paths = []
    for split, values in found.items():
        rows = values.reshape(len(values), -1)  # numbers in as few digits as give the same number again
        text = "".join(",".join(map(str, row)) + "\n" for row in rows)
        path = folder / file_name(Named(dataset, split, *replicate))
        try:
            write_atomically(path, text.encode())
        except OSError as error:
            raise InputError(f"{str(path)!r} could not be written ({error.strerror}).") from error
        paths.append(path)
    return paths


def read(path: Path, classes: int | None) -> Array:
    """Read the predictions of a file: classes, or numbers if ``classes`` is ``None``."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise InputError(f"{str(path)!r} cannot be read: {why}.") from error
    right = "a finite number" if classes is None else f"a class, a whole number from 0 to {classes - 1}"
    values = []
    for number, text in enumerate(map(str.strip, lines), 1):
        if not text:
            continue
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        valid = math.isfinite(value) if classes is None else value in range(classes)
        if not valid:
            raise InputError(f"{str(path)!r}, line {number}: {shown(text)} is not {right}.")
        values.append(value)
    return np.array(values, np.float64 if classes is None else np.int64)


def labels_of(examples: Any, which: Array) -> Array:
    """The labels of these examples, without reading the examples where the dataset knows their labels."""
    known = known_labels(examples)
    if known is not None and (known.dtype.kind == "f" or bool((known[which] >= 0).all())):
        return known[which]
    found = (examples[int(i)][1] for i in which)
    return np.stack([np.asarray(y.detach().cpu() if isinstance(y, Tensor) else y) for y in found])


def split_of(data: DomainData, split: str) -> tuple[str, Domains]:
    """A split by our name or that of WILDS."""
    ours = split if split in data.splits else SPLITS.get(split, split)
    check_names("split of this dataset:", [ours], data.splits)
    return ours, data.splits[ours]


def evaluate(data: DomainData, split: str, predicted: Array) -> tuple[Scores, Mapping[str, Array]]:
    """Scores of predictions for the examples of a split in order of index, and further scores by group.

    The metrics are those of the dataset, without the ones that need a score for each class or the loss.
    """
    _, domains = split_of(data, split)
    which, classification = domains.examples(), data.classes is not None
    if len(predicted) != len(which):
        raise InputError(
            f"there are {len(predicted):,} predictions for {len(which):,} examples of split {split!r}; "
            "there must be one line for each."
        )
    y = labels_of(data.examples, which)
    predicted = np.asarray(predicted).reshape(y.shape)
    points = (predicted == y).astype(np.float64) if classification else np.square(predicted - y)
    outcome = Outcome(
        y=y,
        groups=Domains(domains.names, domains.offsets, np.searchsorted(which, domains.indices)),
        points=points.reshape(len(points), -1).mean(1),
        predicted=predicted if classification else NONE,
        output=NONE if classification else predicted,
        uncounted=data.uncounted,
    )
    default = default_metric(data.task.kind)
    needs = ("points", "class" if classification else "output")
    every = [m for m in map(metric, data.measures) if m.needs in needs] or [metric(default)]
    return scored(outcome, data.task.kind, every, every[0]), _by_group(every, outcome, default)


def _by_group(every: list[Metric], outcome: Outcome, default: str) -> dict[str, Array]:
    """What metrics of groups other than the default metric are in each group."""
    found = {m.name.split(" ", 1)[1]: m.by_group for m in every if m.by_group is not None}
    return {name: by_group(outcome) for name, by_group in found.items() if name != default}
