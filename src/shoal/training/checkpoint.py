"""Checkpoints: one file of ``torch.save`` each. Reading runs no code, and a damaged file is noticed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from shoal.errors import InputError
from shoal.files import check_regular, read_bytes, write_atomically

Tree = Any
"""Any nest of dicts, lists and tuples with tensors, numbers, strings, bools and None at its ends."""

ABOUT = "archive/about.json"
NO_BEST = "0" * 16
_NAME = re.compile(r"(step-\d{10,}-[0-9a-f]{16}|best-\d{10,})-[0-9a-f]{16}\.pt")


def pack(tree: Tree, about: Mapping[str, Any] | None = None) -> bytes:
    """The content of a file from which :func:`unpack` makes the same tree again, with tensors on the CPU.

    Each tensor is saved whole and by itself, also where two share memory. A mapping becomes a dict, a
    parameter a tensor and a NumPy number Python's.
    """
    try:
        tree = _plain(tree, "")
    except RecursionError:
        raise InputError("a checkpoint's state must not contain itself or be nested hundreds deep.") from None
    file = BytesIO()
    torch.save(tree, file)
    if about:
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr(zipfile.ZipInfo(ABOUT), json.dumps(about))
    return file.getvalue()


def unpack(content: bytes) -> Tree:
    """What :func:`pack` was given."""
    try:
        return torch.load(BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many kinds on bytes that it does not understand
        first = (str(error).splitlines() or [""])[0]
        raise InputError(f"not a checkpoint of Shoal ({type(error).__name__}: {first}).") from error


def _plain(value: Any, path: str) -> Any:
    """``value`` as ``weights_only`` reads it. Not by torch's pytree, to which a Counter is a leaf."""
    if isinstance(value, Mapping):
        return {key: _plain(part, f"{path}/{key}") for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(part, f"{path}/{n}") for n, part in enumerate(value))
    if isinstance(value, Tensor):
        dense = value.layout == torch.strided and not (value.is_quantized or value.is_nested or value.is_meta)
        if dense and type(value.detach()) is Tensor:
            value = value.detach().resolve_conj().resolve_neg()
            return value.to("cpu", copy=True, memory_format=torch.contiguous_format)
    plain = value.item() if isinstance(value, np.generic) else value
    if plain is None or type(plain) in (bool, int, float, str):
        return plain
    hint = " (make an array a tensor with torch.from_numpy)" if isinstance(value, np.ndarray) else ""
    hint = " (a tensor must be torch's own, dense, and have data)" if isinstance(value, Tensor) else hint
    raise InputError(
        f"{path[1:] or 'the state'}: a {type(value).__name__} cannot be saved in a checkpoint; what can be "
        f"are dicts, lists and tuples of tensors, numbers, strings, bools and None{hint}."
    )


@dataclass
class Loaded:
    """A checkpoint as it was saved."""

    step: int
    state: dict[str, Any]
    best: dict[str, Any] | None
    """The best weights so far."""
    path: Path
    best_step: int | None = None


KEPT = 2
"""Checkpoints that a run keeps, besides its best weights."""


class Checkpoints:
    """The newest :data:`KEPT` checkpoints of a run, in a folder of their own.

    A file's name ends in a checksum of its content. It appears under that name only when it is complete, and
    older ones go only after that, so a kill or a full disk at any moment leaves one to resume from. The best
    weights lie in a file of their own, written once and not with every checkpoint, whose checksum the
    checkpoint's name has too. One process at a time may save.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._best: tuple[int, str] | None = None

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        best: tuple[int, Mapping[str, Any]] | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> Path:
        """``best`` is the step of the best weights and the weights; the step tells whether they are new.

        ``about`` is plain data that can be read without torch, as :data:`ABOUT` of a zip file.
        """
        try:
            needs = NO_BEST if best is None else self._save_best(int(best[0]), best[1])
            content = pack({"step": int(step), "best": best and int(best[0]), "state": dict(state)}, about)
            path = self.folder / f"step-{_number(step)}-{needs}-{_checksum(content)}.pt"
            write_atomically(path, content)
        except OSError:
            self.clear()  # on a full disk, every attempt would leave its best weights
            raise
        self._keep_newest(path)
        return path

    def _save_best(self, step: int, weights: Mapping[str, Any]) -> str:
        """The checksum of the file that holds them."""
        if self._best is not None and self._best[0] == step and self._best_file(self._best[1]):
            return self._best[1]
        content = pack(dict(weights))
        path = self.folder / f"best-{_number(step)}-{_checksum(content)}.pt"
        if not path.is_file() or read_bytes(path, None) != content:
            write_atomically(path, content)
        self._best = step, _checksum(content)
        return self._best[1]

    def clear(self) -> None:
        """Deletes best weights that no checkpoint refers to: those of one that could not be written."""
        self._delete([], self._files())

    def _keep_newest(self, saved: Path) -> None:
        """Deletes what is no longer needed; files of later steps, which could not be read, stay uncounted."""
        files = self._files()
        later = [path for path in files if _step(path) > _step(saved)]
        earlier = [path for path in files if _step(path) < _step(saved)]
        kept = {saved, *later, *earlier[: KEPT - 1]}
        self._delete([path for path in files if path not in kept], kept)

    def _delete(self, unneeded: list[Path], kept: Iterable[Path]) -> None:
        needed = {_needs(path) for path in kept}
        unneeded += [path for path in self._named("best") if _sum_in_name(path) not in needed]
        for path in [*unneeded, *self.folder.glob(".step-*"), *self.folder.glob(".best-*")]:
            with contextlib.suppress(OSError):
                path.unlink()

    def load(self) -> Loaded | None:
        """The newest checkpoint that is whole, with a warning for every newer one; None if there are none."""
        damaged: list[str] = []
        for path in self._files():
            try:
                loaded = self._read(path)
            except (OSError, InputError) as error:
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
        return max(map(_step, self._named("step")), default=None)

    def _read(self, path: Path) -> Loaded:
        found = unpack(_content(path))
        whole = isinstance(found, dict) and set(found) == {"step", "best", "state"}
        if not whole or not isinstance(found["state"], dict) or found["step"] != _step(path):
            raise InputError("its step is missing or differs from its name.")
        if (needs := _needs(path)) == NO_BEST:
            return Loaded(_step(path), found["state"], None, path)
        best = self._best_file(needs)
        if best is None:
            raise InputError(f"its best weights, best-{_number(found['best'] or 0)}-{needs}.pt, are missing.")
        try:
            weights = unpack(_content(best))
        except InputError as error:
            raise InputError(f"its best weights, {best.name}: {error}") from error
        self._best = _step(best), needs
        return Loaded(_step(path), found["state"], weights, path, _step(best))

    def _best_file(self, checksum: str) -> Path | None:
        return next((p for p in self._named("best") if _sum_in_name(p) == checksum and p.is_file()), None)

    def _files(self) -> list[Path]:
        """Newest first, and for the same step, the one written last first."""

        def written(path: Path) -> int:
            with contextlib.suppress(OSError):
                return path.stat().st_mtime_ns
            return 0

        return sorted(self._named("step"), key=lambda path: (_step(path), written(path)), reverse=True)

    def _named(self, kind: str) -> list[Path]:
        return [path for path in self.folder.glob(f"{kind}-*.pt") if _NAME.fullmatch(path.name)]


def _number(step: int) -> str:
    if step < 0:
        raise InputError(f"step={step}; a checkpoint's step must be 0 or more.")
    return f"{int(step):010d}"


def _step(path: Path) -> int:
    return int(path.name.split("-")[1])


def _needs(path: Path) -> str:
    """The checksum of the best weights that a checkpoint refers to."""
    return path.name.split("-")[2]


def _sum_in_name(path: Path) -> str:
    return path.stem.rsplit("-", 1)[1]


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _content(path: Path) -> bytes:
    content = read_bytes(path, None)
    if _checksum(content) != _sum_in_name(path):
        raise InputError("its content has changed since it was written (the checksum differs).")
    return content


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """A model's weights by name, on the CPU: from ``.safetensors``, or from what ``torch.save`` wrote.

    No code from the file is run. Beside a plain dict of tensors, one under ``"state_dict"``, ``"model"`` or
    ``"state"`` is found, as in a checkpoint.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise InputError(f"weights: {path} is a folder; specify the file in it.")
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
    try:
        return safetensors.torch.load(path.read_bytes())
    except (SafetensorError, ValueError, RuntimeError, LookupError) as error:
        raise InputError(f"weights: {path} is not a valid safetensors file.") from error


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
                f"weights: {path} was rejected, because it contains more than weights ({code[1]}). {advice}"
            ) from error
        raise InputError(f"weights: {path} is not a valid weights file. {advice}") from error


def _weights_in(tree: Tree, path: Path) -> dict[str, Tensor]:
    nests = ("state_dict", "model", "state")
    while isinstance(tree, Mapping) and any(isinstance(tree.get(name), Mapping) for name in nests):
        tree = next(tree[name] for name in nests if isinstance(tree.get(name), Mapping))
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
