"""Image files: which there are, how they are decoded, what is random, and what happens to broken ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import shoal
from shoal import datasets
from shoal.data.images import MEAN, STD, ImageFiles, image_frame
from shoal.errors import InputError

RED = (200, 40, 10)


def noise(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, len(mode)), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def plant(root: Path, each: int = 6) -> Path:
    """Different images of two classes in each of three domains."""
    for d, name in enumerate("abc"):
        for c in range(2):
            folder = root / name / f"kind {c}"
            folder.mkdir(parents=True)
            for i in range(each):
                noise(80, 70, seed=100 * d + 10 * c + i).save(folder / f"{i}.jpg", quality=95)
    return root


def only(path: Path, **options: Any) -> ImageFiles:
    return ImageFiles(image_frame([(str(path), "here", "thing")]), **options)


def pixels(path: Path, size: int) -> np.ndarray:
    """An example as numbers 0..255 again, (h, w, 3)."""
    x = only(path, size=size)[0][0].permute(1, 2, 0).numpy()
    return 255 * (x * np.array(STD) + np.array(MEAN))


# Decoding


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
    place = plant(tmp_path) / "a" / "kind 0" / "seen.png"
    image.save(place, **about)
    with Image.open(place) as read:
        full = np.asarray(read.convert("RGBA"), np.float64)
    alpha = full[..., 3:] / 255
    assert alpha.min() < 1
    assert np.abs(pixels(place, 32) - (alpha * full[..., :3] + (1 - alpha) * 255)).max() < 1.01
    with pytest.warns(UserWarning, match="transparent pixels, which become white"):
        data = datasets.load("image-folder", folder=str(tmp_path), size=32)
    assert "transparent" in data.notes["images"]


def test_a_file_that_would_start_another_program_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow starts Ghostscript for an EPS, whatever it is called."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.eps")
    (tmp_path / "a.eps").rename(tmp_path / "a.jpg")
    monkeypatch.setattr("subprocess.Popen", lambda *args, **options: pytest.fail("a program was started"))
    with pytest.raises(InputError, match="not a supported image format"):
        only(tmp_path / "a.jpg")[0]


# Augmentation


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def data(folder: Path) -> Any:
    return datasets.load("image-folder", folder=str(folder), held_out="b", size=32)


def test_only_training_images_are_augmented_and_none_for_evaluation(data: Any, folder: Path) -> None:
    plain = datasets.load("image-folder", folder=str(folder), held_out="b", size=32, augment=False).examples
    turned = data.split_as({"train": data.splits["test"], "test": data.splits["train"]}, {})
    for each in (data, turned):
        for name, domains in each.splits.items():
            for i in domains.examples().tolist():
                assert torch.equal(each.examples[i][0], plain[i][0]) == (name != "train"), (name, i)
                assert torch.equal(each.examples.evaluation()[i][0], plain[i][0])


def test_augmented_validation_depends_on_seed_and_place(folder: Path) -> None:
    """As in DomainBed, images of training and validation are scored augmented, held-out domains never."""
    options = {"folder": str(folder), "size": 32, "augment_validation": True}
    loaded = [datasets.load("image-folder", **options, seed=s) for s in (0, 0, 1)]
    a, again, b = (each.examples.evaluation() for each in loaded)
    plain = datasets.load("image-folder", **{**options, "augment": False}).examples
    state = torch.get_rng_state()
    for name, domains in loaded[0].splits.items():
        for i in domains.examples().tolist():
            x = a[i][0]
            assert torch.equal(x, again[i][0])
            assert torch.equal(x, plain[i][0]) == torch.equal(x, b[i][0]) == (name == "test")
    assert torch.equal(torch.get_rng_state(), state)


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
    with pytest.raises(InputError, match=r"^the image .*kind 1/[1345]\.jpg") as error:
        shoal.fit("erm", model, data, steps=9, batch_size=8, workers=workers, device="cpu", progress=False)
    assert len(str(error.value).splitlines()) == 1


def test_a_skipped_image_gives_way_to_the_next_of_its_domain(broken: Path) -> None:
    files = datasets.load("image-folder", folder=str(broken), size=32, bad="skip", augment=False).examples
    examples: Any = files.with_splits({})  # type: ignore[attr-defined]
    names = [Path(p).parts[-3:] for p in examples.paths]
    at = names.index(("a", "kind 1", "1.jpg"))
    with pytest.warns(UserWarning, match=r"1\.jpg' is skipped: OSError"):
        x, label = examples[at]
    assert torch.equal(x, examples[names.index(("a", "kind 1", "2.jpg"))][0])
    assert label == 1


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
