"""``shoal.export``: a trained model as a file for other programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoal.api.result import Result
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
        columns: for an ONNX file that takes raw columns: ``name``, ``kind``, ``input``, ``type`` and
            ``value`` of each.
        inputs: kind of input of the model, such as ``table``.
    """

    path: Path
    about: Path
    format: Format
    difference: float
    columns: tuple[Mapping[str, Any], ...] = ()
    inputs: str = "array"

    def to_dict(self) -> dict[str, Any]:
        paths = {"path": str(self.path), "about": str(self.about)}
        return {**vars(self), **paths, "columns": list(self.columns)}

    def __str__(self) -> str:
        lines = [
            f"{self.path} ({self.path.stat().st_size:,} bytes): outputs differ by at most "
            f"{self.difference:.2g} from the model's (allowed: {TOLERANCE:g})."
        ]
        if self.columns:
            lines.append(f"The inputs are {len(self.columns)} raw columns, one input per column.")
            if text := ", ".join(str(c["name"]) for c in self.columns if c["kind"] == "text"):
                lines[-1] += f" These must be preprocessed, because ONNX cannot count words: {text}."
        elif self.inputs == "table":
            lines.append("The inputs are preprocessed numbers, not raw columns.")
        return "\n".join([*lines, f"Preprocessing and class names: {self.about}"])


@checked
def export(model: Any, out: str | Path | None = None, *, format: Format | None = None) -> Exported:
    """Export a trained model for use without Shoal; the batch size is dynamic. ::

        shoal.export("runs/fish", "fish.onnx")

    The ONNX file of a table model takes raw columns, one input per column; other formats and models take
    preprocessed inputs. The outputs are compared with those of the model on random inputs at two batch sizes;
    nothing is written if they differ by more than 1e-4. The preprocessing and the class names are written to
    FILE.json. LoRA adapters are merged into the weights.

    Args:
        model: run folder, or model from :func:`shoal.load`.
        out: file to write (default: the name of the run folder, with the extension of the format).
        format: onnx, torch-export or safetensors (default: by the extension of out, otherwise onnx).
    """
    from shoal.api.exporting import write
    from shoal.trained import as_trained, output_of

    trained = as_trained(model, "cpu")
    if out is None:
        extension = next(e for e, name in EXTENSIONS.items() if name == (format or "onnx"))
        out = f"{trained.folder.resolve().name if trained.folder else 'model'}{extension}"
    path = output_of(trained, out)
    about = output_of(trained, f"{path}.json")
    by_name = EXTENSIONS.get(path.suffix.lower())
    chosen = format or by_name or "onnx"
    if by_name not in (None, chosen):
        raise InputError(f"{chosen} contradicts the extension of {path.name!r}; specify only one.", "format")
    try:
        return write(trained, path, about, chosen)
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be written: {error.strerror or error}.", "out") from error
