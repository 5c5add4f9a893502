"""``shoal.score``: numbers, what is excluded, drift, and wrong input."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import metrics

import shoal
from shoal.api.score import score
from shoal.cli import main
from shoal.data import from_table
from shoal.errors import InputError
from shoal.experiments import statistics
from trained_models import LABELS, fit, image_model, patients, table_model, write_csv, write_images

Runs = dict[str, Path]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    place = tmp_path_factory.mktemp("runs")
    other = table_model(place / "short", "ill", steps=3)
    return {label: table_model(place / label, label, steps=100) for label in LABELS} | {"short": other}


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the jackknife, which calls scikit-learn for each."""
    monkeypatch.setattr(statistics, "BLOCKS", 8)


def new(**changes: Any) -> dict[str, Any]:
    """Other patients, some from a site that training did not have."""
    content = patients(9, 120, ("oslo", "kyoto", "bergen"))
    return content | {name: change(content[name]) for name, change in changes.items()}


def test_two_classes(runs: Runs, tmp_path: Path) -> None:
    content = new()
    path, out = write_csv(tmp_path / "new.csv", content), tmp_path / "deep" / "score.json"
    found = score(runs["ill"], path, batch_size=5, out=out)
    p = shoal.load(runs["ill"]).predict_proba(content)[:, 1]
    y, sites = np.array(content["ill"]) == "yes", np.array(content["site"])
    for group in (found.overall, *found.domains):
        here = np.full(120, True) if group is found.overall else sites == group.name
        assert {name: estimate.value for name, estimate in group.metrics.items()} == pytest.approx(
            {
                "accuracy": metrics.accuracy_score(y[here], p[here] > 0.5),
                "balanced accuracy": metrics.balanced_accuracy_score(y[here], p[here] > 0.5),
                "AUC": metrics.roc_auc_score(y[here], p[here]),
                "average precision": metrics.average_precision_score(y[here], p[here]),
                "log loss": metrics.log_loss(y[here], p[here]),
                "Brier score": metrics.brier_score_loss(y[here], p[here]),
            },
            rel=1e-5,
        )
        assert group.rows == here.sum()
        assert all(e.low <= e.value <= e.high for e in group.metrics.values())
    seen = {group.name: group.seen for group in found.domains}
    assert seen == {"bergen": "new", "kyoto": "held out", "oslo": "training"}
    assert [one.column for one in found.drift or () if one.flags] == []
    assert json.loads(out.read_text()) == json.loads(json.dumps(found.to_dict()))
    assert f"Saved in {out}." in str(found)
    with pytest.raises(InputError, match=r"^out: "):
        score(runs["ill"], path, out=path / "x.json")
    assert list(found.to_frame()["domain"]) == ["bergen", "kyoto", "oslo", "all rows"]


def test_several_classes_and_regression_in_the_units_of_the_label(runs: Runs) -> None:
    content = new()
    found = score(runs["grade"], content).overall.metrics
    p, y = shoal.load(runs["grade"]).predict_proba(content), np.eye(3)[content["grade"]]
    assert found["AUC"].value == pytest.approx(metrics.roc_auc_score(y, p))
    assert found["average precision"].value == pytest.approx(metrics.average_precision_score(y, p))
    stay = score(runs["stay"], content)
    predicted, numbers = shoal.load(runs["stay"]).predict(content), np.array(content["stay"])
    assert stay.overall.metrics["MAE"].value == pytest.approx(
        metrics.mean_absolute_error(numbers, predicted), rel=1e-5
    )
    assert stay.overall.metrics["R²"].value == pytest.approx(metrics.r2_score(numbers, predicted), rel=1e-4)
    assert stay.calibration is None


def test_calibration_with_and_without_the_temperature(runs: Runs) -> None:
    content, model = new(), shoal.load(runs["ill"])
    found = score(model, content)
    raw = model.probabilities(model.run(content)[1], calibrated=False)
    y = np.array(content["ill"]) == "yes"
    bins = np.minimum((raw[:, 1] * 10).astype(int), 9)
    error = sum(abs((y[bins == b] - raw[bins == b, 1]).sum()) for b in range(10)) / 120
    assert model.temperature != 1
    assert found.uncalibrated["error"] == pytest.approx(error)  # type: ignore[index]
    assert "without the temperature" in str(found)


def test_missing_and_unknown_labels(runs: Runs) -> None:
    content = new(ill=lambda v: ["", "NA", None, "maybe", "maybe", "Yes", *v[6:]])
    found = score(runs["ill"], content)
    assert (found.unlabelled, found.unusable, found.overall.rows) == (3, {"maybe": 2, "Yes": 1}, 114)
    assert score(runs["ill"], {name: v[6:] for name, v in content.items()}).overall == found.overall
    assert "3 excluded for their labels: 'maybe' (2), 'Yes' (1)" in str(found)
    found = score(runs["stay"], new(stay=lambda v: ["long", None, *map(str, v[2:])]))
    assert (found.unlabelled, found.unusable, found.overall.rows) == (1, {"long": 1}, 118)


def test_rows_of_an_entity_are_not_independent(runs: Runs, tmp_path: Path) -> None:
    """Ten equal rows per patient have the intervals of one each, also where training named the column."""
    rows = [n for n in range(60) for _ in range(10)]
    once = {name: values[:60] for name, values in new().items()}
    content = {name: [values[n] for n in rows] for name, values in once.items()} | {"patient": rows}
    grouped = score(runs["ill"], content, group="patient")
    truth, naive = score(runs["ill"], once), score(runs["ill"], content)
    for name, estimate in grouped.overall.metrics.items():
        assert estimate.low == pytest.approx(truth.overall.metrics[name].low, abs=0.01)
        assert estimate.low < naive.overall.metrics[name].low
    assert (grouped.group, grouped.overall.rows, grouped.overall.entities) == ("patient", 600, 60)
    assert grouped.calibration["chance"] == pytest.approx(truth.calibration["chance"])  # type: ignore[index]
    assert "60 entities ('patient')" in str(grouped)
    with warnings.catch_warnings(action="ignore"):
        table = content | {"patient": [n % 60 for n in range(600)]}
        data = from_table(table, label="ill", domain="site", group="patient", drop=["grade", "stay"])
    run = fit(tmp_path / "run", data)
    assert score(run, content).group == "patient"
    assert "no group column 'patient'" in str(score(run, once))


def test_differences_are_paired(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "BLOCKS", 50)
    content, ill, short = new(), str(runs["ill"]), str(runs["short"])
    found = score([ill, short], content)
    y, sites = np.array(content["ill"]) == "yes", np.array(content["site"])
    p, q = (shoal.load(run).predict_proba(content)[:, 1] for run in (ill, short))
    groups = found.differences[short]
    assert list(groups) == ["all rows", "mean over domains", "bergen", "kyoto", "oslo"]
    for name in ("all rows", "bergen", "kyoto", "oslo"):
        here = np.full(120, True) if name == "all rows" else sites == name
        difference = metrics.roc_auc_score(y[here], q[here]) - metrics.roc_auc_score(y[here], p[here])
        assert groups[name]["AUC"].value == pytest.approx(difference)
    right = ((q > 0.5).astype(float) - (p > 0.5)) * np.where(y, 1, -1)
    low = right.mean() - 1.96 * right.std() / np.sqrt(120)
    assert groups["all rows"]["accuracy"].low == pytest.approx(low, abs=0.02)
    each = [groups[name]["AUC"].value for name in ("bergen", "kyoto", "oslo")]
    assert groups["mean over domains"]["AUC"].value == pytest.approx(np.mean(each))
    assert found.scores[0].overall == score(ill, content).overall
    monkeypatch.setattr(statistics, "BLOCKS", 8)
    assert set(found.to_frame()["model"]) == {ill, short}
    path = write_csv(tmp_path / "new.csv", content)
    assert main(["score", ill, short, str(path), "--out", str(tmp_path / "s.json")]) == 0
    assert f"{short} − {ill}" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "s.json").read_text())["scores"]) == 2
    assert main(["score", str(path)]) == 2
    assert "requires MODEL and DATA" in capsys.readouterr().err


def test_models_of_different_tasks_are_refused(runs: Runs) -> None:
    with pytest.raises(InputError, match=r"^model: cannot be scored together: the task of .*regression"):
        score([runs["ill"], runs["stay"]], new())
    with pytest.raises(InputError, match=r"the label of .*'ill'.*'grade'"):
        score([runs["ill"], runs["grade"]], new())


def test_drift_is_named_and_names_do_not_control_the_terminal(runs: Runs) -> None:
    found = score(runs["ill"], new(age=lambda v: [x + 15 for x in v]))
    assert [one.column for one in found.drift or () if one.flags] == ["age"]
    assert "1 of 2 columns differ from training" in str(found)
    strange = score(runs["ill"], new(colour=lambda v: ["pink" if x == "red" else x for x in v]))
    assert "not in the training data ('pink')" in str(strange)
    found = score(runs["ill"], new(site=lambda v: ["a\x1b[31mb\nc" if x == "oslo" else "<b>" for x in v]))
    assert "a?[31mb?c" in str(found)
    assert "\x1b" not in str(found)
    assert "<b>" not in found._repr_html_()


def test_images(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images")
    run = image_model(tmp_path / "run", images)
    found = score(run, images)
    assert {group.name: (group.rows, group.seen) for group in found.domains} == {
        **{"day": (10, "training"), "night": (10, "training"), "rain": (10, "held out")}
    }
    flat = score(run, images / "rain")
    assert flat.domains == ()
    assert flat.overall.metrics == found.domains[2].metrics
    for wrong in (images / "rain" / "cat", tmp_path / "nowhere", {"a": [1]}):
        with pytest.raises(InputError, match="domain/class/image"):
            score(run, wrong)


@pytest.mark.parametrize(
    ("run", "data", "options", "message"),
    [
        ("ill", {"ill": None}, {}, "no column 'ill' for the label"),
        ("ill", {}, {"label": "il"}, "no column 'il' for the label. Did you mean 'ill'"),
        ("ill", {"ill": [""] * 120}, {}, "^label: .*missing in every row"),
        ("ill", {"ill": ["no idea"] * 120}, {}, "the model predicts 'no', 'yes'"),
        ("ill", {"age": None}, {}, "no column 'age' for the model"),
        ("ill", {}, {"domain": "plaice"}, "no column 'plaice' for the domain"),
        ("ill", "model.npy", {}, "cannot be read"),
    ],
)
def test_wrong_input(runs: Runs, run: str, data: Any, options: Any, message: str) -> None:
    if isinstance(data, dict):
        data = {name: values for name, values in (new() | data).items() if values is not None}
    with pytest.raises(InputError, match=message):
        score(runs[run], data, **options)
