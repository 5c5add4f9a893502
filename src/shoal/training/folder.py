"""The folder of a run, which one process uses at a time."""

from __future__ import annotations

import hashlib
import inspect
import os
import socket
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from shoal import files
from shoal.errors import InputError

FILES = (
    *("config.yaml", "metrics.jsonl", "record.json", "model.safetensors", "model.json", "model.txt"),
    *("inputs.json", "card.md", "columns.json", ".lock"),
)
FOLDERS = ("checkpoints", "stages", "predictions", "tensorboard", "encoder", "tokenizer")
"""What Shoal keeps in the folder of a run, and in no other."""
FLAG = "fallback_to_soft"
ONLY_FLOCK: dict[str, Any] = {FLAG: False} if FLAG in inspect.signature(FileLock.__init__).parameters else {}
"""filelock 4 falls back to a lock that outlives a killed process, unless told; earlier versions do not."""


def files_of(folder: Path) -> list[Path]:
    """The files of the run in ``folder``: what no command may overwrite with its output."""
    folder = folder.parent if folder.is_file() else folder  # the weights were given
    below = (path for name in FOLDERS for path in (folder / name).rglob("*"))
    return [*(folder / name for name in FILES), *below]


def check_output(path: Path, inputs: Iterable[str | Path] = (), option: str = "") -> None:
    """As :func:`shoal.files.check_output`; what belongs to a run is refused too, whichever run it is."""
    files.check_output(path, inputs, option)
    real = Path(os.path.realpath(path))
    for folder, own in ((real.parent, real.name in FILES), (real.parent.parent, real.parent.name in FOLDERS)):
        if own and real.exists() and (folder / "config.yaml").exists():
            name = f"{option} {str(path)!r}".lstrip()
            raise InputError(f"{name} belongs to the run in {str(folder)!r}; choose another name.")


def check_files(folder: Path, checksums: Mapping[str, str]) -> None:
    """Refuses the files of a model that are not what the run wrote; its record has their ``checksums``."""
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


class RunFolder:
    """A run's folder: config.yaml, metrics.jsonl, record.json, checkpoints/, model.safetensors, card.md.

    ``with folder:`` locks it, so that a second process that would write to it is refused. The lock is the
    operating system's and ends with the process, however that ends. Where there are no such locks (some
    network file systems) the folder is used without, with a warning. Symbolic links in the folder are
    refused: whoever made them could have other files overwritten.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.record = self.path / "record.json"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model.safetensors"
        self.inputs = self.path / "inputs.json"
        """How the model is built and what becomes its input; see :func:`shoal.training.summary.about`."""
        self._lock = FileLock(self.path / ".lock", mode=0o666, **ONLY_FLOCK)
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path} is a file; a run requires a folder.")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise self._unusable(error) from error

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end, which is when its record is written."""
        return self.record.exists()

    @property
    def started(self) -> bool:
        """Whether there is a run to resume."""
        return self.config.exists() or any(self.checkpoints.glob("step-*.pt"))

    def write(self, name: str, content: bytes) -> None:
        """Replaces the entry called ``name``, whole or not at all."""
        path = self.path / name
        if path.is_symlink():
            path.unlink()  # what it points to is none of ours
        files.write_atomically(path, content)

    def __enter__(self) -> RunFolder:
        self._check_links()
        try:
            self._lock.acquire(blocking=False)
            Path(self._lock.lock_file).write_text(f"{os.getpid()} {socket.gethostname()}\n")
        except Timeout:
            holder = Path(self._lock.lock_file).read_text(errors="replace")
            pid, _, host = holder.strip().partition(" ")
            who = f"process {pid} on host {host}" if host else "another process"
            raise InputError(
                f"{self.path} is in use by {who}; wait for it, or choose another folder."
            ) from None
        except OSError as error:
            if Path(self._lock.lock_file).is_dir() or not os.access(self.path, os.W_OK):
                raise self._unusable(error) from error
            warnings.warn(
                f"{self.path} cannot be locked ({error.strerror}); make sure that only one process uses it.",
                stacklevel=3,
            )
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def _check_links(self) -> None:
        """Refuses links, and removes what a process that was killed here has left half written."""
        for path in self._entries():
            if path.is_symlink():
                raise InputError(f"{str(path)!r} is a symbolic link; a run's folder must not contain any.")
            if path.name.startswith(".") and path.name != ".lock" and path.is_file():
                path.unlink(missing_ok=True)

    def _entries(self) -> Iterator[Path]:
        for name in FILES:
            yield self.path / name
            yield from self.path.glob(f".{name}.*")
        for name in FOLDERS:
            yield self.path / name
            yield from (self.path / name).rglob("*")

    def _unusable(self, error: OSError) -> InputError:
        why = error.strerror or error
        return InputError(f"{self.path} cannot be created or written to ({why}); choose another folder.")
