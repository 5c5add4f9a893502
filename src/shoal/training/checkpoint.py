"""Checkpoints: one safetensors file each. Nothing is pickled, and a damaged file is noticed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import struct
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from shoal.errors import InputError
from shoal.files import check_regular, open_regular, read_bytes, write_atomically

Tree = Any
"""Any nest of dicts, lists and tuples with tensors, numbers, strings, bools and None at its ends."""

KEY = "shoal"  # the only entry of the metadata: safetensors writes several in no particular order
LARGEST_HEADER = 100_000_000  # safetensors reads no larger one
LARGEST_TEXT = 90_000_000  # leaves room in it for the names of the tensors

# The types that every safetensors knows; a tensor of another type is saved as its bytes.
_PLAIN = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}
_UNREADABLE = (
    SafetensorError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RuntimeError,  # RecursionError too
    OverflowError,
)
_NAME = re.compile(r"(step|best)-(\d{10,})-([0-9a-f]{16})\.safetensors")


def pack(tree: Tree) -> bytes:
    """The content of a safetensors file from which :func:`unpack` makes the same tree again.

    Each tensor is saved under its path (``optimizer/state/0/exp_avg``), whole and by itself, also where two
    share memory. Everything else is JSON in the file's metadata. Any mapping comes back as a dict, a
    parameter as a tensor and a NumPy number as Python's. The same tree gives the same bytes.
    """
    return _pack(tree, {})


def unpack(content: bytes) -> Tree:
    """What :func:`pack` was given, with all tensors on the CPU."""
    return _unpack(content)[0]


def _pack(tree: Tree, about: dict[str, Any]) -> bytes:
    tensors: dict[str, Tensor] = {}
    try:
        text = json.dumps({"about": about, "tree": _encode(tree, "", tensors)}, allow_nan=False)
    except RecursionError:
        raise InputError("a checkpoint's state must not contain itself or be nested hundreds deep.") from None
    if len(json.dumps(text)) > LARGEST_TEXT:
        raise InputError(
            f"what a checkpoint holds beside tensors takes {len(text):,} bytes, more than a safetensors file "
            "has room for; put long lists of numbers into tensors."
        )
    memory = set()
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        if place in memory:
            tensors[name] = tensor.clone()
        memory.add(place)
    return safetensors.torch.save(tensors, {KEY: text})


def _unpack(content: bytes) -> tuple[Tree, dict[str, Any]]:
    try:
        tensors = safetensors.torch.load(content)
        parts = json.loads(_metadata(BytesIO(content))[KEY])
        return _decode(parts["tree"], tensors), dict(parts["about"])
    except _UNREADABLE as error:
        raise InputError(f"not a checkpoint of Shoal ({type(error).__name__}: {error}).") from error


def _metadata(file: BinaryIO) -> dict[str, str]:
    size = int.from_bytes(file.read(8), "little")
    if size > LARGEST_HEADER:
        raise ValueError("not a safetensors file")
    return dict(json.loads(file.read(size)).get("__metadata__", {}))


def _encode(value: Tree, path: str, tensors: dict[str, Tensor]) -> Any:
    """As JSON, in which an object never is the user's dict: its only key says what it stands for."""
    if isinstance(value, Tensor):
        return _encode_tensor(value, path, tensors)
    if isinstance(value, np.generic):
        value = value.item()
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if abs(value) < 2**63 else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if kind is str:
        if value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value):
            return value
        return {"str": value.encode("utf-8", "surrogatepass").hex()}  # JSON joins a pair of surrogates
    below = f"{path}/" if path else ""
    if kind is list or kind is tuple:
        parts = [_encode(part, f"{below}{n}", tensors) for n, part in enumerate(value)]
        return parts if kind is list else {"tuple": parts}
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int):
                raise InputError(
                    f"{path or 'the state'}: the key {key!r} is a {type(key).__name__}; in a checkpoint keys "
                    "must be strings or whole numbers."
                )
        return {"dict": [[_encode(k, "", {}), _encode(v, f"{below}{k}", tensors)] for k, v in value.items()]}
    hint = " (make an array a tensor with torch.from_numpy)" if kind is np.ndarray else ""
    raise _unsavable(path, kind.__name__, hint)


def _encode_tensor(value: Tensor, path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    tensor = value.detach()
    dense = tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)
    if type(tensor) is not Tensor or not dense:
        raise _unsavable(path, type(value).__name__, " (a tensor must be torch's own, dense, and have data)")
    tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    name = path.encode("utf-8", "replace").decode()
    while name in ("", "__metadata__") or name in tensors:
        name += "_"
    if tensor.dtype in _PLAIN:
        tensors[name] = tensor
        return {"tensor": name}
    tensor = tensor.clone(memory_format=torch.contiguous_format)  # a single element may still be strided
    tensors[name] = tensor.reshape(-1).view(torch.uint8)
    return {"bytes": [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]}


def _unsavable(path: str, what: str, hint: str) -> InputError:
    return InputError(
        f"{path or 'the state'}: a {what} cannot be saved in a checkpoint; what can be are dicts, lists and "
        f"tuples of tensors, numbers, strings, bools and None{hint}."
    )


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Tree:
    if isinstance(value, list):
        return [_decode(part, tensors) for part in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "dict":
        return {_decode(k, tensors): _decode(v, tensors) for k, v in inner}
    if kind == "tuple":
        return tuple(_decode(part, tensors) for part in inner)
    if kind == "tensor":
        return tensors[inner]
    if kind == "bytes":
        name, dtype, shape = inner
        return tensors[name].view(getattr(torch, dtype)).reshape(shape)
    if kind == "int":
        return int(inner, 16)
    if kind == "float":
        return struct.unpack(">d", bytes.fromhex(inner))[0]
    if kind == "str":
        return bytes.fromhex(inner).decode("utf-8", "surrogatepass")
    raise ValueError(f"{kind!r} is unknown to this version")


@dataclass
class Loaded:
    """A checkpoint as it was saved."""

    step: int
    state: dict[str, Any]
    best: dict[str, Any] | None
    """The best weights so far."""
    path: Path
    best_step: int | None = None


class Checkpoints:
    """The newest ``keep`` checkpoints of a run, in a folder of their own.

    A file's name ends in a checksum of its content. It appears under that name only when it is complete, and
    older ones go only after that, so a kill or a full disk at any moment leaves one to go on from. The best
    weights lie in a file of their own, written once and not with every checkpoint. One process at a time may
    save.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise InputError(f"keep={keep!r}; the number of checkpoints to keep must be at least 1.")
        self.folder, self.keep = Path(folder), keep
        self._best: tuple[int, str] | None = None

    def save(
        self, step: int, state: Mapping[str, Any], best: tuple[int, Mapping[str, Any]] | None = None
    ) -> Path:
        """``best`` is the step of the best weights and the weights; the step tells whether they are new."""
        about: dict[str, Any] = {"step": int(step), "best": None}
        try:
            if best is not None:
                about["best"] = [int(best[0]), self._save_best(int(best[0]), best[1])]
            content = _pack(dict(state), about)
            path = self.folder / _name("step", int(step), content)
            write_atomically(path, content)
        except OSError:
            self.clear()  # on a full disk, every attempt would leave its best weights
            raise
        self._keep_newest(path)
        return path

    def _save_best(self, step: int, weights: Mapping[str, Any]) -> str:
        if self._best is None or self._best[0] != step or not (self.folder / self._best[1]).is_file():
            content = pack(dict(weights))
            path = self.folder / _name("best", step, content)
            if not path.is_file() or read_bytes(path, None) != content:
                write_atomically(path, content)
            self._best = step, path.name
        return self._best[1]

    def clear(self) -> None:
        """Deletes best weights that no checkpoint refers to: those of one that could not be written."""
        self._delete([], self._files())

    def _keep_newest(self, saved: Path) -> None:
        """Deletes what is no longer needed now that ``saved`` is there.

        Files of later steps stay, uncounted. They are there if they could not be read and the run went back;
        it replaces them when it gets to them.
        """
        at = _step(saved)
        files = self._files()
        later = [path for path in files if _step(path) > at]
        earlier = [path for path in files if _step(path) < at]
        kept = {saved, *later, *earlier[: self.keep - 1]}
        self._delete([path for path in files if path not in kept], kept)

    def _delete(self, unneeded: list[Path], kept: Iterable[Path]) -> None:
        try:
            needed = {_best_of(path) for path in kept}
            unneeded += [path for path in self._named("best") if path.name not in needed]
        except OSError:  # one that cannot be read just now may need any
            pass
        unneeded += [*self.folder.glob(".step-*"), *self.folder.glob(".best-*")]
        for path in unneeded:
            with contextlib.suppress(OSError):
                path.unlink()

    def load(self) -> Loaded | None:
        """The newest checkpoint that is whole, with a warning for every newer one; None if there are none."""
        damaged: list[str] = []
        for path in self._files():
            try:
                loaded = self._read(path)
            except (OSError, *_UNREADABLE) as error:
                damaged.append(f"{path} is damaged: {error}".rstrip("."))
                continue
            for problem in damaged:
                warnings.warn(f"{problem}; {path.name} is used instead.", stacklevel=2)
            return loaded
        if damaged:
            checkpoints = f"{len(damaged)} checkpoint{'s' * (len(damaged) > 1)}"
            raise InputError(
                f"none of the {checkpoints} in {self.folder} can be read. {damaged[0]}.\n"
                "Restore one from a copy, or remove the folder to start from the beginning."
            )
        return None

    def latest(self) -> int | None:
        """The step of the newest checkpoint, going by the names alone."""
        return max((_step(path) for path in self._named("step")), default=None)

    def _read(self, path: Path) -> Loaded:
        state, about = _unpack(_content(path))
        step, best = about.get("step"), about.get("best")
        if not isinstance(state, dict) or step != _step(path):
            raise InputError(f"it holds step {step}, which is not what its name says.")
        if best is None:
            return Loaded(_step(path), state, None, path)
        best_step, name = best
        if not _NAME.fullmatch(name):
            raise InputError(f"it names {name!r} as its best weights, which is no such file.")
        try:
            weights = unpack(_content(self.folder / name))
        except FileNotFoundError:
            raise InputError(f"its best weights, {name}, are missing.") from None
        except InputError as error:
            raise InputError(f"its best weights, {name}: {error}") from error
        self._best = best_step, name
        return Loaded(_step(path), state, weights, path, best_step)

    def _files(self) -> list[Path]:
        """Newest first, and for the same step, the one written last first."""
        return sorted(self._named("step"), key=lambda path: (_step(path), _time(path)), reverse=True)

    def _named(self, kind: str) -> list[Path]:
        return [path for path in self.folder.glob(f"{kind}-*.safetensors") if _NAME.fullmatch(path.name)]


def _name(kind: str, step: int, content: bytes) -> str:
    if step < 0:
        raise InputError(f"step={step}; a checkpoint's step must be 0 or more.")
    return f"{kind}-{step:010d}-{_checksum(content)}.safetensors"


def _step(path: Path) -> int:
    return int(path.name.split("-")[1])


def _time(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _content(path: Path) -> bytes:
    content = read_bytes(path, None)
    if _checksum(content) != path.stem.rsplit("-", 1)[1]:
        raise InputError("its content has changed since it was written (the checksum differs).")
    return content


def _best_of(path: Path) -> str | None:
    """The name of the file of best weights that a checkpoint refers to."""
    try:
        with open_regular(path) as file:
            best = json.loads(_metadata(file)[KEY])["about"]["best"]
        return None if best is None else str(best[1])
    except _UNREADABLE:
        return None


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """A model's weights by name, on the CPU: from ``.safetensors``, or from what ``torch.save`` wrote.

    No code from the file is run. Beside a plain dict of tensors, one under ``"state_dict"`` or ``"model"``
    is found, as in a checkpoint.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise InputError(f"weights: {path} is a folder; give the file in it.")
        if path.stat().st_size == 0:
            raise InputError(f"weights: {path} is empty.")
        check_regular(path)
        tree = _from_safetensors(path) if path.suffix.lower() == ".safetensors" else _from_torch(path)
    except FileNotFoundError:
        raise InputError(f"weights: there is no file {path}.") from None
    except OSError as error:
        raise InputError(f"weights: {path} cannot be read ({error.strerror or error}).") from error
    return _weights_in(tree, path)


def _from_safetensors(path: Path) -> Tree:
    content = path.read_bytes()
    try:
        if KEY in _metadata(BytesIO(content)):
            return unpack(content)
        return safetensors.torch.load(content)
    except _UNREADABLE as error:
        raise InputError(f"weights: {path} is not a safetensors file, or a damaged one.") from error


def _from_torch(path: Path) -> Tree:
    advice = (
        "Shoal reads weights only and runs no code from a file; save them with safetensors.torch.save_file."
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch.load raises many kinds on bytes that it does not understand
        if code := re.search(r"\bGLOBAL ([\w.]+)", str(error)):
            raise InputError(
                f"weights: {path} is refused, as it holds more than weights ({code[1]}). {advice}"
            ) from error
        raise InputError(f"weights: {path} is not a file of weights, or a damaged one. {advice}") from error


def _weights_in(tree: Tree, path: Path) -> dict[str, Tensor]:
    while isinstance(tree, Mapping):
        nest = next((n for n in ("state_dict", "model") if isinstance(tree.get(n), Mapping)), None)
        if nest is None:
            break
        tree = tree[nest]
    if not isinstance(tree, Mapping) or not tree:
        what = "nothing" if isinstance(tree, Mapping) else f"a {type(tree).__name__}"
        raise InputError(f"weights: {path} holds {what}; it must hold a dict of names and tensors.")
    for name, value in tree.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise InputError(
                f"weights: {path} holds a {type(value).__name__} under {name!r}; it must hold a dict of "
                "names and tensors, or have one under 'state_dict' or 'model'."
            )
    return {name: value.detach() for name, value in tree.items()}
