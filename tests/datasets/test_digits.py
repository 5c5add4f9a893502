"""Handwritten digits, rotated and coloured: what the real files give, and what is said of wrong ones."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal import datasets
from shoal.data.batch import DomainData, TensorData
from shoal.datasets.digits import FILES, read_digits, read_mnist, rotate
from shoal.errors import InputError

NAMES = ("rotated-digits", "coloured-digits", "rotated-mnist", "coloured-mnist")


@pytest.fixture(scope="module")
def mnist() -> Path:
    root = os.environ.get("SHOAL_DATA")
    if not root or not Path(root, "mnist").is_dir():
        pytest.skip("SHOAL_DATA is unset or has no mnist: nothing to compare with")
    return Path(root, "mnist")


def idx(values: np.ndarray) -> bytes:
    sizes = np.array([0x0800 + values.ndim, *values.shape], ">u4")
    return sizes.tobytes() + values.astype(np.uint8).tobytes()


def write(folder: Path, count: int = 60, compressed: bool = False) -> Path:
    """The four files, of random images."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for n, part in enumerate((FILES[:2], FILES[2:])):
        images, labels = rng.integers(0, 256, (count, 28, 28)), (np.arange(count) + n) % 10
        for name, values in zip(part, (images, labels), strict=True):
            content = idx(values)
            path = folder / (f"{name}.gz" if compressed else name)
            path.write_bytes(gzip.compress(content) if compressed else content)
    return folder


def of_domain(data: DomainData, name: str) -> tuple[Tensor, Tensor]:
    """The examples of a domain in all splits, in the order of the files."""
    assert isinstance(data.examples, TensorData)
    parts = [d.indices_of(d.names.index(name)) for d in data.splits.values() if name in d.names]
    return data.examples.batch(torch.from_numpy(np.sort(np.concatenate(parts))).long())


def test_rotation_is_counter_clockwise_and_exact_at_right_angles() -> None:
    x = torch.rand(3, 8, 8, dtype=torch.float32)
    for turns in range(4):
        torch.testing.assert_close(rotate(x, 90 * turns), torch.rot90(x, turns, (1, 2)), rtol=0, atol=1e-5)
    images, _ = read_digits()
    assert (rotate(rotate(images, 30), -30) - images).abs().mean() < 0.05


def test_colours_are_those_of_the_paper(mnist: Path) -> None:
    """Labels are digits below 5 with a quarter flipped; colours agree with 90, 80 and 10 % of the labels."""
    data, (images, digits) = datasets.load("coloured-mnist", folder=str(mnist)), read_mnist(mnist)
    order = torch.randperm(70_000, generator=torch.Generator().manual_seed(0))
    for i, (name, agreement) in enumerate({"+90%": 0.9, "+80%": 0.8, "-90%": 0.1}.items()):
        x, y = (part[:4000] for part in of_domain(data, name))
        rows = order[i::3][:4000]
        assert ((digits[rows] < 5) == y).double().mean().item() == pytest.approx(0.75, abs=0.02)
        colour = x.sum((2, 3)).argmax(1)
        assert (y == colour).double().mean().item() == pytest.approx(agreement, abs=0.02)
        assert torch.equal(x[torch.arange(4000), colour], images[rows] / 255)
        assert not x[torch.arange(4000), 1 - colour].any()


def test_rotated_mnist_rotates_each_image(mnist: Path) -> None:
    data, (images, digits) = datasets.load("rotated-mnist", folder=str(mnist), seed=3), read_mnist(mnist)
    order = torch.randperm(70_000, generator=torch.Generator().manual_seed(3))
    for i, name in enumerate(("0°", "15°", "30°", "45°", "60°", "75°")):
        x, y = (part[:200] for part in of_domain(data, name))
        rows = order[i::6][:200]
        assert torch.equal(y, digits[rows])
        torch.testing.assert_close(x[:, 0], rotate(images[rows].float(), 15 * i).round() / 255)
    assert digits.bincount().tolist() == [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]


@pytest.mark.parametrize("name", NAMES)
def test_domains_splits_and_seeds(name: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"folder": str(write(tmp_path))} if "mnist" in name else {}
    known = datasets.registry.module(name).DOMAINS
    for held_out in (known[0], known[-1], list(known[:2])):
        data = datasets.load(name, held_out=held_out, **more)
        test = [held_out] if isinstance(held_out, str) else held_out
        assert list(data.splits["test"].names) == test
        assert data.splits["train"].names == data.splits["validation"].names
        assert list(data.splits["train"].names) == [n for n in known if n not in test]
        for train, validation in zip(
            data.splits["train"].sizes, data.splits["validation"].sizes, strict=True
        ):
            assert validation == (train + validation) // 5
    a, b = (datasets.load(name, seed=seed, **more).examples for seed in (0, 1))
    assert not torch.equal(a.y, b.y)  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="unknown domain 'nowhere'"):
        datasets.load(name, held_out="nowhere", **more)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (FILES[0], b"\x1f\x8b broken", "cannot be read"),
        (FILES[0], idx(np.zeros(60)), r"images \(60,\), not \(n, 28, 28\)"),
        (FILES[3], None, "there is no file 't10k-labels-idx1-ubyte'"),
    ],
)
def test_a_damaged_or_missing_file_is_named(name: str, content: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path) / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        datasets.load("rotated-mnist", folder=str(tmp_path))
