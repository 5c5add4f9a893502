"""What the public functions take as ``data``, told apart here alone; and where they write results."""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import Unpack

from shoal.errors import InputError, did_you_mean, shown
from shoal.files import replacing
from shoal.options import Algorithms, DataOptions, Names, as_flags
from shoal.registry import DATASETS, spelled

if TYPE_CHECKING:
    from shoal.data.tables import Table

Form = Literal["name", "table file", "image folder", "table", "arrays", "hugging face", "domain data"]
TABLE, IMAGE_FOLDER = "table", "image-folder"
"""The datasets that read a user's own file or folder."""
READING = ("encoding", "sheet", "skip_rows")
OF_TABLE = (
    *("label", "domain", "group", "task", "drop", "drop_rows", "kinds", "decimal", "day_first"),
    *READING,
)
"""Options of a table."""


def form_of(data: Any) -> Form:
    """The form of ``data``; anything that has none is an InputError.

    A file that is not there is known by its ending. Text is a name where there is no such file or folder;
    a name with a folder of that name in the working directory is the folder: callers that know names may
    decide otherwise.
    """
    from shoal.data.batch import DomainData
    from shoal.data.hub import is_hf
    from shoal.data.tables import ENDINGS, ending, is_table

    if isinstance(data, str | Path):
        if not str(data).strip():
            raise InputError("data must be the name of a dataset, a file or a folder, got an empty text.")
        path = Path(data).expanduser()
        if path.is_dir():
            return "image folder"
        if ending(path):
            return "table file"
        if path.is_file():
            raise InputError(f"{str(data)!r} is not a table; supported extensions: {', '.join(ENDINGS)}.")
        return "name"
    if isinstance(data, tuple | list):
        return "arrays"
    if is_hf(data):
        return "hugging face"
    if is_table(data):
        return "table"
    if isinstance(data, DomainData):
        return "domain data"
    raise InputError(
        f"data must be the name of a dataset, a file, a folder, a DataFrame, a mapping of columns, a Hugging "
        f"Face dataset or arrays (X, y, domains), got {type(data).__name__}."
    )


@dataclass(frozen=True)
class Source:
    """A registered dataset and its options; of a file or folder, those that read it.

    ``given`` is the name, file or folder, as a command line takes it.
    """

    dataset: str
    options: dict[str, Any]
    given: str = ""

    @property
    def own(self) -> bool:
        """Whether it is a file or folder of the user's, and not a dataset's name."""
        return self.dataset != spelled(self.given)

    @property
    def words(self) -> list[str]:
        """These data and their options on a command line."""
        options = {k: v for k, v in self.options.items() if k not in ("file", "digest", "folder", "held_out")}
        of_table = {k: options.pop(k) for k in OF_TABLE if self.dataset == TABLE and k in options}
        return [self.given, *as_flags({**of_table, **({"data_options": options} if options else {})})]

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
            from shoal.data.images import SIZE

            return [f"Images are resized to {SIZE} × {SIZE} pixels; use data_options size to change this."]
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

    A table in memory is saved to ``folder``, or to one in ``home`` that is named by its content.
    """
    own = dict(options.get("data_options") or {})
    if (bad := options.get("bad_images")) is not None and own.setdefault("bad", bad) != bad:
        raise InputError(f"{bad} contradicts bad={own['bad']} in data_options.", "bad_images")
    if (columns := options.get("columns")) is not None:
        own["columns"] = listed_names(columns)
    given = {k: v for k, v in options.items() if k in OF_TABLE and v not in (None, "", [], {})}
    if "drop" in given:
        given["drop"] = listed_names(options["drop"])
    if not isinstance(data, str | Path):
        data = _saved(table_of(data, given), folder, home)
    source = _find(str(data), own, given)
    if names := listed_names(held_out):
        if "held_out" in source.options:
            raise InputError("is also set in data_options; specify it once.", "held_out")
        if "none" in names and len(names) > 1:
            raise InputError("'none' holds out no domain and cannot be combined with names.", "held_out")
        source.options["held_out"] = [] if names == ["none"] else names[0] if len(names) == 1 else names
    return source


def _find(data: str, options: dict[str, Any], given: dict[str, Any]) -> Source:
    form, name, known = form_of(data), spelled(data), DATASETS.names()
    if form == "table file":
        from shoal.datasets.table import digest_of

        if named := {"file", "digest"} & options.keys():
            raise InputError(f"{min(named)} cannot be set: the file is {data!r}.", "data_options")
        # The digest makes a changed file another dataset: its runs are not taken for the old one's.
        return Source(TABLE, {"file": data, "digest": digest_of(data), **given, **options}, data)
    if given:
        first = next(iter(given))
        raise InputError(f"is for tables, and {data!r} is not a .csv, .parquet or .xlsx file.", first)
    if form == "image folder":
        if name not in known:  # ./name and name/ are folders always
            return Source(IMAGE_FOLDER, {"folder": data, **options}, data)
        if not {"folder", "root"} & options.keys():
            where = f"write './{data}' for the folder of that name in this directory"
            warnings.warn(f"{data!r} is taken as the built-in dataset; {where}.", stacklevel=2)
    elif name not in known:
        hint = did_you_mean(data, [*known, *os.listdir()[:1000]])
        raise InputError(
            f"there is no file or folder {shown(data)}, and no built-in dataset of that name "
            f"(`shoal list datasets`).{hint}"
        )
    return Source(data, options, data)


def table_of(data: Any, given: dict[str, Any]) -> Table:
    """Data in memory as a table; what they say of themselves is added to the options ``given``.

    Of arrays (X, y, domains), the columns are those of X, or x0, x1 …, then the label and the domain. Columns
    that pandas has as categories are categories, whatever they look like.
    """
    from shoal.data.hub import as_mapping, image_columns
    from shoal.data.tables import as_table

    form = form_of(data)
    if form == "hugging face":
        if not isinstance(data, Mapping) and (images := image_columns(data)):
            message = f"column {images[0]!r} contains images"
            raise InputError(f"{message}; use from_hf, or save them as folder/domain/class.")
        data = as_mapping(data)
    elif form == "arrays":
        named = ("label", "domain")[: len(data) - 1]
        data = _columns_of(data, {role: given.setdefault(role, role) for role in named})
    dtypes = getattr(data, "dtypes", {})
    kinds = {str(name): "categorical" for name, kind in dtypes.items() if str(kind) == "category"}
    roles = [given.get(role) for role in ("label", "domain", "group")]
    if kinds := {n: k for n, k in kinds.items() if n not in roles} | dict(given.get("kinds", {})):
        given["kinds"] = kinds
    return as_table(data)


def _columns_of(arrays: Sequence[Any], roles: Mapping[str, str]) -> dict[str, Any]:
    import numpy as np

    if len(arrays) not in (2, 3):
        raise InputError(f"data takes three arrays (X, y, domains), got {len(arrays)}.")
    x, *rest = arrays
    if hasattr(x, "iloc") or isinstance(x, Mapping):
        columns: dict[str, Any] = {str(name): x[name] for name in x}
    else:
        x = np.asarray(x.detach().cpu() if hasattr(x, "detach") else x)
        if x.ndim != 2:
            raise InputError(f"X of data has shape {x.shape}; it must be (rows, columns).")
        columns = {f"x{n}": x[:, n] for n in range(x.shape[1])}
    for (role, name), values in zip(roles.items(), rest, strict=True):
        if name in columns:
            raise InputError(f"X of data already has a column {name!r}; set another name with {role}=.")
        columns[name] = values
    return columns


def _saved(table: Table, folder: str | Path | None, home: str) -> Path:
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
