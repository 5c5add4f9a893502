"""What Shoal says when its input is wrong."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any

LONGEST = 80
"""Characters of a value that a message shows."""


LONGEST_MESSAGE, LINES = 900, 3
"""Characters and lines of a whole message."""


class TableWarning(UserWarning):
    """A doubtful property of a table, which is in the report on its columns as well."""


class InputError(ValueError):
    """Invalid input, detected before any work is done.

    The message names the argument, its value and what is valid, in one or two lines; the command line prints
    it without a traceback. Very long quotations are truncated.

    Args:
        message: text of the message.
        option: option that is wrong, if it is one; its name begins the message.
    """

    def __init__(self, message: str, option: str | None = None) -> None:
        lines = str(message).splitlines()
        text = "\n".join(lines[:LINES]) if len(lines) > LINES else str(message)
        super().__init__(text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]}…")
        self.option = option

    def __str__(self) -> str:
        return self._said(self.option or "")

    def as_flag(self) -> str:
        """The message as the command line shows it: ``held_out`` is ``--held-out`` there."""
        return self._said(f"--{self.option.replace('_', '-')}" if self.option else "")

    def _said(self, option: str) -> str:
        message = str(self.args[0])
        if not option:
            return message
        return f"{option} {message}" if message.startswith("must ") else f"{option}: {message}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.option)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of ``known`` that was probably meant."""
    found = difflib.get_close_matches(str(name)[:100].lower(), list(known), n=1, cutoff=0.5)
    return found[0] if found else None


def unknown_name(kind: str, name: str, known: Iterable[str], option: str | None = None) -> InputError:
    """An error for a name that is not registered, with the nearest one that is."""
    known = sorted(known)
    near = nearest(name, known[:20_000])
    hint = f" Did you mean {near!r}?" if near else ""
    rest = f"Known: {', '.join(known) or 'none'}." if len(known) <= 50 else f"There are {len(known):,}."
    return InputError(f"unknown {kind} {shown(name)}.{hint} {rest}", option)


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
