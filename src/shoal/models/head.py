"""The head of any model: the layer that is new where the rest is pretrained."""

from __future__ import annotations

from typing import Any

from torch import nn

from shoal.errors import InputError
from shoal.models.calling import arguments
from shoal.models.feature_model import FeatureModel
from shoal.models.features import FeatureExtractor


def find_head(model: nn.Module, x: Any) -> nn.Module:
    """The head of ``model``: that of a :class:`FeatureModel`, else its last linear layer.

    The layer is found by a trial pass on ``x``, a batch of inputs, which does not change the model.

    Raises:
        InputError: the model has no linear layer at its end.
    """
    if isinstance(model, FeatureModel):
        return model.head
    hint = "Wrap it as shoal.models.FeatureModel(features, head)."
    try:
        extractor = FeatureExtractor(model)
        extractor.close()
        args, kwargs = arguments(model, x)
        extractor.find(*args, **kwargs)
    except InputError as error:
        raise InputError(
            f"{type(model).__name__} has no head that can be identified: {error} {hint}"
        ) from error
    if extractor.linear is None or not extractor.is_output:
        raise InputError(
            f"{type(model).__name__} has no head: its last linear layer does not return its output. {hint}"
        )
    return extractor.linear
