"""The one place where text for people is made safe to print, and to open in a spreadsheet.

Names of domains, classes and files, and other programs' messages, come from anywhere. On a terminal, control
characters in them would move the cursor, change its title or hide text; in a spreadsheet, a cell that begins
with ``=`` is a formula, which can start programs and send data.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
JOINERS = "\u200c\u200d"  # part of words in Persian and of emoji; they move nothing
CLEAR_LINE = "\r\x1b[K"
FORMULA = re.compile(r"[=+\-@\t\r\n＝＋－＠]")
"""How a cell begins that spreadsheets take for a formula."""
MARKS = re.compile(r"([\\`*_\[\]|~$@]|(?<=:)//)")
"""What means something within a line of Markdown, and what makes a link of an address."""
NUMERIC = re.compile(r"[+-]?[\d.,]+([eE][+-]?\d+)?[\d\s.,±–−%()]*|[+-](inf|nan)?")


def clean(text: str, keep: str = "") -> str:
    """``text`` with a question mark for each character that would move the cursor or hide others."""
    if text.isascii() and text.isprintable():
        return text
    kept = JOINERS + keep
    return "".join("?" if c not in kept and unicodedata.category(c) in HIDDEN else c for c in text)


class Printable:
    """A stream for people: what is written to it keeps line breaks and tabs, and no other control character.

    What the stream's encoding lacks is written as an escape, such as ``\\u0436``.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
            with contextlib.suppress(ValueError, OSError):
                reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        self.stream.write(clean(text, keep="\n\t"))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def control(self, text: str) -> None:
        """Writes our own control characters."""
        self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def in_markdown(value: object) -> str:
    """Text from outside as text in Markdown, on one line, whatever marks are in it."""
    text = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return MARKS.sub(r"\\\1", text)


class Csv:
    """Writes CSV with an apostrophe before text that a spreadsheet would run as a formula, unless ``raw``.

    Numbers stay as they are, ``-1.5`` and ``+2.0 ± 0.1`` too. ``marked`` counts the apostrophes.
    """

    def __init__(self, file: TextIO, *, raw: bool = False) -> None:
        self.file, self.raw, self.marked = file, raw, 0

    def write(self, rows: Iterable[Iterable[Any]]) -> None:
        lines = io.StringIO(newline="")
        # A cell with a line end is quoted only if that is in the writer's own, which is CR LF.
        writer = csv.writer(lines)
        for row in rows:
            writer.writerow(row if self.raw else map(self._cell, row))
            self.file.write(f"{lines.getvalue()[:-2]}\n")
            lines.seek(0)
            lines.truncate()

    def _cell(self, value: Any) -> Any:
        if not isinstance(value, str) or not FORMULA.match(value) or NUMERIC.fullmatch(value.strip()):
            return value
        self.marked += 1
        return f"'{value}"


def as_csv(rows: Iterable[Iterable[Any]]) -> str:
    file = io.StringIO(newline="")
    Csv(file).write(rows)
    return file.getvalue()


@contextlib.contextmanager
def exact(stream: Any) -> Iterator[Any]:
    """``stream`` for data: on a terminal as it is, elsewhere UTF-8 without a change, whatever is in it."""
    inside = getattr(stream, "stream", stream)
    if inside.isatty() or not hasattr(inside, "buffer"):
        yield stream
        return
    inside.flush()
    data = io.TextIOWrapper(inside.buffer, "utf-8", "surrogateescape", newline="", write_through=True)
    try:
        yield data
    finally:
        data.detach()


def clear_line(stream: Any) -> None:
    """Empties the terminal's current line, to draw it anew."""
    getattr(stream, "control", stream.write)(CLEAR_LINE)


@contextlib.contextmanager
def printable() -> Iterator[None]:
    """Within the block, standard output and error are :class:`Printable`, closed ones included."""
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        sys.stdout, sys.stderr = (_safe(stream or nowhere) for stream in before)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


def _safe(stream: Any) -> Any:
    return stream if isinstance(stream, Printable) else Printable(stream)
