"""The features of a frozen backbone, computed once for every example and kept in a file."""

from __future__ import annotations

import hashlib
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from shoal.data.batch import DomainData, TensorData
from shoal.data.download import cache_folder
from shoal.data.images import ImageFiles
from shoal.data.loader import InOrder, MetaBatchLoader
from shoal.errors import InputError
from shoal.files import write_atomically
from shoal.models.feature_model import FeatureModel
from shoal.training.progress import Progress

BATCH, WORKERS = 64, 8


def features_of(data: DomainData, model: FeatureModel, device: torch.device, shown: bool) -> TensorData:
    """What ``model.features``, which has no randomness, makes of every example: without augmentation.

    The file in Shoal's cache is named by what the features follow from: the image files (names, sizes and
    dates), their preprocessing, and the backbone with its weights.
    """
    examples = data.examples.evaluation()
    path = cache_folder() / "features" / f"{_key(examples, model)}.safetensors"
    if (found := _read(path, len(examples))) is None:
        found = _computed(examples, model, device, shown)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, safetensors.torch.save({"x": found.x, "y": found.y}))
        except OSError as error:
            warnings.warn(f"the features could not be saved ({path}: {error.strerror}).", stacklevel=2)
    return found.to(device)


def _read(path: Path, count: int) -> TensorData | None:
    """``None`` where the file is not there, or damaged."""
    try:
        content = safetensors.torch.load(path.read_bytes())
        return TensorData(content["x"], content["y"]) if len(content["x"]) == count else None
    except (OSError, ValueError, KeyError, InputError, safetensors.SafetensorError):
        return None


def _computed(examples: Any, model: FeatureModel, device: torch.device, shown: bool) -> TensorData:
    features, progress = model.features.to(device), Progress("features", len(examples), shown)
    found, labels = list[torch.Tensor](), list[torch.Tensor]()
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
    weights = {name: value.cpu().contiguous() for name, value in model.features.state_dict().items()}
    digest.update(safetensors.torch.save(weights))
    if isinstance(examples, ImageFiles):
        digest.update(examples.digest().encode())
    elif isinstance(examples, TensorData):
        digest.update(safetensors.torch.save({"x": examples.x.cpu().contiguous(), "y": examples.y.cpu()}))
    else:
        raise InputError("requires a folder or a dataset of images.", "freeze_backbone")
    return digest.hexdigest()
