"""Values that somebody may give for a setting."""

import math
from typing import Any

import numpy as np
import torch

from shoal.errors import shown


class Odd:
    """Has no text, and cannot be compared."""

    def __repr__(self) -> str:
        raise RuntimeError

    def __eq__(self, other: object) -> Any:
        return np.array([True, False])

    __hash__ = None  # type: ignore[assignment]


VALUES: tuple[Any, ...] = (
    *("0,5", "", "nan", "x" * 10000, "\0", "1_000", "0.5", "None"),
    *(math.nan, math.inf, -math.inf, -1, -0.0, 0, 1, 3, 0.5, 1.0, 2.5, 500.0, 1e300, 1e-320, 2**63, 10**400),
    *(True, None, [], {}, set(), b"1", [1], {"a": 1}, object(), Ellipsis, int, 1j),
    *(np.float32(0.5), np.float64("nan"), np.int8(1), np.bool_(True), np.array([1, 2]), torch.tensor(1.0)),
)
NASTY: dict[str, Any] = {**{shown(value): value for value in VALUES}, "odd": Odd()}
