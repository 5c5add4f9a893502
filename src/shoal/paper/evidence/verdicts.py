"""What a verdict is, how checks are counted, and by how much a number may differ.

A claim is a list of checks. Those that carry it are *decisive*. A *premise* is what the claim takes for
granted, or what nobody doubts: that ERM fits its training data, that five domains are too few for any method.
The verdict is

- *agrees* if every check holds, premises included, and none lacks its record;
- *disagrees* if no decisive check holds, whatever the premises do;
- *partly* otherwise: some decisive check holds, and another check does not or has no record;
- *not run* if there is no record for any decisive check.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from shoal.paper.evidence.records import Kept

TOLERANCE = 2.0
"""Points of accuracy by which a mean may differ from a printed number and still agree with it.

On a scale that ends at 1 (a correlation, a cosine) it is a hundredth of that; where the paper prints a larger
±, it is that. The spread of our own seeds does not widen it, or runs that scatter would agree with anything.
Bounds ("over 90 %") are taken as they are printed."""
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
    premise: bool = False
    """Whether it is only a premise, and not what the claim is about (see the module)."""


RELATIONS: Mapping[str, tuple[str, Callable[[float, float], bool]]] = {
    "about": ("≈", lambda ours, value: abs(ours - value) <= TOLERANCE),
    "at least": ("≥", lambda ours, value: ours >= value),
    "below": ("<", lambda ours, value: ours < value),
}
"""How a claim compares an accuracy in percent with a number: its sign, and when it holds."""


def compared(name: str, values: Sequence[float], diverged: int, asked: Mapping[str, Any]) -> list[Check]:
    """The checks of one number: our mean over seeds in the relation that is asked for.

    A run that diverged has no score. It is a premise that none did, so that the rest cannot agree without it.
    """
    premise = bool(asked.get("premise"))
    holds = None if not diverged else False  # where nothing came of any run, the number was not reached
    if values:
        holds = RELATIONS[asked["relation"]][1](statistics.fmean(values), asked["value"])
    lost = [Check(f"{name}: {diverged} diverged", False, premise=True)] if diverged else []
    return [Check(name, holds, premise), *lost]


def together(what: str, checks: Sequence[Check], premise: bool = False) -> Check:
    """One check of several that stand or fall together, such as "regardless of N" or "with every seed"."""
    each = [c.holds for c in checks]
    if False in each:
        lacking = f", {each.count(None)} without a record" if None in each else ""
        of = f" ({each.count(True)} of {len(each) - each.count(None)}{lacking})" if each[1:] else ""
        return Check(what + of, False, premise)
    return Check(what, None if None in each or not each else True, premise)


def verdict(checks: Sequence[Check]) -> str:
    """By the checks that carry the claim; see the module for what each word means."""
    decisive = [c.holds for c in checks if not c.premise and c.holds is not None]
    if not decisive:
        return NOT_RUN
    if not any(decisive):
        return DISAGREES
    return AGREES if all(c.holds for c in checks) else PARTLY


def reason(checks: Sequence[Check]) -> str:
    """Which hold, which do not, and which have no record, in words; premises after what carries the claim."""
    if len({c.holds for c in checks}) == 1 and (checks[0].holds is not False or len(checks) > 1):
        return {True: "All of it holds.", False: "None of it holds.", None: ""}[checks[0].holds]
    words = {
        (True, False): "Holds",
        (False, False): "Does not hold",
        (None, False): "No record",
        (True, True): "Premises that hold",
        (False, True): "Premises that do not",
        (None, True): "Premises without a record",
    }
    parts = []
    for key, word in words.items():
        if names := [c.what for c in checks if (c.holds, c.premise) == key]:
            parts.append(f"{word}: {_listed(names)}.")
    return " ".join(parts)


def _listed(names: Iterable[str]) -> str:
    """Names that differ in N alone together."""
    groups: dict[str, list[str]] = {}
    for name in names:
        start, between, number = name.rpartition(", N = ")
        key, own = (start + between, [number]) if number.isdecimal() else (name, [])
        groups.setdefault(key, []).extend(own)
    return "; ".join(f"{key}{', '.join(numbers)}" for key, numbers in groups.items())


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


def sign(check: Check) -> str:
    word = "–" if check.holds is None else "yes" if check.holds else "no"
    return f"{word} (premise)" if check.premise else word


def span(numbers: Iterable[int]) -> str:
    every = sorted(set(numbers))
    if not every:
        return "–"
    return str(every[0]) if len(every) == 1 else f"{every[0]} to {every[-1]}"
