"""Everything that decides how a run ends, as plain data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from shoal.errors import InputError, check_names

# torch.optim classes by the names used in configurations.
OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}


@dataclass(frozen=True)
class RunConfig:
    """One run. Two runs with equal configurations give equal records, up to the device's arithmetic.

    ``steps`` counts meta-steps of ``domains_per_step`` minibatches; :attr:`passes` is their product.
    """

    dataset: str
    algorithm: str
    steps: int
    data_options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    model_options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "adam"
    optimizer_options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 1e-3})
    batch_size: int = 32
    domains_per_step: int | None = None
    draw: str | None = None
    seed: int = 0
    warm_start: int | float | str | None = None
    eval_every: int | None = None
    eval_limit: int | None = None
    select: str | None = None
    label: str = ""
    """How tables call this row; no part of the run's identity."""

    def __post_init__(self) -> None:
        check_names("optimizer", [self.optimizer], OPTIMIZERS)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise InputError(f"seed must be a whole number of at least 0, got {self.seed!r}.")

    @property
    def name(self) -> str:
        return self.label or self.algorithm

    @property
    def identity(self) -> str:
        """A short name for what is run, the same on every machine: changes whenever a field does."""
        content = {k: v for k, v in asdict(self).items() if k != "label"}
        text = json.dumps(content, sort_keys=True, default=dict)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RunConfig:
        check_names("field of a run configuration:", content, [f.name for f in fields(cls)])
        return cls(**content)
