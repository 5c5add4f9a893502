"""What the public functions take as ``data``: a dataset's name, a file, a folder of images, or a table."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import InputError, nearest, shown
from shoal.files import write_atomically
from shoal.terminal import Csv

if TYPE_CHECKING:
    from shoal.data.reading import Table

TABLE, IMAGE_FOLDER = "table", "image-folder"
"""The datasets that read a user's own file or folder."""
OF_TABLE = ("label", "domain", "group", "task", "decimal", "drop", "kinds", "day_first")


@dataclass(frozen=True)
class Source:
    """A registered dataset and its options; of a file or folder, those that read it."""

    dataset: str
    options: dict[str, Any]
    given: str = ""
    """The name, file or folder, as a command line takes it."""

    @property
    def own(self) -> bool:
        """Whether it is a file or folder of the user's, and not a dataset's name."""
        return self.dataset != self.given.lower().replace("_", "-")

    @property
    def words(self) -> list[str]:
        """What names these data on a command line."""
        from shoal.trained import _yaml

        options = {k: v for k, v in self.options.items() if k not in ("file", "digest", "folder", "test")}
        found = [self.given]
        for name in OF_TABLE[:6] if self.dataset == TABLE else ():
            if name in options:
                value = options.pop(name)
                found += [f"--{name}", *(value if isinstance(value, (list, tuple)) else [value])]
        for column, kind in options.pop("kinds", {}).items():
            found += [f"--{kind}", column]
        if (day_first := options.pop("day_first", None)) is not None:
            found.append("--day-first" if day_first else "--no-day-first")
        rest = [f"{name}={_yaml(value)}" for name, value in options.items()]
        return found + (["--data", *rest] if rest else [])

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
            return [f"{note}; use --data size=N to change this."]
        if (report := self.columns()) is None:
            return []
        from shoal.report import columns

        return [f"{columns.text(report)}\n"]


def find_source(
    data: Any,
    *,
    data_options: Mapping[str, Any] | None = None,
    bad_images: str | None = None,
    held_out: str | Sequence[str] | None = None,
    folder: str | Path | None = None,
    home: str = "shoal-data",
    **of_table: Any,
) -> Source:
    """The dataset that ``data`` names; ``of_table`` are the options of a table (:data:`OF_TABLE`).

    A table in memory is written to ``folder``, or to one in ``home`` that is named by its content.
    """
    options = dict(data_options or {})
    if bad_images is not None:
        if options.get("bad", bad_images) != bad_images:
            raise InputError(
                f"bad_images={bad_images} contradicts data_options= bad={options['bad']}; specify only one."
            )
        options["bad"] = bad_images
    told = {name: value for name, value in of_table.items() if value not in (None, "", (), [], {})}
    if not isinstance(data, (str, Path)):
        data = _written(_in_memory(data, told), folder, home)
    source = _find(str(data), options, told)
    names = [held_out] if isinstance(held_out, str) else list(dict.fromkeys(held_out or ()))
    if names:
        if "test" in source.options:
            raise InputError(
                "held_out= and data_options= test=… set the same option; specify only one of them."
            )
        if "none" in names and len(names) > 1:
            raise InputError("held_out=none holds out no domain and cannot be combined with other names.")
        source.options["test"] = [] if names == ["none"] else names[0] if len(names) == 1 else names
    return source


def _find(data: str, options: dict[str, Any], told: dict[str, Any]) -> Source:
    path = Path(data).expanduser()
    if path.is_file() or path.suffix:
        from shoal.data.reading import ENDINGS, ending

        if ending(path):
            from shoal.data.sets.table import digest_of

            if named := {"file", "digest"} & options.keys():
                raise InputError(f"data_options= {min(named)}=… cannot be set: the file is {data!r}.")
            # The digest makes a changed file another dataset: its runs are not taken for the old one's.
            return Source(TABLE, {"file": data, "digest": digest_of(path), **told, **options}, data)
        if path.is_file():
            raise InputError(f"{data!r} is not a table; supported extensions: {', '.join(ENDINGS)}.")
    if told:
        kinds: Iterable[str] = told.get("kinds", {}).values()
        first = next((n for n in OF_TABLE if n in told and n != "kinds"), None) or next(iter(kinds))
        raise InputError(
            f"{first}= is an option of tables, and {data!r} is not a .csv, .parquet or .xlsx file."
        )
    from shoal.data import sets

    if path.is_dir():
        if data.lower().replace("_", "-") not in sets.registry.names():  # ./name and name/ are folders always
            return Source(IMAGE_FOLDER, {"folder": data, **options}, data)
        if not {"folder", "root"} & options.keys():
            where = f"write './{data}' for the folder of that name in this directory"
            warnings.warn(f"{data!r} is taken as the built-in dataset; {where}.", stacklevel=2)
    elif data.lower().replace("_", "-") not in sets.registry.names() and not _loads(data):
        here = itertools.islice(Path().iterdir(), 1000)
        near = nearest(data, [*sets.registry.names(), *(p.name for p in here)])
        hint = f" Did you mean {near!r}?" if near else ""
        raise InputError(
            f"there is no file or folder {shown(data)}, and no built-in dataset of that name "
            f"(`shoal list datasets`).{hint}"
        )
    return Source(data, options, data)


def _loads(name: str) -> bool:
    """Whether there is a dataset of this name, in whatever way it is found."""
    from shoal.data import sets

    try:
        return bool(sets.registry.module(name))
    except InputError:
        return False


def _in_memory(data: Any, told: dict[str, Any]) -> Table:
    """The columns of a DataFrame, a mapping, arrays (X, y, domains) or a Hugging Face dataset.

    Columns that pandas has as categories are categories, whatever they look like.
    """
    from shoal.data.own import _hf_column, _hf_rows
    from shoal.data.reading import as_table

    if isinstance(data, (tuple, list)):
        data = _arrays(data, told)
    elif hasattr(data, "features") or (
        isinstance(data, Mapping) and any(hasattr(part, "features") for part in data.values())
    ):
        names = _hf_rows(data)
        if images := [n for n in names if type(data.features[n]).__name__ == "Image"]:
            raise InputError(
                f"column {images[0]!r} contains images; save them as folder/domain/class instead."
            )
        data = {name: _hf_column(data, name) for name in names}
    table = as_table(data)
    dtypes = getattr(data, "dtypes", {})
    kinds = {str(name): "categorical" for name, kind in dtypes.items() if str(kind) == "category"}
    roles = [told.get(role) for role in ("label", "domain", "group")]
    if kinds := {n: k for n, k in kinds.items() if n not in roles} | dict(told.get("kinds", {})):
        told["kinds"] = kinds
    return table


def _arrays(arrays: Sequence[Any], told: dict[str, Any]) -> dict[str, Any]:
    """The columns of X, those of a DataFrame or x0, x1 …, then the label and the domain."""
    import numpy as np

    from shoal.data.reading import as_table

    if len(arrays) not in (2, 3):
        raise InputError(f"data= takes three arrays (X, y, domains), got {len(arrays)}.")
    x, *rest = arrays
    if hasattr(x, "iloc") or isinstance(x, Mapping):
        columns: dict[str, Any] = dict(as_table(x))
    else:
        x = np.asarray(x.detach().cpu() if hasattr(x, "detach") else x)
        if x.ndim != 2:
            raise InputError(f"X of data= has shape {x.shape}; it must be (rows, columns).")
        columns = {f"x{n}": x[:, n] for n in range(x.shape[1])}
    for role, values in zip(("label", "domain"), rest, strict=False):
        name = told.setdefault(role, role)
        if name in columns:
            raise InputError(f"X of data= already has a column {name!r}; set another name with {role}=.")
        columns[name] = values
    return columns


def _written(table: Table, folder: str | Path | None, home: str) -> Path:
    """A CSV file of the table, named by its content: the same cells as in a file that a command reads."""
    file = io.StringIO(newline="")
    rows = zip(*(column.texts() for column in table.values()), strict=True)
    Csv(file, raw=True).write([list(table), *rows])
    content = file.getvalue().encode("utf-8", "backslashreplace")
    digest = hashlib.sha256(content).hexdigest()[:16]
    path = (Path(home) / digest if folder is None else Path(folder)) / f"data-{digest}.csv"
    if not path.exists():
        make_folder(path.parent)
        write_atomically(path, content)
    return path


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
        raise InputError(f"out={str(path)!r} is inside the data folder {str(data)!r}; choose another folder.")
    if not run and (path / "config.yaml").exists():
        raise InputError(f"out={str(path)!r} contains a single run; choose another folder.")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"out={shown(str(path))} cannot be a folder: {error.strerror}.") from error
    if not os.access(path, os.W_OK):
        raise InputError(f"out={str(path)!r} cannot be written to.")
