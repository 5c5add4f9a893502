"""Reading what was typed."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.errors import InputError


def count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return value


def values(pairs: Sequence[str], option: str) -> dict[str, Any]:
    """``name=value`` pairs; values are read as YAML: numbers, true, null, [1, 2], and else text."""
    import yaml

    found = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise InputError(f"{option} takes NAME=VALUE pairs, got {pair!r}.")
        value = yaml.safe_load(text)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):  # YAML reads 1e-3 as text
                value = float(value)
        found[name] = value
    return found


def make_folder(path: Path) -> None:
    """Makes the folder that results will go to, now rather than after the work."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {str(path)!r} cannot be a folder: {error.strerror}.") from error
    if not os.access(path, os.W_OK):
        raise InputError(f"--out {str(path)!r} cannot be written to.")


def add_running(parser: argparse.ArgumentParser) -> None:
    """The options of commands that run many trainings."""
    add_device(parser)
    parser.add_argument(
        "--at-once", type=count, metavar="P", help="runs side by side (default: one a core; on CUDA ten)"
    )


def add_device(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--device", help="cpu, cuda, cuda:1 … (default: cuda where there is one)")
