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

from shoal.data import sprites
from shoal.datasets.cdsprites import latent_grid, read_archive, render
from shoal.errors import InputError


@pytest.fixture(scope="module")
def frames() -> tuple[Tensor, Tensor]:
    """Original dSprites frames, each distinct latent once."""
    root = os.environ.get("SHOAL_DATA")
    if not root:
        pytest.skip("SHOAL_DATA is unset: no original dSprites frames to compare with")
    path = Path(root) / "dsprites_frames" / "frames.npz"
    if not path.exists():
        pytest.skip(f"no original dSprites frames at {path}")
    with np.load(path, allow_pickle=False) as archive:
        latents, rows = np.unique(archive["latents"], axis=0, return_index=True)
        return torch.from_numpy(archive["imgs"][rows]), torch.from_numpy(latents).long()


@pytest.mark.parametrize(("shape", "count", "exact"), [(0, 45, 43), (1, 45, 36), (2, 168, 167)])
def test_draws_what_the_original_program_drew(
    frames: tuple[Tensor, Tensor], shape: int, count: int, exact: int
) -> None:
    images, latents = (t[frames[1][:, 0] == shape] for t in frames)
    wrong_pixels = (render(latents) != images).sum((1, 2))
    assert len(latents) == count
    assert wrong_pixels.max() <= 4
    assert (wrong_pixels == 0).sum() >= exact


def outline(shape: int) -> np.ndarray:
    """The upright shape of scale 1 as a polygon, (points, 2), y down."""
    t = np.linspace(0, 2 * np.pi, 2000, endpoint=False)
    if shape == 0:
        return sprites.SQUARE_HALF_SIDE * np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]])
    if shape == 1:
        return np.stack([np.cos(t), np.sin(t)], 1) * sprites.ELLIPSE_SEMI_AXES
    bracket = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    down = -sprites.HEART_HEIGHT * bracket - sprites.HEART_OFFSET
    return np.stack([sprites.HEART_HALF_WIDTH * np.sin(t) ** 3, down], 1)


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
    drawn = render(torch.tensor(latents)).numpy()
    for image, latent in zip(drawn, latents, strict=True):
        # A polygon of 2,000 sides is not quite the curve: a centre on the very edge may fall outside.
        assert (image != drawn_naively(latent)).sum() <= (0 if shape == 0 else 1)


def test_small_images_are_every_second_pixel() -> None:
    latents = latent_grid((0, 1, 2))[::1987]
    assert torch.equal(render(latents, 32), render(latents)[:, ::2, ::2])


def test_an_image_does_not_depend_on_its_chunk() -> None:
    latents = latent_grid((2, 0, 1))[::3001]  # several chunks and all shapes, in mixed order
    latents = latents[torch.randperm(len(latents), generator=torch.Generator().manual_seed(0))]
    images = render(latents)
    assert images.dtype == torch.uint8
    for row in (0, 63, 64, len(latents) - 1):
        assert torch.equal(images[row], render(latents[row : row + 1])[0])
    assert images.unique().tolist() == [0, 1]
    assert render(latents[:0]).shape == (0, 64, 64)


def test_grid_is_complete_and_in_the_archives_order() -> None:
    grid = latent_grid((0, 1, 2))
    assert len(grid) == 737_280
    weights = torch.tensor([6 * 40 * 1024, 40 * 1024, 1024, 32, 1])
    assert torch.equal((grid * weights).sum(1), torch.arange(len(grid)))
    assert torch.equal(latent_grid((1,)), grid[245_760:491_520])


@pytest.mark.parametrize(
    ("latents", "message"),
    [
        (torch.zeros(3, 4, dtype=torch.long), r"\(n, 5\).*\(3, 4\)"),
        (torch.zeros(3, 5), "integers"),
        (torch.tensor([[0, 6, 0, 0, 0]]), "scale must be 0 to 5, not 6"),
        (torch.tensor([[0, 0, -1, 0, 0]]), "orientation must be 0 to 39, not -1"),
    ],
)
def test_wrong_latents_are_named(latents: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        render(latents)


def test_wrong_size_is_named() -> None:
    with pytest.raises(InputError, match="size must be 32 or 64, not 48"):
        render(torch.zeros(1, 5, dtype=torch.long), 48)


def test_reads_an_archive_without_its_pickled_part(tmp_path: Path) -> None:
    latents = latent_grid((0, 1, 2))[::50_001]
    images = render(latents).numpy()
    classes = np.concatenate([np.zeros((len(latents), 1), np.int64), latents.numpy()], 1)
    np.savez(
        tmp_path / "d.npz", imgs=images, latents_classes=classes, metadata=np.array({"a": 1}, dtype=object)
    )
    read, read_latents = read_archive(tmp_path / "d.npz")
    assert torch.equal(read, torch.from_numpy(images))
    assert torch.equal(read_latents, latents)


def test_a_wrong_archive_is_explained(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no dSprites archive at"):
        read_archive(tmp_path / "missing.npz")
    (tmp_path / "text.npz").write_text("not an archive")
    with pytest.raises(InputError, match="not a readable"):
        read_archive(tmp_path / "text.npz")
    good = {"imgs": np.zeros((2, 64, 64), np.uint8), "latents_classes": np.zeros((2, 6), np.int64)}
    pickled = {"latents_classes": np.array([{}, {}], dtype=object)}
    wrong: dict[str, dict[str, Any]] = {
        "lacks latents_classes": {"imgs": good["imgs"]},
        "imgs .* must be uint8": {**good, "imgs": np.zeros((2, 32, 32), np.uint8)},
        "latents_classes .* must be integers": {**good, "latents_classes": np.zeros((2, 5), np.int64)},
        "shape must be 0 to 2, not 7": {**good, "latents_classes": np.full((2, 6), 7)},
        "not a readable": {**good, **pickled},
    }
    for message, arrays in wrong.items():
        np.savez(tmp_path / "wrong.npz", **arrays)
        with pytest.raises(InputError, match=message):
            read_archive(tmp_path / "wrong.npz")
