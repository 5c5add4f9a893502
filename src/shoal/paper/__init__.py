"""The paper's experiments; ``presets`` has their settings and ``published`` the paper's numbers."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any


@cache
def read(path: str) -> Any:
    """A YAML file of this package; what it holds is not to be changed."""
    import yaml

    return yaml.safe_load(resources.files("shoal.paper").joinpath(path).read_text(encoding="utf-8"))
