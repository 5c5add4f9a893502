"""What tests of the paper's experiments share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.conftest import in_process
from imitations.wilds import WILDS, maker

__all__ = ["in_process"]
QUICK: dict[str, Any] = {"quick": True, "device": "cpu", "jobs": 1, "progress": False}
"""Options of quick calls of `reproduce`."""


@pytest.fixture(scope="session")
def wilds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Imitations of all six."""
    folder = tmp_path_factory.mktemp("wilds")
    for name in WILDS:
        maker(name)(folder)
    return folder
