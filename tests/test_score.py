"""``shoal.score``: numbers, what is excluded, drift, and wrong input."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics
from torch import nn

import shoal
from shoal.api.score import score
from shoal.cli import main
from shoal.data import from_table
from shoal.errors import InputError
from trained_models import LABELS, fit, image_model, patients, table_model, write_csv, write_images

Runs = dict[str, Path]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    place = tmp_path_factory.mktemp("runs")
    return {label: table_model(place / label, label, steps=150) for label in LABELS}


def new(**changes: Any) -> dict[str, Any]:
    """Other patients, some from a site that training did not have."""
    content = patients(9, 300, ("oslo", "kyoto", "bergen"))
    return content | {name: change(content[name]) for name, change in changes.items()}


class TestNumbers:
    def test_two_classes(self, runs: Runs) -> None:
        content = new()
        found = score(runs["ill"], content)
        p = shoal.load(runs["ill"]).predict_proba(content)[:, 1]
        y, sites = np.array(content["ill"]) == "yes", np.array(content["site"])
        for group in (found.overall, *found.domains):
            here = np.full(300, True) if group is found.overall else sites == group.name
            value = {name: estimate.value for name, estimate in group.metrics.items()}
            assert group.rows == here.sum()
            assert value["accuracy"] == pytest.approx(metrics.accuracy_score(y[here], p[here] > 0.5))
            assert value["AUC"] == pytest.approx(metrics.roc_auc_score(y[here], p[here]))
            precision = metrics.average_precision_score(y[here], p[here])
            assert value["average precision"] == pytest.approx(precision)
            assert value["log loss"] == pytest.approx(metrics.log_loss(y[here], p[here]))
            assert value["Brier score"] == pytest.approx(metrics.brier_score_loss(y[here], p[here]))
            for estimate in group.metrics.values():
                assert estimate.low <= estimate.value <= estimate.high
        seen = {group.name: group.seen for group in found.domains}
        assert seen == {"bergen": "new", "kyoto": "held out", "oslo": "training"}
        assert found.worst is not None
        assert f"worst: {found.worst.name}" in str(found)
        assert [one.column for one in found.drift or () if one.flags] == []
        assert json.loads(json.dumps(found.to_dict()))["overall"]["rows"] == 300
        assert list(found.to_frame()["domain"]) == ["bergen", "kyoto", "oslo", "all rows"]

    def test_several_classes(self, runs: Runs) -> None:
        content = new()
        found = score(runs["grade"], content).overall.metrics
        p, y = shoal.load(runs["grade"]).predict_proba(content), np.eye(3)[content["grade"]]
        assert found["AUC"].value == pytest.approx(metrics.roc_auc_score(y, p))
        assert found["average precision"].value == pytest.approx(metrics.average_precision_score(y, p))

    def test_regression_in_the_units_of_the_label(self, runs: Runs) -> None:
        content = new()
        found = score(runs["stay"], content)
        predicted, y = shoal.load(runs["stay"]).predict(content), np.array(content["stay"])
        value = {name: estimate.value for name, estimate in found.overall.metrics.items()}
        assert value["MAE"] == pytest.approx(metrics.mean_absolute_error(y, predicted), rel=1e-5)
        assert value["R²"] == pytest.approx(metrics.r2_score(y, predicted), rel=1e-4)
        assert found.calibration is None

    def test_one_row(self, runs: Runs) -> None:
        for label in LABELS:
            found = score(runs[label], {name: values[:1] for name, values in new().items()})
            assert found.overall.rows == 1
            assert "nan" not in str(found).lower()
            json.dumps(found.to_dict(), allow_nan=False)

    def test_a_file_is_the_same_as_its_columns(self, runs: Runs, tmp_path: Path) -> None:
        path, out = write_csv(tmp_path / "new.csv", new()), tmp_path / "deep" / "score.json"
        found = score(shoal.load(runs["ill"]), path, batch_size=5, out=out)
        whole = score(runs["ill"], new())
        for name, estimate in found.overall.metrics.items():
            assert estimate.value == pytest.approx(whole.overall.metrics[name].value, rel=1e-3)
        assert found.drift == whole.drift
        assert json.loads(out.read_text()) == json.loads(json.dumps(found.to_dict()))
        assert f"Saved in {out}." in str(found)
        score(runs["ill"], path, out=out.parent)  # a folder, for score.json
        with pytest.raises(InputError, match=r"^out: "):
            score(runs["ill"], path, out=path / "x.json")


class TestExcludedRows:
    def test_missing_and_unknown_labels(self, runs: Runs) -> None:
        content = new(ill=lambda v: ["", "NA", None, "maybe", "maybe", "Yes", *v[6:]])
        found = score(runs["ill"], content)
        assert (found.unlabelled, found.unusable, found.overall.rows) == (3, {"maybe": 2, "Yes": 1}, 294)
        assert score(runs["ill"], {name: v[6:] for name, v in content.items()}).overall == found.overall
        right = (found.overall.metrics["accuracy"].value or 0) * 294
        assert f"Counted as errors, the accuracy would be {right / 297:.3f}" in " ".join(str(found).split())

    def test_labels_that_are_no_numbers(self, runs: Runs) -> None:
        found = score(runs["stay"], new(stay=lambda v: ["long", None, *map(str, v[2:])]))
        assert (found.unlabelled, found.unusable, found.overall.rows) == (1, {"long": 1}, 298)

    def test_labels_with_a_decimal_comma(self, tmp_path: Path) -> None:
        def comma(values: Any) -> list[str]:
            return [f"{v:.2f}".replace(".", ",") for v in values]

        table = patients(0) | {"stay": comma(patients(0)["stay"])}
        with warnings.catch_warnings(action="ignore"):
            data = from_table(table, label="stay", domain="site", drop=["ill", "grade"], task="regression")
        found = score(fit(tmp_path / "run", data), new(stay=comma))
        assert (found.overall.rows, found.unusable) == (300, {})

    def test_classes_that_are_numbers_however_they_are_written(self, runs: Runs) -> None:
        found = score(runs["grade"], new(grade=lambda v: [f"{x}.0" for x in v]))
        assert found.overall == score(runs["grade"], new()).overall

    def test_domains_of_one_class_without_labels_and_rows_without_a_domain(self, runs: Runs) -> None:
        content = new(site=lambda v: ["", None, *v[2:]])
        one, none = list(content["ill"]), list(content["ill"])
        for n, site in enumerate(content["site"]):
            one[n], none[n] = ("yes", "") if site == "bergen" else (one[n], none[n])
        bergen = score(runs["ill"], content | {"ill": one}).domains[0]
        assert bergen.metrics["AUC"].undefined == "one class"
        found = score(runs["ill"], content | {"ill": none})
        assert (found.domains[0].name, found.domains[0].rows) == ("bergen", 0)
        assert "2 rows without a domain" in str(found)

    def test_no_domains(self, runs: Runs) -> None:
        content = new()
        del content["site"]
        found = score(runs["ill"], content)
        assert found.domains == ()
        assert "There is no domain column 'site'" in str(found)
        assert score(runs["ill"], content, domain="colour").domains[0].name == "blue"


def test_rows_of_an_entity_are_not_independent(runs: Runs, tmp_path: Path) -> None:
    """Ten equal rows per patient have the intervals of one each, also where training named the column."""
    rows = [n for n in range(60) for _ in range(10)]
    once = {name: values[:60] for name, values in new().items()}
    content = {name: [values[n] for n in rows] for name, values in once.items()} | {"patient": rows}
    found, truth, naive = (
        score(runs["ill"], content, group="patient"),
        score(runs["ill"], once),
        score(runs["ill"], content),
    )
    for name, estimate in found.overall.metrics.items():
        assert estimate.low == pytest.approx(truth.overall.metrics[name].low, abs=0.01)
        assert estimate.low < naive.overall.metrics[name].low
    assert (found.group, found.overall.rows, found.overall.entities) == ("patient", 600, 60)
    assert found.calibration["chance"] == pytest.approx(truth.calibration["chance"])  # type: ignore[index]
    assert "60 entities ('patient')" in str(found)
    with warnings.catch_warnings(action="ignore"):
        table = content | {"patient": [n % 60 for n in range(600)]}
        data = from_table(table, label="ill", domain="site", group="patient", drop=["grade", "stay"])
    run = fit(tmp_path / "run", data)
    assert score(run, content).group == "patient"
    assert "no group column 'patient', so rows count as independent" in str(score(run, once))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table_model(tmp_path_factory.mktemp("other") / "short", "ill", steps=3)


class TestSeveralModels:
    def test_differences_are_paired(self, runs: Runs, other: Path) -> None:
        content = new()
        found = score([runs["ill"], other], content)
        y, sites = np.array(content["ill"]) == "yes", np.array(content["site"])
        p, q = (shoal.load(run).predict_proba(content)[:, 1] for run in (runs["ill"], other))
        groups = found.differences[str(other)]
        assert list(groups) == ["all rows", "mean over domains", "bergen", "kyoto", "oslo"]
        for name in ("all rows", "bergen", "kyoto", "oslo"):
            here = np.full(300, True) if name == "all rows" else sites == name
            difference = metrics.roc_auc_score(y[here], q[here]) - metrics.roc_auc_score(y[here], p[here])
            assert groups[name]["AUC"].value == pytest.approx(difference)
        right = (q > 0.5).astype(float) - (p > 0.5)
        right = np.where(y, right, -right)
        low = right.mean() - 1.96 * right.std() / np.sqrt(300)
        assert groups["all rows"]["accuracy"].low == pytest.approx(low, abs=0.01)
        each = [groups[name]["AUC"].value for name in ("bergen", "kyoto", "oslo")]
        assert groups["mean over domains"]["AUC"].value == pytest.approx(np.mean(each))
        assert found.scores[0].overall == score(runs["ill"], content).overall
        assert json.loads(json.dumps(found.to_dict()))["differences"]
        assert set(found.to_frame()["model"]) == {str(runs["ill"]), str(other)}

    def test_the_command(
        self, runs: Runs, other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = write_csv(tmp_path / "new.csv", new())
        assert (
            main(["score", str(runs["ill"]), str(other), str(path), "--out", str(tmp_path / "s.json")]) == 0
        )
        assert f"Difference {other} − {runs['ill']}" in " ".join(capsys.readouterr().out.split())
        assert len(json.loads((tmp_path / "s.json").read_text())["scores"]) == 2
        assert main(["score", str(path)]) == 2
        assert "requires MODEL and DATA" in capsys.readouterr().err

    def test_models_of_different_tasks(self, runs: Runs) -> None:
        with pytest.raises(InputError, match=r"^model: cannot be scored together: the task of .*regression"):
            score([runs["ill"], runs["stay"]], new())
        with pytest.raises(InputError, match=r"the label of .*'ill'.*'grade'"):
            score([runs["ill"], runs["grade"]], new())


def test_calibration_with_and_without_the_temperature(runs: Runs) -> None:
    content, model = new(), shoal.load(runs["ill"])
    found = score(model, content)
    raw = model.probabilities(model.run(content)[1], calibrated=False)
    y = np.array(content["ill"]) == "yes"
    bins = np.minimum((raw[:, 1] * 10).astype(int), 9)
    error = sum(abs((y[bins == b] - raw[bins == b, 1]).sum()) for b in range(10)) / 300
    assert model.temperature != 1
    assert found.uncalibrated["error"] == pytest.approx(error)  # type: ignore[index]
    assert "without the temperature" in " ".join(str(found).split())


def test_drift_is_named(runs: Runs) -> None:
    found = score(runs["ill"], new(age=lambda v: [x + 15 for x in v]))
    assert [one.column for one in found.drift or () if one.flags] == ["age"]
    assert "1 of 2 columns differs from training" in str(found)
    strange = score(runs["ill"], new(colour=lambda v: ["pink" if x == "red" else x for x in v]))
    assert "not in the training data ('pink')" in str(strange)


def test_names_from_outside_do_not_control_the_terminal(runs: Runs) -> None:
    found = score(runs["ill"], new(site=lambda v: ["a\x1b[31mb\nc" if x == "oslo" else "<b>" for x in v]))
    assert "a?[31mb?c" in str(found)
    assert "\x1b" not in str(found)
    assert "<b>" not in found._repr_html_()


def test_models_without_summaries_and_with_damaged_ones(runs: Runs, tmp_path: Path) -> None:
    old = shutil.copytree(runs["ill"], tmp_path / "old")
    about = json.loads((old / "inputs.json").read_text())
    training, label = about["inputs"].pop("training"), about["inputs"]["label"]
    (old / "record.json").unlink()
    (old / "inputs.json").write_text(json.dumps(about))
    found = score(old, new())
    assert found.drift is None
    assert {group.seen for group in found.domains} == {""}
    damaged: list[dict[str, Any]] = [
        {"training": {**training, "age": wrong}} for wrong in ({}, 3, {"rows": "x"})
    ]
    damaged += [{"training": [1]}, {"label": 3}, {"label": {**label, "how": {"x": 1}}}]
    for change in damaged:
        (old / "inputs.json").write_text(json.dumps(about | {"inputs": about["inputs"] | change}))
        with pytest.raises(InputError):
            score(old, new())


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


def test_models_of_ones_own(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        data = from_table(patients(0), label="ill", domain="site", drop=["grade", "stay"])
    network = nn.Sequential(nn.Linear(data.input_shape[0], 2))
    run = shoal.fit("erm", network, data, steps=5, progress=False, device="cpu")
    assert score(run.trained(), new()).overall.rows == 300
    arrays = {"a": (torch.randn(9, 3), torch.arange(9) % 2)}
    run = shoal.fit("erm", nn.Linear(3, 2), arrays, steps=2, progress=False, device="cpu")
    with pytest.raises(InputError, match="with array input"):
        score(run.trained(), torch.zeros(3, 3))


def without(name: str) -> dict[str, Any]:
    return {column: values for column, values in new().items() if column != name}


@pytest.mark.parametrize(
    ("run", "data", "options", "message"),
    [
        ("ill", lambda: without("ill"), {}, "no column 'ill' for the label"),
        ("ill", new, {"label": "il"}, "no column 'il' for the label. Did you mean 'ill'"),
        ("ill", lambda: new(ill=lambda v: [""] * len(v)), {}, "^label: .*missing in every row"),
        (
            "ill",
            lambda: new(ill=lambda v: ["no idea"] * len(v)),
            {},
            "the model predicts 'no', 'yes'",
        ),
        ("stay", lambda: new(stay=lambda v: ["long"] * len(v)), {}, "the model predicts numbers"),
        ("ill", lambda: without("age"), {}, "no column 'age' for the model"),
        ("ill", new, {"domain": "plaice"}, "no column 'plaice' for the domain"),
        ("ill", new, {"group": "patient"}, "no column 'patient' for the group"),
        ("ill", lambda: {name: [] for name in new()}, {}, "no rows"),
        ("ill", new, {"workers": -1}, "workers"),
        ("ill", lambda: "none.csv", {}, "cannot be read"),
        ("ill", lambda: "model.npy", {}, "^data: .*takes a table"),
    ],
)
def test_wrong_input(runs: Runs, run: str, data: Callable[[], Any], options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        score(runs[run], data(), **options)
