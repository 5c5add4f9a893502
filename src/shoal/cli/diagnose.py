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

EXAMPLE = (
    "Examples: shoal diagnose rotated-digits; shoal diagnose patients.csv --label ill --domain hospital. "
    "All domains are used, those of the test split too: it is a look at data, not a test of a method. "
    "Random numbers come from --seed alone; on a slow machine the time budget may shorten the trainings."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    add_source(parser)
    usual = "the dataset's own; for images and text a small network on a fixed embedding"
    parser.add_argument("--model", help=f"(default: {usual})")
    for name, kind, default, words in (
        ("--steps", count, 150, "of each short training"),
        ("--batch-size", count, 32, "examples per batch"),
        ("--lr", rate, 1e-3, "Adam's learning rate"),
        ("--seed", seed, 0, "of all random numbers"),
        ("--examples", count, 2000, "to sample in all"),
        ("--max-domains", count, 12, "to sample at most"),
        ("--budget", positive, 120.0, "seconds to aim at: trainings are shortened to keep to it"),
        ("--out", Path, Path("shoal-diagnose"), "folder for diagnosis.json and the figure"),
    ):
        parser.add_argument(name, type=kind, default=default, help=f"{words} (default: %(default)s)")
    add_device(parser)


@in_data_dir
def run(given: Any) -> None:
    from shoal.api.diagnose import diagnose
    from shoal.report.diagnose import to_drop
    from shoal.training.processes import together

    if together():
        raise InputError("diagnose runs in one process; start it without torchrun.")
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
        raise type(stop)("stopped. A diagnosis is made in one go; nothing was written.") from None
    except OSError as error:
        raise InputError(f"--out {str(given.out)!r}: {error.strerror or error}.") from error
    saved = f"{found.seconds:.0f} s. Saved in {given.out}: {content.name}."
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
