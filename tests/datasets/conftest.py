"""The `wilds` package without its own dependencies."""

from __future__ import annotations

import datetime
import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from shoal.vision import allow_torchvision


def scatter(src: torch.Tensor, index: torch.Tensor, dim_size: int, reduce: str) -> torch.Tensor:
    """As torch_scatter's in one dimension, where empty groups are 0."""
    how = {"mean": "mean", "sum": "sum", "max": "amax", "min": "amin"}[reduce]
    start = torch.zeros(dim_size, dtype=src.dtype)
    return start.scatter_reduce(0, index, src, how, include_self=False)


def stub(name: str, **contents: Any) -> None:
    """An imitation of a module, where it is not installed."""
    if name not in sys.modules and importlib.util.find_spec(name.split(".")[0]) is None:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(contents)


@pytest.fixture(scope="session")
def wilds_package() -> Any:
    """`wilds`, whose import neither asks the network for a newer version nor needs torch_scatter."""
    allow_torchvision()
    sys.modules["outdated"] = ModuleType("outdated")  # has no check_outdated: no check
    stub("torch_scatter", scatter=scatter)
    stub("pytz", UTC=datetime.UTC)
    stub("tqdm", tqdm=lambda items, **options: items)
    pytest.importorskip("torchvision")
    return pytest.importorskip("wilds")
