"""What came out of a run, and where such records are kept."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.bench.config import RunConfig, check_same_run, read_config
from shoal.errors import InputError, unknown_name
from shoal.files import write_atomically

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

    def score(self, split: str, *, last: bool = False) -> float:
        """The average over a split's examples, at the selected step or the last; NaN without measurements."""
        if not self.history:
            return float("nan")
        scores = self.history[-1 if last else self.selected]["scores"]
        if split not in scores:
            raise unknown_name("split", split, scores)
        return float(scores[split]["average"])

    def curve(self, split: str) -> tuple[list[int], list[float]]:
        """Passes and averages over the course of training."""
        points = [(m["passes"], m["scores"][split]["average"]) for m in self.history]
        return [p for p, _ in points], [s for _, s in points]

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "config": self.config.to_dict()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RunRecord:
        kept = {
            "history": tuple(content["history"]),
            "warm_up": tuple(content.get("warm_up", ())),
            "config": RunConfig.from_dict(content["config"]),
        }
        return cls(**{**content, **kept})


class Store:
    """A folder with one JSON file a record, named by the run's identity."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{str(folder)!r} is a file; records need a folder.")

    def path(self, config: RunConfig) -> Path:
        return self.folder / f"{config.identity}.json"

    def save(self, record: RunRecord) -> None:
        write_atomically(self.path(record.config), json.dumps(record.to_dict(), default=dict).encode())

    def find(self, config: RunConfig) -> RunRecord | None:
        path = self.path(config)
        return read_record(path) if path.exists() else None

    def missing(self, configs: Iterable[RunConfig]) -> list[RunConfig]:
        return [c for c in configs if not self.path(c).exists()]

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
            content = json.loads(path.read_text(encoding="utf-8"))
            configs = [RunConfig.from_dict(run) for run in content["runs"]]
            how = dict(content["how"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{str(path)!r} cannot be read ({error}).") from error
        begun = [self.workplace(c) / "config.yaml" for c in configs]
        return [read_config(p.parent) if p.exists() else c for p, c in zip(begun, configs, strict=True)], how


def read_record(path: Path) -> RunRecord:
    try:
        return RunRecord.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{str(path)!r} is not a run record ({error}); move it away.") from error
