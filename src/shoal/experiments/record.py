"""What came out of a run, and where such records are kept."""

from __future__ import annotations

import contextlib
import html
import json
import math
import os
import re
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import InputError, check_names, unknown_name
from shoal.experiments.config import RunConfig, check_how, check_same_run, differences, read_config
from shoal.files import parse_json, read_bytes, read_json, write_atomically

Measurement = dict[str, Any]
"""One evaluation: ``step``, ``passes``, ``loss``, and ``scores`` by split (see :class:`Scores.to_dict`)."""


@dataclass(frozen=True)
class RunRecord:
    """A run's configuration and everything measured. Plain data: tables and plots need nothing else."""

    config: RunConfig
    status: str
    """``finished``, or ``diverged`` where the loss was no longer finite (then ``error`` says more)."""
    history: tuple[Measurement, ...]
    selected: int
    """The index in ``history`` that ``rule`` chose; −1 where there is none."""
    rule: str
    seconds: float
    environment: Mapping[str, str]
    error: str = ""
    warm_up: tuple[Measurement, ...] = ()
    skipped: int = 0
    """Steps that were not finite and were left out."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """What a reader of the scores of a split must know."""
    agreement: tuple[Mapping[str, Any], ...] = ()
    """How well gradients agreed along the way, if that was tracked (see :mod:`shoal.training.agreement`)."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Checksums (SHA-256) of the model's files beside the record."""

    @property
    def chosen(self) -> Mapping[str, Any]:
        """Scores by split at the selected step, which the weights are of; nothing without measurements."""
        scores: Mapping[str, Any] = self.history[self.selected]["scores"] if self.history else {}
        return scores

    @property
    def headline(self) -> tuple[str, float | None] | None:
        """What a table shows of the run: the name and value of its result in the held-out domain."""
        return judged(self.chosen["test"]) if "test" in self.chosen else None

    def score(self, split: str, *, last: bool = False) -> float:
        """The average over a split's examples, at the selected step or the last; NaN without measurements."""
        if not self.history:
            return float("nan")
        scores = self.history[-1 if last else self.selected]["scores"]
        if split not in scores:
            raise unknown_name("split", split, scores)
        return float(scores[split]["average"])

    def measure(self, split: str, name: str, *, last: bool = False) -> float | None:
        """What a metric made of a split, at the selected step or the last; ``None`` where it made nothing."""
        if not self.history:
            return None
        scores = self.history[-1 if last else self.selected]["scores"]
        if split not in scores:
            raise unknown_name("split", split, scores)
        found = {scores[split]["metric"]: scores[split]["average"], **scores[split].get("metrics", {})}
        if name not in found:
            raise unknown_name("measure", name, found)
        return _finite(found[name])

    def curve(self, split: str) -> tuple[list[int], list[float]]:
        """Passes and averages over the course of training."""
        points = [(m["passes"], m["scores"][split]["average"]) for m in self.history]
        return [p for p, _ in points], [s for _, s in points]

    def _repr_html_(self) -> str:
        """For notebooks: the scores at the selected step, of a split's first domains."""
        config = self.config
        title = f"{config.name} on {config.dataset}, seed {config.seed}: {self.status}"
        rows = [("split", "domain", "metric", "score")]
        for split, found in self.chosen.items():
            names, metric = list(found["domains"].items()), str(found["metric"])
            shown = [("all", found["average"]), *names[:10]]
            rows += [(split, n, metric, "–" if _finite(v) is None else f"{v:.4g}") for n, v in shown]
            rows += [(split, f"… {len(names) - 10:,} more", "", "")] * (len(names) > 10)
        cells = ["".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows]
        head, *body = [f"<tr>{row}</tr>" for row in cells]
        head = head.replace("<td>", "<th>").replace("</td>", "</th>")
        words = html.escape(f"{title}. {self.rule}. {self.error}".rstrip(" ."))
        return f"<table><caption>{words}</caption><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "config": self.config.to_dict()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RunRecord:
        """A record as :meth:`to_dict` gives it; InputError names the field that is not as it must be."""
        content = check_record(content)
        if "options" in _mapping("config", content.get("config")):
            raise InputError("it was made by shoal.fit, without a run configuration")
        lists = {k: tuple(content.get(k, ())) for k in ("history", "warm_up", "agreement")}
        return cls(**{**content, **lists, "config": RunConfig.from_dict(content["config"])})


_KINDS: Mapping[str, Any] = {
    "status": str,
    "history": list | tuple,
    "selected": int,
    "rule": str,
    "seconds": int | float,
    "environment": Mapping,
    "error": str,
    "warm_up": list | tuple,
    "skipped": int,
    "notes": Mapping,
    "agreement": list | tuple,
    "files": Mapping,
}
_NEEDED = ("status", "history", "selected", "rule", "seconds", "environment")


def check_record(content: Any) -> Mapping[str, Any]:
    """``content`` if it is a run's record, whatever its configuration; else an InputError names the field."""
    content = _mapping("a record", content)
    check_names("field of a record:", content, ("config", *_KINDS))
    for name, kind in _KINDS.items():
        if name in content or name in _NEEDED:
            value = content.get(name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise _wrong(name, value)
    _numbers("record", content, "selected", "skipped", "seconds")
    for what, kinds in (("environment", str), ("notes", str), ("files", str)):
        for value in content.get(what, {}).values():
            if not isinstance(value, kinds):
                raise _wrong(what, value)
    for point in (*content["history"], *content.get("warm_up", ())):
        _numbers("measurement", point, "loss", always=("step", "passes"))
        check_scores(point.get("scores"))
    count, selected = len(content["history"]), content["selected"]
    if count and not -1 <= selected < count:
        raise InputError(f"selected is {selected}, of {count} measurements")
    if count == 0 and content["status"] == "finished":
        raise InputError("it is finished and has no measurements")
    for found in content.get("agreement", ()):
        _check_agreement(found)
    return content


def check_scores(content: Any) -> None:
    """Refuses what is not scores by split."""
    for split, scores in _mapping("scores", content).items():
        _check_split(f"score of {split!r}", _mapping("scores", scores))


def _check_split(what: str, scores: Mapping[str, Any]) -> None:
    _numbers(what, scores, "mean", "loss", "average")
    _numbers("domains", scores.get("domains"))
    measures = scores.get("metrics") or {}
    _numbers("metrics", measures)
    for name, values in _mapping("by_domain", scores.get("by_domain") or {}).items():
        _numbers(str(name), values)
    if not isinstance(scores.get("metric"), str):
        raise _wrong("metric", scores.get("metric"))
    if "average" not in scores:
        raise _wrong("average", None)
    selects = scores.get("selects")
    if selects is not None and not (isinstance(selects, str) and selects in measures):
        raise _wrong("selects", selects)
    sizes = scores.get("sizes") or []
    if not isinstance(sizes, list | tuple):
        raise _wrong("sizes", sizes)
    _numbers("sizes", dict(enumerate(sizes)), always=range(len(sizes)))


def _check_agreement(found: Any) -> None:
    _numbers("agreement", found, "mean_cosine", "mean_inner_product", "sign_agreement", always=("step",))
    _numbers("layers", found.get("layers") or {})
    matrix = found.get("matrix") or ()
    names = (matrix if isinstance(matrix, Mapping) else found).get("domains") or ()
    rows = (matrix.get("values") or ()) if isinstance(matrix, Mapping) else matrix
    for what, value in (("domains", names), ("matrix", rows), *(("matrix", row) for row in rows or ())):
        if not isinstance(value, list | tuple):
            raise _wrong(what, value)
    for row in rows:
        _numbers("matrix", dict(enumerate(row)))


def _wrong(what: str, value: Any) -> InputError:
    text = repr(value)
    return InputError(f"{what} is {text if len(text) <= 40 else text[:39] + '…'}")


def _mapping(what: str, content: Any) -> Mapping[str, Any]:
    if not isinstance(content, Mapping):
        raise _wrong(what, content)
    return content


def _numbers(what: str, content: Any, *names: str, always: Iterable[Any] = ()) -> None:
    """Checks that those of these names that there are (without names: all) are numbers or ``None``.

    Those in ``always`` are there, and whole numbers.
    """
    found, always = _mapping(what, content), list(always)
    for name in names or found:
        value = found.get(name)
        if not (value is None or type(value) is float or (type(value) is int and abs(value) < 2**63)):
            raise InputError(f"{_wrong(str(name), value)}, no number, in {what}")
    for name in always:
        value = found.get(name)
        if type(value) is not int or not 0 <= value < 2**63:
            raise InputError(f"{_wrong(str(name), value)}, no whole number, in {what}")


def judged(scores: Mapping[str, Any]) -> tuple[str, float | None]:
    """What a split is judged by and how well: the average, unless the training was to select by another."""
    if name := scores.get("selects"):
        return str(name), scores["metrics"][name]
    return str(scores["metric"]), scores["average"]


class Store:
    """A folder with one JSON file a record, named by the run's identity."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{str(folder)!r} is a file; records need a folder.")
        self._read: dict[Path, tuple[Stamp, RunRecord]] = {}

    def path(self, config: RunConfig) -> Path:
        return self.folder / f"{config.identity}.json"

    def save(self, record: RunRecord) -> None:
        write_atomically(self.path(record.config), json.dumps(record.to_dict(), default=dict).encode())

    def find(self, config: RunConfig) -> RunRecord | None:
        """Its record, if there is one; one of another run in its place is refused."""
        path = self.path(config)
        try:
            state = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise InputError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
        stamp = Stamp(state.st_size, state.st_mtime_ns, state.st_ino)
        if self._read.get(path, (None,))[0] != stamp:
            self._read[path] = stamp, read_record(path, config)
        return self._read[path][1]

    def missing(self, configs: Iterable[RunConfig]) -> list[RunConfig]:
        """Those without a record; one that is there and cannot be used is said now, not after the work."""
        return [c for c in configs if self.find(c) is None]

    def found(self, configs: Iterable[RunConfig]) -> list[RunRecord]:
        """The records there are of these configurations, under the labels they have here."""
        pairs = ((config, self.find(config)) for config in configs)
        return [replace(record, config=config) for config, record in pairs if record is not None]

    def all(self) -> list[RunRecord]:
        return [read_record(p) for p in sorted(self.folder.glob("*.json"))]

    def workplace(self, config: RunConfig) -> Path | None:
        """The folder in which a run keeps its log and checkpoints; ``None``: only the record is kept."""
        return None


PLAN = "seeds.json"


class RunFolders(Store):
    """One folder a run, with its record in it; for runs that differ in their seed alone."""

    def path(self, config: RunConfig) -> Path:
        return self.workplace(config) / "record.json"

    def workplace(self, config: RunConfig) -> Path:
        return self.folder / f"seed-{config.seed}"

    def missing(self, configs: Iterable[RunConfig]) -> list[RunConfig]:
        configs = list(configs)
        for config in configs:
            check_same_run(self.workplace(config), config)
        return super().missing(configs)

    def save(self, record: RunRecord) -> None:
        """The run itself has written it, with its weights."""

    def plan(self, configs: Iterable[RunConfig], how: Mapping[str, Any]) -> None:
        """Writes down all that is to be run here, also what comes last; refuses other runs than before."""
        configs = list(configs)
        self.missing(configs)
        content = {"runs": [c.to_dict() for c in configs], "how": dict(how)}
        write_atomically(self.folder / PLAN, json.dumps(content, default=dict).encode())

    def forget_plan(self) -> None:
        """Unless some run of it has begun."""
        if not any(self.folder.glob("seed-*/config.yaml")):
            (self.folder / PLAN).unlink(missing_ok=True)

    def planned(self) -> tuple[list[RunConfig], dict[str, Any]] | None:
        """What :meth:`plan` wrote, each run as it was begun; ``None`` where there is no plan."""
        path = self.folder / PLAN
        if not path.exists():
            return None
        try:
            content = _mapping("a plan", read_json(path))
            configs = [RunConfig.from_dict(run) for run in content["runs"]]
            how = check_how(content["how"])
        except OSError as error:
            raise InputError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{str(path)!r} is not the plan of several seeds ({_first(error)}).") from error
        begun = [self.workplace(c) / "config.yaml" for c in configs]
        return [read_config(p.parent) if p.exists() else c for p, c in zip(begun, configs, strict=True)], how


def read_record(path: Path, config: RunConfig | None = None) -> RunRecord:
    """The record in a file; with ``config`` one of another run is refused."""
    try:
        record = RunRecord.from_dict(read_json(path))
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise InputError(f"{str(path)!r} is not a run record ({_first(error)}); move it away.") from error
    if config is not None and record.config.identity != config.identity:
        changes = differences(record.config, config)
        raise InputError(f"{str(path)!r} is the record of another run ({changes}); move it away.")
    return record


Row = dict[str, Any]
"""A run as a line of a table: values by the names of columns, without those it lacks."""

SHORT = {"data_options": "data", "model_options": "model", "optimizer_options": "optimizer"}
"""How columns call the options in a configuration: ``data.test`` and so on."""


def row_of(record: RunRecord) -> Row:
    """All that tables need of a record. A run that diverged has no scores, as in a comparison."""
    config, row = record.config, Row()
    for name, value in vars(config).items():
        if isinstance(value, Mapping):
            row |= {f"{SHORT.get(name, name)}.{key}": content for key, content in value.items()}
        else:
            row[name] = value
    del row["label"]
    row["selects"] = row.pop("metric")
    row |= {
        "identity": config.identity,
        "name": config.name,
        "lr": row.pop("optimizer.lr", None),
        "status": record.status,
        "rule": record.rule,
        "seconds": record.seconds,
        "skipped": record.skipped,
        "device": record.environment.get("device"),
        "error": record.error or None,
        "left_out": _left_out(record),
    }
    if record.history:
        scores = record.history[-1]["scores"]
        if scores:
            shown = scores["test" if "test" in scores else next(iter(scores))]
            row |= {"metric": str(shown["metric"]), "selects": shown.get("selects", row["selects"])}
        row["step"] = record.history[record.selected]["step"]
        if record.status == "finished":
            row |= _scores(record.history[record.selected], "") | _scores(record.history[-1], "_last")
    return {name: value for name, value in row.items() if value is not None}


def _left_out(record: RunRecord) -> str | None:
    """The domains that were asked for, else those of the test split if they are few."""
    config = record.config
    asked = config.data_options.get("test", config.protocol.get("leave_out"))
    if asked is None and record.history:
        names = list(record.history[-1]["scores"].get("test", {}).get("domains", ()))
        asked = names if 0 < len(names) <= 3 else None
    if asked is None:
        return None
    return ", ".join(map(str, asked)) if isinstance(asked, list | tuple) else str(asked)


def _scores(measured: Measurement, ending: str) -> Row:
    """``test``, ``test.DOMAIN`` and ``test.MEASURE`` for every split; what is not finite is missing."""
    row: Row = {}
    for split, found in measured["scores"].items():
        row[split + ending] = _finite(found["average"])
        each = {**(found.get("metrics") or {}), **found["domains"]}
        row |= {f"{split}{ending}.{name}": _finite(score) for name, score in each.items()}
    return row


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _read_row(path: Path) -> Row:
    return row_of(RunRecord.from_dict(read_json(path)))


def _first(error: Exception) -> str:
    """The start of what an error says."""
    text = " ".join(str(error).split())
    return (text if len(text) <= 100 else text[:99] + "…").rstrip(".")


class Stamp(NamedTuple):
    """What changes whenever a record is written anew."""

    size: int
    modified: int
    inode: int


_NAMES = re.compile(r"record\.json|[0-9a-f]{16}\.json")


def record_files(folder: Path) -> dict[str, Stamp]:
    """The records in a folder and below, by their paths from there: those of stores and of run folders."""
    found: dict[str, Stamp] = {}
    seen: set[tuple[int, int]] = set()
    waiting = [""]
    while waiting:
        below = waiting.pop()
        try:
            at = os.stat(folder / below)
            if (at.st_dev, at.st_ino) in seen:  # a link that leads back
                continue
            seen.add((at.st_dev, at.st_ino))
            with os.scandir(folder / below) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if _NAMES.fullmatch(entry.name):
                        with contextlib.suppress(FileNotFoundError):
                            state = entry.stat()
                            stamp = Stamp(state.st_size, state.st_mtime_ns, state.st_ino)
                            found[f"{below}{entry.name}"] = stamp
                    elif entry.is_dir():
                        waiting.append(f"{below}{entry.name}/")
        except OSError:
            if not below:
                raise
    return found


class Entry(NamedTuple):
    stamp: Stamp
    row: Row


INDEX = ".results-index"
INDEX_FROM = 100
"""Fewer records are read as fast without an index."""
_FORMAT = [1, *(f.name for f in fields(RunConfig)), *(f.name for f in fields(RunRecord)), *_KINDS]
"""An index that another version of these has written is made anew: it may hold what is now refused."""


class Index:
    """The rows of all records in a folder and below, kept in one file so that each record is read once.

    The records are the truth. A row counts only while its record has the size, time and inode it was made
    from, and an index that cannot be read, or not be written, is done without. It is replaced as a whole: of
    two processes that do so the last wins, and what its index lacks is read again.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.path = self.folder / INDEX

    def read(self) -> tuple[dict[str, Entry], dict[str, str]]:
        """Entries by path, and the files that are no records, each with what is wrong."""
        files, known = record_files(self.folder), self._kept()
        entries: dict[str, Entry] = {}
        broken: dict[str, str] = {}
        anew = 0
        for path in sorted(files):
            kept = known.get(path)
            if kept is not None and kept.stamp == files[path]:
                entries[path] = kept
                continue
            try:
                entries[path] = Entry(files[path], _read_row(self.folder / path))
                anew += 1
            except FileNotFoundError:
                continue
            except ValueError as error:
                broken[path] = f"{path!r} is not a run record ({_first(error)})."
            except OSError as error:
                broken[path] = f"{path!r} cannot be read: {error.strerror}."
        if (anew or len(known) != len(entries)) and len(entries) >= INDEX_FROM:
            self._keep(entries)
        return entries, broken

    def _kept(self) -> dict[str, Entry]:
        try:
            check, _, body = read_bytes(self.path).partition(b"\n")
            if int(check, 16) != zlib.crc32(body):
                return {}
            content = parse_json(body)
            if content["format"] != _FORMAT:
                return {}
            shapes = content["shapes"]
            return {
                path: Entry(Stamp(*stamp), dict(zip(shapes[shape], values, strict=True)))
                for path, stamp, shape, values in content["records"]
            }
        except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
            return {}

    def _keep(self, entries: Mapping[str, Entry]) -> None:
        """Columns are named once for all rows that have the same."""
        shapes: dict[tuple[str, ...], int] = {}
        records = [
            (path, stamp, shapes.setdefault(tuple(row), len(shapes)), list(row.values()))
            for path, (stamp, row) in entries.items()
        ]
        content = {"format": _FORMAT, "shapes": list(shapes), "records": records}
        body = json.dumps(content, separators=(",", ":")).encode()
        with contextlib.suppress(OSError):
            write_atomically(self.path, b"%08x\n" % zlib.crc32(body) + body)
            self._tidy()

    def _tidy(self) -> None:
        """Removes what writers that were killed have left behind."""
        for path in self.folder.glob(f".{INDEX}.*"):
            if path.stat().st_mtime < time.time() - 3600:
                path.unlink(missing_ok=True)
