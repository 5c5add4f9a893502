"""Where the records of runs are kept, and how all records in a folder are read."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from shoal.errors import InputError
from shoal.experiments.config import RunConfig, check_same_run
from shoal.experiments.record import PYTHON, RunRecord, held_out_domains, read_record
from shoal.files import write_atomically

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Stamp = tuple[int, int, int]
"""Size, time and inode of a file: what changes whenever a record is written anew."""


def _stamp(path: str | Path) -> Stamp:
    state = os.stat(path)
    return state.st_size, state.st_mtime_ns, state.st_ino


class Store:
    """A folder of records: one JSON file per run, named by the identity of the run.

    An active run has its log and checkpoints in ``working/IDENTITY`` until its record is saved; predictions
    are in ``predictions/IDENTITY``. With ``weights=True``, for runs that differ only in their seed, each run
    keeps a whole folder ``seed-N`` with its weights and record.

    The folder may be on a file system that several machines share:

    - Records are written atomically, and a worker reports a record only after it is written.
    - A run has one worker at a time (:meth:`claimed`). A second worker of the same run, such as one left by a
      killed command, waits and then finds the record, or resumes from the checkpoints.
    - If the file system has no locks, two workers may do a run in parallel. Checkpoints are written
      atomically and named by their content, and both produce the same record: only time is lost.

    >>> from shoal.experiments.config import RunConfig
    >>> Store("empty").find(RunConfig("linear", "erm", steps=4)) is None
    True

    Args:
        folder: folder of the records.
        weights: keep the weights of each run.
    """

    def __init__(self, folder: str | Path, *, weights: bool = False) -> None:
        self.folder, self.weights = Path(folder), weights
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{str(folder)!r} is a file; records require a folder.")
        self._read: dict[Path, tuple[Stamp, RunRecord]] = {}
        self._locks: IO[bytes] | None = None

    @property
    def resume(self) -> str:
        """What resumes interrupted runs."""
        return "the same command again"

    def path(self, config: RunConfig) -> Path:
        """Return the path of the record of a run.

        Args:
            config: configuration of the run.
        """
        return self.workplace(config) / "record.json" if self.weights else self._named("", config, ".json")

    def workplace(self, config: RunConfig) -> Path:
        """Return the folder of an active run, with its log and checkpoints.

        Args:
            config: configuration of the run.
        """
        return self.folder / f"seed-{config.seed}" if self.weights else self._named("working", config)

    def predictions(self, config: RunConfig) -> Path:
        """Return the folder of the predictions of a run.

        Args:
            config: configuration of the run.
        """
        return self.workplace(config) / "predictions" if self.weights else self._named("predictions", config)

    def _named(self, folder: str, config: RunConfig, ending: str = "") -> Path:
        return self.folder / folder / f"{config.identity}{ending}"

    def __getstate__(self) -> dict[str, Any]:  # for workers, which lock and read for themselves
        return {**self.__dict__, "_read": {}, "_locks": None}

    def run(
        self,
        config: RunConfig,
        device: str | None,
        tell: Callable[[int, str], None],
        how: Mapping[str, Any],
    ) -> RunRecord:
        """Do a run in its :meth:`workplace`; called by workers.

        Args:
            config: configuration of the run.
            device: device.
            tell: called with the step and a note on progress.
            how: options that do not change results.
        """
        from shoal.experiments import run  # needs torch

        place = self.workplace(config)
        return run.run(config, device, tell, place, how, None, self.resume, self.weights)

    def save(self, record: RunRecord) -> None:
        """Write a record.

        Args:
            record: the record.
        """
        write_atomically(self.path(record.config), json.dumps(record.to_dict(), default=dict).encode())

    def keep(self, record: RunRecord) -> None:
        """Write the predictions and the record, then remove the working files.

        Args:
            record: the record.
        """
        if self.weights:  # the run itself has written them
            return
        made, kept = self.workplace(record.config) / "predictions", self.predictions(record.config)
        if made.is_dir():
            shutil.rmtree(kept, ignore_errors=True)  # of an attempt that was killed here
            kept.parent.mkdir(parents=True, exist_ok=True)
            made.replace(kept)
        self.save(record)
        shutil.rmtree(self.workplace(record.config), ignore_errors=True)

    def fail(self, config: RunConfig, error: str, traceback: str = "") -> RunRecord:
        """Record that a run failed; its checkpoints are kept, and the next call repeats it.

        Args:
            config: configuration of the run.
            error: error message.
            traceback: traceback.
        """
        record = RunRecord(config, "failed", (), -1, "", 0.0, {}, error=error, traceback=traceback)
        with contextlib.suppress(OSError):  # a full disk
            self.save(record)
        return record

    def look(self, config: RunConfig) -> RunRecord | None:
        """Return the record of a run, whatever its status, or ``None``.

        Args:
            config: configuration of the run.
        """
        path = self.path(config)
        if self.weights:
            check_same_run(path.parent, config)
        try:
            stamp = _stamp(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise InputError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
        if self._read.get(path, (None,))[0] != stamp:
            self._read[path] = stamp, read_record(path, config)
        return self._read[path][1]

    def find(self, config: RunConfig, *, fresh: bool = False) -> RunRecord | None:
        """Return the record of a run that finished or diverged, or ``None``.

        Args:
            config: configuration of the run.
            fresh: bypass the cache of a network file system.
        """
        if fresh:
            with contextlib.suppress(OSError), os.scandir(self.path(config).parent):
                pass  # opening a folder asks the server anew what is in it
        record = self.look(config)
        return None if record is None or record.status == "failed" else record

    def missing(self, configs: Iterable[RunConfig]) -> list[RunConfig]:
        """Return the runs that are missing, including failed ones; unusable records raise an error.

        Args:
            configs: configurations of the runs.
        """
        return [c for c in configs if self.find(c) is None]

    def found(self, configs: Iterable[RunConfig]) -> list[RunRecord]:
        """Return the existing records of these configurations, with their labels.

        Args:
            configs: configurations of the runs.
        """
        pairs = ((config, self.find(config)) for config in configs)
        return [replace(record, config=config) for config, record in pairs if record is not None]

    def all(self) -> list[RunRecord]:
        """Return all records, including those of failed runs."""
        return [
            read_record(p)
            for p in sorted(self.folder.glob("seed-*/record.json" if self.weights else "*.json"))
        ]

    # One worker per run. A lock per run with `filelock` (flock) would be inherited by a run's DataLoader
    # workers and so outlive a killed run, and leave a file per run; parts of one file are locked instead.

    @property
    def claims(self) -> Path:
        return self.folder / ".claims"

    def name(self) -> str:
        """What only those who see this very folder can know."""
        if not self.claims.exists():
            write_atomically(self.claims, secrets.token_hex(16).encode())
        return self.claims.read_text()

    def claim(self, config: RunConfig, lock: bool = True) -> bool:
        """Lock a run for this process, or release it.

        The lock ends with the process.

        Args:
            config: configuration of the run.
            lock: lock, or release.

        Returns:
            Whether it succeeded; ``False`` if another process has the run.
        """
        if fcntl is None:
            return True
        if self._locks is None:  # kept open: closing it would give back every run of this process
            self._locks = self.claims.open("r+b")
        how = fcntl.LOCK_EX | fcntl.LOCK_NB if lock else fcntl.LOCK_UN
        try:
            fcntl.lockf(self._locks, how, 1, int(config.identity[:15], 16))
        except (BlockingIOError, PermissionError):
            return False
        except OSError:  # there are no locks here
            pass
        return True

    @contextlib.contextmanager
    def claimed(self, config: RunConfig, wait: Callable[[], None]) -> Iterator[None]:
        """Lock a run within the block.

        Args:
            config: configuration of the run.
            wait: called from time to time while another process has the run.
        """
        while not self.claim(config):
            wait()
            time.sleep(0.2)
        try:
            yield
        finally:
            self.claim(config, lock=False)


_NAMES = re.compile(r"record\.json|[0-9a-f]{16}\.json")


def record_files(folder: Path) -> list[Path]:
    """The records in a folder and its subfolders: those of stores and of run folders."""
    return sorted(p for p in folder.rglob("*.json") if _NAMES.fullmatch(p.name) and p.is_file())


def read_runs(folder: Path) -> tuple[dict[Path, RunRecord], dict[Path, str]]:
    """The newest record of each run in a folder and its subfolders, and files that are no records, with why.

    Runs of :func:`shoal.fit` are told apart by their folder: their data and model are not recorded.
    """
    if not folder.is_dir():
        raise InputError(f"there is no folder {str(folder)!r}.")
    newest: dict[str, tuple[Path, RunRecord]] = {}
    broken: dict[Path, str] = {}
    for path in sorted(record_files(folder), key=lambda p: p.stat().st_mtime_ns):
        try:
            record = read_record(path)
        except InputError as error:
            broken[path] = str(error)
        else:
            newest[identity(record, path)] = path, record

    def order(item: tuple[Path, RunRecord]) -> tuple[Any, ...]:
        config = item[1].config
        return config.dataset, config.name, held_out_domains(item[1]) or "", config.seed, item[0]

    return dict(sorted(newest.values(), key=order)), broken


def identity(record: RunRecord, path: str | Path) -> str:
    """What names a run that is recorded in the file ``path``."""
    own = record.config.identity
    return f"{own} {path}" if record.config.dataset == PYTHON else own
