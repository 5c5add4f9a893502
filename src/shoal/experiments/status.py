"""How far the run in a folder is, read from what it has written so far."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.errors import InputError
from shoal.experiments.config import read_config, read_file
from shoal.experiments.record import check_scores, judged, read_record
from shoal.files import open_regular, parse_json, read_bytes

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@dataclass(frozen=True)
class RunStatus:
    """``state``: finished, diverged, failed, running, or stopped."""

    folder: str
    state: str
    step: int
    steps: int
    config: dict[str, Any]
    last: dict[str, Any]
    """The newest line of the log."""
    scores: dict[str, Any]
    """By split: at the selected step of a finished run, else the newest."""
    rule: str
    checkpoint: str
    error: str
    seconds: float

    @classmethod
    def of(cls, folder: Path) -> RunStatus:
        config = read_file(folder)
        if "run" in config:
            config["run"] = read_config(folder).to_dict()
        run = config.get("run") or config.get("options") or {}
        sound = isinstance(run, dict) and _whole(run.get("steps", 0))
        git, where = config.get("git") or {}, config.get("environment") or {}
        sound &= isinstance(where, dict) and isinstance(git, dict) and isinstance(git.get("commit", ""), str)
        if not sound:
            raise InputError(f"{str(folder / 'config.yaml')!r} is not the configuration of a run.")
        lines = _lines(folder / "metrics.jsonl")
        trained = [
            line["step"] for line in lines if line.get("phase") == "train" and _whole(line.get("step"))
        ]
        record = _record(folder, "run" in config)
        state = record["status"] if record else ("running" if in_use(folder) else "stopped")
        measured = [line for line in lines if "scores" in line]
        scores, rule = (measured[-1]["scores"] if measured else {}), "so far"
        if record and record["history"]:
            scores, rule = record["history"][record["selected"]]["scores"], record["rule"]
            trained.append(record["history"][-1]["step"])
        checkpoint, step, seconds = _checkpoint(folder / "checkpoints")
        seconds = max([seconds, *(line.get("seconds") or 0.0 for line in lines[-1:])])
        seconds, error = record.get("seconds", seconds), record.get("error", "")
        steps, last = (max([*trained, step]), run.get("steps", 0)), lines[-1] if lines else {}
        return cls(str(folder), state, *steps, config, last, scores, rule, checkpoint, error, seconds)

    @property
    def line(self) -> str:
        found = [f"{split} {_judged(s)}" for split, s in self.scores.items()]
        return ", ".join([f"{self.state}, step {self.step:,} of {self.steps:,}", *found])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _judged(scores: dict[str, Any]) -> str:
    name, value = judged(scores)
    return f"{name} –" if value is None else f"{name} {value:.3f}"


def runs_in(folder: Path) -> list[Path]:
    """The folder itself if it is a run's, else those of the runs below it."""
    if (folder / "config.yaml").exists():
        return [folder]
    return sorted(path.parent for path in folder.rglob("config.yaml"))


def in_use(folder: Path) -> bool:
    """Whether a process holds the folder's lock."""
    try:
        with open_regular(folder / ".lock") as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, InputError):  # there is none
        pass
    return False


def _checkpoint(folder: Path) -> tuple[str, int, float]:
    """The newest checkpoint's name, and the training's step and seconds in it, from the head of the file.

    It is not loaded, which would need torch.
    """
    names = sorted(path.name for path in folder.glob("step-*.pt"))
    if not names:
        return "", 0, 0.0
    try:
        with open_regular(folder / names[-1]) as file, zipfile.ZipFile(file) as archive:
            found = parse_json(archive.read("archive/about.json"))
        step, seconds = found["step"], found["seconds"]
    except (OSError, ValueError, TypeError, LookupError, zipfile.BadZipFile):  # `resume` says what is wrong
        return names[-1], 0, 0.0
    sound = _whole(step) and isinstance(seconds, float)
    return names[-1], step if sound else 0, seconds if sound else 0.0


def _record(folder: Path, configured: bool) -> Mapping[str, Any]:
    """What came out, if the run has ended; one of another run than config.yaml's is refused."""
    path = folder / "record.json"
    if not path.exists():
        return {}
    return read_record(path, read_config(folder) if configured else None).to_dict()


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines up to one that is not a line of a log: the last may be half written just now."""
    found = []
    try:
        content = read_bytes(path, None)
    except (OSError, InputError):  # the state of a run does not hang on its log
        return []
    for text in content.splitlines():
        try:
            line = parse_json(text)
            if not isinstance(line, dict) or not _whole(line.get("step", 0)):
                break
            if "scores" in line:
                check_scores(line["scores"])
            if not isinstance(line.get("seconds", 0.0), int | float):
                break
        except ValueError:
            break
        found.append(line)
    return found
