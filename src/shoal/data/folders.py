"""Where the files of a dataset are, for those that are neither made nor installed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from shoal.errors import InputError

VARIABLE = "SHOAL_DATA"
SAY_WHERE = f"folder in data_options, data_dir, or the environment variable {VARIABLE} sets where"


def find_files(
    names: Sequence[str],
    *,
    folder: str | Path | None,
    home: str,
    inside: Sequence[str] = (".",),
    endings: Sequence[str] = ("",),
    get: str | None = None,
) -> list[Path]:
    """A path for each of ``names``, all from one folder.

    They are looked for in ``folder``, or where that is ``None`` in ``$SHOAL_DATA/home`` and ``$SHOAL_DATA``;
    there in each sub-folder ``inside``, under their name with any of ``endings`` after it. The folder that
    has most of them is taken, and of equals the first. ``get`` is the dataset that `shoal data get` fetches
    them with.
    """
    top = roots(f"the files {', '.join(names)}", folder, home, get)
    places = [root / sub for root in top for sub in inside]
    result = [{name: path for name in names if (path := _file(place, name, endings))} for place in places]
    best = max(result, key=len)
    for name in names:
        if name not in best:
            looked_in = [places[result.index(best)]] if best else top
            where = " or ".join(repr(str(place)) for place in looked_in)
            other = "".join(f" (or {ending})" for ending in endings if ending)
            raise InputError(f"there is no file {name!r}{other} in {where}; {SAY_WHERE} to look{_or(get)}.")
    return [best[name] for name in names]


def roots(needed: str, folder: str | Path | None, home: str, get: str | None = None) -> list[Path]:
    """Where to look: ``folder``, or where that is ``None`` ``$SHOAL_DATA/home`` and ``$SHOAL_DATA``."""
    if folder is not None:
        return [Path(str(folder)).expanduser()]
    if root := os.environ.get(VARIABLE):
        return [Path(root, home).expanduser(), Path(root).expanduser()]
    raise InputError(f"{needed} are needed; {SAY_WHERE} they are{_or(get)}.")


def needed(dataset: str, option: str, value: str | None, reads: str) -> Path:
    """The path that an option of a dataset of one's own must give."""
    if value is None:
        what = "a folder" if option == "folder" else "a file"
        raise InputError(f"dataset {dataset!r} reads {reads}; set {option} in data_options ({what}).")
    return Path(str(value)).expanduser()


def _or(get: str | None) -> str:
    return f"; `shoal data get {get}` downloads them" if get else ""


def _file(place: Path, name: str, endings: Sequence[str]) -> Path | None:
    return next((path for e in endings if (path := place / f"{name}{e}").is_file()), None)
