"""``shoal.export``: a trained model as a file for other programs."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoal.api.result import Result, output_file, write_output
from shoal.errors import InputError
from shoal.settings import checked

Format = Literal["onnx", "torch-export", "safetensors"]
EXTENSIONS: Mapping[str, Format] = {".onnx": "onnx", ".pt2": "torch-export", ".safetensors": "safetensors"}
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Exported(Result):
    """The result of :func:`export`.

    Attributes:
        path: file with the model.
        about: file that describes its input and output.
        format: format of the model file.
        difference: largest difference between its outputs and those of the model.
        columns: for an ONNX file that takes raw columns: ``name``, ``kind``, ``input``, ``shape`` and
            ``type`` of each.
    """

    path: Path
    about: Path
    format: Format
    difference: float
    columns: tuple[Mapping[str, Any], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"path": str(self.path), "about": str(self.about)}

    def __str__(self) -> str:
        inputs = f"{len(self.columns)} raw columns, one input per column" if self.columns else "preprocessed"
        return (
            f"{self.path} ({self.path.stat().st_size:,} bytes): outputs differ by at most "
            f"{self.difference:.2g} from the model's (allowed: {TOLERANCE:g}).\n"
            f"The inputs are {inputs}. Preprocessing and class names: {self.about}"
        )


@checked
def export(model: Any, out: str | Path | None = None, *, format: Format | None = None) -> Exported:
    """Export a trained model for use without Shoal; the batch size is dynamic. ::

        shoal.export("runs/fish", "fish.onnx")

    The ONNX file of a table model without text columns takes raw columns, one input per column; other formats
    and models take preprocessed inputs. The outputs are compared with those of the model on random inputs at
    two batch sizes; nothing is written if they differ by more than 1e-4. The preprocessing and the class
    names are written to FILE.json. LoRA adapters are merged into the weights.

    Args:
        model: run folder, or model from :func:`shoal.load`.
        out: file to write (default: the name of the run folder, with the extension of the format).
        format: onnx, torch-export or safetensors (default: by the extension of out, otherwise onnx).
    """
    from shoal.api.formats import write
    from shoal.data.inputs import TOKENIZER
    from shoal.models.baseline import BoostedBaseline
    from shoal.trained import as_trained

    trained = as_trained(model, "cpu")
    if out is None:
        extension = next(e for e, name in EXTENSIONS.items() if name == (format or "onnx"))
        out = f"{trained.folder.resolve().name}{extension}"
    path, about = output_file(out), output_file(f"{out}.json")
    by_name = EXTENSIONS.get(path.suffix.lower())
    chosen = format or by_name or "onnx"
    if by_name not in (None, chosen):
        raise InputError(f"{chosen} contradicts the extension of {path.name!r}; specify only one.", "format")
    if isinstance(trained.model, BoostedBaseline) and chosen != "onnx":
        raise InputError(f"a {trained.about.model['name']} model can only be exported as onnx.", "format")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / path.name
        with _quiet(chosen):
            difference, columns = write(trained, made, chosen)
        if not difference <= TOLERANCE:
            raise InputError(
                f"the outputs of the exported model differ from the model's by up to {difference:.3g} "
                f"(allowed: {TOLERANCE:g}); nothing was written. Try another format."
            )
        write_output(path, made.read_bytes())
    content = trained.about.model_dump(mode="json")
    content["export"] = {"format": chosen, "file": path.name, "columns": columns}
    options = content["model"].get("options", {})  # adapters are merged into the weights
    content["model"]["options"] = {k: v for k, v in options.items() if not k.startswith("lora")}
    if trained.inputs.get("tokenizer") == TOKENIZER:
        content["inputs"]["tokenizer"] = f"{path.name}.{TOKENIZER}"
        for name, file in trained.files().items():
            if name.startswith(f"{TOKENIZER}/"):
                write_output(path.parent / f"{path.name}.{name}", file)
    write_output(about, json.dumps(content, indent=1).encode())
    return Exported(path, about, chosen, difference, tuple(columns))


@contextlib.contextmanager
def _quiet(format: str) -> Iterator[None]:
    """Without the reports of exporters; what they refuse is one InputError."""
    from shoal.trained import input_errors

    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            input_errors(f"this model cannot be exported as {format}"),
            warnings.catch_warnings(action="ignore"),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            yield
    finally:
        logging.disable(level)
