"""``shoal.load``: a trained model from the folder of its run, which may come from anybody: nothing in it is
executed, and nothing is downloaded."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, Field, model_validator
from safetensors.torch import save
from torch import Tensor, nn

from shoal.data.inputs import TOKENIZER, Reader, offline, reader
from shoal.data.loader import to_device
from shoal.errors import InputError, shown
from shoal.experiments.record import read_record
from shoal.files import write_atomically
from shoal.models import build, language, options_of
from shoal.models.baseline import FILE, BoostedBaseline
from shoal.models.calling import call
from shoal.settings import checked
from shoal.training.checkpoint import load_weights
from shoal.training.folder import check_files
from shoal.training.processes import pick_device

if TYPE_CHECKING:
    from shoal.api.export import Exported, Format
    from shoal.api.score import Score

Array = NDArray[Any]
WEIGHTS, ABOUT, RECORD, CARD = "model.safetensors", "inputs.json", "record.json", "card.md"
MODELS = (WEIGHTS, FILE)
"""The files that a model can be in."""
ENCODER = "encoder/config.json"
NOTHING: Mapping[str, Any] = MappingProxyType({})


@contextlib.contextmanager
def input_errors(message: str) -> Iterator[None]:
    """Make one InputError of anything that a damaged file or unsuitable input makes libraries raise."""
    try:
        yield
    except (InputError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # the panics of tokenizers are no Exception
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise InputError(f"{message}: {why}") from error


class Calibration(BaseModel, frozen=True, allow_inf_nan=False):
    """The temperature of a classifier, and the reliability of its probabilities before and after."""

    temperature: Annotated[float, Field(gt=0)]
    on: str = "validation"
    count: int = 0
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}


class About(BaseModel, frozen=True):
    """How to build and feed a trained model: the content of ``inputs.json``."""

    format: Literal[1] = 1
    model: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    input_shape: tuple[Annotated[int, Field(ge=1)], ...] = ()
    numbers: str = "float32"
    classes: Annotated[int, Field(ge=2)] | None = None
    class_names: tuple[str, ...] = ()
    task: Literal["classification", "ordinal", "multilabel", "regression"] = "regression"
    calibration: Calibration | None = None

    @model_validator(mode="after")
    def _consistent(self) -> About:
        if len(self.class_names) not in (0, self.classes):
            raise ValueError(f"it names {len(self.class_names)} classes and there are {self.classes}")
        if (self.classes is None) != (self.task in ("multilabel", "regression")):
            raise ValueError(f"the task is {self.task} with {self.classes} classes")
        return self

    @classmethod
    def read(cls, path: Path) -> About:
        with input_errors(f"{str(path)!r} is damaged"):
            return cls.model_validate_json(path.read_bytes())


class Outputs(NamedTuple):
    """The outputs of a model for raw input, in regression in the units of the label."""

    names: list[str]
    values: Array
    reader: Reader
    """What has read the input, with its ``notes`` and ``warnings``."""


class Trained(nn.Module):
    """A trained model in eval mode, with its preprocessing; returned by :func:`load`.

    Called with preprocessed tensors, it returns the outputs of the network.

    Args:
        model: network.
        about: description of the model: task, classes, and preprocessing.
        folder: folder with its files.
        record: content of ``record.json``, if there is one.
    """

    def __init__(
        self, model: nn.Module, about: About, folder: Path, record: Mapping[str, Any] = NOTHING
    ) -> None:
        super().__init__()
        self.model, self.about, self.folder, self.record = model, about, folder, record
        self.eval()

    @classmethod
    def in_memory(cls, model: nn.Module, files: Mapping[str, bytes], record: Mapping[str, Any]) -> Trained:
        """Create it from a model that was just trained, and the files that a run folder has beside it."""
        temporary = tempfile.TemporaryDirectory(prefix="shoal-")  # a tokenizer is read from a folder
        folder = Path(temporary.name)
        for name, content in files.items():
            write_atomically(folder / name, content)
        made = cls(model, About.read(folder / ABOUT), folder, record)
        weakref.finalize(made, temporary.cleanup)
        return made

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, or their numbers if they have none; empty in regression."""
        return self.about.class_names or tuple(map(str, range(self.about.classes or 0)))

    @property
    def inputs(self) -> Mapping[str, Any]:
        """The description of the preprocessing."""
        return self.about.inputs

    @property
    def temperature(self) -> float:
        """What logits are divided by to give calibrated probabilities; 1 without calibration."""
        return self.about.calibration.temperature if self.about.calibration else 1.0

    def forward(self, x: Any) -> Any:
        return call(self.model, x)

    def predict(
        self, source: Any, *, batch_size: int = 256, workers: int = 0, column: str | None = None
    ) -> Array:
        """Predict the class of each example by name (by number, if it has none), or its value in regression.

        With several labels, the prediction is 0 or 1 for each. The arguments are those of
        :func:`shoal.predict`; tensors and arrays are used as the input of the network.
        """
        from shoal.api.predict import predict

        labels: Array = predict(self, source, batch_size=batch_size, workers=workers, column=column).labels
        return labels

    def predict_proba(
        self, source: Any, *, batch_size: int = 256, workers: int = 0, column: str | None = None
    ) -> NDArray[np.float64]:
        """Predict the probability of each class, (n, classes), or of each of several labels, (n, labels)."""
        from shoal.api.predict import predict

        how: dict[str, Any] = {"batch_size": batch_size, "workers": workers, "column": column}
        found: Array = predict(self, source, proba=True, **how).probabilities
        return found

    def score(
        self, data: Any, *, label: str | None = None, domain: str | None = None, group: str | None = None
    ) -> Score:
        """Score the model on labelled data; its arguments are those of :func:`shoal.score`."""
        from shoal.api.score import score

        return score(self, data, label=label, domain=domain, group=group)

    def export(self, out: str | Path | None = None, format: Format | None = None) -> Exported:
        """Export the model for use without Shoal; its arguments are those of :func:`shoal.export`."""
        from shoal.api.export import export

        return export(self, out, format=format)

    def save(self, folder: str | Path) -> Path:
        """Save the model with its preprocessing, model card and record to a new folder, for :func:`load`."""
        return write_model(Path(folder).expanduser(), self.files(), self.record)

    def files(self) -> dict[str, bytes]:
        """The files that :func:`load` needs, by name, and the model card. Links in the folder, which may be a
        stranger's, are left out."""
        files = dict[str, bytes]()
        for place in (self.folder / CARD, self.folder / TOKENIZER, self.folder / Path(ENCODER).parent):
            for path in () if place.is_symlink() else (place, *place.rglob("*")):
                if path.is_file() and not path.is_symlink():
                    files[path.relative_to(self.folder).as_posix()] = path.read_bytes()
        if isinstance(self.model, BoostedBaseline):
            files[FILE] = self.model.content
        else:
            weights = self.model.state_dict()
            files[WEIGHTS] = save({k: v.detach().cpu().clone().contiguous() for k, v in weights.items()})
        return {**files, ABOUT: self.about.model_dump_json(indent=1).encode()}

    def reader(self, source: Any = None, column: str | None = None) -> Reader:
        """Return the reader that preprocesses raw input; tensors and arrays are not changed."""
        inputs = {} if isinstance(source, Tensor | np.ndarray) else self.inputs
        return reader(inputs, self.about.input_shape, folder=self.folder, column=column)

    def run(self, source: Any, batch_size: int = 256, workers: int = 0, column: str | None = None) -> Outputs:
        """Compute the outputs for raw input."""
        self.eval()
        used, names, parts = self.reader(source, column), list[str](), list[Array]()
        device = next((t.device for t in self.model.state_dict().values()), torch.device("cpu"))
        with input_errors("the model cannot take this input"), torch.inference_mode():
            for batch in used.batches(source, batch_size, workers):
                names += batch.names
                parts.append(self(to_device(batch.x, device)).float().cpu().numpy())
            values = np.concatenate(parts) if parts else np.empty(0)
        if not names:
            raise InputError("the input is empty.")
        if len(values) != len(names):
            raise InputError(f"the model gives {len(values)} outputs for {len(names)} examples.")
        if self.about.classes is None:  # in the units of the label, float32 could round
            values = used.in_units(values.astype(np.float64))
        return Outputs(names, values, used)

    def labels(self, outputs: Array) -> Array:
        """Convert outputs of the network to predictions."""
        if self.about.task == "multilabel":
            return (outputs > 0).astype(np.int64)
        if self.about.classes is None:
            return outputs
        best: Array = outputs.argmax(1)
        return np.array(self.about.class_names)[best] if self.about.class_names else best

    def probabilities(self, outputs: Array, calibrated: bool = True) -> NDArray[np.float64]:
        """Convert outputs of the network to probabilities of classes, or of each of several labels."""
        logits = torch.from_numpy(outputs).double() / (self.temperature if calibrated else 1.0)
        found = logits.sigmoid() if self.about.task == "multilabel" else logits.softmax(1)
        return found.numpy()

    def __repr__(self) -> str:
        name = self.about.model.get("name") or type(self.model).__name__
        what = f"{self.about.classes} classes" if self.about.classes else self.about.task
        return f"Trained({name}, {self.inputs.get('kind', 'array')} input {self.about.input_shape}, {what})"


@checked
def load(
    folder: str | Path, model: nn.Module | None = None, *, device: str | torch.device = "cpu"
) -> Trained:
    """Load the trained model of a run. ::

        model = shoal.load("runs/fish")
        model.predict("new patients.csv")

    Args:
        folder: run folder (``out`` of :func:`shoal.train`, ``folder`` of :func:`shoal.fit`), or the file
            ``model.safetensors`` in it.
        model: for runs of your own network: an instance of it, which receives the weights.
        device: device of the model.
    """
    path = find_model(Path(folder).expanduser())
    place = path.parent
    about = About.read(place / ABOUT) if (place / ABOUT).exists() else About()
    record = read_record(place / RECORD).to_dict() if (place / RECORD).exists() else {}
    if path.name in MODELS:
        check_files(place, record.get("files", {}))
    with input_errors(f"{str(path)!r} is damaged, or does not fit the model"):
        if path.name == FILE:
            (width,), known = about.input_shape, about.model["known"]
            network: nn.Module = BoostedBaseline(path.read_bytes(), width, about.classes, known)
        else:
            weights = load_weights(path)
            network = _build(place, about) if model is None else model
            network.load_state_dict(weights)
    return Trained(network, about, place, record).to(pick_device(device))


def as_trained(model: Any, device: Any = None) -> Trained:
    """The model that an argument of a public function means: a run folder, or a model that was loaded."""
    if isinstance(model, Trained):
        return model if device is None else model.to(pick_device(device))
    if isinstance(model, str | Path):
        return load(model, device=pick_device(device))
    raise InputError(f"must be a run folder or a model from shoal.load, got {shown(model)}.", "model")


def write_model(folder: Path, files: Mapping[str, bytes], record: Mapping[str, Any]) -> Path:
    """Write a new folder that :func:`load` reads, which gets its name when all is in it."""
    content = dict(files)
    if record:
        checksums = {name: hashlib.sha256(each).hexdigest() for name, each in files.items() if name != CARD}
        content[RECORD] = json.dumps({**record, "files": checksums}, default=dict).encode()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".model-") as temporary:
            place = Path(temporary) / "model"
            for name, each in content.items():
                write_atomically(place / name, each)
            os.rename(place, folder)  # which refuses a folder that is not empty
    except OSError as error:
        raise InputError(f"{str(folder)!r} cannot be written: {error.strerror or error}.", "out") from error
    return folder


def find_model(path: Path) -> Path:
    """The file of the model that ``path`` means."""
    if os.path.isfile(path):  # which is false, and no error, for a name that is too long
        if path.suffix.lower() == ".safetensors" or path.name == FILE:
            return path
        raise InputError(f"{str(path)!r} is not the file of a model; use a run folder, or {WEIGHTS}.")
    if not os.path.isdir(path):
        raise InputError(f"there is no folder {shown(str(path))}.")
    for name in MODELS:
        if (path / name).is_file():
            return path / name
    why = "comparisons and sweeps keep no weights; train a model with `shoal compare … --fit FOLDER`"
    if several := sorted(file for name in MODELS for file in path.glob(f"*/{name}")):
        why = f"use one of the runs in it, such as {str(several[0].parent)!r}"
    elif not (path / "runs").is_dir():
        why = "it diverged" if (path / RECORD).is_file() else "there is no finished run in it"
    raise InputError(f"{str(path)!r} contains no trained model: {why}.")


def _build(folder: Path, about: About) -> nn.Module:
    """The network that ``inputs.json`` describes, with random weights: none are downloaded."""
    name = str(about.model.get("name", ""))
    if not name:
        own = about.model.get("class", f"there is no {ABOUT}")
        instead = "use shoal.load(FOLDER, model=MODULE)"
        raise InputError(f"the model in {str(folder)!r} is your own network ({own}); {instead}.")
    with offline():
        if (folder / ENCODER).is_file():
            prefix = name[: name.find(":") + 1] if name.startswith("clip:") else ""
            name = f"{prefix}{(folder / ENCODER).parent.resolve()}"
        elif language.known(name):  # a path, or a name on the Hub
            raise InputError(f"the encoder {shown(name)} is not in {str(folder)!r}.")
        options = {k: v for k, v in (about.model.get("options") or {}).items() if k != "pretrained"}
        if "pretrained" in options_of(name):
            options["pretrained"] = False
        return build(name, input_shape=about.input_shape, classes=about.classes, seed=0, **options)
