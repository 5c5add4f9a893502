"""``shoal.compare``: data in memory and in files, what it returns, resuming, and the model at the end."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from test_baselines import write_table as table

import shoal
from shoal.cli import main
from shoal.errors import InputError
from shoal.experiments import baselines
from shoal.experiments.config import RunConfig
from shoal.training.calibration import fit_temperature

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


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A comparison with baselines, and two trials of Fish."""
    folder = tmp_path_factory.mktemp("found")
    given = {**FEW, "algorithms": "fish", "search": 2, "lr": 0.01, "metric": "AUC", "baselines": True}
    return shoal.compare(arrays(), out=folder, **given)


def test_data_in_memory_are_written_once_and_the_result_shows_and_saves_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = shoal.compare(arrays(), **OF_TABLE, **FEW)
    assert capsys.readouterr() == ("", "")
    (file,) = found.folder.glob("data-*.parquet")
    assert file.parent.parent == Path("shoal-compare")
    x, y, domains = arrays()
    frame = pandas.DataFrame({**{f"x{n}": x[:, n] for n in range(3)}, "ill": y, "site": domains})
    same = shoal.compare(frame.astype({"ill": "category"}), **OF_TABLE, **FEW)
    assert (same.folder, same.result["identities"]) == (found.folder, found.result["identities"])
    rows, best = found.to_frame(), found.result["rows"][0]
    assert list(rows.index) == [row["algorithm"] for row in found.result["rows"]]
    assert rows["mean"].iloc[0] == best["average"]["mean"]
    assert rows["in d001"].iloc[0] == best["domains"]["d001"]["mean"]
    assert "<table" in found._repr_html_()
    for name, begin in (("md", "# "), ("csv", "algorithm,"), ("json", "{")):
        assert (found.folder / f"comparison.{name}").read_text().startswith(begin)


def test_the_default_folder_is_named_after_the_data() -> None:
    """A changed file, and one of the same name elsewhere, have another."""
    folders, few = [], {**OF_TABLE, **FEW, "algorithms": "erm", "held_out": "oslo"}
    for name in ("a/patients.csv", "b/patients.csv"):
        Path(name).parent.mkdir()
        folders += [shoal.compare(table(Path(name), rows=160 + len(folders)), **few).folder]
    assert folders[0] != folders[1]
    assert all(folder.match("shoal-compare/patients-????????") for folder in folders)
    with pytest.raises(InputError, match=r"^out: .*comparison of 'patients.csv'"):
        shoal.compare("linear", **{**FEW, "algorithms": "erm"}, out=folders[0])
    with pytest.raises(InputError, match=r"^out: .*comparison"):
        shoal.sweep("linear", algorithms="erm", out=folders[0])
    with pytest.raises(InputError, match=r"^out: .*comparison"):
        shoal.diagnose("a/patients.csv", **OF_TABLE, out=folders[0], progress=False)


@pytest.mark.parametrize(
    ("data", "option", "named"),
    [
        (lambda: (arrays()[0][:7], *arrays()[1:]), {}, "lengths"),
        (lambda: "rotated-digits", {}, "^label"),
        (None, {"domains_per_step": 4}, "^domains_per_step"),
        (None, {"metric": "mse"}, "mse"),
        (None, {"held_out": "olso"}, "'olso'.*'oslo'"),
        (None, {"data_options": {"held_out": "oslo"}}, "^held_out"),
        (None, {"algorithms": "majority"}, "^algorithms: 'majority' is a baseline"),
        (None, {"algorithms": "fish:regruped"}, "'regruped'.*'regrouped'"),
        (None, {"budget": 1e-3, "baselines": True}, "^budget"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_written(data: Any, option: Any, named: str) -> None:
    given = data() if data else table(Path("patients.csv"))
    with pytest.raises(InputError, match=named):
        shoal.compare(given, **{**OF_TABLE, **FEW, **option})
    assert [path.name for path in Path().iterdir()] == ([] if data else ["patients.csv"])


def test_a_table_with_baselines_in_folds() -> None:
    given = {**FEW, "algorithms": "erm", "baselines": True}
    found = shoal.compare(arrays(12), metric="AUC", folds=3, **given)
    result = found.result
    assert set(found.to_frame().index) == {"erm", *baselines.names(2)}
    assert (result["runs"], result["folds"], result["runs_missing"]) == (12, 3, 0)
    assert result["held_out"] == [f"d{n:03}" for n in range(12)]
    records = {r.config.identity: r for r in found.records}
    for case in result["cases"]:
        assert case["held_out"] in case["fold"].split(" and ")
        assert case["score"] == records[case["run"]].scores["test"]["by_domain"]["AUC"][case["held_out"]]
    assert found.recommendation is not None
    assert (found.recommendation.domains, found.recommendation.folds) == (12, 3)


def test_regression_is_scored_in_the_units_of_the_label_with_r2() -> None:
    """One site has labels of a hundred times the size."""
    rng = np.random.default_rng(0)
    x, site = rng.normal(size=(120, 2)), np.repeat([*"abc"], 40)
    y = (3 * x[:, 0] + rng.normal(size=120)) * np.where(site == "a", 100, 1)
    data = pandas.DataFrame({"x0": x[:, 0], "x1": x[:, 1], "y": y, "site": site})
    found = shoal.compare(data, label="y", domain="site", **{**FEW, "algorithms": "erm", "baselines": True})
    assert (found.result["metric"], found.result["lower_is_better"]) == ("mse", True)
    test, train = y[site == "c"], y[site != "c"]
    (case,) = (c for c in found.result["cases"] if (c["algorithm"], c["held_out"]) == ("majority", "c"))
    data = shoal.data.from_table(data, label="y", domain="site", held_out="c")
    mean = train[np.isin(np.flatnonzero(site != "c"), data.splits["train"].examples())].mean()
    assert case["score"] == pytest.approx(np.square(test - mean).mean(), rel=1e-4)
    assert case["metrics"]["R²"] == pytest.approx(1 - case["score"] / test.var(), rel=1e-4)


def test_a_refit_trains_what_was_scored_on_all_domains(found: Any) -> None:
    model = found.refit("model", row="fish")
    trained = RunConfig.from_dict(model.record["config"])
    fields = ("algorithm", "steps", "batch_size", "lr", "metric", "settings", "seed")
    scored = [[getattr(r.config, f) for f in fields] for r in found.records]
    assert [getattr(trained, f) for f in fields] in scored
    scores = model.record["history"][-1]["scores"]
    assert "test" not in scores
    sizes = dict(zip(scores["train"]["domains"], scores["train"]["sizes"], strict=True))
    assert sizes == {"d000": 40, "d001": 40, "d002": 40}
    assert (model.about.calibration.on, model.about.calibration.count) == ("held-out domains", 120)
    assert found.refit("model", row="fish").about == model.about
    with pytest.raises(InputError, match=r"^fit: 'model' contains another"):
        found.refit("model", row="logistic-regression")
    with pytest.raises(InputError, match=r"'fihs'.*'fish'"):
        found.refit(row="fihs")


def test_temperature_is_that_of_held_out_predictions(found: Any) -> None:
    model, logits, labels = found.refit(row="logistic-regression"), list[Any](), list[Any]()
    x, y, domains = arrays()
    for record in (r for r in found.records if r.config.algorithm == "logistic-regression"):
        if record.config.settings == RunConfig.from_dict(model.record["config"]).settings:
            own = shoal.load(found.folder / "models" / record.config.identity)
            here = domains == record.config.held_out
            columns = {f"x{n}": x[here, n] for n in range(3)}
            logits.append(np.log(own.probabilities(own.run(columns)[1], calibrated=False)))
            labels.append((y[here] == "yes").astype(int))
    wanted = fit_temperature(np.concatenate(logits), np.concatenate(labels), prior=1.0)
    assert model.temperature == pytest.approx(wanted, rel=1e-4)
    page = (found.folder / "report.html").read_text()
    assert f"Temperature {wanted:.3g}, fitted on 120 examples (held-out domains)" in page


def test_importance_says_where_a_column_misleads() -> None:
    """x1 is like the label, but in one domain it is the opposite; x2 is noise."""
    rng, site = np.random.default_rng(0), np.repeat(["high", *"bcd"], 60)
    y = rng.integers(0, 2, 240)
    sign = np.where(site == "d", -1, 1)
    x = np.stack([2 * y, 1.2 * sign * (2 * y - 1), 0 * y], axis=1) + rng.normal(size=(240, 3))
    given = {**FEW, "algorithms": "erm", "baselines": True, "calibrate": False}
    found = shoal.compare((x, y, site), out="mine", **given)
    columns = found.importance(row="logistic-regression")
    assert columns.index[0] == "x0"
    assert columns["misleads"].to_dict() == {"x0": [], "x1": ["d"], "x2": []}
    assert columns.loc["x0", "low"] > 0
    assert columns.loc["x1", "in high"] > 0 > columns.loc["x1", "in d"]
    assert abs(columns.loc["x2", "mean"]) < 0.02
    assert "Importance of the columns" in (found.folder / "report.html").read_text()
    assert found.refit(row="logistic-regression").temperature == 1


def test_where_nothing_is_recommended_nothing_is_fitted(capsys: pytest.CaptureFixture[str]) -> None:
    file = table(Path("two.csv"), sites=["oslo", "lima"] * 80)
    words = ["compare", str(file), "--label", "ill", "--domain", "site", "--algorithms", "erm"]
    words += ["--steps", "5", "--seeds", "1", "--search", "1", "--device", "cpu", "--fit", "model"]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "No recommendation: 2 held-out domains" in out
    assert "Not fitted: no algorithm is recommended, as there are fewer than three" in out
    assert not Path("model").exists()
    Path("model").mkdir()
    assert main(words) == 2
    assert "--fit: 'model' exists" in capsys.readouterr().err


def test_a_comparison_fits_a_model_for_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """On a table with a column of each kind, and an escape sequence in the name of a domain."""
    draw, lines = np.random.default_rng(0), ["age,sex,visit,smoker,site,ill"]
    for site in ("oslo", "lima", "red\x1b[31m"):
        for day, age in enumerate(draw.normal(50, 10, 30)):
            cells = (f"{age:.2f}", "mf"[day % 2], f"2024-0{1 + day % 9}-11", ("yes", "no")[day % 3 == 0])
            lines.append(",".join([*cells, site, "yes" if age + draw.normal(0, 4) > 50 else "no"]))
    Path("one.csv").write_text("\n".join(lines))
    found = shoal.compare("one.csv", **OF_TABLE, **{**FEW, "algorithms": "erm", "baselines": True}, fit="F")
    assert found.not_fitted == ""
    commands = [line.strip() for line in str(found).splitlines() if line.startswith("  shoal ")]
    assert [line.split()[1] for line in commands] == ["predict", "score", "export"]
    for words in map(shlex.split, commands[:2]):
        assert main([*words[1:-1], "one.csv"]) == 0
    assert "\x1b" not in capsys.readouterr().out
