"""``shoal.export``: a trained model as a file for other programs."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shoal.api.result import Result, output_file, write_output
from shoal.errors import InputError
from shoal.settings import checked

if TYPE_CHECKING:
    from shoal.trained import Trained

Format = Literal["onnx", "torch-export", "safetensors"]
EXTENSIONS: Mapping[str, Format] = {".onnx": "onnx", ".pt2": "torch-export", ".safetensors": "safetensors"}
TOLERANCE = 1e-4
SIZES = (1, 50)
"""Batch sizes that are compared."""


@dataclass(frozen=True, repr=False)
class Exported(Result):
    """The result of :func:`export`.

    Attributes:
        path: file with the model.
        about: file that describes its input and output.
        format: format of the model file.
        difference: largest difference between its outputs and those of the model.
        columns: for an ONNX file that takes raw columns: ``name``, ``kind``, ``input``, ``shape``, ``type``
            and ``value`` of each.
        inputs: kind of input of the model, such as ``table``.
    """

    path: Path
    about: Path
    format: Format
    difference: float
    columns: tuple[Mapping[str, Any], ...] = ()
    inputs: str = "array"

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"path": str(self.path), "about": str(self.about)}

    def __str__(self) -> str:
        lines = [
            f"{self.path} ({self.path.stat().st_size:,} bytes): outputs differ by at most "
            f"{self.difference:.2g} from the model's (allowed: {TOLERANCE:g})."
        ]
        if self.columns:
            lines.append(f"The inputs are {len(self.columns)} raw columns, one input per column.")
        elif self.inputs == "table":
            lines.append("The inputs are preprocessed numbers, not raw columns.")
        return "\n".join([*lines, f"Preprocessing and class names: {self.about}"])


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
            difference, columns = _write(trained, made, chosen)
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
    kind = str(trained.inputs.get("kind", "array"))
    return Exported(path, about, chosen, difference, tuple(columns), kind)


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


def _write(trained: Trained, path: Path, format: Format) -> tuple[float, list[dict[str, Any]]]:
    """Write a file; returns how far its outputs are from the model's, and the columns that it takes."""
    import numpy as np
    import torch

    from shoal.api import onnx
    from shoal.models.baseline import BoostedBaseline
    from shoal.models.lora import merged

    model, columns = trained.model, list[dict[str, Any]]()
    network = onnx.Trees(model) if isinstance(model, BoostedBaseline) else merged(model)
    if format == "onnx" and onnx.takes_columns(trained):
        columns = onnx.write_table(trained, network, path)
        pairs = [onnx.raw_outputs(trained, columns, path, rows) for rows in SIZES]
    else:
        x, *others = (_sample(trained, size, seed) for seed, size in enumerate((onnx.TRACED, *SIZES)))
        run = onnx.write(network, x, path) if format == "onnx" else _write_torch(network, x, path, format)
        with torch.no_grad():
            pairs = [(trained(each).numpy(), run(each)) for each in others]
    if (
        isinstance(model, BoostedBaseline) and model.classes
    ):  # logits are logarithms, which may be of almost nothing
        pairs = [(np.exp(wanted), np.exp(found)) for wanted, found in pairs]
    return max(float(np.abs(found - wanted).max()) for wanted, found in pairs), columns


def _sample(trained: Trained, size: int, seed: int) -> Any:
    """Random input of the shape that the model takes; the length of text depends on the seed."""
    import torch

    about = trained.about
    if not about.input_shape:
        raise InputError("the input shape of this model is not known, so it cannot be exported.")
    kind = getattr(torch, about.numbers or "float32")
    if about.inputs.get("kind") != "text" and not kind.is_floating_point:
        return torch.zeros(size, *about.input_shape, dtype=kind)
    return trained.reader().sample(size, seed)


def _write_torch(network: Any, x: Any, path: Path, format: Format) -> Callable[[Any], Any]:
    """Write a network, traced with the input ``x``; returns what computes its outputs from the file."""
    import torch
    from safetensors.torch import load_file, save_file

    from shoal.api.onnx import traced

    if format == "safetensors":
        save_file({k: v.detach().clone().contiguous() for k, v in network.state_dict().items()}, path)
        return lambda x: torch.func.functional_call(network, load_file(path), (x,)).numpy()
    module, args, shapes = traced(network, x)
    torch.export.save(torch.export.export(module, args, dynamic_shapes=shapes), path)
    loaded = torch.export.load(path).module()
    return lambda x: loaded(x).numpy()
