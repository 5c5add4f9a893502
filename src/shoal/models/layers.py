"""The layers of any model from its input to its head, for learning rates that differ between them."""

from __future__ import annotations

from collections import Counter
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

    Modules called alike but for a number, such as ``blocks.0``, ``encoder.layer.0`` or ``layer1``, are a
    layer each, if they have a weight of two or more dimensions. What comes before the first of them is the
    lowest layer: the stem or the embeddings. Any other module with such a weight is a layer too, and one
    without belongs to the layer before it. Those at the end, unless the last layer is of the same module, are
    the ``top``, which counts as part of the head, as in BEiT: the last normalisation of a vision transformer.
    """
    kept = set(head.parameters())

    def large(name: str) -> bool:
        return any(p.ndim > 1 and p not in kept for p in model.get_submodule(name).parameters())

    def parts(name: str) -> list[tuple[str, bool]]:
        """The modules in one, and in those of them that have a stack; and whether each is of a stack."""
        children = model.get_submodule(name).named_children()
        names = [f"{name}.{child}".lstrip(".") for child, module in children if module is not head]
        alike = Counter(each.rstrip("0123456789") for each in names if large(each))
        found: list[tuple[str, bool]] = []
        for each in names:
            inside, stacked = parts(each), large(each) and alike[each.rstrip("0123456789")] > 1
            alone = large(each) and alike.total() == 1 and any(large(part) for part, _ in inside)
            opened = alone or (not stacked and any(stack for _, stack in inside))
            found += inside if opened else [(each, stacked)]
        return found

    found = parts("")
    stacks = [stacked for _, stacked in found]
    first = stacks.index(True) if any(stacks) else 0
    sized = [n for n, (name, _) in enumerate(found) if large(name)]
    layers, top = list[list[str]](), list[str]()
    for n, (name, _) in enumerate(found if sized else []):
        if n == sized[0] or (n in sized and n >= first):
            layers.append([] if layers else [each for each, _ in found[:n]])
        if n > sized[-1] and name.rpartition(".")[0] != found[sized[-1]][0].rpartition(".")[0]:
            top.append(name)
        elif layers:
            layers[-1].append(name)
    return Layers(layers, top)


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
