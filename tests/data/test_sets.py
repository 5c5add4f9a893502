"""The datasets are what their papers say they are."""

from __future__ import annotations

import inspect
import os
import re
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal import models
from shoal.data import digits
from shoal.data.batch import DomainData, TensorData
from shoal.datasets import cdsprites, load, registry
from shoal.datasets.cdsprites import latent_grid, render
from shoal.datasets.digits import rotate, turn
from shoal.errors import InputError

SMALL: dict[str, dict[str, Any]] = {
    "cdsprites": {"size": 32, "per_domain": 50},
    "linear": {"per_domain": 100},
    "rotated-digits": {},
    "coloured-digits": {},
    "rotated-mnist": {"per_domain": 100},
    "coloured-mnist": {"per_domain": 100},
}
FILES = {"rotated-mnist": "mnist", "coloured-mnist": "mnist", "heart": "heart_disease"}
WITH_DOMAINS = [name for name in registry.names() if hasattr(registry.module(name), "DOMAINS")]
OWN = {"image-folder", "manifest", "table"}  # whose domains are the user's
PICTURES = {name for name in registry.names() if hasattr(registry.module(name), "LAYOUT")} | OWN
OF_WILDS = {name for name in registry.names() if hasattr(registry.module(name), "PUBLISHED")}
IN_MEMORY = [n for n in registry.names() if n not in PICTURES | OF_WILDS]  # others: test_tree, test_wilds_*


def rows(data: DomainData, split: str, domain: int) -> Tensor:
    return torch.from_numpy(data.splits[split].indices_of(domain)).long()


def need_files(name: str) -> None:
    if name not in FILES:
        return
    root = os.environ.get("SHOAL_DATA")
    if not root:
        pytest.skip(f"SHOAL_DATA is unset: no files for {name}")
    if not Path(root, FILES[name]).is_dir():
        pytest.skip(f"no files for {name} in {Path(root, FILES[name])}")


@pytest.mark.parametrize("name", IN_MEMORY)
def test_every_set_is_sound(name: str) -> None:
    """Splits are disjoint by example, batches fit what is stated of them, loading is repeatable."""
    need_files(name)
    data = load(name, **SMALL.get(name, {}))
    module = registry.module(name)
    assert module.SUMMARY
    assert "\n" not in module.SUMMARY
    assert module.PAPER
    for a, b in combinations(data.splits.values(), 2):
        assert not set(a.examples().tolist()) & set(b.examples().tolist())
    examples = data.examples
    assert isinstance(examples, TensorData)
    some = torch.from_numpy(data.splits["test"].indices_of(0)[:5]).long()
    x, y = examples.batch(some)
    assert x.shape == (5, *data.input_shape)
    assert x.dtype == torch.float32
    assert x.isfinite().all()
    if x.ndim == 4:  # images
        assert x.min() >= 0
        assert x.max() <= 1
    assert y.dtype == torch.int64
    assert set(examples.y.unique().tolist()) == set(range(data.classes or 0))
    assert torch.equal(examples[int(some[3])][0], x[3])
    assert examples[int(some[3])][1] == y[3]
    model = models.build(data.model, input_shape=data.input_shape, classes=data.classes, seed=0)
    assert model(x).shape == (5, data.classes)
    again = load(name, **SMALL.get(name, {})).examples
    assert isinstance(again, TensorData)
    assert torch.equal(again.batch(some)[0], x)


def test_sets_that_can_hold_out_any_domain_name_them() -> None:
    assert set(WITH_DOMAINS) >= {"rotated-digits", "coloured-digits", *FILES}
    for name in registry.names():
        can_hold_out = "held_out" in inspect.signature(registry.module(name).load).parameters
        assert can_hold_out == (name in WITH_DOMAINS or name in OWN), name


@pytest.mark.parametrize("name", [name for name in WITH_DOMAINS if name in IN_MEMORY])
def test_every_named_domain_can_be_held_out(name: str) -> None:
    need_files(name)
    known = registry.module(name).DOMAINS
    assert isinstance(known, tuple)
    for held_out in known:
        splits = load(name, held_out=held_out, **SMALL.get(name, {})).splits
        assert splits["test"].names == (held_out,)
        rest = tuple(domain for domain in known if domain != held_out)
        assert splits["train"].names == splits["validation"].names == rest
    with pytest.raises(InputError, match=f"unknown domain 'nowhere'.*{re.escape(known[-1])}"):
        load(name, held_out="nowhere", **SMALL.get(name, {}))


def test_unknown_names_and_options_are_named() -> None:
    with pytest.raises(InputError, match=r"unknown dataset 'cdsprite'.*'cdsprites'"):
        load("cdsprite")
    with pytest.raises(InputError, match=r"'cdsprites'.*'palete'.*'palette'.*per_domain"):
        load("cdsprites", palete="random")


# CdSprites-N


@pytest.fixture(scope="module")
def sprites() -> DomainData:
    return cdsprites.load(domains=4, size=32, per_domain=1000)


def sprite_data(data: DomainData) -> cdsprites.SpriteData:
    assert isinstance(data.examples, cdsprites.SpriteData)
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


def test_parts_are_equal_and_share_no_latents() -> None:
    parts = cdsprites.deal(491_520, 17, torch.Generator().manual_seed(3))
    assert parts.shape == (17, 491_520 // 17)
    assert len(parts.unique()) == parts.numel()


def test_hues_go_round_the_wheel_in_neighbouring_pairs() -> None:
    palette = sprite_data(cdsprites.load(domains=3, size=32, per_domain=2)).palette
    red, yellow, green, cyan, blue, magenta = palette.tolist()
    assert (red, yellow, green) == ([1, 0, 0], [1, 1, 0], [0, 1, 0])
    assert (cyan, blue, magenta) == ([0, 1, 1], [0, 0, 1], [1, 0, 1])


def test_random_palette_follows_the_seed() -> None:
    a, b, c = (
        sprite_data(cdsprites.load(domains=3, size=32, per_domain=2, palette="random", seed=s)).palette
        for s in (0, 0, 1)
    )
    assert a.shape == (6, 3)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_the_seed_reshuffles_and_per_domain_only_shortens() -> None:
    long, short, other = (
        cdsprites.load(domains=2, size=32, per_domain=n, seed=s) for n, s in ((40, 0), (10, 0), (40, 1))
    )
    for split, domain in (("train", 0), ("train", 1), ("validation", 0), ("test", 0)):
        kept = rows(long, split, domain)[:10]
        assert torch.equal(
            sprite_data(long).batch(kept)[0], sprite_data(short).batch(rows(short, split, domain))[0]
        )
    assert not torch.equal(sprite_data(long).masks, sprite_data(other).masks)


def test_small_sprites_are_every_second_pixel_of_large_ones() -> None:
    small, large = (sprite_data(cdsprites.load(domains=2, size=s, per_domain=20)) for s in (32, 64))
    everything = torch.arange(80)
    assert torch.equal(small.batch(everything)[0], large.batch(everything)[0][:, :, ::2, ::2])


def test_one_domain_and_names() -> None:
    data = cdsprites.load(domains=1, size=32, per_domain=2)
    assert [d.names for d in data.splits.values()] == [("domain 0",), ("validation",), ("test",)]
    assert data.task.domains == 1
    assert "oracle" in data.notes["validation"]


def test_sprite_data_keeps_the_interface_without_holding_images(sprites: DomainData) -> None:
    examples = sprite_data(sprites)
    assert getattr(examples, "x", None) is None
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

    made = cdsprites.SpriteData(draw, torch.zeros(4).long(), torch.zeros(2, 3), torch.zeros(4).long())
    elsewhere = made.to("meta")
    assert not asked
    assert elsewhere.masks.shape == elsewhere.masks.shape == (4, 32, 32)
    assert asked == [torch.device("meta")]


def test_an_archives_own_images_are_used(tmp_path: Path) -> None:
    latents = latent_grid((0, 1, 2))[::10_007]
    classes = np.concatenate([np.zeros((len(latents), 1), np.int64), latents.numpy()], 1)
    negative = 1 - render(latents)  # so that a drawn image cannot pass for one of these
    np.savez(tmp_path / "dsprites.npz", imgs=negative.numpy(), latents_classes=classes)
    data = cdsprites.load(domains=2, size=32, archive=tmp_path / "dsprites.npz")
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
        ({"per_domain": 1}, "per_domain must be from 2 to 40960.*not 1"),
        ({"per_domain": 40_961}, "per_domain must be from 2 to 40960.*not 40961"),
    ],
)
def test_wrong_sprite_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load("cdsprites", **options)


# The linear example


@pytest.mark.parametrize("per_domain", [100, 1000])
def test_linear_proportions_are_exact(per_domain: int) -> None:
    data = load("linear", per_domain=per_domain)
    assert isinstance(data.examples, TensorData)
    assert "validation" not in data.splits
    for d, (split, number) in enumerate((("train", 0), ("train", 1), ("test", 0))):
        x, y = data.examples.batch(rows(data, split, number))
        kinds: dict[tuple[tuple[float, ...], int], int] = {}
        for features, label in zip(x.tolist(), y.tolist(), strict=True):
            kinds[tuple(features), label] = kinds.get((tuple(features), label), 0) + 100
        x2 = tuple(float(f in (0, d + 1)) for f in range(4))
        x3 = (1.0, 0.0, 0.0, 0.0)
        shares = {((0.0,) * 4, 0): 50, (x2, 1): 40, (x3, 1): 3, (x3, 0): 7}
        assert kinds == {kind: share * per_domain for kind, share in shares.items()}
    assert data.splits["train"].names == ("D1", "D2")
    assert data.splits["test"].names == ("D3",)


@pytest.mark.parametrize("per_domain", [0, 150, -100])
def test_linear_refuses_inexact_sizes(per_domain: int) -> None:
    with pytest.raises(InputError, match=f"got {per_domain}"):
        load("linear", per_domain=per_domain)


# Digits


def test_rotation_is_counter_clockwise_and_exact_at_right_angles() -> None:
    images = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(0))
    for quarter in range(4):
        torch.testing.assert_close(
            rotate(images, 90 * quarter), torch.rot90(images, quarter, (1, 2)), atol=1e-5, rtol=0
        )


def test_turning_there_and_back_keeps_the_digit() -> None:
    upright = load("rotated-digits").examples
    assert isinstance(upright, TensorData)
    images = upright.x[0::6, 0]
    turned = rotate(images, 45)
    assert (turned.sum((1, 2)) / images.sum((1, 2)) > 0.95).all()  # the frame cuts nothing off
    assert (rotate(turned, -45) - images).abs().mean() < 0.05


@pytest.mark.parametrize("chunk", [1, 7, 20])
def test_turning_in_pieces_turns_each_image_by_its_domains_angle(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digits, "CHUNK", chunk)
    images = torch.rand(50, 9, 9, generator=torch.Generator().manual_seed(0))
    one_by_one = torch.cat([rotate(image[None], 15.0 * (i % 6)) for i, image in enumerate(images)])
    torch.testing.assert_close(turn(images), one_by_one)
    as_bytes = turn((images * 255).round().to(torch.uint8))
    assert as_bytes.dtype == torch.uint8
    assert (as_bytes - 255 * one_by_one).abs().max() <= 1.01  # rounded before and after


def test_rotated_digits_hold_out_a_fifth_and_a_domain() -> None:
    data = load("rotated-digits", held_out="30°")
    assert data.splits["test"].names == ("30°",)
    assert data.splits["train"].names == data.splits["validation"].names == ("0°", "15°", "45°", "60°", "75°")
    kept, held = data.splits["train"].sizes, data.splits["validation"].sizes
    assert kept.sum() + held.sum() + data.splits["test"].sizes.sum() == 1797
    assert (abs(held / (kept + held) - 0.2) < 0.01).all()
    assert load("rotated-digits").splits["test"].names == ("75°",)
    with pytest.raises(InputError, match="unknown domain '31°'"):
        load("rotated-digits", held_out="31°")


def test_coloured_digits_follow_their_probabilities() -> None:
    agree = dict.fromkeys(("+90%", "+80%", "-90%"), 0.0)
    for name in agree:
        data = load("coloured-digits", held_out=name, seed=1)
        assert isinstance(data.examples, TensorData)
        x, y = data.examples.batch(rows(data, "test", 0))
        light = x.sum((2, 3))
        assert (light.min(1).values == 0).all()  # one channel only
        agree[name] = float((light.argmax(1) == y).float().mean())
    # 599 examples a domain: four standard deviations are under 0.07.
    assert agree == pytest.approx({"+90%": 0.9, "+80%": 0.8, "-90%": 0.1}, abs=0.07)


def test_coloured_labels_are_noisy_and_seeded() -> None:
    first, same, other = (load("coloured-digits", seed=s).examples for s in (0, 0, 1))
    assert isinstance(first, TensorData)
    assert isinstance(same, TensorData)
    assert isinstance(other, TensorData)
    assert torch.equal(first.x, same.x)
    assert not torch.equal(first.x, other.x)
    digits = load("rotated-digits", seed=0).examples  # the same shuffle
    assert isinstance(digits, TensorData)
    assert abs(float(((digits.y < 5) != first.y).float().mean()) - 0.25) < 0.05


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match=r"needs scikit-learn: pip install 'shoal\[digits\]'"):
        load("rotated-digits")
