"""What the public functions take as ``data``: a dataset's name, a file, a folder of images, or a table."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

from shoal.errors import InputError, did_you_mean, shown
from shoal.files import replacing
from shoal.options import Algorithms, DataOptions, Names, as_flags
from shoal.registry import spelled

if TYPE_CHECKING:
    from shoal.data.tables import Table

TABLE, IMAGE_FOLDER = "table", "image-folder"
"""The datasets that read a user's own file or folder."""
READING = ("encoding", "sheet", "skip_rows")
OF_TABLE = (
    *("label", "domain", "group", "task", "drop", "drop_rows", "kinds", "decimal", "day_first"),
    *READING,
)
"""Options of a table."""


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
    def arguments(self) -> dict[str, Any]:
        """The options with which ``shoal.train`` reads these data."""
        options = {k: v for k, v in self.options.items() if k not in ("file", "digest", "folder", "held_out")}
        of_table = {k: options.pop(k) for k in OF_TABLE if self.dataset == TABLE and k in options}
        return {**of_table, **({"data_options": options} if options else {})}

    @property
    def words(self) -> list[str]:
        """These data and their options on a command line."""
        return [self.given, *as_flags(self.arguments)]

    def columns(self) -> dict[str, Any] | None:
        """What the columns of a table are taken for, as `shoal data check` reports it."""
        options = self.options
        if self.dataset != TABLE or not {"file", "label", "domain"} <= options.keys():
            return None
        from shoal.data.tables import check_table

        known = {name: options[name] for name in (*OF_TABLE, "columns") if name in options}
        return {"file": Path(options["file"]).name, **check_table(Path(options["file"]), **known)}

    def notes(self) -> list[str]:
        """What a user should know before training: the columns of a table, or the size of images."""
        if self.dataset == IMAGE_FOLDER and "size" not in self.options:
            from shoal.data.images import SIZE, usual_size

            wide, high = usual_size(Path(self.options["folder"]).expanduser())
            note = f"Images are resized to {SIZE} × {SIZE} pixels (most are {wide} × {high})"
            return [f"{note}; use data_options size to change this."]
        if (report := self.columns()) is None:
            return []
        from shoal.report import columns

        return [f"{columns.text(report)}\n"]


def find_source(
    data: Any,
    *,
    held_out: Names | None = None,
    folder: str | Path | None = None,
    home: str = "runs/data",
    **options: Unpack[DataOptions],
) -> Source:
    """The dataset that ``data`` names.

    A table in memory is written to ``folder``, or to one in ``home`` that is named by its content.
    """
    own = dict(options.get("data_options") or {})
    if (bad := options.get("bad_images")) is not None and own.setdefault("bad", bad) != bad:
        raise InputError(f"{bad} contradicts bad={own['bad']} in data_options.", "bad_images")
    if (columns := options.get("columns")) is not None:
        own["columns"] = list(columns)
    given = {k: v for k, v in options.items() if k in OF_TABLE and v not in (None, "", [], {})}
    if "drop" in given:
        given["drop"] = listed_names(options["drop"])
    if not isinstance(data, (str, Path)):
        data = _written(_in_memory(data, given), folder, home)
    source = _find(str(data), own, given)
    if names := listed_names(held_out):
        if "held_out" in source.options:
            raise InputError("is also set in data_options; specify it once.", "held_out")
        if "none" in names and len(names) > 1:
            raise InputError("'none' holds out no domain and cannot be combined with names.", "held_out")
        source.options["held_out"] = [] if names == ["none"] else names[0] if len(names) == 1 else names
    return source


def listed_names(names: Names | None) -> list[str]:
    """Names as a list, each once."""
    several = [names] if isinstance(names, (str, int)) else list(names or ())
    return list(dict.fromkeys(str(name) for name in several))


def listed_algorithms(algorithms: Algorithms | None) -> list[str]:
    """Algorithms as run configurations name them, each once; classes and files of the user's by reference."""
    from shoal.algorithms import REFERENCE, algorithm_class, display_name, reference, split_draw
    from shoal.training.recipes import find_recipe

    several = [algorithms] if isinstance(algorithms, (str, type)) else list(algorithms or ())
    rows: dict[str, str] = {}
    for each in several:
        name, draw = split_draw(each) if isinstance(each, str) else (each, None)
        name = reference(name)
        if not REFERENCE.fullmatch(name):
            name = spelled(name)
            if name != "all" and find_recipe(name) is None:
                algorithm_class(name)
        row = f"{name}:{draw}" if draw else name
        if rows.setdefault(display_name(row), row) != row:
            raise InputError(f"two algorithms are called {display_name(row)!r}; rename one.", "algorithms")
    return list(rows.values())


def _find(data: str, options: dict[str, Any], given: dict[str, Any]) -> Source:
    from shoal.data.source import form_of

    form = form_of(data)
    if form == "table file":
        from shoal.datasets.table import digest_of

        if named := {"file", "digest"} & options.keys():
            raise InputError(f"{min(named)} cannot be set: the file is {data!r}.", "data_options")
        # The digest makes a changed file another dataset: its runs are not taken for the old one's.
        return Source(TABLE, {"file": data, "digest": digest_of(data), **given, **options}, data)
    if given:
        first = next(iter(given))
        raise InputError(f"is for tables, and {data!r} is not a .csv, .parquet or .xlsx file.", first)
    from shoal.registry import DATASETS

    known, name = DATASETS.names(), spelled(data)
    if form == "image folder":
        if name not in known:  # ./name and name/ are folders always
            return Source(IMAGE_FOLDER, {"folder": data, **options}, data)
        if not {"folder", "root"} & options.keys():
            where = f"write './{data}' for the folder of that name in this directory"
            warnings.warn(f"{data!r} is taken as the built-in dataset; {where}.", stacklevel=2)
        return Source(data, options, data)
    try:
        DATASETS.module(data)
    except InputError:
        if name in known:
            raise
        here = itertools.islice(Path().iterdir(), 1000)
        hint = did_you_mean(data, [*known, *(p.name for p in here)])
        raise InputError(
            f"there is no file or folder {shown(data)}, and no built-in dataset of that name "
            f"(`shoal list datasets`).{hint}"
        ) from None
    return Source(data, options, data)


def _in_memory(data: Any, given: dict[str, Any]) -> Table:
    """The columns of a DataFrame, a mapping, arrays (X, y, domains) or a Hugging Face dataset.

    Columns that pandas has as categories are categories, whatever they look like.
    """
    from shoal.data.source import form_of, table_of
    from shoal.data.tables import as_table

    if form_of(data) == "arrays":
        for role in ("label", "domain")[: len(data) - 1]:
            given.setdefault(role, role)
    data = table_of(data, *(given.get(role, role) for role in ("label", "domain")))
    dtypes = getattr(data, "dtypes", {})
    kinds = {str(name): "categorical" for name, kind in dtypes.items() if str(kind) == "category"}
    roles = [given.get(role) for role in ("label", "domain", "group")]
    if kinds := {n: k for n, k in kinds.items() if n not in roles} | dict(given.get("kinds", {})):
        given["kinds"] = kinds
    return as_table(data)


def _written(table: Table, folder: str | Path | None, home: str) -> Path:
    """A Parquet file of the table, named by its content, from which worker processes read it."""
    from pandas.util import hash_pandas_object

    rows = hash_pandas_object(table.frame, index=False).to_numpy().tobytes()
    digest = hashlib.sha256(repr(list(table)).encode() + rows).hexdigest()[:16]
    path = (Path(home) / digest if folder is None else Path(folder)) / f"data-{digest}.parquet"
    if not path.exists():
        make_folder(path.parent)
        with replacing(path) as file:
            table.frame.to_parquet(file)
    return path


@contextlib.contextmanager
def datasets_in(folder: str | Path | None) -> Iterator[None]:
    """Within the block datasets are looked for in ``folder``, by worker processes too.

    It is no option of the dataset: the same run is the same one wherever its files are.
    """
    if folder is None:
        yield
        return
    from shoal.data.download import VARIABLE

    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise InputError(f"there is no folder {str(folder)!r}.", "data_dir")
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(folder.resolve())
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


KINDS = {"comparison": "comparison.json", "sweep": "sweep.json", "diagnosis": "diagnosis.json"}
"""Results that have a folder of their own, by the file that says so."""


def make_folder(
    path: str | Path, data: str | Path | None = None, run: bool = False, kind: str | None = None
) -> None:
    """Makes the folder for results before the work starts.

    One inside the folder of ``data`` is refused, where it would be read as data; so is one with another
    experiment: a single run (unless for a ``run``), or results of another ``kind``.
    """
    path = Path(path)
    real = Path(os.path.realpath(path))
    if data and Path(data).is_dir() and Path(os.path.realpath(data)) in (real, *real.parents):
        raise InputError(f"{str(path)!r} is inside the data folder {str(data)!r}; choose another.", "out")
    if not run and (path / "config.yaml").exists():
        raise InputError(f"{str(path)!r} contains a single run; choose another folder.", "out")
    for other, file in KINDS.items() if kind else ():
        if other != kind and (path / file).exists():
            raise InputError(f"{str(path)!r} contains a {other}; choose another folder.", "out")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{shown(str(path))} cannot be a folder: {error.strerror}.", "out") from error
    if not os.access(path, os.W_OK):
        raise InputError(f"{str(path)!r} cannot be written to.", "out")
