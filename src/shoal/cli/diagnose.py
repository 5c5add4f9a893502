"""`shoal diagnose`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.cli.arguments import (
    add_device,
    add_source,
    argument_help,
    count,
    given_table,
    in_data_dir,
    make_folder,
    positive,
    rate,
    seed,
    show_columns,
    source,
    warnings_in_words,
)
from shoal.cli.showing import show
from shoal.errors import InputError

EXAMPLE = """\
Examples:
  shoal diagnose rotated-digits
  shoal diagnose patients.csv --label ill --domain hospital

This describes the data and does not evaluate a method: it uses all domains, including those of the test \
split. Results depend only on --seed, unless --budget shortens the training runs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    add_source(parser)
    from shoal.api.diagnose import diagnose

    explained = argument_help(diagnose)
    parser.add_argument("--model", help=explained["model"])
    for name, kind, default, metavar in (
        ("steps", count, 150, "N"),
        ("batch_size", count, 32, "N"),
        ("lr", rate, 1e-3, None),
        ("seed", seed, 0, "N"),
        ("examples", count, 2000, "N"),
        ("max_domains", count, 12, "N"),
        ("budget", positive, 120.0, "SECONDS"),
        ("out", Path, Path("shoal-diagnose"), "DIR"),
    ):
        text = f"{explained[name]} (default: %(default)s)"
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=text)
    add_device(parser)


@in_data_dir
def run(given: Any) -> None:
    from shoal.api.diagnose import diagnose
    from shoal.report.diagnose import to_drop
    from shoal.training.processes import together

    if together():
        raise InputError("diagnose runs in one process; run it without torchrun.")
    options = {k: v for k, v in source(given)[1].items() if k not in ("file", "folder")}
    names = ("model", "steps", "seed", "batch_size", "lr", "examples", "max_domains", "budget", "device")
    try:
        make_folder(given.out, given.dataset)
        show_columns(given, given.out)
        with warnings_in_words():
            found = diagnose(
                given.dataset, data_options=options, **{name: getattr(given, name) for name in names}
            )
            drop = to_drop(found.to_dict())
            compare, without = comparison(given), comparison(given, drop)
            found = replace(found, name=given.dataset, compare=compare, without=without)
            content, *pictures = found.save(given.out)
    except KeyboardInterrupt as stop:
        raise type(stop)("interrupted. Nothing was written.") from None
    except OSError as error:
        raise InputError(f"--out {str(given.out)!r}: {error.strerror or error}.") from error
    saved = f"Finished in {found.seconds:.0f} s. Saved in {given.out}: {content.name}."
    show(found.to_dict(), f"{found}\n\n{saved}", given, pictures)


def comparison(given: Any, drop: Sequence[str] = ()) -> str:
    """The beginning of a `shoal compare` on the same data, without the columns ``drop``."""
    words = ["shoal", "compare", given.dataset]
    words += given_table(argparse.Namespace(**{**vars(given), "drop": [*given.drop, *drop]}))
    words += ["--data", *given.data] if given.data else []
    for name in ("bad_images", "data_dir", "model"):
        if value := getattr(given, name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)
