"""Reading what was typed."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from shoal.errors import InputError

Result = TypeVar("Result")


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


def add_data(parser: argparse._ActionsContainer, whose: str) -> None:
    """The options of datasets; :func:`data_options` reads them."""
    parser.add_argument("--data", nargs="+", default=[], metavar="NAME=VALUE", help=f"{whose} options")
    parser.add_argument(
        "--bad-images", choices=("stop", "skip"), help="at a picture that cannot be read (default: stop)"
    )


def data_options(given: Any) -> dict[str, Any]:
    """The dataset's options, --bad-images among them."""
    options = values(given.data, "--data")
    if given.bad_images is not None:
        if options.get("bad", given.bad_images) != given.bad_images:
            raise InputError(f"--bad-images {given.bad_images}, but --data bad={options['bad']}; give one.")
        options["bad"] = given.bad_images
    return options


def add_data_dir(parser: argparse._ActionsContainer) -> None:
    """For commands that load datasets; their ``run`` is then decorated with :func:`in_data_dir`."""
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="where datasets are (default: $SHOAL_DATA)"
    )


def in_data_dir(run: Callable[[Any], Result]) -> Callable[[Any], Result]:
    """Runs a command where datasets are looked for in --data-dir, by its worker processes too.

    It is no option of the dataset: the same run is the same one wherever its files are.
    """

    @functools.wraps(run)
    def wrapped(given: Any) -> Result:
        with _variable(given.data_dir):
            return run(given)

    return wrapped


@contextlib.contextmanager
def _variable(folder: Path | None) -> Iterator[None]:
    if folder is None:
        yield
        return
    from shoal.data.folders import VARIABLE

    folder = folder.expanduser()
    if not folder.is_dir():
        raise InputError(f"--data-dir: there is no folder {str(folder)!r}.")
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(folder.resolve())
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before


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
