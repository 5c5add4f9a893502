"""Published image folders: where they are found, what they should have, and what archives become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shoal import datasets
from shoal.api.data import check
from shoal.datasets.folders import remove_copies, sort_by_camera
from shoal.errors import InputError

COUNTS = {
    "pacs": 9991,
    "vlcs": 10_729,
    "office-home": 15_588,
    "terra-incognita": 24_330,
    "domainnet": 586_575,
}


def layout(name: str) -> Any:
    return datasets.registry.module(name).LAYOUT


def plant(root: Path, name: str, folders: dict[str, str] | None = None) -> None:
    """A few images in each domain; ``folders`` are the domains' folders, by default named as they are."""
    for d, domain in enumerate(layout(name).domains):
        for label in ("cat", "dog"):
            place = root / (folders or {}).get(domain, domain) / label
            place.mkdir(parents=True)
            for i in range(6):
                Image.new("RGB", (16, 16), (d * 20, i * 30, len(label))).save(place / f"{i}.png")


@pytest.mark.parametrize(("name", "total"), COUNTS.items())
def test_published_counts_add_up(name: str, total: int) -> None:
    published, module = layout(name), datasets.registry.module(name)
    assert sum(published.counts.values()) == total
    assert f"{total:,}" in published.source
    assert tuple(published.counts) == tuple(published.domains) == module.DOMAINS
    assert module.DOMAINBED["network"] == "resnet50.tv_in1k"


@pytest.mark.parametrize("where", ["itself", "twice", "SHOAL_DATA/PACS"])
def test_found_in_its_folder_above_it_and_by_default(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"itself": ".", "twice": "PACS/pacs-data"}.get(where, "PACS")
    plant(tmp_path / place, "pacs", {"art_painting": "Art Painting"})
    folder = None if "SHOAL" in where else str(tmp_path)
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    data = datasets.load("pacs", folder=folder, size=16, held_out="photo")
    assert data.splits["test"].names == ("photo",)
    assert (
        data.splits["train"].names == data.splits["validation"].names == ("art_painting", "cartoon", "sketch")
    )
    assert (data.classes, data.class_names, data.input_shape) == (2, ("cat", "dog"), (3, 16, 16))


@pytest.mark.parametrize(
    ("name", "folders"),
    [
        ("terra-incognita", {n: f"location_{n[1:]}" for n in ("L100", "L38", "L43", "L46")}),
        ("office-home", {"art": "Art", "clipart": "Clipart", "product": "Product", "real": "Real World"}),
        ("vlcs", {"Caltech101": "CALTECH", "LabelMe": "LABELME", "SUN09": "SUN", "VOC2007": "PASCAL"}),
    ],
)
def test_mirrors_name_folders_otherwise(name: str, folders: dict[str, str], tmp_path: Path) -> None:
    plant(tmp_path, name, folders)
    data = datasets.load(name, folder=str(tmp_path), size=16, held_out=[])
    assert set(data.splits["train"].names) == set(layout(name).domains)
    assert data.classes == 2


def test_what_is_missing_is_named_and_where_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_DATA", raising=False)
    with pytest.raises(InputError, match=r"images of PACS are needed.*`shoal data get pacs` downloads them"):
        datasets.load("pacs")
    with pytest.raises(InputError, match=r"PACS is not in .*shoal data get pacs.*sketchx"):
        datasets.load("pacs", folder=str(tmp_path))
    (tmp_path / "sketch").mkdir()
    with pytest.raises(InputError, match="there is no folder art_painting, cartoon, photo"):
        datasets.load("pacs", folder=str(tmp_path))
    assert datasets.registry.module("pacs").DOWNLOAD.there(tmp_path) is None


def test_the_check_compares_with_published_counts(tmp_path: Path) -> None:
    plant(tmp_path, "pacs")
    report = check(tmp_path, dataset="pacs", workers=1, progress=False)
    assert any("photo has 12 images, not 1,670" in p for p in report.problems)
    assert any("there are 2 classes, not 7" in p for p in report.problems)


def test_domainnet_without_duplicates(tmp_path: Path) -> None:
    for name in ("real/cat/a.jpg", "real/cat/b.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    outside = tmp_path.parent / "kept.jpg"
    outside.touch()
    (tmp_path / "domain_net_duplicates.txt").write_text(
        f"real/cat/b.jpg\n\nreal/x.jpg\n../kept.jpg\n{outside}\n"
    )
    assert remove_copies(tmp_path).startswith("1 images")
    assert [p.name for p in tmp_path.rglob("*.*")] == ["a.jpg"]
    assert outside.exists()


def test_terra_incognita_is_sorted_by_its_labels(tmp_path: Path) -> None:
    """Four cameras and ten classes are kept; an image of two animals is in both classes."""
    images = tmp_path / "eccv_18_all_images_sm"
    images.mkdir()
    kinds = {1: "dog", 2: "cat", 3: "car"}
    rows = [("a", 46, [1]), ("b", 38, [1, 2]), ("c", 7, [1]), ("d", 100, [3]), ("e", 43, [2])]
    for name, *_ in rows[:4]:
        (images / f"{name}.jpg").write_text(name)
    content = {
        "categories": [{"id": i, "name": name} for i, name in kinds.items()],
        "images": [{"id": n, "file_name": f"{n}.jpg", "location": camera} for n, camera, _ in rows],
        "annotations": [{"image_id": n, "category_id": c} for n, _, classes in rows for c in classes],
    }
    (tmp_path / "labels.json").write_text(json.dumps(content))
    assert "2 of 3 images" in sort_by_camera(tmp_path)
    found = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert found == ["location_38/cat/b.jpg", "location_38/dog/b.jpg", "location_46/dog/a.jpg"]
    with pytest.raises(InputError, match="no labels"):
        sort_by_camera(tmp_path)
