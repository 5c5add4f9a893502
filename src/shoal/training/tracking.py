"""What a training writes down as it goes: metrics.jsonl, TensorBoard and Weights & Biases.

A line is a mapping with a ``step``, a ``phase`` (see :class:`State`) and numbers, some of them in
mappings of their own, such as one loss a domain.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import math
import os
import time
import warnings
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import InputError
from shoal.files import parse_json, read_bytes, write_atomically
from shoal.training.callbacks import Callback, State

MOST = 50
PHASES = ("warm start", "train", "retrain warm start", "retrain")
"""Of a run, in their order."""
"""Trackers draw a curve for each domain up to so many domains."""


class Writer(Callback):
    """Writes lines of the log somewhere."""

    def write(self, line: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def on_log(self, state: State) -> None:
        self.write(state.line)

    def on_end(self, state: State) -> None:
        if state.last and state.folder is None:  # those of a run's folder are closed with it
            self.close()


class Metrics(Writer):
    """metrics.jsonl: one JSON object a line, append only; cut back to where a checkpoint was on resuming.

    ``length`` is what :meth:`flush` returned when that checkpoint was written, and ``known`` what it knows of
    the lines before: where some were lost or damaged, the log is made of those that are left and these, with
    a warning. Numbers that JSON does not have (NaN and the infinities) are null.
    """

    def __init__(self, path: Path, length: int = 0, known: Sequence[Mapping[str, Any]] = ()) -> None:
        self.path = path.absolute()
        self.length = length
        self._pending: deque[bytes] = deque()
        self._warned = False
        try:
            if not path.exists():
                write_atomically(path, b"")
            self._open(known)
        except OSError as error:
            raise InputError(f"{path} cannot be opened for writing: {error.strerror}.") from error

    def _open(self, known: Sequence[Mapping[str, Any]]) -> None:
        content = read_bytes(self.path, None)
        kept = content[: self.length]
        lines = [_line(text) for text in kept.splitlines()]
        reached = {str(line["phase"]): int(line["step"]) for line in known}
        whole = len(kept) == self.length and kept.endswith(b"\n") if self.length else True
        if not whole or None in lines or any(_beyond(line, reached) for line in lines if line):
            kept = self._mended(content, known, reached)
            write_atomically(self.path, kept)
            self.length = len(kept)
        self._file = open(self.path, "r+b", buffering=0)  # noqa: SIM115 (open until close)
        self._file.truncate(self.length)

    def _mended(
        self, content: bytes, known: Sequence[Mapping[str, Any]], reached: Mapping[str, int]
    ) -> bytes:
        """The whole lines up to the checkpoint, and those that it knows where they are missing."""
        found = [line for text in content.splitlines() if (line := _line(text)) is not None]
        found = [line for line in found if not _beyond(line, reached)]
        have = {(str(line.get("phase")), line.get("step")) for line in found if "loss" not in line}
        added = [line for line in known if (line["phase"], line["step"]) not in have]
        warnings.warn(
            f"{self.path} has lost or changed lines that the checkpoint counts on: it had {self.length:,} "
            f"bytes then and has {len(content):,} now. {len(found):,} lines are left, {len(added):,} were "
            "added from the checkpoint; other lines are lost. No result depends on them.",
            stacklevel=5,
        )
        every = sorted([*found, *added], key=lambda x: (_order(x.get("phase")), x.get("step", 0)))
        return b"".join(map(_text, every))

    def move(self, path: Path) -> None:
        """Goes on in another file, with the lines so far: the folder of this one was removed."""
        self._file.seek(0)
        content = self._file.readall()[: self.length]
        write_atomically(path, content)
        with contextlib.suppress(OSError):
            self._file.close()
        self.path = path.absolute()
        self._file = open(path, "r+b", buffering=0)  # noqa: SIM115 (open until close)

    def write(self, line: Mapping[str, Any]) -> None:
        """Appends a line; what a full disk refuses is kept and tried again with the next."""
        self._pending.append(_text(line))
        try:
            self._write_pending()
        except OSError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{self.path} cannot be written ({error.strerror}); its lines are kept in memory.",
                    stacklevel=2,
                )

    def _write_pending(self) -> None:
        while self._pending:
            rest = memoryview(self._pending[0])
            try:
                self._file.seek(self.length)
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                with contextlib.suppress(OSError):
                    self._file.truncate(self.length)
                raise
            self.length += len(self._pending.popleft())

    def flush(self) -> int:
        """Puts every line on the disk for good; returns the file's length in bytes."""
        self._write_pending()
        os.fsync(self._file.fileno())
        return self.length

    def lines(self) -> list[dict[str, Any]]:
        """Everything written so far, also what is still in memory."""
        written = read_bytes(self.path, None)[: self.length].splitlines()
        return [line for text in [*written, *self._pending] if (line := _line(text)) is not None]

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            self._write_pending()
        except OSError as error:
            lost = len(self._pending)
            warnings.warn(f"{self.path} lacks the last {lost:,} lines: {error.strerror}.", stacklevel=2)
        with contextlib.suppress(OSError):
            self._file.close()


def _text(line: Mapping[str, Any]) -> bytes:
    return json.dumps(_plain(line, strict=True), allow_nan=False).encode() + b"\n"


def _line(text: bytes) -> dict[str, Any] | None:
    """A line of the log; ``None`` where it is not one."""
    try:
        line = parse_json(text)
    except ValueError:
        return None
    sound = isinstance(line, dict) and type(line.get("step", 0)) is int and abs(line.get("step", 0)) < 2**63
    return line if sound else None


def _order(phase: Any) -> int:
    return PHASES.index(phase if phase in PHASES else "train")  # tracked agreement is of the training


def _beyond(line: Mapping[str, Any], reached: Mapping[str, int]) -> bool:
    """Whether a line is of a step after the checkpoint's."""
    phase = "train" if (phase := line.get("phase")) == "agreement" else str(phase)
    return bool(reached) and line.get("step", 0) > reached.get(phase, 0)


class TensorBoard(Writer):
    """Scalars for TensorBoard, in ``folder``; needs the package (``pip install shoal[tensorboard]``).

    The file is begun anew each time, with the ``earlier`` lines of a resumed training. Trouble with the disk
    ends it with a warning and leaves the training alone.
    """

    def __init__(self, folder: str | Path, earlier: Iterable[Mapping[str, Any]] = ()) -> None:
        # Not torch's SummaryWriter: its thread lives on in forked workers, and prints what a full disk does.
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise InputError("TensorBoard is not installed: pip install tensorboard") from error
        self._event, self._make = Event, RecordWriter
        self._writer: Any = None
        self.begin(folder, earlier)

    def begin(self, folder: str | Path, earlier: Iterable[Mapping[str, Any]]) -> None:
        """Starts a file in ``folder`` in place of ours that are there."""
        self.close()
        folder, earlier, now = Path(folder), list(earlier), time.time()
        age = max((_seconds(line) for line in earlier), default=0.0)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob("events.out.tfevents.*.shoal.*"):
                old.unlink()
            path = folder / f"events.out.tfevents.{int(now)}.shoal.{os.getpid()}"
            self._writer = self._make(open(path, "wb"))  # noqa: SIM115 (open until close)
            self._writer.write(self._event(wall_time=now, file_version="brain.Event:2").SerializeToString())
            for line in earlier:
                self._append(line, now - age + _seconds(line))
            self._append({}, now)
        except OSError as error:
            self._give_up(error)

    def write(self, line: Mapping[str, Any]) -> None:
        self._append(line, time.time())

    def _append(self, line: Mapping[str, Any], when: float) -> None:
        if self._writer is None:
            return
        try:
            event = self._event(wall_time=when, step=int(line.get("step", 0)))
            for tag, value in scalars(line).items():
                event.summary.value.add(tag=tag, simple_value=value)
            if event.summary.value:
                self._writer.write(event.SerializeToString())
            self._writer.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.close()
        warnings.warn(f"TensorBoard logging stopped: {error}.", stacklevel=3)

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()


def has_tensorboard() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


class WeightsAndBiases(Writer):
    """Sends lines to Weights & Biases, where a folder is one run, however often it is resumed.

    W&B wants one step that only grows, so there lines are counted; a line's own step is logged as a value.
    """

    def __init__(
        self,
        project: str,
        name: str,
        config: Mapping[str, Any],
        folder: Path,
        earlier: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        wandb = check_wandb()
        self._warned = False
        folder = folder.resolve()
        identity = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.run = wandb.init(
                project=project, name=name, config=dict(config), dir=str(folder), id=identity, resume="allow"
            )
        except Exception as error:
            raise InputError(
                f"Weights & Biases did not start: {error}\n"
                "Log in with `wandb login`, or set WANDB_MODE=offline to send the run later."
            ) from error
        self._next = 0
        known = self.run.step
        for line in earlier:
            if self._next >= known:
                self.write(line)
            else:
                self._next += 1
        self._next = max(self._next, known)

    def write(self, line: Mapping[str, Any]) -> None:
        values = {f"{_prefix(line)}step": int(line.get("step", 0)), **scalars(line)}
        try:
            self.run.log(values, step=self._next, commit=True)
        except Exception as error:
            self._warn(error)
        self._next += 1

    def close(self) -> None:
        try:
            self.run.finish()
        except Exception as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"Weights & Biases: {type(error).__name__}: {error}", stacklevel=3)


def check_wandb() -> Any:
    """The wandb module, or words for that it is missing."""
    try:
        wandb = importlib.import_module("wandb")
    except ImportError as error:
        raise InputError("Weights & Biases is not installed: pip install wandb") from error
    if not hasattr(wandb, "init"):  # a folder of that name, such as the one W&B itself leaves behind
        raise InputError(
            "Weights & Biases is not installed, though a folder is called wandb: pip install wandb"
        )
    return wandb


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line by names such as "losses/oslo"; no domains if more than :data:`MOST`."""
    plain = _plain(line)
    plain.pop("step", None)
    found = _flat(plain, _prefix(line))
    return {name.encode("utf-8", "backslashreplace").decode(): value for name, value in found.items()}


def _prefix(line: Mapping[str, Any]) -> str:
    phase = line.get("phase", "train")
    return "" if phase == "train" else f"{phase}/"


def _flat(nest: dict[str, Any], prefix: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in nest.items():
        if isinstance(value, dict):
            if name not in ("losses", "domains") or len(value) <= MOST:
                found |= _flat(value, f"{prefix}{name}/")
        elif value is None:
            found[prefix + name] = math.nan
        elif isinstance(value, (int, float)):
            found[prefix + name] = math.copysign(math.inf, value) if abs(value) > 2**1023 else float(value)
    return found


def _plain(value: Any, strict: bool = False) -> Any:
    """What JSON can hold; ``strict`` turns NaN and infinities into null."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part, strict) for name, part in value.items()}
    if hasattr(value, "tolist"):  # numbers and arrays of NumPy and torch
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(part, strict) for part in value]
    if value is None or isinstance(value, (str, int)):
        return value
    try:
        value = float(value)
    except (TypeError, ValueError, OverflowError):
        return str(value)
    return None if strict and not math.isfinite(value) else value


def _seconds(line: Mapping[str, Any]) -> float:
    seconds = line.get("seconds")
    return float(seconds) if isinstance(seconds, int | float) and abs(seconds) < 2**63 else 0.0
