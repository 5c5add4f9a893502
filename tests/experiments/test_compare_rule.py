"""The rule of a comparison: what is recommended, what is held out, and on which splits."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cli import main
from shoal.data import sets
from shoal.errors import InputError
from shoal.experiments import baselines, compare
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord, Store
from shoal.experiments.statistics import t_limit
from shoal.report import compare as view

Captured = pytest.CaptureFixture[str]
Scores = Mapping[str, Sequence[Sequence[float]]]
"""For each row, for each domain, one score per seed."""


def result(scores: Scores, metric: str = "accuracy", criterion: str = "mean", **also: Any) -> dict[str, Any]:
    """A comparison with these scores; ``also`` are other measures by domain."""
    configs, records = [], []
    for name, domains in scores.items():
        algorithm, draw = compare.parted(name)
        for number, seeds in enumerate(domains):
            for seed, value in enumerate(seeds):
                options = {"test": f"d{number}"}
                config = RunConfig("table", algorithm, 5, options, seed=seed, draw=draw, label=name)
                score = {"metric": metric, "average": value, "domains": {f"d{number}": value}}
                extra = {"metrics": {name: values[number] for name, values in also.items()}}
                held = {"metric": metric, "average": 0.5, "domains": {"a": 0.5}}
                points = {"validation": held, "test": score | extra}
                point = {"step": 5, "passes": 5, "loss": 1.0, "scores": points}
                configs.append(config)
                records.append(RunRecord(config, "finished", (point,), 0, "best", 1.0, {"device": "cpu"}))
    return compare.results(configs, records, criterion=criterion)


ORDER = ["logistic-regression", "ridge-regression", "gradient-boosting", "erm", "reweighted", "mixup"]
"""From simple to complex, written down again; all others are as complex as each other."""


def naive(scores: Scores, lower: bool) -> str:
    """The one-standard-error rule in plain loops."""
    means = {}
    for name, domains in scores.items():
        if name != "majority" and not name.endswith(":regrouped"):
            means[name] = [sum(seeds) / len(seeds) for seeds in domains]
    total = {name: sum(values) / len(values) * (-1 if lower else 1) for name, values in means.items()}
    best = max(total, key=lambda name: total[name])
    near = []
    for name, values in means.items():
        differences = [abs_of - own for abs_of, own in zip(means[best], values, strict=True)]
        middle = sum(differences) / len(differences)
        variance = sum((d - middle) ** 2 for d in differences) / (len(differences) - 1)
        if abs(middle) <= math.sqrt(variance / len(differences)) or name == best:
            near.append(name)
    return min(near, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), -total[name]))


ROWS = ["majority", "logistic-regression", "gradient-boosting", "erm", "reweighted", "mixup", "fish", "coral"]
ROWS += ["fish:regrouped"]


class TestRule:
    @settings(max_examples=60, deadline=None)
    @given(
        names=st.lists(st.sampled_from(ROWS), min_size=2, unique=True),
        domains=st.integers(3, 9),
        seeds=st.integers(1, 3),
        noise=st.sampled_from([0.0, 0.01, 0.1]),
        number=st.integers(0, 10**6),
        metric=st.sampled_from(["accuracy", "mse"]),
    )
    def test_one_standard_error_as_in_plain_loops(
        self, names: list[str], domains: int, seeds: int, noise: float, number: int, metric: str
    ) -> None:
        draw = np.random.default_rng(number)
        common = draw.uniform(0.3, 0.7, (domains, 1))
        scores = {
            name: (common + draw.normal(0, 0.05) + noise * draw.normal(size=(domains, seeds))).tolist()
            for name in names
        }
        about = result(scores, metric)["recommendation"]
        if all(name in ("majority", "fish:regrouped") for name in names):
            assert about is None
            return
        assert about["take"] == naive(scores, metric == "mse")
        assert about["take"] not in ("majority", "fish:regrouped")
        if "majority" in names:
            own = np.mean(scores[about["take"]], 1) - np.mean(scores["majority"], 1)
            error = own.std(ddof=1) / math.sqrt(domains)
            sign = -1 if metric == "mse" else 1
            assert about["majority"]["better"] == (sign * own.mean() > error)
            sure = sign * own.mean() > t_limit(0.95, domains - 1) * error
            assert about["majority"]["sure"] == sure

    def test_the_simpler_row_unless_it_is_more_than_one_standard_error_behind(self) -> None:
        erm = [[0.70], [0.60], [0.80], [0.50]]
        gains = (0.10, -0.06, 0.05, 0.03)  # mean 0.03, standard error 0.0334
        fish = [[v + g for v in d] for d, g in zip(erm, gains, strict=True)]
        found = result({"erm": erm, "fish": fish})
        assert (found["recommendation"]["take"], found["recommendation"]["best"]) == ("erm", "fish")
        assert found["recommendation"]["behind"]["se"] == pytest.approx(np.std(gains, ddof=1) / 2)
        said = view.recommended(found)
        assert said[:3] == [
            "Use erm (plain training on the examples of all domains pooled).",
            "Its expected accuracy on a new domain is about 65.0 %, the average over 4 held-out domains; on "
            "the worst of them (d3) it was 50.0 %.",
            "It is the simplest algorithm within one standard error of the best average, that of fish "
            "(68.0 % on "
            "average, 53.0 % on the worst domain, d3): the difference is 3.0 percentage points, standard "
            "error 3.3 (paired by domain, 4 domains).",
        ]
        clearly = [[v + 0.03 + 0.001 * n for v in d] for n, d in enumerate(erm)]
        found = result({"erm": erm, "fish": clearly})
        assert found["recommendation"]["take"] == "fish"
        assert "no simpler algorithm is within one standard error" in view.recommended(found)[2]

    def test_what_could_have_been_seen_at_all(self) -> None:
        scores = {"erm": [[0.5], [0.6], [0.7], [0.8]], "fish": [[0.52], [0.55], [0.74], [0.79]]}
        error = np.std([0.02, -0.05, 0.04, -0.01], ddof=1) / 2
        found = result(scores)
        # Student's t with three degrees of freedom: 97.5 % below 3.18245, 80 % below 0.97847
        assert found["recommendation"]["detectable"] == pytest.approx((3.18245 + 0.97847) * error, rel=1e-4)
        assert view.recommended(found)[-1] == (
            "With 4 domains, differences of less than 8.1 percentage points would usually not be detected "
            "(paired t test at the 5 % level, power 80 %)."
        )

    def test_not_better_than_the_majority_class(self) -> None:
        chance = [[0.5], [0.6], [0.4], [0.5]]
        noise = [[0.52], [0.57], [0.43], [0.49]]
        found = result({"majority": chance, "erm": noise, "fish": chance})
        assert view.recommended(found)[:2] == [
            "No recommendation: erm (plain training on the examples of all domains pooled) is not better "
            "than a constant prediction (the majority baseline) by more than one standard error.",
            "Over 4 held-out domains its accuracy was 50.2 % on average and 43.0 % on the worst domain "
            "(d2). The "
            "difference to the constant prediction is +0.2 percentage points, 95 % interval -4.1 to +4.6.",
        ]
        better = [[v + 0.2 for v in d] for d in chance]
        found = result({"majority": chance, "erm": better, "fish": chance})
        assert found["recommendation"]["majority"]["better"]
        assert view.recommended(found)[0].startswith("Use erm ")
        assert "uncertain" not in " ".join(view.recommended(found))
        perhaps = [[v[0] + d] for v, d in zip(chance, (0.4, 0.1, 0.3, -0.1), strict=True)]
        said = view.recommended(result({"majority": chance, "erm": perhaps, "fish": chance}))
        assert said[0].startswith("Use erm ")
        assert said[3].startswith(
            "Its improvement over a constant prediction (the majority baseline) is uncertain: +17.5 "
            "percentage "
            "points, 95 % interval -"
        )

    @pytest.mark.parametrize("domains", [1, 2])
    def test_too_few_domains_are_no_conclusion(self, domains: int) -> None:
        found = result({"erm": [[0.5]] * domains, "fish": [[0.9]] * domains})
        about = found["recommendation"]
        assert (about["take"], about["begin"]) == (None, "erm")
        first, second = view.recommended(found)
        assert first.startswith(f"No recommendation: {domains} held-out domain")
        assert second.startswith("Start with erm (plain training")
        assert "the simplest algorithm. " in second
        assert "50.0 %" in second

    def test_nothing_of_controls_alone_or_of_missing_scores(self) -> None:
        found = result({"majority": [[0.5]] * 3, "fish:regrouped": [[0.6]] * 3})
        assert found["recommendation"] is None
        assert view.recommended(found) == []
        assert "Controls (never recommended): fish:regrouped, majority." in view.words(found)

    def test_results_of_an_earlier_version(self) -> None:
        found = result({"erm": [[0.5]] * 3, "fish": [[0.6]] * 3})
        found["recommendation"] = {"take": "erm", "reference": "erm", "among": ["erm"], "interval": None}
        for row in found["rows"]:
            del row["over_domains"], row["also"], row["worst"], row["control"]
        for name in ("criterion", "undefined", "fits"):
            del found[name]
        assert not view.recommended(found)
        assert view.as_csv(found).count("\n") == 7
        assert "erm" in view.markdown(found)


class TestWorst:
    scores: ClassVar[Scores] = {
        "erm": [[0.9, 0.8], [0.9, 0.9], [0.9, 0.9], [0.5, 0.3]],
        "vrex": [[0.7, 0.7], [0.72, 0.7], [0.7, 0.7], [0.66, 0.7]],
    }

    def test_its_name_and_mean_over_seeds_beside_the_average(self) -> None:
        found = result(self.scores)
        rows = {row["algorithm"]: row for row in found["rows"]}
        assert (rows["erm"]["worst"]["domain"], rows["erm"]["worst"]["mean"]) == ("d3", pytest.approx(0.4))
        table = view.table(found)
        assert [row[table.columns.index("worst domain")] for row in table.rows] == ["40.0 (d3)", "68.0 (d3)"]
        assert "40.0 (d3)" in view.markdown(found)
        lines = list(csv.DictReader(io.StringIO(view.as_csv(found))))
        assert {(d["algorithm"], d["worst_domain"], round(float(d["worst"]), 6)) for d in lines} == {
            ("erm", "d3", 0.4),
            ("vrex", "d3", 0.68),
        }

    def test_the_worst_of_errors_is_the_largest(self) -> None:
        assert result({"erm": [[0.1], [0.5], [0.2]]}, "mse")["rows"][0]["worst"]["mean"] == 0.5

    def test_the_criterion_ranks_and_recommends(self) -> None:
        mean, worst = (result(self.scores, criterion=c) for c in compare.CRITERIA)
        assert [r["algorithm"] for r in mean["rows"]] == ["erm", "vrex"]
        assert [(r["algorithm"], r["rank"]) for r in worst["rows"]] == [("vrex", 1), ("erm", 2)]
        assert (mean["recommendation"]["take"], worst["recommendation"]["best"]) == ("erm", "vrex")
        said = " ".join(view.recommended(mean))
        assert "on the worst of them (d3) it was 40.0 %" in said
        assert (
            "On the worst held-out domain, vrex (69.8 % on average, 68.0 % on the worst domain, d3) is "
            "better by 28.0 percentage points" in said
        )
        assert "--criterion worst" in said
        with pytest.raises(InputError, match="unknown criterion 'median'"):
            result(self.scores, criterion="median")

    def test_the_standard_error_is_that_of_resampled_domains_and_seeds(self) -> None:
        rows = {row["algorithm"]: row for row in result(self.scores)["rows"]}
        difference, error = compare.paired(rows["vrex"], rows["erm"], False, "worst")
        assert difference == pytest.approx(0.28)
        draw, found = np.random.default_rng(1), []
        for _ in range(4000):
            domains = draw.integers(4, size=4)
            seeds = draw.integers(2, size=(4, 2))
            least = {}
            for name, own in self.scores.items():
                means = [np.mean([own[d][s] for s in seeds[n]]) for n, d in enumerate(domains)]
                least[name] = min(means)
            found.append(least["vrex"] - least["erm"])
        assert error == pytest.approx(np.std(found), rel=0.1)

    def test_rows_that_are_the_same_differ_by_nothing(self) -> None:
        row = result({"erm": self.scores["erm"]})["rows"][0]
        for criterion in compare.CRITERIA:
            assert compare.paired(row, row, False, criterion) == (0.0, 0.0)


def test_rows_without_a_spread_have_none() -> None:
    found = result({"erm": [[0.5, 0.6]] * 3, "logistic-regression": [[0.7, 0.7]] * 3})
    table = view.table(found)
    assert {row[1]: row[2] for row in table.rows} == {"logistic-regression": "70.0", "erm": "55.0 ± 7.1"}
    assert "± 0.0" not in view.text(found)


def test_another_measure_is_averaged_where_it_is_defined() -> None:
    found = result({"erm": [[0.5]] * 3, "fish": [[0.6]] * 3}, AUC=[0.7, None, 0.9])
    assert found["undefined"] == {"AUC": ["d1"]}
    assert [row["also"]["AUC"]["mean"] for row in found["rows"]] == pytest.approx([0.8, 0.8])
    assert "AUC is undefined in 'd1'; its average is over the other domains." in view.words(found)


SITES = {"kyoto": 40, "lima": 40, "oslo": 40, "one": 40, "tiny": 3}


@pytest.fixture
def patients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A table whose domain ``one`` has one class, and ``tiny`` three rows."""
    monkeypatch.chdir(tmp_path)
    draw, lines = np.random.default_rng(0), ["age,dose,site,ill"]
    for site, count in SITES.items():
        for age, dose in zip(draw.normal(50, 10, count), draw.normal(size=count), strict=True):
            ill = site == "one" or age + 10 * dose > 50
            lines.append(f"{age:.2f},{dose:.3f},{site},{'yes' if ill else 'no'}")
    Path("patients.csv").write_text("\n".join(lines))
    return {"file": "patients.csv", "label": "ill", "domain": "site"}


class TestHeldOut:
    def test_by_accuracy(self, patients: dict[str, Any]) -> None:
        where = compare.layout("table", patients)
        assert where.left_out == ("kyoto", "lima", "one", "oslo")
        assert where.excluded == {"tiny": "fewer than 16 examples are too few to score"}
        assert [line.split(" (")[0] for line in where.messages] == [
            "not held out, only trained on: 'tiny'",
            "warning, held-out domains: 'one'",
        ]
        train = sets.load("table", **patients, test="kyoto").splits["train"]
        assert "tiny" in train.names

    def test_by_auc(self, patients: dict[str, Any]) -> None:
        where = compare.layout("table", patients, metric="auc")
        assert where.left_out == ("kyoto", "lima", "oslo")
        assert set(where.excluded) == {"one", "tiny"}
        assert "AUC is undefined" in where.excluded["one"]

    def test_whoever_is_named_is_held_out_with_a_warning(self, patients: dict[str, Any]) -> None:
        where = compare.layout("table", patients, ["tiny", "oslo"])
        assert (where.left_out, dict(where.excluded)) == (("tiny", "oslo"), {})
        assert where.messages == [
            "warning, held-out domains: 'tiny' (fewer than 16 examples are too few to score)"
        ]

    def test_where_all_are_small_all_are_held_out_with_a_warning(self, patients: dict[str, Any]) -> None:
        lines = Path("patients.csv").read_text().splitlines()
        some = [line for n, line in enumerate(lines) if n % 4 == 0 and ",tiny," not in line]
        Path("patients.csv").write_text("\n".join(some))
        where = compare.layout("table", patients)
        assert len(where.left_out) == 4
        assert "too few to score" in where.messages[-1]

    def test_none_of_whom_auc_is_defined(self, patients: dict[str, Any]) -> None:
        lines = Path("patients.csv").read_text().splitlines()
        same = [line.rsplit(",", 1)[0] + (",no" if ",one," in line else ",yes") for line in lines[1:]]
        Path("patients.csv").write_text("\n".join([lines[0], *same]))
        with pytest.raises(InputError, match=r"no domain can be held out: .*AUC is undefined"):
            compare.layout("table", patients, metric="AUC")


class TestSplits:
    def plan(self, options: dict[str, Any]) -> list[RunConfig]:
        base = RunConfig("table", "erm", 5, options, metric="auc")
        return compare.plan(base, ["erm", "fish", *baselines.names(2)], ["oslo"], range(3), 2)

    def test_every_seed_has_its_own_and_all_rows_the_same(self, patients: dict[str, Any]) -> None:
        options: dict[int, set[str]] = {}
        for config in self.plan(patients):
            options.setdefault(config.seed, set()).add(json.dumps(dict(config.data_options), sort_keys=True))
        assert [len(same) for same in options.values()] == [1, 1, 1]
        validation = {
            tuple(sets.load("table", **json.loads(next(iter(same)))).splits["validation"].examples().tolist())
            for same in options.values()
        }
        assert len(validation) == 3
        assert json.loads(next(iter(options[0]))) == {**patients, "test": "oslo"}  # as in an earlier version

    def test_a_seed_of_the_data_that_is_given_stays(self, patients: dict[str, Any]) -> None:
        assert {c.data_options["seed"] for c in self.plan({**patients, "seed": 7})} == {7}
        assert {c.seed for c in self.plan({**patients, "seed": 7})} == {0, 1, 2}

    def test_a_dataset_that_is_made_by_its_seed_is_the_same_for_all(self) -> None:
        found = compare.plan(RunConfig("rotated-digits", "erm", 5), ["erm"], ["0°"], range(3), 1)
        assert {json.dumps(dict(c.data_options)) for c in found} == {json.dumps({"test": "0°"})}


SMALL = ["--label", "ill", "--domain", "site", "--algorithms", "erm", "--seeds", "2", "--search", "1"]
SMALL += ["--steps", "5", "--batch-size", "8", "--device", "cpu", "--jobs", "1"]


@pytest.mark.usefixtures("patients", "in_process")
class TestCommand:
    def test_auc_everywhere(self, capsys: Captured) -> None:
        pytest.importorskip("sklearn")
        assert main(["compare", "patients.csv", *SMALL, "--metric", "auc"]) == 0
        shown = capsys.readouterr()
        before, *_ = shown.err.partition("runs to do")
        assert "Not held out, only trained on: 'one' (all examples are of one class, so AUC" in before
        assert f"{2 * 3 * (1 + len(baselines.names(2)))} runs: " in before
        found = json.loads(Path("shoal-compare/patients/compare-table.json").read_text())
        assert (found["metric"], set(found["excluded"])) == ("AUC", {"one", "tiny"})
        assert {trial["status"] for trial in found["trials"]} == {"scored"}
        assert all(row["validation"]["metric"] == "AUC" for row in found["rows"])
        assert "average AUC" in shown.out
        assert "validation AUC" in shown.out
        assert (
            "<!-- AUC on a held-out domain -->"
            in Path("shoal-compare/patients/compare-table.svg").read_text()
        )
        for one in Store("shoal-compare/patients/runs").all():
            assert {s["selects"] for p in one.history for s in p["scores"].values()} == {"AUC"}

    def test_the_criterion_needs_no_new_run(self, capsys: Captured) -> None:
        given = ["compare", "patients.csv", *SMALL, "--no-baselines", "--held-out", "kyoto", "lima", "oslo"]
        assert main(given) == 0
        capsys.readouterr()
        assert main([*given, "--criterion", "worst", "--json"]) == 0
        shown = capsys.readouterr()
        assert not shown.err
        assert json.loads(shown.out)["recommendation"]["criterion"] == "worst"
        assert main([*given, "--criterion", "best"]) == 2
