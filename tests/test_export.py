"""``shoal.export``: files for other programs, which answer as the model does."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from safetensors.torch import load_file

import shoal
from shoal.api.export import export
from shoal.data import from_table
from shoal.data.inputs import reader
from shoal.errors import InputError
from trained_models import fit, table_model, text_model


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def classifier(root: Path) -> Path:
    return table_model(root / "classifier")


def test_onnx_of_a_table_takes_raw_columns(classifier: Path, tmp_path: Path) -> None:
    made = export(classifier, tmp_path / "deep" / "m.onnx")
    kinds = [(c["name"], c["kind"], c["type"]) for c in made.columns]
    assert kinds == [("age", "numeric", "double"), ("colour", "categorical", "string")]
    raw = {"age": [50.25, np.nan, 1e9, -3.0, 61.0], "colour": ["red", "blue", "", "never seen", "NA"]}
    session = pytest.importorskip("onnxruntime").InferenceSession(str(made.path))
    given = {"age": np.array(raw["age"])[:, None], "colour": np.array(raw["colour"], object)[:, None]}
    label, probabilities = session.run(["label", "probabilities"], given)
    model = shoal.load(classifier)
    with warnings.catch_warnings(action="ignore"):
        np.testing.assert_allclose(probabilities, model.predict_proba(raw), atol=1e-6)
        assert label.tolist() == model.predict(raw).tolist()
    about = json.loads(made.about.read_text())
    assert (about["class_names"], about["export"]["columns"]) == (["no", "yes"], [*made.columns])
    assert "The inputs are 2 raw columns" in str(made)
    assert sorted(path.name for path in made.path.parent.iterdir()) == ["m.onnx", "m.onnx.json"]
    assert json.loads(json.dumps(made.to_dict()))["difference"] < 1e-5


def test_every_kind_of_column_is_expressed(tmp_path: Path) -> None:
    """Dates over centuries, booleans, rare categories; no name is taken for another."""
    rng, n = np.random.default_rng(0), 240
    table = {
        "label": rng.normal(size=n).round(3).tolist(),
        "shoal/class": [f"w{k % 60 if k < 120 else 0}" for k in range(n)],
        "flag": rng.choice(["yes", "no", ""], n).tolist(),
        "day": [f"{y}-{m:02}-{d:02}" for y, m, d in rng.integers((1990, 1, 1), (2030, 13, 29), (n, 3))],
        "site": ["a", "b", "c"] * (n // 3),
        "cost": rng.normal(500, 90, n).tolist(),
    }
    kinds = {"shoal/class": "categorical", "flag": "boolean", "day": "date"}
    with warnings.catch_warnings(action="ignore"):
        data = from_table(table, label="cost", domain="site", kinds=kinds, task="regression")
    folder = fit(tmp_path / "run", data)
    made = export(folder, tmp_path / "m.onnx")
    inputs = {c["name"]: c["input"] for c in made.columns}
    assert (inputs["label"], inputs["shoal/class"]) == ("column label", "column shoal/class")
    model = shoal.load(folder)
    days = ["1600-02-29", "1899-12-31", "2000-03-01", "2100-02-28 18:30"]
    raw = {"label": [0.5] * 4, "shoal/class": ["w0", "w1", "never seen", ""], "day": days}
    raw["flag"] = [1.0, 0.0, np.nan, 1.0]
    session = pytest.importorskip("onnxruntime").InferenceSession(str(made.path))
    dates = pandas.to_datetime(pandas.Series(days), format="ISO8601").dt
    seconds = np.array([d.replace(" ", "T") for d in days], "datetime64[s]").astype(int)
    given = {
        "column label": np.array(raw["label"])[:, None],
        "column shoal/class": np.array(raw["shoal/class"], object)[:, None],
        "flag": np.array(raw["flag"])[:, None],
        "day": np.stack([seconds / 86400, dates.month, dates.day_of_week, dates.hour], 1).astype(float),
    }
    np.testing.assert_allclose(session.run(["prediction"], given)[0], model.predict(raw), rtol=1e-6)


@pytest.mark.parametrize("format", ["torch-export", "safetensors"])
def test_other_formats_take_prepared_numbers(classifier: Path, tmp_path: Path, format: Any) -> None:
    made = export(classifier, tmp_path / "model.bin", format=format)
    about = json.loads(made.about.read_text())
    raw = {"age": [50.0, None], "colour": ["red", "blue"]}
    ((_, x),) = reader(about["inputs"], about["input_shape"]).batches(raw)
    model = shoal.load(classifier)
    if format == "safetensors":
        weights = load_file(made.path)
        found = torch.func.functional_call(model.model, weights, (x,))
    else:
        found = torch.export.load(made.path).module()(x)
    torch.testing.assert_close(found, model(x))
    assert about["class_names"] == ["no", "yes"]


def test_text_of_any_length_and_nothing_that_a_strangers_folder_links_to(root: Path, tmp_path: Path) -> None:
    folder = text_model(root / "text", root / "texts")
    (tmp_path / "secret").write_text("mine")
    (folder / "tokenizer" / "notes.txt").symlink_to(tmp_path / "secret")
    made = export(folder, tmp_path / "m.pt2")
    ids = torch.full((4, 21), 7)
    with torch.no_grad():
        x = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        torch.testing.assert_close(torch.export.load(made.path).module()(x), shoal.load(folder)(x))
    kept = {path.name for path in (tmp_path / "m.pt2.tokenizer").iterdir()}
    assert "tokenizer.json" in kept
    assert "notes.txt" not in kept


def test_an_export_that_differs_is_not_kept(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(path: Path) -> Any:
        return {name: value + 0.01 for name, value in load_file(path).items()}

    monkeypatch.setattr("shoal.api.formats.load_file", wrong)
    with pytest.raises(InputError, match="nothing was written"):
        export(classifier, tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "^model"),
        ({"out": "."}, "^out: .*folder"),
        ({"out": "m.pt2", "format": "onnx"}, "^format: onnx contradicts the extension"),
        ({"format": "onx"}, "'onx'.*Did you mean 'onnx'"),
    ],
)
def test_wrong_arguments(classifier: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        export(**{"model": classifier, **change})
