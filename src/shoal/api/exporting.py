"""What :func:`shoal.export` does: makes a file, compares its outputs with the model's, and then keeps it.

The ONNX file of a table model takes raw columns: its preprocessing is a module before the network, and only
text, which torch does not have, is added by hand. skl2onnx and onnxmltools convert baselines; their graph is
merged with those of the modules before and after it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shoal.api.export import TOLERANCE, Exported, Format
from shoal.data.inputs import TOKENIZER
from shoal.data.tables import as_table
from shoal.data.tables.cells import MISSING
from shoal.data.tables.encode import CLIP
from shoal.errors import InputError
from shoal.files import replacing, write_atomically
from shoal.models.baseline import LEAST, Baseline, BoostedBaseline
from shoal.models.lora import merged
from shoal.trained import About, Trained, input_errors

SIZES, ROWS, TRACED = (1, 5), (1, 100), 3
"""Batch sizes that are compared, those of raw rows of a table, and the one that graphs are traced with."""


def write(trained: Trained, path: Path, about: Path, format: Format) -> Exported:
    """Write the model in this format, with its description beside it."""
    final = merged(trained.model)
    if isinstance(final, Baseline) and format != "onnx":
        raise InputError(f"a {trained.about.model['name']} model can only be exported as onnx.", "format")
    raw = format == "onnx" and trained.inputs.get("kind") == "table"
    columns: list[dict[str, Any]] = []
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
        made = Path(folder) / path.name
        with _quiet(format):
            if raw:
                columns = write_table_onnx(trained, final, made)
                difference = max(_raw_difference(trained, columns, made, rows) for rows in ROWS)
            else:
                x, *others = (_sample(trained, size, seed) for seed, size in enumerate((TRACED, *SIZES)))
                run = write_network(final, x, made, format)
                with torch.no_grad():
                    difference = max(_difference(trained, trained(x).numpy(), run(x).numpy()) for x in others)
        if not difference <= TOLERANCE:
            raise InputError(
                f"the outputs of the exported model differ from the model's by up to {difference:.3g} "
                f"(allowed: {TOLERANCE:g}); nothing was written. Try another format."
            )
        with replacing(path) as target, made.open("rb") as source:
            shutil.copyfileobj(source, target)
    content = {**trained.about.to_dict(), "export": {"format": format, "file": path.name, "columns": columns}}
    if final is not trained.model:
        options = content["model"].get("options", {})
        content["model"]["options"] = {k: v for k, v in options.items() if not k.startswith("lora")}
    if trained.inputs.get("tokenizer") == TOKENIZER:
        # Written anew and not copied: in a stranger's folder there may be links to files of one's own.
        tokenizer = path.with_name(f"{path.name}.{TOKENIZER}")
        for name, text in trained.reader().portable()[1].items():
            write_atomically(tokenizer / Path(name).name, text)
        content["inputs"]["tokenizer"] = tokenizer.name
    write_atomically(about, json.dumps(content, indent=1).encode())
    kind = str(trained.inputs.get("kind", "array"))
    return Exported(path, about, format, difference, tuple(columns), kind)


@contextlib.contextmanager
def _quiet(format: str) -> Iterator[None]:
    """Without the reports of exporters; what they refuse is one InputError."""
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


def _sample(trained: Trained, size: int, seed: int) -> Any:
    """Random input of the shape that the model takes; the length of text depends on the seed."""
    about = trained.about
    if not about.input_shape:
        raise InputError("the input shape of this model is not known, so it cannot be exported.")
    kind = getattr(torch, about.numbers or "float32")
    if about.inputs.get("kind") != "text" and not kind.is_floating_point:
        return torch.zeros(size, *about.input_shape, dtype=kind)
    return trained.reader().sample(size, seed)


def _difference(trained: Trained, wanted: NDArray[Any], found: NDArray[Any]) -> float:
    """The largest; of probabilities where logits are logarithms of them, which may be of almost nothing."""
    if found.shape != wanted.shape:
        raise InputError(f"the exported model gives {found.shape}, not {wanted.shape}.")
    if isinstance(trained.model, Baseline) and trained.about.classes:
        found, wanted = np.exp(found), np.exp(wanted)
    return float(np.abs(found - wanted).max())


def _traced(network: nn.Module, x: Any) -> tuple[nn.Module, tuple[Any, ...], Any]:
    """What torch's exporters take: the number of examples is dynamic, and so is the length of text."""
    batch, length = torch.export.Dim("batch"), torch.export.Dim.AUTO
    shapes = {name: {0: batch, 1: length} for name in x} if isinstance(x, Mapping) else {0: batch}
    return network.eval(), (x,), (shapes,)


def write_network(network: nn.Module, x: Any, path: Path, format: Format) -> Callable[[Any], Tensor]:
    """Write a network to a file, traced with the input ``x``; returns what runs that file."""
    if format == "safetensors":
        save_file({k: v.detach().clone().contiguous() for k, v in network.state_dict().items()}, path)
        return lambda x: torch.func.functional_call(network, load_file(path), (x,))
    if format == "torch-export":
        module, args, shapes = _traced(network, x)
        torch.export.save(torch.export.export(module, args, dynamic_shapes=shapes), path)
        return torch.export.load(path).module()
    if isinstance(network, Baseline):
        graph = _baseline_graph(network, nn.Identity(), ["output"])
    else:
        graph = _exported(_traced(network, x), list(x) if isinstance(x, Mapping) else ["x"], ["output"])
    path.write_bytes(graph.SerializeToString())
    session = _session(path)

    def run(x: Any) -> Tensor:
        inputs = x if isinstance(x, Mapping) else {"x": x}
        return torch.from_numpy(session.run(None, {k: v.numpy() for k, v in inputs.items()})[0])

    return run


# ONNX


def _session(path: Path) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])


def _need(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise InputError(f"format 'onnx' requires {package}: pip install 'shoal[onnx]'.")


def _exported(traced: tuple[nn.Module, Any, Any], inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    """The ONNX model of a module."""
    _need("onnx", "onnxscript", "onnxruntime")
    module, args, shapes = traced
    names: dict[str, Any] = {"input_names": list(inputs), "output_names": list(outputs)}
    args = (*args, {})  # the last mapping would be taken for keyword arguments
    program = torch.onnx.export(module, args, dynamic_shapes=shapes, dynamo=True, verbose=False, **names)
    assert program is not None
    return program.model_proto


def _baseline_graph(baseline: Baseline, results: nn.Module, outputs: Sequence[str]) -> Any:
    """The ONNX model from features (``x``) to what ``results`` makes of the logits of a baseline."""
    from onnx import compose

    module = nn.Sequential(_AllClasses(baseline), results)
    last = _exported(_traced(module, torch.zeros(TRACED, max(1, len(baseline.known)))), ["values"], outputs)
    model = _converted(baseline, last)
    return compose.merge_models(model, last, [(model.graph.output[0].name, "values")])


class _AllClasses(nn.Module):
    """Log-probabilities of all classes from the probabilities of those that a baseline knows."""

    place: Tensor

    def __init__(self, baseline: Baseline) -> None:
        super().__init__()
        self.regression = baseline.classes is None
        self.register_buffer("place", torch.eye(baseline.classes or 1)[baseline.known])

    def forward(self, values: Tensor) -> Tensor:
        return values.squeeze(1) if self.regression else (values @ self.place).clamp_min(LEAST).log()


def _converted(baseline: Baseline, like: Any) -> Any:
    """A baseline as an ONNX model from features to its values, in the versions of another model."""
    from onnx import compose, helper, utils

    _need("skl2onnx", "onnxmltools")
    if isinstance(baseline, BoostedBaseline):
        from onnxmltools.convert import convert_lightgbm as convert
        from onnxmltools.convert.common.data_types import FloatTensorType

        options: dict[str, Any] = {"zipmap": False}
    else:
        from skl2onnx import convert_sklearn as convert
        from skl2onnx.common.data_types import FloatTensorType

        options = {"options": {"zipmap": False}} if baseline.known else {}
    types = [("x", FloatTensorType([None, baseline.width]))]
    model = convert(baseline.model, initial_types=types, **options)
    name = model.graph.output[-1].name  # the first of a classifier is the label
    model = utils.Extractor(model).extract_model(["x"], [name])
    model = compose.add_prefix(model, "model/")  # converters use names of the file's outputs
    model.graph.input[0].name = "x"
    for node in model.graph.node:
        node.input[:] = ["x" if each == "model/x" else each for each in node.input]
    versions = {each.domain: each.version for each in like.opset_import} | {"ai.onnx.ml": 2}
    del model.opset_import[:]
    model.opset_import.extend(helper.make_opsetid(*each) for each in versions.items())
    model.ir_version = like.ir_version
    return model


# Raw columns of a table

TYPES = {
    "numeric": ("DOUBLE", "the number; missing: NaN"),
    "boolean": ("DOUBLE", "0 or 1; missing: NaN"),
    "date": ("DOUBLE", "days since 1970-01-01, with the hours as a fraction; missing: NaN"),
    "categorical": ("STRING", "the text, of a whole number its digits; missing: empty, NA, - …"),
    "text": (
        "FLOAT",
        "preprocessed: TF-IDF of the words, as described in FILE.json",
    ),  # no operator hashes words
}
"""Of each kind of column: the type of its input, and what that holds."""


class _Features(nn.Module):
    """The preprocessing of a table: one (n, 1) tensor per column, of categories the number of the value."""

    def __init__(self, columns: Sequence[Mapping[str, Any]]) -> None:
        super().__init__()
        self.columns = columns

    def forward(self, columns: Sequence[Tensor]) -> Tensor:
        features = [f for x, about in zip(columns, self.columns, strict=True) for f in self.encoded(x, about)]
        return torch.cat(features, 1)

    def encoded(self, x: Tensor, about: Mapping[str, Any]) -> list[Tensor]:
        """The features of a column, in float64 step by step as in training, so that rounding is the same."""
        if about["kind"] == "text":
            if about["components"] is None:
                return [x]
            reduced = x.double() @ torch.tensor(about["components"], dtype=torch.float64)
            return [reduced.clamp(-CLIP, CLIP).float()]
        if about["kind"] == "categorical":
            return [(x == torch.arange(len(about["values"]) + bool(about["other"]))).float()]
        missing = x.isnan()
        if about["kind"] == "date":
            parts = zip(self.calendar(x.nan_to_num(0.0)), about["parts"], strict=True)
        else:
            parts = zip([x], [about["scaling"]], strict=True)
        features = [
            (part.clamp(s["low"], s["high"]).sub(s["mean"]) / s["scale"]).clamp(-CLIP, CLIP)
            for part, s in parts
            if s["scale"] > 0
        ]
        features = [torch.where(missing, 0.0, feature).float() for feature in features]
        return features + ([missing.float()] if about["indicator"] else [])

    @staticmethod
    def calendar(days: Tensor) -> tuple[Tensor, ...]:
        """Day, month, weekday and hour of days since 1970-01-01.

        The month is that of a calendar whose years begin in March, so that leap days come last; days are
        counted within 400 years, which are always 146,097 days.
        """
        whole = days.floor()
        day = (whole + 719468) - ((whole + 719468) / 146097).floor() * 146097
        leap_days = (day / 1460).floor() - (day / 36524).floor() + (day / 146096).floor()
        year = ((day - leap_days) / 365).floor()
        day_of_year = day - (year * 365 + (year / 4).floor() - (year / 100).floor())
        month = ((day_of_year * 5 + 2) / 153).floor()
        month = torch.where(month < 10, month + 3, month - 9)
        weekday = (whole + 3) - ((whole + 3) / 7).floor() * 7
        return days, month, weekday, (days - whole) * 24


class _Results(nn.Module):
    """Calibrated probabilities, logits and the number of the class; in regression, the number in the label's
    units."""

    def __init__(self, about: About) -> None:
        super().__init__()
        self.temperature, label = about.temperature, about.inputs.get("label") or {}
        self.classes, self.mean, self.scale = about.classes, label.get("mean", 0.0), label.get("scale", 1.0)

    def forward(self, output: Tensor) -> Any:
        if self.classes is None:
            return output.double() * self.scale + self.mean
        return (output / self.temperature).softmax(1), output.clone(), output.argmax(1)


def _table_graph(trained: Trained, network: nn.Module, outputs: Sequence[str]) -> Any:
    """The ONNX model from columns, with the numbers of categories, to ``outputs``."""
    import onnx

    described = trained.inputs["columns"]
    dtypes = {"STRING": torch.int64, "DOUBLE": torch.float64, "FLOAT": torch.float32}
    columns = [
        torch.zeros(TRACED, _width(about), dtype=dtypes[TYPES[about["kind"]][0]]) for about in described
    ]
    shapes = ([{0: torch.export.Dim("n")} for _ in columns],)
    names = [f"column {n}" for n in range(len(columns))]
    features, results = _Features(described), _Results(trained.about)
    if isinstance(network, Baseline):
        first = _exported((features.eval(), (columns,), shapes), names, ["features"])
        last = _baseline_graph(network, results, outputs)
        return onnx.compose.merge_models(first, last, [("features", "x")], prefix1="columns/")
    return _exported((nn.Sequential(features, network, results).eval(), (columns,), shapes), names, outputs)


def _width(about: Mapping[str, Any]) -> int:
    return len(about["words"]) if about["kind"] == "text" else 1


def write_table_onnx(trained: Trained, network: nn.Module, path: Path) -> list[dict[str, Any]]:
    """Write an ONNX file that takes the raw columns of a table; returns how each is given."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    classes = trained.about.classes
    outputs = ["prediction"] if classes is None else ["probabilities", "logits", "class"]
    # All names of the graph get a prefix, so that columns can have any; nodes around it translate.
    graph = onnx.compose.add_prefix(_table_graph(trained, network, outputs), "shoal/")
    nodes, inputs, columns = [], [], list[dict[str, Any]]()
    for about, into in zip(trained.inputs["columns"], graph.graph.input, strict=True):
        name, (kind, meaning) = str(about["name"]), TYPES[about["kind"]]
        while name in ("", "label", *outputs) or name.startswith("shoal/"):
            name = f"column {name}"
        shape: list[Any] = ["n", _width(about)]
        nodes.append(_entry(name, into.name, about))
        inputs.append(helper.make_tensor_value_info(name, getattr(TensorProto, kind), shape))
        columns.append({"name": about["name"], "kind": about["kind"], "input": name, "shape": shape})
        columns[-1] |= {"type": kind.lower(), "value": meaning}
    nodes += graph.graph.node
    nodes += [helper.make_node("Identity", [f"shoal/{name}"], [name]) for name in outputs[:2]]
    shape = ["n"] if classes is None else ["n", classes]
    number = TensorProto.DOUBLE if classes is None else TensorProto.FLOAT
    results = [helper.make_tensor_value_info(name, number, shape) for name in outputs[:2]]
    constants = list(graph.graph.initializer)
    if classes is not None:
        labels = np.array(trained.class_names or range(classes), object if trained.class_names else np.int64)
        constants.append(numpy_helper.from_array(labels, "shoal/class names"))
        nodes.append(helper.make_node("Gather", ["shoal/class names", "shoal/class"], ["label"]))
        label_type = TensorProto.STRING if trained.class_names else TensorProto.INT64
        results.insert(0, helper.make_tensor_value_info("label", label_type, ["n"]))
    versions = {each.domain: each.version for each in graph.opset_import} | {"ai.onnx.ml": 2}
    model = helper.make_model(
        helper.make_graph(nodes, "shoal", inputs, results, constants),
        opset_imports=[helper.make_opsetid(*each) for each in versions.items()],
        functions=graph.functions,
        ir_version=graph.ir_version,
    )
    label = (trained.inputs.get("label") or {}).get("name", "")
    about = {"columns": columns, "class_names": trained.class_names, "label": label}
    helper.set_model_props(model, {name: json.dumps(value) for name, value in about.items()})
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    return columns


def _entry(name: str, to: str, about: Mapping[str, Any]) -> Any:
    """The node from a column to the network: the text of a category becomes its number, −1 if unknown."""
    from onnx import helper

    if about["kind"] != "categorical":
        return helper.make_node("Identity", [name], [to])
    missing = {form: -1 for mark in sorted(MISSING) for form in (mark, mark.upper(), mark.capitalize())}
    number = {**missing, **{str(value): n for n, value in enumerate(about["values"])}}
    other = len(about["values"]) if about["other"] else -1
    keys: dict[str, Any] = {"keys_strings": list(number), "values_int64s": list(number.values())}
    return helper.make_node("LabelEncoder", [name], [to], domain="ai.onnx.ml", default_int64=other, **keys)


def _raw_difference(trained: Trained, columns: Sequence[Mapping[str, Any]], path: Path, rows: int) -> float:
    """Between what the file and the model make of random raw rows; of numbers, in units of their scale."""
    random = np.random.default_rng(rows)
    raw = {about["name"]: _random_cells(about, random, rows) for about in trained.inputs["columns"]}
    reader: Any = trained.reader()
    table, inputs = as_table(raw), dict[str, Any]()
    for column, step in zip(columns, reader.encoder.steps, strict=True):
        cells = raw[column["name"]][:, None]
        if column["kind"] == "text":
            cells = step.counted(table[step.name], np.arange(rows)).toarray().astype(np.float32)
        elif column["kind"] == "date":
            seconds = cells.astype("datetime64[s]")
            cells = np.where(np.isnat(seconds), np.nan, seconds.astype(np.int64) / 86400)
        inputs[column["input"]] = cells
    regression = trained.about.classes is None
    found = _session(path).run(["prediction" if regression else "logits"], inputs)[0]
    wanted = np.concatenate([output for _, output in trained.outputs(reader, raw, rows)])
    scale = (trained.inputs.get("label") or {}).get("scale", 1.0) if regression else 1.0
    return _difference(trained, wanted, found) / float(scale)


def _random_cells(about: Mapping[str, Any], random: np.random.Generator, rows: int) -> NDArray[Any]:
    """Cells of a column as a table may have them: usual ones, far ones, missing ones, unknown ones."""
    kind, missing = about["kind"], random.random(rows) < 0.2
    if kind == "numeric":
        scale = about["scaling"]["scale"] or 1.0
        return np.where(missing, np.nan, about["scaling"]["mean"] + scale * random.standard_cauchy(rows))
    if kind == "boolean":
        return np.where(missing, np.nan, random.integers(0, 2, rows))
    if kind == "date":
        seconds = random.integers(-(10**10), 10**10, rows).astype("datetime64[s]")
        return np.where(missing, "", seconds.astype(str)).astype(object)
    return random.choice(
        np.array([*about.get("values", ()), "never seen before", "other words", ""], object), rows
    )
