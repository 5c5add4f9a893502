"""What Shoal says when its input is wrong."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from typing import Any

LONGEST = 80
"""Characters of a value that a message shows."""


LONGEST_MESSAGE, LINES = 900, 3
"""Characters and lines of a whole message."""


OF_COLUMNS = re.compile(r"(?<![\w-])--(numeric|boolean|date|categorical|text|drop|group|decimal|day-first)\b")


class TableWarning(UserWarning):
    """A doubtful property of a table, which is in the report on its columns as well.

    The message names options of the command line; as a string, it names arguments of Python functions.
    """

    def __str__(self) -> str:
        return OF_COLUMNS.sub(lambda found: f"{found[1].replace('-', '_')}=", str(self.args[0]))


class InputError(ValueError):
    """Invalid input, detected before any work is done.

    The message names the argument, its value and what is valid, in one or two lines; the command line prints
    it without a traceback. Very long quotations are truncated.

    Args:
        message: text of the message.
    """

    def __init__(self, message: str) -> None:
        lines = str(message).splitlines()
        text = "\n".join(lines[:LINES]) if len(lines) > LINES else str(message)
        super().__init__(text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]}…")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of ``known`` that was probably meant."""
    found = difflib.get_close_matches(str(name)[:100].lower(), list(known), n=1, cutoff=0.5)
    return found[0] if found else None


def unknown_name(kind: str, name: str, known: Iterable[str]) -> InputError:
    """An error for a name that is not registered, with the nearest one that is."""
    known = sorted(known)
    near = nearest(name, known)
    hint = f" Did you mean {near!r}?" if near else ""
    return InputError(f"unknown {kind} {shown(name)}.{hint} Known: {', '.join(known) or 'none'}.")


def shown(value: Any) -> str:
    """A value as a message shows it: one line, however long it is."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"a number of {math.ceil(value.bit_length() * math.log10(2)):,} digits"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # of a stranger's class
        text = f"a {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 20]}… ({len(text):,} characters)"


def listed(values: Any, what: str) -> list[Any]:
    """What ``values`` holds; an InputError calls it ``what`` where it is not a list or the like."""
    try:
        return list(values)
    except Exception as error:  # each kind of object has its own
        raise InputError(f"{what} must be a list or an array, got {shown(values)}.") from error


def check_names(kind: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuses the first of ``given`` that is not among ``known``."""
    known = list(known)
    for name in listed(given, f"names of {kind.rstrip(':')}"):
        if not isinstance(name, str) or name not in known:
            raise unknown_name(kind, name, known)
