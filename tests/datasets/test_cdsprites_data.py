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
from shoal.datasets import cdsprites as sprites_module
from shoal.datasets.cdsprites import SpriteData, latent_grid, load, read_archive, render
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
        return sprites_module.SQUARE_HALF_SIDE * np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]])
    if shape == 1:
        return np.stack([np.cos(t), np.sin(t)], 1) * sprites_module.ELLIPSE_SEMI_AXES
    bracket = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    down = -sprites_module.HEART_HEIGHT * bracket - sprites_module.HEART_OFFSET
    return np.stack([sprites_module.HEART_HALF_WIDTH * np.sin(t) ** 3, down], 1)


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
    (tmp_path / "wrong.npz").write_text("not an archive")
    with pytest.raises(InputError, match="is not a dSprites archive"):
        read_archive(tmp_path / "wrong.npz")
    good = {"imgs": np.zeros((2, 64, 64), np.uint8), "latents_classes": np.zeros((2, 6), np.int64)}
    for changes in (
        {"latents_classes": np.array([{}, {}], dtype=object)},
        {"imgs": np.zeros((2, 32, 32), np.uint8)},
        {"latents_classes": np.zeros((2, 5), np.int64)},
        {"latents_classes": np.full((2, 6), 7)},
    ):
        np.savez(tmp_path / "wrong.npz", **{**good, **changes})
        with pytest.raises(InputError, match="is not a dSprites archive"):
            read_archive(tmp_path / "wrong.npz")


# CdSprites-N


def rows(data: DomainData, split: str, domain: int) -> Tensor:
    return torch.from_numpy(data.splits[split].indices_of(domain)).long()


@pytest.fixture(scope="module")
def sprites() -> DomainData:
    return load(domains=4, size=32, per_domain=1000)


def sprite_data(data: DomainData) -> SpriteData:
    assert isinstance(data.examples, SpriteData)
    return data.examples


def test_colour_tells_the_shape_in_every_training_domain(sprites: DomainData) -> None:
    examples = sprite_data(sprites)
    for domain in range(4):
        chosen = rows(sprites, "train", domain)
        assert torch.equal(examples.colours[chosen], 2 * domain + examples.y[chosen])
        assert 0.4 < examples.y[chosen].float().mean() < 0.6


@pytest.mark.parametrize("split", ["validation", "test"])
def test_colour_tells_nothing_elsewhere(sprites: DomainData, split: str) -> None:
    examples = sprite_data(sprites)
    chosen = rows(sprites, split, 0)
    observed = torch.zeros(8, 2)
    observed.index_put_((examples.colours[chosen], examples.y[chosen]), torch.ones(1000), accumulate=True)
    expected = observed.sum(1, keepdim=True) * observed.sum(0) / observed.sum()
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert expected.min() > 30  # every colour appears, with both shapes
    assert chi_square < 24.3  # the 99.9 % point with 7 degrees of freedom


def test_the_picture_is_the_sprite_in_its_colour(sprites: DomainData) -> None:
    examples = sprite_data(sprites)
    chosen = torch.tensor([0, 1500, 5999])
    x, y = examples.batch(chosen)
    for image, row in zip(x, chosen, strict=True):
        lit = image[:, examples.masks[row] == 1]
        assert torch.equal(lit, examples.palette[examples.colours[row], :, None].expand_as(lit))
        assert image[:, examples.masks[row] == 0].abs().sum() == 0
    assert torch.equal(y, examples.y[chosen])


def test_hues_go_round_the_wheel_in_neighbouring_pairs() -> None:
    palette = sprite_data(load(domains=3, size=32, per_domain=2)).palette
    red, yellow, green, cyan, blue, magenta = palette.tolist()
    assert (red, yellow, green) == ([1, 0, 0], [1, 1, 0], [0, 1, 0])
    assert (cyan, blue, magenta) == ([0, 1, 1], [0, 0, 1], [1, 0, 1])


def test_random_palette_follows_the_seed() -> None:
    a, b, c = (
        sprite_data(load(domains=3, size=32, per_domain=2, palette="random", seed=s)).palette
        for s in (0, 0, 1)
    )
    assert a.shape == (6, 3)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_the_seed_reshuffles_and_per_domain_only_shortens() -> None:
    long, short, other = (
        load(domains=2, size=32, per_domain=n, seed=s) for n, s in ((40, 0), (10, 0), (40, 1))
    )
    for split, domain in (("train", 0), ("train", 1), ("validation", 0), ("test", 0)):
        kept = rows(long, split, domain)[:10]
        assert torch.equal(
            sprite_data(long).batch(kept)[0], sprite_data(short).batch(rows(short, split, domain))[0]
        )
    assert not torch.equal(sprite_data(long).masks, sprite_data(other).masks)


def test_small_sprites_are_every_second_pixel_of_large_ones() -> None:
    small, large = (sprite_data(load(domains=2, size=s, per_domain=20)) for s in (32, 64))
    everything = torch.arange(80)
    assert torch.equal(small.batch(everything)[0], large.batch(everything)[0][:, :, ::2, ::2])


def test_sprite_data_is_tensor_data(sprites: DomainData) -> None:
    examples = sprite_data(sprites)
    assert torch.equal(examples.x[7], examples[7][0])
    assert len(examples) == 6000
    assert examples.to("cpu") is examples
    assert examples.masks.device.type == "cpu"  # drawn here, since nothing can be drawn on "meta"
    elsewhere = examples.to("meta")
    assert elsewhere.device == torch.device("meta")
    assert elsewhere.masks.device == elsewhere.palette.device == elsewhere.device


def test_sprites_are_drawn_once_and_where_they_are_used() -> None:
    asked: list[torch.device] = []

    def draw(device: torch.device) -> torch.Tensor:
        asked.append(device)
        return torch.zeros(4, 32, 32, dtype=torch.uint8, device=device)

    made = SpriteData(draw, torch.zeros(4).long(), torch.zeros(2, 3), torch.zeros(4).long())
    elsewhere = made.to("meta")
    assert not asked
    assert elsewhere.masks.shape == elsewhere.masks.shape == (4, 32, 32)
    assert asked == [torch.device("meta")]


def test_an_archives_own_images_are_used(tmp_path: Path) -> None:
    latents = latent_grid((0, 1, 2))[::10_007]
    classes = np.concatenate([np.zeros((len(latents), 1), np.int64), latents.numpy()], 1)
    negative = 1 - render(latents)  # so that a drawn image cannot pass for one of these
    np.savez(tmp_path / "dsprites.npz", imgs=negative.numpy(), latents_classes=classes)
    data = load(domains=2, size=32, archive=tmp_path / "dsprites.npz")
    examples = sprite_data(data)
    assert len(examples) == int((latents[:, 0] < 2).sum()) // 4 * 4
    known = {
        (image.numpy().tobytes(), int(shape))
        for image, shape in zip(negative[:, ::2, ::2], latents[:, 0], strict=True)
    }
    assert {(m.numpy().tobytes(), int(y)) for m, y in zip(examples.masks, examples.y, strict=True)} <= known


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"domains": 0},
            "domains of dataset 'cdsprites' must be ",
        ),
        ({"domains": 400_000}, "400000 do not"),
        ({"size": 28}, "size of dataset 'cdsprites' must be 64 or 32, got 28"),
        ({"palette": "adjacnt"}, "must be 'adjacent' or 'random', got 'adjacnt'. Did you mean 'adjacent'"),
        ({"per_domain": 1}, r"per_domain must be from 2 to 40960, .*not 1"),
        ({"per_domain": 40_961}, r"per_domain must be from 2 to 40960, .*not 40961"),
    ],
)
def test_wrong_sprite_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        datasets.load("cdsprites", **options)
