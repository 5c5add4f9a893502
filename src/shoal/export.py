"""A trained model as a file for other programs, checked against the model itself.

Of a model of tables, an ONNX file takes raw columns: what becomes of them is part of its graph. Other files
take what the network takes, and how raw input becomes that is written beside them, in ``FILE.json``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save
from torch import Tensor, nn

from shoal.data.cells import MISSING
from shoal.data.inputs import TOKENIZER
from shoal.data.table import CLIP
from shoal.errors import InputError, unknown_name
from shoal.files import read_bytes, replacing, write_atomically
from shoal.models.lora import merged
from shoal.trained import Trained, first_line
from shoal.training.folder import check_output, files_of

TOLERANCE = 1e-4
SIZES, ROWS, TRACED = (1, 5), (1, 100), 3
"""Batches that are compared; raw rows that are, of a model of tables; with how many a graph is traced."""
LARGEST = 2**31 - 2**24
"""Bytes of an ONNX file, whose format ends at 2 GiB."""
ENDINGS = {".onnx": "onnx", ".pt2": "torch-export", ".safetensors": "safetensors"}

Run = Callable[[Any], Tensor]
"""From a model's input to its output."""


@dataclass(frozen=True)
class Exported:
    """What was written, and how far its outputs are from the model's."""

    path: Path
    about: Path
    difference: float
    sizes: tuple[int, ...] = SIZES
    columns: tuple[Mapping[str, Any], ...] = ()
    """Where it takes raw columns: each one's ``name``, ``kind``, and the ``input`` of the graph for it."""

    def to_dict(self) -> dict[str, Any]:
        files = {"file": str(self.path), "about": str(self.about), "largest_difference": self.difference}
        return {**files, "batch_sizes": list(self.sizes), "columns": list(self.columns)}


def export(
    trained: Trained, path: str | Path, format: str | None = None, *, prepared: bool = False
) -> Exported:
    """Export a trained model for use without Shoal; the batch size is dynamic. ::

        shoal.load("runs/fish").export("fish.onnx")

    The outputs are compared with those of the model on random inputs at two batch sizes; nothing is written
    if they differ by more than 1e-4. LoRA adapters are merged into the weights, so that the file does not
    need peft.

    Args:
        trained: model, from :func:`shoal.load`.
        path: file to write. The preprocessing and the class names are written to ``FILE.json``.
        format: ``"onnx"``, ``"torch-export"`` or ``"safetensors"`` (default: by the file extension).
        prepared: for ONNX of a table model, take preprocessed inputs instead of raw columns.

    Returns:
        Exported: the files, and the largest difference between the outputs.
    """
    path = Path(path).expanduser()
    usual = ENDINGS.get(path.suffix.lower())
    format = usual or "onnx" if format is None else format
    if format not in FORMATS:
        raise unknown_name("format", format, FORMATS)
    if usual not in (None, format):
        raise InputError(f"format={format} contradicts the extension of {path.name!r}; specify only one.")
    inputs = files_of(trained.folder) if trained.folder else []
    check_output(path, inputs)
    about = path.with_name(f"{path.name}.json")
    check_output(about, inputs)
    plain = trained.to("cpu").model
    samples = [sample(trained, size, seed) for seed, size in enumerate((*SIZES, TRACED))]
    final = merged(plain)
    network = Network(final, list(samples[0])).eval() if isinstance(samples[0], Mapping) else final
    raw = format == "onnx" and not prepared and trained.inputs.get("kind") == "table"
    columns: list[dict[str, Any]] = []
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
        made = Path(folder) / path.name
        run = FORMATS[format](final, network, samples[-1], made)
        difference = max(_difference(plain, run, x) for x in samples[:-1])
        if raw:
            with _quiet("ONNX"):
                columns = with_columns(trained, made)
                difference = max(_raw_difference(trained, made, columns, size) for size in ROWS)
        if not difference <= TOLERANCE:
            raise InputError(
                f"the exported model's outputs differ by up to {difference:.3g} from the model's, more than "
                f"{TOLERANCE}; nothing was written. Try another format."
            )
        with replacing(path) as target, made.open("rb") as whole:
            shutil.copyfileobj(whole, target)
    written = {"format": format, "file": path.name, **({"columns": columns} if raw else {})}
    content = {**trained.about.to_dict(), "export": written}
    if final is not plain and "options" in trained.about.model:
        kept = {k: v for k, v in trained.about.model["options"].items() if not k.startswith("lora")}
        content["model"] = {**trained.about.model, "options": kept}
    tokenizer = trained.folder / TOKENIZER if trained.folder else None
    if trained.inputs.get("tokenizer") == TOKENIZER and tokenizer and tokenizer.is_dir():
        beside = path.with_name(f"{path.name}.{TOKENIZER}")
        # Written anew and not copied: in a stranger's folder there may be links to files of one's own.
        for name, text in trained.reader().kept()[1].items():
            write_atomically(beside / Path(name).name, text)
        content["inputs"] = {**trained.inputs, "tokenizer": beside.name}
    write_atomically(about, json.dumps(content, indent=1).encode())
    return Exported(path, about, difference, ROWS if raw else SIZES, tuple(columns))


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
        raise InputError("the input shape of this model is not known, so it cannot be exported.")
    kind = getattr(torch, about.numbers or "float32", None)
    if about.inputs.get("kind") != "text" and isinstance(kind, torch.dtype) and not kind.is_floating_point:
        return torch.zeros(size, *about.input_shape, dtype=kind)
    return trained.reader().sample(size, seed)


def _parts(x: Any) -> dict[str, Tensor]:
    return dict(x) if isinstance(x, Mapping) else {"x": x}


def _traced(network: nn.Module, x: Any) -> dict[str, Any]:
    """The arguments of torch's exporters: open is the batch, and of text its length."""
    batch, length = torch.export.Dim("batch"), torch.export.Dim.AUTO
    shapes: Any = ({0: batch},)
    if isinstance(network, Network):  # several arguments under one star are one that is a tuple
        shapes = (tuple({0: batch, 1: length} for _ in _parts(x)),)
    return {"args": tuple(_parts(x).values()), "dynamic_shapes": shapes}


def _difference(plain: nn.Module, run: Run, x: Any) -> float:
    with torch.inference_mode():
        wanted = plain(x)
    with torch.no_grad():
        found = run(x)
    if found.shape != wanted.shape:
        raise InputError(f"the exported model gives {tuple(found.shape)}, not {tuple(wanted.shape)}.")
    return float((found - wanted).abs().max())


def to_safetensors(plain: nn.Module, network: nn.Module, x: Any, path: Path) -> Run:
    """The weights alone, which are read back into the model."""
    path.write_bytes(save({k: v.detach().clone().contiguous() for k, v in plain.state_dict().items()}))
    return lambda x: torch.func.functional_call(plain, load_file(path), (x,))


def to_torch_export(plain: nn.Module, network: nn.Module, x: Any, path: Path) -> Run:
    """A program of torch.export, for ``torch.export.load``."""
    with _quiet("torch.export"):
        torch.export.save(torch.export.export(network, **_traced(network, x)), path)
        again = torch.export.load(path).module()
    return lambda x: again(*_parts(x).values())


def to_onnx(plain: nn.Module, network: nn.Module, x: Any, path: Path) -> Run:
    """An ONNX file, which onnxruntime runs."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise InputError(f"format 'onnx' requires {package}: pip install 'shoal[onnx]'.")
    weight = sum(value.nbytes for value in plain.state_dict().values())
    if weight > LARGEST:
        raise InputError(
            f"the weights take {weight:,} bytes and ONNX is limited to 2 GiB; use format 'torch-export'."
        )
    names: dict[str, Any] = {"input_names": list(_parts(x)), "output_names": ["output"]}
    with _quiet("ONNX"):
        program = torch.onnx.export(network, **_traced(network, x), **names, dynamo=True, verbose=False)
        assert program is not None
        program.save(path, external_data=False)  # one file
        session = _session(path)

    def run(x: Any) -> Tensor:
        arrays = {name: part.numpy() for name, part in _parts(x).items()}
        return torch.from_numpy(session.run(None, arrays)[0])

    return run


def _session(path: Path) -> Any:
    onnxruntime = importlib.import_module("onnxruntime")
    return onnxruntime.InferenceSession(read_bytes(path, None), providers=["CPUExecutionProvider"])


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
        why = first_line(error)[:200]
        raise InputError(f"this model cannot be exported to {what}: {why}") from error
    finally:
        logging.disable(level)


# Raw columns of a table, as part of an ONNX graph


NETWORK = "network/"
"""Before the names of all that is the network's own."""
OUTPUTS = ("label", "probabilities", "logits", "prediction")


class Graph:
    """Nodes and constants of an ONNX graph, as they are added; values have names of their own."""

    def __init__(self) -> None:
        self.helper, self.numpy = (importlib.import_module(f"onnx.{m}") for m in ("helper", "numpy_helper"))
        self.types = importlib.import_module("onnx").TensorProto
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, value: Any, kind: Any = np.float64) -> str:
        name = f"shoal/constant_{len(self.constants)}"
        self.constants.append(self.numpy.from_array(np.asarray(value, kind), name))
        return name

    def add(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        name = output or f"shoal/{kind}_{len(self.nodes)}"
        domain = "ai.onnx.ml" if kind == "LabelEncoder" else ""
        self.nodes.append(self.helper.make_node(kind, list(inputs), [name], domain=domain, **attributes))
        return name

    def floor_divided(self, x: str, by: float) -> str:
        return self.add("Floor", self.add("Div", x, self.constant(by)))

    def sum_of(self, *terms: tuple[str, float]) -> str:
        """Of values by factors; a constant has no name."""
        found = ""
        for x, factor in terms:
            term = self.add("Mul", x, self.constant(factor)) if x else self.constant(factor)
            found = self.add("Add", found, term) if found else term
        return found

    def floats(self, x: str) -> str:
        return self.add("Cast", x, to=self.types.FLOAT)


def _scaled(graph: Graph, x: str, missing: str, scale: Mapping[str, Any]) -> list[str]:
    """In float64, step by step as training did it, so that a threshold is passed on the same side."""
    if not scale["scale"] > 0:
        return []
    inside = graph.add("Clip", x, graph.constant(scale["low"]), graph.constant(scale["high"]))
    found = graph.add("Sub", inside, graph.constant(scale["mean"]))
    found = graph.add("Div", found, graph.constant(scale["scale"]))
    found = graph.add("Clip", found, graph.constant(-CLIP), graph.constant(CLIP))
    return [graph.floats(graph.add("Where", missing, graph.constant(0), found))]


def _number(graph: Graph, x: str, about: Mapping[str, Any]) -> list[str]:
    missing = graph.add("IsNaN", x)
    found = _scaled(graph, x, missing, about.get("scaling", about))
    return found + ([graph.floats(missing)] if about["indicator"] else [])


def _date(graph: Graph, x: str, about: Mapping[str, Any]) -> list[str]:
    """Day, month, weekday and hour of days since 1970-01-01.

    The month is that of a calendar whose years begin in March, so that leap days come last; days are counted
    within 400 years, which are always 146,097 days.
    """
    missing = graph.add("IsNaN", x)
    days = graph.add("Where", missing, graph.constant(0), x)
    whole = graph.add("Floor", days)
    since = graph.sum_of((whole, 1), ("", 719468))
    day = graph.sum_of((since, 1), (graph.floor_divided(since, 146097), -146097))
    leaps = [(graph.floor_divided(day, n), sign) for n, sign in ((1460, -1), (36524, 1), (146096, -1))]
    year = graph.floor_divided(graph.sum_of((day, 1), *leaps), 365)
    years = [(year, 365), (graph.floor_divided(year, 4), 1), (graph.floor_divided(year, 100), -1)]
    in_year = graph.sum_of((day, 1), *((x, -n) for x, n in years))
    month = graph.floor_divided(graph.sum_of((in_year, 5), ("", 2)), 153)
    later = graph.add("Less", month, graph.constant(10))
    month = graph.add("Where", later, graph.sum_of((month, 1), ("", 3)), graph.sum_of((month, 1), ("", -9)))
    monday = graph.sum_of((whole, 1), ("", 3))
    weekday = graph.sum_of((monday, 1), (graph.floor_divided(monday, 7), -7))
    hour = graph.add("Mul", graph.add("Sub", days, whole), graph.constant(24))
    parts = zip((x, month, weekday, hour), about["parts"], strict=True)
    found = [feature for part, scale in parts for feature in _scaled(graph, part, missing, scale)]
    return found + ([graph.floats(missing)] if about["indicator"] else [])


def _category(graph: Graph, x: str, about: Mapping[str, Any]) -> list[str]:
    gone = {form: -1 for mark in sorted(MISSING) for form in (mark, mark.upper(), mark.capitalize())}
    place = {**gone, **{str(value): n for n, value in enumerate(about["values"])}}
    width = len(about["values"]) + bool(about["other"])
    other = width - 1 if about["other"] else -1
    at = graph.add(
        "LabelEncoder", x, keys_strings=list(place), values_int64s=list(place.values()), default_int64=other
    )
    return [graph.floats(graph.add("Equal", at, graph.constant(np.arange(width), np.int64)))]


EXPRESSED: dict[str, tuple[Callable[[Graph, str, Mapping[str, Any]], list[str]], str, str]] = {
    "numeric": (_number, "DOUBLE", "the number; missing: NaN"),
    "boolean": (_number, "DOUBLE", "0 or 1; missing: NaN"),
    "date": (_date, "DOUBLE", "days since 1970-01-01, with the hours as a fraction; missing: NaN"),
    "categorical": (_category, "STRING", "the text, of a whole number its digits; missing: empty, NA, - …"),
    # A hash of words has no ONNX operator.
    "text": (lambda graph, x, about: [x], "FLOAT", "preprocessed: a bag of words, as described in FILE.json"),
}
"""Of each kind of column: what becomes of it, as what type it comes, and what that is in words."""


def with_columns(trained: Trained, path: Path) -> list[dict[str, Any]]:
    """Makes the file with the network, at ``path``, one that takes raw columns; says how each is given."""
    onnx, compose = importlib.import_module("onnx"), importlib.import_module("onnx.compose")
    model, graph = compose.add_prefix(onnx.load(path), NETWORK), Graph()
    network, columns, inputs, features = model.graph, [], [], []
    taken = {*OUTPUTS, ""}
    for about in trained.inputs["columns"]:
        express, kind, words = EXPRESSED[about["kind"]]
        name = str(about["name"])
        while name in taken or name.startswith((NETWORK, "shoal/")):
            name = f"column {name}"
        taken.add(name)
        width = len(about["idf"]) if about["kind"] == "text" else 1
        inputs.append(graph.helper.make_tensor_value_info(name, getattr(graph.types, kind), ["n", width]))
        columns.append({"name": about["name"], "kind": about["kind"], "input": name, "shape": ["n", width]})
        columns[-1] |= {"type": kind.lower(), "value": words}
        features += express(graph, name, about)
    graph.add("Concat", *features, output=network.input[0].name, axis=1)
    before = len(graph.nodes)
    outputs = _answers(trained, graph, network.output[0].name)
    for field, values in (
        ("node", [*graph.nodes[:before], *network.node, *graph.nodes[before:]]),
        ("initializer", [*network.initializer, *graph.constants]),
        ("input", inputs),
        ("output", outputs),
    ):
        values = [type(value).FromString(value.SerializeToString()) for value in values]
        network.ClearField(field)
        getattr(network, field).extend(values)
    model.opset_import.append(graph.helper.make_opsetid("ai.onnx.ml", 2))
    label = trained.inputs.get("label") or {}
    said = {"columns": columns, "class_names": trained.class_names, "label": label.get("name", "")}
    graph.helper.set_model_props(model, {name: json.dumps(value) for name, value in said.items()})
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    return columns


def _answers(trained: Trained, graph: Graph, output: str) -> list[Any]:
    """What the graph gives: the label, probabilities and logits; in regression a number in its own units."""

    def given(name: str, kind: int, *shape: int) -> Any:
        return graph.helper.make_tensor_value_info(name, kind, ["n", *shape])

    types, classes, names = graph.types, trained.about.classes, trained.class_names
    if classes is None:
        units = trained.inputs.get("label") or {}
        found = graph.add("Cast", output, to=types.DOUBLE)
        found = graph.add("Mul", found, graph.constant(units.get("scale", 1.0)))
        graph.add("Add", found, graph.constant(units.get("mean", 0.0)), output="prediction")
        return [given("prediction", types.DOUBLE)]
    best = [graph.add("ArgMax", output, axis=1, keepdims=0)]
    if names:
        best.insert(0, graph.constant(np.array(names, object), object))
    graph.add("Gather" if names else "Identity", *best, output="label")
    graph.add("Softmax", output, output="probabilities", axis=1)
    graph.add("Identity", output, output="logits")
    label = given("label", types.STRING if names else types.INT64)
    return [label, *(given(name, types.FLOAT, classes) for name in ("probabilities", "logits"))]


def _raw_difference(trained: Trained, path: Path, columns: Sequence[Mapping[str, Any]], rows: int) -> float:
    """Between what the file and the model make of random raw rows; of numbers, in units of their spread."""
    random = np.random.default_rng(rows)
    raw = {c["name"]: _random_cells(c, random, rows) for c in trained.inputs["columns"]}
    reader: Any = trained.reader()
    prepared = np.concatenate([batch.x for batch in reader.batches(raw, rows)])
    widths = {step.name: step.width for step in reader.preprocessing.steps}
    inputs, at = dict[str, Any](), 0
    for column in columns:
        name = column["name"]
        cells = prepared[:, at : at + widths[name]] if column["kind"] == "text" else raw[name][:, None]
        at += widths[name]
        if column["kind"] == "date":
            days = cells.astype("datetime64[s]")
            cells = np.where(np.isnat(days), np.nan, days.astype(np.int64) / 86400)
        inputs[column["input"]] = cells
    regression = trained.about.classes is None
    answers = _session(path).run(["prediction" if regression else "logits"], inputs)[0]
    wanted = np.concatenate([output for _, output in trained.outputs(reader, raw, rows)])
    if answers.shape != wanted.shape:
        raise InputError(f"the exported model gives {answers.shape}, not {wanted.shape}.")
    scale = (trained.inputs.get("label") or {}).get("scale", 1.0) if regression else 1.0
    return float(np.abs(answers - wanted).max() / scale)


def _random_cells(about: Mapping[str, Any], random: np.random.Generator, rows: int) -> NDArray[Any]:
    """Cells of a column as a table may have them: usual ones, far ones, missing ones, ones never seen."""
    kind, missing = about["kind"], random.random(rows) < 0.2
    if kind == "numeric":
        scale = about.get("scaling", about)
        far = np.where(random.random(rows) < 0.1, 100.0, 1.0)
        values = scale["mean"] + (scale["scale"] or 1.0) * far * random.normal(size=rows)
        return np.where(missing, np.nan, values)
    if kind == "boolean":
        return np.where(missing, np.nan, random.integers(0, 2, rows))
    if kind == "date":
        seconds = random.integers(-(10**10), 10**10, rows).astype("datetime64[s]")
        return np.where(missing, "", seconds.astype(str)).astype(object)
    words = [*about.get("values", ()), "never seen before", "other words", ""]
    return np.array(words, object)[random.integers(0, len(words), rows)]


FORMATS: dict[str, Callable[[nn.Module, nn.Module, Any, Path], Run]] = {
    "onnx": to_onnx,
    "torch-export": to_torch_export,
    "safetensors": to_safetensors,
}
