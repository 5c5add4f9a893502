"""The paper's claims and what records say of them, as one page of HTML, as Markdown and as a table."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import shoal
from shoal.paper.evidence.records import Kept
from shoal.paper.evidence.verdicts import NOT_RUN, VERDICTS, Claim, Judged
from shoal.paper.views.figures import PICTURES
from shoal.report.page import Drawn, filled, need_report
from shoal.report.tables import Table, clean

MARKS = dict(zip(VERDICTS, "✓◐✗·–", strict=True))
"""Beside the word, so that a verdict does not hang on its colour."""
LONGEST = 60
"""Characters of a cell on a terminal."""


@dataclass(frozen=True)
class Item:
    """A claim, what was found, and what to type for more records."""

    claim: Claim
    judged: Judged
    command: str

    @property
    def records(self) -> str:
        """How many records there are, from when and where."""
        judged = self.judged
        made = about(judged.used)
        there = len({kept.path for kept in judged.used})
        if not (judged.planned and made):
            return made
        return f"{min(there, judged.planned)} of {judged.planned} runs are available; {made}"

    @property
    def rows(self) -> Sequence[Sequence[str]]:
        """A table of nothing but what is missing is left out."""
        return self.judged.rows if self.judged.used else ()

    def to_dict(self) -> dict[str, Any]:
        claim = {k: v for k, v in vars(self.claim).items() if k not in ("options", "plot")}
        return {**claim, **self.judged.to_dict(), "command": self.command, "made": about(self.judged.used)}


@dataclass(frozen=True)
class Content:
    items: Sequence[Item]
    made: str = ""
    sources: Sequence[str] = ()
    notes: Sequence[str] = ()
    """What could not be read, failed or was stopped."""


def counted(items: Iterable[Item]) -> dict[str, int]:
    every = [item.judged.verdict for item in items]
    return {word: n for word in VERDICTS if (n := every.count(word))}


def about(used: Sequence[Kept]) -> str:
    """How many records, from when, on which devices and with which versions."""
    if not used:
        return ""
    every = {kept.path: kept for kept in used}.values()
    days = sorted({time.strftime("%Y-%m-%d", time.gmtime(kept.written)) for kept in every})
    first = f"{len(every):,} file{'s' * (len(every) != 1)} of {days[0]}"
    parts = [first + (f" to {days[-1]}" if days[1:] else "")]
    surroundings = [_environment(kept.content) for kept in every]
    for name, word in (("device", "on"), ("shoal", "shoal"), ("torch", "torch")):
        values = sorted({str(e[name]) for e in surroundings if e.get(name)})
        parts += [f"{word} {' and '.join(values)}"] * bool(values)
    return ", ".join(parts)


def _environment(content: Any) -> Mapping[str, Any]:
    mapping = content if isinstance(content, Mapping) else getattr(content, "__dict__", {})
    environment = mapping.get("environment")
    return environment if isinstance(environment, Mapping) else {}


def summary(items: Iterable[Item]) -> Table:
    """One row per claim."""
    table = Table(["claim", "the paper", "ours", "seeds", "verdict", "where"])
    for item in items:
        name = f"{item.claim.title} (ours)" if item.claim.ours else item.claim.title
        table.add(name, *_cells(item), item.claim.section)
    return table


def terminal(items: Iterable[Item]) -> Table:
    """What fits beside each other."""
    table = Table(["claim", "the paper", "ours", "seeds", "verdict"])
    for item in items:
        cells = (item.claim.id, *_cells(item))
        table.add(*(_cut(c, LONGEST if n == 2 else LONGEST // 2) for n, c in enumerate(cells)))
    return table


def _cells(item: Item) -> tuple[str, ...]:
    judged = item.judged
    return item.claim.paper, judged.ours, judged.seeds, f"{MARKS[judged.verdict]} {judged.verdict}"


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def markdown(content: Content) -> str:
    parts = [
        "# The paper's claims, checked",
        f"{summed_up(content.items)} Created {content.made} with shoal {shoal.__version__}.",
        summary(content.items).markdown(),
    ]
    for item in content.items:
        claim, judged = item.claim, item.judged
        rows = {
            ("What it is" if claim.ours else "The paper"): f"{claim.words} ({claim.section})",
            "How it is judged": claim.rule,
            "Verdict": f"{judged.verdict}. {judged.reason}",
            "Records": item.records or "none",
        }
        parts.append(f"## {_escaped(f'{claim.title}: {judged.verdict}')}")
        parts += [f"{k}: {_escaped(v)}" for k, v in rows.items()]
        parts.append(f"    {clean(item.command)}")
        if item.rows:
            table = Table(judged.columns)
            for row in item.rows:
                table.add(*row)
            parts.append(table.markdown())
    parts += ["## Notes", *(f"- {_escaped(note)}" for note in content.notes)] if content.notes else []
    return "\n\n".join(parts) + "\n"


def _escaped(text: str) -> str:
    """Text in Markdown, whatever is in it."""
    return Table([text]).markdown().splitlines()[0].removeprefix("| ").removesuffix(" |")


def summed_up(items: Sequence[Item]) -> str:
    """How many claims have which verdict."""
    many = ", ".join(f"{word} {n}" for word, n in counted(items).items())
    return f"Of {len(items)} claims: {many}."


def render(content: Content) -> str:
    """The page; it needs no other file."""
    need_report()
    values = {
        "title": "The paper's claims, checked",
        "version": shoal.__version__,
        "made": content.made,
        "sources": [clean(s) for s in content.sources],
        "counts": [(word, n, MARKS[word]) for word, n in counted(content.items).items()],
        "items": [_values(item, f"e{n}") for n, item in enumerate(content.items)],
        "notes": [clean(note) for note in content.notes],
    }
    return filled("evidence.html", values)


def _values(item: Item, name: str) -> dict[str, Any]:
    claim, judged, draw = item.claim, item.judged, Drawn(name)
    texts = {k: v for k, v in vars(claim).items() if isinstance(v, str)} | {
        "verdict": judged.verdict,
        "mark": MARKS[judged.verdict],
        "kind": judged.verdict.replace(" ", "-"),
        "measured": judged.ours,
        "seeds": judged.seeds,
        "reason": judged.reason,
        "why": _cut(judged.reason, LONGEST + 20) if judged.verdict == NOT_RUN else "",
        "records": item.records,
        "command": item.command,
    }
    pictures = PICTURES[claim.plot](judged.data) if claim.plot and judged.data else []
    return {k: clean(v) for k, v in texts.items()} | {
        "is_ours": claim.ours,
        "columns": [clean(c) for c in judged.columns],
        "rows": [[clean(c) for c in row] for row in item.rows],
        "pictures": [draw(figure, title) for figure, title in pictures],
    }
