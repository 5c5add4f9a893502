"""How far the run in a folder is, read from what it has written so far."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.bench.config import read_file
from shoal.errors import InputError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@dataclass(frozen=True)
class RunStatus:
    """``state``: finished, diverged, running, or stopped."""

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
        run = config.get("run") or config.get("options") or {}
        if not isinstance(run, dict) or not isinstance(run.get("steps", 0), int):
            raise InputError(f"{str(folder / 'config.yaml')!r} is not the configuration of a run.")
        lines = _lines(folder / "metrics.jsonl")
        trained = [line for line in lines if line.get("phase") == "train"]
        record = _json(folder / "record.json")
        state = record["status"] if record else ("running" if in_use(folder) else "stopped")
        judged = [line for line in lines if "scores" in line]
        scores, rule = (judged[-1]["scores"] if judged else {}), "so far"
        if record and record["history"]:
            scores, rule = record["history"][record["selected"]]["scores"], record["rule"]
        checkpoints = sorted((folder / "checkpoints").glob("step-*.safetensors"))
        return cls(
            folder=str(folder),
            state=state,
            step=trained[-1]["step"] if trained else 0,
            steps=run.get("steps", 0),
            config=config,
            last=lines[-1] if lines else {},
            scores=scores,
            rule=rule,
            checkpoint=checkpoints[-1].name if checkpoints else "",
            error=record["error"] if record else "",
            seconds=record["seconds"] if record else (lines[-1].get("seconds", 0.0) if lines else 0.0),
        )

    @property
    def line(self) -> str:
        found = [f"{split} {_judged(s)}" for split, s in self.scores.items()]
        return ", ".join([f"{self.state}, step {self.step:,} of {self.steps:,}", *found])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _judged(scores: dict[str, Any]) -> str:
    """What selects, or else the average, with its name."""
    name = scores.get("selects") or scores["metric"]
    value = scores["metrics"][name] if scores.get("selects") else scores["average"]
    return f"{name} –" if value is None else f"{name} {value:.3f}"


def runs_in(folder: Path) -> list[Path]:
    """The folder itself if it is a run's, else those of the runs below it."""
    if (folder / "config.yaml").exists():
        return [folder]
    return sorted(path.parent for path in folder.rglob("config.yaml"))


def in_use(folder: Path) -> bool:
    """Whether a process holds the folder's lock."""
    path = folder / ".lock"
    if fcntl is None or not path.exists():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if lacks := {"status", "history", "selected", "rule", "error", "seconds"} - set(record):
            raise KeyError(*sorted(lacks))
        return dict(record)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{str(path)!r} is not a run record ({error}); move it away.") from error


def _lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines; the last may be half written by a run that goes on meanwhile."""
    found = []
    for text in path.read_bytes().splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            break
        if not isinstance(line, dict):
            break
        found.append(line)
    return found
