"""The log of a training: metrics.jsonl, TensorBoard and Weights & Biases.

A line is a mapping with a ``step``, a ``phase`` (the stage, see :class:`~shoal.training.callbacks.State`) and
numbers, some of them in mappings of their own, such as one loss per domain.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import math
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.errors import InputError
from shoal.files import finite

CURVES = 50
"""Most domains of which TensorBoard and Weights & Biases draw a curve each."""


class Log:
    """metrics.jsonl with one JSON object per line, and TensorBoard and a run of W&B where there are these.

    Lines after ``length`` bytes and ``step`` are of an earlier process, and cut. In metrics.jsonl numbers
    that JSON does not have (NaN and the infinities) are null. The first problem is a warning, and none ends
    the training.
    """

    def __init__(self, folder: Path, length: int = 0, step: int = 0, wandb: Any = None) -> None:
        self._file = open(folder / "metrics.jsonl", "ab")  # noqa: SIM115 (open until close)
        self._file.truncate(min(length, self._file.tell()))
        self._board: Any = None
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            purge = step + 1 if step else None
            self._board = SummaryWriter(folder / "tensorboard", purge_step=purge, flush_secs=10)
        self._wandb, self._failed = wandb, set[str]()

    def write(self, line: Mapping[str, Any]) -> None:
        for each in (self._to_file, self._to_board, self._to_wandb):
            try:
                each(line)
            except Exception as error:  # of a disk, a network or a foreign package
                if each.__name__ not in self._failed:
                    warnings.warn(f"a line of the log was not written ({error}).", stacklevel=3)
                self._failed.add(each.__name__)

    def _to_file(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(finite(line), default=lambda value: finite(value.tolist()))
        self._file.write(text.encode() + b"\n")
        self._file.flush()  # what a full disk refuses stays in the buffer, and is tried again

    def _to_board(self, line: Mapping[str, Any]) -> None:
        if self._board is not None:
            for name, value in scalars({k: v for k, v in line.items() if k != "step"}).items():
                self._board.add_scalar(name, value, int(line.get("step", 0)))

    def _to_wandb(self, line: Mapping[str, Any]) -> None:
        if self._wandb is not None:
            self._wandb.log(scalars(line))  # W&B counts lines; the step is logged as a value

    def flush(self) -> int:
        """Put every line on the disk for good; the file's length in bytes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        with suppress(OSError):  # a full disk, of which there was a warning
            self._file.close()
        if self._board is not None and "_to_board" not in self._failed:
            self._board.close()


def start_wandb(project: str, config: Mapping[str, Any], folder: Path) -> Any:
    """The run of Weights & Biases that a folder is, however often it is resumed."""
    identity = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    same = {"id": identity, "resume": "allow", "dir": str(folder)}
    try:
        wandb = importlib.import_module("wandb")
        return wandb.init(project=project, name=folder.name, config=dict(config), **same)
    except Exception as error:
        raise InputError(
            f"Weights & Biases did not start: {error}\nInstall it (pip install 'shoal[wandb]') and log in "
            "(wandb login), or set WANDB_MODE=offline to send the run later."
        ) from error


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line by names such as "losses/oslo"; no domains if more than :data:`CURVES`."""
    stage, found = line.get("phase", "train"), dict[str, float]()

    def add(prefix: str, nest: Mapping[str, Any]) -> None:
        for name, value in nest.items():
            if isinstance(value, Mapping):
                if name not in ("losses", "domains") or len(value) <= CURVES:
                    add(f"{prefix}{name}/", value)
            elif value is None or isinstance(value, (int, float)):
                found[f"{prefix}{name}"] = math.nan if value is None else value

    add("" if stage == "train" else f"{stage}/", line)
    return found
