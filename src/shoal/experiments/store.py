"""The folder with the records of runs."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from shoal.errors import InputError
from shoal.experiments.config import RunConfig, check_same_run
from shoal.experiments.record import PYTHON, RunRecord, finite, read_record
from shoal.files import write_atomically
from shoal.training.folder import ONLY_FLOCK

if TYPE_CHECKING:
    import pandas

COLUMNS = (
    *("dataset", "algorithm", "name", "held_out", "seed", "status", "metric"),
    *("test", "validation", "train", "test_last", "validation_last", "train_last"),
    *("step", "steps", "lr", "batch_size", "rule", "seconds", "device", "error", "identity", "path"),
)
"""Columns that every table of runs has."""
NAMED = 5
"""Unreadable files that a warning names."""


class Store:
    """A folder of records: one JSON file per run, named by the identity of the run.

    An active run has its log and checkpoints in ``working/IDENTITY``, and a lock next to it, until its record
    is saved; predictions are in ``predictions/IDENTITY``. With ``weights=True``, for runs that differ only in
    their seed, each run has a folder ``seed-N`` with its weights and record.

    The folder may be on a file system that several machines share. A run has one worker at a time
    (:meth:`lock`); a second one waits, then finds the record or resumes from the checkpoints. On a file
    system without locks, two workers may do the same run, which costs time but gives the same record.

    >>> from shoal.experiments.config import RunConfig
    >>> Store("empty").find(RunConfig("linear", "erm", steps=4)) is None
    True

    Args:
        folder: folder of the records, which is created when a run starts.
        weights: keep the weights of each run.
    """

    def __init__(self, folder: str | Path, *, weights: bool = False) -> None:
        self.folder, self.weights = Path(folder), weights
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{str(folder)!r} is a file; records require a folder.")
        self._cache: dict[Path, tuple[tuple[int, ...], RunRecord]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": {}}

    @property
    def working(self) -> Path:
        """Folder of the files of active runs."""
        return self.folder / "working"

    def path(self, config: RunConfig) -> Path:
        """Return the path of the record of a run.

        Args:
            config: configuration of the run.
        """
        if self.weights:
            return self.workplace(config) / "record.json"
        return self.folder / f"{config.identity}.json"

    def workplace(self, config: RunConfig) -> Path:
        """Return the folder of an active run, with its log and checkpoints.

        Args:
            config: configuration of the run.
        """
        return self.folder / f"seed-{config.seed}" if self.weights else self.working / config.identity

    def predictions(self, config: RunConfig) -> Path:
        """Return the folder of the predictions of a run.

        Args:
            config: configuration of the run.
        """
        if self.weights:
            return self.workplace(config) / "predictions"
        return self.folder / "predictions" / config.identity

    def progress(self, config: RunConfig) -> Path:
        """Return the path of the file with the current step of an active run.

        Args:
            config: configuration of the run.
        """
        return self.working / f"{config.identity}.progress"

    def save(self, record: RunRecord) -> None:
        """Write a record, with predictions, and remove the working files of a run that did not fail.

        If the process is killed, what is half written is in the folder of the active run.

        Args:
            record: the record.
        """
        config, place = record.config, self.workplace(record.config)
        draft = place / "record.json"
        if not (self.weights and draft.exists()):  # which the run itself has written
            write_atomically(draft, json.dumps(record.to_dict(), default=dict).encode())
        if self.weights:
            return
        if (place / "predictions").is_dir():
            target = self.predictions(config)
            shutil.rmtree(target, ignore_errors=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            (place / "predictions").replace(target)
        draft.replace(self.path(config))
        if record.status != "failed":
            shutil.rmtree(place, ignore_errors=True)
        for empty in (place, self.working):
            with contextlib.suppress(OSError):
                empty.rmdir()

    def fail(self, config: RunConfig, error: str, traceback: str = "") -> RunRecord:
        """Record that a run failed; its checkpoints are kept, and the next call repeats it.

        Args:
            config: configuration of the run.
            error: error message.
            traceback: traceback.
        """
        record = RunRecord(config, "failed", (), -1, "", 0.0, {}, error=error, traceback=traceback)
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
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise InputError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
        version = status.st_size, status.st_mtime_ns, status.st_ino
        if path not in self._cache or self._cache[path][0] != version:
            self._cache[path] = version, read_record(path, config)
        return self._cache[path][1]

    def find(self, config: RunConfig) -> RunRecord | None:
        """Return the record of a run that finished or diverged, or ``None``.

        Args:
            config: configuration of the run.
        """
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
        pattern = "seed-*/record.json" if self.weights else "*.json"
        return [read_record(path) for path in sorted(self.folder.glob(pattern))]

    def frame(self) -> pandas.DataFrame:
        """Return the runs in the folder and its subfolders, one row per run; see :func:`shoal.results`."""
        import pandas

        records, broken = read_runs(self.folder)
        if broken:
            more = f" and {len(broken) - NAMED:,} more" if len(broken) > NAMED else ""
            reasons = "; ".join(reason.rstrip(".") for reason in list(broken.values())[:NAMED])
            warnings.warn(f"{reasons}{more}.", stacklevel=3)
        rows = [row_of(r) | {"path": p.relative_to(self.folder).as_posix()} for p, r in records.items()]
        frame = pandas.DataFrame(rows)
        return frame.reindex(columns=[*COLUMNS, *sorted(set(frame.columns) - set(COLUMNS))])

    @contextlib.contextmanager
    def lock(self, config: RunConfig, wait: Callable[[], None]) -> Iterator[None]:
        """Lock a run within the block. The lock ends with the process, however that ends.

        Args:
            config: configuration of the run.
            wait: called repeatedly while another process has the run; it may raise an exception.
        """
        path = self.working / f"{config.identity}.lock"
        lock = FileLock(path, **ONLY_FLOCK)
        while not lock.is_locked:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(blocking=False)
            except Timeout:
                wait()
            except FileNotFoundError:  # another process has just removed the empty folder
                continue
            except OSError:  # there are no locks on this file system
                break
        try:
            yield
        finally:
            # Whoever locks a removed file notices it and starts over.
            for file in (self.progress(config), path):
                file.unlink(missing_ok=True)
            lock.release()
            with contextlib.suppress(OSError):
                self.working.rmdir()

    def clean(self, configs: Iterable[RunConfig]) -> None:
        """Remove what killed processes have left of runs that have a record.

        Args:
            configs: configurations of the runs.
        """
        names = {path.name.partition(".")[0] for path in self.working.glob("*")}
        for config in configs:
            if config.identity in names and self.find(config) is not None:
                with contextlib.suppress(Timeout), self.lock(config, _give_up):
                    if not self.weights:
                        shutil.rmtree(self.workplace(config), ignore_errors=True)


def _give_up() -> None:
    raise Timeout("")


def read_runs(folder: Path) -> tuple[dict[Path, RunRecord], dict[Path, str]]:
    """The newest record of each run in a folder and its subfolders, and files that are no records, with why.

    Runs of :func:`shoal.fit` are distinguished by their folder: their data and model are not recorded.
    """
    if not folder.is_dir():
        raise InputError(f"there is no folder {str(folder)!r}.")
    newest: dict[str, tuple[Path, RunRecord]] = {}
    broken: dict[Path, str] = {}
    names = re.compile(r"record\.json|[0-9a-f]{16}\.json")
    paths = [p for p in folder.rglob("*.json") if names.fullmatch(p.name) and p.is_file()]
    for path in sorted(paths, key=lambda p: (p.stat().st_mtime_ns, p)):
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
    """What identifies a run that is recorded in the file ``path``."""
    own = record.config.identity
    return f"{own} {path}" if record.config.dataset == PYTHON else own


SHORT = {"data_options": "data", "model_options": "model", "optimizer_options": "optimizer"}
"""Prefixes of columns with options: ``data.seed`` and so on."""


def row_of(record: RunRecord) -> dict[str, Any]:
    """A record as a row of a table, without missing values. A run that diverged has no scores."""
    config = record.config
    row: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if isinstance(value, Mapping):
            row |= {f"{SHORT.get(name, name)}.{key}": content for key, content in value.items()}
        else:
            row[name] = value
    del row["label"]
    row["selects"] = row.pop("metric")
    row |= {
        "identity": config.identity,
        "name": config.name,
        "status": record.status,
        "rule": record.rule,
        "seconds": record.seconds,
        "device": record.environment.get("device"),
        "error": record.error or None,
        "held_out": held_out_domains(record),
    }
    if record.history:
        scores = record.history[-1]["scores"]
        if scores:
            last = scores["test" if "test" in scores else next(iter(scores))]
            row |= {"metric": last["metric"], "selects": last.get("selects", row["selects"])}
        row["step"] = record.history[record.selected]["step"]
        if record.status == "finished":
            row |= _score_columns(record.chosen, "") | _score_columns(scores, "_last")
    return {name: value for name, value in row.items() if value is not None}


def held_out_domains(record: RunRecord) -> str | None:
    """The domains that the configuration holds out, else those of the test split if they are few."""
    config = record.config
    names = config.data_options.get("held_out", config.protocol.get("held_out"))
    if names is None and record.history:
        test = list(record.history[-1]["scores"].get("test", {}).get("domains", ()))
        names = test if 0 < len(test) <= 3 else None
    if names is None:
        return None
    return ", ".join(map(str, names)) if isinstance(names, list | tuple) else str(names)


def _score_columns(scores: Mapping[str, Any], ending: str) -> dict[str, float | None]:
    """``test``, ``test.DOMAIN`` and ``test.METRIC`` for every split."""
    row: dict[str, float | None] = {}
    for split, values in scores.items():
        row[split + ending] = finite(values["average"])
        each = {**values.get("metrics", {}), **values["domains"]}
        row |= {f"{split}{ending}.{name}": finite(value) for name, value in each.items()}
    return row
