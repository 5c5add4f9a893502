"""What the public functions return: an object that prints itself, in a terminal and in a notebook."""

from __future__ import annotations

import contextlib
import html
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import InputError, TableWarning
from shoal.files import write_atomically


class Result(ABC):
    """The result of a public function.

    ``print`` shows it as text, a notebook as HTML; the command line prints one of ``str(result)`` and, with
    ``--json``, ``result.to_dict()``.
    """

    @property
    def problems(self) -> Sequence[str]:
        """What failed, one line each. If there are any, the command line exits with code 1."""
        return ()

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data."""

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


@contextlib.contextmanager
def messages(shown: bool) -> Iterator[Callable[..., None]]:
    """A function that shows lines on stderr. Where the columns of a table are shown, they are no warnings."""

    def show(*lines: str) -> None:
        for line in filter(None, lines if shown else ()):
            end = "\n" if "\n" in line else ".\n"
            print(f"{line[:1].upper()}{line[1:].rstrip('.')}", end=end, file=sys.stderr, flush=True)

    with warnings.catch_warnings():
        if shown:
            warnings.simplefilter("ignore", TableWarning)
        yield show


def output_file(out: str | Path, inputs: Iterable[str | Path] = ()) -> Path:
    """The file that a public function is to write, if that overwrites neither its input nor a run."""
    from shoal.training.folder import check_output

    path = Path(out).expanduser()
    try:
        check_output(path, inputs)
    except InputError as error:
        raise InputError(str(error), "out") from None
    return path


def write_output(path: Path, content: bytes) -> None:
    """Write it; that it cannot be written is an InputError."""
    try:
        write_atomically(path, content)
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be written: {error.strerror or error}.", "out") from error
