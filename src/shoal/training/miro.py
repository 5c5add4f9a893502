"""MIRO: features that stay close to those of the pretrained model, with any algorithm."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim import Optimizer

from shoal.data.batch import tensors_in
from shoal.errors import InputError
from shoal.models.calling import call
from shoal.models.feature_model import FeatureModel
from shoal.models.layers import find_layers
from shoal.penalties import miro
from shoal.training.evaluate import evaluating

LAYERS = 5
"""The most layers whose features are compared: with ResNet the stem and the four stages."""
FIRST, LEAST, RATE = 0.1, 1e-5, 10.0
"""The variances' first and least values, and by what their learning rate is multiplied."""


class Miro(nn.Module):
    """Adds λ Σ_l :func:`shoal.penalties.miro` (z_l, z₀_l, σ²_l) to the loss of a batch.

    The z_l are the outputs of at most five layers of the model, evenly spaced among those that
    :func:`~shoal.models.layers.find_layers` finds, and the z₀_l those of a frozen copy of them, in evaluation
    mode, on the same inputs. σ²_l is one number per channel, trained with ten times the learning rate. As in
    the authors' program λ is 0.1, but 0.01 for PACS and VLCS. It is part of the algorithm, not of the model:
    trained and saved with it, and not exported.

    Reference: Cha et al., Domain Generalization by Mutual-Information Regularization with Pre-trained Models,
    ECCV 2022.

    Args:
        model: with the pretrained weights.
        head: its head.
        weight: λ.
        x: a batch of inputs, for the features' shapes.
    """

    def __init__(self, model: nn.Module, head: nn.Module, weight: float, x: Any) -> None:
        super().__init__()
        self.weight = weight
        # Of a FeatureModel only the features are called for some algorithms. In a tuple: not a part of this.
        inside = "features" if isinstance(model, FeatureModel) else ""
        self._trained = (model.get_submodule(inside),)
        found = _layer_outputs(model, head, x)
        if not found:
            raise InputError(f"miro={weight:g}: {type(model).__name__} has no layers below its head.")
        every, count = list(found), min(LAYERS, len(found))
        names = [every[round(i * (len(every) - 1) / max(1, count - 1))] for i in range(count)]
        self.names = [name.removeprefix(inside).lstrip(".") for name in names]
        self.pretrained = copy.deepcopy(self._trained[0]).requires_grad_(False).eval()
        begin, like = math.log(math.expm1(FIRST - LEAST)), next(model.parameters())
        self.variances = nn.ParameterList(
            torch.full(_channels(found[name]), begin, device=like.device, dtype=like.dtype) for name in names
        )
        self._found: list[tuple[int, Tensor]] = []
        self._collects = False

    def train(self, mode: bool = True) -> Miro:
        """The pretrained copy is always in evaluation mode."""
        super().train(mode)
        self.pretrained.eval()
        return self

    def own_rate(self, optimizer: Optimizer) -> None:
        """Gives the variances their learning rate, in a group of parameters of their own."""
        own, groups = set(self.variances), list[dict[str, Any]]()
        for group in optimizer.param_groups:
            parts = [[p for p in group["params"] if (p in own) == mine] for mine in (False, True)]
            rates = group["lr"], RATE * group["lr"]
            groups += [{**group, "params": p, "lr": lr} for p, lr in zip(parts, rates, strict=True) if p]
        optimizer.param_groups = groups

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Hooks are attached to the model while it trains, and to no copy of it."""

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._collects:
                with torch.no_grad(), _outputs(self.pretrained, self.names) as known:
                    self.pretrained(*args, **kwargs)
                pairs = zip(self.names, self.variances, strict=True)
                parts = [miro(found[name], known[name], softplus(b) + LEAST) for name, b in pairs]
                self._found.append((len(found[self.names[0]]), torch.stack(parts).sum()))
            found.clear()

        trained = self._trained[0]
        with trained.register_forward_hook(after, with_kwargs=True), _outputs(trained, self.names) as found:
            yield

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Within the block, forward passes of the model add to what :meth:`take` returns."""
        self._found, self._collects = [], True
        try:
            yield
        finally:
            self._collects = False

    def take(self) -> Tensor:
        """The penalty of the passes that were collected: the mean over examples, times λ."""
        if not self._found:
            raise InputError("miro: no forward pass of the layers was recorded; do not compile the model.")
        found, self._found = self._found, []
        total = sum(size for size, _ in found)
        return self.weight * torch.stack([value * (size / total) for size, value in found]).sum()


def _layer_outputs(model: nn.Module, head: nn.Module, x: Any) -> dict[str, Tensor]:
    """What each layer below the head returns: its last part whose output is not pooled, or the last."""
    layers = find_layers(model, head).layers
    with torch.no_grad(), evaluating(model), _outputs(model, [n for layer in layers for n in layer]) as found:
        call(model, x)
    chosen = []
    for layer in layers:
        seen = [name for name in layer if name in found]
        chosen += ([name for name in seen if found[name][0, 0].numel() > 1] or seen)[-1:]
    return {name: found[name] for name in chosen}


def _channels(z: Tensor) -> tuple[int, ...]:
    """The shape of one number per channel: the second dimension of images, the last one of tokens."""
    at = 1 if z.ndim == 4 else z.ndim - 1
    return tuple(n if i == at else 1 for i, n in enumerate(z.shape))


@contextmanager
def _outputs(module: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """What the layers called ``names`` return in a forward pass of ``module``, by name."""
    found: dict[str, Tensor] = {}

    def record(name: str, output: Any) -> None:
        first = next(iter(tensors_in(output)), None)
        if first is not None and first.ndim > 1:
            found[name] = first

    with ExitStack() as stack:
        for name in names:
            layer = module.get_submodule(name)
            stack.enter_context(layer.register_forward_hook(lambda m, x, y, name=name: record(name, y)))
        yield found
