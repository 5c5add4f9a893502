"""`shoal.results`: the runs in a folder as a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.settings import checked

if TYPE_CHECKING:
    from shoal.experiments.results import Results


@checked
def results(folder: str | Path) -> Results:
    """The runs in ``folder`` and below, whoever started them: each once, of several records the newest.

    Args:
        folder: with records of runs: of `shoal train`, `compare`, `sweep`, of :func:`shoal.fit` and others.

    Returns:
        Results: a table that shows itself in a notebook; see its methods ``where``, ``sorted``, ``group``,
        ``to_frame`` and ``save``.

    Examples:
        >>> import shoal
        >>> shoal.results("runs").where('status == "failed"').column("error")  # doctest: +SKIP
        []
    """
    from shoal.experiments.results import load

    return load(folder)
