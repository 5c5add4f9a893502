"""Image files as examples: what is decoded, what is random, and what happens to broken ones."""

from __future__ import annotations

import colorsys
import json
import os
import pickle
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shoal.api.data import check
from shoal.data.augment import UNCHANGED, Augment, Chances, recolour_batch, turn_hue
from shoal.data.batch import MetaBatch
from shoal.data.domains import Domains
from shoal.data.images import (
    DEVIATION,
    MEAN,
    TRAIN,
    ImageFiles,
    ToTensor,
    by_chunks,
    decode,
    image_data,
    inspect_files,
    split_files,
)
from shoal.data.loader import MetaBatchLoader
from shoal.data.sampler import DomainBatchSampler
from shoal.data.sets import load
from shoal.data.tree import FileList, read_tree
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.protocol import resplit
from shoal.experiments.run import _finished_on_device, prepare, run

RED = (200, 40, 10)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def plant(root: Path, domains: int = 3, classes: int = 2, each: int = 6, side: int = 80) -> Path:
    """Different images in root/domain/class."""
    for d in range(domains):
        for c in range(classes):
            folder = root / f"place {d}" / f"kind {c}"
            folder.mkdir(parents=True)
            for i in range(each):
                noise(side, side - 10, seed=100 * d + 10 * c + i).save(folder / f"{i}.jpg", quality=95)
    return root


def only(path: Path, **options: Any) -> ImageFiles:
    return ImageFiles(FileList.of(path.parent, [(path.name, "here", "thing")]), **options)


def pixels(examples: ImageFiles, index: int = 0) -> torch.Tensor:
    """An example as numbers 0..255 again."""
    return (examples[index][0] - examples.to_tensor.shift) / examples.to_tensor.scale


# Decoding


@pytest.mark.parametrize(
    "mode", ["P", "L", "RGBA", "LA", "1", "RGB", "CMYK jpeg", "L jpeg", "RGB webp", "RGB bmp"]
)
def test_every_kind_of_picture_becomes_rgb(mode: str, tmp_path: Path) -> None:
    mode, _, kind = mode.partition(" ")
    grey = mode in ("L", "LA", "1")
    picture = Image.new("RGB", (40, 30), (255, 255, 255) if grey else RED).convert(mode)
    picture.save(tmp_path / f"a.{kind or 'png'}")
    found = pixels(only(tmp_path / f"a.{kind or 'png'}", size=16))
    assert found.shape == (3, 16, 16)
    wanted = torch.tensor([255.0] * 3 if grey else RED)
    assert (found - wanted[:, None, None]).abs().max() < 12  # palettes and JPEGs are only near it


def test_sixteen_bits_keep_their_upper_eight(tmp_path: Path) -> None:
    grey = np.full((20, 20), 40_000, np.uint16)
    Image.fromarray(grey).save(tmp_path / "a.png")
    assert torch.allclose(pixels(only(tmp_path / "a.png", size=8)), torch.tensor(40_000.0 // 256), atol=1e-3)


def test_sixteen_bits_are_scaled_and_not_cut_off(tmp_path: Path) -> None:
    grey = np.linspace(0, 65_535, 32 * 32).astype(np.uint16).reshape(32, 32)
    Image.fromarray(grey).save(tmp_path / "a.png")
    found = pixels(only(tmp_path / "a.png", size=32))
    for channel in found:
        assert np.allclose(channel, grey >> 8, atol=1e-3)


@pytest.mark.parametrize("transparency", [None, 3, bytes(range(0, 256, 16))])
def test_a_palette_keeps_its_colours_and_nothing_is_said(transparency: Any, tmp_path: Path) -> None:
    picture = noise(32, 32).quantize(16)
    about = {} if transparency is None else {"transparency": transparency}
    picture.save(tmp_path / "a.png", **about)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = pixels(only(tmp_path / "a.png", size=32))
    assert np.allclose(found.permute(1, 2, 0), np.asarray(picture.convert("RGB")), atol=1e-3)


@pytest.mark.parametrize("kind", ["webp", "png"])
def test_of_several_frames_the_first_counts(kind: str, tmp_path: Path) -> None:
    first, others = noise(32, 32), [noise(32, 32, seed) for seed in (1, 2)]
    options = {"lossless": True} if kind == "webp" else {}
    first.save(tmp_path / f"a.{kind}", save_all=True, append_images=others, **options)
    with Image.open(tmp_path / f"a.{kind}") as image:
        assert image.n_frames == 3  # type: ignore[attr-defined]
    found = pixels(only(tmp_path / f"a.{kind}", size=32))
    assert np.allclose(found.permute(1, 2, 0), np.asarray(first), atol=1e-3)


def test_pictures_are_normalised_as_asked(tmp_path: Path) -> None:
    Image.new("RGB", (40, 30), RED).save(tmp_path / "a.png")
    x, y = only(tmp_path / "a.png")[0]
    assert (x.shape, x.dtype, y) == ((3, 224, 224), torch.float32, 0)
    for c in range(3):
        assert x[c].mean().item() == pytest.approx((RED[c] / 255 - MEAN[c]) / DEVIATION[c], abs=1e-5)
    x, _ = only(tmp_path / "a.png", mean=(0, 0, 0), deviation=(1, 1, 1))[0]
    assert x[0].mean().item() == pytest.approx(RED[0] / 255, abs=1e-5)


def test_pictures_are_squashed_with_antialiasing_and_exif_is_left_alone(tmp_path: Path) -> None:
    picture = noise(300, 100)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    picture.save(tmp_path / "a.png", exif=exif)
    wanted = np.asarray(picture.resize((32, 32), Image.Resampling.BILINEAR), np.float32)
    assert np.allclose(pixels(only(tmp_path / "a.png", size=32)).permute(1, 2, 0), wanted, atol=1e-3)


def test_a_large_jpeg_is_decoded_small_and_looks_the_same(tmp_path: Path) -> None:
    noise(1600, 1200).save(tmp_path / "a.jpg", quality=90)
    image, box = decode(str(tmp_path / "a.jpg"), 224)
    assert image.size == (400, 300)
    full = Image.open(tmp_path / "a.jpg").convert("RGB").resize((224, 224), Image.Resampling.BILINEAR)
    gap = np.abs(np.asarray(ToTensor(224).resize(image, box), np.float32) - np.asarray(full, np.float32))
    assert gap.mean() < 1
    assert gap.max() < 8
    part, box = decode(str(tmp_path / "a.jpg"), 224, lambda width, height: (400, 300, 800, 600))
    assert part.size == (1600, 1200)  # half of it would have too few pixels in that part
    assert box == (400, 300, 800, 600)
    part, box = decode(str(tmp_path / "a.jpg"), 100, lambda width, height: (400, 300, 800, 600))
    assert part.size == (800, 600)
    assert box == (200, 150, 400, 300)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 4}, "size of ImageFiles must be at least 8, got 4"),
        ({"size": 32.5}, "size of .* got 32.5"),
        ({"bad": "skp"}, "bad of ImageFiles must be 'stop' or 'skip', got 'skp'"),
        ({"cache": "yes"}, "cache of .* got 'yes'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        only(tmp_path / "a.png", **options)


def test_without_pillow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(InputError, match=r"requires Pillow: pip install 'shoal\[images\]'"):
        only(tmp_path / "a.png")


# Random changes


def test_only_training_pictures_are_changed_and_none_for_evaluation(tmp_path: Path) -> None:
    files = read_tree(plant(tmp_path))
    data = image_data(files, split_files(files, "place 1", 0), size=32)
    still = image_data(files, data.splits, size=32, augment=False).examples
    assert data.splits["test"].names == ("place 1",)
    for name, domains in data.splits.items():
        for i in domains.examples().tolist():
            same = torch.equal(data.examples[i][0], still[i][0])
            assert same == (name != "train"), (name, i)
            assert torch.equal(data.examples.evaluation()[i][0], still[i][0])  # type: ignore[attr-defined]


def test_split_anew_the_new_training_pictures_are_changed(tmp_path: Path) -> None:
    data = load("image-folder", folder=str(plant(tmp_path)), size=32)
    anew = resplit(data, [data.splits["train"].names[0]], 0)
    examples: Any = anew.examples
    for split, domains in anew.splits.items():
        for index in domains.examples()[:4].tolist():
            torch.manual_seed(1)
            changed = not torch.equal(examples[index][0], examples.evaluation()[index][0])
            assert changed is (split == "train")


def test_with_augment_validation_images_of_training_domains_are_scored_changed(tmp_path: Path) -> None:
    """As in DomainBed: in- and out-splits of training domains, and never those of held-out ones."""
    options: dict[str, Any] = {"folder": str(plant(tmp_path)), "size": 32}
    data = load("image-folder", augment_validation=True, seed=4, **options)
    anew = resplit(data, [data.splits["train"].names[0]], 0)
    assert list(anew.splits) == ["train", "validation", "test", "oracle"]
    still = load("image-folder", augment=False, augment_validation=True, **options).examples
    other = resplit(load("image-folder", augment_validation=True, seed=5, **options), ["place 0"], 0)
    examples: Any = anew.examples
    scored, differently = examples.evaluation(), other.examples.evaluation()  # type: ignore[attr-defined]
    seen = []
    for split, domains in anew.splits.items():
        for index in domains.examples().tolist():
            image = scored[index][0]
            assert torch.equal(image, still[index][0]) is (split in ("test", "oracle"))
            torch.manual_seed(index)  # whatever was drawn before
            assert torch.equal(scored[index][0], image)
            assert torch.equal(differently[index][0], image) is (split in ("test", "oracle"))
            seen.append(split)
            if split != "train":  # nothing but training images are changed where they are trained on
                assert torch.equal(examples[index][0], still[index][0])
    assert set(seen) == set(anew.splits)
    one, two = (scored.augment.draw(scored._generator(i)) for i in (0, 1))
    assert one != two


def test_the_changes_of_a_validation_image_are_those_of_training(tmp_path: Path) -> None:
    """The same crop, colours and so on for the same numbers."""
    files = read_tree(plant(tmp_path))
    splits = split_files(files, "place 1", 0)
    data = image_data(files, splits, size=32, augment_validation=True, seed=2)
    examples: Any = data.examples
    index = int(splits["train"].examples()[3])
    chances = examples.augment.draw(examples._generator(index))
    image = Image.open(files.path(index)).convert("RGB")
    box = examples.augment.box(chances, *image.size)
    changed = examples.augment.recolour(chances, examples.to_tensor.resize(image, box))
    assert torch.equal(examples.evaluation()[index][0], examples.to_tensor.numbers(changed))


def drawn(examples: ImageFiles, domains: Domains, workers: int, start: int = 0) -> list[list[MetaBatch]]:
    sampler = DomainBatchSampler(domains, 4, 2, seed=3, steps=6)
    loader = MetaBatchLoader(examples, sampler, workers=workers, start=start, stop=4)
    return [batch.split() for batch in loader]


def test_changes_depend_on_seed_step_and_place_only(tmp_path: Path) -> None:
    files = read_tree(plant(tmp_path))
    data = image_data(files, split_files(files, "place 2", 0), size=32)
    train = data.splits["train"]
    examples: Any = data.examples
    torch.manual_seed(1)
    first = drawn(examples, train, 0)
    torch.manual_seed(2)
    for other in (drawn(examples, train, 1), drawn(examples, train, 2)):
        for a, b in zip(first, other, strict=True):
            assert all(torch.equal(p.x, q.x) and torch.equal(p.y, q.y) for p, q in zip(a, b, strict=True))
    assert torch.equal(drawn(examples, train, 0, start=3)[0][1].x, first[3][1].x)
    assert not torch.equal(first[0][0].x, first[2][0].x)


def test_crops_have_the_area_and_shape_asked_for() -> None:
    torch.manual_seed(0)
    augment = Augment()
    shares = []
    for _ in range(300):
        left, top, right, bottom = augment.box(augment.draw(), 400, 300)
        assert 0 <= left < right <= 400
        assert 0 <= top < bottom <= 300
        shares.append((right - left) * (bottom - top) / 120_000)
    assert min(shares) > 0.69
    assert max(shares) > 0.95
    assert 0.75 < np.mean(shares) < 0.9


def test_a_crop_of_a_stripe_is_its_middle() -> None:
    augment = Augment()
    assert augment.box(augment.draw(), 1000, 30) == (480, 0, 520, 30)
    assert augment.box(augment.draw(), 30, 1000) == (0, 480, 30, 520)


def test_each_change_happens_as_often_as_it_should() -> None:
    torch.manual_seed(0)
    augment = Augment()
    chances = [augment.draw() for _ in range(1000)]
    assert 430 < sum(c.flip < augment.flip for c in chances) < 570
    assert 65 < sum(c.grey < augment.grey for c in chances) < 140
    assert len({tuple(c.order) for c in chances}) == 24
    one = chances[0]._replace(flip=0.9, grey=0.9)
    picture = noise(20, 20)
    still = Augment(jitter=0).recolour(one, picture)
    assert np.array_equal(still, picture)
    assert not np.array_equal(augment.recolour(one, picture), picture)
    mirrored = Augment(jitter=0).recolour(one._replace(flip=0.1), picture)
    assert np.array_equal(mirrored, np.asarray(picture)[:, ::-1])
    grey = np.asarray(Augment(jitter=0).recolour(one._replace(grey=0.05), picture))
    assert np.array_equal(grey[..., 0], grey[..., 2])


def test_colours_change_as_torchvision_changes_them() -> None:
    """Brightness by a factor; hue by a part of the circle, here a third: red becomes green."""
    one = Augment().draw()._replace(flip=0.9, grey=0.9, order=[0, 1, 2, 3], colours=[1.0, 0.5, 0.5, 0.5])
    bright = np.asarray(Augment().recolour(one, Image.new("RGB", (4, 4), (100, 50, 10))))
    assert np.abs(bright.astype(int) - (130, 65, 13)).max() <= 2
    green = Augment(jitter=1 / 3).recolour(
        one._replace(colours=[0.5, 0.5, 0.5, 1.0]), Image.new("RGB", (4, 4), (200, 0, 0))
    )
    assert np.abs(np.asarray(green).astype(int) - (0, 200, 0)).max() <= 3


def test_hues_turn_as_by_pillow_to_the_last_bit() -> None:
    """Of a third of all reds, greens and blues, there and back through HSV."""
    every = np.arange(0, 256, 3, dtype=np.uint8)
    colours = np.stack(np.meshgrid(every, every, every, indexing="ij"), -1).reshape(len(every) ** 2, -1, 3)
    picture = Image.fromarray(colours)
    for turn in (-0.3, 0.0, 0.004, 0.17, 0.3):
        hue, saturation, value = picture.convert("HSV").split()
        moved = hue.point([(i + int(255 * turn)) % 256 for i in range(256)])
        wanted = Image.merge("HSV", (moved, saturation, value)).convert("RGB")
        assert np.array_equal(turn_hue(picture, turn), wanted)


# On the device


def recoloured(augment: Augment, chances: Chances, image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """One image (3, h, w) of floats 0..255, a change and a pixel at a time."""
    image = image[:, :, ::-1] if chances.flip < augment.flip else image
    for which in chances.order:
        by = augment.jitter * (2 * chances.colours[which] - 1)
        grey = 0.299 * image[0] + 0.587 * image[1] + 0.114 * image[2]
        if which < 3:
            start = (0.0, grey.mean(), grey)[which]
            image = np.clip(start + (1 + by) * (image - start), 0, 255)
            continue
        changed = np.empty_like(image)
        for i, j in np.ndindex(*image.shape[1:]):
            hue, saturation, value = colorsys.rgb_to_hsv(*image[:, i, j] / 255)
            changed[:, i, j] = 255 * np.array(colorsys.hsv_to_rgb((hue + by) % 1, saturation, value))
        image = changed
    if chances.grey < augment.grey:
        image = np.broadcast_to(0.299 * image[0] + 0.587 * image[1] + 0.114 * image[2], image.shape)
    return image


def some_pictures(count: int, side: int = 9) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    found = torch.randint(0, 256, (count, 3, side, side), generator=draw, dtype=torch.uint8)
    found[0, :, 0], found[1] = 77, 0  # greys have no hue
    return found


@pytest.mark.parametrize("augment", [Augment(), Augment(jitter=0.0), Augment(jitter=0.5, flip=1.0, grey=0.5)])
def test_a_batch_is_recoloured_as_its_images_one_by_one(augment: Augment) -> None:
    draw = torch.Generator().manual_seed(1)
    pictures, chances = some_pictures(40), [augment.draw(draw) for _ in range(40)]
    changes = torch.tensor([augment.changes(each) for each in chances], dtype=torch.float64)
    found = recolour_batch(pictures, changes).numpy()
    for n, each in enumerate(chances):
        assert np.allclose(found[n], recoloured(augment, each, pictures[n].double().numpy()), atol=1e-8)
    single = recolour_batch(pictures, changes.float())
    assert (single - torch.from_numpy(found)).abs().max() < 0.01


def test_changes_of_nothing() -> None:
    pictures = some_pictures(3)
    found = recolour_batch(pictures, torch.tensor([UNCHANGED] * 3))
    assert (found - pictures).abs().max() < 1e-3


def test_colours_on_the_device_are_those_of_pillow_up_to_rounding(tmp_path: Path) -> None:
    """Which keeps hue and saturation as whole numbers."""
    files = read_tree(plant(tmp_path))
    data = image_data(files, split_files(files, "place 1", 0), size=32, augment_validation=True)
    examples: Any = data.examples
    for view in (examples, examples.evaluation()):
        ours = view.on_device()
        for index in data.splits["train"].examples()[:8].tolist():
            torch.manual_seed(index)
            expected, label = view[index]
            torch.manual_seed(index)
            x, same = ours[index]
            assert same == label
            assert x[0].dtype == torch.uint8
            difference = (ours.finish(x) - expected).abs() / examples.to_tensor.scale
            assert difference.mean() < 4
            assert difference.quantile(0.99) < 16


@pytest.mark.parametrize("augment", [True, False])
def test_evaluated_images_are_the_same_on_the_device(augment: bool, tmp_path: Path) -> None:
    files = read_tree(plant(tmp_path))
    data = image_data(files, split_files(files, "place 1", 0), size=32, augment=augment)
    view: Any = data.examples.evaluation()  # type: ignore[attr-defined]
    sampler = DomainBatchSampler(data.splits["train"], 4, 2, steps=2)
    plain, ours = (list(MetaBatchLoader(e, sampler, stop=2)) for e in (view, view.on_device()))
    for a, b in zip(plain, ours, strict=True):
        assert b.x.dtype == torch.float32
        assert (a.x - b.x).abs().max() <= 1e-6


def test_changes_on_the_device_depend_on_seed_step_and_place_only(tmp_path: Path) -> None:
    files = read_tree(plant(tmp_path))
    data = image_data(files, split_files(files, "place 2", 0), size=32)
    train, examples = data.splits["train"], data.examples.on_device()  # type: ignore[attr-defined]
    first = drawn(examples, train, 0)
    for other in (drawn(examples, train, 1), drawn(examples, train, 2)):
        for a, b in zip(first, other, strict=True):
            assert all(torch.equal(p.x, q.x) and torch.equal(p.y, q.y) for p, q in zip(a, b, strict=True))
    assert torch.equal(drawn(examples, train, 0, start=3)[0][1].x, first[3][1].x)
    assert not torch.equal(first[0][0].x, first[2][0].x)


def test_a_whole_run_with_images_finished_on_the_device(tmp_path: Path) -> None:
    options = {"folder": str(plant(tmp_path / "images")), "size": 16, "held_out": "place 2"}
    plain = RunConfig("image-folder", "fish", 3, data_options={**options, "augment": False}, batch_size=4)
    ours = replace(plain, data_options={**plain.data_options, "augment_on": "device"})
    assert not prepare(plain, "cpu").setup.examples.raw
    assert prepare(ours, "cpu").setup.examples.raw
    one, two = run(plain, "cpu", folder=tmp_path / "plain"), run(ours, "cpu", folder=tmp_path / "ours")
    losses = [[point["loss"] for point in record.history] for record in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    about = [json.loads((tmp_path / name / "inputs.json").read_text()) for name in ("plain", "ours")]
    assert about[0] == about[1]
    changed = replace(ours, data_options={**ours.data_options, "augment": True})
    assert run(changed, "cpu").status == "finished"


@pytest.mark.parametrize(
    ("device", "fields", "asked", "raw"),
    [
        ("cuda", {"weights": "file.pt"}, None, True),
        ("cuda", {"weights": "file.pt"}, "cpu", False),
        ("cuda", {"weights": "file.pt", "memory_format": "contiguous"}, None, False),
        ("cuda", {}, None, False),
        ("cpu", {"weights": "file.pt"}, None, False),
        ("cpu", {}, "device", True),
    ],
)
def test_where_images_are_finished(
    device: str, fields: dict[str, Any], asked: Any, raw: bool, tmp_path: Path
) -> None:
    files = read_tree(plant(tmp_path, each=2))
    data = image_data(files, split_files(files, "place 1", 0), size=16, augment_on=asked)
    config = RunConfig("image-folder", "erm", 3, **fields)
    examples: Any = _finished_on_device(config, data, torch.device(device)).examples
    assert examples.raw is raw


# Broken files


def broken(folder: Path) -> dict[str, Path]:
    """One file of every kind of damage, with names of ordinary images."""
    noise(80, 70).save(folder / "b-cut.jpg", quality=95)
    content = (folder / "b-cut.jpg").read_bytes()
    (folder / "b-cut.jpg").write_bytes(content[: len(content) // 2])
    (folder / "b-empty.jpg").write_bytes(b"")
    (folder / "b-text.jpg").write_text("this is not an image\n")
    noise(80, 70).save(folder / "b-cut.png")
    (folder / "b-cut.png").write_bytes((folder / "b-cut.png").read_bytes()[:300])
    return {p.name: p for p in folder.glob("b-*")}


@pytest.mark.parametrize("name", ["b-cut.jpg", "b-empty.jpg", "b-text.jpg", "b-cut.png"])
def test_a_broken_file_stops_with_its_path(name: str, tmp_path: Path) -> None:
    paths = broken(tmp_path)
    with pytest.raises(InputError, match=rf"{name}' cannot be read \(.*skip"):
        only(paths[name])[0]
    with pytest.raises(InputError, match=rf"{name}' cannot be read"):
        only(paths[name], cache=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_stops_with_its_path(tmp_path: Path) -> None:
    noise(20, 20).save(tmp_path / "a.png")
    (tmp_path / "a.png").chmod(0)
    with pytest.raises(InputError, match=r"a.png' cannot be read \(PermissionError"):
        only(tmp_path / "a.png")[0]


@pytest.mark.parametrize("cache", [False, True])
def test_a_skipped_file_gives_way_to_the_next_of_its_kind(cache: bool, tmp_path: Path) -> None:
    broken(plant(tmp_path) / "place 0" / "kind 1")
    files = read_tree(tmp_path)
    names = [files.name(i) for i in range(len(files))]
    start = names.index("place 0/kind 1/b-cut.jpg")
    split = np.ones(len(files), np.uint8)
    split[names.index("place 0/kind 1/0.jpg")] = 2  # not of the same split, so it must not step in
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        examples = ImageFiles(files, split, size=16, bad="skip", cache=cache)
        for i in range(start, start + 4):
            x, y = examples[i]
            assert y == 1
            assert torch.equal(x, examples[names.index("place 0/kind 1/1.jpg")][0])
    assert len(told) == 4  # each file once, though several passed it
    assert {n for n in names if "b-" in n} == {n for n in names if any(n in str(w.message) for w in told)}


def test_skipping_is_the_same_in_any_number_of_workers_and_in_any_order(tmp_path: Path) -> None:
    """A file known to be bad and one still unknown must lead to the same random numbers."""
    for d in range(3):
        broken(plant(tmp_path / str(d), 1) / "place 0" / "kind 0")
    files = FileList.of(
        tmp_path,
        [(str(p.relative_to(tmp_path)), p.parts[-4], p.parts[-2]) for p in sorted(tmp_path.rglob("*.jpg"))],
    )
    domains = Domains.from_indices(files.indices())
    split = np.full(len(files), TRAIN, np.uint8)
    seen = []
    for workers in (0, 1, 2):
        examples = ImageFiles(files, split, size=16, augment=Augment(), bad="skip")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen.append(drawn(examples, domains, workers))
            again = drawn(examples, domains, 0)
        assert torch.equal(again[0][0].x, seen[-1][0][0].x)
    for other in seen[1:]:
        for a, b in zip(seen[0], other, strict=True):
            assert all(torch.equal(p.x, q.x) for p, q in zip(a, b, strict=True))


def test_a_class_of_which_nothing_can_be_read_gives_way_to_another_of_its_domain(tmp_path: Path) -> None:
    """Never to another split: what is trained on would be scored."""
    (tmp_path / "0.png").write_bytes(b"")
    for i in range(1, 5):
        noise(20, 20, i).save(tmp_path / f"{i}.png")
    kinds = [("0.png", "a", "rare"), ("1.png", "a", "rare"), ("2.png", "b", "usual"), ("3.png", "a", "usual")]
    files = FileList.of(tmp_path, [*kinds, ("4.png", "a", "usual")])
    split = np.array([2, 1, 2, 1, 2], np.uint8)
    examples = ImageFiles(files, split, size=16, bad="skip", cache=False)
    with pytest.warns(UserWarning, match=r"0.png' is skipped"):
        x, y = examples[0]
    assert torch.equal(x, examples[4][0])
    assert files.classes[y] == "usual"


def test_a_kind_of_which_nothing_can_be_read_stops(tmp_path: Path) -> None:
    paths = broken(tmp_path)
    files = FileList.of(tmp_path, [(name, "here", "thing") for name in sorted(paths)])
    examples = ImageFiles(files, bad="skip")
    for _ in range(2):  # the second time all are known
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(InputError, match=r"b-cut.jpg.*nor can any other"):
                examples[0]


def odd_folder(root: Path) -> dict[str, set[str]]:
    """Every kind of file that people have in a folder of images, and what is wrong with which."""
    plant(root, each=2)
    place = root / "place 1" / "kind 0"
    bad = {f"place 1/kind 0/{name}" for name in broken(place)}
    picture = noise(80, 70)
    picture.quantize(16).save(place / "palette.png")
    picture.quantize(16).save(place / "palette-clear.png", transparency=bytes(range(0, 256, 16)))
    picture.convert("CMYK").save(place / "cmyk.jpg", quality=95)
    Image.fromarray(np.full((70, 80), 40_000, np.uint16)).save(place / "deep.png")
    turned = Image.Exif()
    turned[0x0112] = 6
    picture.save(place / "turned.jpg", exif=turned)
    picture.save(place / "moving.webp", save_all=True, append_images=[noise(80, 70, 5)], lossless=True)
    picture.save(place / "moving.gif", save_all=True, append_images=[noise(80, 70, 5)])
    (place / "notes.txt").write_text("seen in May\n")
    noise(80, 70, 7).save(root / "place 2" / "kind 1" / "7.jpg")
    for path in (root / "place 0" / "kind 1").iterdir():
        path.unlink()
    return {"unreadable": bad, "ignored": {"place 1/kind 0/moving.gif", "place 1/kind 0/notes.txt"}}


def read_all(examples: Any) -> list[str]:
    """Twice; what cannot be read."""
    stopped = []
    for _ in range(2):
        for i in range(len(examples)):
            try:
                x, _ = examples[i]
                assert torch.isfinite(x).all()
            except InputError as error:
                stopped.append(str(error))
    return stopped


@pytest.mark.parametrize("bad", ["stop", "skip"])
def test_whatever_lies_in_a_folder_is_told_once_with_its_path(bad: str, tmp_path: Path) -> None:
    wrong = odd_folder(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = load("image-folder", folder=str(tmp_path), size=16, bad=bad, augment=False)
        stopped = read_all(data.examples)
    told = [str(w.message) for w in caught]
    assert sum("ignored: image extensions are" in text for text in told) == 1
    assert sum(any(name in text for name in wrong["ignored"]) for text in told) == 1
    assert sum("no image of class 'kind 1' in 'place 0'" in text for text in told) == 1
    said = [text for text in (stopped if bad == "stop" else told) if "ignored" not in text]
    for name in wrong["unreadable"]:
        assert sum(repr(str(tmp_path / name)) in text for text in said) == (2 if bad == "stop" else 1), name
    assert len(stopped) == (2 * len(wrong["unreadable"]) if bad == "stop" else 0)
    assert len(told) == 2 + (len(wrong["unreadable"]) if bad == "skip" else 0)


def test_a_training_stops_at_a_broken_file_or_tells_each_once(tmp_path: Path) -> None:
    """In a process of its own, and read by two workers: what people see."""
    plant(tmp_path / "data", each=4)
    bad = [tmp_path / "data" / f"place {d}" / "kind 1" / "1.jpg" for d in range(3)]
    for path in bad:
        path.write_bytes(path.read_bytes()[:300])
    command = [sys.executable, "-m", "shoal", "train", "erm", str(tmp_path / "data"), "--steps", "6"]
    command += ["--batch-size", "4", "--eval-every", "3", "--workers", "2", "--device", "cpu"]
    command += ["--data-options.size", "16"]

    def said(*more: str) -> tuple[int, list[int]]:
        done = subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert "Traceback" not in done.stderr
        return done.returncode, [done.stderr.count(str(path)) for path in bad]

    code, told = said()
    assert (code, sum(told)) == (2, 1)
    assert said("--bad-images", "skip") == (0, [1, 1, 1])


def test_the_check_names_whatever_lies_in_a_folder(tmp_path: Path) -> None:
    wrong = odd_folder(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = check(tmp_path, workers=1).to_dict()
    assert set(report["unreadable"]) == wrong["unreadable"]
    assert report["lacking"] == [{"domain": "place 0", "class": "kind 1"}]
    assert report["problems"] == [f"images that cannot be read: {len(wrong['unreadable'])}"]
    (told,) = [str(w.message) for w in caught]
    assert any(name in told for name in wrong["ignored"])
    assert "and 1 more ignored" in told


# In memory


def test_small_pictures_are_kept_and_large_ones_are_not(tmp_path: Path) -> None:
    small = read_tree(plant(tmp_path / "small", side=40))
    large = read_tree(plant(tmp_path / "large", side=80))
    kept, read = ImageFiles(small, size=24), ImageFiles(small, size=24, cache=False)
    assert kept.kept is not None
    assert read.kept is None
    assert ImageFiles(large, size=24).kept is None
    for i in range(len(small)):
        assert torch.equal(kept[i][0], read[i][0])
    again = pickle.loads(pickle.dumps(kept))
    for path in (tmp_path / "small").rglob("*.jpg"):
        path.unlink()
    assert torch.equal(again[5][0], kept[5][0])


def test_what_does_not_fit_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = read_tree(plant(tmp_path, side=40))
    one = 3 * 40 * 30
    monkeypatch.setattr("shoal.data.images.KEPT", 3 * 64 * 64 * len(files))
    assert ImageFiles(files, size=16).kept is not None
    monkeypatch.setattr("shoal.data.images.KEPT", 3 * 64 * 64 * len(files) - 1)
    assert ImageFiles(files, size=16).kept is None
    assert ImageFiles(files, size=16, cache=True).kept is not None
    kept = ImageFiles(files, size=16, cache=True)._keep(limit=5 * one)
    assert kept is None


# The scan


@pytest.mark.parametrize("workers", [0, 2])
def test_inspection_finds_broken_and_equal_files(workers: int, tmp_path: Path) -> None:
    plant(tmp_path)
    broken(tmp_path / "place 1" / "kind 0")
    twin = tmp_path / "place 2" / "kind 0" / "twin.jpg"
    twin.write_bytes((tmp_path / "place 0" / "kind 0" / "3.jpg").read_bytes())
    files = read_tree(tmp_path)
    told: list[int] = []
    found = inspect_files(files, workers, told.append)
    assert told[-1] == len(files) == 41
    assert sorted(files.name(i).rsplit("/", 1)[1] for i in found.unreadable) == [
        "b-cut.jpg",
        "b-cut.png",
        "b-empty.jpg",
        "b-text.jpg",
    ]
    assert [[files.name(i) for i in g] for g in found.duplicates] == [
        ["place 0/kind 0/3.jpg", "place 2/kind 0/twin.jpg"]
    ]


def killed(state: object, chunk: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_one_clear_error() -> None:
    with pytest.raises(InputError, match=r"a worker process was killed.*fewer workers"):
        list(by_chunks(killed, None, range(3), 1))
    assert list(by_chunks(lambda state, chunk: (state, list(chunk)), "x", range(300), 0))[1][1][-1] == 299
