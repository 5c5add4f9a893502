"""``shoal.predict``: tables of predictions, in memory and in files."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from shoal.api.predict import predict
from shoal.errors import InputError
from trained_models import image_model, patients, table_model, write_csv, write_images


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table_model(tmp_path_factory.mktemp("predict") / "run")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_csv(tmp_path / "new.csv", patients(1, 60))


def test_the_file_has_what_the_model_predicts(classifier: Path, table: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "p.csv"
    found = predict(classifier, table, out=out, proba=True, batch_size=7)
    model = shoal.load(classifier)
    with out.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert list(rows[0]) == ["row", "prediction", "no", "yes"]
    assert [row["row"] for row in rows] == [str(n + 1) for n in range(60)]
    assert [row["prediction"] for row in rows] == model.predict(table).tolist() == found.labels.tolist()
    written = np.array([[float(row["no"]), float(row["yes"])] for row in rows])
    np.testing.assert_allclose(written, model.predict_proba(table), atol=1e-6)
    np.testing.assert_allclose(found.probabilities, model.predict_proba(table), atol=1e-6)
    assert "60 predictions" in str(found)
    assert "Columns not used: 'site', 'ill', 'grade'" in str(found)
    assert found.to_dict()["out"] == str(out)
    assert [path.name for path in out.parent.iterdir()] == ["p.csv"]


def test_several_labels_have_probabilities(tmp_path: Path) -> None:
    x, y = torch.randn(40, 3), torch.randint(0, 2, (40, 2))
    network = nn.Linear(3, 2)
    data = {"a": (x, y), "b": (x, y)}
    options: dict[str, Any] = {"task": "multilabel", "steps": 2, "progress": False, "device": "cpu"}
    shoal.fit("erm", network, data, folder=tmp_path / "run", **options)
    model = shoal.load(tmp_path / "run", network)
    np.save(tmp_path / "x.npy", x.numpy())
    found = predict(model, tmp_path / "x.npy", proba=True, out=tmp_path / "p.csv")
    np.testing.assert_allclose(found.probabilities, model(x).detach().sigmoid().numpy(), atol=1e-6)
    assert (found.labels == (found.probabilities > 0.5)).all()
    header = (tmp_path / "p.csv").read_text().splitlines()[0]
    assert header == "row,prediction 0,prediction 1,0,1"


def test_images_are_named_by_their_files(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images")
    run = image_model(tmp_path / "run", images)
    shutil.copytree(images / "day", tmp_path / "new")
    found = predict(run, tmp_path / "new", batch_size=3)
    assert (found.example, found.names[:2]) == ("file", ["cat/0.png", "cat/1.png"])
    (tmp_path / "new" / "cat" / "1.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"cat/1\.png' cannot be read"):
        predict(run, tmp_path / "new", out=tmp_path / "p.csv")
    assert not (tmp_path / "p.csv").exists()
