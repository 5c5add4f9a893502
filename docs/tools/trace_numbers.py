"""Traces every number that a page reports to the results it names: ``python docs/tools/trace_numbers.py``.

A page names them in comments, which hold until the next heading, ``from`` also until the next ``from``:

    <!-- from: 2026-11-16-cdsprites.md#N = 10; published/cdsprites.yaml -->
    <!-- cells from: 2026-11-16-h200.md -->
    <!-- given: 12,000 passes; 22 algorithms -->

``from`` names files of ``benchmarks/results`` or of the paper's numbers, if need be with a section. All numbers in
a row of a table must be in one line there, in their order, beside the row's first cell. With ``cells from`` they
may be in several lines, each with the row's first cell and, where that is a number, the heading of the column.
Numbers in a list within a sentence ("51, 50 and 56") must be in one line, in their order. Numbers are compared as
they are written, ± included. ``given`` has numbers that were not measured. Headings, code, addresses and what
``SETTINGS`` describes are left out.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(f"docs/{name}.md" for name in ("findings", "comparison", "evidence"))]
FOLDERS = {"published": ROOT / "src" / "shoal" / "paper" / "published"}
RESULTS = ROOT / "benchmarks" / "results"

NUMBER = r"(?<![\w.\-])[-+−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+−]?\d+)?(?!\w|[.,]\d|\s*×\s*\d)"
QUANTITY = re.compile(rf"({NUMBER})(?:\s*±\s*({NUMBER}))?")
LIST = rf"{NUMBER}(?:\s*(?:,|to|and|or)\s+{NUMBER})*"
HIDDEN = re.compile(
    r"^```.*?^```$|<!--.*?-->|`[^`]*`|!\[[^]]*\]\([^)]*\)|\]\([^)]*\)|<https?:[^>]*>|^#+ [^\n]*",
    re.DOTALL | re.MULTILINE,
)
SETTINGS = {
    rf"\b(?:[NSTnr]|[α-ωΑ-Ω])\s*(?:=|≥|≤|>|<|≈)\s*{LIST}": "the value of a symbol",
    rf"\b[Ss]eeds?\s+{LIST}": "which seeds",
    rf"\bsteps?\s+{NUMBER}": "which step",
    r"\d+(?:\s*×\s*\d+)+": "the size of an image or a batch",
    rf"{NUMBER}°": "an angle",
    r"\b95\s%\s+interval": "the usual level",
}
SETTING = re.compile("|".join(SETTINGS))
COMMENT = re.compile(r"<!-- (from|cells from|given): (.*?) ?-->", re.DOTALL)
JOINED = re.compile(r"\s*%?\s*(?:,|/|to|and|or|, and)\s*")


@dataclass(frozen=True)
class Quantity:
    """A number as it is written, with its ± where it has one, and its place in the text."""

    value: str
    deviation: str
    start: int = field(compare=False, default=0)
    end: int = field(compare=False, default=0)

    def __str__(self) -> str:
        return f"{self.value} ± {self.deviation}" if self.deviation else self.value

    def is_in(self, other: Quantity) -> bool:
        """A mean may be quoted without its deviation."""
        return self.value == other.value and self.deviation in ("", other.deviation)


def quantities(text: str, start: int = 0, end: int = sys.maxsize) -> list[Quantity]:
    found = QUANTITY.finditer(text, start, end)
    return [Quantity(_plain(m[1]), _plain(m[2] or ""), m.start(), m.end()) for m in found]


def _plain(number: str) -> str:
    return number.replace("−", "-").replace(",", "").removeprefix("+")


def cells(line: str) -> list[str]:
    """The cells of a table's line, in Markdown or set with spaces."""
    return re.split(r"\|" if "|" in line else r" {2,}", line.strip().strip("|"))


def name(cell: str) -> str:
    """A cell as a name to compare: without emphasis and remarks."""
    return re.sub(r"\([^)]*\)|[*`\s]+", " ", cell).replace(" = ", "=").strip().lower()


def lines(source: str) -> list[str]:
    """The lines of a source, or of the section that it names after "#"."""
    file, _, wanted = source.partition("#")
    folder, _, rest = file.rpartition("/")
    text = (FOLDERS[folder] / rest if folder else RESULTS / rest).read_text(encoding="utf-8")
    if not wanted:
        return text.splitlines()
    found = re.search(rf"^(#+) [^\n]*{re.escape(wanted)}.*?(?=^\1 |\Z)", text, re.DOTALL | re.MULTILINE)
    if found is None:
        raise LookupError(f"{file} has no section {wanted!r}")
    return found[0].splitlines()


def together(wanted: list[Quantity], line: str) -> bool:
    """Are all in this line, in this order?"""
    left = iter(quantities(line))
    return all(any(quantity.is_in(other) for other in left) for quantity in wanted)


def blanked(text: str, what: re.Pattern[str]) -> str:
    """The text without these, every other character where it was."""
    return what.sub(lambda found: re.sub(r"[^\n]", "\0", found[0]), text)


class Page:
    """A page, read from top to bottom."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text(encoding="utf-8")
        self.shown = blanked(blanked(self.text, HIDDEN), SETTING)
        self.problems: list[str] = []
        self._begin_section()

    def untraced(self) -> list[str]:
        """What is wrong, a line for each."""
        for block in re.finditer(r"(?:^.*\S.*\n?)+", self.text, re.MULTILINE):
            if block[0].startswith("#"):
                self._end_section()
            for comment in COMMENT.finditer(block[0]):
                self._read(comment[1], comment[2], block.start() + comment.start())
            if block[0].startswith("|"):
                self._table(block)
            else:
                self._prose(block)
        self._end_section()
        return self.problems

    def _begin_section(self) -> None:
        self.lines: list[str] = []
        self.by_cell = False
        self.given: dict[Quantity, bool] = {}
        """Numbers that were not measured, and whether the section has them."""

    def _end_section(self) -> None:
        for quantity in [q for q, used in self.given.items() if not used]:
            self._report(quantity.start, f"{quantity} is given, but not in this section")
        self._begin_section()

    def _read(self, kind: str, text: str, at: int) -> None:
        if kind == "given":
            self.given |= {replace(q, start=at): False for q in quantities(text)}
            return
        self.by_cell, self.lines = kind == "cells from", []
        for source in text.split(";"):
            try:
                self.lines += lines(source.strip())
            except (OSError, LookupError) as error:
                self._report(at, f"{source.strip()}: {error}")

    def _measured(self, start: int, end: int) -> list[Quantity]:
        found = quantities(self.shown, start, end)
        for quantity in found:
            if quantity in self.given:
                self.given[quantity] = True
        return [q for q in found if q not in self.given]

    def _table(self, block: re.Match[str]) -> None:
        header, _, *rows = re.finditer(r".+", block[0])
        for row in rows:
            label = cells(row[0])[0]
            edges = [m.start() for m in re.finditer(r"\|", row[0])]
            spans = [
                (block.start() + row.start() + a, block.start() + row.start() + b) for a, b in pairwise(edges)
            ]
            if quantities(label) and not re.search(r"[^\W\d]", label):  # a number as a name
                spans, columns = spans[1:], [name(c) for c in cells(header[0])[1:]]
            else:
                columns = []
            if not self.by_cell:
                self._seek(self._measured(spans[0][0], spans[-1][1]), [name(label)])
                continue
            for i, (start, end) in enumerate(spans):
                for quantity in self._measured(start, end):
                    self._seek([quantity], [name(label), *columns[i : i + 1]])

    def _prose(self, block: re.Match[str]) -> None:
        run: list[Quantity] = []
        for quantity in self._measured(block.start(), block.end()):
            if run and not JOINED.fullmatch(self.shown[run[-1].end : quantity.start]):
                self._seek(run, [])
                run = []
            run.append(quantity)
        self._seek(run, [])

    def _seek(self, wanted: list[Quantity], beside: list[str]) -> None:
        """Reports numbers that no line of the sources has, in this order and beside these names."""
        named = (
            [line for line in self.lines if set(beside) <= {name(cell) for cell in cells(line)}]
            if beside
            else self.lines
        )
        if wanted and not any(together(wanted, line) for line in named):
            shown = ", ".join(map(str, wanted))
            where = f" in a line with {' and '.join(beside)}" if beside else ""
            self._report(
                wanted[0].start,
                f"{shown} is not in the results named{where}" if self.lines else f"{shown} has no source",
            )

    def _report(self, at: int, problem: str) -> None:
        line = self.text.count("\n", 0, at) + 1
        self.problems.append(f"{os.path.relpath(self.path, ROOT)}:{line}: {problem}")


def main(pages: list[str]) -> int:
    problems = [problem for page in pages or PAGES for problem in Page(ROOT / page).untraced()]
    print("\n".join(problems) or "every number is in the results that its page names")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
