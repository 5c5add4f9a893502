"""`shoal.results`: the runs in a folder as a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.settings import checked

if TYPE_CHECKING:
    from shoal.experiments.results import Results


@checked
def results(folder: str | Path) -> Results:
    """Load the records of all runs in a folder and its subfolders.

    Each run is included once, with its newest record.

    >>> import shoal
    >>> shoal.results("runs").where('status == "failed"').column("error")  # doctest: +SKIP
    []

    Args:
        folder: folder with records, written by `shoal train`, `compare`, `sweep`, :func:`shoal.fit` and
            others.

    Returns:
        Results: a table; see its methods ``where``, ``sorted``, ``group``, ``to_frame`` and ``save``.
    """
    from shoal.experiments.results import load

    return load(folder)
