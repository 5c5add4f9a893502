"""Tables as text for a terminal, Markdown, HTML and LaTeX; and how their cells are written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.cells import cell_len

from shoal.terminal import clean

NAMED = 8
"""Names in a sentence; files have all."""
STATES = ("failed", "diverged", "undefined", "missing")


def cut(text: str, width: int) -> str:
    """At most ``width`` characters of a text."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


@dataclass
class Table:
    """Columns and rows of finished cells; numbers are formatted by whoever knows what they are."""

    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.columns = [clean(str(c)) for c in self.columns]

    def add(self, *cells: object) -> None:
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append([clean(str(c)) for c in cells])

    def text(self) -> str:
        """Columns padded to their widest cell, numbers to the right."""
        grid = [self.columns, *self.rows]
        widths = [max(map(cell_len, column)) for column in zip(*grid, strict=True)]
        right, lines = self._right(), []
        for row in grid:
            fills = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
            cells = zip(row, fills, right, strict=True)
            lines.append("  ".join(f + c if r else c + f for c, f, r in cells).rstrip())
        lines.insert(1, "  ".join("─" * w for w in widths))
        return "\n".join(lines)

    def markdown(self) -> str:
        """Entities such as ``&lt;`` stay what they are; whatever else would be markup is text."""

        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(c.translate(IN_MARKDOWN) for c in cells) + " |"

        return "\n".join([line(self.columns), "|" + "---|" * len(self.columns), *map(line, self.rows)])

    def html(self) -> str:
        """A ``table``; cells are text."""
        import pandas

        return str(pandas.DataFrame(self.rows, columns=self.columns).to_html(index=False, border=0))

    def latex(self) -> str:
        """A ``tabular`` for the package booktabs; cells are text."""
        import pandas

        return str(pandas.DataFrame(self.rows, columns=self.columns).to_latex(index=False, escape=True))

    def _right(self) -> list[bool]:
        """Columns of numbers."""
        return [all(_numeric(row[i]) for row in self.rows) for i in range(len(self.columns))]


IN_MARKDOWN = str.maketrans({c: f"\\{c}" for c in "\\|<>*_`]~"})


def _numeric(cell: str) -> bool:
    return not cell or cell[0] in "0123456789–-+−≥≤≈"


# Cells


def number(mean: float, metric: str | None, sign: str = "", error: float | None = None) -> str:
    """Mean ± error, if there is one; accuracies in percent."""
    error = error if error and error > 1e-12 * max(1.0, abs(mean)) else None
    size = max(abs(mean), error or 0.0)  # four digits, and both end at the same place
    digits = (
        f".{max(0, 3 - math.floor(math.log10(size)))}f" if 1e-4 <= size < 1e6 else ".3e" if size else ".0f"
    )
    if metric == "accuracy":
        mean, error, digits = round(100 * mean, 9) + 0.0, error and 100 * error, ".1f"  # never -0.0
    return f"{mean:{sign}{digits}}" + (f" ± {error:{digits}}" if error else "")


def cell(values: Mapping[str, Any] | None, error: str = "sd", sign: str = "") -> str:
    """Mean ± deviation over seeds, with their number if some have no score; else why there is none."""
    if values is None or values["mean"] is None:
        values = values or {}
        return next((state for state in STATES if state in values.get("status", ())), "–")
    known, every = sum(v is not None for v in values["values"]), len(values["values"])
    text = number(values["mean"], values["metric"], sign, values[error])
    return text if known == every else f"{text} ({known} of {every})"


def many(count: int, what: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def listed(names: Sequence[str], between: str = ", ") -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return between.join(names[:NAMED]) + more
