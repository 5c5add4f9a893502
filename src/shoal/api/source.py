"""What the public functions take as ``data``, told apart here alone; and where they write results."""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from typing_extensions import Unpack

from shoal.errors import InputError, did_you_mean, shown
from shoal.files import replacing
from shoal.options import Algorithms, DataOptions, Names, RoleOptions, TableOptions, as_flags, declared
from shoal.registry import DATASETS, spelled

Form = Literal["name", "table file", "image folder", "table", "arrays", "hugging face", "domain data"]
TABLE, IMAGE_FOLDER = "table", "image-folder"
"""The datasets that read a user's own file or folder."""
TABLE_NAMES = tuple(n for n in (*declared(RoleOptions), *declared(TableOptions)) if n != "columns")
"""Options of a table that have a flag."""


def form_of(data: Any) -> Form:
    """The form of ``data``; anything that has none is an InputError.

    A file that is not there is known by its ending. Text is a name where there is no such file or folder.
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
    """A registered dataset and its options; ``given`` is its name, file or folder on a command line."""

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
        of_table = {k: options.pop(k) for k in TABLE_NAMES if self.dataset == TABLE and k in options}
        return [self.given, *as_flags({**of_table, **({"data_options": options} if options else {})})]

    def columns(self) -> dict[str, Any] | None:
        """What the columns of a table are taken for, as `shoal data check` reports it."""
        if self.dataset != TABLE or not {"file", "label", "domain"} <= self.options.keys():
            return None
        from shoal.data.tables import check_table

        file = Path(self.options["file"])
        options = {name: self.options[name] for name in (*TABLE_NAMES, "columns") if name in self.options}
        return {"file": file.name, **check_table(file, **options)}

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
    given = {k: v for k, v in options.items() if k in TABLE_NAMES and v not in (None, "", [], {})}
    if not isinstance(data, str | Path):
        data = _saved(data, given, folder, home)
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
    if form == "image folder" and name not in known:  # ./name and name/ are folders always
        return Source(IMAGE_FOLDER, {"folder": data, **options}, data)
    if form == "image folder" and not {"folder", "root"} & options.keys():
        where = f"write './{data}' for the folder of that name in this directory"
        warnings.warn(f"{data!r} is taken as the built-in dataset; {where}.", stacklevel=2)
    if name not in known:
        hint = did_you_mean(data, [*known, *os.listdir()[:1000]])
        raise InputError(
            f"there is no file or folder {shown(data)}, and no built-in dataset of that name "
            f"(`shoal list datasets`).{hint}"
        )
    return Source(data, options, data)


def _saved(data: Any, given: dict[str, Any], folder: str | Path | None, home: str) -> Path:
    """A Parquet file of a table in memory, named by its content, from which worker processes read it.

    What the data say of themselves is added to the options ``given``: the label and domain of arrays
    (X, y, domains), and pandas' categories, which are categories whatever they look like.
    """
    import pandas as pd

    from shoal.data.hub import as_mapping, image_columns
    from shoal.data.tables import read

    form = form_of(data)
    if form == "hugging face":
        if not isinstance(data, Mapping) and (images := image_columns(data)):
            message = f"column {images[0]!r} contains images"
            raise InputError(f"{message}; use from_hf, or save them as folder/domain/class.")
        data = as_mapping(data)
    elif form == "arrays":
        data = _columns_of(data, given)
    roles = [given.get(role) for role in ("label", "domain", "group")]
    dtypes = {str(name): str(kind) for name, kind in getattr(data, "dtypes", {}).items()}
    kinds = {name: kind for name, kind in dtypes.items() if kind == "category" and name not in roles}
    if kinds := {**dict.fromkeys(kinds, "categorical"), **given.get("kinds", {})}:
        given["kinds"] = kinds
    frame = read(data)
    rows = pd.util.hash_pandas_object(frame, index=False).to_numpy().tobytes()
    digest = hashlib.sha256(repr(list(frame)).encode() + rows).hexdigest()[:16]
    path = (Path(home) / digest if folder is None else Path(folder)) / f"data-{digest}.parquet"
    if not path.exists():
        make_folder(path.parent)
        with replacing(path) as file:
            frame.to_parquet(file)
    return path


def _columns_of(arrays: Any, given: dict[str, Any]) -> Any:
    """Arrays (X, y, domains) as a frame: the columns of X, or x0, x1 …, then the label and the domain."""
    import numpy as np
    import pandas as pd

    if len(arrays) not in (2, 3):
        raise InputError(f"data takes three arrays (X, y, domains), got {len(arrays)}.")
    x, *rest = arrays
    if not isinstance(x, pd.DataFrame | Mapping):
        x = np.asarray(x.detach().cpu() if hasattr(x, "detach") else x)
        if x.ndim != 2:
            raise InputError(f"X of data has shape {x.shape}; it must be (rows, columns).")
        x = {f"x{n}": x[:, n] for n in range(x.shape[1])}
    columns = {str(name): x[name] for name in x}
    for role, values in zip(("label", "domain"), rest, strict=False):
        if (name := given.setdefault(role, role)) in columns:
            raise InputError(f"X of data already has a column {name!r}; set another name with {role}=.")
        columns[name] = values
    return columns


def listed_names(names: Names | None) -> list[str]:
    """Names as a list, each once."""
    several = [names] if isinstance(names, (str, int)) else list(names or ())
    return list(dict.fromkeys(str(name) for name in several))


def listed_algorithms(algorithms: Algorithms | None) -> list[str]:
    """Algorithms as run configurations name them, each once; classes and files of the user's by reference."""
    from shoal.algorithms import REFERENCE, algorithm_class, display_name, reference, split_draw
    from shoal.experiments.baselines import SUMMARIES
    from shoal.training.recipes import find_recipe

    several = [algorithms] if isinstance(algorithms, (str, type)) else list(algorithms or ())
    rows: dict[str, str] = {}
    for each in several:
        name, draw = split_draw(each) if isinstance(each, str) else (each, None)
        name = reference(name)
        if not REFERENCE.fullmatch(name):
            name = spelled(name)
            if name in SUMMARIES:
                raise InputError(f"{name!r} is a baseline; compare includes all baselines.", "algorithms")
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
