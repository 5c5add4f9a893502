"""Traces every number on a page to the results that the page names: ``python docs/tools/trace_numbers.py``.

A page names its results in comments. A comment applies until the next heading, and ``from`` until the next
``from``:

    <!-- from: 2026-11-16-cdsprites.md#N = 10; published/cdsprites.yaml -->
    <!-- cells from: 2026-11-16-h200.md -->
    <!-- given: 12,000 passes; 22 algorithms -->

``from`` names files in ``benchmarks/results`` or the paper's published numbers, optionally with a section.
All numbers of a table row must be in one line of these files, in the same order, and that line must contain
the first cell of the row. With ``cells from``, each number may be in a different line, which must contain
the first cell of the row, the column heading or a word of the cell; if the first cell is a number, both the
first cell and the heading. Numbers in a sentence must be in a line that shares a word with the sentence;
numbers of a list ("51, 50 and 56") must be in one line, in the same order. Numbers are compared as written,
including ±. ``given`` lists numbers that were not measured; without a number it exempts the rest of the
section. Headings, code, link targets and the patterns in ``SETTINGS`` are not checked.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Set
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(f"docs/evidence/{name}.md" for name in ("comparisons", "differences", "paper"))]
"""The hand-written pages that report measurements; records.md is made from records."""
FOLDERS = {"published": ROOT / "src" / "shoal" / "paper" / "published"}
RESULTS = ROOT / "benchmarks" / "results"

NUMBER = r"(?<![\w.\-])[-+−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+−]?\d+)?(?!\w|[.,]\d|-\d|\s*×\s*\d)"
QUANTITY = re.compile(rf"({NUMBER})(?:\s*±\s*({NUMBER}))?")
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
HIDDEN = re.compile(
    r"<!--.*?-->|`[^`]*`|!\[[^]]*\]\([^)]*\)|\]\([^)]*\)|<https?:[^>]*>|^#+ [^\n]*",
    re.DOTALL | re.MULTILINE,
)
SETTINGS = {
    rf"\b(?:[NSTnr]|[α-ω])\s*(?:=|≥|≤|>|<)\s*{NUMBER}": "the value of a symbol",
    rf"\b[Ss]eeds?\s+{NUMBER}(?:\s+to\s+{NUMBER})?": "which seeds",
    r"\d+(?:\s*×\s*\d+)+": "the size of an image or a batch",
    rf"{NUMBER}°": "an angle",
    r"\b95\s%\s+interval": "the usual level",
}
SETTING = re.compile("|".join(SETTINGS))
COMMENT = re.compile(r"<!-- (from|cells from|given): (.*?) ?-->", re.DOTALL)
SENTENCE = re.compile(r"\S.*?(?:[.;][*\")]*(?=\s)|\Z)", re.DOTALL)
COMMON = re.compile("the|and|for|with|over|from|not|but|than|are|has|one|two|its|all")
"""Words that say nothing of what a number is."""
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
    """The cells of a line of a table, set in Markdown, with spaces or as YAML."""
    parts = re.split(r"\|" if "|" in line else r" {2,}|: ", line.strip().strip("|"))
    return [part.strip() for part in parts]


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


def names(line: str) -> set[str]:
    return {name(cell) for cell in cells(line)}


def words(text: str) -> set[str]:
    found = re.findall(r"[^\W\d_]{3,}", text.lower())
    return {word for word in found if not COMMON.fullmatch(word)}


def blanked(text: str, what: re.Pattern[str]) -> str:
    """The text without these, every other character where it was."""
    return what.sub(lambda found: re.sub(r"[^\n]", "\0", found[0]), text)


class Page:
    """A page, read from top to bottom."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = blanked(path.read_text(encoding="utf-8"), CODE)
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
        self.all_given = False

    def _end_section(self) -> None:
        for quantity in [q for q, used in self.given.items() if not used]:
            self._report(quantity.start, f"{quantity} is given, but not in this section")
        self._begin_section()

    def _read(self, kind: str, text: str, at: int) -> None:
        if kind == "given":
            self.all_given |= not quantities(text)
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
        return [] if self.all_given else [q for q in found if q not in self.given]

    def _table(self, block: re.Match[str]) -> None:
        header, _, *rows = re.finditer(r".+", block[0])
        headings = [name(cell) for cell in cells(header[0])]
        for row in rows:
            start = block.start() + row.start()
            edges = [start + edge.start() for edge in re.finditer(r"\|", row[0])]
            parts = cells(row[0])
            label = name(parts[0])
            numbered = not words(label)  # then the first cell is a name, not a measurement
            if not self.by_cell:
                self._seek(self._measured(edges[numbered], edges[-1]), {label})
                continue
            for column in range(numbered, len(edges) - 1):
                both = {label, headings[column]}
                for quantity in self._measured(edges[column], edges[column + 1]):
                    if numbered:
                        self._seek([quantity], both)
                    else:
                        self._seek([quantity], some=both, some_words=words(parts[column]))

    def _prose(self, block: re.Match[str]) -> None:
        for sentence in SENTENCE.finditer(self.text, block.start(), block.end()):
            runs: list[list[Quantity]] = []
            for quantity in self._measured(sentence.start(), sentence.end()):
                if runs and JOINED.fullmatch(self.shown[runs[-1][-1].end : quantity.start]):
                    runs[-1].append(quantity)
                else:
                    runs.append([quantity])
            for run in runs:
                self._seek(run, some_words=words(COMMENT.sub("", sentence[0])))

    def _seek(
        self,
        wanted: list[Quantity],
        every: Set[str] = frozenset(),
        some: Set[str] = frozenset(),
        some_words: Set[str] = frozenset(),
    ) -> None:
        """Reports numbers that are not, in this order, in one line beside these names or words."""

        def fits(line: str) -> bool:
            if every:
                return names(line) >= every
            return bool(names(line) & some or words(line) & some_words)

        if wanted and not any(fits(line) and together(wanted, line) for line in self.lines):
            beside = ", ".join(sorted(every | some)) or "a word of the sentence"
            where = f"not in the results named, in a line with {beside}" if self.lines else "without a source"
            self._report(wanted[0].start, f"{', '.join(map(str, wanted))}: {where}")

    def _report(self, at: int, problem: str) -> None:
        line = self.text.count("\n", 0, at) + 1
        self.problems.append(f"{os.path.relpath(self.path, ROOT)}:{line}: {problem}")


def main(pages: list[str]) -> int:
    problems = [problem for page in pages or PAGES for problem in Page(ROOT / page).untraced()]
    print("\n".join(problems) or "every number is in the results that its page names")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
