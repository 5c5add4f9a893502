"""How a model is called with the input of a batch, and what of its output counts."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def arguments(model: nn.Module, x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that a batch's input is passed as: ``x`` itself, or several where the model takes more.

    A mapping is passed by name where ``model.forward`` has more than one parameter and all keys are names of
    its parameters, as with a tokenizer's output and a model of transformers. A tuple or list is spread over
    the parameters where ``forward`` needs more than one.
    """
    if isinstance(x, Tensor):
        return (x,), {}
    inner, peft = unwrapped(model), sys.modules.get("peft")
    if peft is not None and isinstance(inner, peft.PeftModel):  # which passes on whatever it is given
        inner = inner.get_base_model()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = [p for p in inspect.signature(inner.forward).parameters.values() if p.kind not in variadic]
    needed = [p for p in parameters if p.kind is not p.KEYWORD_ONLY and p.default is p.empty]
    if isinstance(x, Mapping) and x and len(parameters) > 1 and {p.name for p in parameters}.issuperset(x):
        return (), dict(x)
    if isinstance(x, (tuple, list)) and len(needed) > 1:
        return tuple(x), {}
    return (x,), {}


def call(model: nn.Module, x: Any) -> Any:
    """The model's output; its ``logits`` where it has them, as outputs of transformers do."""
    args, kwargs = arguments(model, x)
    return logits_of(model(*args, **kwargs))


def logits_of(output: Any) -> Any:
    """The ``logits`` of an output where it has such an attribute, otherwise the output itself."""
    logits = None if isinstance(output, Tensor) else getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else output


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of DistributedDataParallel and torch.compile."""
    inner = model.module if isinstance(model, PARALLEL) else getattr(model, "_orig_mod", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else model
