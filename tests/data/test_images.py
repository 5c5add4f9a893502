"""Image files: which there are, how they are decoded, what is random, and what happens to broken ones."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import shoal
from shoal import datasets
from shoal.data.images import (
    DEVIATION,
    MEAN,
    Augment,
    ImageFiles,
    Unreadable,
    decode,
    domain_folders,
    image_frame,
    inspect_files,
    read_folders,
    recolour,
    split_files,
    to_rgb,
)
from shoal.data.loader import MetaBatchLoader
from shoal.data.sampler import DomainBatchSampler
from shoal.errors import InputError

RED = (200, 40, 10)


def noise(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, len(mode)), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def plant(root: Path, names: str = "abc", each: int = 6, side: int = 80) -> Path:
    """Different images of two classes in each of the domains."""
    for d, name in enumerate(names):
        for c in range(2):
            folder = root / name / f"kind {c}"
            folder.mkdir(parents=True)
            for i in range(each):
                noise(side, side - 10, seed=100 * d + 10 * c + i).save(folder / f"{i}.jpg", quality=95)
    return root


def only(path: Path, **options: Any) -> ImageFiles:
    return ImageFiles(image_frame([(str(path), "here", "thing")]), **options)


def pixels(examples: ImageFiles, index: int = 0) -> Tensor:
    """An example as numbers 0..255 again, (h, w, 3)."""
    x = (examples[index][0] - examples.to_tensor.shift) / examples.to_tensor.scale
    return x.permute(1, 2, 0)


# Which there are


def test_folders_are_read_in_natural_order(tmp_path: Path) -> None:
    """Numbers by their value; other files and missing classes are mentioned once, hidden files never."""
    for place in (
        "9/2/a.jpg",
        "10/10/b.PNG",
        "10/2/c.jpg",
        "10/2/notes.txt",
        "9/2/.x.jpg",
        "1/2/Thumbs.db",
        "1/2/d.bmp",
    ):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch()
    with pytest.warns(UserWarning, match=r"ignored|no image") as caught:
        files = read_folders(tmp_path)
    names = [os.path.relpath(p, tmp_path) for p in files["path"]]
    assert names == [
        "1/2/d.bmp",
        "9/2/a.jpg",
        "10/2/c.jpg",
        "10/10/b.PNG",
    ]
    assert list(files["domain"].cat.categories) == ["1", "9", "10"]
    assert list(files["label"].cat.categories) == ["2", "10"]
    first, second = (str(w.message) for w in caught)
    assert "notes.txt' ignored" in first
    assert "no image of class '10' in '1', '10' in '9'" in second
    assert split_files(image_frame([("x", d, "y") for d in ("1", "10", "9") * 9]), None, 0)["test"].names == (
        "10",
    )  # the last in natural order


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (
            ["train/oslo/x/a.jpg", "test/oslo/x/a.jpg"],
            r"test/, train/ .* look like splits",
        ),
        (["oslo/a.jpg"], "no image in the class folders of .*oslo"),
        ([], "there is no image in the class folders"),
    ],
)
def test_wrong_folders_are_named(places: list[str], message: str, tmp_path: Path) -> None:
    for place in places:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch()
    with pytest.raises(InputError, match=message):
        read_folders(tmp_path, {name: [name] for name in domain_folders(tmp_path)})
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_folders(tmp_path / "nowhere")


# Decoding


@pytest.mark.parametrize("kind", ["P", "L", "1", "RGB", "CMYK jpg", "L jpg", "RGB webp", "RGB bmp"])
def test_every_mode_becomes_rgb(kind: str, tmp_path: Path) -> None:
    mode, _, ending = kind.partition(" ")
    grey = mode in ("L", "1")
    path = tmp_path / f"a.{ending or 'png'}"
    Image.new("RGB", (40, 30), (255, 255, 255) if grey else RED).convert(mode).save(path)
    x = pixels(only(path, size=16))
    assert x.shape == (16, 16, 3)
    assert (x - torch.tensor([255.0] * 3 if grey else RED)).abs().max() < 12  # JPEGs are only near it


def test_sixteen_bits_frames_and_exif(tmp_path: Path) -> None:
    """Sixteen bits are scaled, of several frames the first counts, and EXIF's orientation is left alone."""
    grey = np.linspace(0, 65_535, 32 * 32).astype(np.uint16).reshape(32, 32)
    Image.fromarray(grey).save(tmp_path / "a.png")
    assert np.allclose(pixels(only(tmp_path / "a.png", size=32)), (grey >> 8)[..., None], atol=1e-3)
    first, others = noise(32, 32), [noise(32, 32, seed) for seed in (1, 2)]
    for ending, options in (("webp", {"lossless": True}), ("png", {})):
        first.save(tmp_path / f"b.{ending}", save_all=True, append_images=others, **options)
        assert np.allclose(pixels(only(tmp_path / f"b.{ending}", size=32)), np.asarray(first), atol=1e-3)
    image, exif = noise(300, 100), Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    image.save(tmp_path / "c.png", exif=exif)
    wanted = np.asarray(image.resize((224, 224), Image.Resampling.BILINEAR), np.float32)
    x, label = only(tmp_path / "c.png")[0]
    assert (x.shape, x.dtype, label) == ((3, 224, 224), torch.float32, 0)
    assert np.allclose(x.permute(1, 2, 0), (wanted / 255 - np.array(MEAN)) / np.array(DEVIATION), atol=1e-4)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB"])
def test_transparent_pixels_become_white(mode: str, tmp_path: Path) -> None:
    """Whatever colour is hidden there; half transparent ones are mixed with white."""
    image = noise(32, 32, mode="RGBA")
    about: dict[str, Any] = {}
    if mode == "LA":
        image = image.convert("LA")
    elif mode == "P":
        image, about = noise(32, 32).quantize(16), {"transparency": bytes(range(0, 256, 16))}
    elif mode == "RGB":
        image, about = Image.new("RGB", (32, 32), RED), {"transparency": RED}
    image.save(tmp_path / "a.png", **about)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = np.asarray(decode(str(tmp_path / "a.png")), np.float64)
    with Image.open(tmp_path / "a.png") as read:
        full = np.asarray(read.convert("RGBA"), np.float64)
    alpha = full[..., 3:] / 255
    assert alpha.min() < 1
    assert np.abs(found - (alpha * full[..., :3] + (1 - alpha) * 255)).max() <= 1


def test_transparency_is_mentioned(tmp_path: Path) -> None:
    root = plant(tmp_path)
    noise(80, 80, mode="RGBA").save(root / "a" / "kind 0" / "seen.png")
    with pytest.warns(UserWarning, match="transparent pixels, which become white"):
        data = datasets.load("image-folder", folder=str(root), size=32)
    assert "transparent" in data.notes["images"]


def test_a_large_jpeg_is_decoded_small_and_looks_the_same(tmp_path: Path) -> None:
    noise(1600, 1200).save(tmp_path / "a.jpg", quality=90)
    image = decode(str(tmp_path / "a.jpg"), 224)
    assert image.size == (400, 300)
    full = Image.open(tmp_path / "a.jpg").resize((224, 224), Image.Resampling.BILINEAR)
    gap = np.abs(np.float32(image.resize((224, 224), Image.Resampling.BILINEAR)) - np.float32(full))
    assert gap.mean() < 1
    assert gap.max() < 8


def test_a_file_that_would_start_another_program_is_not_opened(tmp_path: Path) -> None:
    """Pillow starts Ghostscript for an EPS, whatever it is called."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.eps")
    (tmp_path / "a.eps").rename(tmp_path / "a.jpg")
    with pytest.raises(Unreadable, match="not a supported image format"):
        decode(str(tmp_path / "a.jpg"))


def test_wrong_options_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"size of ImageFiles must be at least 8, got 4"):
        only(tmp_path / "a.png", size=4)
    with pytest.raises(InputError, match="bad of ImageFiles must be 'stop' or 'skip', got 'skp'"):
        only(tmp_path / "a.png", bad="skp")


def test_without_pillow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(InputError, match=r"not installed: pip install 'shoal\[images\]'"):
        only(tmp_path / "a.png")


# Augmentation


@pytest.fixture
def data(tmp_path: Path) -> Any:
    return datasets.load("image-folder", folder=str(plant(tmp_path)), held_out="b", size=32)


def test_only_training_images_are_augmented_and_none_for_evaluation(data: Any) -> None:
    plain = ImageFiles(data.examples.files, size=32)
    assert data.splits["test"].names == ("b",)
    turned = data.split_as({"train": data.splits["test"], "test": data.splits["train"]}, {})
    for each in (data, turned):
        for name, domains in each.splits.items():
            for i in domains.examples().tolist():
                same = torch.equal(each.examples[i][0], plain[i][0])
                assert same == (name != "train"), (name, i)
                assert torch.equal(each.examples.evaluation()[i][0], plain[i][0])


def test_augmented_validation_depends_on_seed_and_place(tmp_path: Path) -> None:
    """As in DomainBed, images of training and validation are scored augmented, held-out domains never."""
    options = {"folder": str(plant(tmp_path)), "size": 32, "augment_validation": True}
    a, again, b = (datasets.load("image-folder", **options, seed=s).examples for s in (0, 0, 1))
    splits = datasets.load("image-folder", **options).splits
    plain = datasets.load("image-folder", **{**options, "augment": False}).examples
    state = torch.get_rng_state()
    for name, domains in splits.items():
        for i in domains.examples().tolist():
            x = a.evaluation()[i][0]  # type: ignore[attr-defined]
            assert torch.equal(x, again.evaluation()[i][0])  # type: ignore[attr-defined]
            assert torch.equal(x, plain[i][0]) == (name == "test")
            assert torch.equal(x, b.evaluation()[i][0]) == (name == "test")  # type: ignore[attr-defined]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("on_device", [False, True])
def test_batches_depend_on_seed_and_step_only(on_device: bool, data: Any) -> None:
    """Not on the number of workers, nor on where a loader begins."""
    examples = data.examples.on_device() if on_device else data.examples
    sampler = DomainBatchSampler(data.splits["train"], 3, 2, steps=6, seed=5)

    def batches(workers: int, start: int = 0) -> list[Tensor]:
        loader = MetaBatchLoader(examples, sampler, workers=workers, start=start, stop=6)
        return [examples.finish(batch.x) for batch in loader]

    alone = batches(0)
    for found in (batches(2), [*alone[:4], *batches(1, start=4)]):
        assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=True))
    assert not torch.equal(alone[0], alone[1])


def test_recolouring_a_batch_is_torchvisions() -> None:
    """Each image with its own numbers: brightness, contrast, saturation, hue; then mirrored, or grey."""
    Augment(32)  # which makes torchvision importable beside any torch
    from torchvision.transforms.v2 import functional as F

    images = torch.stack(
        [torch.from_numpy(np.array(noise(40, 30, seed))).permute(2, 0, 1) for seed in range(6)]
    )
    torch.manual_seed(0)
    numbers = torch.stack([Augment.numbers() for _ in range(6)])
    numbers[:, 0], numbers[:, 1] = torch.tensor([0, 1, 0, 1, 0, 1]), torch.tensor([0, 0, 0, 0, 1, 1])
    for image, (flip, grey, brightness, contrast, saturation, turn), found in zip(
        images, numbers.tolist(), recolour(images, numbers), strict=True
    ):
        x = image.double() / 255
        x = F.horizontal_flip(x) if flip else x
        x = F.adjust_contrast(F.adjust_brightness(x, brightness), contrast)
        x = F.adjust_hue(F.adjust_saturation(x, saturation), turn)
        x = F.rgb_to_grayscale(x, 3) if grey else x
        assert (found.double() - 255 * x).abs().max() < 0.2  # torchvision's grey has four digits


def test_numbers_have_the_right_frequencies() -> None:
    torch.manual_seed(0)
    numbers = torch.stack([Augment.numbers() for _ in range(4000)])
    assert numbers[:, 0].mean() == pytest.approx(0.5, abs=0.03)
    assert numbers[:, 1].mean() == pytest.approx(0.1, abs=0.02)
    for column, centre in ((2, 1), (3, 1), (4, 1), (5, 0)):
        own = numbers[:, column]
        assert (own.min(), own.max()) == pytest.approx((centre - 0.3, centre + 0.3), abs=0.002)
        assert own.std() == pytest.approx(0.6 / 12**0.5, abs=0.01)


def test_evaluated_images_are_the_same_on_the_device(data: Any) -> None:
    plain, raw = data.examples.evaluation(), data.examples.on_device().evaluation()
    x = torch.stack([plain[i][0] for i in range(4)])
    assert raw[0][0].dtype == torch.uint8
    torch.testing.assert_close(raw.finish(torch.stack([raw[i][0] for i in range(4)])), x)
    torch.testing.assert_close(raw.finish(raw[2][0]), x[2])


def test_training_on_raw_images(data: Any) -> None:
    from dataclasses import replace

    raw = replace(data, examples=data.examples.on_device())
    model = shoal.models.build("small-cnn", input_shape=data.input_shape, classes=2, seed=0)
    options: dict[str, Any] = {"steps": 3, "batch_size": 4, "device": "cpu", "progress": False}
    run = shoal.fit("fish", model, raw, **options)
    assert 0 <= run.accuracy("test") <= 1


# Broken files


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """One file of every kind of damage, with names of ordinary images."""
    root = plant(tmp_path)
    place = root / "a" / "kind 1"
    whole = (place / "0.jpg").read_bytes()
    (place / "1.jpg").write_bytes(whole[: len(whole) // 2])
    (place / "3.jpg").write_bytes(b"")
    (place / "4.jpg").write_text("no image")
    (place / "5.jpg").unlink()
    (place / "5.jpg").symlink_to(place / "nowhere.jpg")
    return root


@pytest.mark.parametrize("workers", [0, 1])
def test_training_stops_at_a_broken_image_and_names_it(workers: int, broken: Path) -> None:
    data = datasets.load("image-folder", folder=str(broken), held_out="c", size=32)
    model = shoal.models.build("small-cnn", input_shape=data.input_shape, classes=2, seed=0)
    with pytest.raises(InputError) as error:
        shoal.fit("erm", model, data, steps=9, batch_size=8, workers=workers, device="cpu", progress=False)
    text = str(error.value)
    assert str(broken / "a" / "kind 1") in text
    assert text.startswith("the image")
    assert len(text.splitlines()) == 1


def test_a_skipped_image_gives_way_to_the_next_of_its_class(broken: Path) -> None:
    examples = ImageFiles(read_folders(broken), size=32, bad="skip")
    names = [Path(p).parts[-3:] for p in examples.paths]
    at = names.index(("a", "kind 1", "1.jpg"))
    with pytest.warns(UserWarning, match=r"1\.jpg' is skipped: OSError"):
        x, label = examples[at]
    good = names.index(("a", "kind 1", "2.jpg"))
    assert torch.equal(x, examples[good][0])
    assert label == 1
    with pytest.warns(UserWarning, match="is skipped") as caught:
        assert torch.equal(examples[at + 2][0], examples[names.index(("a", "kind 1", "0.jpg"))][0])
    assert len(caught) == 3


def test_skipping_stays_within_the_domain(tmp_path: Path) -> None:
    root = plant(tmp_path, each=2)
    for path in (root / "a" / "kind 1").iterdir():
        path.write_bytes(b"")
    examples = ImageFiles(read_folders(root), size=32, bad="skip")
    with pytest.warns(UserWarning, match="is skipped"):
        assert examples[2][1] == 0  # of another class, in the same domain
    for path in (root / "a" / "kind 0").iterdir():
        path.write_bytes(b"")
    with pytest.warns(UserWarning, match="is skipped"), pytest.raises(InputError, match="nor can any other"):
        examples[0]


def test_copies_are_one_image_and_never_on_two_sides(tmp_path: Path) -> None:
    root = plant(tmp_path / "photos")
    content = (root / "a" / "kind 0" / "0.jpg").read_bytes()
    for place in ("a/kind 0/copy.jpg", "b/kind 0/copy.jpg"):
        (root / place).write_bytes(content)
    options = {"folder": str(root), "size": 32}
    with pytest.warns(UserWarning, match=r"0\.jpg' and .*copy\.jpg' are the same image .and 1 more copies"):
        data = datasets.load("image-folder", **options, held_out="b")
    sizes = {name: len(domains.indices) for name, domains in data.splits.items()}
    assert sizes["train"] + sizes["validation"] == 11 + 12  # "a" lost the image that it shares with "b"
    assert sizes["test"] == 13
    assert len(set(data.splits["test"].indices) & set(data.splits["train"].indices)) == 0
    (root / "c" / "kind 1" / "copy.jpg").write_bytes(content)
    with pytest.raises(InputError, match=r"are the same image with different labels; remove one"):
        datasets.load("image-folder", **options)
    table = "path,label,domain,split\na/kind 0/0.jpg,x,a,train\nb/kind 0/copy.jpg,x,b,test\n"
    (root / "list.csv").write_text(table + "a/kind 1/0.jpg,y,a,train\nb/kind 1/0.jpg,y,b,train\n")
    with pytest.raises(
        InputError, match=r"\(train\) and .*copy\.jpg' \(test\) are the same image in two spl"
    ):
        datasets.load("manifest", file=str(root / "list.csv"))


def test_inspection_finds_broken_and_equal_files(broken: Path) -> None:
    (broken / "b" / "kind 0" / "copy.jpg").write_bytes((broken / "a" / "kind 0" / "0.jpg").read_bytes())
    files, seen = read_folders(broken), list[int]()
    found = inspect_files(list(files["path"]), 1, seen.append)
    bad = {os.path.basename(p) for p in found["path"][found["problem"].notna()]}
    assert bad == {"1.jpg", "3.jpg", "4.jpg", "5.jpg"}
    assert found["digest"].value_counts().iloc[0] == 2
    assert seen[-1] == len(files)


def test_a_digest_names_what_inputs_follow_from(tmp_path: Path) -> None:
    root = plant(tmp_path)
    digest = ImageFiles(read_folders(root), size=32).digest()
    assert digest == ImageFiles(read_folders(root), size=32).digest()
    assert digest != ImageFiles(read_folders(root), size=40).digest()
    noise(9, 9).save(root / "a" / "kind 0" / "0.jpg")
    assert digest != ImageFiles(read_folders(root), size=32).digest()


def test_images_of_pillow_are_taken_as_files_are() -> None:
    assert np.array_equal(np.asarray(to_rgb(Image.new("LA", (2, 2), (0, 0)))), np.full((2, 2, 3), 255))
