"""The sprite renderer against original frames, and against a naive drawing of the same curves."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal import datasets
from shoal.data.batch import DomainData
from shoal.datasets import cdsprites as drawing
from shoal.datasets.cdsprites import SpriteData, load, render
from shoal.errors import InputError


def test_draws_what_the_original_program_drew() -> None:
    path = Path(os.environ.get("SHOAL_DATA", "no data"), "dsprites_frames", "frames.npz")
    if not path.exists():
        pytest.skip("SHOAL_DATA is unset or has no dsprites_frames")
    with np.load(path, allow_pickle=False) as archive:
        latents, rows = np.unique(archive["latents"], axis=0, return_index=True)
        wrong = (render(torch.from_numpy(latents).long()).numpy() != archive["imgs"][rows]).sum((1, 2))
    for shape, count, exact in ((0, 45, 43), (1, 45, 36), (2, 168, 167)):
        own = wrong[latents[:, 0] == shape]
        assert (len(own), own.max() <= 4, (own == 0).sum() >= exact) == (count, True, True)


def outline(shape: int) -> np.ndarray:
    """The upright shape of scale 1 as a polygon, (points, 2), y down."""
    t = np.linspace(0, 2 * np.pi, 2000, endpoint=False)
    if shape == 0:
        return drawing.SQUARE_HALF_SIDE * np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]])
    if shape == 1:
        return np.stack([np.cos(t), np.sin(t)], 1) * drawing.ELLIPSE_SEMI_AXES
    bracket = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    down = -drawing.HEART_HEIGHT * bracket - drawing.HEART_OFFSET
    return np.stack([drawing.HEART_HALF_WIDTH * np.sin(t) ** 3, down], 1)


def drawn_naively(latent: list[int]) -> np.ndarray:
    """Turn and move the outline itself, then ask of every pixel's centre how often a ray crosses it."""
    shape, scale, orientation, x, y = latent
    angle = 2 * math.pi * orientation / 39
    turn = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    points = outline(shape) * (0.5 + scale / 10) @ turn.T + [16 + 32 * x / 31, 16 + 32 * y / 31]
    rows, columns = np.mgrid[0:64, 0:64] + 0.5
    inside = np.zeros((64, 64), dtype=bool)
    for (x0, y0), (x1, y1) in zip(points, np.roll(points, -1, axis=0), strict=True):
        if y0 != y1:
            crosses = ((y0 > rows) != (y1 > rows)) & (columns < x0 + (x1 - x0) * (rows - y0) / (y1 - y0))
            inside ^= crosses
    return inside


@pytest.mark.parametrize("shape", [0, 1, 2])
def test_agrees_with_a_naive_drawing(shape: int) -> None:
    latents = [[shape, 5, 7, 3, 30], [shape, 0, 38, 31, 0], [shape, 3, 20, 16, 11]]
    for image, latent in zip(render(torch.tensor(latents)).numpy(), latents, strict=True):
        # A polygon of 2,000 sides is not quite the curve: a centre on the very edge may fall outside.
        assert (image != drawn_naively(latent)).sum() <= (0 if shape == 0 else 1)


# CdSprites-N


def rows(data: DomainData, split: str, domain: int) -> Tensor:
    return torch.from_numpy(data.splits[split].indices_of(domain)).long()


def made(**options: Any) -> tuple[DomainData, SpriteData]:
    data = load(**{"domains": 4, "size": 32, "per_domain": 1000, **options})
    assert isinstance(data.examples, SpriteData)
    return data, data.examples


def test_colour_tells_the_shape_in_training_domains_only() -> None:
    data, examples = made()
    for domain in range(4):
        chosen = rows(data, "train", domain)
        assert torch.equal(examples.colours[chosen], 2 * domain + examples.y[chosen])
        assert 0.4 < examples.y[chosen].float().mean() < 0.6
    for split in ("validation", "test"):
        chosen = rows(data, split, 0)
        observed = torch.zeros(8, 2)
        observed.index_put_((examples.colours[chosen], examples.y[chosen]), torch.ones(1000), accumulate=True)
        expected = observed.sum(1, keepdim=True) * observed.sum(0) / observed.sum()
        assert expected.min() > 30  # every colour appears, with both shapes
        assert ((observed - expected) ** 2 / expected).sum() < 24.3  # 99.9 %, 7 degrees of freedom
    row = rows(data, "train", 2)[7]
    image, _ = examples[int(row)]
    paint = examples.palette[examples.colours[row]]
    assert torch.equal(image, examples.masks[row] * paint[:, None, None])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"domains": 400_000}, "each of 400002 parts .* has 1; it must have at least 2"),
        ({"palette": "adjacnt"}, "must be 'adjacent' or 'random', got 'adjacnt'. Did you mean 'adjacent'"),
        ({"per_domain": 40_961}, "has 40960; .*per_domain=40961 of them"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        datasets.load("cdsprites", **options)
