"""Predictions as files, in the format and under the names that WILDS' leaderboard takes.

A file has one line for each example of a split, in the order of the examples' indices: its class, or in
regression its number. ``fmow_split:id_val_seed:0_epoch:best_pred.csv`` says which split of what it is; a
dataset that is repeated over folds, not seeds, has ``fold:A`` there.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.datasets.wilds import SPLITS
from shoal.errors import InputError
from shoal.files import write_atomically

if TYPE_CHECKING:
    from shoal.training.setup import Setup

THEIRS = {ours: theirs for theirs, ours in SPLITS.items()}


def write(setup: Setup, folder: Path, dataset: str, replicate: tuple[str, str]) -> None:
    """Write the predictions of a model as it is to ``folder``; ``replicate`` is such as (seed, 0)."""
    trained = ("train", "validation") if setup.options["retrain"] else ("train",)
    splits = [split for split in setup.evaluator.splits if split not in trained]
    found = setup.evaluator_of(splits, {}).outcomes(setup.model) if splits else {}
    if not setup.processes.main:
        return
    for split, outcome in found.items():
        values = outcome.predicted.reshape(len(outcome.predicted), -1)
        # Numbers in as few digits as give the same number again.
        text = "".join(",".join(map(str, row)) + "\n" for row in values)
        name = f"{dataset}_split:{THEIRS.get(split, split)}_{':'.join(replicate)}_epoch:best_pred.csv"
        try:
            write_atomically(folder / name, text.encode())
        except OSError as error:
            raise InputError(f"{str(folder / name)!r} could not be written ({error.strerror}).") from error
