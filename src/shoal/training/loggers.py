"""Where the lines of a training's log go: metrics.jsonl, TensorBoard and Weights & Biases.

A line is a mapping with a ``step``, a ``phase`` (the stage, see :class:`~shoal.training.callbacks.State`) and
numbers, some of them in mappings of their own, such as one loss per domain.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import InputError
from shoal.files import finite

CURVES = 50
"""Most domains of which TensorBoard and Weights & Biases draw a curve each."""


class Logger(ABC):
    """Writes lines of the log somewhere; the first problem is a warning, and none ends the training."""

    _failed = False

    @abstractmethod
    def write(self, line: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def log(self, line: Mapping[str, Any]) -> None:
        """Write one line, if that is possible."""
        try:
            self.write(line)
        except Exception as error:  # of a disk, a network or a foreign package
            if not self._failed:
                warnings.warn(f"{type(self).__name__}: a line was not written ({error}).", stacklevel=2)
            self._failed = True


class Metrics(Logger):
    """metrics.jsonl: one JSON object per line; lines after ``length`` bytes, of an earlier process, are cut.

    Numbers that JSON does not have (NaN and the infinities) are null.
    """

    def __init__(self, path: Path, length: int = 0) -> None:
        self._file = open(path, "ab")  # noqa: SIM115 (open until close)
        self._file.truncate(min(length, self._file.tell()))

    def write(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(finite(line), default=lambda value: finite(value.tolist()))
        self._file.write(text.encode() + b"\n")
        self._file.flush()  # what a full disk refuses stays in the buffer, and is tried again

    def flush(self) -> int:
        """Put every line on the disk for good; the file's length in bytes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            warnings.warn(f"the last lines of {self._file.name} are lost: {error.strerror}.", stacklevel=2)


class TensorBoard(Logger):
    """Scalars for TensorBoard, in ``folder``; those after ``step`` of an earlier process are hidden."""

    def __init__(self, folder: Path, step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(folder, purge_step=step + 1 if step else None, flush_secs=10)

    def write(self, line: Mapping[str, Any]) -> None:
        step = int(line.get("step", 0))
        for name, value in scalars({k: v for k, v in line.items() if k != "step"}).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if not self._failed:
            self._writer.close()


class WeightsAndBiases(Logger):
    """Sends lines to Weights & Biases, where a folder is one run, however often it is resumed.

    W&B counts lines; the step of a line is logged as a value.
    """

    def __init__(self, project: str, config: Mapping[str, Any], folder: Path) -> None:
        identity = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
        same = {"id": identity, "resume": "allow", "dir": str(folder)}
        try:
            wandb = importlib.import_module("wandb")
            self.run: Any = wandb.init(project=project, name=folder.name, config=dict(config), **same)
        except Exception as error:
            raise InputError(
                f"Weights & Biases did not start: {error}\nInstall it (pip install 'shoal[wandb]') and log "
                "in (wandb login), or set WANDB_MODE=offline to send the run later."
            ) from error

    def write(self, line: Mapping[str, Any]) -> None:
        self.run.log(scalars(line))

    def close(self) -> None:
        self.run.finish()


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
