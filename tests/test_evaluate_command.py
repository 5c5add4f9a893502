"""`shoal train --metric … --predictions` and `shoal evaluate`, as a user types them."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.cli import main
from shoal.data import DomainData, Domains, TensorData, sets
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.results import load
from shoal.experiments.run import check, prepare

Captured = pytest.CaptureFixture[str]
DIGITS = ["train", "erm", "coloured-digits", "--steps", "12", "--device", "cpu"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def as_json(capsys: Captured, *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: Captured, *arguments: str) -> str:
    assert main(list(arguments)) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert shown.err.startswith("shoal: ")
    assert len(shown.err.strip().splitlines()) <= 2
    return shown.err


class Groups:
    """A dataset of 3 classes whose test split has 60 groups, judged by the worst of all but one."""

    SUMMARY = PAPER = "made up"
    RANDOM = np.random.default_rng(0)
    Y = RANDOM.integers(0, 3, 600)
    PARTS = {f"g{n}": np.arange(300 + 5 * n, 305 + 5 * n) for n in range(60)}  # noqa: RUF012

    @classmethod
    def load(cls, *, fold: str = "A", seed: int = 0) -> Any:
        domains = {"train": Domains.from_sizes({"a": 150, "b": 150})}
        domains["validation"] = Domains.from_indices({"v": np.arange(299, 199, -1)})
        part = cls.PARTS if fold == "A" else {"g0": np.arange(310, 600)}
        return DomainData(
            TensorData(torch.zeros(600, 2), torch.from_numpy(cls.Y)),
            domains | {"test": Domains.from_indices(part)},
            classes=3,
            input_shape=(2,),
            model="mlp",
            measures=("worst-group accuracy", "AUC"),
            uncounted=frozenset(["g7"]),
        )


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> type[Groups]:
    known = sets.registry.module
    monkeypatch.setattr(sets.registry, "module", lambda n: Groups if n == "grouped" else known(n))
    return Groups


def written(path: str, values: Any) -> str:
    Path(path).write_text("".join(f"{v}\n" for v in values))
    return path


def test_what_was_trained_is_what_is_evaluated(tmp_path: Path, capsys: Captured) -> None:
    record = as_json(capsys, *DIGITS, "--out", "run", "--predictions", "--metric", "auc", "--eval-every", "2")
    assert record["config"]["metric"] == "AUC"
    assert record["rule"] == "best on validation by AUC"
    judged = [p["scores"]["validation"]["metrics"]["AUC"] for p in record["history"]]
    assert record["selected"] == judged.index(max(judged))
    files = sorted(Path("run/predictions").iterdir())
    assert [f.name for f in files] == [
        "coloured-digits_split:test_seed:0_epoch:best_pred.csv",
        "coloured-digits_split:val_seed:0_epoch:best_pred.csv",
    ]
    found = as_json(capsys, "evaluate", *map(str, files))
    assert [f["split"] for f in found["files"]] == ["test", "validation"]
    for one in found["files"]:
        scores = record["history"][record["selected"]]["scores"][one["split"]]
        assert one["metrics"] == {"accuracy": pytest.approx(scores["average"])}
        assert one["domains"] == pytest.approx(scores["domains"])
    assert main(["show", "run"]) == 0
    shown = capsys.readouterr().out
    assert "(best on validation by AUC)" in shown
    assert "all" in shown
    assert "AUC" in shown
    assert main(["evaluate", str(files[0])]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("coloured-digits, split test, seed 0\n")


def test_predictions_do_not_change_the_run_and_can_be_asked_for_later(capsys: Captured) -> None:
    before = as_json(capsys, *DIGITS, "--out", "run")
    assert not Path("run/predictions").exists()
    assert main([*DIGITS, "--out", "run", "--predictions"]) == 0
    shown = capsys.readouterr().out
    assert "Saved in run, with predictions." in shown
    again = as_json(capsys, *DIGITS, "--out", "other", "--predictions")
    for record in (before, again):
        for part in ("seconds", "environment"):
            del record[part]
    assert before == again
    for path in Path("run/predictions").iterdir():
        assert path.read_bytes() == (Path("other/predictions") / path.name).read_bytes()
    assert len(list(Path("other/predictions").iterdir())) == 2


def test_seeds_give_files_for_each_and_means(capsys: Captured) -> None:
    command = [*DIGITS, "--out", "runs", "--seeds", "2", "--predictions", "--jobs", "1"]
    records = as_json(capsys, *command, "--eval-splits", "test", "validation")["records"]
    files = sorted(map(str, Path("runs").glob("seed-*/predictions/*split:test*")))
    assert [Path(f).name for f in files] == [
        f"coloured-digits_split:test_seed:{n}_epoch:best_pred.csv" for n in range(2)
    ]
    found = as_json(capsys, "evaluate", *files)
    scores = [r["history"][r["selected"]]["scores"]["test"]["average"] for r in records]
    (summary,) = found["summary"]
    assert summary["measures"]["accuracy"]["mean"] == pytest.approx(statistics.mean(scores))
    assert summary["measures"]["accuracy"]["sd"] == pytest.approx(statistics.stdev(scores))
    assert main(["evaluate", *files]) == 0
    shown = capsys.readouterr().out
    assert f"{statistics.mean(scores):.3f} ± {statistics.stdev(scores):.3f}" in shown
    assert "seed 0" in shown
    assert "seed 1" in shown


def test_splits_that_are_measured(capsys: Captured) -> None:
    record = as_json(capsys, *DIGITS, "--eval-splits", "test", "--predictions")
    assert {tuple(p["scores"]) for p in record["history"]} == {("test",)}
    assert record["rule"] == "last step"
    assert refused(capsys, *DIGITS, "--eval-splits", "tset") == (
        "shoal: unknown split of dataset 'coloured-digits': 'tset'. Did you mean 'test'? "
        "Known: test, train, validation.\n"
    )
    assert "split of dataset 'coloured-digits': 'id_test'" in refused(
        capsys, *DIGITS, "--eval-splits", "id_test"
    )


def test_wrong_metrics(capsys: Captured) -> None:
    assert "Did you mean 'macro F1'" in refused(capsys, *DIGITS, "--metric", "macro f2")
    assert "is for regression, and this is classification" in refused(
        capsys, *DIGITS, "--metric", "Pearson r"
    )
    assert not list(Path("runs").glob("*/*"))


def test_the_metric_is_part_of_the_run_and_predictions_are_not() -> None:
    usual = RunConfig("linear", "erm", 4)
    assert len({c.identity for c in (usual, RunConfig("linear", "erm", 4, metric="AUC"))}) == 2
    assert (
        RunConfig("linear", "erm", 4, metric="auc").identity
        == RunConfig("linear", "erm", 4, metric="AUC").identity
    )
    check(RunConfig("linear", "erm", 4, metric="AUC", eval_splits=["test", "validation"]))
    training = prepare(usual, "cpu", how={"predictions": True})
    assert training.options.predictions
    with pytest.raises(InputError, match="eval_splits must be a list"):
        RunConfig("linear", "erm", 4, eval_splits="test")  # type: ignore[arg-type]


def test_many_groups_and_one_that_does_not_count(groups: type[Groups], capsys: Captured) -> None:
    y = groups.Y[300:].copy()
    y[5 * 7 : 5 * 8] += 1  # all of g7 is wrong, one of g9
    y[5 * 9] += 1
    path = written("grouped_split:test_seed:4_epoch:best_pred.csv", y % 3)
    (found,) = as_json(capsys, "evaluate", path)["files"]
    assert found["metrics"] == {"worst-group accuracy": pytest.approx(0.8)}  # AUC needs scores
    assert found["domains"]["g7"] == 0
    assert (found["seed"], len(found["domains"])) == ("4", 60)
    assert main(["evaluate", path]) == 0
    shown = capsys.readouterr().out
    assert "… 40 more groups (use --json for all)" in shown
    assert "g19" in shown
    assert "g20" not in shown


def test_a_fold_in_the_name_is_the_datasets_option(groups: type[Groups], capsys: Captured) -> None:
    paths = [
        written(f"grouped_split:test_fold:{f}_epoch:best_pred.csv", groups.Y[at:])
        for f, at in (("A", 300), ("B", 310))
    ]
    found = as_json(capsys, "evaluate", *paths)
    assert [(f["fold"], len(f["domains"])) for f in found["files"]] == [("A", 60), ("B", 1)]
    assert "290 examples" in refused(capsys, "evaluate", paths[0], "--data", "fold=B")
    assert main(["evaluate", *paths]) == 0
    assert "fold A" in capsys.readouterr().out


def test_a_run_of_a_fold_is_called_by_it(groups: type[Groups], capsys: Captured) -> None:
    """And is judged by the dataset's first measure."""
    command = ["train", "erm", "grouped", "--steps", "2", "--device", "cpu", "--predictions"]
    record = as_json(capsys, *command, "--data", "fold=B", "--out", "b")
    assert record["rule"] == "best on validation by worst-group accuracy"
    assert sorted(p.name for p in Path("b/predictions").iterdir()) == [
        "grouped_split:test_fold:B_epoch:best_pred.csv",
        "grouped_split:val_fold:B_epoch:best_pred.csv",
    ]
    assert main([*command, "--out", "a"]) == 0
    assert "… 50 more" in capsys.readouterr().out
    assert Path("a/predictions/grouped_split:test_fold:A_epoch:best_pred.csv").exists()
    assert main(["show", "."]) == 0
    assert "test worst-group accuracy 0." in capsys.readouterr().out
    row, _ = load(".").rows()
    assert row["selects"] == "worst-group accuracy"
    assert row["metric"] == "accuracy"
    assert 0 <= row["test.AUC"] <= 1


def test_a_measure_without_a_value_says_why(
    groups: type[Groups], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of validation examples of a single class there is no AUC, which then chooses nothing."""
    monkeypatch.setattr(groups, "Y", np.where(np.arange(600) < 300, 1, groups.Y))
    command = ["train", "erm", "grouped", "--steps", "3", "--device", "cpu", "--eval-every", "1"]
    assert main([*command, "--metric", "AUC", "--data", "seed=1"]) == 0
    shown = capsys.readouterr().out
    assert "AUC of validation is undefined: all its examples are of one class" in shown
    assert "best on validation by AUC (step 1)" in shown


def test_a_file_of_any_name(groups: type[Groups], capsys: Captured) -> None:
    path = written("mine.csv", groups.Y[200:300])
    given = ["evaluate", path, "--dataset", "grouped"]
    for split in ("val", "validation"):
        assert as_json(capsys, *given, "--split", split)["files"][0]["average"] == 1
    assert "use --dataset and --split" in refused(capsys, *given)
    assert "Did you mean 'test'" in refused(capsys, *given, "--split", "tset")
    assert "unknown dataset 'groupd'" in refused(
        capsys, "evaluate", path, "--dataset", "groupd", "--split", "val"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "0\n1\n",
            "there are 2 predictions for 300 examples of split 'test'; there must be one line for each",
        ),
        ("0\n\n1\ncat\n", "line 4: 'cat' is not a class, a whole number from 0 to 2"),
        ("0\n3\n", "line 2: '3' is not a class"),
        ("0\n-1\n", "line 2: '-1' is not a class"),
        ("0\n0.5\n", "line 2: '0.5' is not a class"),
        ("0\nnan\n", "line 2: 'nan' is not a class"),
        ("0,1\n", "line 1: '0,1' is not a class"),
        ("", "there are 0 predictions"),
        ("\ufeff0\n1\n", "there are 2 predictions"),
    ],
)
def test_wrong_files(content: str, message: str, groups: type[Groups], capsys: Captured) -> None:
    Path("grouped_split:test_seed:0_epoch:best_pred.csv").write_text(content, encoding="utf-8")
    said = refused(capsys, "evaluate", "grouped_split:test_seed:0_epoch:best_pred.csv")
    assert message in said
    assert "grouped_split:test" in said


def test_files_that_cannot_be_read(groups: type[Groups], capsys: Captured) -> None:
    assert "No such file" in refused(capsys, "evaluate", "grouped_split:test_seed:0_epoch:best_pred.csv")
    Path("grouped_split:test_seed:1_epoch:best_pred.csv").write_bytes(b"\xff\xfe0\n")
    assert "is not text" in refused(capsys, "evaluate", "grouped_split:test_seed:1_epoch:best_pred.csv")


def test_whole_numbers_may_be_written_as_reals(groups: type[Groups], capsys: Captured) -> None:
    path = written("grouped_split:test_seed:0_epoch:best_pred.csv", groups.Y[300:].astype(float))
    assert as_json(capsys, "evaluate", path)["files"][0]["average"] == 1
