"""Published image folders: where they are found, what they should have, and what archives become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shoal import datasets
from shoal.datasets.folders import remove_copies
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
