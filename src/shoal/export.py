"""A trained model as a file for other programs, checked against the model itself.

The graph takes what the network takes: how raw input becomes that is written beside it, in ``FILE.json``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from shoal.data.inputs import TOKENIZER
from shoal.errors import InputError, unknown_name
from shoal.files import write_atomically
from shoal.trained import ABOUT, RECORD, WEIGHTS, Trained

TOLERANCE = 1e-4
SIZES = (1, 5)
"""Batches that are compared."""
TRACED = 3  # examples with which a graph is made: neither of the above
OWN = (WEIGHTS, ABOUT, RECORD, "config.yaml", "card.md", "metrics.jsonl")
"""Files of a run, beside which an export may be."""
LARGEST = 2**31 - 2**24
"""Bytes of an ONNX file, whose format ends at 2 GiB."""

Run = Callable[[Any], Tensor]
"""From a model's input to its output."""


@dataclass(frozen=True)
class Exported:
    """What was written, and how far its outputs are from the model's."""

    path: Path
    about: Path
    difference: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "file": str(self.path),
            "about": str(self.about),
            "largest_difference": self.difference,
            "batch_sizes": list(SIZES),
        }


def export(trained: Trained, path: str | Path, format: str) -> Exported:
    """Writes the model to ``path`` in one of :data:`FORMATS`; other batch sizes than those tried fit too.

    Random inputs of the real shape go through both at two batch sizes. If outputs differ by more than
    1e-4 nothing is written.
    """
    if format not in FORMATS:
        raise unknown_name("format", format, FORMATS)
    path = Path(path).expanduser()
    if path.is_dir():
        raise InputError(f"{str(path)!r} is a folder; give a file.")
    about = path.with_name(f"{path.name}.json")
    for file in (path, about):
        if file.name in OWN and file.parent.resolve() == trained.folder.resolve():
            raise InputError(f"{str(file)!r} is the model's own and would be lost; give another file.")
    plain = trained.to("cpu").model
    samples = [sample(trained, size, seed) for seed, size in enumerate(SIZES)]
    network = Network(plain, list(samples[0])).eval() if isinstance(samples[0], Mapping) else plain
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
        made = Path(folder) / path.name
        run = FORMATS[format](trained, network, sample(trained, TRACED, len(SIZES)), made)
        difference = max(_difference(plain, run, x) for x in samples)
        if not difference <= TOLERANCE:
            raise InputError(
                f"the exported model's outputs differ by up to {difference:.3g} from the model's, more than "
                f"{TOLERANCE}; nothing was written. Try another --format."
            )
        os.replace(made, path)
    content = {**trained.about.to_dict(), "export": {"format": format, "file": path.name}}
    if trained.inputs.get("tokenizer") == TOKENIZER and (trained.folder / TOKENIZER).is_dir():
        beside = path.with_name(f"{path.name}.{TOKENIZER}")
        # Written anew and not copied: in a stranger's folder there may be links to files of one's own.
        for name, written in trained.reader().kept()[1].items():
            write_atomically(beside / Path(name).name, written)
        content["inputs"] = {**trained.inputs, "tokenizer": beside.name}
    write_atomically(about, json.dumps(content, indent=1).encode())
    return Exported(path, about, difference)


class Network(nn.Module):
    """A network that takes a mapping, with its parts as arguments in their order: graphs have no mappings."""

    def __init__(self, network: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.network, self.names = network, tuple(names)

    def forward(self, *parts: Tensor) -> Any:
        return self.network(dict(zip(self.names, parts, strict=True)))


def sample(trained: Trained, size: int, seed: int) -> Any:
    """Random input of the shape that the model takes."""
    about = trained.about
    if not about.input_shape:
        raise InputError("it is not known which shape of input this model takes, so it cannot be exported.")
    kind = getattr(torch, about.numbers or "float32", None)
    if about.inputs.get("kind") != "text" and isinstance(kind, torch.dtype) and not kind.is_floating_point:
        return torch.zeros(size, *about.input_shape, dtype=kind)
    return trained.reader().sample(size, seed)


def _parts(x: Any) -> tuple[Tensor, ...]:
    return tuple(x.values()) if isinstance(x, Mapping) else (x,)


def _names(x: Any) -> list[str]:
    return list(x) if isinstance(x, Mapping) else ["x"]


def _dynamic(x: Any) -> tuple[dict[int, Any], ...]:
    """Which sizes are open: the batch, and of texts their length as far as the network has places."""
    batch, length = torch.export.Dim("batch"), torch.export.Dim.AUTO
    return tuple({0: batch, 1: length} if isinstance(x, Mapping) else {0: batch} for _ in _parts(x))


def _difference(plain: nn.Module, run: Run, x: Any) -> float:
    with torch.inference_mode():
        wanted = plain(x)
    found = run(x)
    if found.shape != wanted.shape:
        raise InputError(f"the exported model gives {tuple(found.shape)}, not {tuple(wanted.shape)}.")
    return float((found - wanted).abs().max())


def to_safetensors(trained: Trained, network: nn.Module, x: Any, path: Path) -> Run:
    """The weights alone, which are read back into the model."""
    weights = {k: v.detach().clone().contiguous() for k, v in trained.model.state_dict().items()}
    path.write_bytes(save(weights))

    def run(x: Any) -> Tensor:
        again = load_file(path)
        with torch.inference_mode():
            found: Tensor = torch.func.functional_call(trained.model, again, (x,))
        return found

    return run


def to_torch_export(trained: Trained, network: nn.Module, x: Any, path: Path) -> Run:
    """A program of torch.export, for ``torch.export.load``."""
    with _quiet("torch.export"):
        program = torch.export.export(network, _parts(x), dynamic_shapes=_shapes(network, x))
        torch.export.save(program, path)
        again = torch.export.load(path).module()

    def run(x: Any) -> Tensor:
        with torch.no_grad():
            found: Tensor = again(*_parts(x))
        return found

    return run


def to_onnx(trained: Trained, network: nn.Module, x: Any, path: Path) -> Run:
    """An ONNX file, which onnxruntime runs."""
    need_onnx()
    weight = sum(value.nbytes for value in trained.model.state_dict().values())
    if weight > LARGEST:
        raise InputError(
            f"the weights take {weight:,} bytes and an ONNX file holds 2 GiB: --format torch-export."
        )
    onnxruntime = importlib.import_module("onnxruntime")
    with _quiet("ONNX"):
        program = torch.onnx.export(
            network,
            _parts(x),
            dynamo=True,
            dynamic_shapes=_shapes(network, x),
            input_names=_names(x),
            output_names=["output"],
            verbose=False,
        )
        assert program is not None
        program.save(path, external_data=False)  # one file
        session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])

    def run(x: Any) -> Tensor:
        given = {name: part.numpy() for name, part in zip(_names(x), _parts(x), strict=True)}
        return torch.from_numpy(session.run(None, given)[0])

    return run


def _shapes(network: nn.Module, x: Any) -> Any:
    """As torch wants it: several arguments under one star are one argument that is a tuple."""
    return (_dynamic(x),) if isinstance(network, Network) else _dynamic(x)


def need_onnx() -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise InputError(f"--format onnx needs {package}: pip install 'shoal[onnx]'.")


@contextlib.contextmanager
def _quiet(what: str) -> Iterator[None]:
    """Without the exporters' reports; what they refuse is one line."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    except InputError:
        raise
    except Exception as error:  # the exporters and the networks they trace raise whatever they like
        said = [line.strip() for line in str(error).splitlines() if line.strip()]
        first = said[0][:200] if said else type(error).__name__
        raise InputError(f"this model cannot be made into a graph for {what}: {first}") from error
    finally:
        logging.disable(level)


FORMATS: dict[str, Callable[[Trained, nn.Module, Any, Path], Run]] = {
    "onnx": to_onnx,
    "torch-export": to_torch_export,
    "safetensors": to_safetensors,
}
