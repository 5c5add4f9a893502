"""Checkpoints: one file of ``torch.save`` each, read without running code, and checked for damage."""

from __future__ import annotations

import contextlib
import hashlib
import re
import warnings
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from shoal.errors import InputError
from shoal.files import write_atomically

KEPT = 2
"""Checkpoints that a run keeps."""
NAME = re.compile(r"step-(\d{10,})-([0-9a-f]{16})\.pt")


class Checkpoints:
    """The newest :data:`KEPT` checkpoints of a training, in a folder of their own.

    A file's name has the step and a checksum of the content. It appears under that name only when it is
    complete, and older ones go only after that, so a kill or a full disk at any moment leaves one to resume
    from. One process at a time may save.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Saves nested dicts, lists and tuples of tensors, numbers, strings, booleans and None."""
        file = BytesIO()
        torch.save(_plain({"step": step, "state": state}, ""), file)
        content = file.getvalue()
        path = self.folder / f"step-{step:010d}-{_checksum(content)}.pt"
        write_atomically(path, content)
        # Files of later steps, which could not be read, are left alone.
        for old in [p for p in self._files() if _step(p) <= step and p != path][KEPT - 1 :]:
            with contextlib.suppress(OSError):
                old.unlink()
        return path

    def load(self) -> tuple[int, dict[str, Any]] | None:
        """The step and the state of the newest checkpoint that is not damaged; None if there are none."""
        damaged: list[str] = []
        for path in self._files():
            try:
                content = path.read_bytes()
                if _checksum(content) not in path.name:
                    raise InputError("its content has changed since it was written (the checksum differs)")
                found = torch.load(BytesIO(content), map_location="cpu", weights_only=True)
                state: dict[str, Any] = found["state"]
            except Exception as error:  # torch.load raises many kinds on bytes that it does not understand
                damaged.append(f"{path} is damaged: {error}".splitlines()[0])
                continue
            for problem in damaged:
                warnings.warn(f"{problem}; {path.name} is used instead.", stacklevel=2)
            return _step(path), state
        if damaged:
            raise InputError(
                f"none of the {len(damaged)} checkpoint(s) in {self.folder} can be read. {damaged[0]}.\n"
                "Restore one from a copy, or remove the folder to start from the beginning."
            )
        return None

    def latest(self) -> int | None:
        """The step of the newest checkpoint, going by the names alone."""
        return max(map(_step, self._files()), default=None)

    def _files(self) -> list[Path]:
        """Newest first, and for the same step, the one written last first."""
        found = [path for path in self.folder.glob("step-*.pt") if NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: (_step(path), path.stat().st_mtime_ns), reverse=True)


def _step(path: Path) -> int:
    return int(path.name.split("-")[1])


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _plain(value: Any, where: str) -> Any:
    """``value`` as ``weights_only`` reads it, with tensors on the CPU and each for itself."""
    if isinstance(value, Mapping):
        return {key: _plain(part, f"{where}/{key}") for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(part, f"{where}/{n}") for n, part in enumerate(value))
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta:
        return torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())
    plain = value.item() if isinstance(value, np.generic) else value
    if plain is None or type(plain) in (bool, int, float, str):
        return plain
    raise InputError(
        f"{where[1:] or 'the state'}: a {type(value).__name__} cannot be saved in a checkpoint; what can be "
        "are dicts, lists and tuples of dense tensors, numbers, strings, booleans and None."
    )


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """A model's weights by name, on the CPU: from ``.safetensors``, or from what ``torch.save`` wrote.

    No code from the file is run. Beside a plain dict of tensors, one under ``"state_dict"``, ``"model"`` or
    ``"state"`` is found, as in a checkpoint.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise InputError(f"weights: {path} is a folder; specify the file in it.")
        content = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"weights: there is no file {path}.") from None
    except OSError as error:
        raise InputError(f"weights: {path} cannot be read ({error.strerror or error}).") from error
    tree = (
        _from_safetensors(path, content)
        if path.suffix.lower() == ".safetensors"
        else _from_torch(path, content)
    )
    nests = ("state_dict", "model", "state")
    while isinstance(tree, Mapping) and (
        name := next((n for n in nests if isinstance(tree.get(n), Mapping)), "")
    ):
        tree = tree[name]
    what = "" if isinstance(tree, Mapping) else f"a {type(tree).__name__}"
    for name, value in tree.items() if isinstance(tree, Mapping) else ():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            what = f"a {type(value).__name__} under {name!r}"
    if what or len(tree) == 0:
        raise InputError(
            f"weights: {path} holds {what or 'nothing'}; it must hold a dict of names and tensors, or have "
            "one under 'state_dict' or 'model'."
        )
    return {name: value.detach() for name, value in tree.items()}


def _from_safetensors(path: Path, content: bytes) -> Any:
    try:
        return safetensors.torch.load(content)
    except (SafetensorError, ValueError, RuntimeError, LookupError) as error:
        raise InputError(f"weights: {path} is not a valid safetensors file.") from error


def _from_torch(path: Path, content: bytes) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many kinds on bytes that it does not understand
        code = re.search(r"\bGLOBAL ([\w.]+)", str(error))
        why = (
            f"was rejected, because it contains more than weights ({code[1]})"
            if code
            else "is not a valid weights file"
        )
        raise InputError(
            f"weights: {path} {why}. Shoal reads weights only and runs no code from a file; save them with "
            "safetensors.torch.save_file."
        ) from error
