"""``shoal.load``: a trained model from the folder of its run, ready to use on new input.

Such a folder may come from anybody. Weights are read from safetensors and everything else is JSON: nothing in
it is run, and nothing is fetched.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.data.batch import TASKS
from shoal.data.examples import NUMBERS as FLOATING
from shoal.data.hub import is_folder
from shoal.data.inputs import TOKENIZER, Batch, Reader, offline, reader
from shoal.data.loader import to_device
from shoal.errors import InputError, shown
from shoal.experiments.config import RunConfig
from shoal.files import parse_yaml, read_json, write_atomically
from shoal.models import build, language, options_of
from shoal.models.calling import call
from shoal.settings import checked, plain_number
from shoal.training.checkpoint import load_weights
from shoal.training.folder import check_files
from shoal.training.processes import pick_device

if TYPE_CHECKING:
    from shoal.export import Exported

FORMAT = 1
NOTHING: Mapping[str, Any] = MappingProxyType({})
WEIGHTS, ABOUT, RECORD, ENCODER = "model.safetensors", "inputs.json", "record.json", "encoder"
LARGEST = 2**28
"""Bytes of a JSON file that are read."""
NUMBERS, TENSORS = 2**26, 10_000
"""What a network may have beside the weights in its file while it is built."""


_WRONG = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, ArithmeticError)
"""What networks raise that are built from, or given, what they are not made for."""


_PARTS = ("input_shape", "classes", "class_names", "model", "inputs")


@dataclass(frozen=True)
class About:
    """How to build and feed a trained model: the content of ``inputs.json``."""

    model: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    input_shape: tuple[int, ...] = ()
    numbers: str = "float32"
    classes: int | None = None
    class_names: tuple[str, ...] = ()
    task: str = ""
    """One of :data:`~shoal.data.batch.TASKS`."""

    def __post_init__(self) -> None:
        if not self.task:
            object.__setattr__(self, "task", "regression" if self.classes is None else "classification")

    @classmethod
    def read(cls, path: Path) -> About:
        content: Any = _json(path)
        if content.get("format") != FORMAT:
            raise _damaged(path, f"its format is {content.get('format')!r}, not {FORMAT}")
        shape, classes, names, model, inputs = map(content.get, _PARTS)

        def need(sound: bool, why: str) -> None:
            if not sound:
                raise _damaged(path, why)

        need(isinstance(shape, list) and all(_whole(n, 1) for n in shape), f"input_shape is {shape!r}")
        need(classes is None or _whole(classes, 2), f"classes is {classes!r}")
        listed = isinstance(names, list) and all(isinstance(n, str) for n in names)
        need(listed, "class_names are not a list of names")
        need(len(names) in (0, classes), f"it names {len(names)} classes and there are {classes}")
        need(isinstance(model, dict) and isinstance(inputs, dict), "model and inputs must be mappings")
        size = inputs.get("size")
        fits = inputs.get("kind") != "image" or shape == [3, size, size]
        need(fits, f"images of size {size!r} are not of shape {shape}")
        numbers = str(content.get("numbers", "float32"))
        task = content.get("task") or ""
        need(task in ("", *TASKS), f"its task is {task!r}")
        need(not task or (classes is None) == (task in FLOATING), f"task={task!r} with classes={classes!r}")
        return cls(model, inputs, tuple(shape), numbers, classes, tuple(names), task)

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **self.__dict__}


class Trained(nn.Module):
    """A trained model in eval mode, with its preprocessing; returned by :func:`load`.

    Called with preprocessed tensors, it returns the outputs of the network.

    Args:
        model: network.
        about: description of the model: task, classes, and preprocessing.
        folder: folder that it was loaded from.
        record: content of ``record.json``, if there is one.
    """

    def __init__(
        self, model: nn.Module, about: About, folder: Path | None = None, record: Mapping[str, Any] = NOTHING
    ) -> None:
        super().__init__()
        self.model = model
        self.about, self.folder, self.record = about, folder, record
        self.kept: tempfile.TemporaryDirectory[str] | None = None
        self.eval()

    @classmethod
    def in_memory(
        cls,
        model: nn.Module,
        content: Mapping[str, Any],
        files: Mapping[str, bytes] = NOTHING,
        record: Mapping[str, Any] = NOTHING,
    ) -> Trained:
        """Create it from a model that was just trained.

        Args:
            model: network.
            content: description of the model, from :func:`shoal.training.summary.about`.
            files: further files of the model by name, such as its tokenizer.
            record: content of ``record.json``.
        """
        names = [f.name for f in fields(About)]
        about = About(**{name: content[name] for name in names if name in content})
        about = replace(about, input_shape=tuple(about.input_shape), class_names=tuple(about.class_names))
        made = cls(model, about, None, record)
        if files:  # of a tokenizer, which is read from a folder
            made.kept = tempfile.TemporaryDirectory(prefix="shoal-")
            made.folder = Path(made.kept.name)
            for name, text in files.items():
                write_atomically(made.folder / name, text)
        return made

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.about.class_names

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, or their numbers if they have none; empty in regression."""
        return self.class_names or tuple(map(str, range(self.about.classes or 0)))

    @property
    def inputs(self) -> Mapping[str, Any]:
        return self.about.inputs

    @property
    def device(self) -> torch.device:
        return next((t.device for t in self.model.state_dict().values()), torch.device("cpu"))

    def forward(self, x: Any) -> Any:
        return call(self.model, x)

    def train(self, mode: bool = True) -> Trained:
        """Stay in eval mode; to train further, use ``.model``.

        Args:
            mode: ignored.
        """
        super().train(False)
        return self

    def reader(self, source: Any = None, **options: Any) -> Reader:
        """Return the reader that preprocesses raw input; tensors and arrays are not changed.

        Args:
            source: raw input, or an array.
            **options: options of the reader.
        """
        ready = isinstance(source, Tensor | np.ndarray)
        return reader({} if ready else self.inputs, self.about.input_shape, folder=self.folder, **options)

    @checked
    def predict(
        self, source: Any, *, batch_size: int = 256, workers: int = 0, column: str | None = None
    ) -> NDArray[Any]:
        """Predict the class of each example by name (by number, if it has none), or its value in regression.

        With several labels, the prediction is 0 or 1 for each; with dense outputs, a class for each position.

        Args:
            source: raw input: for table models a CSV or Parquet file, a DataFrame or a mapping of columns;
                for image models a file, several files, or a folder; for text models a list, a .txt file with
                one text per line, or a table. Tensors and arrays are used as the input of the network.
            batch_size: number of examples per batch.
            workers: number of processes that load examples.
            column: text column of a table, for text models.
        """
        found = self._collected(source, batch_size, workers, column)
        return self.labels(found)

    @checked
    def predict_proba(
        self, source: Any, *, batch_size: int = 256, workers: int = 0, column: str | None = None
    ) -> NDArray[np.float64]:
        """Predict the probability of each class, (n, classes), or of each of several labels, (n, labels).

        Args:
            source: as in :meth:`predict`.
            batch_size: number of examples per batch.
            workers: number of processes that load examples.
            column: text column of a table, for text models.
        """
        if self.about.task == "multilabel":
            logits = self._collected(source, batch_size, workers, column).astype(np.float64)
            return np.exp(-np.logaddexp(0, -logits))
        if self.about.classes is None:
            raise InputError("this model is a regression model and has no probabilities.")
        return probabilities(self._collected(source, batch_size, workers, column))

    def _collected(self, source: Any, batch_size: int, workers: int, column: str | None) -> NDArray[Any]:
        source_reader = self.reader(source, column=column)
        outputs = [output for _, output in self.outputs(source_reader, source, batch_size, workers)]
        if not outputs:
            raise InputError("the input is empty.")
        for note in source_reader.doubts:
            warnings.warn(note, stacklevel=4)
        return np.concatenate(outputs)

    def outputs(
        self, source_reader: Reader, source: Any, batch_size: int = 256, workers: int = 0
    ) -> Iterator[tuple[Batch, NDArray[Any]]]:
        """Compute the outputs of the network batch by batch; in regression in the units of the label.

        Args:
            source_reader: reader of the input, from :meth:`reader`.
            source: as in :meth:`predict`.
            batch_size: number of examples per batch.
            workers: number of processes that load examples.
        """
        for batch in _prepared(source_reader.batches(source, batch_size, workers)):
            found = self._applied(batch)
            # In float64: the label's own units may be such that float32 would round.
            known = source_reader.answers(found.astype(np.float64)) if self.about.classes is None else found
            yield batch, known

    def _applied(self, batch: Batch) -> NDArray[Any]:
        try:
            with torch.inference_mode():
                output = call(self.model, to_device(batch.x, self.device))
        except _WRONG as error:
            raise InputError(f"the model cannot take this input: {first_line(error)}") from error
        found: NDArray[Any] = output.float().cpu().numpy()
        if len(found) != len(batch.names):
            raise InputError(f"the model gives {len(found)} outputs for {len(batch.names)} examples.")
        return found

    def labels(self, outputs: NDArray[Any]) -> NDArray[Any]:
        """Convert outputs of the network to predictions.

        Args:
            outputs: outputs of the network.
        """
        if self.about.task == "multilabel":
            return (outputs > 0).astype(np.int64)
        if self.about.classes is None:
            return outputs
        best: NDArray[Any] = outputs.argmax(1)
        return np.array(self.class_names)[best] if self.class_names else best

    def export(self, path: str | Path, format: str | None = None, *, prepared: bool = False) -> Exported:
        """Export the model for use without Shoal; see :func:`shoal.export.export`. ::

            shoal.load("runs/fish").export("fish.onnx")

        Args:
            path: file to write.
            format: ``"onnx"``, ``"torch-export"`` or ``"safetensors"`` (default: by the file extension).
            prepared: for ONNX of a table model, take preprocessed inputs instead of raw columns.
        """
        from shoal.export import export

        return export(self, path, format, prepared=prepared)

    def __repr__(self) -> str:
        what = self.about.task if self.about.classes is None else f"{self.about.classes} classes"
        name = self.about.model.get("name") or type(self.model).__name__
        takes = f"{self.inputs.get('kind', 'array')} input {self.about.input_shape}"
        place = f", from {str(self.folder)!r}" if self.folder else ""
        return f"Trained({name}, {takes}, {what}{place})"


def _prepared(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same, with errors of one line where the description of the input is damaged."""
    try:
        yield from batches
    except InputError:
        raise
    except (*_WRONG, MemoryError) as error:
        raise InputError(
            f"the input cannot be preprocessed according to {ABOUT}: {first_line(error)}"
        ) from error


def first_line(error: BaseException) -> str:
    """Of its message, or its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def probabilities(outputs: NDArray[Any]) -> NDArray[np.float64]:
    """The softmax of (n, classes, …) outputs."""
    shifted = outputs.astype(np.float64)
    powers = np.exp(shifted - shifted.max(1, keepdims=True))
    found: NDArray[np.float64] = powers / powers.sum(1, keepdims=True)
    return found


@checked
def load(
    folder: str | Path, model: nn.Module | None = None, *, device: str | torch.device = "cpu"
) -> Trained:
    """Load the trained model of a run. ::

        model = shoal.load("runs/fish")
        model.predict("new patients.csv")

    Args:
        folder: run folder (``--out`` of `shoal train`, ``folder`` of :func:`shoal.fit`), or the file
            ``model.safetensors`` in it.
        model: for runs of your own network: an instance of it, which receives the weights.
        device: device of the model.

    Returns:
        Trained: the model, ready to predict.

    Raises:
        InputError: the folder contains no trained model, or the model is your own network and was not passed.
    """
    place_on = pick_device(device)
    weights = find(Path(folder).expanduser())
    place = weights.parent
    about = About.read(place / ABOUT) if (place / ABOUT).exists() else None
    found = load_weights(weights)
    if broken := [name for name, value in found.items() if value.is_floating_point() and value.isnan().any()]:
        raise InputError(
            f"the weights in {str(weights)!r} are damaged: {broken[0]!r} has a number that is NaN."
        )
    if model is None:
        model = _built(place, about, found)
    try:
        model.load_state_dict(found)
    except RuntimeError as error:
        first = "; ".join(" ".join(line.split()) for line in str(error).splitlines()[1:3])
        raise InputError(f"the weights in {str(weights)!r} do not fit the model: {first[:300]}") from error
    record = _json(place / RECORD) if (place / RECORD).exists() else {}
    checksums = record.get("files", {})  # records of older versions have none
    if not isinstance(checksums, dict) or not all(isinstance(v, str) for v in checksums.values()):
        raise _damaged(place / RECORD, "files must be a mapping of checksums")
    check_files(place, checksums if weights.name == WEIGHTS else {})
    return Trained(model, about or About(), place, record).to(place_on)


def _built(place: Path, about: About | None, weights: Mapping[str, Tensor]) -> nn.Module:
    """The network that ``inputs.json`` describes, with random weights: whatever it was, none are fetched."""
    call = "shoal.load(FOLDER, model=MODULE)"
    if about is None:
        raise InputError(f"{str(place)!r} has no {ABOUT}, which describes the model; pass the model: {call}.")
    if "name" not in about.model:
        own = f"your own network ({about.model.get('class', 'a class of its own')})"
        raise InputError(f"the model in {str(place)!r} is {own}; pass an instance of it: {call}.")
    name = _name(place, about)
    options = about.model.get("options") or {}
    if not isinstance(options, dict):
        raise _damaged(place / ABOUT, "the model's options must be a mapping")
    with offline(), Bounded(weights):
        given = {str(k): v for k, v in options.items() if k != "pretrained"}
        if "pretrained" in options_of(name):
            given["pretrained"] = False
        try:
            return build(name, input_shape=about.input_shape, classes=about.classes, seed=0, **given)
        except (*_WRONG, MemoryError) as error:
            if isinstance(error, InputError) and not given:  # not about options: what to install, for example
                raise
            raise InputError(
                f"the model {name!r} cannot be built according to {ABOUT}: {first_line(error)}"
            ) from error


def _name(place: Path, about: About) -> str:
    """What the model is built by: a name, or the encoder's folder beside the weights, and no other path."""
    name, tokenizer = about.model["name"], about.inputs.get("tokenizer", TOKENIZER)
    for value in (name, tokenizer):
        if not isinstance(value, str) or not value.isprintable() or len(value) > 200:
            raise _damaged(place / ABOUT, "a name of a model or tokenizer is not a short text")
    if tokenizer != TOKENIZER and is_folder(tokenizer):
        raise _damaged(place / ABOUT, f"its tokenizer is not in the folder {TOKENIZER!r} next to it")
    if (place / ENCODER / "config.json").is_file():
        return str((place / ENCODER).resolve())
    if language.known(name) and (name not in language.CONFIGURATIONS or is_folder(name)):
        raise _damaged(place / ABOUT, f"its model {name!r} is elsewhere; there is no {ENCODER!r} here")
    return str(name)


class Bounded(TorchFunctionMode):
    """Lets nobody make a network far larger than its weights: a few bytes can describe one of any size."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.numbers = NUMBERS + 2 * sum(value.numel() for value in weights.values())
        self.tensors = TENSORS + 8 * len(weights)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in MAKERS:
            sizes = args[0] if args and isinstance(args[0], list | tuple) else args or kwargs.get("size", ())
            self.numbers -= math.prod(max(1, int(n)) for n in sizes)
            self.tensors -= 1
            if self.numbers < 0 or self.tensors < 0:
                raise InputError(f"{ABOUT} describes a network that is far larger than its weights.")
        return func(*args, **kwargs)


MAKERS = {torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full, torch.arange}
"""What makes tensors out of nothing, as large as their first arguments say."""


def find(path: Path) -> Path:
    """The file of weights that ``path`` means; an error says what is there instead and what to do."""
    if os.path.isfile(path):  # which is false, and no error, for a name that is too long
        if path.suffix.lower() == ".safetensors":
            return path
        if path.suffix.lower() == ".json":
            raise _only_records(path, [path])
        raise InputError(f"{str(path)!r} is not a weights file of a model; use a run folder, or {WEIGHTS}.")
    if not os.path.isdir(path):
        raise InputError(f"there is no folder {shown(str(path))}.")
    if (path / WEIGHTS).is_file():
        return path / WEIGHTS
    if several := sorted(path.glob(f"*/{WEIGHTS}")):
        names = ", ".join(repr(str(p.parent)) for p in several[:3]) + (" …" if len(several) > 3 else "")
        raise InputError(f"{str(path)!r} contains several runs; use one of them: {names}.")
    if (path / "config.yaml").is_file():
        state = "has diverged" if (path / RECORD).is_file() else "is not finished: shoal resume"
        raise InputError(f"the run in {str(path)!r} {state}; it has no weights.")
    records = sorted([*path.glob("*.json"), *path.glob("runs/*.json")])
    if records := [p for p in records if len(p.stem) == 16]:
        raise _only_records(path, records)
    raise InputError(f"{str(path)!r} contains no trained model: there is no {WEIGHTS} in it.")


def _only_records(path: Path, records: Sequence[Path]) -> InputError:
    """For what a comparison or a sweep left, which keeps what came out and no weights."""
    try:
        config = RunConfig.from_dict(_json(records[0])["config"])
    except (InputError, LookupError, TypeError, ValueError):
        return InputError(f"{str(path)!r} contains no trained model; use the folder of a run.")
    which = "this run" if path == records[0] else f"one of its {len(records):,} runs"
    return InputError(
        f"{str(path)!r} contains records without weights, which comparisons and sweeps do not save. "
        f"To train {which} again:\n{train_command(config)[:600]}"
    )


OPTIONS = (
    *("steps", "batch_size", "domains_per_step", "model", "weights", "draw", "warm_start", "seed"),
    *("optimizer", "schedule", "clip", "accumulate", "precision", "average", "average_start"),
    *("average_ratio", "select", "metric", "patience", "on_nan", "eval_every", "warm_select"),
    *("average_decay", "wise_ft", "miro", "l2_sp", "l2_sp_head", "memory_format", "retrain"),
    *("head_lr", "layer_decay"),
)
"""What of a configuration `shoal train` takes under an option of the same name."""


def train_command(config: RunConfig) -> str:
    """The `shoal train` that runs ``config`` and keeps its weights, and what of it that cannot say."""
    from shoal.experiments.baselines import is_one  # which a model that only predicts does without

    usual = RunConfig(config.dataset, config.algorithm, config.steps)
    held_out = config.protocol.get("leave_out") or []
    data = {**config.data_options, **({"test": held_out[0]} if len(held_out) == 1 else {})}
    words = ["shoal", "train", config.algorithm, config.dataset]
    named = {"--data": data, "--set": config.settings, "--model-set": config.model_options}
    for option, pairs in named.items():
        words += [option, *(f"{name}={_yaml(value)}" for name, value in pairs.items())] if pairs else []
    baseline = is_one(config)
    for name in ("seed", "metric") if baseline else OPTIONS:
        value = getattr(config, name)
        if name == "steps" or value != getattr(usual, name):
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    words += [] if baseline else ["--lr", str(config.optimizer_options.get("lr", 1e-3))]
    words += ["--out", f"runs/{config.algorithm}-{config.identity[:8]}"]
    rest = [f"{k}={v}" for k, v in config.optimizer_options.items() if k != "lr"]
    rest += [f"holdout={config.holdout}"] if config.holdout is not None else []
    rest += [f"trial {config.protocol['trial']} of DomainBed's splits"] if config.protocol else []
    return shlex.join(words) + (f"\n(not the same in: {', '.join(rest)})" if rest else "")


def _yaml(value: Any) -> str:
    """As the command line reads it: text stays text."""
    with contextlib.suppress(ValueError):
        if isinstance(value, str) and plain_number(value) is None and parse_yaml(value) == value:
            return value
    return json.dumps(value, default=list, ensure_ascii=False)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path, LARGEST)
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
    except InputError:
        raise
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(content, dict):
        raise _damaged(path, "it is not a mapping")
    return content


def _damaged(path: Path, why: str) -> InputError:
    return InputError(f"{str(path)!r} is damaged: {why}.")


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
