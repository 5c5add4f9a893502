"""Trained models: loaded from the folders of their runs, used on raw input, exported, described on a card."""

from __future__ import annotations

import argparse
import csv
import json
import math
import pickle
import re
import shlex
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import shoal
from shoal.cli import main
from shoal.cli.arguments import values
from shoal.data.inputs import Images, reader
from shoal.data.table import Preprocessing
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.record import Store
from shoal.experiments.run import run
from shoal.export import export
from shoal.trained import train_command
from shoal.training.card import escaped
from shoal.vision import allow_torchvision

SITES = ("oslo", "<script>alert(1)</script>", "li|ma")
CLASSES = ("1", "no *way*")


def write_csv(path: Path, rows: int = 60, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    with path.open("w", newline="", encoding="utf-8") as lines:
        table = csv.writer(lines)
        table.writerow(["age", "ward", "site", "ill", "cost"])
        for n in range(rows):
            age = rng.normal(50, 10)
            ward = ("a", "b", "")[n // 3 % 3]
            label = CLASSES[int(age + rng.normal() > 50)]
            table.writerow([f"{age:.3f}" if n % 7 else "", ward, SITES[n % 3], label, f"{100 + 9 * age:.2f}"])
    return path


def trained_on(folder: Path, name: str, steps: int = 8, **options: Any) -> Path:
    place = folder / name
    config = RunConfig("table", "fish", steps, data_options=options, batch_size=8, eval_every=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(config, "cpu", folder=place)
    return place


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


@pytest.fixture(scope="module")
def table(root: Path) -> Path:
    return write_csv(root / "patients.csv")


@pytest.fixture(scope="module")
def classifier(root: Path, table: Path) -> Path:
    return trained_on(root, "classifier", file=str(table), label="ill", domain="site", drop=["cost"])


@pytest.fixture
def copy(classifier: Path, tmp_path: Path) -> Path:
    """A folder that a test may damage."""
    shutil.copytree(classifier, tmp_path / "copy")
    return tmp_path / "copy"


# Tables


def test_a_table_is_prepared_as_in_training(classifier: Path, table: Path) -> None:
    pandas = pytest.importorskip("pandas")
    model = shoal.load(classifier)
    x = torch.from_numpy(Preprocessing.from_dict(model.inputs).transform(table))
    with torch.no_grad():
        wanted = model(x).softmax(-1)
    assert not model.training
    assert model.class_names == CLASSES
    frame = pandas.read_csv(table)
    columns = {name: frame[name].tolist() for name in ("age", "ward")}
    sources: list[Any] = [table, str(table), frame, columns]
    if arrow := sys.modules.get("pyarrow"):
        sources.append(arrow.Table.from_pandas(frame))
    for source in sources:
        found = model.predict_proba(source, batch_size=7)
        np.testing.assert_allclose(found, wanted.double().numpy(), atol=1e-6)
        assert model.predict(source).tolist() == [CLASSES[i] for i in wanted.argmax(-1)]


def test_a_table_may_be_parquet_or_have_semicolons(classifier: Path, table: Path, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pandas.read_csv(table)
    frame.to_parquet(tmp_path / "t.parquet")
    frame.to_csv(tmp_path / "t.csv", sep=";", decimal=",", index=False)
    model = shoal.load(classifier)
    wanted = model.predict_proba(table)
    for name in ("t.parquet", "t.csv"):
        np.testing.assert_allclose(model.predict_proba(tmp_path / name), wanted, atol=1e-6)


@pytest.mark.parametrize(
    "text",
    [
        "\n\nage,ward\n40.5,a\n,b\n",
        "sep=;\nage;ward\n 40,5 ;a\n ;b\n",
        '"age",ward,"two\nlines"\n40.5,a,x\n,b,"y\nz"\n',
    ],
)
def test_a_file_is_read_as_in_training(classifier: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    model = shoal.load(classifier)
    wanted = model.predict_proba({"age": [40.5, None], "ward": ["a", "b"]})
    np.testing.assert_array_equal(model.predict_proba(tmp_path / "t.csv"), wanted)
    how = Preprocessing.from_dict(model.inputs)
    ((_, x),) = model.reader().batches(tmp_path / "t.csv")
    np.testing.assert_array_equal(how.transform(tmp_path / "t.csv"), x)


def test_in_regression_answers_are_in_the_labels_units(root: Path, table: Path) -> None:
    folder = trained_on(root, "cost", file=str(table), label="cost", domain="site", task="regression")
    model = shoal.load(folder)
    how = Preprocessing.from_dict(model.inputs)
    with torch.no_grad():
        wanted = (
            model(torch.from_numpy(how.transform(table))).numpy() * how.label["scale"] + how.label["mean"]
        )
    np.testing.assert_allclose(model.predict(table), wanted, rtol=1e-5)
    assert 100 < np.mean(model.predict(table)) < 1200
    with pytest.raises(InputError, match="regression model"):
        model.predict_proba(table)
    assert main(["predict", str(folder), str(table), "--proba"]) == 2


def test_a_part_at_a_time_gives_the_same(
    classifier: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shoal.load(classifier)
    whole = model.predict_proba(table)
    monkeypatch.setattr("shoal.data.inputs.ROWS", 11)
    np.testing.assert_allclose(model.predict_proba(table, batch_size=4), whole, rtol=0, atol=1e-6)
    lines = table.read_text().splitlines()
    wrong = table.with_name("wrong.csv")
    wrong.write_text("\n".join([*lines[:40], "old,a,oslo,1,3", *lines[40:]]))
    with pytest.warns(UserWarning, match=r"column 'age': 1 of \d+ cells could not be read.*'old' \(1\)"):
        model.predict(wrong)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Age,ward\n1,a\n", r"lacks what the model needs: 'age'\. Is 'age' named 'Age' there\?"),
        ("x\n1\n", r"lacks what the model needs: 'age', 'ward'\. It has: 'x'"),
        ("age,ward\n1,a,3\n", "line 2: 3 values, but the first line names 2"),
        ("\nsep=;\nage;ward\n1;a;3\n", "line 4: 3 values, but the first line names 2"),
        ("age,age,ward\n1,2,a\n", "two columns named 'age'; rename one"),
        ("age,ward\n", "has no rows"),
        ("", "has no rows"),
    ],
)
def test_tables_that_do_not_fit(classifier: Path, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(InputError, match=message) as found:
        shoal.load(classifier).predict(tmp_path / "t.csv")
    assert str(found.value).count("\n") <= 1


def test_what_is_no_table_is_refused(classifier: Path, tmp_path: Path) -> None:
    model = shoal.load(classifier)
    for source in ("picture.png", 3, [1, 2]):
        with pytest.raises(InputError, match="takes a table"):
            model.predict(source)
    with pytest.raises(InputError, match=r"missing\.csv' cannot be read"):
        model.predict(tmp_path / "missing.csv")
    with pytest.raises(InputError, match=r"takes arrays of shape \(n, 4\), .*; these have shape \(2, 99\)"):
        model.predict(torch.zeros(2, 99))


# On the command line


def test_predict_writes_ids_and_probabilities(
    classifier: Path, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "p.csv"
    command = ["predict", str(classifier), str(table), "--out", str(out), "--device", "cpu"]
    assert main([*command, "--proba", "--batch-size", "7"]) == 0
    said = capsys.readouterr()
    assert "60 predictions" in said.out
    assert "3 columns are not used: 'site', 'ill', 'cost'" in said.err
    with out.open(newline="") as lines:
        found = list(csv.DictReader(lines))
    assert list(found[0]) == ["row", "prediction", *CLASSES]
    assert [row["row"] for row in found] == [str(n + 1) for n in range(60)]
    assert [row["prediction"] for row in found] == shoal.load(classifier).predict(table).tolist()
    assert all(abs(sum(float(row[c]) for c in CLASSES) - 1) < 1e-5 for row in found)
    assert main([*command, "--id", "site", "--json"]) == 0
    said_json = json.loads(capsys.readouterr().out)
    assert (said_json["predictions"], sum(said_json["classes"].values())) == (60, 60)
    assert out.read_text().splitlines()[2].startswith("<script>alert(1)</script>,")
    assert [p.name for p in out.parent.iterdir()] == ["p.csv"]


def test_predict_prints_where_no_file_is_named(
    classifier: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(classifier), str(table)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "row,prediction"
    assert main(["predict", str(classifier), str(table), "--json", "--proba"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert (len(rows), set(rows[0])) == (60, {"row", "prediction", "probabilities"})


def test_ids_and_predictions_are_not_called_the_same(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.csv").write_text("age,ward,prediction\n40,a,x\n")
    assert main(["predict", str(classifier), str(tmp_path / "t.csv"), "--id", "prediction", "--json"]) == 2
    assert "--id prediction: the output already has a column of this name" in capsys.readouterr().err
    assert main(["predict", str(classifier), str(tmp_path / "t.csv"), "--json"]) == 0


def test_a_failure_leaves_the_file_as_it_was(
    classifier: Path, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.data.inputs.ROWS", 10)
    wrong = tmp_path / "wrong.csv"
    wrong.write_text(table.read_text() + "old,a,oslo\n")
    (tmp_path / "p.csv").write_text("before")
    assert main(["predict", str(classifier), str(wrong), "--out", str(tmp_path / "p.csv")]) == 2
    assert (tmp_path / "p.csv").read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.csv", "wrong.csv"]


def test_ctrl_c_leaves_nothing(
    classifier: Path,
    table: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stop(*given: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.trained.probabilities", stop)
    command = ["predict", str(classifier), str(table), "--out", str(tmp_path / "p.csv"), "--proba"]
    assert main(command) == 130
    assert "interrupted. No file was written" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_class_may_be_called_like_a_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{n % 2},s{n % 3},{('row', 'prediction')[n % 2]}" for n in range(30)]
    (tmp_path / "t.csv").write_text("\n".join(["x,site,y", *lines]))
    folder = trained_on(tmp_path, "run", file=str(tmp_path / "t.csv"), label="y", domain="site", test="s0")
    command = ["predict", str(folder), str(tmp_path / "t.csv"), "--proba"]
    assert main([*command, "--out", str(tmp_path / "p.csv")]) == 0
    header = (tmp_path / "p.csv").read_text().splitlines()[0]
    assert header == "row,prediction,probability of prediction,probability of row"
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert set(row["probabilities"]) == {"row", "prediction"}


def test_models_of_prepared_numbers_take_arrays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    run(RunConfig("linear", "erm", 4), "cpu", folder=folder)
    np.save(tmp_path / "x.npy", np.eye(4))
    assert main(["predict", str(folder), str(tmp_path / "x.npy")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    model = shoal.load(folder / "model.safetensors")
    assert model.predict(np.eye(4)).tolist() == model.predict(torch.eye(4)).tolist()
    bad = np.eye(4)
    bad[2, 1] = np.nan
    with pytest.raises(InputError, match="row 3 of the input has a number that is not finite"):
        model.predict(bad)
    (tmp_path / "evil.npy").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    with pytest.raises(InputError, match="not an array that can be read"):
        model.predict(tmp_path / "evil.npy")
    assert not (tmp_path / "ran").exists()


# A network of one's own


def own() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


def test_a_network_of_ones_own_is_given_again(tmp_path: Path) -> None:
    data = {name: (torch.randn(20, 3), torch.randint(2, (20,))) for name in ("oslo", "lima")}
    model = own()
    shoal.fit("fish", model, data, test=data, steps=4, batch_size=4, folder=tmp_path / "run", progress=False)
    with pytest.raises(InputError, match=r"your own network \(torch\.nn\.modules\.container\.Sequential\)"):
        shoal.load(tmp_path / "run")
    found = shoal.load(tmp_path / "run", model=own())
    x = torch.randn(5, 3)
    assert torch.equal(found(x), model(x))
    assert found.about.input_shape == (3,)
    assert found.predict(x).tolist() == model(x).argmax(-1).tolist()
    assert found.record["status"] == "finished"
    with pytest.raises(InputError, match="do not fit the model: ") as error:
        shoal.load(tmp_path / "run", model=nn.Linear(3, 2))
    assert "\n" not in str(error.value)
    assert export(found, tmp_path / "own.safetensors", "safetensors").difference == 0
    text = (tmp_path / "run" / "card.md").read_text()
    assert "pass an instance to shoal.load" in text
    assert "No domain was held out" in text


def test_a_model_that_knows_its_recipe_needs_no_more(tmp_path: Path) -> None:
    data = {name: (torch.randn(20, 3), torch.randint(2, (20,))) for name in ("oslo", "lima")}
    model: Any = shoal.models.build("mlp", input_shape=(3,), classes=2, seed=0, width=5)
    model.recipe = {"name": "mlp", "options": {"width": 5}}
    shoal.fit("erm", model, data, steps=4, folder=tmp_path / "run", progress=False)
    assert torch.equal(shoal.load(tmp_path / "run")(torch.ones(1, 3)), model(torch.ones(1, 3)))


def test_defaults_of_a_model_are_written_down(classifier: Path) -> None:
    """Another version may have others."""
    from shoal.models import options_of

    about = json.loads((classifier / "inputs.json").read_text())
    assert set(about["model"]["options"]) == set(options_of(about["model"]["name"]))


# The card


def test_the_card_says_what_it_is(classifier: Path) -> None:
    text = (classifier / "card.md").read_text(encoding="utf-8")
    record = json.loads((classifier / "record.json").read_text())
    at = record["history"][record["selected"]]
    left_out = at["scores"]["test"]["domains"]
    assert list(left_out) == ["oslo"]  # the last by name
    assert "Held-out domains: oslo." in text
    assert f"| test | oslo | 20 | accuracy | {left_out['oslo']:.4g} |" in text
    assert f"Weights of step {at['step']} (best on validation by accuracy)." in text
    assert "| algorithm | fish |" in text
    assert "| optimizer options | lr 0.001 |" in text
    assert "with seed 0: another seed gives different scores" in text
    assert f"torch {torch.__version__}" in text
    assert "To repeat it:" in text


def test_what_comes_from_outside_is_text_on_the_card(classifier: Path) -> None:
    text = (classifier / "card.md").read_text(encoding="utf-8")
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "li\\|ma" in text
    assert "no \\*way\\*" in text
    rows = [line for line in text.splitlines() if line.startswith("| train |")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {4, 6}


@given(st.text(alphabet="a<>&|*_`[]\\~$@\n\r# -:/", max_size=30))
def test_nothing_escapes_a_cell(text: str) -> None:
    found = escaped(text)
    assert not re.search(r"[<>\n\r]|://", found)
    bare = re.sub(r"\\[\\|`*_\[\]~$@]", "", found)
    assert not re.search(r"[|`*_\[\]~$@]", bare)


def test_escaping() -> None:
    assert escaped("a\n# b") == "a # b"
    assert escaped("[x](http://y) `z` _w_ &amp;") == "\\[x\\](http:\\//y) \\`z\\` \\_w\\_ &amp;amp;"


def test_a_card_that_fails_costs_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr("shoal.training.card.about", broken)
    with pytest.warns(UserWarning, match=r"card could not be written \(RuntimeError: no\)"):
        run(RunConfig("linear", "erm", 2), "cpu", folder=tmp_path / "run")
    assert (tmp_path / "run" / "record.json").exists()
    with pytest.raises(InputError, match=r"has no inputs\.json"):
        shoal.load(tmp_path / "run")


# Pictures


@pytest.fixture(scope="module")
def pictures(root: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for domain in ("day", "night", "rain"):
        for kind in ("cat", "dog"):
            folder = root / "pictures" / domain / kind
            folder.mkdir(parents=True)
            for n in range(5):
                pixels = rng.integers(0, 255, (20 + n, 30, 3), dtype=np.uint8)
                image.fromarray(pixels).save(folder / f"{n}.png")
    return root / "pictures"


@pytest.fixture(scope="module")
def picture_model(root: Path, pictures: Path) -> Path:
    options = {"folder": str(pictures), "size": 16, "augment": True}
    config = RunConfig("image-folder", "erm", 3, data_options=options, batch_size=4)
    run(config, "cpu", folder=root / "picture run")
    return root / "picture run"


def test_pictures_are_prepared_as_in_evaluation(picture_model: Path, pictures: Path) -> None:
    from shoal.data.sets import load

    model = shoal.load(picture_model)
    examples: Any = load("image-folder", folder=str(pictures), size=16).examples
    examples = examples.evaluation()
    assert model.class_names == ("cat", "dog")
    with torch.no_grad():
        wanted = model(torch.stack([x for x, _ in examples])).softmax(-1).double().numpy()
    paths = [examples.files.path(n) for n in range(len(examples))]
    np.testing.assert_allclose(model.predict_proba(paths, batch_size=7), wanted, atol=1e-6)
    np.testing.assert_allclose(model.predict_proba(pictures), wanted, atol=1e-6)
    np.testing.assert_allclose(model.predict_proba(paths[3]), wanted[3:4], atol=1e-6)
    opened = [pytest.importorskip("PIL.Image").open(path) for path in paths[:2]]
    np.testing.assert_allclose(model.predict_proba(opened), wanted[:2], atol=1e-6)


def test_a_broken_picture_stops_or_is_skipped(
    picture_model: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(pictures / "day", tmp_path / "new")
    (tmp_path / "new" / "cat" / "1.png").write_bytes(b"no picture")
    (tmp_path / "new" / "readme.md").write_text("no picture")
    command = ["predict", str(picture_model), str(tmp_path / "new"), "--out", str(tmp_path / "p.csv")]
    assert main([*command, "--workers", "1"]) == 2
    assert "the image 'cat/1.png' cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "p.csv").exists()
    assert main([*command, "--bad-images", "skip", "--batch-size", "2"]) == 0
    said = capsys.readouterr()
    assert "9 predictions" in said.out
    assert "'cat/1.png' is skipped" in said.err
    assert "1 files" in said.err
    names = [line.split(",")[0] for line in (tmp_path / "p.csv").read_text().splitlines()]
    assert names[:3] == ["file", "cat/0.png", "cat/2.png"]


def test_folders_without_pictures(picture_model: Path, tmp_path: Path) -> None:
    model = shoal.load(picture_model)
    with pytest.raises(InputError, match="there is no image in"):
        model.predict(tmp_path)
    with pytest.raises(InputError, match="no image and no folder"):
        model.predict(tmp_path / "x.png")
    with pytest.raises(InputError, match="takes images"):
        model.predict({"a": [1]})


# Texts


@pytest.fixture(scope="module")
def text_model(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    from imitations.wilds_text import fake_amazon

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        fake_amazon(root / "texts")
        tiny = root / "texts" / "tiny-bert"
        options = {"folder": str(root / "texts"), "tokenizer": str(tiny), "max_tokens": 32}
        config = RunConfig(
            *("amazon", "erm", 2), data_options=options, batch_size=4, domains_per_step=2, eval_limit=8
        )
        run(config, "cpu", folder=root / "text run")
        shutil.move(tiny, root / "texts" / "elsewhere")
    return root / "text run"


def test_texts_need_neither_network_nor_the_folder_they_were_from(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.data.text import load_tokenizer

    def asked(*_: Any, **options: Any) -> bool:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("urllib.request.urlopen", asked)
    model = shoal.load(text_model)
    texts = ["good, solid", "", "junk\nrefund " * 30, "none"]
    tokenizer = load_tokenizer(str(text_model.parent / "texts" / "elsewhere"))
    ids = [tokenizer(t, truncation=True, max_length=32)["input_ids"] for t in texts]
    with torch.no_grad():
        each = [model({"input_ids": torch.tensor([i]), "attention_mask": torch.ones(1, len(i))}) for i in ids]
    wanted = torch.cat(each).softmax(-1).double().numpy()
    np.testing.assert_allclose(model.predict_proba(texts, batch_size=3), wanted, atol=1e-5)
    assert set(model.predict(texts)) <= {"1 star", *(f"{n} stars" for n in range(2, 6))}
    with (tmp_path / "t.csv").open("w", newline="") as lines:
        csv.writer(lines).writerows(
            [("id", "reviewText", "words"), *((n, t, t) for n, t in enumerate(texts))]
        )
    np.testing.assert_allclose(model.predict_proba(tmp_path / "t.csv"), wanted, atol=1e-5)
    np.testing.assert_allclose(model.predict_proba(tmp_path / "t.csv", column="words"), wanted, atol=1e-5)
    (tmp_path / "t.txt").write_text("good, solid\n\n")
    np.testing.assert_allclose(model.predict_proba(tmp_path / "t.txt"), wanted[:2], atol=1e-5)
    with pytest.raises(InputError, match="lacks the column 'word'"):
        model.predict(tmp_path / "t.csv", column="word")
    with pytest.raises(InputError, match="text 2 is a int"):
        model.predict(["a", 3])
    with pytest.raises(InputError, match="takes text"):
        model.predict("good")


def test_an_encoder_that_is_not_here_is_not_fetched(text_model: Path, tmp_path: Path) -> None:
    shutil.copytree(text_model, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "encoder")
    about = json.loads((tmp_path / "run" / "inputs.json").read_text())
    about["model"]["name"] = "stranger/model"
    (tmp_path / "run" / "inputs.json").write_text(json.dumps(about))
    with pytest.raises(
        InputError, match="its model 'stranger/model' is elsewhere; there is no 'encoder' here"
    ):
        shoal.load(tmp_path / "run")


def test_published_weights_are_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allow_torchvision()
    timm = pytest.importorskip("timm")
    build = shoal.models.build
    model = build("resnet18", input_shape=(3, 32, 32), classes=2, seed=3)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    about = {"format": 1, "inputs": {}, "input_shape": [3, 32, 32], "classes": 2, "class_names": []}
    about["model"] = {"name": "resnet18", "options": {"pretrained": True, "dropout": 0.0}}
    (tmp_path / "inputs.json").write_text(json.dumps(about))
    asked = []
    create = timm.create_model

    def spy(name: str, **options: Any) -> Any:
        asked.append(options["pretrained"])
        return create(name, **options)

    monkeypatch.setattr(timm, "create_model", spy)
    found = shoal.load(tmp_path)
    assert asked == [False]
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(found(x), model.eval()(x))


# Folders of strangers, and damaged ones


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_in_a_strangers_folder_is_run(copy: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    evil = pickle.dumps(Evil(ran))
    (copy / "config.yaml").write_text(f"!!python/object/apply:pathlib.Path.touch [{ran}]")
    (copy / "checkpoints" / "evil.pt").write_bytes(evil)
    shoal.load(copy)
    (copy / "model.safetensors").write_bytes(evil)
    with pytest.raises(InputError, match="is not a valid safetensors file"):
        shoal.load(copy)
    torch.save(Evil(ran), copy / "model.pt")
    with pytest.raises(InputError, match="is not a weights file of a model"):
        shoal.load(copy / "model.pt")
    assert not ran.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{", "is damaged"),
        ("[1]", "it is not a mapping"),
        ('{"format": 2}', "its format is 2, not 1"),
        ("[" * 100_000, "is damaged"),
        ({"input_shape": [0]}, r"input_shape is \[0\]"),
        ({"input_shape": "3"}, "input_shape is '3'"),
        ({"classes": 1}, "classes is 1"),
        ({"class_names": ["a"]}, "it names 1 classes and there are 2"),
        ({"model": {"name": "os.system"}}, "unknown model 'os.system'"),
        ({"model": {"class": "os.system"}}, "your own network"),
        ({"model": {"name": "mlp", "options": {"depth": 3}}}, "unknown option of model 'mlp'"),
        ({"model": {"name": "mlp", "options": {"width": "x"}}}, "cannot be built according to inputs.json"),
        ({"model": {"name": "linear"}}, "do not fit the model"),
        ({"model": 3}, "must be mappings"),
    ],
)
def test_damaged_descriptions_are_one_line(copy: Path, change: Any, message: str) -> None:
    path = copy / "inputs.json"
    if isinstance(change, dict):
        change = json.dumps(json.loads(path.read_text()) | change)
    path.write_text(change)
    with pytest.raises(InputError, match=message) as error:
        shoal.load(copy)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "inputs",
    [
        {"kind": "spell"},
        {"kind": "table", "format": 1, "columns": 3, "dropped": {}, "label": {}},
        {"kind": "table", "format": 9},
        {"kind": "image", "size": 16},
        {"kind": "image", "size": -1, "mean": [0, 0, 0], "deviation": [1, 1, 1]},
        {"kind": "text"},
        {"kind": "text", "tokenizer": "x", "max_tokens": 0},
    ],
)
def test_damaged_inputs_are_refused(copy: Path, table: Path, inputs: dict[str, Any]) -> None:
    about = json.loads((copy / "inputs.json").read_text()) | {"inputs": inputs}
    (copy / "inputs.json").write_text(json.dumps(about))
    with pytest.raises(InputError):
        shoal.load(copy).predict(table)


def test_weights_that_do_not_fit(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = load_file(copy / "model.safetensors")
    name = next(iter(weights))
    save_file({**weights, name: torch.zeros(3)}, copy / "model.safetensors")
    assert main(["predict", str(copy), "x.csv"]) == 2
    said = capsys.readouterr().err
    assert "do not fit the model: size mismatch" in said
    assert len(said.splitlines()) == 1


def test_what_holds_no_weights(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no folder"):
        shoal.load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="contains no trained model"):
        shoal.load(tmp_path / "empty")
    with pytest.raises(InputError, match=r"contains several runs; use one of them: '.*copy'"):
        shoal.load(tmp_path)
    (copy / "model.safetensors").unlink()
    (copy / "record.json").unlink()
    with pytest.raises(InputError, match="is not finished: shoal resume"):
        shoal.load(copy)


def test_records_without_weights_say_how_to_get_some(tmp_path: Path) -> None:
    from shoal.api.train import configuration, defaults, train
    from shoal.cli.arguments import options_of
    from shoal.cli.train import add_arguments

    config = RunConfig(
        "rotated-digits",
        "fish",
        7,
        data_options={"test": "75°", "seed": 3},
        settings={"meta_lr": 0.1},
        model="small-cnn",
        model_options={"width": 8},
        optimizer_options={"lr": 0.02},
        batch_size=16,
        seed=2,
        eval_every=3,
    )
    store = Store(tmp_path / "runs")
    store.save(run(RunConfig("linear", "erm", 2), "cpu"))
    with pytest.raises(InputError, match=r"records without weights.*\nshoal train erm linear --steps 2"):
        shoal.load(tmp_path)
    with pytest.raises(InputError, match=r"To train this run again:\nshoal train erm"):
        shoal.load(store.path(RunConfig("linear", "erm", 2)))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(shlex.split(train_command(config))[2:])
    options = options_of(args, train) | {"algorithm": args.algorithm, "data": args.dataset}
    assert configuration(defaults() | options)[0] == config


@pytest.mark.parametrize(
    "name",
    ["01", "1:30", "2020-01-01", "2020-02-31", "12e4", "no", "null", "[a", "a: b", "2.0", "1", "-x", "@"],
)
def test_a_domains_name_survives_the_command_line(name: str) -> None:
    """YAML would take some of these for other things."""
    command = train_command(RunConfig("table", "erm", 2, data_options={"test": name}))
    pairs = [word for word in shlex.split(command) if word.startswith("test=")]
    assert values(pairs, "--data") == {"test": name}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("7", 7),
        ("-2", -2),
        ("0.5", 0.5),
        ("true", True),
        ("[a, 2020-01-01]", ["a", "2020-01-01"]),
    ]
    + [(name, name) for name in ("01", "1:30", "0x10", "2020-01-01")],
)
def test_what_is_typed_as_a_value(text: str, value: Any) -> None:
    found = values([f"x={text}"], "--data")["x"]
    assert (found, type(found)) == (value, type(value))
    with pytest.raises(InputError, match=r"--data 'x=\[': this value cannot be read"):
        values(["x=["], "--data")


# Export


def need_onnx() -> Any:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    return pytest.importorskip("onnxruntime")


def answers(path: Path, **columns: Any) -> dict[str, Any]:
    """What an ONNX file makes of raw columns, by the names of its outputs."""
    session = need_onnx().InferenceSession(str(path), providers=["CPUExecutionProvider"])
    given = {name: np.asarray(values)[:, None] for name, values in columns.items()}
    return dict(zip((o.name for o in session.get_outputs()), session.run(None, given), strict=True))


@pytest.mark.parametrize("format", ["onnx", "torch-export", "safetensors"])
def test_export_of_a_table_model(
    classifier: Path, tmp_path: Path, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if format == "onnx":
        need_onnx()
    out = tmp_path / "out" / "model.bin"
    command = ["export", str(classifier), "--format", format, "--prepared", "--out", str(out)]
    assert main([*command, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["largest_difference"] < 1e-5
    assert sorted(p.name for p in out.parent.iterdir()) == ["model.bin", "model.bin.json"]
    beside = json.loads(out.with_name("model.bin.json").read_text())
    assert beside["class_names"] == list(CLASSES)
    prepared = reader(beside["inputs"], beside["input_shape"])
    ((names, x),) = prepared.batches({"age": [50.0, None], "ward": ["a", "b"]})
    with torch.no_grad():
        wanted = shoal.load(classifier)(x).numpy()
    if format == "onnx":
        session = need_onnx().InferenceSession(str(out), providers=["CPUExecutionProvider"])
        np.testing.assert_allclose(session.run(None, {"x": x.numpy()})[0], wanted, atol=1e-5)
    assert names == ["1", "2"]
    assert main(command) == 0
    assert "The inputs are preprocessed numbers, not raw columns." in capsys.readouterr().out


def test_an_onnx_file_of_a_table_model_takes_raw_columns(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx = need_onnx() and pytest.importorskip("onnx")
    out = tmp_path / "m.onnx"
    assert main(["export", str(classifier), "--out", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(c["name"], c["kind"], c["type"]) for c in said["columns"]] == [
        ("age", "numeric", "double"),
        ("ward", "categorical", "string"),
    ]
    age, ward = [50.25, np.nan, 1e9, -3.0, 61.0], ["a", "b", "", "never seen", "a"]
    found = answers(out, age=np.array(age), ward=np.array(ward, object))
    model = shoal.load(classifier)
    raw = {"age": [None if np.isnan(a) else a for a in age], "ward": ward}
    np.testing.assert_allclose(found["probabilities"], model.predict_proba(raw), atol=1e-6)
    assert found["label"].tolist() == model.predict(raw).tolist()
    about = {p.key: json.loads(p.value) for p in onnx.load(out).metadata_props}
    assert about["class_names"] == list(CLASSES)
    assert about["label"] == "ill"
    assert (
        about["columns"]
        == said["columns"]
        == json.loads(Path(f"{out}.json").read_text())["export"]["columns"]
    )


def test_an_onnx_file_answers_in_the_labels_units(root: Path, table: Path, tmp_path: Path) -> None:
    folder = trained_on(root, "units", file=str(table), label="cost", domain="site", drop=["ill"])
    need_onnx()
    made = export(shoal.load(folder), tmp_path / "m.onnx", "onnx")
    raw = {"age": [41.5, 67.25], "ward": ["b", ""]}
    found = answers(made.path, age=np.array(raw["age"]), ward=np.array(raw["ward"], object))
    np.testing.assert_allclose(found["prediction"], shoal.load(folder).predict(raw), rtol=1e-6)


def test_columns_with_the_names_of_outputs_and_columns_of_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Many categories share one input; words come prepared; nothing is mistaken for a part of the graph."""
    need_onnx()
    rng = np.random.default_rng(0)
    words = ["pain", "head", "chest", "fever", "cough", "none", "mild", "severe"]
    with (tmp_path / "t.csv").open("w", newline="") as lines:
        file = csv.writer(lines)
        file.writerow(["label", "network/x", "notes", "site", "y"])
        for n in range(240):
            text = " ".join(rng.choice(words, 8)) + f" {n}"
            file.writerow([f"{rng.normal():.3f}", f"w{n % 60 if n < 120 else 0}", text, "abc"[n % 3], n % 2])
    options = {"file": str(tmp_path / "t.csv"), "label": "y", "domain": "site"}
    kinds = {"network/x": "categorical", "notes": "text"}
    folder = trained_on(tmp_path, "words", steps=2, **options, kinds=kinds)
    out = tmp_path / "m.onnx"
    assert main(["export", str(folder), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "3 raw columns" in said
    assert "be preprocessed, because ONNX cannot count words: notes." in said
    columns = json.loads(Path(f"{out}.json").read_text())["export"]["columns"]
    inputs = {c["name"]: c["input"] for c in columns}
    assert inputs == {"label": "column label", "network/x": "column network/x", "notes": "notes"}
    model = shoal.load(folder)
    raw = {"label": [0.5] * 4, "network/x": ["w0", "w1", "never seen", ""], "notes": ["pain head"] * 4}
    ((_, x),) = model.reader().batches(raw)
    session = need_onnx().InferenceSession(str(out), providers=["CPUExecutionProvider"])
    given = {
        "column label": np.array(raw["label"])[:, None],
        "column network/x": np.array(raw["network/x"], object)[:, None],
        "notes": x[:, -columns[-1]["shape"][1] :].numpy(),
    }
    found = session.run(["probabilities"], given)[0]
    np.testing.assert_allclose(found, model.predict_proba(raw), atol=1e-6)


def test_an_export_goes_to_a_file(classifier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(classifier), "--out", "."]) == 2
    assert capsys.readouterr().err == "shoal: '.' is a folder; specify a file.\n"


def test_the_extension_decides_the_format_and_cannot_contradict_it(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(classifier), "--out", str(tmp_path / "m.safetensors"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "safetensors"
    given = ["export", str(classifier), "--format", "onnx", "--out", str(tmp_path / "m.pt2")]
    assert main(given) == 2
    assert "--format onnx contradicts the extension of 'm.pt2'" in capsys.readouterr().err
    assert not (tmp_path / "m.pt2").exists()


def test_export_of_a_text_model(text_model: Path, tmp_path: Path) -> None:
    """Of any number of texts of any length."""
    made = export(shoal.load(text_model), tmp_path / "m.pt2", "torch-export")
    assert made.difference < 1e-5
    again = torch.export.load(made.path).module()
    ids = torch.full((4, 21), 7)
    with torch.no_grad():
        wanted = shoal.load(text_model)({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        torch.testing.assert_close(again(ids, torch.ones_like(ids)), wanted)
    assert (tmp_path / "m.pt2.tokenizer" / "tokenizer.json").is_file()


def test_an_export_that_differs_is_not_kept(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def off(path: Path) -> Any:
        return {k: v + 0.01 for k, v in load_file(path).items()}

    monkeypatch.setattr("shoal.export.load_file", off)
    command = ["export", str(classifier), "--format", "safetensors", "--out", str(tmp_path / "m")]
    assert main(command) == 2
    assert "nothing was written" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_export_without_onnx_gives_a_hint(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["export", str(classifier), "--out", str(tmp_path / "m.onnx")]) == 2
    assert "pip install 'shoal[onnx]'" in capsys.readouterr().err


def test_a_reader_of_pictures_wants_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    found = reader({"kind": "image", "size": 8, "mean": [0, 0, 0], "deviation": [1, 1, 1]}, (3, 8, 8))
    assert isinstance(found, Images)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(InputError, match="pip install 'shoal"):
        next(found.batches("x"))


# What a stranger's folder may ask for


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_shape": [10**9]}, "describes a network that is far larger than its weights"),
        ({"classes": 10**9, "class_names": []}, "far larger than its weights"),
        ({"model": {"name": "tabular", "options": {"width": 10**4}}}, "far larger than its weights"),
        (
            {"model": {"name": "tabular", "options": {"depth": 10**6}}},
            "depth of model 'tabular' must be a whole number",
        ),
        ({"model": {"name": "x" * 10**5}}, "is not a short text"),
        ({"model": {"name": ["tabular"]}}, "is not a short text"),
        ({"model": {"name": "/somewhere/else"}}, "is elsewhere; there is no 'encoder' here"),
        ({"model": {"name": "~/else"}}, "is elsewhere; there is no 'encoder' here"),
        (
            {"inputs": {"kind": "text", "tokenizer": "../else", "max_tokens": 8}},
            "its tokenizer is not in the",
        ),
    ],
)
def test_descriptions_can_ask_for_no_more_than_there_is(copy: Path, change: Any, message: str) -> None:
    path = copy / "inputs.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=message) as error:
        shoal.load(copy)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 10**9}, "too large for an encoder"),
        ({"num_labels": 10**5000}, "cannot be loaded"),
        ({"n_heads": 10**400}, "too large for an encoder"),
        ({"vocab_size": 4_000_000, "hidden_size": 64}, "far larger than its weights"),
        ({"num_hidden_layers": 10_000}, "too large for an encoder"),
        ({"num_hidden_layers": 900}, "far larger than its weights"),
    ],
)
def test_encoders_can_be_no_larger_than_their_weights(
    text_model: Path, tmp_path: Path, change: Any, message: str
) -> None:
    shutil.copytree(text_model, tmp_path / "run")
    path = tmp_path / "run" / "encoder" / "config.json"
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    sys.set_int_max_str_digits(limit)
    with pytest.raises(InputError, match=message):
        shoal.load(tmp_path / "run")


def test_no_code_for_attention_is_fetched(text_model: Path, tmp_path: Path) -> None:
    shutil.copytree(text_model, tmp_path / "run")
    path = tmp_path / "run" / "inputs.json"
    about = json.loads(path.read_text())
    about["model"]["options"] = {"attention": "stranger/kernel"}
    path.write_text(json.dumps(about))
    with pytest.raises(InputError, match="unknown attention 'stranger/kernel'"):
        shoal.load(tmp_path / "run")


def test_files_without_an_end_are_not_read(copy: Path) -> None:
    (copy / "inputs.json").unlink()
    (copy / "inputs.json").symlink_to("/dev/zero")
    with pytest.raises(InputError, match="is a device, not a regular file"):
        shoal.load(copy)


def test_weights_that_are_no_numbers(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    name = next(iter(weights))
    save_file({**weights, name: weights[name] * float("nan")}, copy / "model.safetensors")
    with pytest.raises(InputError, match=f"are damaged: '{name}' has a number that is NaN"):
        shoal.load(copy)


@pytest.mark.parametrize(
    "change", [{"mean": "x"}, {"mean": None}, {"scale": -1}, {"scale": math.inf}, {"mean": 10**400}], ids=str
)
def test_a_column_described_wrongly_is_one_line(copy: Path, change: Any) -> None:
    path = copy / "inputs.json"
    about = json.loads(path.read_text())
    about["inputs"]["columns"][0]["scaling"] |= change
    path.write_text(json.dumps(about))
    rows = {column["name"]: ["1"] for column in about["inputs"]["columns"]}
    with pytest.raises(InputError) as error:
        shoal.load(copy).predict(rows)
    assert "\n" not in str(error.value)


def test_pictures_of_another_size_than_the_networks(picture_model: Path, tmp_path: Path) -> None:
    shutil.copytree(picture_model, tmp_path / "run")
    path = tmp_path / "run" / "inputs.json"
    about = json.loads(path.read_text())
    about["inputs"]["size"] = 10**9
    path.write_text(json.dumps(about))
    with pytest.raises(InputError, match="images of size 1000000000 are not of shape"):
        shoal.load(tmp_path / "run")


def test_an_export_never_overwrites_the_model_itself(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in copy.iterdir() if path.is_file()}
    for name in ("model.safetensors", "inputs", "record", "config.yaml"):
        assert main(["export", str(copy), "--format", "safetensors", "--out", str(copy / name)]) == 2
        assert "would be overwritten" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in copy.iterdir() if path.is_file()} == before
    assert main(["export", str(copy), "--format", "safetensors", "--out", str(copy / "mine")]) == 0


def test_an_export_copies_nothing_that_a_strangers_folder_links_to(text_model: Path, tmp_path: Path) -> None:
    shutil.copytree(text_model, tmp_path / "run")
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "run" / "tokenizer" / "notes.txt").symlink_to(tmp_path / "secret")
    export(shoal.load(tmp_path / "run"), tmp_path / "out" / "m", "safetensors")
    made = {path.name for path in (tmp_path / "out" / "m.tokenizer").iterdir()}
    assert "tokenizer.json" in made
    assert "notes.txt" not in made


def test_a_model_in_memory_predicts_and_is_exported(classifier: Path, table: Path, tmp_path: Path) -> None:
    """What `Fit` does: the model and what the summary says of it, without a folder."""
    from shoal.trained import Trained

    saved = shoal.load(classifier)
    content = json.loads((classifier / "inputs.json").read_text())
    model = Trained.in_memory(saved.model, content)
    assert model.about == saved.about
    assert model.folder is None
    assert "from" not in repr(model)
    assert model.predict(table).tolist() == saved.predict(table).tolist()
    made = model.export(tmp_path / "model.safetensors")
    assert made.path.exists()
    assert json.loads(made.about.read_text())["export"]["format"] == "safetensors"
    with pytest.raises(InputError, match="unknown format 'onx'"):
        model.export(tmp_path / "x", "onx")


def test_a_text_model_in_memory_has_its_tokenizer(text_model: Path, tmp_path: Path) -> None:
    """Files that the summary refers to are kept as long as the model is."""
    from shoal.trained import Trained

    saved = shoal.load(text_model)
    content = json.loads((text_model / "inputs.json").read_text())
    folder = text_model / "tokenizer"
    files = {f"tokenizer/{path.name}": path.read_bytes() for path in folder.iterdir()}
    model = Trained.in_memory(saved.model, content, files)
    texts = ["a good day", "a bad night"]
    assert model.predict(texts).tolist() == saved.predict(texts).tolist()
    made = model.export(tmp_path / "text.safetensors")
    assert (tmp_path / "text.safetensors.tokenizer").is_dir()
    assert made.difference < 1e-6
