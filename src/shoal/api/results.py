"""`shoal.results`: the runs in a folder as a table."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.options import public

if TYPE_CHECKING:
    import pandas

COLUMNS = (
    *("dataset", "algorithm", "name", "held_out", "seed", "status", "metric"),
    *("test", "validation", "train", "test_last", "validation_last", "train_last"),
    *("step", "steps", "lr", "batch_size", "rule", "seconds", "device", "error", "identity", "path"),
)
"""The columns that there always are."""
NAMED = 5
"""Files that a warning names."""


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
    import pandas

    from shoal.experiments.record import row_of
    from shoal.experiments.store import read_runs

    folder = Path(folder)
    records, broken = read_runs(folder)
    if broken:
        more = f" and {len(broken) - NAMED:,} more" if len(broken) > NAMED else ""
        lines = "; ".join(why.rstrip(".") for why in list(broken.values())[:NAMED])
        warnings.warn(f"{lines}{more}.", stacklevel=2)
    rows = [row_of(r) | {"path": path.relative_to(folder).as_posix()} for path, r in records.items()]
    frame = pandas.DataFrame(rows)
    return frame.reindex(columns=[*COLUMNS, *sorted(set(frame.columns) - set(COLUMNS))])
