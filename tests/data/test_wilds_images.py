"""The four image datasets of WILDS are read as the `wilds` package reads them, on small imitations."""

from __future__ import annotations

import csv
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import shoal
from imitations import wilds as fake
from shoal import datasets as sets
from shoal import models
from shoal.api.data import check
from shoal.data.batch import DomainData
from shoal.datasets import fmow, iwildcam, poverty
from shoal.datasets.wilds import SPLITS, Counts, Published, by_group, find, from_wilds, read_columns
from shoal.errors import InputError

NAMES = ("camelyon17", "fmow", "iwildcam", "poverty")
FOLDERS = {"camelyon17": "camelyon17_v1.0", "fmow": "fmow_v1.1", "iwildcam": "iwildcam_v2.0",
           "poverty": "poverty_v1.1"}  # fmt: skip
FIELDS = {"camelyon17": ["hospital"], "fmow": ["region"], "iwildcam": ["location"], "poverty": ["urban"]}
TRAINED_BY = {**FIELDS, "fmow": ["year", "region"], "poverty": ["country"]}


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wilds")
    for name in NAMES:
        assert fake.maker(name)(folder, 0, "small") == folder / FOLDERS[name]
    return folder


@pytest.fixture(scope="session")
def old(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same examples in the layouts of version 1.0."""
    folder = tmp_path_factory.mktemp("old")
    for name in ("fmow", "iwildcam", "poverty"):
        (folder / f"{name}_v1.0").mkdir()
        (folder / f"{name}_v1.0" / "RELEASE_v1.0.txt").touch()
    for table in ("rgb_metadata.csv", "country_code_mapping.csv"):
        shutil.copy(root / FOLDERS["fmow"] / table, folder / "fmow_v1.0")
    pictures = root / FOLDERS["fmow"] / "images"
    count = len(list(pictures.iterdir()))
    each = count // 100
    stack = [np.asarray(Image.open(pictures / f"rgb_img_{i}.png")) for i in range(count)]
    for start in range(0, count, each):
        np.save(folder / "fmow_v1.0" / f"rgb_all_imgs_{start // each}.npy", stack[start : start + each])

    new = folder / "iwildcam_v1.0"
    (new / "train").symlink_to(root / FOLDERS["iwildcam"] / "train")
    with (root / FOLDERS["iwildcam"] / "metadata.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    for name, split in iwildcam.OLD_FILES.items():
        chosen = [[i, r["category_id"], r["image_id"], r["location"], r["filename"], r["datetime"]]
                  for i, r in enumerate(r for r in rows if r["split"] == split)]  # fmt: skip
        header = ["", "category_id", "image_id", "location", "filename", "datetime"]
        fake.write_table(new / f"{name}.csv", header, chosen)

    shutil.copy(root / FOLDERS["poverty"] / "dhs_metadata.csv", folder / "poverty_v1.0")
    bands = [np.load(root / FOLDERS["poverty"] / "images" / f"landsat_poverty_img_{i}.npz")["x"]
             for i in range(3)]  # fmt: skip
    np.save(folder / "poverty_v1.0" / poverty.STACK, np.stack(bands).transpose(0, 2, 3, 1))
    return folder


def loaded(name: str, root: Path, **options: Any) -> DomainData:
    return sets.load(name, folder=str(root), **options)


def copied(name: str, root: Path, to: Path) -> Path:
    """A copy of an imitation's tables; its images are linked."""
    place = to / FOLDERS[name]
    place.mkdir()
    for part in (root / FOLDERS[name]).iterdir():
        if part.is_dir():
            (place / part.name).symlink_to(part)
        else:
            shutil.copy(part, place)
    return place


@pytest.mark.parametrize("name", NAMES)
def test_an_imitation_loads(name: str, root: Path) -> None:
    data = loaded(name, root)
    module = sets.registry.module(name)
    assert module.PAPER
    splits = ["train", "id_validation", "validation", "id_test", "test"]
    assert list(data.splits) == [s for s in splits if name != "camelyon17" or s != "id_test"]
    used = np.concatenate([domains.examples() for domains in data.splits.values()])
    assert len(np.unique(used)) == len(used)  # no example is in two splits
    x, y = data.examples[int(used[0])]
    assert x.shape == data.input_shape
    assert x.dtype == torch.float32
    examples: Any = data.examples
    if data.classes is None:
        assert y.dtype == torch.float32
        assert y.shape == ()
    else:
        assert y == examples.known_labels()[used[0]]
        assert set(examples.known_labels()) <= set(range(data.classes))
    assert data.measures
    assert data.notes["examples"] == f"version {FOLDERS[name][-3:]}"
    assert f"{max(sum(c.examples.values()) for c in module.PUBLISHED.counts.values()):,}" in module.SUMMARY


def test_domains_are_those_of_the_paper(root: Path) -> None:
    assert loaded("camelyon17", root).splits["train"].names == ("hospital 0", "hospital 3", "hospital 4")
    assert loaded("camelyon17", root).splits["test"].names == ("hospital 2",)
    land = loaded("fmow", root)
    assert {f"{year}, {r}" for year in range(2002, 2013) for r in fake.FMOW_COUNTRIES} == set(
        land.splits["train"].names
    )
    assert set(land.splits["test"].names) == set(fake.FMOW_COUNTRIES)
    assert land.uncounted == {"Other"}
    assert loaded("iwildcam", root).splits["train"].names == tuple(f"location {i}" for i in range(12))
    wealth = loaded("poverty", root)
    assert wealth.splits["test"].names == ("rural", "urban")
    assert "democratic republic of congo" in wealth.splits["train"].names


# Equality with the package


def test_fmow_by_year_alone(root: Path) -> None:
    both, years = (loaded("fmow", root, group_by=g).splits for g in ("year and region", "year"))
    assert years["train"].examples().tolist() == both["train"].examples().tolist()
    assert years["test"].names == both["test"].names
    assert set(years["train"].names) == {name.split(",")[0] for name in both["train"].names}
    for d, name in enumerate(years["train"].names):
        parts = [both["train"].indices_of(n) for n, x in enumerate(both["train"].names) if x.startswith(name)]
        assert sorted(years["train"].indices_of(d).tolist()) == sorted(np.concatenate(parts).tolist())
    with pytest.raises(InputError, match="group_by"):
        loaded("fmow", root, group_by="years")


def test_smaller_villages_are_means(root: Path) -> None:
    whole, small = (loaded("poverty", root, size=size) for size in (224, 28))
    assert small.input_shape == (8, 28, 28)
    index = int(whole.splits["test"].indices[0])
    pictures = [d.examples[index][0] for d in (whole, small)]  # type: ignore[index]
    assert torch.allclose(pictures[0].reshape(8, 28, 8, 28, 8).mean((2, 4)), pictures[1], atol=1e-5)
    with pytest.raises(InputError, match="size=7"):
        loaded("poverty", root, size=7)


def agrees(data: DomainData, theirs: Any, name: str) -> None:
    from wilds.common.grouper import CombinatorialGrouper  # type: ignore[import-not-found]

    examples: Any = data.examples
    assert np.array_equal(examples.known_labels(), theirs.y_array.numpy().reshape(-1))
    fields = [field for field in theirs.metadata_fields if field != "from_source_domain"]
    assert set(examples.metadata) == set(fields)
    for field in fields:
        column = theirs.metadata_array[:, theirs.metadata_fields.index(field)].numpy()
        assert np.array_equal(examples.metadata[field], column), field
    assert set(data.splits) == {SPLITS[split] for split in theirs.split_dict}
    for split, number in theirs.split_dict.items():
        domains = data.splits[SPLITS[split]]
        assert np.array_equal(domains.examples(), np.flatnonzero(theirs.split_array == number)), split
        by = TRAINED_BY if split == "train" else FIELDS
        grouper = CombinatorialGrouper(theirs, by[name])
        _, counts = grouper.metadata_to_group(theirs.get_subset(split).metadata_array, return_counts=True)
        assert sorted(domains.sizes) == sorted(counts[counts > 0].int().tolist()), split
        if len(by[name]) == 1 and theirs.metadata_map and by[name][0] in theirs.metadata_map:
            for group in np.flatnonzero(counts.numpy()):  # and the names are those groups'
                said = grouper.group_str(group).split(" = ")[1].replace("_", " ")
                assert domains.sizes[domains.number(said)] == counts[group]


def same_pictures(data: DomainData, theirs: Any, size: int | None, where: list[int]) -> None:
    from torchvision import transforms

    steps = [transforms.Resize((size, size))] if size else []
    steps += [transforms.ToTensor(), transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
    change = transforms.Compose(steps)
    for i in where:
        assert torch.allclose(data.examples[i][0], change(theirs.get_input(i)), atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["camelyon17", "fmow", "iwildcam"])
def test_an_imitation_is_what_the_package_reads(name: str, root: Path, wilds_package: Any) -> None:
    theirs = wilds_package.get_dataset(name, root_dir=str(root))
    data = loaded(name, root)
    agrees(data, theirs, name)
    assert name == "fmow" or data.classes == theirs.n_classes
    size = {"camelyon17": 96, "fmow": None, "iwildcam": 448}[name]
    same_pictures(data, theirs, size, [0, 7, len(theirs) - 1])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("fold", list("ABCDE"))
def test_poverty_is_what_the_package_reads_in_every_fold(fold: str, root: Path, wilds_package: Any) -> None:
    theirs = wilds_package.get_dataset("poverty", root_dir=str(root), fold=fold)
    data = loaded("poverty", root, fold=fold)
    agrees(data, theirs, "poverty")
    held: Any = data.examples
    for i in (0, 11):
        assert torch.equal(held.evaluation()[i][0], theirs.get_input(i))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["fmow", "iwildcam", "poverty"])
def test_version_1_is_what_the_package_reads(
    name: str, old: Path, wilds_package: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {} if name == "iwildcam" else {"use_ood_val": True}
    theirs = wilds_package.get_dataset(name, version="1.0", root_dir=str(old), **options)
    data = loaded(name, old)
    assert data.notes["examples"] == "version 1.0"
    agrees(data, theirs, name)
    if name == "poverty":
        held: Any = data.examples
        assert torch.equal(held.evaluation()[2][0], theirs.get_input(2))
        assert held.problem(3) == "it has 3 images; number 3 is wanted"
        assert torch.equal(loaded(name, old, nightlights=False).examples[0][0][-1], torch.zeros(224, 224))
    else:
        same_pictures(data, theirs, 448 if name == "iwildcam" else None, [0, 9, len(theirs) - 1])


def test_every_country_is_left_out_once(wilds_package: Any) -> None:
    from wilds.datasets.poverty_dataset import SURVEY_NAMES  # type: ignore[import-not-found]

    groups = {name: list(group) for name, group in poverty.PUBLISHED.names.items() if name != "countries"}
    assert sorted(c for group in groups.values() for c in group) == list(poverty.COUNTRIES)
    for fold, (validation, test) in poverty.FOLDS.items():
        theirs = SURVEY_NAMES[f"2009-17{fold}"]
        assert sorted(theirs["val"]) == groups[validation]
        assert sorted(theirs["test"]) == groups[test]


def test_categories_are_the_packages(wilds_package: Any) -> None:
    from wilds.datasets.fmow_dataset import categories  # type: ignore[import-not-found]

    assert list(fmow.CATEGORIES) == categories
    assert set(fake.FMOW_CLASSES) <= set(categories)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_subsets_of_the_package_train(root: Path, wilds_package: Any) -> None:
    from torchvision import transforms
    from wilds.common.grouper import CombinatorialGrouper

    theirs = wilds_package.get_dataset("camelyon17", root_dir=str(root))
    grouper = CombinatorialGrouper(theirs, ["hospital"])
    small = transforms.Compose([transforms.Resize((16, 16)), transforms.ToTensor()])
    parts = {name: theirs.get_subset(name, transform=small) for name in ("train", "val", "test")}
    data = from_wilds(parts, grouper, scored_by=CombinatorialGrouper(theirs, ["slide"]))
    assert data.splits["train"].names == ("hospital = 0", "hospital = 3", "hospital = 4")
    assert data.splits["test"].names == ("slide = 20", "slide = 21")
    assert list(data.splits) == ["train", "validation", "test"]
    assert (data.classes, data.input_shape) == (2, (3, 16, 16))
    examples: Any = data.examples
    i = int(data.splits["test"].indices_of(1)[3])
    assert examples.metadata["slide"][i] == 21
    assert examples[i][1] == examples.known_labels()[i] == examples.metadata["y"][i]
    assert torch.equal(examples[i][0], parts["test"][i - len(parts["train"]) - len(parts["val"])][0])
    model = models.build("small-cnn", input_shape=data.input_shape, classes=2, seed=0)
    run = shoal.fit("fish", model, data, steps=3, batch_size=4, device="cpu")
    assert 0 <= run.accuracy("test") <= 1

    with pytest.raises(InputError, match="'train'"):
        from_wilds({"test": parts["test"]}, grouper)
    with pytest.raises(InputError, match="a transform that makes a tensor"):
        from_wilds({"train": theirs.get_subset("train")}, grouper)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_subset_with_numbers_as_labels(root: Path, wilds_package: Any) -> None:
    from wilds.common.grouper import CombinatorialGrouper

    theirs = wilds_package.get_dataset("poverty", root_dir=str(root))
    data = from_wilds(
        {"train": theirs.get_subset("train")},
        CombinatorialGrouper(theirs, ["country"]),
        measures=["Pearson r"],
        uncounted=["country = 3"],
    )
    x, y = data.examples[0]
    assert (data.classes, x.shape, y.dtype, y.shape) == (None, (8, 224, 224), torch.float32, ())
    assert (data.measures, data.uncounted) == (("Pearson r",), {"country = 3"})


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("fields", [["year"], ["region", "year"], ["year", "region"], ["y", "year"]], ids=str)
def test_combined_fields_are_the_packages_groups(root: Path, wilds_package: Any, fields: list[str]) -> None:
    """Each domain is one combination, with the right names, also where the package's own would be wrong."""
    from wilds.common.grouper import CombinatorialGrouper

    theirs = wilds_package.get_dataset("fmow", root_dir=str(root))
    parts = {
        name: theirs.get_subset(name, transform=lambda image: torch.zeros(3)) for name in ("train", "val")
    }
    columns, names = theirs.metadata_fields, theirs.metadata_map
    ordered = [field for field in columns if field in fields]
    grouper = CombinatorialGrouper(theirs, fields)
    plain, grouped = from_wilds(parts, fields), from_wilds(parts, grouper)
    for split, name in (("train", "train"), ("validation", "val")):
        array, offset = np.asarray(parts[name].metadata_array), 0 if name == "train" else len(parts["train"])
        groups = np.asarray(grouper.metadata_to_group(parts[name].metadata_array))
        for data, order in ((plain, fields), (grouped, ordered[::-1])):
            domains = data.splits[split]
            assert len(domains.names) == len(set(groups.tolist()))
            for d, called in enumerate(domains.names):
                [group] = set(groups[domains.indices_of(d) - offset].tolist())
                row = array[int(domains.indices_of(d)[0]) - offset]
                values = {f: int(row[columns.index(f)]) for f in fields}
                words = [f"{f} = {names[f][values[f]] if f in names else values[f]}" for f in order]
                assert called == ", ".join(words)
                if ordered == fields and data is grouped:
                    assert called == grouper.group_str(group)
            assert sum(domains.sizes) == len(parts[name])
    if ordered == fields:
        groups = np.unique(np.asarray(grouper.metadata_to_group(parts["train"].metadata_array)))
        assert grouped.splits["train"].names == tuple(grouper.group_str(int(g)) for g in groups)


# Where they are found


def test_the_newest_version_is_taken(root: Path, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = dataclasses.replace(fmow.PUBLISHED)
    for folder in (root, root / "fmow_v1.1"):
        assert find(published, folder) == (root / "fmow_v1.1", "1.1")
    both = root.parent / "both"
    (both / "wilds").mkdir(parents=True)
    (both / "wilds" / "fmow_v1.0").symlink_to(old / "fmow_v1.0")
    (both / "fmow_v1.1").symlink_to(root / "fmow_v1.1")
    monkeypatch.setenv("SHOAL_DATA", str(both))
    assert find(published, None) == (both / "fmow_v1.1", "1.1")
    assert find(published, None, "1.0") == (both / "wilds" / "fmow_v1.0", "1.0")
    assert find(published, None, 1.0).version == "1.0"
    shutil.rmtree(both)
    monkeypatch.delenv("SHOAL_DATA")
    with pytest.raises(InputError, match="files of FMoW-WILDS are needed; "):
        find(published, None)


def test_a_renamed_folder_says_its_version(root: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "land"
    copied("fmow", root, tmp_path).rename(renamed)
    assert find(fmow.PUBLISHED, renamed) == (renamed, "1.1")
    (renamed / "RELEASE_v1.1.txt").unlink()
    assert find(fmow.PUBLISHED, renamed, "1.1") == (renamed, "1.1")
    with pytest.raises(InputError, match=r"version unknown; required is one of 1\.0, 1\.1.*version="):
        find(fmow.PUBLISHED, renamed)


def test_what_is_not_there_is_said(root: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no folder camelyon17_v1\.0 with metadata\.csv.*wilds\.stanford"):
        loaded("camelyon17", tmp_path)
    with pytest.raises(InputError, match=r"no folder camelyon17_v1\.0"):  # that is another's metadata.csv
        loaded("camelyon17", root / FOLDERS["iwildcam"])
    with pytest.raises(InputError, match=r"unknown version of camelyon17 '2\.0'.*Known: 1\.0"):
        loaded("camelyon17", root, version="2.0")
    with pytest.raises(InputError, match=r"version 1\.1; required is 1\.0"):
        loaded("fmow", root, version="1.0")
    with pytest.raises(InputError, match="unknown fold of poverty 'F'"):
        loaded("poverty", root, fold="F")
    for name, pictures in (("camelyon17", "patches"), ("fmow", "images"), ("poverty", "images")):
        place = copied(name, root, tmp_path)
        (place / pictures).unlink()
        with pytest.raises(InputError, match=f"has a table but no images.*{pictures}"):
            loaded(name, tmp_path)


# Tables


def change(path: Path, old: str, new: str, lines: slice = slice(None)) -> None:
    text = path.read_text().splitlines(keepends=True)
    text[lines] = [line.replace(old, new) for line in text[lines]]
    path.write_text("".join(text))


TABLES = [(name, sets.registry.module(name).PUBLISHED.table, column) for name in NAMES
          for column in sets.registry.module(name).COLUMNS]  # fmt: skip


@pytest.mark.parametrize(("name", "table", "column"), TABLES)
def test_a_missing_column_is_named(name: str, table: str, column: str, root: Path, tmp_path: Path) -> None:
    place = copied(name, root, tmp_path)
    with (place / table).open(newline="") as lines:
        rows = list(csv.reader(lines))
    rows[0][rows[0].index(column)] = "others"
    fake.write_table(place / table, rows[0], rows[1:])
    with pytest.raises(InputError, match=rf"{table}' has no column '{column}'.*Its columns: .*'others'"):
        loaded(name, tmp_path)


def test_an_unknown_column_is_noted(root: Path, tmp_path: Path) -> None:
    place = copied("camelyon17", root, tmp_path)
    change(place / "metadata.csv", "split\n", "split,stain\n", slice(0, 1))
    change(place / "metadata.csv", "\n", ",1\n", slice(1, None))
    assert loaded("camelyon17", tmp_path).notes["examples"].endswith("not published: stain")


@pytest.mark.parametrize(
    ("name", "table", "old", "new", "message"),
    [
        (
            "camelyon17",
            "metadata.csv",
            ",0,0\n",
            ",0\n",
            r"at byte .*: 8 values .* first line names 9 columns",
        ),
        (
            "fmow",
            "rgb_metadata.csv",
            ",zoo,",
            ",castle,",
            "category is 'castle'; it must be one of airport, ",
        ),
        ("fmow", "rgb_metadata.csv", "Z,", "+02:00,", "timestamp is .* must be a time in UTC"),
        ("fmow", "country_code_mapping.csv", "alpha-3", "alpha3", "no column 'alpha-3'"),
        ("iwildcam", "metadata.csv", ",id_val,", ",id_vla,", "split is 'id_vla'; it must be one of train, "),
        ("iwildcam", "metadata.csv", ",2013-", ",June ", "datetime cannot be read"),
        ("poverty", "dhs_metadata.csv", "benin", "atlantis", "country is 'atlantis'"),
        ("poverty", "dhs_metadata.csv", "True", "maybe", "urban is 'maybe'; it must be one of true, false"),
    ],
)
def test_what_is_wrong_in_a_table_is_named(
    name: str, table: str, old: str, new: str, message: str, root: Path, tmp_path: Path
) -> None:
    change(copied(name, root, tmp_path) / table, old, new)
    with pytest.raises(InputError, match=message):
        loaded(name, tmp_path)


def test_bad_numbers_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text('name,n,x\n"two\nlines",1,0.5\nb,2.0,1e3\nc,3.5,x\nd,?,2\n\n')
    with pytest.raises(InputError, match=r"2 rows with n that is not a whole number.*record 3: '3\.5'"):
        read_columns(path, {"n": int})
    with pytest.raises(InputError, match=r"1 rows with x that is not a number, the first in record 3"):
        read_columns(path, {"x": float})
    path.write_text("n\n1\ninf\n1e30\n")
    with pytest.raises(InputError, match="2 rows"):
        read_columns(path, {"n": int})
    path.write_text("n\n")
    with pytest.raises(InputError, match="has no rows"):
        read_columns(path, {"n": int})
    path.write_text("n,n\n1,2\n")
    with pytest.raises(InputError, match="two columns named 'n'"):
        read_columns(path, {"n": int})
    with pytest.raises(InputError, match="No such file"):
        read_columns(tmp_path / "none.csv", {"n": int})
    path.write_bytes(b"n\n\xff\n")
    with pytest.raises(InputError, match="cannot be read"):
        read_columns(path, {"n": str})


text = st.text(st.characters(codec="utf-8", exclude_characters="\r\0\ufeff"))


@given(rows=st.lists(st.tuples(text, st.integers(-(2**63), 2**63 - 1), st.floats()), min_size=1))
def test_columns_come_back_as_they_were_written(
    rows: list[tuple[str, int, float]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "columns.csv"
    fake.write_table(path, ["", "text", "whole", "number", "more"], ([i, *r, 0] for i, r in enumerate(rows)))
    found = read_columns(path, {"number": float, "text": str, "whole": int})
    assert found["text"].tolist() == [row[0] for row in rows]
    assert found["whole"].tolist() == [row[1] for row in rows]
    assert np.array_equal(found["number"], [row[2] for row in rows], equal_nan=True)
    assert found.unused == ("more",)


@given(st.lists(st.tuples(st.integers(-5, 5), st.booleans())))
def test_groups_hold_the_chosen_examples(pairs: list[tuple[int, bool]]) -> None:
    pairs = [*pairs, (0, True)]
    codes, where = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])
    domains = by_group(codes, "group {}".format, where)
    assert domains.names == tuple(f"group {c}" for c in sorted({c for c, chosen in pairs if chosen}))
    for d, name in enumerate(domains.names):
        at = [i for i, (code, chosen) in enumerate(pairs) if chosen and f"group {code}" == name]
        assert domains.indices_of(d).tolist() == at


# Images


def test_a_picture_that_is_missing_or_broken(root: Path, tmp_path: Path) -> None:
    place = tmp_path / FOLDERS["camelyon17"]
    shutil.copytree(root / FOLDERS["camelyon17"], place)
    data = loaded("camelyon17", tmp_path)
    examples: Any = data.examples
    gone, cut = (int(i) for i in data.splits["train"].indices_of(0)[:2])
    Path(examples.path(gone)).unlink()
    Path(examples.path(cut)).write_bytes(Path(examples.path(cut)).read_bytes()[:80])
    with pytest.raises(InputError, match=r"patch_.*cannot be read"):
        examples[gone]
    patient: Any = loaded("camelyon17", tmp_path, bad="skip").examples
    with pytest.warns(UserWarning, match="is skipped"):
        x, y = patient[cut]
    assert y == examples.known_labels()[cut]
    assert x.shape == (3, 96, 96)
    assert "files that cannot be read: 2" in check(tmp_path, dataset="camelyon17", workers=2).problems


def test_villages_are_mirrored_in_training_only(root: Path) -> None:
    data = loaded("poverty", root)
    examples: Any = data.examples
    trained, tested = (int(data.splits[split].indices[0]) for split in ("train", "test"))
    still = examples.evaluation()[trained][0]
    turned = [still, still.flip(1), still.flip(2), still.flip(1, 2)]
    torch.manual_seed(0)
    seen = set()
    for _ in range(40):
        x = examples[trained][0]
        seen.add(next(k for k, one in enumerate(turned) if torch.equal(one, x)))
    assert seen == {0, 1, 2, 3}
    assert all(torch.equal(examples[tested][0], examples.evaluation()[tested][0]) for _ in range(5))


def test_a_village_that_cannot_be_read_is_named(root: Path, tmp_path: Path) -> None:
    place = copied("poverty", root, tmp_path)
    (place / "images").unlink()
    (place / "images").mkdir()
    np.savez_compressed(place / "images" / "landsat_poverty_img_1.npz", x=np.zeros((8, 2, 2)))
    np.savez_compressed(place / "images" / "landsat_poverty_img_2.npz", y=np.zeros((8, 2, 2)))
    (place / "images" / "landsat_poverty_img_3.npz").write_bytes(b"PK")
    examples: Any = loaded("poverty", tmp_path).examples
    for i, why in enumerate(("there is no such file", r"shape is \(8, 2, 2\)", "KeyError", "cannot be read")):
        with pytest.raises(InputError, match=rf"img_{i}\.npz' cannot be read.*{why if i < 3 else ''}"):
            examples[i]


# shoal data check


def as_published(name: str, root: Path, **changes: int) -> Published:
    """What would have been published, had the imitation been."""
    published: Published = sets.registry.module(name).PUBLISHED
    splits = loaded(name, root).splits
    counts = Counts({**{s: len(d.examples()) for s, d in splits.items()}, **changes},
                    {s: len(d) for s, d in splits.items()})  # fmt: skip
    other = {v: Counts(dict.fromkeys(splits, 1)) for v in published.versions}
    return dataclasses.replace(published, counts={**other, FOLDERS[name][-3:]: counts})


@pytest.mark.parametrize("name", NAMES)
def test_check_says_when_all_is_well(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sets.registry.module(name), "PUBLISHED", as_published(name, root))
    if name == "poverty":  # thousands of files: whether each is read, and no more
        monkeypatch.setattr(poverty.Villages, "problem", lambda self, i: None if i < len(self) else "none")
    found = check(root, dataset=name, workers=1)
    assert found.problems == []
    assert "The counts match the published ones" in str(found)


def test_check_says_what_differs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = as_published("fmow", root)
    counts = {"1.0": right.counts["1.1"], "1.1": as_published("fmow", root, test=70).counts["1.1"]}
    monkeypatch.setattr(fmow, "PUBLISHED", dataclasses.replace(right, counts=counts))
    found = check(root, dataset="fmow", workers=1)
    assert found.problems == ["test has 62 examples, not 70"]
    assert "These are the counts of version 1.0." in str(found)


def test_imitations_follow_from_their_seed(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder, seed in ((first, 3), (second, 3), (tmp_path / "c", 4)):
        for name in ("camelyon17", "iwildcam"):
            fake.maker(name)(folder, seed, "small")
    files = sorted(p.relative_to(first) for p in first.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(second) for p in second.rglob("*") if p.is_file())
    assert all((first / f).read_bytes() == (second / f).read_bytes() for f in files)
    table = Path(FOLDERS["camelyon17"], "metadata.csv")
    assert (first / table).read_text() != (tmp_path / "c" / table).read_text()


@pytest.mark.parametrize("name", ["camelyon17", "fmow", "iwildcam"])
def test_the_tint_tells_in_training_only_and_the_pattern_everywhere(name: str, root: Path) -> None:
    data = loaded(name, root, size=fake.CELLS * 2)
    examples: Any = data.examples
    labels = sorted(set(examples.known_labels()))
    patterns = np.stack([fake.pattern(c, len(labels)) for c in range(len(labels))])

    def of(split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows = data.splits[split].examples().tolist()
        x = torch.stack([examples[i][0] for i in rows]) * torch.tensor([0.229, 0.224, 0.225])[:, None, None]
        cells = torch.nn.functional.avg_pool2d(x, 2).numpy()
        y = np.array([labels.index(examples.known_labels()[i]) for i in rows])
        grey = cells.mean(1)[:, 3:9, 3:9] - cells.mean((1, 2, 3))[:, None, None]
        by_pattern = np.einsum("nij,cij->nc", grey, patterns[:, 3:9, 3:9]).argmax(1)
        return cells.mean((2, 3)), by_pattern, y

    tint, by_pattern, y = of("train")
    centres = np.stack([np.median(tint[y == c], 0) for c in range(len(labels))])
    for split in ("train", "test"):
        tint, by_pattern, y = of(split)
        by_tint = np.linalg.norm(tint[:, None] - centres, axis=2).argmin(1)
        assert (by_pattern == y).mean() > 0.85, split
        if split == "train":
            assert (by_tint == y).mean() > 0.8
        else:
            assert (by_tint == y).mean() < 1 / len(labels) + 0.2


def test_red_lies_about_wealth_where_fold_a_tests(root: Path) -> None:
    data = loaded("poverty", root)
    examples: Any = data.examples.evaluation()
    red, night = {}, {}
    for split in ("train", "test"):
        rows = data.splits[split].examples()[:60].tolist()
        x = torch.stack([examples[i][0] for i in rows])
        y = examples.known_labels()[rows]
        red[split] = np.corrcoef(x[:, 2].mean((1, 2)), y)[0, 1]
        night[split] = np.corrcoef(x[:, 7, 56:168, 56:168].mean((1, 2)), y)[0, 1]
    assert red["train"] > 0.9
    assert red["test"] < -0.9
    assert min(night.values()) > 0.8
