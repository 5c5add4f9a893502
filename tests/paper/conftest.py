"""What tests of the paper's experiments share."""

from __future__ import annotations

from typing import Any

from experiments.conftest import in_process

__all__ = ["in_process"]
QUICK: dict[str, Any] = {"quick": True, "device": "cpu", "jobs": 1, "progress": False}
"""Options of quick calls of `reproduce`."""
