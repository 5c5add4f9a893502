"""What the public functions take as ``data``: a dataset's name, a table, or a folder of images."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import InputError, shown

TABLE, IMAGE_FOLDER = "table", "image-folder"
"""The datasets that read a user's own file or folder."""
OF_TABLE = ("label", "domain", "group", "task", "decimal", "drop", "kinds", "day_first")


@dataclass(frozen=True)
class Source:
    """A registered dataset and its options; of a file or folder, those that read it."""

    dataset: str
    options: dict[str, Any]

    def columns(self) -> dict[str, Any] | None:
        """What the columns of a table are taken for, as `shoal data check` reports it."""
        options = self.options
        if self.dataset != TABLE or not {"file", "label", "domain"} <= options.keys() or "columns" in options:
            return None
        from shoal.data.own import check_table

        drop = options.get("drop")
        names = [n.strip() for n in drop.split(",")] if isinstance(drop, str) else list(drop or ())
        known = {name: options[name] for name in OF_TABLE if name in options and name != "drop"}
        path = Path(options["file"])
        return {"file": path.name, **check_table(path, drop=names, **known)}

    def notes(self) -> list[str]:
        """What a user should know before training: the columns of a table, or the size of images."""
        if self.dataset == IMAGE_FOLDER and "size" not in self.options:
            from shoal.data.images import SIZE, usual_size

            wide, high = usual_size(Path(self.options["folder"]).expanduser())
            note = f"Images are resized to {SIZE} × {SIZE} pixels (most are {wide} × {high})"
            return [f"{note}; --data size=N changes it."]
        if (report := self.columns()) is None:
            return []
        from shoal.report import columns

        return [f"{columns.text(report)}\n"]


def find_source(
    data: str | Path,
    *,
    data_options: Mapping[str, Any] | None = None,
    bad_images: str | None = None,
    held_out: str | Sequence[str] | None = None,
    **of_table: Any,
) -> Source:
    """The dataset that ``data`` names; ``of_table`` are the options of a table (:data:`OF_TABLE`)."""
    options = dataset_options(data_options, bad_images)
    told = {name: value for name, value in of_table.items() if value not in (None, "", (), [], {})}
    source = _find(str(data), options, told)
    names = [held_out] if isinstance(held_out, str) else list(dict.fromkeys(held_out or ()))
    if names:
        if "test" in source.options:
            raise InputError("held_out= and data_options= test=… say the same thing; give one of them.")
        if "none" in names and len(names) > 1:
            raise InputError("held_out=none holds no domain out; give no other name with it.")
        source.options["test"] = [] if names == ["none"] else names[0] if len(names) == 1 else names
    return source


def dataset_options(options: Mapping[str, Any] | None, bad_images: str | None) -> dict[str, Any]:
    """The options of a dataset, ``bad_images`` among them."""
    options = dict(options or {})
    if bad_images is not None:
        if options.get("bad", bad_images) != bad_images:
            raise InputError(f"bad_images={bad_images}, but data_options= bad={options['bad']}; give one.")
        options["bad"] = bad_images
    return options


def _find(data: str, options: dict[str, Any], told: dict[str, Any]) -> Source:
    path = Path(data).expanduser()
    if path.is_file() or path.suffix:
        from shoal.data.reading import ENDINGS, ending

        if ending(path):
            from shoal.data.sets.table import digest_of

            if named := {"file", "digest"} & options.keys():
                raise InputError(f"data_options= {min(named)}=…: the file is {data!r}, as it was named.")
            # The digest makes a changed file another dataset: its runs are not taken for the old one's.
            return Source(TABLE, {"file": data, "digest": digest_of(path), **told, **options})
        if path.is_file():
            raise InputError(f"{data!r} is no table by its ending; these are: {', '.join(ENDINGS)}.")
    if told:
        kinds: Iterable[str] = told.get("kinds", {}).values()
        first = next((n for n in OF_TABLE if n in told and n != "kinds"), None) or next(iter(kinds))
        raise InputError(f"{first}= belongs to a table, and {data!r} is no .csv, .parquet or .xlsx file.")
    if path.is_dir():
        from shoal.data import sets

        if data.lower().replace("_", "-") not in sets.registry.names():  # ./name and name/ are folders always
            return Source(IMAGE_FOLDER, {"folder": data, **options})
    return Source(data, options)


@contextlib.contextmanager
def datasets_in(folder: str | Path | None) -> Iterator[None]:
    """Within the block datasets are looked for in ``folder``, by worker processes too.

    It is no option of the dataset: the same run is the same one wherever its files are.
    """
    if folder is None:
        yield
        return
    from shoal.data.folders import VARIABLE

    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise InputError(f"data_dir=: there is no folder {str(folder)!r}.")
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(folder.resolve())
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def make_folder(path: str | Path, data: str | Path | None = None, run: bool = False) -> None:
    """Makes the folder that results will go to, now rather than after the work.

    One in the folder of ``data`` is refused, where it would be read as data; and, unless for a ``run``, that
    of one.
    """
    path = Path(path)
    real = Path(os.path.realpath(path))
    if data and Path(data).is_dir() and Path(os.path.realpath(data)) in (real, *real.parents):
        raise InputError(f"out={str(path)!r} is in the folder of the data, {str(data)!r}; choose another.")
    if not run and (path / "config.yaml").exists():
        raise InputError(f"out={str(path)!r} holds a single run; choose another folder.")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"out={shown(str(path))} cannot be a folder: {error.strerror}.") from error
    if not os.access(path, os.W_OK):
        raise InputError(f"out={str(path)!r} cannot be written to.")
