"""What a verdict is, and how checks are counted."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from shoal.paper.evidence.records import Kept, Records

AGREES, PARTLY, DISAGREES, NOT_JUDGED, NOT_RUN = "agrees", "partly", "disagrees", "not judged", "not run"
VERDICTS = (AGREES, PARTLY, DISAGREES, NOT_JUDGED, NOT_RUN)
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


@dataclass(frozen=True)
class Judged:
    verdict: str
    ours: str = "–"
    seeds: str = "–"
    reason: str = ""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    used: Sequence[Kept] = ()
    lacks: Sequence[str] = ()
    """What there is no record of."""
    planned: int = 0
    """Runs that there should be; 0 where that is not known."""
    data: Any = None
    """What a picture is drawn from."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "ours": self.ours,
            "seeds": self.seeds,
            "reason": self.reason,
            "table": {"columns": list(self.columns), "rows": [list(r) for r in self.rows]},
            "records": [str(k.path) for k in self.used],
            "lacks": list(self.lacks),
            "planned": self.planned,
        }


Options = Mapping[str, Any]
Judge = Callable[[Records, Options], Judged]


def verdict(checks: Sequence[Check]) -> str:
    known = [c.holds for c in checks if c.holds is not None]
    if not known:
        return NOT_RUN
    if all(known):
        return AGREES if len(known) == len(checks) else PARTLY
    return PARTLY if any(known) else DISAGREES


def reason(checks: Sequence[Check]) -> str:
    """Which hold, which do not, and which are missing, in words."""
    parts = {
        "Holds": [c.what for c in checks if c.holds],
        "Does not hold": [c.what for c in checks if c.holds is False],
        "No record": [c.what for c in checks if c.holds is None],
    }
    shown = [f"{word}: {'; '.join(what)}." for word, what in parts.items() if what]
    if len({c.holds for c in checks}) == 1:
        return {True: "All of it holds.", False: "None of it holds.", None: ""}[checks[0].holds]
    return " ".join(shown)


def judged(checks: Sequence[Check], **given: Any) -> Judged:
    lacks = [c.what for c in checks if c.holds is None]
    return Judged(verdict(checks), reason=reason(checks), lacks=lacks, **given)


def unjudged(found: Judged, why: str) -> Judged:
    """The same, shown only."""
    if found.verdict == NOT_RUN:
        return found
    if found.columns and found.columns[-1] == HOLDS:
        found = replace(found, columns=found.columns[:-1], rows=[row[:-1] for row in found.rows])
    return replace(found, verdict=NOT_JUDGED, reason=why)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Mean ± standard deviation; the mean alone of one value."""
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def sign(holds: bool | None) -> str:
    return "–" if holds is None else "yes" if holds else "no"


def span(numbers: Iterable[int]) -> str:
    every = sorted(set(numbers))
    if not every:
        return "–"
    return str(every[0]) if len(every) == 1 else f"{every[0]} to {every[-1]}"
