"""Text of others, such as names of domains, for terminals and Markdown."""

from __future__ import annotations

import contextlib
import re
import sys
import unicodedata
from collections.abc import Iterator
from typing import Any

CLEAR_LINE = "\r\x1b[K"
MARKS = re.compile(r"([\\`*_\[\]|~$@]|(?<=:)//)")
"""What means something within a line of Markdown, and what makes a link of an address."""


def clean(text: str, keep: str = "") -> str:
    """``text`` with a question mark for each control character."""
    if text.isprintable():
        return text
    return "".join(c if c in keep or unicodedata.category(c) not in ("Cc", "Cf", "Cs") else "?" for c in text)


def in_markdown(value: object) -> str:
    """Text from outside as text in Markdown, on one line, whatever marks are in it."""
    text = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return MARKS.sub(r"\\\1", text)


def clear_line(stream: Any) -> None:
    """Empty the terminal's current line, to draw it anew."""
    stream.write(CLEAR_LINE)


@contextlib.contextmanager
def printable() -> Iterator[None]:
    """What the encoding of standard output or error lacks is written as an escape, such as ``\\u0436``."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    yield
