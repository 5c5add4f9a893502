"""What tests of the paper's experiments share."""

from __future__ import annotations

from pathlib import Path

import pytest

from imitations.wilds import WILDS, maker


@pytest.fixture(scope="session")
def wilds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Imitations of all six."""
    folder = tmp_path_factory.mktemp("wilds")
    for name in WILDS:
        maker(name)(folder, 0, "small")
    return folder
