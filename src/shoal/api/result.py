"""What the public functions return: an object that prints itself, in a terminal and in a notebook."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import InputError
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


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files of a result, and remove what an earlier process that was killed left half written."""
    for name, content in files.items():
        for stale in folder.glob(f".{name}.*"):
            stale.unlink(missing_ok=True)
        write_atomically(folder / name, content)
