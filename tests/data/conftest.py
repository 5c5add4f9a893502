"""The `wilds` package beside a CPU build of torch and without its own dependencies."""

from __future__ import annotations

import datetime
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch


def stub(name: str, **contents: Any) -> None:
    """An imitation of a module, where it is not installed."""
    if name not in sys.modules and importlib.util.find_spec(name.split(".")[0]) is None:
        module = ModuleType(name)
        module.__dict__.update(contents)
        sys.modules[name] = module


def scatter(src: torch.Tensor, index: torch.Tensor, dim_size: int, reduce: str) -> torch.Tensor:
    """As torch_scatter's in one dimension, where empty groups are 0."""
    how = {"mean": "mean", "sum": "sum", "max": "amax", "min": "amin"}[reduce]
    start = torch.zeros(dim_size, dtype=src.dtype)
    return start.scatter_reduce(0, index, src, how, include_self=False)


@pytest.fixture(scope="session")
def wilds_package() -> Iterator[Any]:
    """`wilds`, whose import neither asks the network for a newer version nor needs torch_scatter.

    torchvision comes as a CUDA build that lacks two operators; naming them is enough.
    """
    pytest.importorskip("pandas")
    library = None
    try:
        import torchvision  # noqa: F401
    except ImportError:
        pytest.skip("torchvision is not installed")
    except RuntimeError:
        for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    sys.modules["outdated"] = ModuleType("outdated")  # has no check_outdated: no check
    stub("torch_scatter", scatter=scatter)
    stub("pytz", UTC=datetime.UTC)
    stub("tqdm", tqdm=lambda items, **options: items)
    yield pytest.importorskip("wilds")
    del library
