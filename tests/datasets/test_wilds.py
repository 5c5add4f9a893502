"""The six datasets of WILDS are read as the `wilds` package reads them, on small imitations."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from imitations import wilds as fake
from shoal import datasets, models
from shoal.api.data import check
from shoal.data.batch import DomainData
from shoal.datasets import registry
from shoal.datasets.from_wilds import from_wilds
from shoal.datasets.wilds import FOLDS, IDENTITIES, SPLITS, Counts, find, published, read_columns
from shoal.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore:The .future")
NAMES = ("camelyon17", "fmow", "iwildcam", "poverty", "civilcomments", "amazon")
FOLDERS = {name: published(name).folder for name in NAMES}
FIELDS = {"camelyon17": ["hospital"], "fmow": ["region"], "iwildcam": ["location"], "poverty": ["urban"]}
TRAINED_BY = {**FIELDS, "fmow": ["year", "region"], "poverty": ["country"]}


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wilds")
    for name in NAMES:
        assert fake.maker(name)(folder, 0, "small") == folder / FOLDERS[name]
    return folder


def loaded(name: str, root: Path, **options: Any) -> DomainData:
    if name in ("civilcomments", "amazon"):
        options = {"tokenizer": str(root / "tiny-bert"), **options}
    return datasets.load(name, folder=str(root), **options)


def package(wilds: Any, name: str, root: Path, **options: Any) -> Any:
    """The package's own reader, which was written for the strings of pandas 1."""
    pandas = pytest.importorskip("pandas")
    with pandas.option_context("future.infer_string", False):
        return wilds.get_dataset(name, root_dir=str(root), download=False, **options)


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
def test_every_example_is_in_at_most_one_split(name: str, root: Path) -> None:
    data = loaded(name, root)
    absent = {"camelyon17": ["id_test"], "civilcomments": ["id_validation", "id_test"]}.get(name, [])
    assert set(data.splits) == {split for split in SPLITS.values() if split not in absent}
    used = np.concatenate([domains.examples() for domains in data.splits.values()])
    assert len(np.unique(used)) == len(used)
    examples: Any = data.examples
    x, y = examples[int(used[0])]
    if isinstance(x, torch.Tensor):
        assert (x.shape, x.dtype) == (data.input_shape, torch.float32)
    assert data.classes is None or y == examples.known_labels()[used[0]]
    assert data.notes["examples"] == f"version {FOLDERS[name][-3:]}"


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
    with pytest.raises(InputError, match="size=225"):
        loaded("poverty", root, size=225)


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


@pytest.mark.parametrize("name", ["camelyon17", "fmow", "iwildcam"])
def test_an_imitation_is_what_the_package_reads(name: str, root: Path, wilds_package: Any) -> None:
    theirs = package(wilds_package, name, root)
    data = loaded(name, root)
    agrees(data, theirs, name)
    assert name == "fmow" or data.classes == theirs.n_classes
    size = {"camelyon17": 96, "fmow": None, "iwildcam": 448}[name]
    same_pictures(data, theirs, size, [0, 7, len(theirs) - 1])


@pytest.mark.parametrize("fold", list("ABCDE"))
def test_poverty_is_what_the_package_reads_in_every_fold(fold: str, root: Path, wilds_package: Any) -> None:
    theirs = package(wilds_package, "poverty", root, fold=fold)
    data = loaded("poverty", root, fold=fold)
    agrees(data, theirs, "poverty")
    held: Any = data.examples
    for i in (0, 11):
        assert torch.equal(held.evaluation()[i][0], theirs.get_input(i))


def test_countries_and_categories_are_the_packages(wilds_package: Any) -> None:
    from wilds.datasets.fmow_dataset import categories  # type: ignore[import-not-found]
    from wilds.datasets.poverty_dataset import SURVEY_NAMES  # type: ignore[import-not-found]

    groups = {name: list(group) for name, group in published("poverty").names.items()}
    countries = groups.pop("countries")
    assert sorted(c for group in groups.values() for c in group) == countries
    for fold, (validation, test) in FOLDS.items():
        theirs = SURVEY_NAMES[f"2009-17{fold}"]
        assert sorted(theirs["val"]) == groups[validation]
        assert sorted(theirs["test"]) == groups[test]
    assert list(published("fmow").names["classes"]) == categories


@pytest.mark.parametrize("name", ["civilcomments", "amazon"])
def test_texts_are_what_the_package_reads(name: str, root: Path, wilds_package: Any) -> None:
    theirs, data = package(wilds_package, name, root), loaded(name, root)
    examples: Any = data.examples
    assert examples.labels.tolist() == theirs.y_array.tolist()
    assert data.classes == theirs.n_classes
    assert [examples[i][0] for i in range(len(examples))] == [theirs.get_input(i) for i in range(len(theirs))]
    split = np.asarray(theirs.split_array)
    for their, number in theirs.split_dict.items():
        ours = data.splits[SPLITS[their]].examples()
        assert ours.tolist() == np.flatnonzero(split == number).tolist()
    fields = [field for field in theirs.metadata_fields if field != "from_source_domain"]
    assert set(fields) == set(examples.metadata)
    for field in fields:
        found = theirs.metadata_array[:, theirs.metadata_fields.index(field)].numpy()
        if field in ("user", "product", "category"):  # numbered in an order that theirs leaves to chance
            pairs = set(zip(examples.metadata[field].tolist(), found.tolist(), strict=True))
            assert len(pairs) == len(set(found.tolist())) == len({a for a, _ in pairs})
        else:
            assert examples.metadata[field].tolist() == found.tolist()
    x, y = examples.collate([examples[int(i)] for i in data.splits["validation"].indices_of(1)[:6]])
    assert x["input_ids"].shape == x["attention_mask"].shape
    assert len(y) == 6


def test_the_groups_of_comments_are_the_packages(root: Path, wilds_package: Any) -> None:
    from wilds.common.grouper import CombinatorialGrouper

    theirs, data = package(wilds_package, "civilcomments", root), loaded("civilcomments", root)
    assert data.uncounted == {"none, toxic", "none, not toxic"}
    for their, number in theirs.split_dict.items():
        domains = data.splits[SPLITS[their]]
        assert len(domains) == 18
        metadata = theirs.metadata_array[np.asarray(theirs.split_array) == number]
        for identity, grouper in zip(theirs._identity_vars, theirs._eval_groupers, strict=True):
            _, counts = grouper.metadata_to_group(metadata, return_counts=True)
            for label, word in enumerate(("not toxic", "toxic")):  # their groups are identity + 2 · label
                assert domains.sizes[domains.number(f"{identity}, {word}")] == counts[1 + 2 * label]
        none = (metadata[:, : len(IDENTITIES)].sum(1) == 0).numpy()
        toxic = metadata[:, theirs.metadata_fields.index("y")].numpy() == 1
        assert domains.sizes[domains.number("none, toxic")] == (none & toxic).sum()
    train = loaded("civilcomments", root, group_by="black").splits["train"]
    rows = np.flatnonzero(np.asarray(theirs.split_array) == theirs.split_dict["train"])
    codes = (
        CombinatorialGrouper(theirs, ["black", "y"]).metadata_to_group(theirs.metadata_array[rows]).numpy()
    )
    wanted = {frozenset(rows[codes == code].tolist()) for code in set(codes.tolist())}
    assert {frozenset(train.indices_of(d).tolist()) for d in range(len(train))} == wanted


def test_the_groups_of_reviews_are_the_reviewers(root: Path, wilds_package: Any) -> None:
    theirs, data = package(wilds_package, "amazon", root), loaded("amazon", root)
    users = np.asarray(theirs.metadata_map["user"])
    for their, number in theirs.split_dict.items():
        domains = data.splits[SPLITS[their]]
        chosen = np.flatnonzero(np.asarray(theirs.split_array) == number)
        of = users[theirs.metadata_array[chosen, 0].numpy()]
        assert set(domains.names) == set(map(str, of))
        for d, user in enumerate(domains.names):
            assert domains.indices_of(d).tolist() == chosen[of == user].tolist()


def test_subsets_of_the_package_train(root: Path, wilds_package: Any) -> None:
    from torchvision import transforms
    from wilds.common.grouper import CombinatorialGrouper

    theirs = package(wilds_package, "camelyon17", root)
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


def test_a_subset_with_numbers_as_labels(root: Path, wilds_package: Any) -> None:
    from wilds.common.grouper import CombinatorialGrouper

    theirs = package(wilds_package, "poverty", root)
    data = from_wilds(
        {"train": theirs.get_subset("train")},
        CombinatorialGrouper(theirs, ["country"]),
        measures=["Pearson r"],
        uncounted=["country = 3"],
    )
    x, y = data.examples[0]
    assert (data.classes, x.shape, y.dtype, y.shape) == (None, (8, 224, 224), torch.float32, ())
    assert (data.measures, data.uncounted) == (("Pearson r",), {"country = 3"})


@pytest.mark.parametrize("fields", [["year"], ["region", "year"], ["year", "region"], ["y", "year"]], ids=str)
def test_combined_fields_are_the_packages_groups(root: Path, wilds_package: Any, fields: list[str]) -> None:
    """Each domain is one combination, with the right names, also where the package's own would be wrong."""
    from wilds.common.grouper import CombinatorialGrouper

    theirs = package(wilds_package, "fmow", root)
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


def test_versions_and_places(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find("fmow", root) == find("fmow", root / "fmow_v1.1") == (root / "fmow_v1.1", "1.1")
    for version in ("2.0", "2.1"):
        (tmp_path / f"amazon_v{version}").mkdir()
        (tmp_path / f"amazon_v{version}" / "reviews.csv").touch()
    assert find("amazon", tmp_path).version == "2.1"
    assert find("amazon", tmp_path, 2.0).version == find("amazon", tmp_path, "v2.0").version == "2.0"
    renamed = tmp_path / "reviews"
    (tmp_path / "amazon_v2.0").rename(renamed)
    assert find("amazon", renamed, "2.0") == (renamed, "2.0")
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    assert find("amazon", None) == (tmp_path / "amazon_v2.1", "2.1")
    monkeypatch.delenv("SHOAL_DATA")
    with pytest.raises(InputError, match="files of FMoW-WILDS are needed; "):
        find("fmow", None)
    with pytest.raises(InputError, match=r"no folder camelyon17_v1\.0 with metadata\.csv.*server .* down"):
        find("camelyon17", tmp_path)
    with pytest.raises(InputError, match=r"no folder camelyon17_v1\.0"):  # that is another's metadata.csv
        find("camelyon17", root / FOLDERS["iwildcam"])
    with pytest.raises(InputError, match=r"unknown version of camelyon17 '2\.0'.*Known: 1\.0"):
        find("camelyon17", root, "2.0")
    with pytest.raises(InputError, match=r"version 2\.1; required is 2\.0"):
        find("amazon", tmp_path, "2.0")


@pytest.mark.parametrize(
    ("name", "images"), [("camelyon17", "patches"), ("fmow", "images"), ("poverty", "images")]
)
def test_a_table_without_images(name: str, images: str, root: Path, tmp_path: Path) -> None:
    (copied(name, root, tmp_path) / images).unlink()
    with pytest.raises(InputError, match=f"has a table but no images.*{images}"):
        loaded(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "table", "old", "new", "message"),
    [
        ("camelyon17", "metadata.csv", ",tumor,", ",tumour,", "no column 'tumor'"),
        ("camelyon17", "metadata.csv", ",0\n", ",x\n", "split is 'x' in record 1; it must be a whole number"),
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
        ("iwildcam", "metadata.csv", ",2013-", ",June ", "datetime is 'June .*must be a time"),
        ("poverty", "dhs_metadata.csv", "benin", "atlantis", "country is 'atlantis'"),
        ("poverty", "dhs_metadata.csv", "True", "maybe", "urban is 'maybe'"),
        (
            "civilcomments",
            "all_data_with_identities.csv",
            ",train,",
            ",dev,",
            "split is 'dev'; it must be one of",
        ),
        ("amazon", "reviews.csv", ",5.0,", ",6.0,", "overall is 6; it must be one of 1, 2, 3"),
        ("amazon", "splits/user.csv", "4,", "9,", "split is 9; it must be one of -1, 0, 1"),
        ("amazon", "splits/user.csv", "4,True\n", "", r"user.csv' has .* rows and reviews.csv has"),
    ],
)
def test_what_is_wrong_in_a_table_is_named(
    name: str, table: str, old: str, new: str, message: str, root: Path, tmp_path: Path
) -> None:
    place = copied(name, root, tmp_path)
    if "/" in table:
        (place / "splits").unlink()
        shutil.copytree(root / FOLDERS[name] / "splits", place / "splits")
    text = (place / table).read_text()
    assert old in text
    (place / table).write_text(text.replace(old, new))
    with pytest.raises(InputError, match=message):
        loaded(name, tmp_path)


def test_bad_numbers_and_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text('name,n,x\n"two\nlines",1,0.5\nb,2.0,1e3\nc,3.5,x\nNA,4,2\n')
    assert read_columns(path, {"name": str})["name"].tolist() == ["two\nlines", "b", "c", "NA"]
    for content, kinds, message in (
        (None, {"n": int}, r"n is '3\.5' in record 3; it must be a whole number"),
        (None, {"x": float}, "x is 'x' in record 3; it must be a number"),
        ("n\n1\ninf\n", {"n": int}, "n is 'inf' in record 2"),
        ("n\n", {"n": int}, "has no rows"),
        ("n\n\udcff\n", {"n": str}, "cannot be read"),
    ):
        if content is not None:
            path.write_text(content, errors="surrogateescape")
        with pytest.raises(InputError, match=message):
            read_columns(path, kinds)
    with pytest.raises(InputError, match="No such file"):
        read_columns(tmp_path / "none.csv", {"n": int})


def test_an_image_that_is_missing_or_broken(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / FOLDERS["camelyon17"], tmp_path / FOLDERS["camelyon17"])
    data = loaded("camelyon17", tmp_path)
    examples: Any = data.examples
    gone, damaged = (int(i) for i in data.splits["train"].indices_of(0)[:2])
    Path(examples.path(gone)).unlink()
    Path(examples.path(damaged)).write_bytes(Path(examples.path(damaged)).read_bytes()[:80])
    with pytest.raises(InputError, match=r"patch_.*cannot be read"):
        examples[gone]
    patient: Any = loaded("camelyon17", tmp_path, bad="skip").examples
    _, y = patient[damaged]
    assert y == examples.known_labels()[damaged]
    assert "files that cannot be read: 2" in check(tmp_path, dataset="camelyon17", workers=2).problems


def test_villages_are_mirrored_in_training_only_and_broken_ones_named(root: Path, tmp_path: Path) -> None:
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
    assert torch.equal(loaded("poverty", root, nightlights=False).examples[0][0][-1], torch.zeros(224, 224))
    place = copied("poverty", root, tmp_path)
    (place / "images").unlink()
    (place / "images").mkdir()
    np.savez_compressed(place / "images" / "landsat_poverty_img_1.npz", x=np.zeros((8, 2, 2)))
    np.savez_compressed(place / "images" / "landsat_poverty_img_2.npz", y=np.zeros((8, 2, 2)))
    (place / "images" / "landsat_poverty_img_3.npz").write_bytes(b"PK")
    broken: Any = loaded("poverty", tmp_path).examples
    for i, why in enumerate(("No such file", r"shape is \(8, 2, 2\)", "KeyError", "")):
        with pytest.raises(InputError, match=rf"img_{i}\.npz' cannot be read.*{why}"):
            broken[i]


@pytest.mark.parametrize("name", ["fmow", "iwildcam", "amazon"])
def test_the_check_compares_with_published_counts(
    name: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = loaded(name, root).splits
    counts = {s: len(d.examples()) for s, d in splits.items()}
    domains = {s: len(d) for s, d in splits.items()}
    version = FOLDERS[name][-3:]
    right = dataclasses.replace(published(name), counts={version: Counts(counts, domains)})
    entry = registry.module(name)
    monkeypatch.setattr(entry, "PUBLISHED", right)
    found = check(root, dataset=name, workers=1)
    assert found.problems == []
    assert "The counts match the published ones" in str(found)
    wrong = {version: Counts({**counts, "test": 70}, domains)}
    monkeypatch.setattr(entry, "PUBLISHED", dataclasses.replace(right, counts=wrong))
    assert check(root, dataset=name, workers=1).problems == [f"test has {counts['test']} examples, not 70"]
