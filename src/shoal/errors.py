"""What Shoal says when its input is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class TableWarning(UserWarning):
    """Something in a table is doubtful: the report on its columns says it too."""


class InputError(ValueError):
    """Wrong input, found before time was spent on it.

    The message names the argument, the value and what would be right, in one or two lines; the command
    line prints it without a traceback.
    """


def unknown_name(kind: str, name: str, known: Iterable[str]) -> InputError:
    """An error for a name that is not registered, with the nearest one that is."""
    known = sorted(known)
    near = difflib.get_close_matches(shown(name).strip("'").lower(), known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return InputError(f"unknown {kind} {shown(name)}.{hint} Known: {', '.join(known) or 'none'}.")


def shown(value: Any) -> str:
    """A value as an error quotes it: one short line, whatever it is."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an int of more than 4,300 digits, or somebody's own __repr__
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:59]}…"


def check_names(kind: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuses the first of ``given`` that is not among ``known``."""
    known = list(known)
    for name in given:
        if not isinstance(name, str) or name not in known:
            raise unknown_name(kind, name, known)
