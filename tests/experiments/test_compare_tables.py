"""Comparisons on tables: scikit-learn's baselines, intervals over domains, and what is recommended."""

from __future__ import annotations

import errno
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shoal.cli import main
from shoal.data import sets
from shoal.errors import InputError
from shoal.experiments import baselines, compare
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord, Store
from shoal.experiments.run import run
from shoal.report import compare as view

Captured = pytest.CaptureFixture[str]
SITES = ("kyoto", "lima", "oslo", "<script>")


def table(path: Path, rows: int = 160, label: str = "ill", seed: int = 0, sites: Any = SITES) -> str:
    """A CSV of a few sites; the label depends on age and colour, and on nothing else."""
    draw = np.random.default_rng(seed)
    age, colour = draw.normal(50, 10, rows), draw.choice(["red", "blue"], rows)
    risk = age + 10 * (colour == "red") + draw.normal(0, 4, rows)
    values = risk if label == "risk" else np.where(risk > 55, "yes", "no")
    lines = [f"age,colour,site,{label}"]
    lines += [
        f"{a:.2f},{c},{sites[n % len(sites)]},{v}"
        for n, (a, c, v) in enumerate(zip(age, colour, values, strict=True))
    ]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"file": table(tmp_path / "patients.csv"), "label": "ill", "domain": "site"}


def base(options: dict[str, Any]) -> RunConfig:
    return RunConfig("table", "erm", 5, data_options=options, eval_every=5)


class TestBaselines:
    def test_the_same_as_scikit_learn_by_hand(self, options: dict[str, Any]) -> None:
        linear = pytest.importorskip("sklearn.linear_model")
        config = compare.plan(base(options), baselines.names(2), ["oslo"], [0], 1)[1]
        assert config.name == "logistic-regression"
        record = baselines.run(config)
        data: Any = sets.load("table", **options, test="oslo")
        x, y = data.examples.x.numpy(), data.examples.y.numpy()
        train, test = (data.splits[s].examples() for s in ("train", "test"))
        model = linear.LogisticRegression(max_iter=1000).fit(x[train], y[train])
        assert record.score("test") == pytest.approx(model.score(x[test], y[test]))
        scores = record.history[0]["scores"]["test"]
        chances = model.predict_proba(x[test])
        assert scores["loss"] == pytest.approx(-np.log(chances[np.arange(len(test)), y[test]]).mean())
        pairs = [(a, b) for a in chances[y[test] == 1, 1] for b in chances[y[test] == 0, 1]]
        assert scores["metrics"]["AUC"] == pytest.approx(np.mean([a > b for a, b in pairs]))
        assert scores["domains"] == {"oslo": scores["average"]}

    def test_the_trees_are_those_of_validation(self, options: dict[str, Any]) -> None:
        pytest.importorskip("sklearn")
        record = baselines.run(compare.plan(base(options), baselines.names(2), ["oslo"], [0], 1)[2])
        steps = [point["step"] for point in record.history]
        assert steps == list(range(baselines.LOOK, baselines.TREES + 1, baselines.LOOK))
        held = [point["scores"]["validation"]["average"] for point in record.history]
        assert record.selected == int(np.argmax(held))
        assert record.status == "finished"

    def test_what_is_left_out_has_no_part(self, options: dict[str, Any], tmp_path: Path) -> None:
        """Other labels and ages in the domain left out change its scores and no others."""
        pytest.importorskip("sklearn")
        lines = Path(options["file"]).read_text().splitlines()
        other = [("1.5,red,oslo,yes" if ",oslo," in line else line) for line in lines]
        (tmp_path / "other.csv").write_text("\n".join(other))
        changed = {**options, "file": str(tmp_path / "other.csv")}
        for one, two in zip(
            *(compare.plan(base(o), baselines.names(2), ["oslo"], [0], 1) for o in (options, changed)),
            strict=True,
        ):
            before, after = (baselines.run(c).history[-1]["scores"] for c in (one, two))
            assert before["validation"] == after["validation"]
            assert before["train"] == after["train"]
            assert before["test"] != after["test"]

    def test_quantities(self, tmp_path: Path) -> None:
        pytest.importorskip("sklearn")
        options = {"file": table(tmp_path / "r.csv", label="risk"), "label": "risk", "domain": "site"}
        found = {
            c.name: baselines.run(c)
            for c in compare.plan(base(options), baselines.names(None), ["lima"], [0], 1)
        }
        assert list(found) == ["majority", "ridge-regression", "gradient-boosting"]
        assert {r.history[-1]["scores"]["test"]["metric"] for r in found.values()} == {"mse"}
        mean = found.pop("majority").score("test")
        assert all(record.score("test") < 0.7 * mean for record in found.values())

    def test_a_class_that_no_training_example_has(self, tmp_path: Path) -> None:
        pytest.importorskip("sklearn")
        rows = [
            f"{n % 11},{'a' if n % 4 else 'b'},{'yes' if n % 4 == 0 and n % 8 else 'no'}" for n in range(80)
        ]
        (tmp_path / "t.csv").write_text("\n".join(["x,site,y", *rows]))
        options = {"file": str(tmp_path / "t.csv"), "label": "y", "domain": "site"}
        for config in compare.plan(base(options), baselines.names(2), ["b"], [0], 1):
            assert baselines.run(config).score("test") == 0.5

    def test_a_search_of_the_same_length_that_begins_with_the_defaults(self, options: dict[str, Any]) -> None:
        found = compare.plan(base(options), baselines.names(2), ["lima", "oslo"], [0, 1], 3)
        assert (
            len({c.identity for c in found}) == len(found) == 2 * 2 * (1 + 3 + 3)
        )  # majority has no settings
        first = [
            c for c in found if (c.name, c.seed, c.data_options["test"]) == (baselines.BOOSTING, 1, "oslo")
        ]
        assert [bool(c.settings) for c in first] == [False, True, True]
        assert all(baselines.is_one(c) for c in found)
        short = {
            c.identity for c in compare.plan(base(options), baselines.names(2), ["lima", "oslo"], [0], 2)
        }
        assert short < {c.identity for c in found}

    def test_only_for_rows_of_numbers(self, options: dict[str, Any]) -> None:
        assert compare.layout("table", options).flat
        assert compare.layout("linear", {}).flat
        assert not compare.layout("rotated-digits", {}, ["75°"]).flat


def record(config: RunConfig, test: float, metric: str = "accuracy") -> RunRecord:
    scores = {
        "validation": {"metric": metric, "average": 0.5, "domains": {"a": 0.5}},
        "test": {
            "metric": metric,
            "average": test,
            "domains": {config.data_options["test"]: test},
            "metrics": {"AUC": test / 2},
        },
    }
    point = {"step": 5, "passes": 5, "loss": 1.0, "scores": scores}
    return RunRecord(config, "finished", (point,), 0, "best on validation", 1.0, {"device": "cpu"})


def result(scores: dict[str, list[list[float]]], metric: str = "accuracy") -> Any:
    """``scores``: for each row, for each domain, one a seed."""
    configs, records = [], []
    for name, domains in scores.items():
        for number, seeds in enumerate(domains):
            for seed, value in enumerate(seeds):
                one = RunConfig("table", name, 5, data_options={"test": f"d{number}"}, seed=seed)
                configs.append(one)
                records.append(record(one, value, metric))
    return compare.results(configs, records)


ERM = [[0.70], [0.60], [0.80], [0.50]]


class TestIntervals:
    def test_domain_by_domain_by_hand(self) -> None:
        fish = [[0.74], [0.61], [0.85], [0.52]]
        (row,) = (r for r in result({"erm": ERM, "fish": fish})["rows"] if r["algorithm"] == "fish")
        found, values = row["over_domains"], np.array([0.04, 0.01, 0.05, 0.02])
        reach = 3.18245 * values.std(ddof=1) / 2
        assert list(found["values"].values()) == pytest.approx(values.tolist())
        assert (found["low"], found["high"]) == pytest.approx((0.03 - reach, 0.03 + reach), rel=1e-4)

    def test_seeds_are_averaged_within_a_domain(self) -> None:
        erm = [[0.6, 0.8], [0.5, 0.5], [0.1, 0.3]]
        fish = [[0.9, 0.7], [0.5, 0.7], [0.2, 0.2]]
        (row,) = (r for r in result({"erm": erm, "fish": fish})["rows"] if r["algorithm"] == "fish")
        assert list(row["over_domains"]["values"].values()) == pytest.approx([0.1, 0.1, 0.0])

    def test_two_domains_give_none(self) -> None:
        found = result({"erm": ERM[:2], "fish": [[0.9], [0.9]]})
        assert [r["over_domains"]["low"] for r in found["rows"] if r["over_domains"]] == [None]
        assert not view.has_intervals(found)
        assert "95 % interval" not in view.table(found).columns

    def test_the_table_has_them_and_what_else_was_measured(self) -> None:
        found = result({"erm": ERM, "fish": [[v + 0.1 + 0.01 * n for v in d] for n, d in enumerate(ERM)]})
        table = view.table(found)
        at = {name: n for n, name in enumerate(table.columns)}
        assert table.rows[0][at["95 % interval"]] == "+9.4 to +13.6"
        assert table.rows[1][at["95 % interval"]] == "–"
        assert table.rows[1][at["average AUC"]] == "0.3250"
        assert "paired by domain over 4 domains (Student's t" in " ".join(view.words(found))

    def test_many_domains_and_long_names_fit_a_terminal(self) -> None:
        found = result({"erm": [[0.5, 0.6]] * 21, "fish": [[0.5, 0.7]] * 21})
        assert max(map(len, view.table(found, view._cut, view.BESIDE).text().splitlines())) < 120
        assert "The scores on each of the 21 domains are in the files." in view.text(found)
        heading = next(line for line in view.markdown(found).splitlines() if line.startswith("| rank"))
        assert heading.count("|") > 21
        assert view._cut("x" * 300) == "x" * 39 + "…"
        assert "in the files" not in view.text(result({"erm": ERM, "fish": ERM}))


SMALL = ["--algorithms", "erm", "fish", "--seeds", "1", "--search", "1", "--steps", "5", "--batch-size", "8"]
SMALL += ["--device", "cpu", "--jobs", "1"]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "patients.csv")
    return tmp_path


@pytest.mark.usefixtures("elsewhere", "in_process")
class TestCommand:
    GIVEN = ("compare", "patients.csv", "--label", "ill", "--domain", "site", *SMALL)

    def test_from_a_file_to_a_recommendation(self, capsys: Captured) -> None:
        pytest.importorskip("sklearn")
        assert main([*self.GIVEN, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        own = baselines.names(2)
        assert {r["algorithm"] for r in found["rows"]} == {"erm", "fish", *own}
        assert found["left_out"] == sorted(SITES)
        assert (found["runs"], found["fits"], found["runs_missing"]) == (8 + 4 * len(own), 4 * len(own), 0)
        assert found["title"] == "patients.csv"
        assert all(r["also"]["AUC"]["mean"] is not None for r in found["rows"])
        folder = Path("shoal-compare/patients")
        records = Store(folder / "runs").all()
        assert len(records) == found["runs"]
        for one in records:
            assert list(one.history[-1]["scores"]["test"]["domains"]) == [one.config.data_options["test"]]
        assert main([*self.GIVEN]) == 0
        shown = capsys.readouterr()
        assert not shown.err  # nothing was run again
        assert shown.out.startswith(("Use ", "No recommendation: "))
        assert f"8 runs of 5 steps on cpu, and {4 * len(own)} fits of scikit-learn models" in shown.out
        assert "<script>" not in (folder / "compare-table.md").read_text()
        assert "older than its runs" not in (folder / "report.html").read_text()

    def test_the_command_at_the_end_trains_on_every_domain(self, capsys: Captured) -> None:
        assert main([*self.GIVEN, "--no-baselines"]) == 0
        said = capsys.readouterr().out
        assert "with the hyperparameters selected in 4 of 4 splits" in said
        command = next(line for line in said.splitlines() if line.startswith("  shoal train "))
        assert " patients.csv --label ill --domain site --held-out none " in command
        folder = command.split()[-1]
        for following in (f"  shoal predict {folder} NEW.csv", f"  shoal export {folder}"):
            assert following in said.splitlines()
        assert main([*shlex.split(command)[1:], "--device", "cpu", "--json"]) == 0
        scores = json.loads(capsys.readouterr().out)["history"][-1]["scores"]
        assert "test" not in scores
        assert list(scores["train"]["domains"]) == sorted(SITES)

    def test_the_settings_chosen_most_often_are_those_of_all_seeds_together(self) -> None:
        """Draws are each seed's own, so that the same number is not the same settings in another seed."""
        one, other = (
            RunConfig(
                "table", "fish", 5, settings={"meta_lr": m}, optimizer_options={"lr": 0.1}, label="fish"
            )
            for m in (0.5, 0.2)
        )
        trials: list[dict[str, Any]] = [
            {"algorithm": "fish", "chosen": n, "settings": {"meta_lr": m}, "lr": 0.1}
            for n, m in ((1, 0.3), (2, 0.2), (1, 0.2))
        ]
        assert compare.usual_settings([one, other], trials, "fish") == (other, 2, 3)
        assert compare.usual_settings([one, other], trials, "erm") is None

    def test_a_changed_file_is_run_anew(self, capsys: Captured) -> None:
        few = [*self.GIVEN, "--no-baselines", "--held-out", "oslo"]
        assert main(few) == 0
        with Path("patients.csv").open("a") as file:
            file.write("\n48.5,red,lima,no")
        capsys.readouterr()
        assert main(few) == 0
        assert "2 remaining." in capsys.readouterr().err
        folder = Path("shoal-compare/patients")
        assert len(Store(folder / "runs").all()) == 4
        page = (folder / "report.html").read_text()
        assert "No recommendation: 1 held-out domain; a conclusion requires at least" in page
        assert "2 runs (2 finished)" in page
        assert main(["report", str(folder), "-o", "all.html"]) == 0
        assert "older than its runs" not in Path("all.html").read_text()

    def test_a_full_disk_is_one_line(
        self, capsys: Captured, monkeypatch: pytest.MonkeyPatch, in_process: Any
    ) -> None:
        def full(*given: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        few = [*self.GIVEN, "--held-out", "oslo"]
        said = "shoal: 'shoal-compare/patients': No space left on device. Finished runs"
        in_process(full)  # a run that fails for it
        assert main(few) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith(
            "shoal: 'shoal-compare/patients': OSError: [Errno 28] No space left on device. F"
        )
        assert last.count("Finished runs are saved") == 1
        in_process()
        with monkeypatch.context() as patch:
            patch.setattr("shoal.api.compare.write_atomically", full)
            assert main(few) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(said)
        assert main(few) == 0

    def test_without_scikit_learn(self, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(baselines, "lacking", lambda: "needs scikit-learn: pip install scikit-learn")
        assert main([*self.GIVEN, "--held-out", "oslo"]) == 0
        shown = capsys.readouterr()
        for name in ("gradient-boosting", "logistic-regression"):
            assert f"Not compared: {name} (needs scikit-learn" in shown.err
        assert "Not compared: logistic-regression, gradient-boosting (needs scikit-learn" in shown.out

    def test_a_baseline_that_fails_does_not_cost_the_others(self, capsys: Captured, in_process: Any) -> None:
        def run_or_fail(config: RunConfig, *given: Any) -> RunRecord:
            if config.algorithm == baselines.BOOSTING:
                raise RuntimeError("out of memory\nand more")
            return run(config, *given)

        in_process(run_or_fail)
        assert main([*self.GIVEN, "--held-out", "oslo"]) == 1
        assert "A run of gradient-boosting failed: RuntimeError: out of memory" in capsys.readouterr().out

    def test_ctrl_c_keeps_what_has_finished(self, capsys: Captured, in_process: Any) -> None:
        def run_or_stop(config: RunConfig, *given: Any) -> RunRecord:
            if config.algorithm != baselines.names(2)[0]:
                raise KeyboardInterrupt
            return run(config, *given)

        in_process(run_or_stop)
        assert main([*self.GIVEN]) == 130
        assert "he same command resumes" in capsys.readouterr().err
        assert len(Store("shoal-compare/patients/runs").all()) == 1

    def test_a_quantity_is_said_and_scored_by_its_error(self, capsys: Captured) -> None:
        table(Path("risk.csv"), label="risk")
        given = ["compare", "risk.csv", "--label", "risk", "--domain", "site", *SMALL]
        assert main([*given, "--held-out", "oslo"]) == 0
        shown = capsys.readouterr()
        assert "so the task is regression." in shown.err
        assert "ridge-regression" in shown.out
        assert "average mse" not in shown.out  # one domain
        assert "Mse (lower is better)" in shown.out

    def test_auc_may_select(self, capsys: Captured) -> None:
        assert main([*self.GIVEN, "--held-out", "oslo", "--metric", "auc", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["metric"], found["lower_is_better"]) == ("AUC", False)
        assert all(list(r["also"]) == ["accuracy"] for r in found["rows"])
        assert "AUC (higher is better)" in view.words(found)[0]

    def test_the_defaults_go_by_the_table(self, capsys: Captured) -> None:
        given = ["compare", "patients.csv", "--label", "ill", "--domain", "site", "--plan", "--device", "cpu"]
        assert main(given) == 0
        assert "4 held-out domains, 3 seeds, 3 hyperparameter trials each" in capsys.readouterr().out
        runs = json.loads(Path("shoal-compare/patients/table.plan.json").read_text())
        trained = [r["config"] for r in runs if r["config"]["algorithm"] not in baselines.SPACES]
        assert {(c["steps"], c["batch_size"]) for c in trained} == {(300, 32)}
        assert {c["label"] for c in trained} == set(compare.ALGORITHMS)
        assert {"reweighted", "fish:regrouped"} < set(compare.ALGORITHMS)
        assert {r["config"]["label"] for r in runs} - set(compare.ALGORITHMS) == set(baselines.names(2))

    def test_a_folder_of_pictures(self, capsys: Captured) -> None:
        for place in ("in", "out"):
            for label in ("cat", "dog"):
                Path("pets", place, label).mkdir(parents=True)
                for n in range(5):
                    Image.new("RGB", (8, 8), (40 * n, 0, 90)).save(Path("pets", place, label, f"{n}.png"))
        given = ["compare", "pets", "--data", "size=8", *SMALL, "--algorithms", "erm"]
        assert main([*given, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["dataset"], found["left_out"], found["fits"]) == ("image-folder", ["in", "out"], 2)
        assert {row["algorithm"] for row in found["rows"]} == {"majority", "erm"}
        assert Path("shoal-compare/pets/compare-image-folder.json").exists()
        train = ["train", "erm", "pets", "--data", "size=8", "--steps", "2", "--device", "cpu"]
        assert main([*train, "--held-out", "none", "--json"]) == 0
        scores = json.loads(capsys.readouterr().out)["history"][-1]["scores"]
        assert {name: list(s["domains"]) for name, s in scores.items()} == {
            "train": ["in", "out"],
            "validation": ["in", "out"],
        }

    def test_an_identifier_is_said_once(self, capsys: Captured) -> None:
        lines = Path("patients.csv").read_text().splitlines()
        named = [f"p{n},{line}" if n else f"name,{line}" for n, line in enumerate(lines)]
        Path("named.csv").write_text("\n".join(named))
        given = ["compare", "named.csv", "--label", "ill", "--domain", "site", *SMALL, "--no-baselines"]
        assert main([*given, "--held-out", "oslo"]) == 0
        said = capsys.readouterr().err
        assert said.count("column 'name': not used, because it is different in (almost) every row") == 1
        assert "UserWarning" not in said
        train = ["train", "erm", "named.csv", "--label", "ill", "--domain", "site"]
        assert main([*train, "--steps", "2", "--device", "cpu"]) == 0
        said = capsys.readouterr().err
        assert said.count("column 'name': not used, because it is different in (almost) every row") == 1
        assert "UserWarning" not in said

    def test_the_same_file_for_diagnose_and_train(self, capsys: Captured) -> None:
        given = ["diagnose", "patients.csv", "--label", "ill", "--domain", "site", "--drop", "colour"]
        assert main([*given, "--steps", "5", "--device", "cpu", "--json"]) == 0
        told = json.dumps(json.loads(capsys.readouterr().out))
        assert "shoal compare patients.csv --label ill --domain site --drop colour" in told
        train = ["train", "fish", "patients.csv", "--label", "ill", "--domain", "site"]
        train += ["--steps", "3", "--device", "cpu", "--held-out", "lima"]
        assert main([*train, "--json"]) == 0
        scores = json.loads(capsys.readouterr().out)["history"][-1]["scores"]
        assert list(scores["test"]["domains"]) == ["lima"]
        assert main([*train, "--data", "test=oslo"]) == 2
        assert "specify only one of them" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["patients.csv"], "requires the column to predict"),
            (["patients.csv", "--label", "il", "--domain", "site"], "Did you mean 'ill'"),
            (["patients.csv", "--label", "ill", "--domain", "sight"], "Did you mean 'site'"),
            (["patients.csv", "--label", "ill", "--domain", "ill"], "both the label and the domain"),
            (
                ["patients.csv", "--label", "age", "--domain", "site", "--task", "ranking"],
                "got 'ranking'",
            ),
            (
                ["patients.csv", "--label", "ill", "--domain", "site", "--metric", "mse"],
                "'mse' is for regression",
            ),
            (
                ["patients.csv", "--label", "ill", "--domain", "site", "--numeric", "colour"],
                "column 'colour' cannot be read as numeric: it has no value that is a number",
            ),
            (
                ["patients.csv", "--label", "ill", "--domain", "site", "--numeric", "age", "--text", "age"],
                "--numeric age and --text age: a column can have only one kind",
            ),
            (["patients.csv", "--label", "ill", "--data", "test=["], "'test=[': this value cannot be read"),
            (["nowhere.csv", "--label", "ill", "--domain", "site"], "cannot be read: No such file"),
            (
                ["rotated-digits", "--label", "ill"],
                " is an option of tables, and 'rotated-digits' is not a .csv",
            ),
            (["notes.md"], "is not a table; supported extensions"),
            (["rotated-digit"], "Did you mean 'rotated-digits'"),
        ],
    )
    def test_wrong_input_is_one_line(self, arguments: list[str], says: str, capsys: Captured) -> None:
        Path("notes.md").write_text("no table")
        assert main(["compare", *arguments]) == 2
        shown = capsys.readouterr()
        assert says in shown.err
        assert len(shown.err.splitlines()) == 1
        assert not Path("shoal-compare").exists()

    def test_what_is_wrong_without_a_later_domain_is_said_before_any_training(self, capsys: Captured) -> None:
        sites = ["kyoto", "lima", *["oslo"] * 58]  # without oslo one example is left of each
        few = ["--held-out", "kyoto", "oslo"]
        file = table(Path("few.csv"), rows=60, sites=sites)
        few += ["--label", "ill", "--domain", "site", "--algorithms", "erm", "--steps", "2"]
        assert main(["compare", file, *few]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert (
            line == "shoal: with 'oslo' held out: share=0.2 of 2 examples in 2 domains holds out no example."
        )
        assert not Path("shoal-compare").exists()

    def test_a_label_of_one_domain_alone_is_said(self, capsys: Captured) -> None:
        lines = [
            f"{n % 7},{'abc'[n % 3]},{'rare' if n % 12 == 2 else 'ill' if n % 2 else 'well'}"
            for n in range(60)
        ]
        Path("rare.csv").write_text("\n".join(["x,site,y", *lines]))
        arguments = [
            "--label",
            "y",
            "--domain",
            "site",
            "--algorithms",
            "erm",
            "--steps",
            "2",
            "--seeds",
            "1",
        ]
        assert main(["compare", "rare.csv", *arguments, "--search", "1", "--no-baselines"]) == 0
        shown = capsys.readouterr().err
        said = "With 'c' held out no training example has the label 'rare' (5 of 20 examples there)."
        assert said in shown.splitlines()
        assert shown.count("no training example") == 1


def test_a_sweep_of_a_table_does_not_leak(options: dict[str, Any]) -> None:
    """DomainBed's splits would judge by rows to which columns were fitted."""
    from shoal.experiments.protocol import resplit

    with pytest.raises(InputError, match="would hold rows to which the table's columns are scaled"):
        resplit(sets.load("table", **options), ["kyoto"], 0)
