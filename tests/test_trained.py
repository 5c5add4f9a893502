"""``shoal.load`` and trained models: raw input is prepared as in training, damaged folders are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import shoal
from shoal.data.tables import Encoder
from shoal.errors import InputError
from trained_models import image_model, patients, table_model, text_model, write_csv, write_images


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


@pytest.fixture(scope="module")
def table(root: Path) -> Path:
    return write_csv(root / "patients.csv", patients(1, 60))


@pytest.fixture(scope="module")
def classifier(root: Path) -> Path:
    return table_model(root / "classifier")


@pytest.fixture(scope="module")
def text_run(root: Path) -> Path:
    return text_model(root / "text", root / "texts")


@pytest.fixture
def copy(classifier: Path, tmp_path: Path) -> Path:
    """A folder that a test may damage."""
    return shutil.copytree(classifier, tmp_path / "copy")


class TestTables:
    def test_they_are_prepared_as_in_training(self, classifier: Path, table: Path, tmp_path: Path) -> None:
        model = shoal.load(classifier)
        x = torch.from_numpy(Encoder.from_dict(model.inputs).transform(table))
        with torch.no_grad():
            wanted = (model(x) / model.temperature).softmax(-1).double().numpy()
        frame = pandas.read_csv(table)
        frame.to_parquet(tmp_path / "t.parquet")
        frame.to_csv(tmp_path / "t.csv", sep=";", decimal=",", index=False)
        columns = {name: frame[name].tolist() for name in ("age", "colour")}
        for source in (table, str(table), frame, columns, tmp_path / "t.parquet", tmp_path / "t.csv"):
            np.testing.assert_allclose(model.predict_proba(source, batch_size=7), wanted, atol=1e-6)
            assert model.predict(source).tolist() == [("no", "yes")[i] for i in wanted.argmax(-1)]

    def test_in_regression_predictions_have_the_units_of_the_label(self, root: Path, table: Path) -> None:
        model = shoal.load(table_model(root / "stay", "stay"))
        encoder = Encoder.from_dict(model.inputs)
        with torch.no_grad():
            scaled = model(torch.from_numpy(encoder.transform(table))).numpy()
        wanted = scaled * encoder.label["scale"] + encoder.label["mean"]
        np.testing.assert_allclose(model.predict(table), wanted, rtol=1e-5)
        with pytest.raises(InputError, match=r"^proba: .*regression"):
            model.predict_proba(table)


def test_images_are_prepared_as_in_evaluation(tmp_path: Path) -> None:
    from shoal.datasets import load

    images = write_images(tmp_path / "images")
    model = shoal.load(image_model(tmp_path / "run", images))
    examples: Any = load("image-folder", folder=str(images), size=16).examples
    examples = examples.evaluation()
    with torch.no_grad():
        wanted = (
            (model(torch.stack([x for x, _ in examples])) / model.temperature).softmax(-1).double().numpy()
        )
    paths = [examples.path(n) for n in range(len(examples))]
    opened = [pytest.importorskip("PIL.Image").open(path) for path in paths[:2]]
    for source, some in ((paths, wanted), (images, wanted), (paths[3], wanted[3:4]), (opened, wanted[:2])):
        np.testing.assert_allclose(model.predict_proba(source, batch_size=7), some, atol=1e-6)
    for wrong in (tmp_path / "run", tmp_path / "x.png", {"a": [1]}):
        with pytest.raises(InputError):
            model.predict(wrong)


def test_text_needs_neither_a_network_nor_the_folder_of_its_encoder(
    text_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.data.text import load_tokenizer

    encoder = text_run.parent / "texts" / "tiny-bert"
    tokenizer = load_tokenizer(str(encoder))
    encoder.rename(encoder.with_name("elsewhere"))
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("the network was asked"))
    model = shoal.load(text_run)
    texts = ["good, solid", "", "junk\nrefund " * 30, "none"]
    ids = [tokenizer(text, truncation=True, max_length=32)["input_ids"] for text in texts]
    with torch.no_grad():
        each = [model({"input_ids": torch.tensor([i]), "attention_mask": torch.ones(1, len(i))}) for i in ids]
    wanted = (torch.cat(each) / model.temperature).softmax(-1).double().numpy()
    table = {"reviewText": texts, "words": texts[::-1]}
    for source, column, some in (
        (texts, None, wanted),
        (table, None, wanted),
        (table, "words", wanted[::-1]),
    ):
        np.testing.assert_allclose(model.predict_proba(source, batch_size=3, column=column), some, atol=1e-5)
    with pytest.raises(InputError, match="no column 'word' for the text"):
        model.predict(table, column="word")
    with pytest.raises(InputError, match="text 2 is a int"):
        model.predict(["a", 3])
    encoder.with_name("elsewhere").rename(encoder)


def test_a_network_of_the_users_own_is_passed_again(tmp_path: Path) -> None:
    network, data = nn.Linear(3, 2), {name: (torch.randn(20, 3), torch.arange(20) % 2) for name in "ab"}
    shoal.fit("fish", network, data, steps=4, batch_size=4, folder=tmp_path / "run", progress=False)
    with pytest.raises(InputError, match=r"your own network \(torch\.nn\.modules\.linear\.Linear\)"):
        shoal.load(tmp_path / "run")
    model = shoal.load(tmp_path / "run", model=nn.Linear(3, 2))
    x = torch.randn(5, 3)
    assert torch.equal(model(x), network(x))
    assert model.predict(x).tolist() == model.predict(x.numpy()).tolist() == network(x).argmax(-1).tolist()
    assert model.record["status"] == "finished"
    with pytest.raises(InputError, match="does not fit the model"):
        shoal.load(tmp_path / "run", model=nn.Linear(3, 4))


class TestSave:
    @pytest.mark.parametrize("kind", ["table", "text"])
    def test_a_saved_model_is_the_same(self, request: Any, tmp_path: Path, kind: str) -> None:
        folder = request.getfixturevalue("classifier" if kind == "table" else "text_run")
        source: Any = patients(1, 9) if kind == "table" else ["a good day", "a bad night"]
        model = shoal.load(folder)
        assert model.save(tmp_path / "saved") == tmp_path / "saved"
        again = shoal.load(tmp_path / "saved")
        np.testing.assert_array_equal(again.predict_proba(source), model.predict_proba(source))
        assert again.about == model.about
        assert (tmp_path / "saved" / "card.md").read_bytes() == (folder / "card.md").read_bytes()
        with pytest.raises(InputError, match="not empty"):
            model.save(folder)


class TestDamagedFolders:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ("{", "is damaged"),
            ({"class_names": ["a"]}, "it names 1 classes and there are 2"),
            ({"task": "regression"}, "the task is regression with 2 classes"),
            ({"model": {"name": "os.system"}}, "unknown model 'os.system'"),
            ({"model": {"name": "/somewhere/else"}}, "the encoder '/somewhere/else' is not in"),
            ({"model": {"name": "linear"}}, "does not fit the model"),
        ],
    )
    def test_descriptions_of_the_model(self, copy: Path, change: Any, message: str) -> None:
        path = copy / "inputs.json"
        if isinstance(change, dict):
            change = json.dumps(json.loads(path.read_text()) | change)
        path.write_text(change)
        (copy / "record.json").unlink()  # with its checksums
        with pytest.raises(InputError, match=message) as error:
            shoal.load(copy).predict({"age": [1.0], "colour": ["red"]})
        assert "\n" not in str(error.value)

    def test_changed_files_are_noticed(self, copy: Path) -> None:
        weights = load_file(copy / "model.safetensors")
        save_file({name: value + 1 for name, value in weights.items()}, copy / "model.safetensors")
        with pytest.raises(InputError, match="its content has changed"):
            shoal.load(copy)
        (copy / "record.json").unlink()
        save_file({"x": torch.zeros(3)}, copy / "model.safetensors")
        with pytest.raises(InputError, match="does not fit the model"):
            shoal.load(copy)

    def test_folders_without_weights(self, copy: Path, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"use one of the runs in it, such as '.*copy'"):
            shoal.load(tmp_path)
        (copy / "model.safetensors").unlink()
        (copy / "record.json").unlink()
        with pytest.raises(InputError, match="no finished run"):
            shoal.load(copy)
        (tmp_path / "empty").mkdir()
        for path, message in (("nowhere", "there is no folder"), ("empty", "contains no trained model")):
            with pytest.raises(InputError, match=message):
                shoal.load(tmp_path / path)
        with pytest.raises(InputError, match="is not the file of a model"):
            shoal.load(copy / "inputs.json")


def test_published_weights_are_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timm = pytest.importorskip("timm")
    model = shoal.models.build("resnet18", input_shape=(3, 32, 32), classes=2, seed=3)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    about: dict[str, Any] = {"format": 1, "input_shape": [3, 32, 32], "classes": 2, "task": "classification"}
    about["model"] = {"name": "resnet18", "options": {"pretrained": True, "dropout": 0.0}}
    (tmp_path / "inputs.json").write_text(json.dumps(about))
    asked, create = [], timm.create_model

    def spy(name: str, **options: Any) -> Any:
        asked.append(options["pretrained"])
        return create(name, **options)

    monkeypatch.setattr(timm, "create_model", spy)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(shoal.load(tmp_path)(x), model.eval()(x))
    assert asked == [False]
