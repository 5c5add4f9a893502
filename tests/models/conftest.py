"""What tests of models share."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from shoal.vision import load_timm


@pytest.fixture(scope="session")
def timm() -> Any:
    """timm, which imports torchvision, beside a CPU build of torch."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    return load_timm()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is asked of the Hugging Face Hub, and a cache of its own."""
    pytest.importorskip("transformers")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
