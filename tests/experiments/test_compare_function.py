"""``shoal.compare``: data in memory and in files, what it returns, folds of domains, and a budget."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from PIL import Image
from test_compare_tables import table

import shoal
from shoal.api.compare import Comparison
from shoal.cli import main
from shoal.errors import InputError
from shoal.experiments import baselines, compare
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.run import run
from shoal.experiments.statistics import mean_of
from shoal.experiments.store import Store

Captured = pytest.CaptureFixture[str]
FEW: dict[str, Any] = {"algorithms": ["erm", "fish"], "seeds": 1, "search": 1, "steps": 5, "batch_size": 8}
FEW |= {"device": "cpu", "jobs": 1, "baselines": False, "progress": False}
OF_TABLE: dict[str, Any] = {"label": "ill", "domain": "site"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: Any) -> None:
    monkeypatch.chdir(tmp_path)


def arrays(domains: int = 3, rows: int = 40) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(domains * rows, 3))
    y = np.where(x[:, 0] + 0.5 * rng.normal(size=len(x)) > 0, "yes", "no")
    return x, y, np.repeat([f"d{n:03}" for n in range(domains)], rows)


def frame() -> pandas.DataFrame:
    x, y, domains = arrays()
    return pandas.DataFrame({**{f"x{n}": x[:, n] for n in range(3)}, "ill": y, "site": domains})


def scores(found: Comparison) -> Any:
    """What does not depend on where the data are."""
    trials = [{k: v for k, v in t.items() if k != "run"} for t in found.result["trials"]]
    return json.loads(json.dumps([found.result["rows"], trials, found.recommendation]))


class TestData:
    def test_arrays_are_the_same_as_a_frame_and_are_written_once(self) -> None:
        found = shoal.compare(arrays(), **OF_TABLE, **FEW)
        (file,) = found.folder.glob("data-*.csv")
        assert file.parent.parent == Path("shoal-compare")
        same = shoal.compare(frame(), **OF_TABLE, **FEW)
        assert (same.folder, same.result["identities"]) == (found.folder, found.result["identities"])
        assert shoal.compare(arrays(rows=41), **OF_TABLE, **FEW).folder != found.folder
        assert scores(shoal.compare(str(file), **OF_TABLE, **FEW)) == scores(found)

    def test_columns_that_are_categories_stay_so(self) -> None:
        data = frame().assign(grade=np.arange(120) % 4).astype({"grade": "category"})
        found = shoal.compare(data, **OF_TABLE, out="a", **FEW)
        assert found.records[0].config.data_options["kinds"] == {"grade": "categorical"}

    def test_a_hugging_face_dataset(self) -> None:
        datasets = pytest.importorskip("datasets")
        data = datasets.Dataset.from_pandas(frame())
        found = shoal.compare(data, **OF_TABLE, **FEW)
        assert scores(found) == scores(shoal.compare(frame(), **OF_TABLE, **FEW))
        with pytest.raises(InputError):
            shoal.compare(datasets.DatasetDict({"train": data}), **OF_TABLE, **FEW)

    def test_a_changed_file_is_another_dataset(self) -> None:
        file = table(Path("patients.csv"))
        first = shoal.compare(file, **OF_TABLE, held_out="oslo", **FEW)
        with Path(file).open("a") as lines:
            lines.write("\n48.5,red,lima,no")
        second = shoal.compare(file, **OF_TABLE, held_out="oslo", **FEW)
        assert second.folder == first.folder == Path("shoal-compare/patients")
        assert not {*first.result["identities"]} & {*second.result["identities"]}
        assert len(Store(first.folder / "runs").all()) == 4

    def test_a_folder_of_images(self) -> None:
        for place in ("in", "out"):
            for label in ("cat", "dog"):
                Path("pets", place, label).mkdir(parents=True)
                for n in range(5):
                    Image.new("RGB", (8, 8), (40 * n, 0, 90)).save(Path("pets", place, label, f"{n}.png"))
        given = {**FEW, "algorithms": "erm", "baselines": True}
        found = shoal.compare("pets", data_options={"size": 8}, **given)
        assert found.result["held_out"] == ["in", "out"]
        assert set(found.to_frame().index) == {"majority", "erm"}
        for record in found.records:
            (name,) = record.chosen["test"]["domains"]
            assert name == record.config.data_options["held_out"]
            assert name not in record.chosen["train"]["domains"]

    @pytest.mark.parametrize(
        ("data", "named"),
        [
            (lambda: frame().rename(columns={"x1": "x0"}), "x0"),
            (lambda: arrays()[:1], "three arrays"),
            (lambda: (np.zeros((4, 2, 2)), *arrays()[1:]), "shape"),
            (lambda: (frame(), *arrays()[1:]), "'ill'"),
            (lambda: (arrays()[0][:7], *arrays()[1:]), "lengths"),
            (lambda: 7, "int"),
            (lambda: "nowhere.csv", "nowhere.csv"),
            (lambda: "rotated-digits", "^label"),
        ],
    )
    def test_wrong_data_are_one_error_and_leave_nothing(self, data: Any, named: str) -> None:
        with pytest.raises(InputError, match=named):
            shoal.compare(data(), **OF_TABLE, **FEW)
        assert not list(Path().iterdir())

    @pytest.mark.parametrize(
        ("option", "named"),
        [
            ({"seeds": 0}, "^seeds"),
            ({"folds": 1}, "^folds"),
            ({"lr": 0}, "^lr"),
            ({"optimizer": "adm"}, "^optimizer.*adam"),
            ({"domains_per_step": 4}, "^domains_per_step"),
            ({"freeze_backbone": True}, "freeze_backbone"),
            ({"settings": {"meta_lr": 1}}, "^settings"),
            ({"label": "il"}, "'il'.*'ill'"),
            ({"kinds": {"colour": "numeric"}}, "'colour'"),
            ({"metric": "mse"}, "mse"),
            ({"held_out": "olso"}, "'olso'.*'oslo'"),
            ({"data_options": {"held_out": "oslo"}}, "^held_out"),
            ({"algorithms": "fsh"}, "'fsh'.*'fish'"),
            ({"algorithms": "fish:regruped"}, "'regruped'.*'regrouped'"),
            ({"model": "mpl"}, "'mpl'"),
        ],
        ids=str,
    )
    def test_a_wrong_option_is_named_and_nothing_is_written(self, option: Any, named: str) -> None:
        file = table(Path("patients.csv"))
        with pytest.raises(InputError, match=named):
            shoal.compare(file, **{**OF_TABLE, **FEW, **option})
        assert [path.name for path in Path().iterdir()] == ["patients.csv"]

    def test_what_is_wrong_without_a_later_domain_is_said_before_any_training(self) -> None:
        sites = ["kyoto", "lima", *["oslo"] * 58]  # without oslo one example is left of each
        file = table(Path("few.csv"), rows=60, sites=sites)
        with pytest.raises(InputError, match="with 'oslo' held out"):
            shoal.compare(file, **OF_TABLE, held_out=["kyoto", "oslo"], **FEW)
        assert not Path("shoal-compare").exists()


class TestRows:
    def test_every_trial_has_the_test_score_of_the_best_on_validation(self) -> None:
        found = shoal.compare(arrays(), held_out="d001", **{**FEW, "search": 2, "seeds": 2})
        assert len(found.records) == 8
        for trial in found.result["trials"]:
            own = (trial["algorithm"], trial["seed"])
            tried = [r for r in found.records if (r.config.name, r.config.seed) == own]
            best = max(tried, key=lambda r: r.chosen["validation"]["mean"])
            assert trial["test"] == best.score("test")

    def test_a_table_has_baselines_and_domains_without_auc_are_not_held_out(self) -> None:
        file = table(Path("patients.csv"))
        lines = [f"{n}.5,red,one,yes" for n in range(20)]
        Path(file).write_text("\n".join([Path(file).read_text(), *lines]))
        found = shoal.compare(file, **OF_TABLE, metric="auc", **{**FEW, "baselines": True})
        assert set(found.to_frame().index) == {"erm", "fish", *baselines.names(2)}
        assert (found.result["metric"], set(found.result["excluded"])) == ("AUC", {"one"})
        assert {t["status"] for t in found.result["trials"]} == {"scored"}

    def test_a_quantity_is_scored_by_its_error(self) -> None:
        file = table(Path("risk.csv"), label="risk")
        given = {**FEW, "baselines": True}
        found = shoal.compare(file, label="risk", domain="site", held_out="oslo", **given)
        assert (found.result["metric"], found.result["lower_is_better"]) == ("mse", True)
        assert "ridge-regression" in found.to_frame().index

    def test_the_command_at_the_end_trains_on_every_domain(self) -> None:
        text = str(shoal.compare(arrays(), out="mine", **FEW))
        command = next(line for line in text.splitlines() if line.startswith("  shoal train "))
        assert main([*shlex.split(command)[1:], "--device", "cpu"]) == 0
        (record,) = Path("runs").glob("*/record.json")
        scores = json.loads(record.read_text())["history"][-1]["scores"]
        assert "test" not in scores
        assert list(scores["train"]["domains"]) == ["d000", "d001", "d002"]

    def test_the_command_of_a_recipe_names_it(self) -> None:
        shoal.train("erm", arrays(), steps=5, device="cpu", out="run", progress=False)
        given = {**FEW, "algorithms": "erm++"}
        text = str(shoal.compare(arrays(), weights="run/model.safetensors", **given))
        assert "  shoal train erm++ " in text


class TestResume:
    @pytest.fixture
    def table(self) -> str:
        return table(Path("patients.csv"))

    def test_after_ctrl_c_only_what_is_missing_runs(self, table: str, in_process: Any) -> None:
        ran = []

        def stop_in_fish(config: RunConfig, *given: Any) -> RunRecord:
            if config.algorithm == "fish":
                raise KeyboardInterrupt
            return run(config, *given)

        def count(config: RunConfig, *given: Any) -> RunRecord:
            ran.append(config.identity)
            return run(config, *given)

        in_process(stop_in_fish)
        with pytest.raises(KeyboardInterrupt):
            shoal.compare(table, **OF_TABLE, **FEW)
        (first,) = Store("shoal-compare/patients/runs").all()
        in_process(count)
        found = shoal.compare(table, **OF_TABLE, **FEW)
        assert {first.config.identity, *ran} == {*found.result["identities"]}
        assert len(ran) == 7
        shoal.compare(table, **OF_TABLE, **FEW)
        assert len(ran) == 7

    def test_one_that_fails_does_not_cost_the_others_and_is_repeated(
        self, table: str, in_process: Any
    ) -> None:
        def run_or_fail(config: RunConfig, *given: Any) -> RunRecord:
            if config.algorithm == "erm":
                raise RuntimeError("out of memory\nand more")
            return run(config, *given)

        in_process(run_or_fail)
        found = shoal.compare(table, **OF_TABLE, **FEW)
        assert list(found.failed) == ["erm"]
        assert "out of memory" in found.problems[0]
        assert [row["rank"] for row in found.result["rows"]] == [1, None]
        in_process()
        again = shoal.compare(table, **OF_TABLE, **FEW)
        assert (again.failed, again.result["runs_missing"]) == ({}, 0)

    def test_a_full_disk_is_one_error(self, table: str, in_process: Any) -> None:
        def full(*given: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        in_process(full)
        with pytest.raises(InputError, match="No space left on device"):
            shoal.compare(table, **OF_TABLE, held_out="oslo", **FEW)
        in_process()
        assert not shoal.compare(table, **OF_TABLE, held_out="oslo", **FEW).failed


class TestObject:
    def test_it_shows_and_saves_itself(self) -> None:
        found = shoal.compare(arrays(), **FEW)
        rows, best = found.to_frame(), found.result["rows"][0]
        assert list(rows.index) == [row["algorithm"] for row in found.result["rows"]]
        assert rows["mean"].iloc[0] == best["average"]["mean"]
        assert rows["d001"].iloc[0] == best["domains"]["d001"]["mean"]
        assert "<table>" in found._repr_html_()
        for name, begin in (("a.md", "# "), ("a.csv", "algorithm,"), ("a.json", "{")):
            assert found.save(name).read_text().startswith(begin)
        assert "<!doctype html>" in found.save("a.html").read_text().lower()
        assert found.figure().axes
        with pytest.raises(InputError, match="txt"):
            found.save("a.txt")

    def test_silent_without_progress(self, capsys: Captured) -> None:
        shoal.compare(arrays(), **FEW)
        assert capsys.readouterr() == ("", "")

    def test_worker_processes_give_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        here = shoal.compare(arrays(), held_out="d001", **FEW)
        folder = Path.cwd()
        monkeypatch.undo()
        monkeypatch.chdir(folder)
        there = shoal.compare(arrays(), held_out="d001", out="there", **FEW)
        assert scores(there) == scores(here)

    def test_not_of_several_processes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(InputError, match="torchrun"):
            shoal.compare(arrays(), **FEW)


class TestFolds:
    def test_up_to_ten_domains_one_by_one(self) -> None:
        names = [f"d{n}" for n in range(25)]
        assert compare.folds(names[:10]) == names[:10]
        assert compare.folds([None]) == [None]
        groups = compare.folds(names)
        assert sorted(str(n) for group in groups for n in group or ()) == sorted(names)
        assert [compare.size_of(group) for group in groups] == [*[3] * 5, *[2] * 5]
        assert compare.folds(names[:4], 3) == [["d0", "d3"], "d1", "d2"]

    @pytest.mark.parametrize("metric", ["accuracy", "AUC"])
    def test_every_domain_has_its_own_score(self, metric: str) -> None:
        x, y, domains = arrays(12)
        found = shoal.compare((x, y, domains), metric=metric, folds=3, **{**FEW, "baselines": True})
        result = found.result
        assert (result["runs"], result["folds"], result["runs_missing"]) == (15, 3, 0)
        assert result["held_out"] == sorted(set(domains))
        assert len(result["trials"]) == 12 * 5
        records = {r.config.identity: r for r in found.records}
        for trial in result["trials"]:
            test = records[trial["run"]].chosen["test"]
            assert trial["held_out"] in trial["fold"].split(" and ")
            values = test["domains"] if metric == "accuracy" else test["by_domain"]["AUC"]
            assert trial["test"] == values[trial["held_out"]]
        row = result["rows"][0]
        means = [about["mean"] for about in row["domains"].values()]
        assert row["average"]["mean"] == pytest.approx(mean_of(means))
        assert result["recommendation"]["domains"] == 12
        assert sum(row["chosen"].values()) == 3  # one choice per fold and seed


class TestBudget:
    @pytest.mark.parametrize(
        ("runs", "sizes"),
        [(200, (3, 3, 8)), (100, (2, 3, 8)), (40, (1, 2, 8)), (12, (1, 1, 6)), (1, (1, 1, 3))],
    )
    def test_fewer_trials_then_seeds_then_folds(self, runs: int, sizes: tuple[int, int, int]) -> None:
        full = compare.Design(RunConfig("rotated-digits", "erm", 5), ["erm", "fish"], [*"abcdefgh"], 3, 3)
        found = full.within(runs)
        assert (found.search, found.seeds, len(found.groups)) == sizes
        assert bool(found.reductions(full)) is (sizes != (3, 3, 8))

    def test_what_is_reduced_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        options: dict[str, Any] = {**FEW, "seeds": 2, "search": 2, "out": "o"}
        monkeypatch.setattr(compare, "seconds_of", lambda *given: 10.0)
        found = shoal.compare(arrays(), budget=1.0, **options)
        assert (found.result["runs"], found.result["search"], found.result["seeds"]) == (6, 1, [0])
        monkeypatch.setattr(compare, "seconds_of", lambda *given: 1.0)
        again = shoal.compare(arrays(), budget=1.0, **options)
        assert again.result["identities"] == found.result["identities"]  # the time is kept

    def test_a_run_is_timed_by_its_first_steps(self) -> None:
        config = RunConfig("linear", "erm", 3000, eval_every=300, holdout=0.2, batch_size=4)
        assert 0 < compare.seconds_of(config, "cpu") < 300


def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    """Worker processes do not import the script that started them."""
    script = """
import numpy as np, shoal
x = np.random.default_rng(0).normal(size=(96, 2))
data = x, (x[:, 0] > 0).astype(int), np.repeat(list("abc"), 32)
few = {"seeds": 1, "search": 1, "steps": 2, "baselines": False, "jobs": 2, "progress": False}
done = shoal.compare(data, algorithms="erm", **few)
print("runs", len(done.records), done.failed)
"""
    (tmp_path / "script.py").write_text(script)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(shoal.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout == "runs 3 {}\n", done.stderr[-2000:]
