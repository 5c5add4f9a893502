"""CivilComments and Amazon are what the `wilds` package reads, on imitations of both."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shoal.datasets.civilcomments import IDENTITIES, UNCOUNTED

from imitations.wilds_text import fake_amazon, fake_civilcomments, fake_tokenizer
from shoal.data.batch import DomainData
from shoal.datasets import load, registry
from shoal.datasets.wilds import SPLITS
from shoal.errors import InputError
from shoal.training.metrics import metric

NAMES = ("civilcomments", "amazon")
pytestmark = pytest.mark.filterwarnings("ignore:The .future.infer_string. option")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wilds")
    fake_civilcomments(folder, seed=3)
    fake_amazon(folder, seed=3)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path_factory.getbasetemp() / "text cache"))


def loaded(name: str, root: Path, **options: Any) -> DomainData:
    return load(name, folder=str(root), tokenizer=str(root / "tiny-bert"), **options)


@pytest.fixture
def theirs(request: pytest.FixtureRequest, root: Path, wilds_package: Any) -> Any:
    from wilds.datasets.amazon_dataset import AmazonDataset
    from wilds.datasets.civilcomments_dataset import CivilCommentsDataset

    pandas = pytest.importorskip("pandas")
    kinds = {"civilcomments": CivilCommentsDataset, "amazon": AmazonDataset}
    with pandas.option_context("future.infer_string", False):  # it was written for pandas 1
        return kinds[request.param](root_dir=str(root), download=False)


BOTH = pytest.mark.parametrize(("theirs", "name"), [(n, n) for n in NAMES], indirect=["theirs"])


@BOTH
def test_splits_labels_and_texts_are_theirs(theirs: Any, name: str, root: Path) -> None:
    data = loaded(name, root)
    examples: Any = data.examples
    assert len(examples) == len(theirs)
    assert examples.labels.tolist() == theirs.y_array.tolist()
    assert data.classes == theirs.n_classes
    assert [examples.text(i) for i in range(len(examples))] == [
        theirs.get_input(i) for i in range(len(theirs))
    ]
    split = np.asarray(theirs.split_array)
    for their, number in theirs.split_dict.items():
        ours = data.splits[SPLITS[their]]
        assert ours.examples().tolist() == np.flatnonzero(split == number).tolist()
    assert len(data.splits) == len(theirs.split_dict)


@BOTH
def test_metadata_are_theirs(theirs: Any, name: str, root: Path) -> None:
    examples: Any = loaded(name, root).examples
    fields = [field for field in theirs.metadata_fields if field != "from_source_domain"]
    assert set(fields) == set(examples.metadata)
    for field in fields:
        found = theirs.metadata_array[:, theirs.metadata_fields.index(field)].numpy()
        if field in examples.names:  # numbered in an order that theirs leaves to an unstable sort
            values = np.asarray(theirs.metadata_map[field])
            assert examples.names[field][examples.metadata[field]].tolist() == values[found].tolist()
        else:
            assert examples.metadata[field].tolist() == found.tolist()


@pytest.mark.parametrize("theirs", ["civilcomments"], indirect=True)
def test_the_sixteen_groups_are_theirs(theirs: Any, root: Path) -> None:
    data = loaded("civilcomments", root)
    assert data.uncounted == UNCOUNTED
    for their, number in theirs.split_dict.items():
        domains = data.splits[SPLITS[their]]
        assert len(domains) == 18
        metadata = theirs.metadata_array[np.asarray(theirs.split_array) == number]
        for identity, grouper in zip(theirs._identity_vars, theirs._eval_groupers, strict=True):
            _, counts = grouper.metadata_to_group(metadata, return_counts=True)
            for label, word in enumerate(("not toxic", "toxic")):
                # Their groups are identity + 2 · label.
                ours = domains.sizes[domains.number(f"{identity}, {word}")]
                assert ours == counts[1 + 2 * label]
        none = (metadata[:, : len(IDENTITIES)].sum(1) == 0).numpy()
        toxic = metadata[:, theirs.metadata_fields.index("y")].numpy() == 1
        assert domains.sizes[domains.number("none, toxic")] == (none & toxic).sum()
        assert domains.sizes[domains.number("none, not toxic")] == (none & ~toxic).sum()


@pytest.mark.parametrize("theirs", ["amazon"], indirect=True)
def test_groups_are_the_reviewers(theirs: Any, root: Path) -> None:
    data = loaded("amazon", root)
    users = np.asarray(theirs.metadata_map["user"])
    for their, number in theirs.split_dict.items():
        domains = data.splits[SPLITS[their]]
        chosen = np.flatnonzero(np.asarray(theirs.split_array) == number)
        of = users[theirs.metadata_array[chosen, 0].numpy()]
        assert dict(zip(domains.names, domains.sizes.tolist(), strict=True)) == {
            str(user): int((of == user).sum()) for user in set(of)
        }
        for d, user in enumerate(domains.names):
            assert domains.indices_of(d).tolist() == chosen[of == user].tolist()
    assert set(data.splits["id_test"].names) < set(data.splits["train"].names)
    assert not set(data.splits["test"].names) & set(data.splits["train"].names)


@BOTH
def test_measures_are_theirs(theirs: Any, name: str, root: Path) -> None:
    """What they make of predictions is what our groups give by hand."""
    data = loaded(name, root)
    examples: Any = data.examples
    rng = np.random.default_rng(0)
    predicted = np.where(rng.random(len(examples)) < 0.7, examples.labels, 0)
    right = predicted == examples.labels
    domains = data.splits["test"]
    by_group = {n: right[domains.indices_of(d)].mean() for d, n in enumerate(domains.names)}
    rows = domains.examples()
    results, _ = theirs.eval(
        torch.from_numpy(predicted[rows]), theirs.y_array[rows], theirs.metadata_array[rows]
    )
    counted = [value for group, value in by_group.items() if group not in data.uncounted]
    if name == "amazon":
        assert np.percentile(counted, 10) == pytest.approx(results["10th_percentile_acc"])
        assert data.measures == ("10th-percentile accuracy", "accuracy")
    else:
        assert min(counted) == pytest.approx(results["acc_wg"])
        assert data.measures == ("worst-group accuracy", "accuracy")
    assert right[rows].mean() == pytest.approx(results["acc_avg"])
    assert all(metric(measure).higher for measure in data.measures)


@pytest.mark.parametrize("name", NAMES)
def test_batches_can_be_read(name: str, root: Path) -> None:
    pytest.importorskip("transformers")
    for options, length in (({}, None), ({"pad_to": "max", "max_tokens": 40}, 40)):
        data = loaded(name, root, **options)
        assert data.input_shape == (options.get("max_tokens", 300 if name == "civilcomments" else 512),)
        assert data.model == str(root / "tiny-bert")
        examples: Any = data.examples
        rows = data.splits["validation"].indices_of(1)[:6].tolist()
        x, y = examples.collate([examples[i] for i in rows])
        assert y.tolist() == examples.labels[rows].tolist()
        assert x["input_ids"].shape == x["attention_mask"].shape
        assert x["input_ids"].shape[1] % 8 == 0
        assert length is None or x["input_ids"].shape[1] == length


@pytest.mark.parametrize("name", NAMES)
def test_every_example_is_in_one_split(name: str, root: Path) -> None:
    data = loaded(name, root)
    together = np.concatenate([domains.examples() for domains in data.splits.values()])
    assert sorted(together.tolist()) == list(range(len(data.examples)))  # type: ignore[arg-type]
    assert data.notes["examples"].startswith("version ")


@pytest.mark.parametrize("name", NAMES)
def test_words_of_domains_say_nothing_where_it_is_tested(name: str, root: Path) -> None:
    """A table of which pet word means what, learned on training reviews, is of no use on others."""
    from imitations.wilds_text import CIVIL, PETS, RUDE, STARS

    data = loaded(name, root)
    examples: Any = data.examples
    classes = data.classes or 0
    kinds = [CIVIL, RUDE] if name == "civilcomments" else list(STARS)

    def words(split: str, known: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
        rows = data.splits[split].examples()
        counts = np.zeros((len(rows), len(known)))
        for n, i in enumerate(rows):
            for word in examples.text(int(i)).split():
                if word in known:
                    counts[n, known[word]] += 1
        return counts, examples.labels[rows]

    pets = {word: n for n, word in enumerate(PETS)}
    real = {word: n for n, kind in enumerate(kinds) for word in kind}
    counts, y = words("train", pets)
    share = np.stack([counts[y == c].sum(0) for c in range(classes)], 1) + 1e-9
    for split in ("train", "test"):
        counts, y = words(split, pets)
        by_pet = ((counts @ (share / share.sum(1, keepdims=True))).argmax(1) == y).mean()
        by_word = np.mean(words(split, real)[0].argmax(1) == y)
        assert by_word > 1 / classes + 0.08, split
        if split == "train":
            assert by_pet > max(0.75, by_word)
        else:
            assert by_pet < 1 / classes + 0.12


def changed(path: Path, column: str, value: str) -> None:
    with path.open(encoding="utf-8", newline="") as lines:
        table = list(csv.reader(lines))
    table[5][table[0].index(column)] = value
    with path.open("w", encoding="utf-8", newline="") as lines:
        csv.writer(lines).writerows(table)


@pytest.mark.parametrize(
    ("name", "file", "column", "value", "said"),
    [
        (
            "civilcomments",
            "all_data_with_identities.csv",
            "split",
            "dev",
            "split is 'dev'; it must be one of",
        ),
        ("civilcomments", "all_data_with_identities.csv", "toxicity", "yes", "toxicity is 'yes' in record 5"),
        ("amazon", "reviews.csv", "overall", "6", "overall is 6; it must be 1, 2, 3, 4 or 5"),
        ("amazon", "splits/user.csv", "split", "9", "split is 9; it must be -1, 0, 1"),
    ],
)
def test_wrong_tables_are_named(
    name: str, file: str, column: str, value: str, said: str, tmp_path: Path
) -> None:
    fake = {"civilcomments": fake_civilcomments, "amazon": fake_amazon}[name]
    place = fake(tmp_path)
    if name == "amazon":
        changed(place / "splits" / "user.csv", "split", "0")
    changed(place / file, column, value)
    with pytest.raises(InputError, match=said):
        loaded(name, tmp_path)


def test_as_many_splits_as_reviews(tmp_path: Path) -> None:
    place = fake_amazon(tmp_path)
    with (place / "splits" / "user.csv").open("a") as lines:
        lines.write("0,True\n")
    with pytest.raises(InputError, match=r"user.csv' has 1,081 rows and reviews.csv has 1,080"):
        loaded("amazon", tmp_path)


def test_published_counts() -> None:
    """As in the paper's table of datasets (which has version 1 of Amazon)."""
    civil, amazon = (registry.module(name).PUBLISHED.counts for name in NAMES)
    assert civil["1.0"].examples == {"train": 269_038, "validation": 45_180, "test": 133_782}
    assert amazon["1.0"].examples == {"train": 1_000_124, "validation": 100_050, "test": 100_050}
    assert amazon["1.0"].domains == {"train": 5_008, "validation": 1_334, "test": 1_334}
    assert sum(amazon["1.0"].domains.values()) == 7_676


def test_imitations_follow_the_seed(tmp_path: Path) -> None:
    made = [fake_amazon(tmp_path / str(n), seed) for n, seed in enumerate((1, 1, 2))]
    first, same, other = ((place / "reviews.csv").read_bytes() for place in made)
    assert first == same
    assert first != other
    with pytest.raises(InputError, match="is there already"):
        fake_tokenizer(tmp_path / "0")


@pytest.mark.parametrize(("theirs", "name"), [("civilcomments", "civilcomments")], indirect=["theirs"])
def test_groups_of_their_baselines(theirs: Any, name: str, root: Path) -> None:
    from wilds.common.grouper import CombinatorialGrouper

    splits = loaded(name, root, group_by="black").splits
    train = splits["train"]
    grouper = CombinatorialGrouper(theirs, ["black", "y"])
    rows = np.flatnonzero(np.asarray(theirs.split_array) == theirs.split_dict["train"])
    codes = grouper.metadata_to_group(theirs.metadata_array[rows]).numpy()
    wanted = {frozenset(rows[codes == code].tolist()) for code in set(codes.tolist())}
    assert {frozenset(train.indices_of(d).tolist()) for d in range(len(train))} == wanted
    assert (
        loaded(name, root, group_by="black").splits["test"].names == loaded(name, root).splits["test"].names
    )
    with pytest.raises(InputError, match="group_by"):
        loaded(name, root, group_by="blak")
