"""timm beside a CPU build of torch."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from shoal.vision import load_timm


@pytest.fixture(scope="session")
def timm() -> Any:
    """timm, which imports torchvision."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    return load_timm()
