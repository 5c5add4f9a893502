"""Where the records of runs are kept, and the index of all records below a folder."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import secrets
import shutil
import sqlite3
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import fields, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

from shoal.errors import InputError
from shoal.experiments.config import RunConfig, check_how, check_same_run, read_config
from shoal.experiments.record import _FIELDS, SCHEMA, Row, RunRecord, read_record, row_of, summary
from shoal.files import check_regular, read_json, write_atomically

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PLAN = "seeds.json"


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
        """The command that resumes interrupted runs."""
        return f"shoal resume {self.folder}" if self.weights else "the same command again"

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

    # Several seeds

    def plan(self, configs: Iterable[RunConfig], how: Mapping[str, Any]) -> None:
        """Write the list of runs, for `shoal resume`; a different existing list raises an error.

        Args:
            configs: configurations of the runs.
            how: options that do not change results.
        """
        configs = list(configs)
        self.missing(configs)
        content = {"runs": [c.to_dict() for c in configs], "how": dict(how)}
        write_atomically(self.folder / PLAN, json.dumps(content, default=dict).encode())

    def forget_plan(self) -> None:
        """Unless some run of it has begun; the folder goes too if nothing is in it."""
        if not any(self.folder.glob("seed-*/config.yaml")):
            for path in (*self.folder.glob("seed-*/record.json"), self.folder / PLAN, self.claims):
                path.unlink(missing_ok=True)
            for folder in (*self.folder.glob("seed-*"), self.folder):
                with contextlib.suppress(OSError):
                    folder.rmdir()

    def planned(self) -> tuple[list[RunConfig], dict[str, Any]] | None:
        """Return what :meth:`plan` wrote, or ``None``."""
        path = self.folder / PLAN
        if not path.exists():
            return None
        try:
            content = read_json(path)
            configs = [RunConfig.from_dict(run) for run in content["runs"]]
            how = check_how(content["how"])
        except OSError as error:
            raise InputError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{str(path)!r} is not the plan of several seeds ({summary(error)}).") from error
        begun = [self.workplace(c) / "config.yaml" for c in configs]
        return [read_config(p.parent) if p.exists() else c for p, c in zip(begun, configs, strict=True)], how


_NAMES = re.compile(r"record\.json|[0-9a-f]{16}\.json")


def record_files(folder: Path) -> dict[str, Stamp]:
    """The records in a folder and below, by their paths from there: those of stores and of run folders."""
    os.scandir(folder).close()  # raises where it cannot be read
    found: dict[str, Stamp] = {}
    seen: set[tuple[int, int]] = set()
    start = len(os.path.join(folder, ""))
    for place, folders, files in os.walk(folder, followlinks=True):
        with contextlib.suppress(OSError):
            state = os.stat(place)
            if (state.st_dev, state.st_ino) in seen:  # a link that leads back
                folders.clear()
                continue
            seen.add((state.st_dev, state.st_ino))
        for name in (*files, *folders):
            if _NAMES.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):
                    path = os.path.join(place, name)
                    found[path[start:].replace(os.sep, "/")] = _stamp(path)
        folders[:] = [name for name in folders if name[0] != "." and not _NAMES.fullmatch(name)]
    return found


class Entry(NamedTuple):
    stamp: Stamp
    row: Row


INDEX = ".results.sqlite"
INDEX_FROM = 100
"""Fewer records are read as fast without an index."""
_FORMAT = [
    2,
    SCHEMA,
    *(f.name for f in fields(RunConfig)),
    *(f.name for f in fields(RunRecord)),
    *sorted(_FIELDS),
]
"""An index that another version of these has written is made anew: it may hold what is now refused."""


PARALLEL_FROM = 5000
"""So many records that are new to the index are read by several processes."""


def read_row(path: str | Path) -> Row:
    """Of the measurements only those that a row shows are looked at."""
    content = read_json(path)
    if isinstance(content, dict) and isinstance(history := content.get("history"), list) and len(history) > 2:
        selected = content.get("selected")
        if type(selected) is int and -1 <= selected < len(history):
            content |= {"history": [history[selected], history[-1]], "selected": 0, "warm_up": []}
    return row_of(RunRecord.from_dict(content))


def _try_row(path: str) -> Row | str | None:
    """The row of the record in a file, or what is wrong with it; ``None`` where there is no file."""
    try:
        return read_row(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        return f"is not a run record ({summary(error)})."
    except OSError as error:
        return f"cannot be read: {error.strerror}."


def _read_rows(paths: Sequence[str]) -> Iterable[Row | str | None]:
    # A child of a program with threads may inherit a lock that one of them holds; torch has threads.
    forks = "fork" in multiprocessing.get_all_start_methods() and "torch" not in sys.modules
    if len(paths) < PARALLEL_FROM or not forks or threading.active_count() > 1:
        return map(_try_row, paths)
    try:
        with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
            return list(pool.map(_try_row, paths, chunksize=500))
    except (OSError, BrokenProcessPool):  # no processes to be had, or one was killed
        return map(_try_row, paths)


class Index:
    """The rows of all records in a folder and below, in an SQLite file so that each record is read once.

    The records are the truth. A row counts only while its record has the size, time and inode it was made
    from, and an index that cannot be read or written is done without, and made anew where that is possible.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.path = self.folder / INDEX

    def read(self) -> tuple[dict[str, Entry], dict[str, str]]:
        """Entries by path, and the files that are no records, each with what is wrong."""
        files, known = record_files(self.folder), self.known()
        same = {p: e for p, e in (known or {}).items() if files.get(p) == e.stamp}
        new = sorted(files.keys() - same.keys())
        rows = dict(zip(new, _read_rows([str(self.folder / path) for path in new]), strict=True))
        changed = {path: Entry(files[path], row) for path, row in rows.items() if isinstance(row, dict)}
        broken = {path: f"{path!r} {row}" for path, row in rows.items() if isinstance(row, str)}
        every = same | changed
        entries = {path: every[path] for path in sorted(every)}
        gone = (known or {}).keys() - entries.keys()
        if (changed or gone) and len(entries) >= INDEX_FROM:
            self._write(changed, gone, anew=known is None)
        return entries, broken

    def known(self) -> dict[str, Entry] | None:
        """The entries of the index; ``None`` where there is none that can be used."""
        try:
            check_regular(self.path)
            if not self.path.exists():
                return None
            with contextlib.closing(self._connected()) as database:
                if database.execute("PRAGMA user_version").fetchone()[0] != self._version():
                    return None
                found = database.execute("SELECT * FROM records").fetchall()
                database_shapes = database.execute("SELECT * FROM shapes").fetchall()
            if any(zlib.crc32(text.encode()) != checksum for *_, checksum, text in found):
                return None
            shapes = {number: json.loads(names) for number, names in database_shapes}
            values = json.loads(f"[{','.join(text for *_, text in found)}]")
            return {
                path: Entry((size, modified, inode), dict(zip(shapes[shape], row, strict=True)))
                for (path, size, modified, inode, shape, *_), row in zip(found, values, strict=True)
            }
        except (sqlite3.Error, OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError):
            return None

    def _write(self, changed: Mapping[str, Entry], gone: Iterable[str], anew: bool) -> None:
        rows, shapes = [], dict[tuple[str, ...], int]()
        for path, (stamp, row) in changed.items():
            text = json.dumps(list(row.values()), separators=(",", ":"))
            if (shape := shapes.get(names := tuple(row))) is None:
                shape = shapes[names] = zlib.crc32(json.dumps(names).encode())
            rows.append((path, *stamp, shape, zlib.crc32(text.encode()), text))
        try:
            if anew:
                for ending in ("", "-journal"):
                    Path(f"{self.path}{ending}").unlink(missing_ok=True)
            with contextlib.closing(self._connected()) as database, database:
                columns = "path TEXT PRIMARY KEY, size INT, modified INT, inode INT, shape INT, checksum INT"
                database.execute(f"CREATE TABLE IF NOT EXISTS records ({columns}, row TEXT)")
                database.execute("CREATE TABLE IF NOT EXISTS shapes (number INT PRIMARY KEY, names TEXT)")
                database.execute(f"PRAGMA user_version = {self._version()}")
                database.executemany("DELETE FROM records WHERE path = ?", [(path,) for path in gone])
                database.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
                pairs = [(number, json.dumps(names)) for names, number in shapes.items()]
                database.executemany("INSERT OR REPLACE INTO shapes VALUES (?, ?)", pairs)
        except (sqlite3.Error, OSError, ValueError, OverflowError):  # no right to write, a full disk, in use
            pass

    def _connected(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.path, timeout=2)
        database.execute("PRAGMA synchronous = OFF")  # what a power cut spoils is made anew
        return database

    def _version(self) -> int:
        return zlib.crc32(json.dumps(_FORMAT).encode()) & 0x7FFFFFFF
