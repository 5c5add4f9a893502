"""Files of trained models for other programs: ONNX, torch.export and safetensors.

The ONNX file of a table model takes raw columns: its preprocessing is a module before the network, and nodes
before that turn categories into numbers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shoal.data.tables import Encoder, as_table
from shoal.data.tables.cells import MISSING
from shoal.data.tables.encode import CLIP, split
from shoal.errors import InputError
from shoal.models.baseline import LEAST, BoostedBaseline
from shoal.models.lora import merged
from shoal.trained import Trained

Array = NDArray[Any]
TRACED, SIZES = 3, (1, 50)
"""The batch size that graphs are traced with, and those of which outputs are compared."""
KINDS = ("numeric", "boolean", "date", "categorical")
"""Of columns; ONNX has no operator that finds words in a text."""


def write(trained: Trained, path: Path, format: str) -> tuple[float, list[dict[str, Any]]]:
    """Write a file; returns how far its outputs are from the model's, and the columns that it takes."""
    model, about = trained.model, trained.about
    network = Trees(model) if isinstance(model, BoostedBaseline) else merged(model)
    columns = about.inputs.get("columns", ()) if about.inputs.get("kind") == "table" else ()
    if format == "onnx" and columns and all(column["kind"] in KINDS for column in columns):
        columns = _write_table(trained, network, path)
        pairs = [_of_raw_rows(trained, columns, path, rows) for rows in SIZES]
    else:
        columns, (x, *others) = [], (_sample(trained, n, seed) for seed, n in enumerate((TRACED, *SIZES)))
        run = WRITERS[format](network, x, path)
        with torch.no_grad():
            pairs = [(trained(each).numpy(), run(each)) for each in others]
    if network is not model and about.classes:  # logarithms of probabilities, which may be of almost nothing
        pairs = [(np.exp(wanted), np.exp(found)) for wanted, found in pairs]
    return max(float(np.abs(found - wanted).max()) for wanted, found in pairs), columns


def _sample(trained: Trained, size: int, seed: int) -> Any:
    """Random input of the shape that the model takes; the length of text depends on the seed."""
    about = trained.about
    if not about.input_shape:
        raise InputError("the input shape of this model is not known, so it cannot be exported.")
    kind = getattr(torch, about.numbers or "float32")
    if about.inputs.get("kind") != "text" and not kind.is_floating_point:
        return torch.zeros(size, *about.input_shape, dtype=kind)
    return trained.reader().sample(size, seed)


def _traced(network: nn.Module, x: Any) -> tuple[nn.Module, tuple[Any, ...], Any]:
    """What torch's exporters take: the number of examples is dynamic, and so is the length of text."""
    batch, length = torch.export.Dim("batch"), torch.export.Dim.AUTO
    shapes: Any = {0: batch}
    if isinstance(x, Mapping):
        shapes = {name: {0: batch, 1: length} for name in x}
    elif isinstance(x, list):
        shapes = [{0: batch} for _ in x]
    return network.eval(), (x,), (shapes,)


def _write_safetensors(network: nn.Module, x: Any, path: Path) -> Callable[[Any], Array]:
    save_file({k: v.detach().clone().contiguous() for k, v in network.state_dict().items()}, path)
    return lambda x: torch.func.functional_call(network, load_file(path), (x,)).numpy()


def _write_torch(network: nn.Module, x: Any, path: Path) -> Callable[[Any], Array]:
    module, args, shapes = _traced(network, x)
    torch.export.save(torch.export.export(module, args, dynamic_shapes=shapes), path)
    loaded = torch.export.load(path).module()
    return lambda x: loaded(x).numpy()


def _write_onnx(network: nn.Module, x: Any, path: Path) -> Callable[[Any], Array]:
    names = list(x) if isinstance(x, Mapping) else ["x"]
    path.write_bytes(_exported(network, x, names, ["output"]).SerializeToString())

    def run(x: Any) -> Array:
        inputs = x if isinstance(x, Mapping) else {"x": x}
        return _run(path, "output", {name: value.numpy() for name, value in inputs.items()})

    return run


WRITERS = {"onnx": _write_onnx, "torch-export": _write_torch, "safetensors": _write_safetensors}
"""They write a network, traced with the input ``x``, and return what computes its outputs from the file."""


def _run(path: Path, output: str, inputs: dict[str, Array]) -> Array:
    import onnxruntime

    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    found: Array = session.run([output], inputs)[0]
    return found


def _need(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise InputError(f"format 'onnx' requires {package}: pip install 'shoal[onnx]'.")


def _exported(network: nn.Module, x: Any, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    """The ONNX model of a module."""
    _need("onnx", "onnxscript", "onnxruntime")
    module, args, shapes = _traced(network, x)
    names: dict[str, Any] = {"input_names": list(inputs), "output_names": list(outputs)}
    args = (*args, {})  # the last mapping would be taken for keyword arguments
    program = torch.onnx.export(module, args, dynamic_shapes=shapes, dynamo=True, verbose=False, **names)
    assert program is not None
    return program.model_proto


class Trees(nn.Module):
    """Gradient boosting, which is computed outside of torch, as a module that can be traced.

    The trees of LightGBM are one node of the graph, as onnxmltools makes it.
    """

    known: Tensor
    """A row of the identity matrix for each class that the model knows."""

    def __init__(self, model: BoostedBaseline) -> None:
        super().__init__()
        _need("onnx", "onnxmltools")
        from onnx import helper
        from onnxmltools.convert import convert_lightgbm
        from onnxmltools.convert.common.data_types import FloatTensorType

        if not hasattr(torch.onnx, "ops"):
            raise InputError("exporting gradient boosting requires torch 2.8 or later.")
        inputs = [("x", FloatTensorType([None, model.width]))]
        graph = convert_lightgbm(model.model, initial_types=inputs, zipmap=False).graph
        (node,) = (node for node in graph.node if node.domain == "ai.onnx.ml")
        self.node: dict[str, Any] = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        self.node["nodes_modes"] = [mode.decode() for mode in self.node["nodes_modes"]]
        self.node["post_transform"] = self.node["post_transform"].decode()
        self.regression = model.classes is None
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


# Raw columns of a table


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
    """Calibrated probabilities, logits and the number of the class; or numbers in the label's units."""

    def __init__(self, trained: Trained) -> None:
        super().__init__()
        self.temperature, label = trained.temperature, trained.inputs.get("label") or {}
        self.classes = trained.about.classes
        self.mean, self.scale = label.get("mean", 0.0), label.get("scale", 1.0)

    def forward(self, output: Tensor) -> Any:
        if self.classes is None:
            return output.double() * self.scale + self.mean
        return (output / self.temperature).softmax(1), output.clone(), output.argmax(1)


def _write_table(trained: Trained, network: nn.Module, path: Path) -> list[dict[str, Any]]:
    """Write an ONNX file that takes the raw columns of a table; returns how each is given."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    steps: Sequence[Any] = Encoder.from_dict(trained.inputs).steps
    classes, names = trained.about.classes, trained.about.class_names
    outputs = ["prediction"] if classes is None else ["probabilities", "logits", "class"]
    x = [
        torch.zeros(TRACED, 1, dtype=torch.int64)
        if step.kind == "categorical"
        else torch.zeros(TRACED, len(step.parts), dtype=torch.float64)
        for step in steps
    ]
    module = nn.Sequential(_Features(steps), network, _Results(trained))
    made = _exported(module, x, [f"column {n}" for n in range(len(steps))], outputs)
    # All names of the graph get a prefix, so that columns can have any; nodes around it translate.
    graph = onnx.compose.add_prefix(made, "shoal/")
    nodes, inputs, columns = [], [], list[dict[str, Any]]()
    for step, into, example in zip(steps, graph.graph.input, x, strict=True):
        shape: list[Any] = ["n", example.shape[1]]
        taken = step.name in ("", "label", *outputs) or step.name.startswith("shoal/")
        name, type = f"column {step.name}" if taken else step.name, "double"
        if step.kind == "categorical":
            type, known = "string", {value: n for n, value in enumerate(step.values)}
            marks = {form for mark in MISSING for form in (mark, mark.upper(), mark.capitalize())}
            number = dict.fromkeys(sorted(marks), -1) | known
            keys: dict[str, Any] = {"keys_strings": list(number), "values_int64s": list(number.values())}
            keys |= {"default_int64": len(known) if step.other else -1, "domain": "ai.onnx.ml"}
            nodes.append(helper.make_node("LabelEncoder", [name], [into.name], **keys))
        else:
            nodes.append(helper.make_node("Identity", [name], [into.name]))
        inputs.append(helper.make_tensor_value_info(name, getattr(TensorProto, type.upper()), shape))
        columns.append({"name": step.name, "kind": step.kind, "input": name, "shape": shape, "type": type})
    nodes += graph.graph.node
    nodes += [helper.make_node("Identity", [f"shoal/{name}"], [name]) for name in outputs[:2]]
    size: list[Any] = ["n"] if classes is None else ["n", classes]
    number_type = TensorProto.DOUBLE if classes is None else TensorProto.FLOAT
    results = [helper.make_tensor_value_info(name, number_type, size) for name in outputs[:2]]
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
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    return columns


def _of_raw_rows(
    trained: Trained, columns: Sequence[Mapping[str, Any]], path: Path, rows: int
) -> tuple[Array, Array]:
    """What the model and the file make of random rows: usual cells, far ones, missing and unknown ones."""
    random, raw = np.random.default_rng(rows), dict[str, Array]()
    steps: Sequence[Any] = Encoder.from_dict(trained.inputs).steps
    for step in steps:
        missing = random.random(rows) < 0.2
        if step.kind == "categorical":
            cells = random.choice(np.array([*step.values, "never seen before", ""], object), rows)
        elif step.kind == "date":
            days = random.integers(-(10**10), 10**10, rows).astype("datetime64[s]")
            cells = np.where(missing, "", days.astype(str)).astype(object)
        elif step.kind == "boolean":
            cells = np.where(missing, np.nan, random.integers(0, 2, rows))
        else:
            part = step.parts[0]
            far = part.mean + (part.scale or 1.0) * random.standard_cauchy(rows)
            cells = np.where(missing, np.nan, far)
        raw[step.name] = cells
    table, inputs = as_table(raw), dict[str, Array]()
    for column, step in zip(columns, steps, strict=True):
        text, cells = column["type"] == "string", raw[step.name]
        values = [cells] if text else split(step.kind, step.values(table[step.name]))
        inputs[column["input"]] = np.stack(values, 1)
    regression, label = trained.about.classes is None, trained.inputs.get("label") or {}
    scale = float(label.get("scale", 1.0)) if regression else 1.0
    found = _run(path, "prediction" if regression else "logits", inputs)
    return trained.run(raw, rows).values / scale, found / scale
