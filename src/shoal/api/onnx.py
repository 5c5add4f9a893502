"""ONNX files of trained models.

The file of a table model takes raw columns: its preprocessing is a module before the network, and nodes
before that turn categories into numbers.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shoal.data.tables import Encoder, as_table
from shoal.data.tables.cells import MISSING
from shoal.data.tables.encode import CLIP
from shoal.errors import InputError
from shoal.models.baseline import LEAST, BoostedBaseline
from shoal.trained import Trained

Array = NDArray[Any]
TRACED = 3
"""The batch size that graphs are traced with."""
PARTS = "days since 1970-01-01 with the hours as a fraction, month, weekday (Monday is 0) and hour"
MEANING = {
    "numeric": "the number; missing: NaN",
    "boolean": "0 or 1; missing: NaN",
    "date": f"{PARTS}; missing: NaN",
    "categorical": "the text, of a whole number its digits; missing: empty, NA, - …",
}


def traced(network: nn.Module, x: Any) -> tuple[nn.Module, tuple[Any, ...], Any]:
    """What torch's exporters take: the number of examples is dynamic, and so is the length of text."""
    batch, length = torch.export.Dim("batch"), torch.export.Dim.AUTO
    shapes: Any = {0: batch}
    if isinstance(x, Mapping):
        shapes = {name: {0: batch, 1: length} for name in x}
    elif isinstance(x, list):
        shapes = [{0: batch} for _ in x]
    return network.eval(), (x,), (shapes,)


def write(network: nn.Module, x: Any, path: Path) -> Callable[[Any], Array]:
    """Write a network that takes preprocessed inputs such as ``x``; returns what runs the file."""
    names = list(x) if isinstance(x, Mapping) else ["x"]
    path.write_bytes(_exported(network, x, names, ["output"]).SerializeToString())
    session = _session(path)

    def run(x: Any) -> Array:
        inputs = x if isinstance(x, Mapping) else {"x": x}
        output: Array = session.run(None, {k: v.numpy() for k, v in inputs.items()})[0]
        return output

    return run


def _session(path: Path) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])


def _need(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise InputError(f"format 'onnx' requires {package}: pip install 'shoal[onnx]'.")


def _exported(network: nn.Module, x: Any, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    """The ONNX model of a module."""
    _need("onnx", "onnxscript", "onnxruntime")
    module, args, shapes = traced(network, x)
    names: dict[str, Any] = {"input_names": list(inputs), "output_names": list(outputs)}
    args = (*args, {})  # the last mapping would be taken for keyword arguments
    program = torch.onnx.export(module, args, dynamic_shapes=shapes, dynamo=True, verbose=False, **names)
    assert program is not None
    return program.model_proto


# Gradient boosting


class Trees(nn.Module):
    """Gradient boosting, which is computed outside of torch, as a module that can be traced.

    It gives log-probabilities of all classes, of which the model knows some, or numbers. The trees of
    LightGBM are one node of the graph, as onnxmltools makes it.
    """

    known: Tensor
    """A row of the identity matrix for each class that the model knows."""

    def __init__(self, model: BoostedBaseline) -> None:
        super().__init__()
        self.regression, self.node = model.classes is None, _node(model)
        self.register_buffer("known", torch.eye(model.classes or 1)[model.known])

    def forward(self, x: Tensor) -> Tensor:
        ops, rows, name = torch.onnx.ops, x.shape[0], "ai.onnx.ml::TreeEnsemble"
        if self.regression:
            how: dict[str, Any] = {"dtype": torch.float32, "shape": [rows, 1], "version": 2}
            numbers: Tensor = ops.symbolic(f"{name}Regressor", [x], self.node, **how)
            return numbers.squeeze(1)
        shapes, types = [[rows], [rows, len(self.known)]], [torch.int64, torch.float32]
        how = {"dtypes": types, "shapes": shapes, "version": 2}
        values = ops.symbolic_multi_out(f"{name}Classifier", [x], self.node, **how)[1]
        return (values @ self.known).clamp_min(LEAST).log()


def _node(model: BoostedBaseline) -> dict[str, Any]:
    """The attributes of the node that has all trees of LightGBM."""
    _need("onnx", "onnxmltools")
    from onnx import helper
    from onnxmltools.convert import convert_lightgbm
    from onnxmltools.convert.common.data_types import FloatTensorType

    if not hasattr(torch.onnx, "ops"):
        raise InputError("exporting gradient boosting requires torch 2.8 or later.")
    inputs = [("x", FloatTensorType([None, model.width]))]
    graph = convert_lightgbm(model.model, initial_types=inputs, zipmap=False).graph
    (node,) = (node for node in graph.node if node.domain == "ai.onnx.ml")
    found = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    modes = [mode.decode() for mode in found["nodes_modes"]]
    return found | {"nodes_modes": modes, "post_transform": found["post_transform"].decode()}


# Raw columns of a table


def takes_columns(trained: Trained) -> bool:
    """Whether the file of a model takes raw columns; ONNX has no operator that finds words in a text."""
    columns = trained.inputs.get("columns", ()) if trained.inputs.get("kind") == "table" else ()
    return bool(columns) and all(about["kind"] in MEANING for about in columns)


class _Features(nn.Module):
    """The preprocessing of a table: a tensor per column, of categories (n, 1) with their numbers."""

    def __init__(self, steps: Sequence[Any]) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, columns: Sequence[Tensor]) -> Tensor:
        return torch.cat([self.encoded(x, step) for x, step in zip(columns, self.steps, strict=True)], 1)

    def encoded(self, x: Tensor, step: Any) -> Tensor:
        """The features of a column, in float64 step by step as in training, so that rounding is the same."""
        if step.kind == "categorical":
            return (x == torch.arange(step.width)).float()
        features = [
            ((x[:, n].clamp(part.low, part.high) - part.mean) / part.scale).clamp(-CLIP, CLIP)
            for n, part in enumerate(step.parts)
            if part.scale > 0
        ]
        missing = x[:, 0].isnan()
        features = [torch.where(missing, 0.0, feature).float() for feature in features]
        features += [missing.float()] if step.indicator else []
        return torch.stack(features, 1) if features else x[:, :0].float()


class _Results(nn.Module):
    """Calibrated probabilities, logits and the number of the class; in regression, the number in the label's
    units."""

    def __init__(self, trained: Trained) -> None:
        super().__init__()
        self.temperature, label = trained.temperature, trained.inputs.get("label") or {}
        self.classes = trained.about.classes
        self.mean, self.scale = label.get("mean", 0.0), label.get("scale", 1.0)

    def forward(self, output: Tensor) -> Any:
        if self.classes is None:
            return output.double() * self.scale + self.mean
        return (output / self.temperature).softmax(1), output.clone(), output.argmax(1)


def write_table(trained: Trained, network: nn.Module, path: Path) -> list[dict[str, Any]]:
    """Write an ONNX file that takes the raw columns of a table; returns how each is given."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    steps, classes, names = _steps(trained), trained.about.classes, trained.about.class_names
    outputs = ["prediction"] if classes is None else ["probabilities", "logits", "class"]
    kinds = [torch.int64 if step.kind == "categorical" else torch.float64 for step in steps]
    x = [torch.zeros(TRACED, _width(step), dtype=kind) for step, kind in zip(steps, kinds, strict=True)]
    module = nn.Sequential(_Features(steps), network, _Results(trained))
    made = _exported(module, x, [f"column {n}" for n in range(len(steps))], outputs)
    # All names of the graph get a prefix, so that columns can have any; nodes around it translate.
    graph = onnx.compose.add_prefix(made, "shoal/")
    nodes, inputs, columns = [], [], list[dict[str, Any]]()
    for step, into in zip(steps, graph.graph.input, strict=True):
        name, shape = step.name, list[Any](["n", _width(step)])
        if name in ("", "label", *outputs) or name.startswith(("shoal/", "column ")):
            name = f"column {name}"
        type = "string" if step.kind == "categorical" else "double"
        nodes.append(_entry(name, into.name, step))
        inputs.append(helper.make_tensor_value_info(name, getattr(TensorProto, type.upper()), shape))
        about = {"name": step.name, "kind": step.kind, "input": name, "shape": shape, "type": type}
        columns.append(about | {"value": MEANING[step.kind]})
    nodes += graph.graph.node
    nodes += [helper.make_node("Identity", [f"shoal/{name}"], [name]) for name in outputs[:2]]
    size: list[Any] = ["n"] if classes is None else ["n", classes]
    number = TensorProto.DOUBLE if classes is None else TensorProto.FLOAT
    results = [helper.make_tensor_value_info(name, number, size) for name in outputs[:2]]
    constants = list(graph.graph.initializer)
    if classes is not None:
        labels = np.array(names or range(classes), object if names else np.int64)
        constants.append(numpy_helper.from_array(labels, "shoal/class names"))
        nodes.append(helper.make_node("Gather", ["shoal/class names", "shoal/class"], ["label"]))
        label_type = TensorProto.STRING if names else TensorProto.INT64
        results.insert(0, helper.make_tensor_value_info("label", label_type, ["n"]))
    versions = {each.domain: each.version for each in graph.opset_import} | {"ai.onnx.ml": 2}
    model = helper.make_model(
        helper.make_graph(nodes, "shoal", inputs, results, constants),
        opset_imports=[helper.make_opsetid(*each) for each in versions.items()],
        functions=graph.functions,
        ir_version=graph.ir_version,
    )
    label = (trained.inputs.get("label") or {}).get("name", "")
    metadata = {"columns": columns, "class_names": names, "label": label}
    helper.set_model_props(model, {name: json.dumps(value) for name, value in metadata.items()})
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    return columns


def _steps(trained: Trained) -> Sequence[Any]:
    """The encoding of each column."""
    return Encoder.from_dict(trained.inputs).steps


def _width(step: Any) -> int:
    """How many numbers a cell is given as."""
    return 1 if step.kind == "categorical" else len(step.parts)


def _entry(name: str, to: str, step: Any) -> Any:
    """The node from a column to the network: the text of a category becomes its number, −1 if unknown."""
    from onnx import helper

    if step.kind != "categorical":
        return helper.make_node("Identity", [name], [to])
    missing = {form: -1 for mark in sorted(MISSING) for form in (mark, mark.upper(), mark.capitalize())}
    number = {**missing, **{value: n for n, value in enumerate(step.values)}}
    other = len(step.values) if step.other else -1
    keys: dict[str, Any] = {"keys_strings": list(number), "values_int64s": list(number.values())}
    return helper.make_node("LabelEncoder", [name], [to], domain="ai.onnx.ml", default_int64=other, **keys)


def raw_outputs(
    trained: Trained, columns: Sequence[Mapping[str, Any]], path: Path, rows: int
) -> tuple[Array, Array]:
    """What the model and the file make of random raw rows; numbers in units of their scale."""
    steps, random = _steps(trained), np.random.default_rng(rows)
    raw = {step.name: _random_cells(step, random, rows) for step in steps}
    table, inputs = as_table(raw), dict[str, Any]()
    for column, step in zip(columns, steps, strict=True):
        cells = raw[step.name][:, None]
        if step.kind != "categorical":
            cells = np.stack(step.split(step.values(table[step.name])), 1)
        inputs[column["input"]] = cells
    regression = trained.about.classes is None
    found = _session(path).run(["prediction" if regression else "logits"], inputs)[0]
    scale = float((trained.inputs.get("label") or {}).get("scale", 1.0)) if regression else 1.0
    return trained.run(raw, rows).values / scale, found / scale


def _random_cells(step: Any, random: np.random.Generator, rows: int) -> Array:
    """Cells of a column as a table may have them: usual ones, far ones, missing ones, unknown ones."""
    if step.kind == "categorical":
        return random.choice(np.array([*step.values, "never seen before", ""], object), rows)
    if step.kind == "boolean":
        return random.choice([0, 1, np.nan], rows)
    missing = random.random(rows) < 0.2
    if step.kind == "date":
        seconds = random.integers(-(10**10), 10**10, rows).astype("datetime64[s]")
        return np.where(missing, "", seconds.astype(str)).astype(object)
    (part,) = step.parts
    return np.where(missing, np.nan, part.mean + (part.scale or 1.0) * random.standard_cauchy(rows))
