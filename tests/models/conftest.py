"""timm beside a CPU build of torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def timm() -> Iterator[Any]:
    """timm imports torchvision, which comes as a CUDA build and then lacks two operators.

    Naming them is enough for models; nothing here calls them.
    """
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
    yield pytest.importorskip("timm")
    del library
