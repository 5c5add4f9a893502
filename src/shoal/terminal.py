"""The one place where text for people is made safe to print.

Names of domains, classes and files, and other programs' messages, come from anywhere. On a terminal, control
characters in them would move the cursor, change its title or hide text.
"""

from __future__ import annotations

import contextlib
import os
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
JOINERS = "\u200c\u200d"  # part of words in Persian and of emoji; they move nothing
CLEAR_LINE = "\r\x1b[K"


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
