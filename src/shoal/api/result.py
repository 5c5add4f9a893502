"""What the public functions return, an object that prints itself, and how they write files."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import InputError, TableWarning
from shoal.files import write_atomically

if TYPE_CHECKING:
    import pandas


class Result:
    """The result of a public function, a dataclass.

    Python shows it as text, a notebook as HTML; the command line prints one of ``str(result)`` and, with
    ``--json``, ``result.to_dict()``.
    """

    def __repr__(self) -> str:
        return str(self)

    @property
    def problems(self) -> Sequence[str]:
        """What failed, one line each. If there are any, the command line exits with code 1."""
        return ()

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def score_frame(rows: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> pandas.DataFrame:
    """A row per split and domain of scores as records have them, after columns that are the same for all."""
    import pandas

    return pandas.DataFrame(
        {**columns, "split": split, "domain": domain, "metric": scores["metric"], "score": score}
        for columns, splits in rows
        for split, scores in splits.items()
        for domain, score in scores["domains"].items()
    )


@contextlib.contextmanager
def messages(shown: bool) -> Iterator[Callable[..., None]]:
    """A function that shows sentences and tables on stderr; what these say of columns is no warning then."""

    def show(*lines: str) -> None:
        for line in filter(None, lines if shown else ()):
            if "\n" not in line:
                line = f"{line[:1].upper()}{line[1:].rstrip('.')}."
            print(line, file=sys.stderr, flush=True)

    with warnings.catch_warnings():
        if shown:
            warnings.simplefilter("ignore", TableWarning)
        yield show


def output_file(out: str | Path, *inputs: Any) -> Path:
    """The file that a public function is to write, if that overwrites neither an input nor a run."""
    from shoal.training.folder import OWN

    path = Path(out).expanduser()
    if path.is_dir():
        raise InputError(f"{str(path)!r} is a folder; specify a file.", "out")
    for source in (Path(each) for each in inputs if isinstance(each, str | Path)):
        within = source.is_dir() and source.resolve() in path.resolve().parents
        if path.is_file() and source.exists() and (within or path.samefile(source)):
            raise InputError(f"{str(path)!r} is also an input; choose another name.", "out")
    real = path.resolve()
    for folder, name in ((real.parent, real.name), (real.parent.parent, real.parent.name)):
        run = (folder / "config.yaml").exists() or (folder / "inputs.json").exists()
        if run and name in OWN and real.exists():
            raise InputError(f"{str(path)!r} belongs to the run in {str(folder)!r}; choose another.", "out")
    return path


def write_output(path: Path, content: bytes) -> None:
    """Write it; that it cannot be written is an InputError."""
    try:
        write_atomically(path, content)
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be written: {error.strerror or error}.", "out") from error
