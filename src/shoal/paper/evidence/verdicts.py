"""What a verdict is, and how checks are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shoal.paper.evidence.records import Kept

VERDICTS = ("agrees", "partly", "disagrees", "not judged", "not run")
AGREES, PARTLY, DISAGREES, NOT_JUDGED, NOT_RUN = VERDICTS
HOLDS = "holds"
"""The last column of a table that says so of every row."""


@dataclass(frozen=True)
class Claim:
    """What the paper says somewhere, and how it is judged; as in ``claims.yaml``."""

    id: str
    title: str
    section: str
    words: str
    paper: str
    needs: str
    judge: str
    rule: str
    options: Mapping[str, Any] = field(default_factory=dict)
    plot: str = ""
    ours: bool = False
    """Whether it is a control of ours, not the paper's."""


class Check(NamedTuple):
    """One thing that a claim says; ``holds`` is ``None`` where there is no record to tell."""

    what: str
    holds: bool | None


RELATIONS: Mapping[str, tuple[str, Callable[[float, Mapping[str, Any]], bool]]] = {
    "about": ("≈", lambda value, check: abs(value - check["value"]) <= check["within"]),
    "at least": ("≥", lambda value, check: value >= check["value"]),
    "at most": ("≤", lambda value, check: value <= check["value"]),
    "below": ("<", lambda value, check: value < check["value"]),
}
"""How a claim compares what was measured with a number: its sign, and when it holds."""


def verdict(checks: Sequence[Check]) -> str:
    known = [c.holds for c in checks if c.holds is not None]
    if not known:
        return NOT_RUN
    if all(known):
        return AGREES if len(known) == len(checks) else PARTLY
    return PARTLY if any(known) else DISAGREES


def reason(checks: Sequence[Check]) -> str:
    """Which hold, which do not, and which are missing, in words."""
    if len({c.holds for c in checks}) == 1:
        return {True: "All of it holds.", False: "None of it holds.", None: ""}[checks[0].holds]
    words = {True: "Holds", False: "Does not hold", None: "No record"}
    parts = {word: [c.what for c in checks if c.holds is holds] for holds, word in words.items()}
    return " ".join(f"{word}: {'; '.join(what)}." for word, what in parts.items() if what)


@dataclass
class Judged:
    """What records say of a claim."""

    checks: Sequence[Check] = ()
    ours: str = "–"
    seeds: str = "–"
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    used: Sequence[Kept] = ()
    planned: int = 0
    """Runs that there should be; 0 where that is not known."""
    data: Any = None
    """What a figure is drawn from."""
    unusual: str = ""
    """Why it is shown only."""
    obstacle: str = ""
    """Why there are no records, or not all."""

    def __post_init__(self) -> None:
        self.ours = self.ours or "–"
        if self.unusual and self.columns and self.columns[-1] == HOLDS:
            self.columns, self.rows = self.columns[:-1], [row[:-1] for row in self.rows]

    @property
    def verdict(self) -> str:
        counted = verdict(self.checks)
        return NOT_JUDGED if self.unusual and counted != NOT_RUN else counted

    @property
    def lacks(self) -> list[str]:
        """What there is no record of."""
        return [c.what for c in self.checks if c.holds is None]

    @property
    def reason(self) -> str:
        shown = self.unusual if self.verdict == NOT_JUDGED or not self.checks else reason(self.checks)
        if self.verdict != NOT_RUN and not self.lacks:
            return shown
        return " ".join(text for text in (shown, self.obstacle) if text) or "There is no record."

    def to_dict(self) -> dict[str, Any]:
        names = ("verdict", "ours", "seeds", "reason", "lacks", "planned")
        table = {"columns": list(self.columns), "rows": [list(r) for r in self.rows]}
        own = {name: getattr(self, name) for name in names}
        return {**own, "table": table, "records": [str(k.path) for k in self.used]}


def sign(holds: bool | None) -> str:
    return "–" if holds is None else "yes" if holds else "no"


def span(numbers: Iterable[int]) -> str:
    every = sorted(set(numbers))
    if not every:
        return "–"
    return str(every[0]) if len(every) == 1 else f"{every[0]} to {every[-1]}"
