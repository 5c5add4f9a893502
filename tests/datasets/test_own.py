"""Images of one's own, in folders and listed in a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from PIL import Image

from shoal import datasets
from shoal.errors import InputError

ROWS = [(f"{d}/{c}/{i}.png", c, d) for d in ("1", "9", "10") for c in ("cat", "dog") for i in range(5)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for n, (name, *_) in enumerate(ROWS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (8 * n, 255 - 8 * n, 40)).save(tmp_path / name)
    return tmp_path


def listed(root: Path, ending: str = "csv", rows: Any = ROWS, **columns: Any) -> str:
    table = pd.DataFrame(rows, columns=["path", "label", "domain"]).assign(**columns)
    path = root / f"list.{ending}"
    table.to_csv(path, index=False) if ending == "csv" else table.to_parquet(path, index=False)
    return str(path)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_folders_and_lists_are_the_same_data(ending: str, root: Path) -> None:
    """And hold out the same domain by default: the last in natural order."""
    folder = datasets.load("image-folder", folder=str(root), size=16, augment=False)
    table = datasets.load("manifest", file=listed(root, ending), size=16, augment=False)
    assert folder.splits["test"].names == table.splits["test"].names == ("10",)
    assert folder.class_names == table.class_names == ("cat", "dog")
    for name, domains in folder.splits.items():
        pairs = zip(domains.examples(), table.splits[name].examples(), strict=True)
        assert all(torch.equal(folder.examples[a][0], table.examples[b][0]) for a, b in pairs)
    several = datasets.load("image-folder", folder=str(root), size=16, held_out=["1", "9"])
    assert several.splits["test"].names == ("1", "9")
    assert "test" not in datasets.load("manifest", file=listed(root), size=16, held_out=[]).splits


def test_a_list_with_splits(root: Path) -> None:
    split = ["train", "train", "train", "val", "Test"] * 6
    data = datasets.load("manifest", file=listed(root, split=split), size=16)
    counts = {name: len(d.examples()) for name, d in data.splits.items()}
    assert counts == {"train": 18, "validation": 6, "test": 6}
    assert data.splits["test"].names == ("1", "9", "10")
    with pytest.raises(InputError, match=r"held_out: .*has a column 'split'"):
        datasets.load("manifest", file=listed(root, split=split), held_out="9")


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        (
            [*ROWS, ("./1/cat/0.png", "dog", "1")],
            {},
            r"0.png' and .* are the same image with different",
        ),
        ([("a.png", "", "1"), *ROWS], {}, "row 1: label is empty"),
        (ROWS, {"split": ["train"] * 29 + ["dev2"]}, "row 30: split is 'dev2'; it must be train, valid"),
        (ROWS, {"split": ["test"] * 30}, "no row of split train"),
        ([(path, "cat", domain) for path, _, domain in ROWS], {}, "images of one class only, 'cat'"),
        ([], {}, "has no rows"),
    ],
)
def test_wrong_lists_are_named(rows: Any, columns: Any, message: str, root: Path) -> None:
    with pytest.raises(InputError, match=message):
        datasets.load("manifest", file=listed(root, rows=rows, **columns))


def test_missing_columns_files_and_folders_are_named(root: Path) -> None:
    (root / "list.csv").write_text("path,lable,domain\na.png,x,y\n")
    with pytest.raises(InputError, match="'label'"):
        datasets.load("manifest", file=str(root / "list.csv"))
    for name, option in (("manifest", "file"), ("image-folder", "folder")):
        with pytest.raises(InputError, match=f"set {option} in data_options"):
            datasets.load(name)
    data = datasets.load("manifest", file=listed(root, rows=[("no.png", "cat", "1"), *ROWS]), size=16)
    with pytest.raises(InputError, match=r"no\.png' cannot be read"):
        data.examples[0]
