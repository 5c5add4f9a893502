"""The linear example: a feature that works well everywhere, and one per domain that is better, there only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Annotated

import torch
from annotated_types import MultipleOf

from shoal.data.batch import DomainData, TensorData
from shoal.data.domains import Domains
from shoal.settings import Range


def load(*, per_domain: Annotated[int, Range(100, 10**7), MultipleOf(100)] = 1000) -> DomainData:
    """Make domains D1 and D2 (train) and D3 (test), ``per_domain`` examples each, in exact proportions.

    In domain d, 50 % of the examples are x = 0000 with y = 0; 40 % have f1 and f_{d+1} on and y = 1; 10 %
    are x = 1000, of which 30 % have y = 1. Nothing is random. There is no validation split: there are
    only these three kinds of example.
    """
    half, ninety = per_domain // 2, per_domain // 10 * 9
    x, y = torch.zeros(3, per_domain, 4), torch.zeros(3, per_domain, dtype=torch.int64)
    x[:, half:, 0] = 1
    for domain in range(3):
        x[domain, half:ninety, 1 + domain] = 1
    y[:, half : ninety + per_domain // 100 * 3] = 1
    rows = torch.arange(3 * per_domain).view(3, per_domain).numpy()
    return DomainData(
        examples=TensorData(x.flatten(0, 1), y.flatten()),
        splits={
            "train": Domains.from_indices({"D1": rows[0], "D2": rows[1]}),
            "test": Domains.from_indices({"D3": rows[2]}),
        },
        classes=2,
        input_shape=(4,),
        model="linear",
    )


linear = SimpleNamespace(load=load)
