"""`shoal show`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shoal.cli.showing import describe_run, show
from shoal.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="folder of a run, or of several runs")


def run(given: Any) -> None:
    from shoal.experiments.status import RunStatus, runs_in

    folder: Path = given.folder
    if not folder.is_dir():
        raise InputError(f"there is no folder {str(folder)!r}.")
    folders = runs_in(folder)
    if not folders:
        raise InputError(f"{str(folder)!r} contains no run: there is no config.yaml in it or its subfolders.")
    found, broken = [], {}
    for path in folders:
        try:
            found.append(RunStatus.of(path))
        except InputError as error:  # one that cannot be read must not hide the others
            broken[str(path)] = str(error)
            if len(folders) == 1:
                raise
    each = [*(f"{s.folder}: {s.line}" for s in found), *(f"{path}: {why}" for path, why in broken.items())]
    text = describe_run(found[0]) if len(folders) == 1 else "\n".join(each)
    show({"runs": [s.to_dict() for s in found], "broken": broken}, text, given)
