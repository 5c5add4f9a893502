"""How a model is called with the input of a batch, and what of its output counts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from shoal.models.features import unwrapped
from shoal.models.lora import base_model


def arguments(model: nn.Module, x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that a batch's input is passed as: ``x`` itself, or several where the model takes more.

    A mapping is passed by name where ``model.forward`` has more than one parameter and all keys are names of
    its parameters, as with a tokenizer's output and a model of transformers. A tuple or list is spread over
    the parameters where ``forward`` needs more than one.
    """
    if isinstance(x, Tensor):
        return (x,), {}
    names, needed = _parameters(type(base_model(unwrapped(model))).forward)
    if isinstance(x, Mapping) and x and len(names) > 1 and names.issuperset(x):
        return (), dict(x)
    if isinstance(x, (tuple, list)) and needed > 1:
        return tuple(x), {}
    return (x,), {}


def call(model: nn.Module, x: Any) -> Any:
    """The model's output; its ``logits`` where it has such an attribute, as outputs of transformers do."""
    args, kwargs = arguments(model, x)
    output = model(*args, **kwargs)
    logits = None if isinstance(output, Tensor) else getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else output


@lru_cache(maxsize=256)
def _parameters(forward: Any) -> tuple[frozenset[str], int]:
    """The names of what a function takes by name, and how many it needs."""
    try:
        every = list(inspect.signature(forward).parameters.values())[1:]  # without self
    except (TypeError, ValueError):
        return frozenset(), 1
    named = [p for p in every if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    placed = [p for p in every if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
    needed = [p for p in placed if p.default is p.empty]
    return frozenset(p.name for p in named), len(needed)
