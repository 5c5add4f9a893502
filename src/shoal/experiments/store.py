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

from filelock import Timeout

from shoal.errors import InputError
from shoal.experiments.config import RunConfig, check_same_run
from shoal.experiments.record import PYTHON, RunRecord, read_record, selection_score
from shoal.files import file_lock, finite, write_atomically

if TYPE_CHECKING:
    import pandas

COLUMNS = (
    *("dataset", "algorithm", "name", "held_out", "seed", "status", "metric"),
    *("test", "validation", "train", "test_last", "validation_last", "train_last"),
    *("step", "steps", "lr", "batch_size", "rule", "seconds", "device", "error", "identity", "path"),
)
"""Columns that every table of runs has."""
PREFIXES = {"data_options": "data", "model_options": "model", "optimizer_options": "optimizer"}
PREFIXES["metric"] = "selects"
"""Columns of fields of a configuration, where they have other names: ``data.seed`` and so on."""
RECORD_FILE = re.compile(r"record\.json|[0-9a-f]{16}\.json")
SHOWN = 5
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
        self.working = self.folder / "working"
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{str(folder)!r} is a file; records require a folder.")

    def path(self, config: RunConfig) -> Path:
        """Return the path of the record of a run."""
        if self.weights:
            return self.workplace(config) / "record.json"
        return self.folder / f"{config.identity}.json"

    def workplace(self, config: RunConfig) -> Path:
        """Return the folder of an active run, with its log and checkpoints."""
        return self.folder / f"seed-{config.seed}" if self.weights else self.working / config.identity

    def progress(self, config: RunConfig) -> Path:
        """Return the path of the file with the current step of an active run."""
        return self.working / f"{config.identity}.progress"

    def fraction(self, config: RunConfig) -> float:
        """Return how far an active run is."""
        with contextlib.suppress(OSError, ValueError):  # it has just started or ended
            return min(1.0, int(self.progress(config).read_text()) / config.steps)
        return 0.0

    def save(self, record: RunRecord) -> None:
        """Write a record, with predictions, and remove the working files of a run that did not fail.

        If the process is killed, what is half written is in the folder of the active run. Runs that keep
        their weights write their records themselves, unless they fail.
        """
        config, place, failed = record.config, self.workplace(record.config), record.status == "failed"
        if failed or not self.weights:
            write_atomically(place / "record.json", json.dumps(record.to_dict(), default=dict).encode())
        if self.weights:
            return
        if (place / "predictions").is_dir():
            target = self.folder / "predictions" / config.identity
            shutil.rmtree(target, ignore_errors=True)
            target.parent.mkdir(exist_ok=True)
            (place / "predictions").replace(target)
        (place / "record.json").replace(self.path(config))
        if not failed:
            shutil.rmtree(place, ignore_errors=True)
        for empty in (place, self.working):
            with contextlib.suppress(OSError):
                empty.rmdir()

    def fail(self, config: RunConfig, error: str, traceback: str = "") -> RunRecord:
        """Record that a run failed; its checkpoints are kept, and the next call repeats it."""
        record = RunRecord(config, "failed", (), -1, "", 0.0, {}, error=error, traceback=traceback)
        self.save(record)
        return record

    def read(self, config: RunConfig) -> RunRecord | None:
        """Return the record of a run, whatever its status, or ``None``."""
        path = self.path(config)
        if self.weights:
            check_same_run(path.parent, config)
        return read_record(path, config) if path.exists() else None

    def find(self, config: RunConfig) -> RunRecord | None:
        """Return the record of a run that finished or diverged, or ``None``."""
        record = self.read(config)
        return None if record is None or record.status == "failed" else record

    def missing(self, configs: Iterable[RunConfig]) -> list[RunConfig]:
        """Return the runs that are missing, including failed ones, each once."""
        return [c for c in {c.identity: c for c in configs}.values() if self.find(c) is None]

    def found(self, configs: Iterable[RunConfig]) -> list[RunRecord]:
        """Return the records of those runs that finished or diverged, with the labels of ``configs``."""
        pairs = ((config, self.find(config)) for config in configs)
        return [replace(record, config=config) for config, record in pairs if record is not None]

    def frame(self) -> pandas.DataFrame:
        """Return the runs in the folder and its subfolders, one row per run.

        Of several records of the same run, the newest counts. ``test``, ``validation`` and ``train`` are the
        scores at the selected step, ``test_last`` and so on those at the last step, ``test.X`` that of domain
        or metric X. ``settings.X``, ``data.X``, ``model.X`` and ``optimizer.X`` are options; other columns
        are fields of the configuration. Files that are no records give a warning.
        """
        import pandas

        if not self.folder.is_dir():
            raise InputError(f"there is no folder {str(self.folder)!r}.")
        paths = [p for p in self.folder.rglob("*.json") if RECORD_FILE.fullmatch(p.name) and p.is_file()]
        rows, errors = dict[Any, dict[str, Any]](), list[str]()
        for path in sorted(paths, key=lambda p: (p.stat().st_mtime_ns, p)):
            try:
                record = read_record(path)
            except InputError as error:
                errors.append(str(error).rstrip("."))
                continue
            apart = path if record.config.dataset == PYTHON else None  # runs of `fit` do not tell their data
            place = path.relative_to(self.folder).as_posix()
            rows[record.config.identity, apart] = _row(record) | {"path": place}
        if errors:
            more = f" and {len(errors) - SHOWN:,} more" if len(errors) > SHOWN else ""
            warnings.warn(f"{'; '.join(errors[:SHOWN])}{more}.", stacklevel=3)
        frame = pandas.json_normalize(list(rows.values())).dropna(axis=1, how="all")
        frame = frame.reindex(columns=[*COLUMNS, *sorted(set(frame.columns) - set(COLUMNS))])
        return frame.sort_values(["dataset", "name", "held_out", "seed", "path"], ignore_index=True)

    @contextlib.contextmanager
    def lock(self, config: RunConfig, wait: Callable[[], None]) -> Iterator[None]:
        """Lock a run within the block. The lock ends with the process, however that ends.

        While another process has the run, ``wait`` is called repeatedly; it may raise an exception.
        """
        path = self.working / f"{config.identity}.lock"
        lock = file_lock(path)
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
        """Remove what killed processes have left of runs that have a record."""

        def give_up() -> None:
            raise Timeout("")

        left = {path.name.partition(".")[0] for path in self.working.glob("*")}
        for config in configs:
            if config.identity in left and self.find(config) is not None:
                with contextlib.suppress(Timeout), self.lock(config, give_up):
                    shutil.rmtree(self.working / config.identity, ignore_errors=True)


def _row(record: RunRecord) -> dict[str, Any]:
    """A record as a row of a table. A run that diverged or failed has no scores."""
    config, names = record.config, record.config.held_out
    row = {PREFIXES.get(name, name): value for name, value in config.to_dict().items() if name != "label"}
    row |= {name: getattr(record, name) for name in ("status", "rule", "seconds")}
    row |= {"identity": config.identity, "name": config.name, "device": record.environment.get("device")}
    row["error"] = record.error or None
    if record.history and (last := record.history[-1]["scores"]):
        row["metric"] = selection_score(last.get("test") or next(iter(last.values())))[0]
        row["step"] = record.history[record.selected]["step"]
        test = list(last.get("test", {}).get("domains", ()))
        names = test if names is None and 0 < len(test) <= 3 else names
        if record.status == "finished":
            row |= _scores(record.scores, "") | _scores(last, "_last")
    row["held_out"] = ", ".join(map(str, names)) if isinstance(names, list | tuple) else names
    return row


def _scores(scores: Mapping[str, Any], ending: str) -> dict[str, float | None]:
    """``test``, ``test.DOMAIN`` and ``test.METRIC`` for every split."""
    row: dict[str, float | None] = {}
    for split, values in scores.items():
        row[split + ending] = finite(selection_score(values)[1])
        each = {**values.get("metrics", {}), **values["domains"]}
        row |= {f"{split}{ending}.{name}": finite(value) for name, value in each.items()}
    return row
