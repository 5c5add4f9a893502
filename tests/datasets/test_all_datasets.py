"""What holds of every dataset, and the linear example."""

from __future__ import annotations

import os
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import datasets, models
from shoal.data.batch import TensorData
from shoal.errors import InputError

SMALL: dict[str, dict[str, Any]] = {
    "cdsprites": {"domains": 3, "size": 32, "per_domain": 60},
    "linear": {"per_domain": 100},
}
FILES = {"rotated-mnist": "mnist", "coloured-mnist": "mnist", "heart": "heart_disease"}
IN_MEMORY = (*SMALL, *FILES, "rotated-digits", "coloured-digits")


@pytest.mark.parametrize("name", IN_MEMORY)
def test_datasets_in_memory(name: str) -> None:
    """Splits are disjoint by example, batches fit what is stated of them, loading is repeatable."""
    root = os.environ.get("SHOAL_DATA")
    if name in FILES and not (root and Path(root, FILES[name]).is_dir()):
        pytest.skip(f"SHOAL_DATA is unset or has no files for {name}")
    data = datasets.load(name, **SMALL.get(name, {}))
    for a, b in combinations(data.splits.values(), 2):
        assert not set(a.examples().tolist()) & set(b.examples().tolist())
    examples = data.examples
    assert isinstance(examples, TensorData)
    some = torch.from_numpy(data.splits["test"].indices_of(0)[:5]).long()
    x, y = examples.batch(some)
    assert (x.shape, x.dtype, y.dtype) == ((5, *data.input_shape), torch.float32, torch.int64)
    assert x.isfinite().all()
    if x.ndim == 4:  # images
        assert x.min() >= 0
        assert x.max() <= 1
    assert set(examples.y.unique().tolist()) == set(range(data.classes or 0))
    assert torch.equal(examples[int(some[3])][0], x[3])
    model = models.build(data.model, input_shape=data.input_shape, classes=data.classes, seed=0)
    assert model(x).shape == (5, data.classes)
    again: Any = datasets.load(name, **SMALL.get(name, {})).examples
    assert torch.equal(again.batch(some)[0], x)


def test_unknown_names_and_options_are_named() -> None:
    with pytest.raises(InputError, match=r"unknown dataset 'cdsprite'.*'cdsprites'"):
        datasets.load("cdsprite")
    with pytest.raises(InputError, match=r"'cdsprites'.*'palete'.*'palette'.*per_domain"):
        datasets.load("cdsprites", palete="random")
    with pytest.raises(InputError, match="a multiple of 100"):
        datasets.load("linear", per_domain=150)


def test_linear_proportions_are_exact() -> None:
    per_domain = 200
    data = datasets.load("linear", per_domain=per_domain)
    examples: Any = data.examples
    domains = [*(data.splits["train"].indices_of(d) for d in (0, 1)), data.splits["test"].indices_of(0)]
    for d, rows in enumerate(domains):
        x, y = examples.batch(torch.from_numpy(rows).long())
        own = torch.zeros(4)
        own[[0, 1 + d]] = 1
        kinds = {"negative": torch.zeros(4), "own": own, "first": torch.tensor([1.0, 0, 0, 0])}
        share = {k: (x == v).all(1) for k, v in kinds.items()}
        counts = {k: int(of.sum()) * 100 // per_domain for k, of in share.items()}
        assert counts == {"negative": 50, "own": 40, "first": 10}
        assert [float(y[of].double().mean()) for of in share.values()] == pytest.approx([0, 1, 0.3])
