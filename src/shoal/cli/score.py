"""`shoal score`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shoal.cli.arguments import add_device, seed, warnings_in_words
from shoal.cli.predict import add_reading
from shoal.cli.showing import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Example: shoal score runs/fish labelled.csv --out score.json. Rows without a label, and rows of "
        "classes that the model does not know, are counted and left out. Intervals are about other rows of "
        "the same domains. A column is said to differ from training where sampling does not explain it."
    )
    parser.add_argument("model", type=Path, help="a run's folder, as `shoal train` made it")
    parser.add_argument(
        "data", type=Path, help="a table (.csv, .parquet …), or a folder of images as domain/class/image"
    )
    parser.add_argument("--label", metavar="COLUMN", help="with the truth (default: that of training)")
    parser.add_argument("--domain", metavar="COLUMN", help="with the domains (default: that of training)")
    parser.add_argument("--column", metavar="COLUMN", help="of a table of text: where it is")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.json", help="everything as JSON (in a folder: score.json)"
    )
    add_reading(parser)
    parser.add_argument("--seed", type=seed, default=0, help="of the bootstrap (default: %(default)s)")
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
