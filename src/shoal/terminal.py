"""Text of others, such as names of domains, for terminals and Markdown."""

from __future__ import annotations

import re
import unicodedata

MARKS = re.compile(r"([\\`*_\[\]|~$@]|(?<=:)//)")
"""What means something within a line of Markdown, and what makes a link of an address."""


def clean(text: str, keep: str = "") -> str:
    """``text`` with a question mark for each control character."""
    return "".join(c if c in keep or unicodedata.category(c) not in ("Cc", "Cf", "Cs") else "?" for c in text)


def in_markdown(value: object) -> str:
    """Text from outside as text in Markdown, on one line, whatever marks are in it."""
    text = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return MARKS.sub(r"\\\1", text)
