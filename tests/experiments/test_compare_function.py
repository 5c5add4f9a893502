"""``shoal.compare``: data in memory, what it returns, folds of domains, and a budget."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_compare_tables import table

import shoal
from shoal.api.compare import Comparison
from shoal.api.compare import compare as run_comparison
from shoal.cli import main
from shoal.data.sets import heart
from shoal.errors import InputError
from shoal.experiments import compare
from shoal.experiments.record import RunRecord, Store
from shoal.experiments.statistics import mean_of
from shoal.report import compare as view

Captured = pytest.CaptureFixture[str]
FEW: dict[str, Any] = {"algorithms": ["erm", "fish"], "seeds": 1, "search": 1, "steps": 5, "batch_size": 8}
FEW |= {"device": "cpu", "jobs": 1, "baselines": False, "progress": False}
WORDS = ["--algorithms", "erm", "fish", "--seeds", "1", "--search", "1", "--steps", "5", "--batch-size", "8"]
WORDS += ["--device", "cpu", "--jobs", "1", "--no-baselines"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: Any) -> None:
    monkeypatch.chdir(tmp_path)


def arrays(domains: int = 3, rows: int = 40) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(domains * rows, 3))
    y = np.where(x[:, 0] + 0.5 * rng.normal(size=len(x)) > 0, "yes", "no")
    return x, y, np.repeat([f"d{n:03}" for n in range(domains)], rows)


def frame(*parts: Any) -> Any:
    pandas = pytest.importorskip("pandas")
    x, y, domains = parts or arrays()
    return pandas.DataFrame({**{f"x{n}": x[:, n] for n in range(x.shape[1])}, "ill": y, "site": domains})


def scores(found: Comparison | dict[str, Any]) -> Any:
    """What does not depend on where the data are."""
    result = found if isinstance(found, dict) else found.result
    trials = [{k: v for k, v in t.items() if k != "run"} for t in result["trials"]]
    return json.loads(json.dumps([result["rows"], trials, result["recommendation"]]))


class TestData:
    @pytest.mark.filterwarnings("ignore::shoal.errors.TableWarning")
    @pytest.mark.skipif(not os.environ.get("SHOAL_DATA"), reason="SHOAL_DATA with heart_disease is not set")
    def test_the_heart_table_as_in_the_command(self, capsys: Captured) -> None:
        pandas = pytest.importorskip("pandas")
        pytest.importorskip("sklearn")
        folder = Path(os.environ["SHOAL_DATA"]) / "heart_disease"
        if not folder.is_dir():
            pytest.skip("there is no heart_disease in SHOAL_DATA")
        parts = [pandas.read_csv(folder / name, names=list(heart.COLUMNS)) for name in heart.FILES]
        whole = pandas.concat(
            [part.assign(hospital=name) for part, name in zip(parts, heart.DOMAINS, strict=True)]
        )
        whole = whole.assign(ill=whole["num"] > 0).drop(columns="num")
        whole.to_csv("heart.csv", index=False)
        given = ["compare", "heart.csv", "--label", "ill", "--domain", "hospital", *WORDS[:-1]]
        assert main([*given, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        found = run_comparison(whole, label="ill", domain="hospital", **{**FEW, "baselines": True})
        assert view.table(found.result).text() == view.table(shown).text()
        assert scores(found) == scores(shown)
        assert found.result["left_out"] == list(heart.DOMAINS)
        assert str(found).startswith(view.text(found.result))
        again = run_comparison(whole, label="ill", domain="hospital", **{**FEW, "baselines": True})
        assert str(again) == str(found)

    def test_arrays_are_the_same_as_a_frame_and_are_written_once(self) -> None:
        found = run_comparison(arrays(), label="ill", domain="site", **FEW)
        (file,) = found.folder.glob("data-*.csv")
        assert file.parent.parent == Path("shoal-compare")
        assert file.stem == f"data-{found.folder.name}"
        same = run_comparison(frame(), label="ill", domain="site", **FEW)
        assert (same.folder, same.result["identities"]) == (found.folder, found.result["identities"])
        other = run_comparison(arrays(rows=41), label="ill", domain="site", **FEW)
        assert other.folder != found.folder
        assert scores(run_comparison(str(file), label="ill", domain="site", **FEW)) == scores(found)

    def test_the_commands_at_the_end_take_the_file(self, capsys: Captured) -> None:
        text = str(run_comparison(arrays(), out="mine", **FEW))
        command = next(line for line in text.splitlines() if line.startswith("  shoal train "))
        assert " mine/data-" in command
        assert main([*command.split()[1:], "--device", "cpu"]) == 0

    def test_columns_that_are_categories_stay_so(self) -> None:
        data = frame().assign(grade=np.arange(120) % 4)
        run_comparison(data.astype({"grade": "category"}), label="ill", domain="site", out="a", **FEW)
        record = Store("a/runs").all()[0]
        assert record.config.data_options["kinds"] == {"grade": "categorical"}

    def test_a_hugging_face_dataset(self) -> None:
        datasets = pytest.importorskip("datasets")
        data = datasets.Dataset.from_pandas(frame())
        found = run_comparison(data, label="ill", domain="site", **FEW)
        assert scores(found) == scores(run_comparison(frame(), label="ill", domain="site", **FEW))
        with pytest.raises(InputError, match="select one, such as dataset"):
            run_comparison(datasets.DatasetDict({"train": data}), label="ill", domain="site", **FEW)

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (lambda: frame().rename(columns={"x1": "x0"}), r"two columns named 'x0'; rename one"),
            (lambda: arrays()[:1], r"three arrays \(X, y, domains\), got 1"),
            (lambda: (np.zeros((4, 2, 2)), *arrays()[1:]), r"X of data= has shape \(4, 2, 2\)"),
            (lambda: (frame(), *arrays()[1:]), "already has a column 'ill'; set another name with label="),
            (lambda: (arrays()[0][:7], *arrays()[1:]), "the columns have different lengths"),
            (lambda: 7, "a table must be a file, a DataFrame or a mapping of columns, got int"),
        ],
    )
    def test_wrong_data_are_one_error(self, data: Any, message: str) -> None:
        pytest.importorskip("pandas")
        with pytest.raises(InputError, match=message):
            run_comparison(data(), label="ill", domain="site", **FEW)
        assert not list(Path().iterdir())

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ({"seeds": 0}, "seeds of compare must be"),
            ({"folds": 1}, "folds of compare must be"),
            ({"criterion": "median"}, "criterion of compare must be"),
            ({"domains_per_step": 3}, "domains_per_step=3, but there are only 2 training domains"),
            ({"freeze_backbone": True}, "freeze_backbone= requires a timm model"),
            ({"engine": "local", "address": "auto"}, "address= belongs to engine='ray'"),
        ],
    )
    def test_wrong_options_name_python_arguments(
        self, option: Any, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.undo() if "address" in option else None
        with pytest.raises(InputError, match=message):
            run_comparison("rotated-digits" if "address" in option else arrays(), **{**FEW, **option})


class TestObject:
    def test_it_shows_and_saves_itself(self, tmp_path: Path) -> None:
        pytest.importorskip("pandas")
        found = run_comparison(arrays(), **FEW)
        assert isinstance(found, Comparison)
        assert found.failed == {}
        assert found.recommendation == found.result["recommendation"]
        assert {type(r) for r in found.records} == {RunRecord}
        rows = found.to_frame()
        assert list(rows.index) == [row["algorithm"] for row in found.result["rows"]]
        best = found.result["rows"][0]
        assert rows["mean"].iloc[0] == best["average"]["mean"]
        assert rows["d001"].iloc[0] == best["domains"]["d001"]["mean"]
        page = found._repr_html_()
        assert "<table>" in page
        assert "<p>" in page
        for name, begin in (("a.md", "# Algorithms on"), ("a.csv", "algorithm,"), ("a.json", "{")):
            assert found.save(name).read_text().startswith(begin)
        assert "<!doctype html>" in found.save("a.html").read_text().lower()
        assert found.figure().axes
        with pytest.raises(InputError, match=r"must end in \.md, \.csv, \.json or \.html"):
            found.save("a.txt")

    def test_a_plan_has_no_results(self) -> None:
        found = run_comparison(arrays(), plan=True, **FEW)
        assert found.result["runs"] == 6
        assert Path(found.result["plan"]).is_file()
        assert "6 runs: 2 algorithms, 3 held-out domains, 1 seed" in str(found)
        assert " remaining. Estimated time: " in str(found)
        with pytest.raises(InputError, match="has no results yet"):
            found.to_frame()

    def test_silent_without_progress(self, capsys: Captured) -> None:
        run_comparison(arrays(), **FEW)
        shown = capsys.readouterr()
        assert (shown.out, shown.err) == ("", "")

    def test_worker_processes_give_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        here = run_comparison(arrays(), held_out="d001", **FEW)
        folder = Path.cwd()
        monkeypatch.undo()
        monkeypatch.chdir(folder)
        there = run_comparison(arrays(), held_out="d001", out="there", **FEW)
        assert scores(there) == scores(here)


class TestFolds:
    def test_up_to_ten_domains_one_by_one(self) -> None:
        names = [f"d{n}" for n in range(25)]
        assert compare.folds(names[:10]) == names[:10]
        assert compare.folds([None]) == [None]
        groups = compare.folds(names)
        assert len(groups) == 10
        assert sorted(str(n) for group in groups for n in group or ()) == sorted(names)
        assert {compare.size_of(group) for group in groups} == {2, 3}
        assert [compare.size_of(g) for g in compare.folds(names[:11])] == [2, *[1] * 9]
        assert compare.folds(names[:4], 3) == [["d0", "d3"], "d1", "d2"]

    def test_300_domains_are_not_21600_runs(self) -> None:
        rows = [*compare.ALGORITHMS]
        base = compare.RunConfig("table", "erm", 5, {"file": "a.csv"})
        design = compare.Design(base, rows, [f"d{n}" for n in range(300)], 3, 3)
        assert len(design.configs()) == 10 * 8 * 3 * 3

    @pytest.mark.parametrize("metric", ["accuracy", "AUC"])
    def test_every_domain_has_its_own_score(self, metric: str) -> None:
        x, y, domains = arrays(12)
        found = run_comparison((x, y, domains), metric=metric, folds=3, **{**FEW, "baselines": True})
        result = found.result
        assert (result["runs"], result["folds"], result["runs_missing"]) == (15, 3, 0)
        assert result["left_out"] == sorted(set(domains))
        assert len(result["trials"]) == 12 * 5
        assert {t["status"] for t in result["trials"]} == {"scored"}
        records = {r.config.identity: r for r in found.records}
        for trial in result["trials"]:
            test = records[trial["run"]].chosen["test"]
            assert trial["left_out"] in trial["fold"].split(" and ")
            values = test["domains"] if metric == "accuracy" else test["by_domain"]["AUC"]
            assert trial["test"] == values[trial["left_out"]]
        row = result["rows"][0]
        means = [about["mean"] for about in row["domains"].values()]
        assert row["average"]["mean"] == pytest.approx(mean_of(means))
        assert result["recommendation"]["domains"] == 12
        assert sum(row["chosen"].values()) == 3  # one choice per fold and seed
        assert "Domains were held out in 3 groups" in str(found)
        other = "AUC" if metric == "accuracy" else "accuracy"
        assert row["also"][other]["mean"] is not None

    def test_the_auc_of_a_domain_is_that_of_its_rows_alone(self) -> None:
        pytest.importorskip("sklearn")
        from shoal.experiments.run import run

        found = run_comparison(arrays(12), folds=6, **{**FEW, "baselines": True})
        name = "logistic-regression"
        fold = next(r for r in found.records if r.config.algorithm == name)
        together = fold.config.data_options["test"]
        own = run(fold.config)
        assert own.chosen["test"]["by_domain"]["AUC"].keys() == set(together)
        mean = np.mean(list(own.chosen["test"]["by_domain"]["AUC"].values()))
        assert 0.5 < mean <= 1

    def test_the_command_says_so(self, capsys: Captured) -> None:
        table(Path("t.csv"), rows=400, sites=[f"s{n}" for n in range(12)])
        given = ["compare", "t.csv", "--label", "ill", "--domain", "site", *WORDS]
        assert main([*given, "--plan"]) == 0
        assert "20 runs: 2 algorithms, 12 held-out domains in 10 folds" in capsys.readouterr().out
        assert main([*given, "--folds", "2", "--out", "two"]) == 0
        shown = capsys.readouterr()
        assert "4 runs: 2 algorithms, 12 held-out domains in 2 folds" in shown.err
        assert "\nDomains were held out in 2 groups; each domain is scored separately.\n" in shown.out


class TestBudget:
    def design(self) -> compare.Design:
        return compare.Design(
            compare.RunConfig("rotated-digits", "erm", 5), ["erm", "fish"], [*"abcdefgh"], 3, 3
        )

    @pytest.mark.parametrize(
        ("runs", "sizes"),
        [
            (200, (3, 3, 8)),
            (100, (2, 3, 8)),
            (48, (1, 3, 8)),
            (40, (1, 2, 8)),
            (16, (1, 1, 8)),
            (12, (1, 1, 6)),
        ],
    )
    def test_fewer_trials_then_seeds_then_folds(self, runs: int, sizes: tuple[int, int, int]) -> None:
        full = self.design()
        found = full.within(runs)
        assert (found.search, found.seeds, len(found.groups)) == sizes
        assert bool(found.reductions(full)) is (sizes != (3, 3, 8))
        assert len(full.within(1).groups) == compare.LEAST_DOMAINS

    def test_what_is_reduced_is_said_and_stays(
        self, capsys: Captured, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compare, "seconds_of", lambda *given: 10.0)
        options: dict[str, Any] = {**FEW, "seeds": 2, "search": 2, "progress": True, "out": "o"}
        found = run_comparison(arrays(), budget=1.0, **options)
        said = "To meet the budget of 1 minutes: 1 hyperparameter trial instead of 2, 1 seed instead of 2."
        shown = capsys.readouterr().err
        assert said in shown
        assert (
            "6 runs: 2 algorithms, 3 held-out domains, 1 seed, 1 hyperparameter trial each; 6 remaining. Es"
            in shown
        )
        monkeypatch.setattr(compare, "seconds_of", lambda *given: 1.0)
        again = run_comparison(arrays(), budget=1.0, **options)
        assert again.result["identities"] == found.result["identities"]  # the time is kept
        assert "remaining" not in capsys.readouterr().err

    def test_a_run_is_timed_by_its_first_steps(self) -> None:
        config = compare.RunConfig("linear", "erm", 3000, eval_every=300, holdout=0.2, batch_size=4)
        assert 0 < compare.seconds_of(config, "cpu") < 300
        assert compare.seconds_of(compare.RunConfig("linear", "erm", 1), "cpu") > 0


@pytest.mark.parametrize("piped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_script_needs_no_guard(tmp_path: Path, piped: bool) -> None:
    """Worker processes do not import the script that started them, be it a file or standard input."""
    script = """
import numpy as np, shoal
x = np.random.default_rng(0).normal(size=(96, 2))
data = x, (x[:, 0] > 0).astype(int), np.repeat(list("abc"), 32)
few = {"seeds": 1, "search": 1, "steps": 2, "baselines": False, "jobs": 2, "progress": False}
done = shoal.compare(data, algorithms="erm", **few)
print("runs", len(done.records), done.failed)
"""
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-" if piped else "script.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(shoal.__file__).parents[1])}
    done = subprocess.run(
        command, input=script if piped else "", cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout == "runs 3 {}\n", done.stderr[-2000:]
