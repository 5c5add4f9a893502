"""`shoal.results`: the runs in a folder as a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.options import public

if TYPE_CHECKING:
    import pandas


@public()
def results(folder: str | Path) -> pandas.DataFrame:
    """Return the runs in a folder and its subfolders as a DataFrame, one row per run.

    Of several records of the same run, the newest counts. ``test``, ``validation`` and ``train`` are the
    scores at the selected step, ``test_last`` and so on those at the last step, ``test.X`` that of domain or
    metric X; runs that diverged or failed have none. ``settings.X``, ``data.X``, ``model.X`` and
    ``optimizer.X`` are options; other columns are fields of the configuration. Files that are no records
    give a warning.

        >>> import shoal
        >>> _ = shoal.sweep("linear", algorithms="erm", seeds=2, search=1, steps=2, out="all", progress=False)
        >>> runs = shoal.results("all")
        >>> runs.groupby("held_out")["test"].count().tolist()
        [2, 2, 2]

    Args:
        folder: folder with runs, written by `shoal train`, `compare`, `sweep`, :func:`shoal.fit` and others.
    """
    from shoal.experiments.store import Store

    return Store(folder).frame()
