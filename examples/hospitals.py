"""What the examples train: patients of four hospitals, one of them tiny, and a small network.

``ours`` is the same training in Shoal's own loop, ``difference`` how far apart the weights of two models are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import TensorDataset

import shoal
from shoal.data import DomainBatchSampler
from shoal.optim import Fish

STEPS, INNER_STEPS, BATCH, META_LR, LR, SEED = 8, 3, 8, 0.5, 0.02, 7
SIZES = {"kyoto": 60, "lima": 41, "oslo": 23, "quito": 5}  # quito is smaller than a batch


def patients(number: int, count: int) -> tuple[Tensor, Tensor]:
    """Six measurements, of which every hospital shifts some, and a diagnosis."""
    draw = torch.Generator().manual_seed(number)
    x = torch.randn(count, 6, generator=draw)
    y = (x[:, 0] + x[:, 1] * (number - 1) + 0.5 * torch.randn(count, generator=draw) > 0).long()
    return x + number * torch.linspace(-1, 1, 6), y


def hospitals() -> dict[str, tuple[Tensor, Tensor]]:
    return {name: patients(number, count) for number, (name, count) in enumerate(SIZES.items())}


def dataset() -> TensorDataset:
    """All patients, one hospital after the other."""
    xs, ys = zip(*hospitals().values(), strict=True)
    return TensorDataset(torch.cat(xs), torch.cat(ys))


def labels() -> list[str]:
    """The hospital of each patient."""
    return [name for name, count in SIZES.items() for _ in range(count)]


def network(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(6, 16), *more, nn.Tanh(), nn.Linear(16, 2))


def sampler(**more: Any) -> DomainBatchSampler:
    """Batches in the order of ``shoal.fit``: one pass over it is the whole training."""
    return DomainBatchSampler(labels(), BATCH, INNER_STEPS, seed=SEED, **{"steps": STEPS, **more})


def fish(model: nn.Module) -> Fish:
    return Fish(AdamW(model.parameters(), LR, fused=True), inner_steps=INNER_STEPS, meta_lr=META_LR)


def ours(model: nn.Module, train: Any = None, **options: Any) -> nn.Module:
    """The model after the same training in Shoal's own loop."""
    settings = {
        "steps": STEPS,
        "batch_size": BATCH,
        "domains_per_step": INNER_STEPS,
        "settings": {"meta_lr": META_LR},
        "optimizer": "adamw",
        "lr": LR,
        "seed": SEED,
        "device": "cpu",
        "progress": False,
    }
    return shoal.fit("fish", model, train or hospitals(), **(settings | options)).model


def difference(one: nn.Module, other: nn.Module) -> float:
    """The largest, over all weights and buffers."""
    return max(_differences(one, other))


def _differences(one: nn.Module, other: nn.Module) -> Iterator[float]:
    there = other.state_dict()
    for name, value in one.state_dict().items():
        yield float((value.double() - there[name].double()).abs().max())
