"""Tables as text for a terminal, and as Markdown, LaTeX, HTML and CSV."""

from __future__ import annotations

import html
import math
import statistics
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.terminal import as_csv, clean


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
        grid = [list(self.columns), *map(list, self.rows)]
        widths = [max(_width(row[i]) for row in grid) for i in range(len(self.columns))]
        right = self._right()
        lines = []
        for row in grid:
            cells = zip(row, widths, right, strict=True)
            lines.append("  ".join(_padded(c, w, r) for c, w, r in cells).rstrip())
        lines.insert(1, "  ".join("─" * w for w in widths))
        return "\n".join(lines)

    def markdown(self) -> str:
        """Entities such as ``&lt;`` stay what they are; whatever else would be markup is text."""

        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(c.translate(IN_MARKDOWN) for c in cells) + " |"

        return "\n".join([line(self.columns), "|" + "---|" * len(self.columns), *map(line, self.rows)])

    def latex(self) -> str:
        """A ``tabular`` with the rules of booktabs."""

        def line(cells: Sequence[str]) -> str:
            return " & ".join(c.translate(IN_LATEX) for c in cells) + r" \\"

        sides = "".join("r" if right else "l" for right in self._right())
        return "\n".join(
            [
                rf"\begin{{tabular}}{{{sides}}}",
                r"\toprule",
                line(self.columns),
                r"\midrule",
                *map(line, self.rows),
                r"\bottomrule",
                r"\end{tabular}",
            ]
        )

    def html(self) -> str:
        """A ``table``; columns of numbers have the class ``number``."""
        right = self._right()

        def line(cells: Sequence[str], tag: str) -> str:
            kinds = [' class="number"' if r else "" for r in right]
            made = (f"<{tag}{k}>{html.escape(c)}</{tag}>" for c, k in zip(cells, kinds, strict=True))
            return f"<tr>{''.join(made)}</tr>"

        head, body = line(self.columns, "th"), [line(row, "td") for row in self.rows]
        return "\n".join(["<table>", f"<thead>{head}</thead>", "<tbody>", *body, "</tbody>", "</table>"])

    def csv(self) -> str:
        return as_csv([self.columns, *self.rows])

    def _right(self) -> list[bool]:
        """Columns of numbers."""
        return [all(_numeric(row[i]) for row in self.rows) for i in range(len(self.columns))]


IN_MARKDOWN = str.maketrans({c: f"\\{c}" for c in "\\|<>*_`]~"})
IN_LATEX = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': r"\char34{}",
        "±": r"$\pm$",
        "−": "$-$",
        "–": "--",
        "°": r"$^\circ$",
        "≥": r"$\geq$",
        "≤": r"$\leq$",
        "≈": r"$\approx$",
    }
)


def percent(values: Sequence[float]) -> str:
    """Mean ± standard deviation over seeds, in percent; the mean alone for a single value."""
    known = [100 * v for v in values if not math.isnan(v)]
    if not known:
        return "–"
    spread = f" ± {statistics.stdev(known):.1f}" if len(known) > 1 else ""
    return f"{statistics.mean(known):.1f}{spread}"


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
