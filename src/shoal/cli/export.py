"""`shoal export`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shoal.cli.showing import show
from shoal.errors import InputError

FORMATS = ("onnx", "torch-export", "safetensors")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Example: shoal export runs/fish --format onnx --out fish.onnx. The file takes batches of any size. "
        "Of a model of tables, an ONNX file takes raw columns, one input each; other formats, and other "
        "models, take prepared numbers. Outputs are compared with the model's on random input at two batch "
        "sizes; if they differ by more than 1e-4 nothing is written. What becomes of raw input, and the "
        "names of classes, are written beside it, in FILE.json."
    )
    parser.add_argument("model", type=Path, help="a run's folder, as `shoal train` made it")
    parser.add_argument("--format", choices=FORMATS, default="onnx", help="(default: %(default)s)")
    parser.add_argument(
        "--prepared",
        action="store_true",
        help="ONNX of a table model: take prepared numbers, not raw columns",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="(default: MODEL.onnx, .pt2 or .safetensors)"
    )


def run(given: Any) -> None:
    from shoal.export import ENDINGS, TOLERANCE
    from shoal.trained import load

    model = load(given.model)
    ending = next(ending for ending in ENDINGS if ENDINGS[ending] == given.format)
    path = given.out or Path(f"{(model.folder or given.model).resolve().name}{ending}")
    try:
        made = model.export(path, given.format, prepared=given.prepared)
    except OSError as error:
        raise InputError(f"--out {str(path)!r} cannot be written: {error.strerror or error}.") from error
    takes = "It takes prepared numbers, not raw columns.\n" * (model.inputs.get("kind") == "table")
    if made.columns:
        words = ", ".join(str(c["name"]) for c in made.columns if c["kind"] == "text")
        rest = f" These must come prepared, for ONNX cannot count words: {words}." if words else ""
        takes = f"It takes {len(made.columns)} raw columns, one input each.{rest}\n"
    text = (
        f"{made.path} ({made.path.stat().st_size:,} bytes): outputs differ by at most {made.difference:.2g} "
        f"from the model's, in batches of {' and '.join(map(str, made.sizes))} (allowed: {TOLERANCE:g}).\n"
        f"{takes}How raw input is prepared, and the names of classes: {made.about}"
    )
    show({"format": given.format, **made.to_dict()}, text, given)
