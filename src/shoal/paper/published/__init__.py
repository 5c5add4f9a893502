"""The paper's numbers, as data."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import yaml


@cache
def read(path: str) -> Any:
    """A YAML file of this package; what it holds is not to be changed."""
    return yaml.safe_load(resources.files("shoal.paper").joinpath(path).read_text(encoding="utf-8"))


def published(name: str) -> list[dict[str, Any]]:
    """What the paper says about an experiment."""
    found: list[dict[str, Any]] = read(f"published/{name}.yaml")
    return found
