"""The layers of any model from its input to its head, for learning rates that differ between them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from torch import nn

from shoal.errors import InputError
from shoal.models.feature_model import FeatureModel
from shoal.models.features import find_head
from shoal.settings import Range, Rate, checked


class Layers(NamedTuple):
    """The names of modules, layer by layer, the lowest first; and those between the last and the head."""

    layers: list[list[str]]
    top: list[str]


def find_layers(model: nn.Module, head: nn.Module) -> Layers:
    """The layers of ``model`` below its ``head``, by the order in which its modules were registered.

    A part is a child module; a large part has a weight of two or more dimensions that is not the head's.
    Beginning with the model,

    1. the large parts of an ``nn.Sequential`` or ``nn.ModuleList``, if there are several, are one layer each:
       the blocks of a vision transformer, ``encoder.layer.N`` of transformers, ``features.N`` of torchvision;
    2. so are those of any module where parts called alike but for a number hold more than half of its
       weights: ``conv1, layer1, …, layer4`` of a ResNet;
    3. of any other module the large part that itself has the most layers by these rules is opened. All parts
       before it are one layer, the lowest: the stem or the embeddings. Each large part after it is one layer;
    4. if none can be opened, the large parts are one layer each.

    Other parts, such as a normalisation, belong to the layer before them, or to the first. Those that follow
    all large parts in (3) are the ``top``, which counts as part of the head, as in BEiT: the last
    normalisation of a vision transformer.
    """
    kept = set(head.parameters())

    def size(name: str) -> int:
        weights = model.get_submodule(name).parameters()
        return sum(p.numel() for p in weights if p.ndim > 1 and p not in kept)

    def grouped(names: Sequence[str]) -> list[list[str]]:
        """A layer for each large part; none, if there is none."""
        layers: list[list[str]] = [[]]
        for name in names:
            if size(name) and any(map(size, layers[-1])):
                layers.append([])
            layers[-1].append(name)
        return layers if any(map(size, layers[-1])) else []

    def split(name: str, inside: bool) -> Layers | None:
        module = model.get_submodule(name)
        parts = [f"{name}.{child}".lstrip(".") for child, m in module.named_children() if m is not head]
        sizes = {part: size(part) for part in parts if size(part)}
        listed = isinstance(module, (nn.Sequential, nn.ModuleList)) and len(sizes) > 1
        if listed or _numbered(sizes):
            return Layers(grouped(parts), [])
        found = {part: split(part, inside or len(sizes) > 1) for part in sizes}
        opened = {part: inner for part, inner in found.items() if inner is not None}
        if not opened:
            return Layers(grouped(parts), []) if sizes and not inside else None
        best = max(opened, key=lambda part: (len(opened[part].layers), sizes[part]))
        (first, *others), top = opened[best]
        before, after = parts[: parts.index(best)], parts[parts.index(best) + 1 :]
        lowest = [before, first] if any(map(size, before)) else [[*before, *first]]
        rest = grouped(after)
        return Layers([*lowest, *others, *rest], top if rest else [*top, *after])

    return split("", inside=False) or Layers([], [])


def _numbered(sizes: dict[str, int]) -> bool:
    """Whether parts called alike but for a number hold more than half of the weights."""
    alike, count = Counter[str](), Counter[str]()
    for name, size in sizes.items():
        if match := re.fullmatch(r"(.*\D)\d+", name.rpartition(".")[2]):
            alike[match[1]] += size
            count[match[1]] += 1
    return any(count[name] > 1 and 2 * alike[name] > sum(sizes.values()) for name in alike)


def depths(model: nn.Module, head: nn.Module) -> dict[nn.Parameter, int]:
    """How many layers below the head each parameter is; one in no layer counts as in the lowest."""
    layers, top = find_layers(model, head)
    found = dict.fromkeys(head.parameters(), 0)
    for depth, names in enumerate([top, *reversed(layers)]):
        for name in names:
            found |= {p: depth for p in model.get_submodule(name).parameters() if p not in found}
    return {p: found.get(p, len(layers)) for p in model.parameters()}


@checked
def parameter_groups(
    model: nn.Module,
    lr: Rate,
    *,
    head_lr: Rate | None = None,
    layer_decay: Annotated[float, Range(above=0, most=1)] | None = None,
    x: Any = None,
) -> list[dict[str, Any]]:
    """Create parameter groups with separate learning rates for a pretrained model, for any optimizer. ::

        optimizer = torch.optim.AdamW(parameter_groups(model, 1e-3, layer_decay=0.75, x=images))

    k layers below the head, the learning rate is lr · d^k, with d = ``layer_decay``. The layers are those of
    :func:`find_layers`. Frozen parameters are not included.

    Args:
        model: pretrained model.
        lr: learning rate.
        head_lr: learning rate of the head (default: ``lr``).
        layer_decay: d (default: 1, the same learning rate for all layers).
        x: batch of inputs, to find the head in a forward pass; not needed for a :class:`FeatureModel`.

    Returns:
        Parameter groups.

    Reference: Clark et al., ELECTRA, ICLR 2020; Bao et al., BEiT, ICLR 2022 (layer-wise learning-rate decay).
    """
    if x is None and not isinstance(model, FeatureModel):
        raise InputError("x is missing: it is a batch of inputs, needed to find the head in a forward pass.")
    head = find_head(model, x)
    own, groups = set(head.parameters()), dict[float, list[nn.Parameter]]()
    for p, depth in depths(model, head).items():
        rate = head_lr if head_lr is not None and p in own else lr * (layer_decay or 1.0) ** depth
        if p.requires_grad:
            groups.setdefault(rate, []).append(p)
    return [{"params": params, "lr": rate} for rate, params in groups.items()]
