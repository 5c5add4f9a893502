"""Checkpoints and files of weights, read without running code."""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_map_with_path

from shoal.errors import InputError, shown
from shoal.files import replacing

NEWEST = 2
"""How many checkpoints are kept."""


def save_checkpoint(folder: Path, step: int, state: Mapping[str, Any]) -> Path:
    """Save nested dicts, lists and tuples of tensors, numbers, strings, booleans and None as ``step-N.pt``.

    The file appears under its name only when it is complete, and older ones go only after that, so a kill or
    a full disk at any moment leaves one to resume from. One process at a time may save.
    """
    path = folder / f"step-{step:010d}.pt"
    with replacing(path) as file:
        torch.save({"step": step, "state": tree_map_with_path(_plain, state)}, file)
    older = [old for old in _checkpoints(folder) if old.name < path.name][NEWEST - 1 :]
    for old in (*older, *folder.glob(".step-*")):  # and what a killed process has left half written
        old.unlink(missing_ok=True)
    return path


def load_checkpoint(folder: Path) -> tuple[int, dict[str, Any]] | None:
    """The step and the state of the newest checkpoint that can be read; None if there are none."""
    damaged = []
    for path in _checkpoints(folder):
        try:
            with zipfile.ZipFile(path) as file:
                if (part := file.testzip()) is not None:  # the checksum of each part
                    raise ValueError(f"the content of {part} has changed")
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
            step, state = int(checkpoint["step"]), dict(checkpoint["state"])
        except Exception as error:  # torch.load raises many kinds on bytes that it does not understand
            damaged.append(f"{path} is damaged: {error}".splitlines()[0])
            continue
        for problem in damaged:
            warnings.warn(f"{problem}; {path.name} is used instead.", stacklevel=2)
        return step, state
    if damaged:
        raise InputError(
            f"none of the {len(damaged)} checkpoint(s) in {folder} can be read. {damaged[0]}.\n"
            "Restore one from a copy, or remove the folder to start from the beginning."
        )
    return None


def _checkpoints(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted(folder.glob("step-" + "[0-9]" * 10 + ".pt"), reverse=True)


def _plain(path: Any, value: Any) -> Any:
    """A part of a state as ``weights_only`` reads it, with tensors on the CPU and each for itself."""
    if isinstance(value, Tensor) and value.layout == torch.strided:
        return torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())
    plain = value.item() if isinstance(value, np.generic) else value
    if plain is None or type(plain) in (bool, int, float, str):
        return plain
    raise InputError(
        f"state{keystr(path)}: a {type(value).__name__} cannot be saved in a checkpoint; what can be are "
        "dicts, lists and tuples of dense tensors, numbers, strings, booleans and None."
    )


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """A model's weights by name, on the CPU: from ``.safetensors``, or from what ``torch.save`` wrote.

    No code from the file is run. Besides a plain dict of tensors, one under ``"state_dict"``, ``"model"`` or
    ``"state"`` is found, as in a checkpoint.
    """
    path = Path(path)
    try:
        if path.suffix.lower() == ".safetensors":
            tree: Any = safetensors.torch.load(path.read_bytes())
        else:
            with warnings.catch_warnings(action="ignore"):
                tree = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise InputError(f"weights: {path} cannot be read ({error.strerror or error}).") from error
    except Exception as error:  # many kinds
        code = re.search(r"\bGLOBAL ([\w.]+)", str(error))
        what = f"contains more than weights ({code[1]})" if code else "is not a valid file of weights"
        raise InputError(
            f"weights: {path} {what}. Shoal reads weights only and runs no code from a file; save them with "
            "safetensors.torch.save_file."
        ) from error
    for name in ("state_dict", "model", "state") * 2:  # also nested in each other
        if isinstance(tree, Mapping) and isinstance(tree.get(name), Mapping):
            tree = tree[name]
    if not isinstance(tree, Mapping) or not tree or not all(isinstance(v, Tensor) for v in tree.values()):
        raise InputError(
            f"weights: {path} holds {shown(tree)}; it must hold a dict of names and tensors, or have one "
            "under 'state_dict' or 'model'."
        )
    return {str(name): value.detach() for name, value in tree.items()}
