"""What Shoal says when its input is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class TableWarning(UserWarning):
    """A doubtful property of a table, which is in the report on its columns as well."""


class InputError(ValueError):
    """Invalid input, detected before any work is done.

    The message names the argument, its value and what is valid, in one or two lines; the command line prints
    it without a traceback.

    Args:
        message: text of the message; of other programs' long ones the beginning is kept.
        option: option that is wrong, if it is one; its name begins the message.
    """

    def __init__(self, message: str, option: str | None = None) -> None:
        text = "\n".join(str(message).split("\n")[:3])
        super().__init__(text if len(text) <= 900 else f"{text[:900]}…", option)
        self.option = option

    def __str__(self) -> str:
        return self._named(self.option)

    def as_flag(self) -> str:
        """The message as the command line shows it: ``held_out`` is ``--held-out`` there."""
        return self._named(self.option and f"--{self.option.replace('_', '-')}")

    def _named(self, option: str | None) -> str:
        message = str(self.args[0])
        if not option:
            return message
        return f"{option} {message}" if message.startswith("must ") else f"{option}: {message}"


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: `` Did you mean 'fish'?``, or nothing."""
    if not isinstance(name, str):
        return ""
    near = difflib.get_close_matches(name[:100].lower(), list(known)[:20_000], n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def unknown_name(kind: str, name: Any, known: Iterable[str], option: str | None = None) -> InputError:
    """An error for a name that is not registered, with the nearest one that is."""
    known = sorted(known)
    rest = f"Known: {', '.join(known) or 'none'}." if len(known) <= 50 else f"There are {len(known):,}."
    return InputError(f"unknown {kind} {shown(name)}.{did_you_mean(name, known)} {rest}", option)


def check_names(kind: str, given: Iterable[Any], known: Iterable[str]) -> None:
    """Refuse the first of ``given`` that is not among ``known``."""
    known = list(known)
    for name in listed(given, f"names of {kind.rstrip(':')}"):
        if not isinstance(name, str) or name not in known:
            raise unknown_name(kind, name, known)


def shown(value: Any) -> str:
    """A value as a message shows it: one line of at most 80 characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # of a stranger's class; a number of more than 4,300 digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text):,} characters)"


def listed(values: Any, what: str) -> list[Any]:
    """What ``values`` holds; an InputError calls it ``what`` where it is not a list or the like."""
    try:
        return list(values)
    except Exception as error:  # each kind of object has its own
        raise InputError(f"{what} must be a list or an array, got {shown(values)}.") from error
