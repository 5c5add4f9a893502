"""Tables as text for a terminal and as Markdown for a page."""

from __future__ import annotations

import math
import statistics
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Table:
    """Columns and rows of finished cells; numbers are formatted by whoever knows what they are."""

    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append([_clean(str(c)) for c in cells])

    def text(self) -> str:
        """Columns padded to their widest cell, numbers to the right."""
        grid = [list(self.columns), *map(list, self.rows)]
        widths = [max(_width(row[i]) for row in grid) for i in range(len(self.columns))]
        right = [all(_numeric(row[i]) for row in self.rows) for i in range(len(self.columns))]
        lines = []
        for row in grid:
            cells = zip(row, widths, right, strict=True)
            lines.append("  ".join(_padded(c, w, r) for c, w, r in cells).rstrip())
        lines.insert(1, "  ".join("─" * w for w in widths))
        return "\n".join(lines)

    def markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"

        return "\n".join([line(self.columns), "|" + "---|" * len(self.columns), *map(line, self.rows)])


def percent(values: Sequence[float]) -> str:
    """Mean ± standard deviation over seeds, in percent; the mean alone for a single value."""
    known = [100 * v for v in values if not math.isnan(v)]
    if not known:
        return "–"
    spread = f" ± {statistics.stdev(known):.1f}" if len(known) > 1 else ""
    return f"{statistics.mean(known):.1f}{spread}"


def _clean(text: str) -> str:
    """A question mark for each character that would move the cursor or hide others."""
    return "".join("?" if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c for c in text)


def _numeric(cell: str) -> bool:
    return not cell or cell[0] in "0123456789–-+−≥≤≈"


def _width(text: str) -> int:
    """Columns on a terminal: combining marks take none, wide characters two."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )


def _padded(text: str, width: int, right: bool) -> str:
    fill = " " * (width - _width(text))
    return fill + text if right else text + fill
