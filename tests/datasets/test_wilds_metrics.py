"""Predictions are scored as the `wilds` package scores them, on small imitations of its six datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from imitations import wilds as fake
from shoal import datasets
from shoal.data.batch import DomainData
from shoal.datasets.wilds import SPLITS
from shoal.training import predictions

SCORES = {
    "amazon": {"10th-percentile accuracy": "10th_percentile_acc", "accuracy": "acc_avg"},
    "camelyon17": {"accuracy": "acc_avg"},
    "civilcomments": {"worst-group accuracy": "acc_wg", "accuracy": "acc_avg"},
    "fmow": {"worst-group accuracy": "acc_worst_region", "accuracy": "acc_avg"},
    "iwildcam": {"macro F1": "F1-macro_all", "accuracy": "acc_avg", "macro recall": "recall-macro_all"},
    "poverty": {"worst-group Pearson r": "r_wg", "Pearson r": "r_all", "mse": "mse_avg"},
}
"""What WILDS calls each measure."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The imitations of all six."""
    root = tmp_path_factory.mktemp("judged")
    for name in SCORES:
        make = fake.maker(name)
        assert make is not None
        make(root, 0, "small")
    return root


def theirs(package: Any, name: str, folder: Path) -> Any:
    """Made with the strings of the pandas of its time."""
    pandas = pytest.importorskip("pandas")
    with pandas.option_context("future.infer_string", False):
        return package.get_dataset(name, root_dir=str(folder), download=False)


def guesses(data: DomainData, y: Any, seed: int) -> np.ndarray:
    """Predictions that are right more often than not."""
    draw = np.random.default_rng(seed)
    truth = np.asarray(y).ravel()
    if data.classes is None:
        return (truth + draw.normal(size=len(truth))).astype(np.float32)
    return np.where(draw.random(len(truth)) < 0.7, truth, draw.integers(0, data.classes, len(truth)))


@pytest.mark.filterwarnings("ignore")  # of the package
@pytest.mark.parametrize("name", SCORES)
def test_scores_of_random_predictions(name: str, folder: Path, wilds_package: Any, tmp_path: Path) -> None:
    """In every split; read from a file that is written as WILDS writes it, by the public function too."""
    pandas = pytest.importorskip("pandas")
    data = datasets.load(name, folder=str(folder))
    assert set(SCORES[name]) <= set(data.measures)
    assert next(iter(SCORES[name])) == data.measures[0]
    published = theirs(wilds_package, name, folder)
    seen = 0
    for split in sorted(set(published.split_dict) - {"train"}):
        if SPLITS[split] not in data.splits:
            assert not (published.split_array == published.split_dict[split]).any()
            continue
        subset = published.get_subset(split)
        predicted = guesses(data, subset.y_array, seen)
        answer = torch.from_numpy(predicted).reshape(subset.y_array.shape).to(subset.y_array.dtype)
        expected, _ = published.eval(answer, subset.y_array, subset.metadata_array)
        kind = "fold:A" if name == "poverty" else "seed:0"
        path = tmp_path / f"{name}_split:{split}_{kind}_epoch:best_pred.csv"
        pandas.DataFrame(answer.numpy()).to_csv(path, index=False, header=False)
        values = predictions.read(path, data.classes)
        scores, _ = predictions.evaluate(data, split, values)
        for ours, called in SCORES[name].items():
            assert scores.more[ours] == pytest.approx(expected[called], abs=1e-6), (split, ours)
        if "worst-group accuracy" in scores.more:
            assert scores.more["worst-group accuracy"] < scores.more["accuracy"]
        (found,) = shoal.evaluate([path], data_options={"folder": str(folder)}).to_dict()["files"]
        assert (found["dataset"], found["split"]) == (name, SPLITS[split])
        assert found["metrics"] == pytest.approx(dict(scores.more))
        seen += 1
    assert seen >= 2


def test_no_example_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither images nor texts: labels and groups come from the tables."""
    for name in SCORES:
        data = datasets.load(name, folder=str(folder))

        def refuse(self: Any, index: int) -> None:
            raise AssertionError("an example was read")

        monkeypatch.setattr(type(data.examples), "__getitem__", refuse)
        which = data.splits["test"].examples()
        y = predictions.labels_of(data.examples, which)
        scores, _ = predictions.evaluate(data, "test", y)
        assert scores.average == (1 if data.classes is not None else 0)


def test_the_worst_group_of_fmow_is_never_other(folder: Path) -> None:
    data = datasets.load("fmow", folder=str(folder))
    assert data.uncounted == {"Other"}
    assert any("Other" in domains.names for domains in data.splits.values())
