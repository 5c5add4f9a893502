"""`shoal export`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shoal.cli.showing import show
from shoal.errors import InputError

FORMATS = ("onnx", "torch-export", "safetensors")
EXAMPLE = """\
Example:
  shoal export runs/fish --format onnx --out fish.onnx

The batch size is dynamic. The ONNX file of a table model takes raw columns, one input per column; other \
formats and models take preprocessed inputs. The outputs are compared with those of the model on random \
inputs at two batch sizes; nothing is written if they differ by more than 1e-4. The preprocessing and the \
class names are written to FILE.json."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("model", type=Path, help="run folder written by `shoal train`")
    parser.add_argument(
        "--format", choices=FORMATS, help="file format (default: by the extension of --out, otherwise onnx)"
    )
    parser.add_argument(
        "--prepared",
        action="store_true",
        help="for ONNX of a table model: take preprocessed inputs instead of raw columns",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file to write (default: MODEL.onnx, .pt2 or .safetensors)"
    )


def run(given: Any) -> None:
    from shoal.export import ENDINGS, TOLERANCE
    from shoal.trained import load

    model = load(given.model)
    ending = next(ending for ending in ENDINGS if ENDINGS[ending] == (given.format or "onnx"))
    path = given.out or Path(f"{(model.folder or given.model).resolve().name}{ending}")
    try:
        made = model.export(path, given.format, prepared=given.prepared)
    except OSError as error:
        raise InputError(f"--out {str(path)!r} cannot be written: {error.strerror or error}.") from error
    takes = "The inputs are preprocessed numbers, not raw columns.\n" * (model.inputs.get("kind") == "table")
    if made.columns:
        words = ", ".join(str(c["name"]) for c in made.columns if c["kind"] == "text")
        rest = f" These must be preprocessed, because ONNX cannot count words: {words}." if words else ""
        takes = f"The inputs are {len(made.columns)} raw columns, one input per column.{rest}\n"
    text = (
        f"{made.path} ({made.path.stat().st_size:,} bytes): outputs differ by at most {made.difference:.2g} "
        f"from the model's, in batches of {' and '.join(map(str, made.sizes))} (allowed: {TOLERANCE:g}).\n"
        f"{takes}Preprocessing and class names: {made.about}"
    )
    format = given.format or ENDINGS.get(path.suffix.lower(), "onnx")
    show({"format": format, **made.to_dict()}, text, given)
