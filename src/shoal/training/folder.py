"""The folder of a run, which one process uses at a time."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import socket
import stat
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from shoal import files
from shoal.errors import InputError

FILES = (
    *("config.yaml", "metrics.jsonl", "record.json", "model.safetensors", "model.json", "model.txt"),
    *("inputs.json", "card.md", "columns.json", ".lock"),
)
FOLDERS = ("checkpoints", "predictions", "tensorboard", "encoder", "tokenizer")
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
            content = files.read_bytes(path, None)
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
    network file systems) the folder is used without, with a warning.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: FileLock | None = None
        self._depth = 0
        self._inode: tuple[int, int] | None = None
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.record = self.path / "record.json"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model.safetensors"
        self.inputs = self.path / "inputs.json"
        """How the model is built and what becomes its input; see :func:`shoal.training.summary.about`."""
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
        from shoal.training.checkpoint import Checkpoints  # which needs torch

        return self.config.exists() or Checkpoints(self.checkpoints).latest() is not None

    def __enter__(self) -> RunFolder:
        if self._depth == 0:
            self._take()
            self._clear()
        self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._inode = None
            self._free()

    @property
    def held(self) -> bool:
        """Whether the path still is the folder that was locked: neither removed nor replaced since."""
        return self._inode is not None and self._inode == _inode(self.path)

    def make_again(self) -> None:
        """Makes and locks the folder after it was removed; FileExistsError where another is in its place."""
        with contextlib.suppress(OSError):
            self.path.rmdir()  # if it is there and nothing is in it
        self.path.mkdir(parents=True)
        self._free()
        self._take()

    def _clear(self) -> None:
        """Removes what a process that was killed here has left half written (see `files.replacing`)."""
        left = [path for name in FILES for path in self.path.glob(f".{name}.*")]
        left += [path for name in FOLDERS for path in (self.path / name).glob(".*.????????")]
        for path in left:
            with contextlib.suppress(OSError):
                if stat.S_ISREG(path.lstat().st_mode):
                    path.unlink()

    def _take(self) -> None:
        self._inode = _inode(self.path)
        path = self.path / ".lock"
        if not path.is_dir():
            files.check_regular(path)
        lock = FileLock(path, mode=0o666, **ONLY_FLOCK)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            text = files.read_text(path, errors="replace")
            pid, _, host = text.strip().partition(" ")
            who = f"process {pid} on host {host}" if host else "another process"
            raise InputError(
                f"{self.path} is in use by {who}; wait for it, or choose another folder."
            ) from None
        except OSError as error:
            if path.is_dir() or path.is_symlink() or not os.access(self.path, os.W_OK):
                raise self._unusable(error) from error
            warnings.warn(
                f"{self.path} cannot be locked ({error.strerror}); make sure that only one process uses it.",
                stacklevel=3,
            )
            return
        self._lock = lock
        path.write_text(f"{os.getpid()} {socket.gethostname()}\n")

    def _free(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def _unusable(self, error: OSError) -> InputError:
        why = error.strerror or error
        return InputError(f"{self.path} cannot be created or written to ({why}); choose another folder.")


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_dev, state.st_ino
