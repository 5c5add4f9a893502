"""``shoal data``: check, get and example."""

from __future__ import annotations

import io
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shoal import datasets as sets
from shoal.api.data import check, example, get
from shoal.data.download import Download, Source
from shoal.errors import InputError

Names = tuple[str, ...]
DOMAINS = ("art_painting", "cartoon", "photo", "sketch")


def plant(folder: Path, domains: Names = DOMAINS, classes: Names = ("cat", "dog")) -> Path:
    """Five different images of each class in each domain."""
    rng = np.random.default_rng(0)
    for place in (folder / domain / label for domain in domains for label in classes):
        place.mkdir(parents=True)
        for n in range(5):
            Image.fromarray(rng.integers(0, 256, (20, 30, 3), np.uint8)).save(place / f"{n}.png")
    return folder


@pytest.fixture
def patients(tmp_path: Path) -> Path:
    return Path(example("table", out=tmp_path / "patients.csv").to_dict()["path"])


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return plant(tmp_path / "photos")


def test_examples_say_what_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = example("table")
    assert made.to_dict()["next"] == "shoal data check patients.csv --label ill --domain hospital"
    assert str(check("patients.csv", label="ill", domain="hospital")).startswith("patients.csv: 600 rows")
    images = example("images", out="my images")
    assert images.to_dict()["next"] == "shoal data check 'my images'"
    assert check("my images", workers=1).problems == []
    with pytest.raises(InputError, match="exists already"):
        example("table")
    with pytest.raises(InputError, match="kind must be 'table' or 'images', got 'text'"):
        example("text")  # type: ignore[arg-type]


def test_unreadable_and_duplicate_images_are_named(photos: Path) -> None:
    shutil.copy(photos / "sketch/dog/1.png", photos / "photo/dog/in-two-domains.png")
    shutil.copy(photos / "cartoon/cat/1.png", photos / "cartoon/dog/in-two-classes.png")
    shutil.copy(photos / "cartoon/dog/2.png", photos / "cartoon/dog/twice.png")
    (photos / "photo/dog/empty.png").write_bytes(b"")
    shutil.rmtree(photos / "sketch/cat")
    found = check(photos, workers=1)
    content = found.to_dict()
    assert list(content["unreadable"]) == ["photo/dog/empty.png"]
    assert content["lacking"] == [{"domain": "sketch", "class": "cat"}]
    assert content["duplicates"] == {
        "domains": [["photo/dog/in-two-domains.png", "sketch/dog/1.png"]],
        "classes": [["cartoon/cat/1.png", "cartoon/dog/in-two-classes.png"]],
        "copies": [["cartoon/dog/2.png", "cartoon/dog/twice.png"]],
    }
    assert len(found.problems) == 4  # copies within a class do no harm
    assert "photo/dog/empty.png" in str(found)


@pytest.mark.parametrize(
    ("domains", "classes"),
    [(("train", "val", "test"), ("cat", "dog")), (("a",), ("cat", "dog")), (("a", "b", "c"), ("cat",))],
    ids=["splits", "one domain", "one class"],
)
def test_a_folder_that_training_refuses_has_a_problem(domains: Names, classes: Names, tmp_path: Path) -> None:
    from shoal import train

    folder = plant(tmp_path / "images", domains, classes)
    assert len(check(folder, workers=1).problems) == 1
    with pytest.raises(InputError):
        train("erm", folder, steps=1, device="cpu", out=tmp_path / "run", progress=False)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ("nowhere", {}, "no file or folder 'nowhere'"),
        ("notes.md", {}, "'notes.md' is not a table; supported"),
        ("empty", {}, "there is no image in"),
        ("empty", {"label": "ill"}, "label: does not apply to the check of a folder"),
        ("empty", {"dataset": "pacs"}, "PACS is not in"),
        ("empty", {"dataset": "camelyon17"}, "server of WILDS has been down"),
    ],
)
def test_what_cannot_be_checked(
    data: str, options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.md").write_text("seen in May")
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match=message):
        check(data, **options)


@pytest.fixture
def archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """PACS from an archive on this machine, with small images; VLCS from one that does not exist."""
    out = io.BytesIO()
    folder = plant(tmp_path / "kfold")
    with zipfile.ZipFile(out, "w") as file:
        for path in folder.rglob("*.png"):
            file.write(path, path.relative_to(tmp_path))
    for place in ("data", "my data"):  # where it would be downloaded to
        work = tmp_path / place / "downloads" / "PACS"
        work.mkdir(parents=True)
        (work / "PACS.zip").write_bytes(out.getvalue())
    for name in ("pacs", "vlcs"):
        module = sets.registry.module(name)
        source = Source(module.DOWNLOAD.sources[0].file, ("http://127.0.0.1:9/no",))
        download = Download(module.DOWNLOAD.home, (source,), module.DOWNLOAD.find)
        monkeypatch.setattr(module, "DOWNLOAD", download)
    monkeypatch.setattr("shoal.data.download.time.sleep", lambda seconds: None)
    return tmp_path


def test_get_check_and_load(archives: Path) -> None:
    found = get(["pacs"], out=archives / "my data", progress=False)
    (report,) = found.to_dict()["datasets"]
    folder = archives / "my data" / "PACS"
    assert (report["folder"], found.problems) == (str(folder), [])
    assert report["next"] == f"shoal data check '{folder}' --dataset pacs"
    assert check(folder, dataset="pacs", workers=1).to_dict()["images"] == 40
    assert sets.load("pacs", folder=str(archives / "my data"), size=16).splits["test"].names == ("sketch",)
    assert "nothing was downloaded" in str(get(["pacs"], out=archives / "my data"))


def test_a_plan_downloads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    found = get(["rotated-mnist", "terra-incognita"], plan=True)
    mnist, terra = found.to_dict()["plan"]
    assert (mnist["folder"], mnist["there"]) == (str(tmp_path / "mnist"), False)
    assert any(each["file"] == "t10k-labels-idx1-ubyte.gz" and each["checksum"] for each in mnist["files"])
    assert len(terra["files"]) == 2
    assert "https://ossci-datasets.s3.amazonaws.com/mnist/t10k-labels-idx1-ubyte.gz" in str(found)
    assert "6.5 GB, no checksum is published" in str(found)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("linear", "'linear' cannot be downloaded; these can: coloured-mnist, domainnet"),
        ("pasc", "Did you mean 'pacs'"),
        ("fmow", "WILDS has been down since August 2026.*an existing copy.*fmow_v1.1.*data_dir"),
    ],
)
def test_what_cannot_be_downloaded(name: str, message: str, tmp_path: Path) -> None:
    for plan in (False, True):
        with pytest.raises(InputError, match=message):
            get([name], out=tmp_path, plan=plan)
    assert list(tmp_path.iterdir()) == []
