"""The features of a frozen backbone, computed once for every example and kept."""

from __future__ import annotations

import hashlib
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from shoal.data.batch import DomainData, TensorData
from shoal.data.download import cache_folder
from shoal.data.images import ImageFiles
from shoal.data.loader import InOrder, MetaBatchLoader
from shoal.errors import InputError
from shoal.files import write_atomically
from shoal.models.feature_model import FeatureModel
from shoal.training.progress import Progress

BATCH, WORKERS = 64, 8
_last: dict[str, TensorData] = {}


def features_of(data: DomainData, model: FeatureModel, device: torch.device, shown: bool) -> TensorData:
    """What ``model.features``, which has no randomness, makes of every example: without augmentation.

    The features stay in memory, and in a file of Shoal's cache that is named by what they follow from: the
    image files (names, sizes and dates), their preprocessing, and the backbone with its weights.
    """
    examples = data.examples.evaluation()
    key = _key(examples, model)
    if key not in _last:
        _last.clear()
        path = cache_folder() / "features" / f"{key}.safetensors"
        found = _read(path, len(examples))
        if found is None:
            found = _computed(examples, model, device, shown)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, safetensors.torch.save({"x": found.x, "y": found.y}))
            except OSError as error:
                warnings.warn(
                    f"the features could not be saved in {str(path)!r}: {error.strerror}.", stacklevel=2
                )
        _last[key] = found
    return _last[key].to(device)


def _read(path: Path, count: int) -> TensorData | None:
    try:
        content = safetensors.torch.load(path.read_bytes())
        return TensorData(content["x"], content["y"]) if len(content["x"]) == count else None
    except (OSError, ValueError, KeyError, InputError, safetensors.SafetensorError):
        return None  # not there, or damaged: computed anew


def _computed(examples: Any, model: FeatureModel, device: torch.device, shown: bool) -> TensorData:
    features = model.features.to(device)
    progress = Progress("features", len(examples), shown)
    found: list[Tensor] = []
    labels: list[Tensor] = []
    order = InOrder({"all": np.arange(len(examples))}, BATCH)
    workers = min(WORKERS, (os.cpu_count() or 1) - 1)
    loader = MetaBatchLoader(examples, order, workers=workers, device=device, stop=len(order.batches))
    with torch.inference_mode():
        for batch in loader:
            found.append(features(batch.x).float().cpu())
            labels.append(batch.y.cpu())
            progress.update(sum(map(len, labels)))
    loader.close()
    progress.close()
    return TensorData(torch.cat(found).clone(), torch.cat(labels).clone())


def _key(examples: Any, model: FeatureModel) -> str:
    """A digest of all that the features follow from."""
    digest = hashlib.sha256(repr((2, torch.__version__, model.recipe)).encode())
    for name, value in model.features.state_dict().items():
        digest.update(name.encode())
        digest.update(value.cpu().contiguous().numpy().tobytes())
    parts: list[Any] = []
    if isinstance(examples, ImageFiles):
        digest.update(examples.digest().encode())
    elif isinstance(examples, TensorData):
        parts = [examples.x.cpu().numpy(), examples.y.cpu().numpy()]
    else:
        raise InputError("requires a folder or a dataset of images.", "freeze_backbone")
    for part in parts:
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()
