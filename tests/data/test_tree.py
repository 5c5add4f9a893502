"""Which image files there are: folders, published layouts and lists."""

from __future__ import annotations

import shutil
import tracemalloc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from shoal.data.tree import FileList, Layout, domain_folders, read_tree

from shoal.datasets import load, registry
from shoal.errors import InputError

LAYOUTS = {n: m.LAYOUT for n in registry.names() if hasattr(m := registry.module(n), "LAYOUT")}


def put(root: Path, *names: str) -> Path:
    """Small images at these paths."""
    for n, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (12, 10), (n * 7 % 256, 90, 30)).save(root / name, format="PNG")
    return root


def names(files: FileList) -> list[str]:
    return [files.name(i) for i in range(len(files))]


# Folders


def test_a_tree_is_read_in_order(tmp_path: Path) -> None:
    put(tmp_path, "b/dog/2.PNG", "b/dog/1.JPeG", "b/cat/x.webp", "a/cat/é.bmp", "a/dog/<script>.jpg")
    put(tmp_path, "a/dog/.hidden.png", "a/.trash/dog/1.png", ".git/dog/1.png")
    (tmp_path / "a/dog/.DS_Store").touch()
    (tmp_path / "a/dog/Thumbs.db").touch()
    (tmp_path / "a/readme.txt").touch()
    (tmp_path / "b/dog/link.png").symlink_to(tmp_path / "a/cat/é.bmp")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        files = read_tree(tmp_path)
    assert names(files) == [
        "a/cat/é.bmp",
        "a/dog/<script>.jpg",
        "b/cat/x.webp",
        "b/dog/1.JPeG",
        "b/dog/2.PNG",
        "b/dog/link.png",
    ]
    assert (files.domains, files.classes) == (("a", "b"), ("cat", "dog"))
    assert files.labels.tolist() == [0, 1, 0, 1, 1, 1]
    assert files.groups.tolist() == [0, 0, 1, 1, 1, 1]
    assert Path(files.path(0)).is_file()
    assert files.counts().tolist() == [[1, 1], [1, 3]]


def test_what_is_no_picture_is_told_once_and_classes_that_lack_too(tmp_path: Path) -> None:
    put(tmp_path, "a/cat/1.png", "a/dog/1.png", "b/cat/1.png", "c/cat/1.png", "c/emu/1.png")
    for name in ("b/cat/notes.txt", "b/cat/movie.mp4", "a/dog/list.csv"):
        (tmp_path / name).touch()
    (tmp_path / "a/dog/gone.png").symlink_to(tmp_path / "nowhere.png")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        files = read_tree(tmp_path)
    texts = [str(w.message) for w in told]
    assert len(texts) == 2
    assert "and 3 more ignored" in texts[0]
    assert "'emu' in 'a', 'dog' in 'b', 'emu' in 'b' and 1 more" in texts[1]
    assert files.missing() == [("a", "emu"), ("b", "dog"), ("b", "emu"), ("c", "dog")]
    assert len(files) == 5


def test_numbers_are_sorted_as_numbers(tmp_path: Path) -> None:
    put(tmp_path, *(f"a/{c}/1.png" for c in (10, 9, 2)))
    assert read_tree(tmp_path).classes == ("2", "9", "10")


def test_wrong_trees_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere' cannot be read: No such file"):
        read_tree(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"there is no image in.*folder/domain/class/image"):
        read_tree(tmp_path)
    put(tmp_path, "dog/1.png", "cat/1.png")  # no domains
    with pytest.raises(InputError, match=r"no image in the class folders of '.*cat'; the layout is"):
        read_tree(tmp_path)


def test_names_that_are_no_text_can_be_read(tmp_path: Path) -> None:
    put(tmp_path, "a/cat/1.png")
    odd = bytes(tmp_path) + b"/a/cat/\xff.png"
    try:
        with open(odd, "wb") as file:
            file.write((tmp_path / "a/cat/1.png").read_bytes())
    except OSError:
        pytest.skip("this file system takes no such names")
    files = read_tree(tmp_path)
    assert Path(files.path(1)).is_file()


def many(count: int) -> Iterator[tuple[str, str, str]]:
    for i in range(count):
        domain, label = f"domain{6 * i // count}", f"some_class_{i // 300 % 345}"
        yield f"{domain}/{label}/{domain}_{label}_{i:06}.jpg", domain, label


def test_six_hundred_thousand_paths_are_cheap() -> None:
    files = FileList.of("/data/domain_net", many(600_000))
    arrays = (files.letters, files.offsets, files.labels, files.groups)
    letters = len(files.letters) / len(files)
    assert 40 < letters < 60
    assert sum(a.nbytes for a in arrays) / len(files) < letters + 17 < 100
    assert files.path(599_999).endswith("domain5/some_class_274/domain5_some_class_274_599999.jpg")
    tracemalloc.start()  # nothing else is held, nor much on the way
    few = FileList.of("/data/domain_net", many(20_000))
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held / len(few) < 100
    assert peak / len(few) < 300


# Published datasets


def test_published_counts_add_up() -> None:
    totals = {name: sum(layout.counts.values()) for name, layout in LAYOUTS.items()}
    assert totals == {
        "vlcs": 10_729,
        "pacs": 9_991,
        "office-home": 15_588,
        "terra-incognita": 24_330,
        "domainnet": 586_575,
    }
    for layout in LAYOUTS.values():
        for who in (layout.counts, *layout.other_counts.values()):
            assert set(who) == set(layout.domains)
        for domain, classes in layout.by_class.items():
            assert len(classes) == layout.classes
            assert sum(classes.values()) == layout.counts[domain]
    (said,) = LAYOUTS["domainnet"].other_counts.values()
    assert sum(said.values()) == 596_010


def planted(root: Path, layout: Layout, folders: dict[str, str] | None = None, each: int = 5) -> Path:
    """A few images in each domain; ``folders`` are the domains' folders, by default named as they are."""
    for folder in (folders or {name: name for name in layout.domains}).values():
        put(root, *(f"{folder}/{label}/{i}.jpg" for label in ("one", "two") for i in range(each)))
    return root


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_set_is_found_in_its_folder_above_it_and_by_default(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout: Layout = LAYOUTS[name]
    own = planted(tmp_path / layout.folders[0].upper(), layout)
    put(tmp_path, "other/dog/1.png")
    for folder in (own, tmp_path):
        files = layout.read(folder)
        assert files.domains == tuple(layout.domains)
        assert files.root == str(own)
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    for held_out in layout.domains:
        data = load(name, held_out=held_out, size=16)
        assert data.splits["test"].names == (held_out,)
        assert set(data.splits["train"].names) == set(layout.domains) - {held_out}
        assert data.splits["validation"].names == data.splits["train"].names
        assert data.splits["validation"].sizes.tolist() == [2] * (len(layout.domains) - 1)
        assert data.classes == 2
    with pytest.raises(InputError, match="unknown domain 'nowhere'"):
        load(name, held_out="nowhere")


@pytest.mark.parametrize(
    ("name", "folders"),
    [
        ("vlcs", {"Caltech101": "CALTECH", "LabelMe": "LABELME", "SUN09": "SUN", "VOC2007": "PASCAL"}),
        ("vlcs", {"Caltech101": "C/full", "LabelMe": "L/full", "SUN09": "S/full", "VOC2007": "V/full"}),
        ("pacs", {d: f"kfold/{d}" for d in ("art_painting", "cartoon", "photo", "sketch")}),
        ("office-home", {"art": "Art", "clipart": "Clipart", "product": "Product", "real": "Real World"}),
        ("office-home", {"art": "art", "clipart": "CLIPART", "product": "product", "real": "RealWorld"}),
        ("terra-incognita", {f"L{n}": f"location_{n}" for n in (100, 38, 43, 46)}),
        ("terra-incognita", {"L100": "L100", "L38": "l38", "L43": "43", "L46": "Location 46"}),
    ],
)  # fmt: skip
def test_mirrors_name_folders_otherwise(name: str, folders: dict[str, str], tmp_path: Path) -> None:
    layout: Layout = LAYOUTS[name]
    files = layout.read(planted(tmp_path / layout.folders[0], layout, folders))
    assert files.domains == tuple(layout.domains)
    for i in range(len(files)):
        assert folders[files.domains[files.groups[i]]].removeprefix("kfold/") in files.name(i)
    assert files.counts().tolist() == [[5, 5]] * len(layout.domains)


def test_the_parts_of_a_mirror_of_vlcs_are_joined_and_its_whole_is_not_added(tmp_path: Path) -> None:
    for part, count in (("train", 4), ("crossval", 2), ("test", 3), ("full", 6)):
        folders = {d: f"{d}/{part}" for d in ("CALTECH", "LABELME", "SUN", "PASCAL")}
        planted(tmp_path, LAYOUTS["vlcs"], folders, each=count)
    assert LAYOUTS["vlcs"].read(tmp_path).counts().tolist() == [[9, 9]] * 4


def test_what_lacks_of_a_published_set_is_named_and_where_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_DATA", raising=False)
    with pytest.raises(
        InputError, match=r"the images of PACS are needed; .*SHOAL_DATA.*`shoal data get pacs`"
    ):
        load("pacs")
    with pytest.raises(
        InputError, match=r"PACS is not in .*art_painting, cartoon.*shoal data get pacs`.*sketchx"
    ):
        load("pacs", folder=str(tmp_path))
    put(tmp_path, "PACS/photo/dog/1.png", "PACS/sketch/dog/1.png")
    with pytest.raises(
        InputError, match=r"PACS' has no folder for art_painting, cartoon; .*`shoal data get pacs`"
    ):
        load("pacs", folder=str(tmp_path))


def test_image_folder_holds_out_what_it_is_told(tmp_path: Path) -> None:
    planted(tmp_path, LAYOUTS["pacs"])
    assert load("image-folder", folder=str(tmp_path), size=16).splits["test"].names == ("sketch",)
    assert load("image-folder", folder=str(tmp_path), size=16, held_out="photo").splits["test"].names == (
        "photo",
    )
    with pytest.raises(InputError, match=r"unknown domain 'phot'.*'photo'"):
        load("image-folder", folder=str(tmp_path), held_out="phot")
    with pytest.raises(InputError, match=r"folder"):
        load("image-folder")
    put(tmp_path / "one", "photo/dog/1.png", "photo/dog/2.png")
    with pytest.raises(InputError, match="only one domain, 'photo'"):
        load("image-folder", folder=str(tmp_path / "one"))


def test_several_domains_are_held_out(tmp_path: Path) -> None:
    planted(tmp_path, LAYOUTS["pacs"])
    for name in ("image-folder", "pacs"):
        several = ["sketch", "photo"]
        data = load(name, folder=str(tmp_path), size=16, held_out=several)
        assert set(data.splits["test"].names) == set(several)
        assert data.splits["train"].names == ("art_painting", "cartoon")
        assert "test" not in load(name, folder=str(tmp_path), size=16, held_out=[]).splits
        with pytest.raises(InputError, match="all 4 domains are held out"):
            load(name, folder=str(tmp_path), size=16, held_out=list(LAYOUTS["pacs"].domains))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            ["train/dog/1.png", "val/dog/2.png"],
            r"train/, val/ in .* look like splits, not domains: the layout is",
        ),
        (["Training/a/dog/1.png", "TEST/a/dog/2.png"], r"TEST/, Training/ in .*: give '.*TEST'"),
        (["images/a/dog/1.png"], r"images/ in .*: give '.*images'"),
        (["train/a/dog/1.png", "valid/a/dog/1.png", "readme/x/y/1.png"], r"train/, valid/ in"),
    ],
)
def test_splits_are_no_domains(files: list[str], message: str, tmp_path: Path) -> None:
    put(tmp_path, *files)
    for call in (load, registry.module("image-folder").domains):
        name = ("image-folder",) if call is load else ()
        with pytest.raises(InputError, match=message) as error:
            call(*name, folder=str(tmp_path))
        assert "\n" not in str(error.value)
        assert "splits_are_domains" in str(error.value)


def test_splits_may_be_said_to_be_domains(tmp_path: Path) -> None:
    put(tmp_path, *(f"{d}/{c}/{i}.png" for d in ("train", "val") for c in "ab" for i in range(4)))
    data = load("image-folder", folder=str(tmp_path), size=16, splits_are_domains=True)
    assert data.splits["test"].names == ("val",)
    put(tmp_path, "test-site/a/1.png")  # no name of a split
    put(tmp_path / "other", *(f"{d}/a/1.png" for d in ("train", "oslo", "lima")))
    assert read_tree(tmp_path / "other", {"train": ["train"]}).domains == ("train",)
    assert domain_folders(tmp_path / "other") == ["lima", "oslo", "train"]


def test_a_folder_that_is_removed_is_named(tmp_path: Path) -> None:
    put(tmp_path / "in", *(f"{d}/{c}/{i}.png" for d in "xy" for c in "ab" for i in range(5)))
    for bad in ("stop", "skip"):
        put(tmp_path / "in", *(f"{d}/{c}/{i}.png" for d in "xy" for c in "ab" for i in range(5)))
        data = load("image-folder", folder=str(tmp_path / "in"), size=16, bad=bad, cache=False)
        shutil.rmtree(tmp_path / "in")
        with pytest.raises(InputError, match=r"^the folder '.*/in' no longer exists\.$"):
            data.examples[0]
        with pytest.raises(InputError, match=r"^the folder '.*/in' cannot be read: No such file"):
            load("image-folder", folder=str(tmp_path / "in"))


# Lists


def listed(folder: Path, text: str, name: str = "list.csv") -> str:
    put(folder, *(f"images/{i}.png" for i in range(12)))
    (folder / name).write_text(text, encoding="utf-8-sig")
    return str(folder / name)


def table(rows: list[str], head: str = "path,label,domain") -> str:
    return "\n".join([head, *rows]) + "\n"


def test_a_list_without_splits_holds_a_domain_out(tmp_path: Path) -> None:
    rows = [f"images/{i}.png,{i % 2 * 10 + 2},{'ab'[i // 6]}" for i in range(12)]
    data = load("manifest", file=listed(tmp_path, table(rows)), size=16)
    assert data.splits["test"].names == ("b",)
    assert data.splits["train"].names == data.splits["validation"].names == ("a",)
    assert data.classes == 2
    assert [data.examples[i][1] for i in range(4)] == [0, 1, 0, 1]  # 2 before 12
    assert load("manifest", file=str(tmp_path / "list.csv"), held_out="a", size=16).splits["test"].names == (
        "a",
    )


@pytest.mark.parametrize("last", ["10", "site 10", "2020-10"])
def test_folders_lists_and_tables_hold_out_the_same_domain(last: str, tmp_path: Path) -> None:
    """By default the last in natural order."""
    domains = [last.removesuffix("10") + number for number in ("10", "9", "1")]
    put(tmp_path / "in", *(f"{d}/{c}/{i}.png" for d in domains for c in "xy" for i in range(3)))
    rows = [f"in/{d}/{c}/{i}.png,{c},{d},{i}" for d in domains for c in "xy" for i in range(3)]
    (tmp_path / "list.csv").write_text(table(rows, "path,label,domain,width"))
    columns = {"label": "label", "domain": "domain", "columns": "width"}
    for data in (
        load("image-folder", folder=str(tmp_path / "in"), size=16),
        load("manifest", file=str(tmp_path / "list.csv"), size=16),
        load("table", file=str(tmp_path / "list.csv"), **columns),
    ):
        assert data.splits["test"].names == (last,)


def test_a_list_with_splits_is_taken_at_its_word(tmp_path: Path) -> None:
    split = ["train", "Train", "val", "test", "validation", "train"] * 2
    rows = [f"images/{i}.png,{split[i]},{'ab'[i // 6]},{'xy'[i % 2]}" for i in range(12)]
    file = listed(tmp_path, table(rows, "path,split,domain,label"))
    data = load("manifest", file=file, size=16)
    got = {name: domains.indices.tolist() for name, domains in data.splits.items()}
    assert got == {"train": [0, 1, 5, 6, 7, 11], "validation": [2, 4, 8, 10], "test": [3, 9]}
    assert data.splits["train"].names == ("a", "b")
    with pytest.raises(InputError, match=r"held_out: .*column 'split'"):
        load("manifest", file=file, held_out="a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            table(["a.png,x,y"], "path,labels,domain"),
            r"no column 'label' for .*Did you mean 'labels'\? Columns: 'path'",
        ),
        (table(["a.png"], "path"), "no column 'label'"),
        ("", "has no rows; its first line must name the columns"),
        (table([]), "lists no images"),
        (table(["a.png,x,"]), "row 1: domain is empty"),
        (table(["a.png,x,y", "b.png"]), "line 3: 1 values, but the first line names 3 columns"),
        (table(["a.png,x,y", ",x,y"]), "row 2: path is empty"),
        (table(["a.png,x,y", "a.png,z,y"]), "row 2: 'a.png' has label 'z', and in a row before it 'x'"),
        (table(["a.png,x,y,trian"], "path,label,domain,split"), "row 1: split is 'trian'; it must be train"),
        (table(["a.png,x,y,test"], "path,label,domain,split"), "no row of split train"),
    ],
)
def test_wrong_lists_are_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        load("manifest", file=listed(tmp_path, text))


def test_a_list_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="file"):
        load("manifest")
    with pytest.raises(InputError, match=r"nowhere.csv' cannot be read"):
        load("manifest", file=str(tmp_path / "nowhere.csv"))
    (tmp_path / "latin.csv").write_bytes("path,label,domain\né.png,x,y\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"latin.csv' is not UTF-8"):
        load("manifest", file=str(tmp_path / "latin.csv"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"list.parquet' is Parquet.*: pip install 'shoal\[tables\]'"):
        load("manifest", file=str(tmp_path / "list.parquet"))


def test_a_picture_listed_twice_is_told(tmp_path: Path) -> None:
    rows = [f"images/{i % 11}.png,x,{'ab'[i // 6]}" for i in range(12)]
    with pytest.warns(UserWarning, match="lists 1 images twice"):
        load("manifest", file=listed(tmp_path, table(rows)), size=16)


def test_blank_lines_are_no_rows(tmp_path: Path) -> None:
    text = 'path,label,domain\n"a\nb.png",x,y\n\nc.png,x,\n'
    with pytest.raises(InputError, match="row 2: domain is empty"):
        load("manifest", file=listed(tmp_path, text))


# Lists as Parquet

Columns = dict[str, list[Any]]


def both(folder: Path, columns: Columns) -> tuple[str, str]:
    """The same table as CSV and as Parquet."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = zip(*columns.values(), strict=True)
    file = listed(folder, table([",".join(map(str, row)) for row in rows], ",".join(columns)))
    parquet.write_table(arrow.table(columns), folder / "list.parquet", row_group_size=5)
    return file, str(folder / "list.parquet")


def columns_of(**more: list[Any]) -> Columns:
    paths = [f"images/{i}.png" for i in range(12)]
    return {"path": paths, "label": list("xy") * 6, "domain": [c for c in "abc" for _ in range(4)], **more}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"label": [10, 2] * 6},
        {"label": [True, False] * 6},
        {"split": ["train", "val", "test", "Train"] * 3},
        {"label": [10, 2] * 6, "note": [None, 1.5] * 6},
        {"domain": [2019, 2020, 2021] * 4},
    ],
)
def test_parquet_and_csv_give_the_same(more: Columns, tmp_path: Path) -> None:
    one, other = (
        load("manifest", file=file, size=16, augment=False) for file in both(tmp_path, columns_of(**more))
    )
    assert one.classes == other.classes == 2
    assert list(one.splits) == list(other.splits)
    for split, domains in one.splits.items():
        assert domains.names == other.splits[split].names
        assert domains.indices.tolist() == other.splits[split].indices.tolist()
    assert [y for _, y in map(one.examples.__getitem__, range(12))] == [
        y for _, y in map(other.examples.__getitem__, range(12))
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": None}, r"no column 'label' for .*list.parquet.*Columns: 'path', 'domain'"),
        ({"label": ["x"] * 6 + [None] + ["y"] * 5}, "row 7: label is empty"),
        ({"label": [1.0] * 6 + [float("nan")] + [2.0] * 5}, "row 7: label is empty"),
        ({"domain": ["a"] * 11 + ["  "]}, "row 12: domain is empty"),
        ({"path": [None, *map(str, range(11))]}, "row 1: path is empty"),
        ({"split": ["train"] * 11 + [None]}, "row 12: split is empty"),
        ({"split": ["train"] * 10 + ["tset"] * 2}, "row 11: split is 'tset'"),
        ({"path": ["one.png"] * 12}, "row 2: 'one.png' has label 'y', and in a row before it 'x'"),
    ],
)
def test_wrong_parquet_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    columns = {name: values for name, values in columns_of(**changes).items() if values is not None}
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(columns), tmp_path / "list.parquet", row_group_size=5)
    with pytest.raises(InputError, match=message):
        load("manifest", file=str(tmp_path / "list.parquet"))


def test_parquet_that_is_none(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(InputError, match=r"nowhere.parquet' cannot be read"):
        load("manifest", file=str(tmp_path / "nowhere.parquet"))
    (tmp_path / "list.parquet").write_text("path,label,domain\n")
    with pytest.raises(InputError, match=r"list.parquet' cannot be read"):
        load("manifest", file=str(tmp_path / "list.parquet"))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_paths_are_from_the_lists_folder_or_whole_and_may_have_spaces(kind: str, tmp_path: Path) -> None:
    put(tmp_path / "else where", "one.png", "two.png")
    there = [f"../else where/{name}.png" for name in ("one", "two")]
    whole = [str(tmp_path / "else where" / f"{name}.png") for name in ("one", "two")]
    columns = {"path": [*there, *whole], "label": list("xyxy"), "domain": list("aabb")}
    columns["split"] = ["train"] * 4
    (tmp_path / "my lists").mkdir()
    file = both(tmp_path / "my lists", columns)[kind == "parquet"]
    data = load("manifest", file=file, size=16, augment=False)
    assert all((data.examples[i][0] == data.examples[i + 2][0]).all() for i in range(2))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_listed_picture_that_is_not_there_is_named(kind: str, tmp_path: Path) -> None:
    columns = columns_of()
    columns["path"][5] = "images/gone.png"
    file = both(tmp_path, columns)[kind == "parquet"]
    with pytest.raises(InputError, match=r"images/gone.png' cannot be read \(FileNotFoundError"):
        load("manifest", file=file, size=16)
    with pytest.warns(UserWarning, match=r"images/gone.png' is skipped: FileNotFoundError"):
        assert load("manifest", file=file, size=16, bad="skip").classes == 2
