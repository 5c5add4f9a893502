"""The layers of any model from its input to its head, for learning rates that differ between them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from torch import nn

from shoal.errors import InputError
from shoal.models.feature_model import FeatureModel
from shoal.models.head import find_head
from shoal.settings import Range, Rate, checked

Part = tuple[str, nn.Module]
"""A module and its name in ``model.named_modules()``."""


class Layers(NamedTuple):
    """A model without its head: its layers, the lowest first, and what lies between the last and the head."""

    layers: list[list[Part]]
    top: list[Part]

    def depths(self, model: nn.Module, head: nn.Module) -> dict[nn.Parameter, int]:
        """How many layers below the head each parameter is; one in no layer counts as in the lowest."""
        count = len(self.layers)
        levels = [(count - n, layer) for n, layer in enumerate(self.layers)]
        found = dict.fromkeys(head.parameters(), 0)
        for depth, parts in [*levels, (0, self.top)]:
            for _, module in parts:
                found |= {p: depth for p in module.parameters() if p not in found}
        return {p: found.get(p, count) for p in model.parameters()}


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

    def size(part: Part) -> int:
        return sum(p.numel() for p in part[1].parameters() if p.ndim > 1 and p not in kept)

    def grouped(parts: Sequence[Part]) -> list[list[Part]]:
        layers: list[list[Part]] = [[]]
        for part in parts:
            if size(part) and any(map(size, layers[-1])):
                layers.append([])
            layers[-1].append(part)
        return layers if any(map(size, layers[-1])) else []

    def split(module: nn.Module, name: str, inside: bool) -> Layers | None:
        parts = [(f"{name}{child}", m) for child, m in module.named_children() if m is not head]
        large = [part for part in parts if size(part)]
        several = isinstance(module, (nn.Sequential, nn.ModuleList)) and len(large) > 1
        if several or _numbered({n: size((n, m)) for n, m in large}):
            return Layers(grouped(parts), [])
        found = [(p, split(p[1], f"{p[0]}.", inside or len(large) > 1)) for p in large]
        opened = [(p, each) for p, each in found if each is not None]
        if not opened:
            return Layers(grouped(parts), []) if large and not inside else None
        part, (layers, top) = max(opened, key=lambda pair: (len(pair[1].layers), size(pair[0])))
        before, after = parts[: parts.index(part)], parts[parts.index(part) + 1 :]
        layers = [before, *layers] if any(map(size, before)) else [[*before, *layers[0]], *layers[1:]]
        rest = grouped(after)
        return Layers([*layers, *rest], top if rest else [*top, *after])

    return split(model, "", inside=False) or Layers([], [])


def _numbered(sizes: dict[str, int]) -> bool:
    """Whether parts called alike but for a number hold more than half of the weights."""
    kinds: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for name, size in sizes.items():
        if match := re.fullmatch(r"(.*\D)\d+", name.rpartition(".")[2]):
            kinds[match[1]] += size
            count[match[1]] += 1
    return any(count[kind] > 1 and 2 * kinds[kind] > sum(sizes.values()) for kind in kinds)


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
    depths, own = find_layers(model, head).depths(model, head), set(head.parameters())
    groups: dict[float, list[nn.Parameter]] = {}
    for p, depth in depths.items():
        rate = head_lr if head_lr is not None and p in own else lr * (layer_decay or 1.0) ** depth
        if p.requires_grad:
            groups.setdefault(rate, []).append(p)
    return [{"params": params, "lr": rate} for rate, params in groups.items()]
