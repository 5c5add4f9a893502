"""`shoal score`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shoal.cli.arguments import add_device, seed, warnings_in_words
from shoal.cli.predict import add_reading
from shoal.cli.showing import show

EXAMPLE = """\
Example:
  shoal score runs/fish labelled.csv --out score.json

Rows without a label, and rows of classes that are unknown to the model, are counted and excluded. \
Confidence intervals account for the sampling of rows within the same domains. A column is reported as \
drifted if its distribution differs from training by more than sampling explains."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("model", type=Path, help="run folder written by `shoal train`")
    parser.add_argument(
        "data",
        type=Path,
        help="table (.csv, .parquet …), or folder of images arranged as folder/domain/class",
    )
    parser.add_argument("--label", metavar="COLUMN", help="column to predict (default: as in training)")
    parser.add_argument(
        "--domain", metavar="COLUMN", help="column with the domain of each row (default: as in training)"
    )
    parser.add_argument("--column", metavar="COLUMN", help="text column of a table, for text models")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.json", help="JSON file to write (in a folder: score.json)"
    )
    add_reading(parser)
    parser.add_argument(
        "--seed",
        type=seed,
        default=0,
        metavar="N",
        help="random seed of the bootstrap (default: %(default)s)",
    )
    add_device(parser)


@warnings_in_words()
def run(given: Any) -> None:
    from shoal.scoring import score
    from shoal.training.folder import check_output, files_of
    from shoal.training.processes import pick_device

    path = given.out
    if path is not None:
        path = path if path.suffix.lower() == ".json" else path / "score.json"
        check_output(path, [given.data, *files_of(given.model)], "--out")
    names = ("label", "domain", "column", "batch_size", "workers", "bad_images", "seed")
    options = {name: getattr(given, name) for name in names}
    found = score(given.model, given.data, device=pick_device(given.device), **options)
    saved = f"\n\nSaved in {found.save(path)}." if path is not None else ""
    show(found.to_dict(), f"{found}{saved}", given)
