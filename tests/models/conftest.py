"""timm beside a CPU build of torch."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def timm() -> Any:
    """timm, which imports torchvision."""
    import shim.sitecustomize  # noqa: F401

    pytest.importorskip("torchvision")
    return pytest.importorskip("timm")
