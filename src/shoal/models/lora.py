"""LoRA: low-rank adapters in the linear layers of a model whose own weights stay as they are, by peft.

A layer W x + b becomes W x + b + (alpha / r) B A x. A (r × inputs) starts random and B (outputs × r) at zero,
so the model starts as the same function; A and B alone are trained.

Reference: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2022.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, cast

from torch import nn

from shoal.errors import InputError
from shoal.settings import Range
from shoal.vision import allow_torchvision

Rank = Annotated[int, Range(1, 10**4)]
Alpha = Annotated[float, Range(above=0)]
Dropout = Annotated[float, Range(0, below=1)]

ATTENTION = (
    *(("query", "value"), ("q_lin", "v_lin"), ("query_proj", "value_proj"), ("q_proj", "v_proj")),
    *(("qkv",), ("Wqkv",), ("in_proj",), ("q", "v")),
)
"""What models call the query and value projections of their attention, or one layer for all of them."""


def check(options: Mapping[str, Any]) -> None:
    """Refuses options of a model that contradict each other, and ``lora`` where peft is not installed."""
    if options.get("lora") is None:
        for name in ("lora_alpha", "lora_dropout", "lora_targets"):
            if options.get(name):
                raise InputError(f"{name}={options[name]!r} requires lora=, the rank of the adapters.")
    elif options.get("frozen"):
        raise InputError(
            "lora= trains adapters in the backbone, frozen= (freeze_backbone=) trains none; specify only one."
        )
    elif options.get("freeze_batchnorm") is False:
        raise InputError("freeze_batchnorm=False, but lora= trains adapters and the head only.")
    elif importlib.util.find_spec("peft") is None:
        raise InputError("LoRA requires peft: pip install 'shoal[peft]'.")


def inject(
    body: nn.Module,
    name: str,
    rank: int,
    alpha: float | None,
    dropout: float,
    targets: str | list[str] | None,
) -> None:
    """Puts adapters into ``body``, of the model called ``name``, and freezes all else in it.

    Args:
        body: network to adapt, in place.
        name: name of the model, for error messages.
        rank: r.
        alpha: the adapters' output is multiplied by alpha / r; ``None``: 2 r.
        dropout: dropout rate of an adapter's inputs in training.
        targets: names of linear layers, or the last parts of names; ``None``: :data:`ATTENTION`.
    """
    linear = [n for n, module in body.named_modules() if isinstance(module, nn.Linear)]
    last = {n.rpartition(".")[2] for n in linear}
    if targets is None:
        targets = list(next((names for names in ATTENTION if last.issuperset(names)), ()))
    wanted = [targets] if isinstance(targets, str) else targets
    matches = {t: [n for n in linear if n == t or n.endswith(f".{t}")] for t in wanted}
    if not matches or not all(matches.values()):
        missing = next((f"no linear layer {t!r}" for t, own in matches.items() if not own), "no usual ones")
        # The last parts of names that say something; a number needs the part before it.
        ends = (re.search(r"[^.]*[^.\d][^.]*(\.\d+)*$", n) for n in linear)
        known = ", ".join(dict.fromkeys(end[0] for end in ends if end))
        choose = f"choose from {known}" if known else "it has no linear layers, which LoRA requires"
        raise InputError(f"lora_targets: model {name!r} has {missing}; {choose}.")
    allow_torchvision()  # peft imports transformers
    peft: Any = importlib.import_module("peft")
    pattern = "|".join(re.escape(n) for names in matches.values() for n in names)
    alpha = 2 * rank if alpha is None else alpha
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=pattern)
    peft.inject_adapter_in_model(config, body)


def adapted(model: nn.Module) -> dict[str, Any]:
    """The layers with adapters of peft's in them, by name."""
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {n: m for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, BaseTunerLayer)}


@contextmanager
def all_called(name: str, body: nn.Module) -> Iterator[None]:
    """Refuses a model that does not call each of its adapted layers within the block.

    Some read a layer's weight instead, which has no adapter in it.
    """
    layers = adapted(body)
    idle = set(layers)
    handles = [m.register_forward_hook(lambda *_, n=n: idle.discard(n)) for n, m in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if idle:
        layer = min(idle).removeprefix("body.")
        raise InputError(
            f"lora_targets: model {name!r} uses the weight of {layer!r} without calling the layer, so an "
            "adapter there would do nothing; name other linear layers."
        )


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Within the block ``model`` is as it was before adapters were put in, with the names of its weights."""
    layers = adapted(model)
    try:
        for name, layer in layers.items():
            model.set_submodule(name, layer.get_base_layer())
        yield
    finally:
        for name, layer in layers.items():
            model.set_submodule(name, layer)


def merged(model: nn.Module) -> nn.Module:
    """A copy with W + (alpha / r) B A in place of each adapted W; ``model`` itself where there are none."""
    if not adapted(model):
        return model
    copied = copy.deepcopy(model)
    if base_model(copied) is not copied:
        return cast(Any, copied).merge_and_unload()
    for name, layer in adapted(copied).items():
        layer.merge()
        copied.set_submodule(name, layer.get_base_layer())
    return copied


def base_model(model: nn.Module) -> nn.Module:
    """The model that a ``PeftModel`` wraps and passes its arguments to; any other as it is."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    return cast(nn.Module, model.get_base_model())
