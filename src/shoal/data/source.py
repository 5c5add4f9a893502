"""What a public function was given as ``data``: the one place that tells the forms of data apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from shoal.errors import InputError

Form = Literal["name", "table file", "image folder", "table", "arrays", "hugging face", "domain data"]


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


def table_of(data: Any, label: str = "label", domain: str = "domain") -> Any:
    """Data in memory as a DataFrame or a mapping of columns.

    Of arrays (X, y, domains), the columns are those of X, or x0, x1 …, then ``label`` and ``domain``.
    """
    from shoal.data.hub import as_mapping, image_columns

    form = form_of(data)
    if form == "hugging face":
        columns = as_mapping(data)
        if images := image_columns(data):
            message = f"column {images[0]!r} contains images"
            raise InputError(f"{message}; use from_hf, or save them as folder/domain/class.")
        return columns
    return _columns_of(data, label, domain) if form == "arrays" else data


def _columns_of(arrays: Sequence[Any], label: str, domain: str) -> dict[str, Any]:
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
    for role, name, values in zip(("label", "domain"), (label, domain), rest, strict=False):
        if name in columns:
            raise InputError(f"X of data already has a column {name!r}; set another name with {role}=.")
        columns[name] = values
    return columns
