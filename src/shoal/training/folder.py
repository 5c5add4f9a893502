"""The folder of a run, which one process uses at a time."""

from __future__ import annotations

import hashlib
import inspect
import os
import socket
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from shoal import files
from shoal.errors import InputError

OWN = (
    *("config.yaml", "metrics.jsonl", "record.json", "model.safetensors", "model.json", "model.txt"),
    *("inputs.json", "card.md", "columns.json", ".lock", "checkpoints", "stages", "predictions"),
    *("tensorboard", "encoder", "tokenizer"),
)
"""What Shoal writes to the folder of a run."""
FLAG = "fallback_to_soft"
ONLY_FLOCK: dict[str, Any] = {FLAG: False} if FLAG in inspect.signature(FileLock.__init__).parameters else {}
"""By default filelock 4 falls back to a lock that outlives a killed process; earlier versions do not."""


class RunFolder:
    """A run's folder: config.yaml, metrics.jsonl, record.json, checkpoints/, model.safetensors, card.md.

    ``with folder:`` locks it, so that a second process that would write to it is refused. The lock is the
    operating system's and ends with the process, however that ends. Where there are no such locks (some
    network file systems) the folder is used without, with a warning. Symbolic links in the folder are
    refused: whoever made them could have other files overwritten.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config, self.record = self.path / "config.yaml", self.path / "record.json"
        self.model = self.path / "model.safetensors"
        self._lock = FileLock(self.path / ".lock", mode=0o666, **ONLY_FLOCK)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = "it is a file" if isinstance(error, FileExistsError) else error.strerror or error
            raise InputError(f"{self.path} cannot be the folder of a run ({why}); choose another.") from error

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end, which is when its record is written."""
        return self.record.exists()

    @property
    def resumable(self) -> bool:
        """Whether there is a checkpoint."""
        return any((self.path / "checkpoints").glob("step-*.pt"))

    @property
    def started(self) -> bool:
        """Whether there is a run to resume."""
        return self.config.exists() or self.resumable

    def __enter__(self) -> Self:
        own = [self.path / name for name in OWN]
        for entry in (*own, *(inside for folder in own for inside in folder.rglob("*"))):
            if entry.is_symlink():
                raise InputError(f"{str(entry)!r} is a symbolic link; a run's folder must not contain any.")
        file = Path(self._lock.lock_file)
        try:
            self._lock.acquire(blocking=False)
            file.write_text(f"process {os.getpid()} on host {socket.gethostname()}")
        except Timeout:
            who = file.read_text(errors="replace") or "another process"
            message = f"{self.path} is in use by {who}; wait for it, or choose another folder."
            raise InputError(message) from None
        except OSError as error:
            if not os.access(self.path, os.W_OK):
                message = f"{self.path} cannot be written to ({error.strerror}); choose another folder."
                raise InputError(message) from error
            message = (
                f"{self.path} cannot be locked ({error.strerror}); make sure that only one process uses it."
            )
            warnings.warn(message, stacklevel=3)
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def write(self, name: str, content: bytes) -> None:
        """Replace the entry called ``name``, whole or not at all."""
        path = self.path / name
        if path.is_symlink():
            path.unlink()  # also one to a device, which would be written to
        files.write_atomically(path, content)


def check_output(path: Path, inputs: Iterable[str | Path] = ()) -> None:
    """As :func:`shoal.files.check_output`; what belongs to a run or a saved model is refused too."""
    files.check_output(path, inputs)
    real = Path(os.path.realpath(path))
    for folder, name in ((real.parent, real.name), (real.parent.parent, real.parent.name)):
        run = (folder / "config.yaml").exists() or (folder / "inputs.json").exists()
        if run and name in OWN and real.exists():
            raise InputError(f"{str(path)!r} belongs to the run in {str(folder)!r}; choose another name.")


def check_files(folder: Path, checksums: Mapping[str, str]) -> None:
    """Refuse the files of a model that are not what the run wrote; its record has their ``checksums``."""
    for name, checksum in checksums.items():
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise InputError(f"{str(folder / 'record.json')!r} is damaged: it names a file elsewhere.")
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InputError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
        if hashlib.sha256(content).hexdigest() != checksum:
            raise InputError(
                f"{str(path)!r} is damaged: its content has changed since the run wrote it (record.json has "
                "another checksum). Restore it from a copy, or train again."
            )
