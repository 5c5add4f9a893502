"""Baselines: fitted by scikit-learn and LightGBM, then loaded, used and exported as any model."""

from __future__ import annotations

import itertools
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from imitations.wilds import maker
from shoal import datasets as sets
from shoal.api.source import datasets_in
from shoal.errors import InputError
from shoal.experiments import baselines
from shoal.experiments.compare import LeaveDomainsOut
from shoal.experiments.config import RunConfig

SITES = ("kyoto", "lima", "oslo", "<script>")


def write_table(path: Path, rows: int = 160, label: str = "ill", sites: Any = SITES) -> str:
    """A CSV of a few sites; the label depends on age and colour, and on nothing else."""
    draw = np.random.default_rng(0)
    age, colour = draw.normal(50, 10, rows), draw.choice(["red", "blue"], rows)
    risk = age + 10 * (colour == "red") + draw.normal(0, 4, rows)
    values = risk if label == "risk" else np.where(risk > 55, "yes", "no")
    cells = enumerate(zip(age, colour, values, strict=True))
    lines = [f"{a:.2f},{c},{sites[n % len(sites)]},{v}" for n, (a, c, v) in cells]
    path.write_text("\n".join([f"age,colour,site,{label}", *lines]))
    return str(path)


def plan(options: dict[str, Any], out: str = "oslo", seeds: int = 1, search: int = 1) -> list[RunConfig]:
    base = RunConfig("table", "erm", 5, data_options=options, eval_every=5)
    names = baselines.names(None if options["label"] == "risk" else 2)
    return LeaveDomainsOut(base, names, out.split(), seeds, search).plan()


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"file": write_table(tmp_path / "patients.csv"), "label": "ill", "domain": "site"}


def test_the_same_as_scikit_learn_by_hand(options: dict[str, Any]) -> None:
    from sklearn.linear_model import LogisticRegression

    config = plan(options)[1]
    assert config.name == "logistic-regression"
    record = baselines.run(config)
    data: Any = sets.load("table", **options, held_out="oslo")
    x, y = data.examples.x.numpy(), data.examples.y.numpy()
    train, test = (data.splits[s].examples() for s in ("train", "test"))
    model: Any = LogisticRegression(max_iter=1000).fit(x[train], y[train])
    assert record.score("test") == pytest.approx(model.score(x[test], y[test]))
    scores = record.history[0]["scores"]["test"]
    chances = model.predict_proba(x[test])
    assert scores["loss"] == pytest.approx(-np.log(chances[np.arange(len(test)), y[test]]).mean())
    pairs = [(a, b) for a in chances[y[test] == 1, 1] for b in chances[y[test] == 0, 1]]
    assert scores["metrics"]["AUC"] == pytest.approx(np.mean([a > b for a, b in pairs]))


def test_the_trees_are_those_of_validation(options: dict[str, Any]) -> None:
    record = baselines.run(plan(options)[2])
    steps = [point["step"] for point in record.history]
    assert steps == list(range(baselines.EVALUATED, baselines.TREES + 1, baselines.EVALUATED))
    held = [point["scores"]["validation"]["domains"].values() for point in record.history]
    assert record.selected == int(np.argmax([sum(each) for each in held]))


def test_what_is_held_out_has_no_part(options: dict[str, Any], tmp_path: Path) -> None:
    """Other labels and ages in the held-out domain change its scores and no others."""
    lines = Path(options["file"]).read_text().splitlines()
    other = [("1.5,red,oslo,yes" if ",oslo," in line else line) for line in lines]
    (tmp_path / "other.csv").write_text("\n".join(other))
    changed = {**options, "file": str(tmp_path / "other.csv")}
    for one, two in zip(plan(options), plan(changed), strict=True):
        before, after = (baselines.run(c).history[-1]["scores"] for c in (one, two))
        assert before["validation"] == after["validation"]
        assert before["train"] == after["train"]
        assert before["test"] != after["test"]


def used(folder: str, data: Any, share: float) -> None:
    """A baseline that is a network is loaded, scored and exported as any, with the outputs of its record."""
    model = shoal.load(folder)
    assert model.record["history"][-1]["scores"]["test"]["average"] == pytest.approx(share)
    found = model.predict_proba(data)
    for file in ("m.pt2", "m.safetensors", *["m.onnx"] * bool(find_spec("onnxruntime"))):
        assert model.export(file).difference < 1e-5
    model.save("copy")
    np.testing.assert_array_equal(shoal.load("copy").predict_proba(data), found)


def test_images_have_a_linear_model_of_a_few_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One domain is held out; classes differ in brightness."""
    image = pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for domain, (number, label) in itertools.product("abcd", enumerate(("dark", "light"))):
        Path("photos", domain, label).mkdir(parents=True)
        for n in range(10):
            pixels = rng.integers(60 * number, 160 + 60 * number, (20, 24, 3)).astype(np.uint8)
            image.fromarray(pixels).save(f"photos/{domain}/{label}/{n}.png")
    size: dict[str, Any] = {"size": 32}
    given: dict[str, Any] = {"held_out": "d", "progress": False, "data_options": size}
    run = shoal.train("logistic-regression", "photos", out="r", **given)
    assert run.record.rule == "best on validation, refitted with the validation data"
    right = shoal.load("r").predict("photos/d") == [*["dark"] * 10, *["light"] * 10]
    assert right.mean() > 0.9
    used("r", "photos/d", right.mean())
    with pytest.raises(InputError, match="gradient-boosting requires a table"):
        shoal.train("gradient-boosting", "photos", out="g", **given)
    few: dict[str, Any] = {"steps": 2, "seeds": 1, "search": 1, "jobs": 1, "progress": False, "device": "cpu"}
    found = shoal.compare("photos", algorithms="erm", data_options=size, out="c", **few)
    scores = found.to_frame()["mean"]
    assert set(scores.index) == {"majority", "logistic-regression", "erm"}
    assert (scores["majority"], found.recommendation.row) == (0.5, "logistic-regression")  # type: ignore[union-attr]
    assert found.refit("model").record["config"]["algorithm"] == "logistic-regression"


def test_text_has_a_linear_model_of_tfidf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of scikit-learn, by hand."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    maker("civilcomments")(tmp_path)
    tokens: dict[str, Any] = {"tokenizer": str(tmp_path / "tiny-bert"), "max_tokens": 16}
    given = {"data_dir": tmp_path, "data_options": tokens, "progress": False}
    run = shoal.train("logistic-regression", "civilcomments", out="r", **given)
    with datasets_in(tmp_path):
        data: Any = sets.load("civilcomments", **tokens)
    examples, rows = data.examples, {split: data.splits[split].examples() for split in data.splits}
    words = [
        " ".join(map(str, examples.loaded(t, truncation=True, max_length=16)["input_ids"]))
        for t, _ in (examples[n] for n in range(len(examples)))
    ]
    y, every = examples.known_labels(), np.array(words)
    vectors = TfidfVectorizer(token_pattern=r"\d+").fit(every[rows["train"]])
    fitted = np.union1d(rows["train"], rows["validation"])
    model: Any = LogisticRegression(max_iter=1000).fit(vectors.transform(every[fitted]), y[fitted])
    shares = model.predict_proba(vectors.transform(every[rows["test"]]))
    texts = [examples[n][0] for n in rows["test"]]
    np.testing.assert_allclose(
        shoal.load("r").probabilities(shoal.load("r").run(texts)[1], False), shares, atol=1e-3
    )
    used("r", texts, (shares.argmax(1) == y[rows["test"]]).mean())
    assert run.record.score("test") > 0.6


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    age, colour = rng.normal(50, 10, 160), rng.choice(["red", "blue"], 160)
    risk = age + 10 * (colour == "red") + rng.normal(0, 4, 160)
    lines = [
        f"{a:.2f},{c},{'abc'[n % 3]},{'yes' if r > 55 else 'no'},{'lmh'[int(r > 50) + int(r > 60)]},{r:.1f}"
        for n, (a, c, r) in enumerate(zip(age, colour, risk, strict=True))
    ]
    Path("t.csv").write_text("\n".join(["age,colour,site,ill,grade,risk", *lines]))
    return {"data": "t.csv", "domain": "site", "held_out": "b", "out": "run", "progress": False}


def of(label: str) -> dict[str, Any]:
    return {"label": label, "drop": [name for name in ("ill", "grade", "risk") if name != label]}


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("logistic-regression", "grade"),
        ("gradient-boosting", "grade"),
        ("ridge-regression", "risk"),
        ("gradient-boosting", "risk"),
    ],
)
def test_trained_used_and_exported_like_any_run(name: str, label: str, table: dict[str, Any]) -> None:
    run = shoal.train(name, **table, **of(label))
    scores, model = run.record.scores["test"], shoal.load("run")
    found = model.predict("t.csv")
    rows = np.array([line.split(",") for line in Path("t.csv").read_text().splitlines()[1:]])
    truth, test = rows[:, {"grade": 4, "risk": 5}[label]], rows[:, 2] == "b"
    if label == "risk":
        error = np.square(found - truth.astype(float))[test].mean()
        assert error == pytest.approx(scores["average"], rel=1e-4)
    else:
        assert (found == truth)[test].mean() == pytest.approx(scores["average"])
        assert model.score("t.csv").overall.rows == 160
    assert run.record.rule == "best on validation, refitted with the validation data"
    assert shoal.train(name, **table, **of(label)).record.scores["test"] == scores  # it is not fitted again
    model.save("copy")
    np.testing.assert_array_equal(shoal.load("copy").predict("t.csv"), found)
    session = pytest.importorskip("onnxruntime").InferenceSession(str(model.export("m.onnx").path))
    inputs = {"age": rows[:, :1].astype(float), "colour": rows[:, 1:2].astype(object)}
    if label == "risk":
        np.testing.assert_allclose(session.run(["prediction"], inputs)[0], found, rtol=1e-5)
    else:
        answers = session.run(["label", "probabilities"], inputs)
        assert answers[0].tolist() == found.tolist()
        np.testing.assert_allclose(answers[1], model.predict_proba("t.csv"), atol=1e-6)
    if name == "gradient-boosting":
        with pytest.raises(InputError, match=r"^format: a gradient-boosting model can only be exported"):
            model.export("m.safetensors")
    else:
        assert model.export("m.safetensors").difference < 1e-5
    with pytest.raises(InputError, match="not the finished training of a network"):
        shoal.soup(["run", "copy"])


@pytest.mark.parametrize("name", ["majority", "logistic-regression", "gradient-boosting"])
def test_classes_without_training_rows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng, domains = np.random.default_rng(0), np.repeat(["a", "b", "c", "d"], 40)
    for present in ((0, 2, 3), (1, 3), (2,)):
        x, y = rng.normal(size=(160, 3)), np.array(present)[np.arange(160) % len(present)]
        y[120:] = np.arange(40) % 4  # of the held-out domain
        out: dict[str, Any] = {"held_out": "d", "out": f"run{len(present)}", "progress": False}
        shoal.train(name, (x, y, domains), calibrate=False, **out)
        model = shoal.load(out["out"])
        shares = model.predict_proba(torch.tensor(x, dtype=torch.float32))
        assert shares.shape == (160, 4)
        assert shares[:, [c for c in range(4) if c not in present]].max() <= 1.001e-12
        if name == "majority":
            np.testing.assert_allclose(shares[0, list(present)], 1 / len(present), atol=0.02)
        elif name == "logistic-regression" and len(present) == 2:
            assert model.export("m.onnx").difference < 1e-6


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("gradient-boosting", {"settings": {"depth": 3}}, "depth"),
        ("gradient-boosting", {"settings": {"learning_rate": -1}}, "learning_rate"),
        ("logistic-regression", {"lr": 0.1}, "^lr: "),
        ("ridge-regression", {}, "does not predict classes"),
        ("gradient-bosting", {}, "Did you mean 'gradient-boosting'"),
    ],
)
def test_what_cannot_be_is_named(name: str, options: Any, says: str, table: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=says):
        shoal.train(name, **table, **of("ill"), **options)
    assert not Path("run").exists()


def test_damaged_files_are_refused(table: dict[str, Any]) -> None:
    shoal.train("gradient-boosting", **table, **of("ill"))
    path = Path("run/model.txt")
    content, record = path.read_text(), json.loads(Path("run/record.json").read_text())
    path.write_text(content.replace("1", "2", 1))
    with pytest.raises(InputError, match="its content has changed"):
        shoal.load("run")
    Path("run/record.json").write_text(json.dumps({**record, "files": {}}))
    odd = content.replace("left_child=", "left_child=0 ")
    for text in ("", "{", content[: len(content) // 2], odd):
        path.write_text(text)
        with pytest.raises(InputError, match="is damaged"):
            shoal.load("run")
