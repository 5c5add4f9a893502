"""The six datasets of WILDS are read and scored as the `wilds` package does, on small imitations."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from imitations.wilds import WILDS
from shoal import datasets
from shoal.data.batch import DomainData
from shoal.data.domains import Domains
from shoal.datasets.wilds import SPLITS, published
from shoal.errors import InputError
from shoal.training.metrics import METRICS, Outcome

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore:The .future")
FOLDERS = {name: published(name).folder for name in WILDS}
FIELDS = {"camelyon17": ["hospital"], "fmow": ["region"], "iwildcam": ["location"], "poverty": ["urban"]}
FIELDS |= {"amazon": ["user"]}
TRAINED_BY = {**FIELDS, "fmow": ["year", "region"], "poverty": ["country"]}
SCORES = {
    "amazon": {"10th-percentile accuracy": "10th_percentile_acc", "accuracy": "acc_avg"},
    "camelyon17": {"accuracy": "acc_avg"},
    "civilcomments": {"worst-group accuracy": "acc_wg", "accuracy": "acc_avg"},
    "fmow": {"worst-group accuracy": "acc_worst_region", "accuracy": "acc_avg"},
    "iwildcam": {"macro F1": "F1-macro_all", "accuracy": "acc_avg", "macro recall": "recall-macro_all"},
    "poverty": {"worst-group Pearson r": "r_wg", "Pearson r": "r_all", "mse": "mse_avg"},
}
"""What WILDS calls each metric."""


def loaded(name: str, root: Path, **options: Any) -> DomainData:
    if name in ("civilcomments", "amazon"):
        options = {"tokenizer": str(root / "tiny-bert"), **options}
    return datasets.load(name, folder=str(root), **options)


def package(wilds: Any, name: str, root: Path, **options: Any) -> Any:
    """The package's own reader, which was written for the strings of pandas 1."""
    with pd.option_context("future.infer_string", False):
        return wilds.get_dataset(name, root_dir=str(root), download=False, **options)


def groups_of(theirs: Any, fields: list[str], rows: np.ndarray) -> list[list[int]]:
    """The package's groups of these examples, in the order of their first example."""
    columns = [theirs.metadata_fields.index(field) for field in fields]
    table = pd.DataFrame(theirs.metadata_array[rows][:, columns].numpy())
    return sorted(rows[members].tolist() for members in table.groupby(list(table)).indices.values())


def domains_are(data: DomainData, theirs: Any, name: str) -> None:
    """The splits, and the domains in each, are the package's splits and groups."""
    assert data.examples.known_labels().tolist() == theirs.y_array.numpy().ravel().tolist()  # type: ignore[attr-defined]
    array = np.asarray(theirs.split_array)
    there = {split: np.flatnonzero(array == number) for split, number in theirs.split_dict.items()}
    assert set(data.splits) == {SPLITS[split] for split, rows in there.items() if len(rows)}
    for split, rows in there.items():
        if len(rows):
            domains = data.splits[SPLITS[split]]
            fields = (TRAINED_BY if split == "train" else FIELDS)[name]
            wanted = groups_of(theirs, fields, rows)
            assert sorted(domains.indices_of(d).tolist() for d in range(len(domains))) == wanted, split


@pytest.mark.parametrize("name", ["camelyon17", "fmow", "iwildcam"])
def test_images_are_what_the_package_reads(name: str, wilds_root: Path, wilds_package: Any) -> None:
    from torchvision import transforms

    theirs, data = package(wilds_package, name, wilds_root), loaded(name, wilds_root)
    domains_are(data, theirs, name)
    assert data.classes == (62 if name == "fmow" else theirs.n_classes)
    steps: list[Any] = [transforms.Resize((448, 448))] if name == "iwildcam" else []
    steps += [transforms.ToTensor(), transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
    change = transforms.Compose(steps)
    for i in (0, 7, len(theirs) - 1):
        x, y = data.examples[i]
        assert torch.allclose(x, change(theirs.get_input(i)), atol=1e-5)
        assert y == theirs.y_array[i]


@pytest.mark.parametrize("fold", list("ABCDE"))
def test_villages_are_what_the_package_reads(fold: str, wilds_root: Path, wilds_package: Any) -> None:
    theirs = package(wilds_package, "poverty", wilds_root, fold=fold)
    data = loaded("poverty", wilds_root, fold=fold)
    domains_are(data, theirs, "poverty")
    examples: Any = data.examples
    assert torch.equal(examples.evaluation()[11][0], theirs.get_input(11))


@pytest.mark.parametrize("name", ["civilcomments", "amazon"])
def test_text_is_what_the_package_reads(name: str, wilds_root: Path, wilds_package: Any) -> None:
    theirs, data = package(wilds_package, name, wilds_root), loaded(name, wilds_root)
    examples: Any = data.examples
    assert [examples[i][0] for i in range(len(examples))] == [theirs.get_input(i) for i in range(len(theirs))]
    x, y = examples.collate([examples[int(i)] for i in data.splits["validation"].indices_of(1)[:6]])
    assert x["input_ids"].shape == x["attention_mask"].shape
    assert len(y) == 6
    if name == "amazon":
        domains_are(data, theirs, name)
        return
    # The package's groups are an identity or its absence × toxic or not; ours are those with an identity.
    y, names = theirs.y_array.numpy(), [*theirs._identity_vars]
    mentioned = theirs.metadata_array.numpy()[:, [theirs.metadata_fields.index(n) for n in names]] == 1
    columns = {**dict(zip(names, mentioned.T, strict=True)), "none": ~mentioned.any(1)}
    for split, number in theirs.split_dict.items():
        domains, inside = data.splits[SPLITS[split]], np.asarray(theirs.split_array) == number
        assert len(domains) == 18
        for identity, column in columns.items():
            for label, word in enumerate(("not toxic", "toxic")):
                rows = np.flatnonzero(inside & column & (y == label))
                assert domains.indices_of(domains.number(f"{identity}, {word}")).tolist() == rows.tolist()
    train = loaded("civilcomments", wilds_root, group_by="black").splits["train"]
    rows = np.flatnonzero(np.asarray(theirs.split_array) == 0)
    wanted = groups_of(theirs, ["black", "y"], rows)
    assert sorted(train.indices_of(d).tolist() for d in range(len(train))) == wanted


def test_countries_and_categories_are_the_packages(wilds_package: Any) -> None:
    from wilds.datasets.fmow_dataset import categories  # type: ignore[import-not-found]
    from wilds.datasets.poverty_dataset import SURVEY_NAMES  # type: ignore[import-not-found]

    poverty = published("poverty")
    for fold, (validation, test) in poverty.folds.items():
        theirs = SURVEY_NAMES[f"2009-17{fold}"]
        assert sorted(theirs["val"]) == poverty.groups[validation]
        assert sorted(theirs["test"]) == poverty.groups[test]
    assert sorted(c for group in poverty.groups.values() for c in group) == poverty.columns["country"]
    assert published("fmow").columns["category"] == categories


@pytest.mark.parametrize("name", SCORES)
def test_scores_are_the_packages(name: str, wilds_root: Path, wilds_package: Any) -> None:
    """Of random predictions."""
    data, theirs = loaded(name, wilds_root), package(wilds_package, name, wilds_root)
    draw = np.random.default_rng(0)
    assert next(iter(SCORES[name])) == data.metrics[0]
    for split in sorted({"val", "test"} & set(theirs.split_dict)):
        subset = theirs.get_subset(split)
        truth = np.asarray(subset.y_array).ravel()
        guesses = draw.integers(0, data.classes or 2, len(truth))
        guesses = np.where(draw.random(len(truth)) < 0.7, truth, guesses)
        answer = torch.from_numpy(guesses).reshape(subset.y_array.shape).to(subset.y_array.dtype)
        expected, _ = theirs.eval(answer, subset.y_array, subset.metadata_array)
        domains = data.splits[SPLITS[split]]
        rows = domains.examples()
        groups = Domains(domains.names, domains.offsets, np.searchsorted(rows, domains.indices))
        y = data.examples.known_labels()[rows].ravel()  # type: ignore[index]
        output = np.eye(data.classes)[guesses] if data.classes else guesses.astype(float)
        outcome = Outcome(y, output, groups, data.task.kind, excluded_groups=data.excluded_groups)
        for ours, called in SCORES[name].items():
            assert METRICS[ours](outcome) == pytest.approx(expected[called], abs=1e-6), (split, ours)


# Where they are found, and what is wrong with files


def copied(name: str, root: Path, to: Path) -> Path:
    """A copy of an imitation's tables; its folders are linked."""
    place = to / FOLDERS[name]
    place.mkdir()
    for part in (root / FOLDERS[name]).iterdir():
        if part.is_dir() and part.name != "splits":
            (place / part.name).symlink_to(part)
        else:
            shutil.copytree(part, place / part.name) if part.is_dir() else shutil.copy(part, place)
    return place


@pytest.mark.parametrize(
    ("name", "table", "old", "new", "message"),
    [
        ("camelyon17", "metadata.csv", ",tumor,", ",tumour,", "not found: .*'tumor'"),
        (
            "fmow",
            "rgb_metadata.csv",
            ",zoo,",
            ",castle,",
            "category is castle; it must be one of .'airport', ",
        ),
        ("amazon", "reviews.csv", ",5.0,", ",6.0,", r"row \d+: overall is 6.0; it must be one of .1, 2, 3"),
        ("amazon", "splits/user.csv", "4,True\n", "", r"user.csv' has .* rows and reviews.csv has"),
    ],
)
def test_what_is_wrong_in_a_table_is_named(
    name: str, table: str, old: str, new: str, message: str, wilds_root: Path, tmp_path: Path
) -> None:
    path = copied(name, wilds_root, tmp_path) / table
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(InputError, match=message):
        loaded(name, tmp_path)


def test_images_that_are_missing_or_broken(wilds_root: Path, tmp_path: Path) -> None:
    (copied("fmow", wilds_root, tmp_path) / "images").unlink()
    with pytest.raises(InputError, match=r"rgb_img_0\.png' cannot be read"):
        loaded("fmow", tmp_path).examples[0]
    place = copied("poverty", wilds_root, tmp_path) / "images"
    place.unlink()
    place.mkdir()
    np.savez_compressed(place / "landsat_poverty_img_1.npz", x=np.zeros((8, 2, 2)))
    (place / "landsat_poverty_img_2.npz").write_bytes(b"PK")
    broken: Any = loaded("poverty", tmp_path).examples
    for i, why in enumerate(("No such file", r"shape is \(8, 2, 2\)", "")):
        with pytest.raises(InputError, match=rf"img_{i}\.npz' cannot be read.*{why}"):
            broken[i]


def test_villages_are_mirrored_in_training_only(wilds_root: Path) -> None:
    data = loaded("poverty", wilds_root)
    examples: Any = data.examples
    trained, tested = (int(data.splits[split].indices[0]) for split in ("train", "test"))
    still = examples.evaluation()[trained][0]
    turned = [still, still.flip(1), still.flip(2), still.flip(1, 2)]
    torch.manual_seed(0)
    drawn = [examples[trained][0] for _ in range(40)]
    assert {next(k for k, one in enumerate(turned) if torch.equal(one, x)) for x in drawn} == {0, 1, 2, 3}
    assert torch.equal(examples[tested][0], examples.evaluation()[tested][0])
