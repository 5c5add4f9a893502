"""``shoal.api.evaluate``: files of predictions are scored as the training scored them."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal import datasets as sets
from shoal.api.evaluate import evaluate
from shoal.data import DomainData, Domains, TensorData
from shoal.errors import InputError


class Groups:
    """A dataset of 3 classes whose test split has 60 groups, scored by the worst of all but one."""

    SUMMARY = PAPER = "made up"
    Y = np.random.default_rng(0).integers(0, 3, 600)

    @classmethod
    def load(cls, *, fold: str = "A") -> Any:
        parts = {f"g{n}": np.arange(300 + 5 * n, 305 + 5 * n) for n in range(60)}
        domains = {
            "train": Domains.from_sizes({"a": 150, "b": 150}),
            "validation": Domains.from_indices({"v": np.arange(299, 199, -1)}),
            "test": Domains.from_indices(parts if fold == "A" else {"g0": np.arange(310, 600)}),
        }
        return DomainData(
            TensorData(torch.zeros(600, 2), torch.from_numpy(cls.Y)),
            domains,
            classes=3,
            input_shape=(2,),
            model="mlp",
            measures=("worst-group accuracy", "AUC"),
            uncounted=frozenset(["g7"]),
        )


@pytest.fixture(autouse=True)
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known = sets.registry.module
    monkeypatch.setattr(sets.registry, "module", lambda n: Groups if n == "grouped" else known(n))


def written(name: str, values: Any) -> Path:
    Path(name).write_text("".join(f"{value}\n" for value in values))
    return Path(name)


def test_what_was_trained_is_what_is_evaluated() -> None:
    options: dict[str, Any] = {"steps": 12, "device": "cpu", "progress": False, "predictions": True}
    runs = [shoal.train("erm", "coloured-digits", seed=seed, out=f"run{seed}", **options) for seed in (0, 1)]
    found = evaluate(sorted(Path().glob("run*/predictions/*split:test*")))
    scores = [run.record.score("test") for run in runs]
    assert [one["metrics"]["accuracy"] for one in found.files] == pytest.approx(scores)
    (row,) = found.to_frame().to_dict("records")
    assert (row["dataset"], row["split"], row["files"]) == ("coloured-digits", "test", 2)
    assert (row["mean"], row["sd"]) == pytest.approx((statistics.mean(scores), statistics.stdev(scores)))
    assert f"{statistics.mean(scores):.3f}" in str(found)


def test_groups_and_one_that_does_not_count() -> None:
    y = Groups.Y[300:].copy()
    y[5 * 7 : 5 * 8] += 1  # all of g7 is wrong, one of g9
    y[5 * 9] += 1
    (found,) = evaluate(written("grouped_split:test_seed:4_epoch:best_pred.csv", y % 3)).files
    assert found["metrics"] == {"worst-group accuracy": pytest.approx(0.8)}  # AUC needs scores
    assert (found["seed"], found["domains"]["g7"], len(found["domains"])) == ("4", 0, 60)


def test_a_fold_in_the_name_is_the_option_of_the_dataset() -> None:
    names = [f"grouped_split:test_fold:{fold}_epoch:best_pred.csv" for fold in "AB"]
    paths = [written(name, Groups.Y[at:]) for name, at in zip(names, (300, 310), strict=True)]
    assert [(f["fold"], len(f["domains"])) for f in evaluate(paths).files] == [("A", 60), ("B", 1)]
    with pytest.raises(InputError, match="290 examples"):
        evaluate(paths[0], data_options={"fold": "B"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0\n1\n", "there are 2 predictions for 300 examples"),
        ("0\n\n1\ncat\n", "line 4: 'cat' is not a class, a whole number from 0 to 2"),
        ("0\n3\n", "line 2: '3' is not a class"),
        ("0\n0.5\n", "line 2: '0.5' is not a class"),
        ("", "there are 0 predictions"),
        (None, "No such file"),
    ],
)
def test_wrong_files(content: str | None, message: str) -> None:
    path = Path("grouped_split:test_seed:0_epoch:best_pred.csv")
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        evaluate(path)
