"""The paper's numbers and claims, as data."""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml


def claims(name: str) -> list[dict[str, Any]]:
    """What the paper says in its part ``name``; of the part ``claims`` all that is judged."""
    text = resources.files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    found: list[dict[str, Any]] = yaml.safe_load(text)
    return found
