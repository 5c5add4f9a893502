"""`shoal diagnose`."""

from __future__ import annotations

import argparse
import shlex
import sys
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
from shoal.cli.showing import draw, show
from shoal.errors import InputError
from shoal.terminal import clear_line

SUMMARY = "Test the domains for shifts before training: in what they differ, in which columns, and the gap."
EXAMPLE = (
    "Examples: shoal diagnose rotated-digits; shoal diagnose patients.csv --label ill --domain hospital. "
    "All domains are used, those of the test split too: it is a look at data, not a test of a method. "
    "Random numbers come from --seed alone; on a slow machine the time budget may shorten the trainings."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    add_source(parser)
    parser.add_argument(
        "--model",
        help="(default: the dataset's own; for images and text a small network on a fixed embedding)",
    )
    parser.add_argument("--steps", type=count, default=150, help="of each short training (default: 150)")
    parser.add_argument(
        "--batch-size", type=count, default=32, help="examples per batch (default: %(default)s)"
    )
    parser.add_argument("--lr", type=rate, default=1e-3, help="Adam's learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=seed, default=0, help="(default: %(default)s)")
    parser.add_argument(
        "--examples", type=count, default=2000, metavar="N", help="to sample in all (default: %(default)s)"
    )
    parser.add_argument(
        "--max-domains", type=count, default=12, metavar="N", help="to sample (default: at most %(default)s)"
    )
    parser.add_argument(
        "--budget",
        type=positive,
        default=120.0,
        metavar="SECONDS",
        help="to aim at: trainings are shortened where they would take longer (default: %(default).0f)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("shoal-diagnose"), metavar="DIR", help="(default: %(default)s)"
    )
    add_device(parser)


@in_data_dir
def run(given: Any) -> None:
    from shoal.data import sets
    from shoal.experiments.diagnose import diagnose
    from shoal.files import dump_json, write_atomically
    from shoal.models import build
    from shoal.report import diagnose as view
    from shoal.training.processes import together

    if together():
        raise InputError("diagnose runs in one process; start it without torchrun.")
    name, options = source(given)
    with warnings_in_words():
        data = sets.load(name, **options)
    if hasattr(data.examples, "unguarded"):
        data = replace(data, examples=data.examples.unguarded())
    make_folder(given.out, given.dataset)
    try:
        show_columns(given, given.out)
    except OSError as error:
        raise InputError(f"--out {str(given.out)!r}: {error.strerror or error}.") from error

    def make(seed: int) -> Any:
        return build(given.model, input_shape=data.input_shape, classes=data.classes, seed=seed)

    progress = _Progress()
    try:
        found = diagnose(
            data,
            make if given.model else None,
            steps=given.steps,
            seed=given.seed,
            batch_size=given.batch_size,
            lr=given.lr,
            examples=given.examples,
            domains=given.max_domains,
            budget=given.budget,
            device=given.device,
            tell=progress.tell,
        )
    except KeyboardInterrupt as stop:
        raise type(stop)("stopped. A diagnosis is made in one go; nothing was written.") from None
    finally:
        progress.end()
    result = {"dataset": given.dataset, **found.to_dict()}
    command, without = comparison(given), comparison(given, view.to_drop(result))
    result["reading"] = view.reading(result, command, without)
    try:
        write_atomically(given.out / "diagnosis.json", dump_json(result))
        with warnings_in_words():
            pictures = draw(lambda: view.figure(result, given.dataset), given.out / "diagnosis")
    except OSError as error:
        raise InputError(f"--out {str(given.out)!r}: {error.strerror or error}.") from error
    saved = f"{found.seconds:.0f} s. Saved in {given.out}: diagnosis.json."
    show(result, f"{view.text(result, command, without)}\n\n{saved}", given, pictures)


def comparison(given: Any, drop: Sequence[str] = ()) -> str:
    """The beginning of a `shoal compare` on the same data, without the columns ``drop``."""
    words = ["shoal", "compare", given.dataset]
    words += given_table(argparse.Namespace(**{**vars(given), "drop": [*given.drop, *drop]}))
    words += ["--data", *given.data] if given.data else []
    words += ["--bad-images", given.bad_images] if given.bad_images else []
    words += ["--data-dir", str(given.data_dir)] if given.data_dir else []
    words += ["--model", given.model] if given.model else []
    return shlex.join(words)


class _Progress:
    """On stderr: a bar on a terminal, elsewhere one line per phase."""

    def __init__(self) -> None:
        self.terminal, self.phase = sys.stderr.isatty(), ""

    def tell(self, phase: str, done: int, total: int) -> None:
        if self.terminal:
            full = 24 * done // max(total, 1)
            clear_line(sys.stderr)
            sys.stderr.write(f"[{'#' * full}{'-' * (24 - full)}] {phase}: {done:,} of {total:,}")
            sys.stderr.flush()
        elif phase != self.phase:
            print(phase, file=sys.stderr, flush=True)
        self.phase = phase

    def end(self) -> None:
        if self.terminal and self.phase:
            clear_line(sys.stderr)
            sys.stderr.flush()
