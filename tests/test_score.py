"""``shoal.score`` and ``shoal score``: numbers, what is left out, and every wrong input in one line."""

from __future__ import annotations

import csv
import json
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shoal
import shoal.models
from shoal.cli import main
from shoal.data import from_arrays, from_table
from shoal.errors import InputError

metrics = pytest.importorskip("sklearn.metrics")
Captured = pytest.CaptureFixture[str]
ROWS = 400


def patients(
    seed: int, rows: int = ROWS, sites: tuple[str, ...] = ("oslo", "lima", "kyoto")
) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    age, colour = rng.normal(50, 12, rows), rng.choice(["red", "blue", "green"], rows)
    odds = (age - 50) / 8 + (colour == "red")
    return {
        "age": age.round(1),
        "colour": colour,
        "site": rng.choice(sites, rows),
        "ill": np.where(rng.random(rows) < 1 / (1 + np.exp(-odds)), "yes", "no"),
        "grade": np.digitize(odds + rng.normal(0, 0.5, rows), [-1, 1.5]),
        "stay": (3 + 0.2 * age + rng.normal(0, 1, rows)).round(2),
    }


LABELS = ("ill", "grade", "stay")


def trained(folder: Path, label: str) -> Path:
    drop = [name for name in LABELS if name != label]
    task = "regression" if label == "stay" else None
    with warnings.catch_warnings(action="ignore"):  # rows that repeat others
        data = from_table(patients(0), label=label, domain="site", test="kyoto", drop=drop, task=task)
    model = shoal.models.build(data.model, input_shape=data.input_shape, classes=data.classes, seed=0)
    shoal.fit("erm", model, data, steps=150, folder=folder, progress=False, device="cpu", lr=0.01)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("runs")
    return {label: trained(place / label, label) for label in LABELS}


def written(path: Path, columns: Mapping[str, Any]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(columns)
        table.writerows(zip(*columns.values(), strict=True))
    return path


def new(**changes: Any) -> dict[str, Any]:
    """Other patients, one site of them new; lists that can be changed."""
    content = {name: list(values) for name, values in patients(9, 300, ("oslo", "kyoto", "bergen")).items()}
    for name, change in changes.items():
        content[name] = change(content[name])
    return content


class TestNumbers:
    def test_two_classes(self, runs: dict[str, Path]) -> None:
        content = new()
        found = shoal.score(runs["ill"], content)
        p = shoal.load(runs["ill"]).predict_proba(content)[:, 1]
        y, sites = np.array(content["ill"]) == "yes", np.array(content["site"])
        assert (found.rows, found.overall.rows, found.task, found.class_names) == (
            300,
            300,
            "classification",
            ("no", "yes"),
        )
        for group in (found.overall, *found.domains):
            here = np.full(300, True) if group is found.overall else sites == group.name
            value = {name: e.value for name, e in group.metrics.items()}
            assert group.rows == here.sum()
            assert value["accuracy"] == pytest.approx(metrics.accuracy_score(y[here], p[here] > 0.5))
            assert value["AUC"] == pytest.approx(metrics.roc_auc_score(y[here], p[here]))
            assert value["average precision"] == pytest.approx(
                metrics.average_precision_score(y[here], p[here])
            )
            assert value["log loss"] == pytest.approx(metrics.log_loss(y[here], p[here]))
            assert value["Brier score"] == pytest.approx(metrics.brier_score_loss(y[here], p[here]))
        assert {group.name: group.seen for group in found.domains} == {
            "bergen": "new",
            "kyoto": "held out",
            "oslo": "training",
        }
        assert found.worst is not None
        assert found.worst.name in str(found).split("Worst domain by accuracy: ")[1]
        assert found.drift is not None
        assert {one.column for one in found.drift} == {"age", "colour"}
        assert not any(one.flags for one in found.drift)
        assert json.loads(json.dumps(found.to_dict()))["overall"]["rows"] == 300
        assert "<table>" in found._repr_html_()

    def test_several_classes(self, runs: dict[str, Path]) -> None:
        content = new()
        found = shoal.score(runs["grade"], content)
        p = shoal.load(runs["grade"]).predict_proba(content)
        y = np.eye(3)[content["grade"]]
        assert found.overall.metrics["AUC"].value == pytest.approx(metrics.roc_auc_score(y, p))
        assert found.overall.metrics["average precision"].value == pytest.approx(
            metrics.average_precision_score(y, p)
        )
        assert "positive class" not in str(found)

    def test_regression_in_its_own_units(self, runs: dict[str, Path]) -> None:
        content = new()
        found = shoal.score(runs["stay"], content)
        predicted, y = shoal.load(runs["stay"]).predict(content), np.array(content["stay"])
        value = {name: e.value for name, e in found.overall.metrics.items()}
        assert value["MAE"] == pytest.approx(metrics.mean_absolute_error(y, predicted), rel=1e-5)
        assert value["R²"] == pytest.approx(metrics.r2_score(y, predicted), rel=1e-4)
        assert 0.5 < (value["MAE"] or 0) < 1.5  # days, not standard deviations
        assert found.calibration is None
        assert found.to_dict()["left_out"] == {"unlabelled": 0, "unreadable": {}, "unknown_classes": {}}

    def test_a_file_in_parts_is_the_whole(
        self, runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = written(tmp_path / "new.csv", new())
        whole = shoal.score(runs["ill"], path)
        monkeypatch.setattr("shoal.scoring.ROWS", 17)
        monkeypatch.setattr("shoal.data.inputs.ROWS", 23)
        parts = shoal.score(shoal.load(runs["ill"]), path, batch_size=5)
        assert parts.drift == whole.drift
        for mine, other in zip((parts.overall, *parts.domains), (whole.overall, *whole.domains), strict=True):
            assert (mine.name, mine.rows) == (other.name, other.rows)
            for name, estimate in mine.metrics.items():
                assert estimate.value == pytest.approx(other.metrics[name].value, rel=1e-3)


class TestWhatIsLeftOut:
    def test_missing_and_unknown_labels(self, runs: dict[str, Path]) -> None:
        content = new(ill=lambda v: ["", "NA", None, "maybe", "maybe", "Yes", *v[6:]])
        found = shoal.score(runs["ill"], content)
        assert (found.unlabelled, dict(found.unknown), found.overall.rows) == (3, {"maybe": 2, "Yes": 1}, 294)
        known = shoal.score(runs["ill"], {name: v[6:] for name, v in content.items()})
        assert known.overall == found.overall
        right = (found.overall.metrics["accuracy"].value or 0) * 294
        assert f"Counted as errors, the accuracy would be {right / 297:.3f}" in " ".join(str(found).split())
        assert "3 rows without a label" in str(found)

    def test_labels_of_a_regression(self, runs: dict[str, Path]) -> None:
        found = shoal.score(runs["stay"], new(stay=lambda v: ["long", None, *map(str, v[2:])]))
        assert (found.unlabelled, dict(found.unreadable), found.overall.rows) == (1, {"long": 1}, 298)

    def test_labels_with_a_decimal_comma(self, tmp_path: Path) -> None:
        def comma(values: Any) -> list[str]:
            return [f"{v:.2f}".replace(".", ",") for v in values]

        table = {**patients(0), "stay": comma(patients(0)["stay"])}
        with warnings.catch_warnings(action="ignore"):
            data = from_table(table, label="stay", domain="site", drop=["ill", "grade"], task="regression")
        model = shoal.models.build("linear", input_shape=data.input_shape, classes=None, seed=0)
        shoal.fit("erm", model, data, steps=20, folder=tmp_path / "run", progress=False, device="cpu")
        content = new()
        found = shoal.score(tmp_path / "run", {**content, "stay": comma(content["stay"])})
        assert (found.overall.rows, found.unreadable) == (300, {})
        one = {name: v[:2] for name, v in content.items()} | {"stay": ["12,5", "1.012,5"]}
        assert shoal.score(tmp_path / "run", one).overall.rows == 2

    def test_numbers_as_classes_however_they_are_written(self, runs: dict[str, Path]) -> None:
        found = shoal.score(runs["grade"], new(grade=lambda v: [f"{x}.0" for x in v]))
        assert found.overall == shoal.score(runs["grade"], new()).overall

    def test_a_domain_of_one_class(self, runs: dict[str, Path]) -> None:
        content = new()
        content["ill"] = [
            "yes" if s == "bergen" else y for s, y in zip(content["site"], content["ill"], strict=True)
        ]
        found = shoal.score(runs["ill"], content)
        bergen = next(group for group in found.domains if group.name == "bergen")
        assert bergen.metrics["AUC"].undefined == "one class"
        assert re.search(r"bergen .* new .*undefined: one class", str(found))

    def test_a_domain_without_labels_and_rows_without_a_domain(self, runs: dict[str, Path]) -> None:
        content = new(site=lambda v: ["", None, *v[2:]])
        content["ill"] = [
            "" if s == "bergen" else y for s, y in zip(content["site"], content["ill"], strict=True)
        ]
        found = shoal.score(runs["ill"], content)
        assert next(group for group in found.domains if group.name == "bergen").rows == 0
        assert any("2 rows without a domain" in note for note in found.notes)
        str(found)

    def test_no_domains(self, runs: dict[str, Path]) -> None:
        content = new()
        del content["site"]
        found = shoal.score(runs["ill"], content)
        assert found.domains == ()
        assert "There is no domain column 'site'" in str(found)
        assert shoal.score(runs["ill"], content, domain="colour").domains[0].name == "blue"

    def test_one_row(self, runs: dict[str, Path]) -> None:
        for label in LABELS:
            found = shoal.score(runs[label], {name: v[:1] for name, v in new().items()})
            assert found.overall.rows == 1
            assert "nan" not in str(found).lower()
            json.dumps(found.to_dict(), allow_nan=False)


def test_drift_is_named(runs: dict[str, Path]) -> None:
    found = shoal.score(runs["ill"], new(age=lambda v: [x + 15 for x in v]))
    assert found.drift is not None
    assert [one.column for one in found.drift if one.flags] == ["age"]
    assert re.search(
        r"1 of 2 columns differs from training by more.*\n\n.*\n.*\nage .* median \d+\.\d+, now 6", str(found)
    )
    strange = shoal.score(runs["ill"], new(colour=lambda v: ["pink" if x == "red" else x for x in v]))
    assert "not in the training data ('pink')" in str(strange)


def test_a_model_without_summaries(runs: dict[str, Path], tmp_path: Path) -> None:
    old = shutil.copytree(runs["ill"], tmp_path / "old")
    about = json.loads((old / "inputs.json").read_text())
    training = about["inputs"].pop("training")
    (old / "inputs.json").write_text(json.dumps(about))
    (old / "record.json").unlink()
    found = shoal.score(old, new())
    assert found.drift is None
    assert "drift cannot be measured" in str(found)
    assert {group.seen for group in found.domains} == {""}
    for wrong in (
        {**training, "age": {}},
        {**training, "age": 3},
        [1],
        "x",
        {"age": {**training["age"], "rows": "x"}},
    ):
        about["inputs"]["training"] = wrong
        (old / "inputs.json").write_text(json.dumps(about))
        with pytest.raises(InputError):
            shoal.score(old, new())


def test_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    from shoal.data import sets

    rng = np.random.default_rng(0)
    for site in ("a", "b", "c"):
        for number, name in enumerate(("cat", "dog")):
            place = tmp_path / "photos" / site / name
            place.mkdir(parents=True)
            for n in range(6):
                pixels = rng.integers(0, 100, (16, 16, 3)) + 120 * number
                image.fromarray(pixels.astype(np.uint8)).save(place / f"{n}.png")
    data = sets.load("image-folder", folder=str(tmp_path / "photos"), test="c", size=16)
    model = shoal.models.build("small-cnn", input_shape=data.input_shape, classes=2, seed=0)
    shoal.fit("erm", model, data, steps=20, folder=tmp_path / "run", progress=False, device="cpu")
    found = shoal.score(tmp_path / "run", tmp_path / "photos")
    assert {group.name: (group.rows, group.seen) for group in found.domains} == {
        "a": (12, "training"),
        "b": (12, "training"),
        "c": (12, "held out"),
    }
    flat = shoal.score(tmp_path / "run", tmp_path / "photos" / "c")
    assert flat.domains == ()
    assert flat.overall.metrics["accuracy"].value == found.domains[2].metrics["accuracy"].value
    with pytest.raises(InputError, match="arranged as domain/class/image"):
        shoal.score(tmp_path / "run", tmp_path / "photos" / "c" / "cat")
    with pytest.raises(InputError, match="specify a folder"):
        shoal.score(tmp_path / "run", tmp_path / "nowhere")


def test_a_network_of_ones_own(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        data = from_table(patients(0), label="ill", domain="site", drop=["grade", "stay"])
    own = nn.Sequential(nn.Linear(data.input_shape[0], 2))
    shoal.fit("erm", own, data, steps=5, folder=tmp_path / "run", progress=False, device="cpu")
    with pytest.raises(InputError, match="your own network"):
        shoal.score(tmp_path / "run", new())
    assert shoal.score(shoal.load(tmp_path / "run", model=own), new()).overall.rows == 300
    arrays = from_arrays(np.random.default_rng(0).normal(size=(60, 3)), [0, 1] * 30, ["a", "b"] * 30)
    model = shoal.models.build("tabular", input_shape=(3,), classes=2, seed=0)
    shoal.fit("erm", model, arrays, steps=5, folder=tmp_path / "arrays", progress=False, device="cpu")
    with pytest.raises(InputError, match="takes preprocessed arrays; score supports models of tables"):
        shoal.score(tmp_path / "arrays", torch.zeros(3, 3))


# The command


def one_line(captured: Captured) -> str:
    out, err = captured.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    return err


def without(name: str) -> dict[str, Any]:
    content = new()
    del content[name]
    return content


WRONG: dict[str, tuple[str, Callable[[], dict[str, Any]], list[str], str]] = {
    "no label column": ("ill", lambda: without("ill"), [], "lacks the label column of the training 'ill'"),
    "a label that is not there": (
        "ill",
        new,
        ["--label", "il"],
        "lacks the label column 'il'. Is 'il' named 'ill'",
    ),
    "no label at all": ("ill", lambda: new(ill=lambda v: [""] * len(v)), [], "missing in every row"),
    "no class of the model": (
        "ill",
        lambda: new(ill=lambda v: ["perhaps"] * len(v)),
        [],
        "no row has a class of the model",
    ),
    "text for a number": (
        "stay",
        lambda: new(stay=lambda v: ["long"] * len(v)),
        [],
        "this model predicts numbers",
    ),
    "no feature": ("ill", lambda: without("age"), [], "lacks what the model needs: 'age'"),
    "no such domain column": ("ill", new, ["--domain", "plaice"], "lacks the domain column 'plaice'"),
    "no rows": ("ill", lambda: {name: [] for name in new()}, [], "no rows"),
    "workers": ("ill", new, ["--workers", "-1"], "--workers must be a whole number from 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_line(name: str, runs: dict[str, Path], tmp_path: Path, capsys: Captured) -> None:
    label, make, options, says = WRONG[name]
    path = written(tmp_path / "new.csv", make())
    assert main(["score", str(runs[label]), str(path), "--device", "cpu", *options]) == 2
    assert says in one_line(capsys)


def test_what_is_not_there(runs: dict[str, Path], tmp_path: Path, capsys: Captured) -> None:
    path = written(tmp_path / "new.csv", new())
    assert main(["score", str(tmp_path / "none"), str(path)]) == 2
    assert "there is no folder" in one_line(capsys)
    for other in (tmp_path / "none.csv", tmp_path, tmp_path / "model.npy"):
        assert main(["score", str(runs["ill"]), str(other)]) == 2
        one_line(capsys)


def test_the_command(runs: dict[str, Path], tmp_path: Path, capsys: Captured) -> None:
    names = {"oslo": "<script>", "bergen": "a\x1b[31mb\nc"}
    path = written(tmp_path / "new.csv", new(site=lambda v: [names.get(x, x) for x in v]))
    command = ["score", str(runs["ill"]), str(path), "--device", "cpu"]
    assert main([*command, "--out", str(tmp_path / "deep" / "score.json")]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "a?[31mb?c" in out
    assert all(len(line) < 110 for line in out.splitlines())
    saved = json.loads((tmp_path / "deep" / "score.json").read_text())
    assert {group["name"] for group in saved["domains"]} == {"<script>", "a\x1b[31mb\nc", "kyoto"}
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, **saved}
    assert main([*command, "--out", str(tmp_path / "deep")]) == 0
    assert main([*command, "--out", str(path / "x.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert "<script>" not in shoal.score(runs["ill"], path)._repr_html_()
