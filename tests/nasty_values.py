"""Values that somebody may give for a setting."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.errors import shown

NASTY: dict[str, Any] = {
    shown(value): value
    for value in (
        *(
            "0,5",
            "",
            " ",
            "nan",
            "inf",
            "x" * 10000,
            "\0",
            "\x1b[2J",
            "٣",
            "1_000",
            "0.5",
            "true",
            "None",
            "\ud800",
        ),
        *(
            math.nan,
            math.inf,
            -math.inf,
            -1,
            -1.0,
            -0.0,
            0,
            1,
            2,
            3,
            0.5,
            1.0,
            2.5,
            1e300,
            1e38,
            3.5e38,
            1e-320,
        ),
        *(10**30, 2**63, 2**63 - 1, -(2**63), 10**400, 10**5000, 2**31, 500.0),
        *(True, False, None, [], {}, (), set(), b"", b"1", [1], {"a": 1}, object(), Ellipsis, int),
        *(np.float32(0.5), np.float64("nan"), np.int8(1), np.bool_(True), np.array(1.0), np.array([1, 2])),
        *(
            torch.tensor(1.0),
            torch.tensor([1, 2]),
            Decimal("0.5"),
            Decimal("NaN"),
            Fraction(1, 2),
            1j,
            Path(),
        ),
    )
}
"""What somebody may give for a setting."""


class Odd:
    """Has no text and equals nothing that can be told."""

    def __repr__(self) -> str:
        raise RuntimeError

    def __eq__(self, other: object) -> Any:
        return np.array([True, False])

    __hash__ = None  # type: ignore[assignment]


NASTY["odd"] = Odd()
