"""Baselines as models: what scikit-learn fitted is loaded, used and exported as any other network."""

from __future__ import annotations

import importlib.util
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import shoal
from shoal.cli import main
from shoal.errors import InputError
from shoal.experiments import baselines, compare
from shoal.experiments.config import RunConfig
from shoal.models import build
from shoal.trained import train_command

Captured = pytest.CaptureFixture[str]


def fitted(name: str, x: Any, y: Any, classes: int | None, **chosen: Any) -> baselines.Fitted:
    return baselines._fit(RunConfig("table", name, 1, settings=chosen), x, y, classes)


def applied(network: torch.nn.Module, x: Any) -> Any:
    with torch.no_grad():
        return network(torch.from_numpy(x)).double()


def made_up(seed: int, classes: int | None, rows: int = 150, width: int = 4) -> tuple[Any, Any]:
    """Numbers of all sizes, many of them equal, so that values lie on thresholds."""
    draw = np.random.default_rng(seed)
    x = (np.round(draw.normal(size=(rows, width)), 1) * 10.0 ** draw.integers(-3, 4, width)).astype(
        np.float32
    )
    score = x[:, 0] / np.abs(x[:, 0]).max() + draw.normal(0, 0.3, rows)
    if classes is None:
        return x, score.astype(np.float32)
    return x, np.searchsorted(np.quantile(score, np.linspace(0, 1, classes + 1)[1:-1]), score)


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 10**6), st.sampled_from([None, 2, 3, 5]), st.sampled_from([baselines.BOOSTING, "linear"])
)
def test_the_network_is_what_scikit_learn_fitted(seed: int, classes: int | None, name: str) -> None:
    pytest.importorskip("sklearn")
    if name == "linear":
        name = baselines.RIDGE if classes is None else baselines.LOGISTIC
    x, y = made_up(seed, classes)
    kept = fitted(name, x, y, classes)
    steps = [step for step, _ in kept.outputs(x)]
    for step, outputs in kept.outputs(x):
        if step not in (steps[0], steps[-1]):
            continue
        found = applied(kept.network(step), x)
        if classes is None:
            np.testing.assert_allclose(found.numpy(), outputs, atol=1e-5)
            continue
        wanted = np.exp(outputs)
        np.testing.assert_allclose(found.softmax(1).numpy(), wanted, atol=1e-6)
        clear = np.diff(np.sort(wanted, 1)[:, -2:], axis=1)[:, 0] > 1e-6
        assert (found.argmax(1).numpy() == wanted.argmax(1))[clear].all()


@pytest.mark.parametrize("name", [baselines.BOOSTING, baselines.LOGISTIC, baselines.MAJORITY])
@pytest.mark.parametrize("present", [(0, 2, 3), (1, 3), (2,)])
def test_classes_that_no_training_example_has(name: str, present: tuple[int, ...]) -> None:
    pytest.importorskip("sklearn")
    x, y = made_up(0, len(present))
    kept = fitted(name, x, np.array(present)[y], 4)
    ((step, outputs),) = list(kept.outputs(x))[-1:]
    found = applied(kept.network(step), x).softmax(1).numpy()
    assert found.shape == (len(x), 4)
    np.testing.assert_allclose(found[:, present], np.exp(outputs)[:, present], atol=1e-6)
    absent = [c for c in range(4) if c not in present]
    assert found[:, absent].max() <= baselines.LEAST


def test_the_majority() -> None:
    x, y = np.zeros((10, 2), np.float32), np.array([0] * 3 + [1] * 5 + [2] * 2)
    kept = fitted(baselines.MAJORITY, x, y, 3)
    np.testing.assert_allclose(applied(kept.network(1), x).softmax(1)[0], [0.3, 0.5, 0.2], atol=1e-6)
    kept = fitted(baselines.MAJORITY, x, y.astype(np.float32), None)
    np.testing.assert_allclose(applied(kept.network(1), x), [0.9] * 10, atol=1e-6)
    assert set(baselines.CONTROLS) < set(baselines.names(2)) & set(baselines.names(None))


def test_small_tables_get_every_round_of_scikit_learns_own_fit() -> None:
    ensemble = pytest.importorskip("sklearn.ensemble")
    x, y = made_up(3, 3)
    kept = fitted(baselines.BOOSTING, x, y, 3)
    assert not kept.note
    plain = ensemble.HistGradientBoostingClassifier(max_iter=baselines.TREES, early_stopping=False).fit(x, y)
    assert np.array_equal(kept.model.predict_proba(x), plain.predict_proba(x))


def test_large_tables_get_fewer_rounds_by_count(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    x, y = made_up(4, 2)
    work = baselines._work(fitted(baselines.BOOSTING, x, y, 2).model)
    monkeypatch.setattr(baselines, "WORK", work // 3)
    kept = fitted(baselines.BOOSTING, x, y, 2)
    steps = [step for step, _ in kept.outputs(x)]
    assert steps[:-1] == [20, 40, 60]
    assert 60 < steps[-1] < 80
    assert kept.note == f"{steps[-1]} rounds instead of 200, for a table of this size"
    again = fitted(baselines.BOOSTING, x, y, 2)
    assert np.array_equal(again.model.predict_proba(x), kept.model.predict_proba(x))
    monkeypatch.setattr(baselines, "SECONDS", 0.0)
    kept = fitted(baselines.BOOSTING, x, y, 2)
    assert [step for step, _ in kept.outputs(x)] == [baselines.LOOK]
    assert "on this machine" in kept.note


# Trees that come from anybody


def ensemble() -> torch.nn.Module:
    """x₀ ≤ 1 → 5; else x₁ ≤ 2 → 6 or 7; and a tree that is one leaf."""
    network = build("tree-ensemble", input_shape=(2,), classes=None, seed=0, nodes=6, trees=2, scores=1)
    network.load_state_dict(parts())
    return network


def parts() -> dict[str, torch.Tensor]:
    return {
        "features.roots": torch.tensor([0, 5]),
        "features.feature": torch.tensor([0, 0, 1, 0, 0, 0]),
        "features.threshold": torch.tensor([1.0, 0, 2, 0, 0, 0]),
        "features.left": torch.tensor([1, 1, 3, 3, 4, 5]),
        "features.right": torch.tensor([2, 1, 4, 3, 4, 5]),
        "features.value": torch.tensor([0.0, 5, 0, 6, 7, 0.5]),
        "head.0.weight": torch.ones(1, 1),
        "head.0.bias": torch.zeros(1),
    }


def test_trees_by_hand() -> None:
    x = np.array([[1, 9], [1.0001, 2], [3, 2.5]], np.float32)
    assert applied(ensemble(), x).tolist() == [5.5, 6.5, 7.5]


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("left", 0, 6, "'left' has a number that is out of range"),
        ("right", 2, 0, "'right' has a number that is out of range"),  # back to the root, for ever
        ("right", 0, -1, "'right' has a number that is out of range"),
        ("roots", 1, 6, "'roots' has a number that is out of range"),
        ("feature", 2, 2, "'feature' has a number that is out of range"),
        ("left", 1, 2, "only one child"),
        ("threshold", 0, float("nan"), "'threshold' has a number that is not finite"),
        ("value", 1, float("inf"), "'value' has a number that is not finite"),
    ],
)
def test_damaged_trees_are_refused(name: str, place: int, value: Any, message: str) -> None:
    damaged = parts()
    damaged[f"features.{name}"][place] = value
    with pytest.raises(InputError, match=message):
        ensemble().load_state_dict(damaged)


def test_trees_without_an_end_are_refused() -> None:
    count = 4003
    network = build("tree-ensemble", input_shape=(1,), classes=None, seed=0, nodes=count, trees=1, scores=1)
    state = network.state_dict()
    inner = torch.arange(0, count - 2, 2)
    state["features.left"][inner], state["features.right"][inner] = inner + 1, inner + 2
    with pytest.raises(InputError, match="deeper than 1,000 levels"):
        network.load_state_dict(state)


@pytest.mark.parametrize(
    "sizes", [{}, {"nodes": 2, "trees": 3, "scores": 2}, {"nodes": 5, "trees": 10**9, "scores": 1}]
)
def test_sizes_that_cannot_be(sizes: dict[str, int]) -> None:
    with pytest.raises(InputError, match="tree-ensemble"):
        build("tree-ensemble", input_shape=(2,), classes=None, seed=0, **sizes)


# From the command line


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    age, colour = draw.normal(50, 10, 160), draw.choice(["red", "blue"], 160)
    risk = age + 10 * (colour == "red") + draw.normal(0, 4, 160)
    lines = [
        f"{a:.2f},{c},{'abc'[n % 3]},{'yes' if r > 55 else 'no'},{r:.1f}"
        for n, (a, c, r) in enumerate(zip(age, colour, risk, strict=True))
    ]
    Path("t.csv").write_text("\n".join(["age,colour,site,ill,risk", *lines]))
    return ["t.csv", "--domain", "site", "--held-out", "b"]


@pytest.mark.parametrize(
    "name", ["majority", "logistic-regression", "gradient-boosting", "ridge-regression", "regression trees"]
)
def test_trained_used_and_exported_like_any_run(name: str, table: list[str], capsys: Captured) -> None:
    pytest.importorskip("sklearn")
    numbers = name in ("ridge-regression", "regression trees")
    name = baselines.BOOSTING if name == "regression trees" else name
    label = ["--label", "risk", "--drop", "ill"] if numbers else ["--label", "ill", "--drop", "risk"]
    command = ["train", name, *table, *label, "--out", "run", "--json"]
    assert main(command) == 0
    record = json.loads(capsys.readouterr().out)
    made = {p.name for p in Path("run").iterdir()}
    assert {
        "model.safetensors",
        "inputs.json",
        "record.json",
        "config.yaml",
        "card.md",
        "metrics.jsonl",
    } <= made
    model = shoal.load("run")
    found = model.predict("t.csv")
    rows = np.array([line.split(",") for line in Path("t.csv").read_text().splitlines()[1:]])
    test = rows[:, 2] == "b"
    truth = rows[test, 4].astype(float) if numbers else rows[test, 3]
    scores = record["history"][record["selected"]]["scores"]["test"]
    if numbers:
        error = np.square(found[test] - truth).mean() / model.inputs["label"]["scale"] ** 2
        assert error == pytest.approx(scores["average"], rel=1e-4)
    else:
        assert (found[test] == truth).mean() == pytest.approx(scores["average"])
    assert "batch size" not in Path("run/card.md").read_text()
    for other in (["show", "run"], ["results", "run"], ["resume", "run"], ["predict", "run", "t.csv"]):
        assert main(other) == 0, other
    assert main(command[:-1]) == 0  # it is there, and shown again
    shown = capsys.readouterr().out
    assert f"{name} on table" in shown
    assert main(["export", "run", "--format", "torch-export", "--out", "m.pt2"]) == 0
    if importlib.util.find_spec("onnxruntime") and importlib.util.find_spec("onnxscript"):
        assert main(["export", "run", "--out", "m.onnx"]) == 0
        assert "The inputs are 2 raw columns" in capsys.readouterr().out


def test_the_command_of_a_comparisons_record(table: list[str], capsys: Captured) -> None:
    """It trains the same model again, with weights this time."""
    pytest.importorskip("sklearn")
    options = {"file": "t.csv", "label": "ill", "domain": "site", "drop": ["risk"], "test": "b"}
    base = RunConfig("table", "erm", 77, data_options=options)
    for planned in compare.plan(base, baselines.names(2), ["b"], [0], 2):
        config = replace(planned, data_options=options)
        command = train_command(config)
        assert "--steps" not in command
        assert "--lr" not in command
        assert main([*shlex.split(command)[1:], "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["history"] == json.loads(json.dumps(baselines.run(config).history))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            ["gradient-boosting", "--set", "depth=3"],
            "unknown setting of gradient-boosting: 'depth'. Known: l2_reg",
        ),
        (
            ["gradient-boosting", "--set", "learning_rate=-1"],
            "learning_rate of gradient-boosting must be a number above 0 and at most 1e+06, got -1",
        ),
        (["majority", "--set", "C=1"], "unknown setting of majority: 'C'. Known: none."),
        (
            ["logistic-regression", "--lr", "0.1"],
            "--lr is an option of neural networks, and logistic-regression is",
        ),
        (["majority", "--seeds", "3"], "--seeds is an option of neural networks"),
        (
            ["ridge-regression"],
            "ridge-regression does not predict classes; use majority or logistic-regression or gr",
        ),
        (["gradient-bosting"], "Did you mean 'gradient-boosting'?"),
    ],
)
def test_what_cannot_be_is_one_line(more: list[str], says: str, table: list[str], capsys: Captured) -> None:
    pytest.importorskip("sklearn")
    algorithm, *options = more
    assert main(["train", algorithm, *table, "--label", "ill", "--out", "run", *options]) == 2
    assert says in capsys.readouterr().err.splitlines()[-1]  # after the column report
    assert not Path("run").exists()


def test_pictures_are_not_rows_of_numbers(capsys: Captured, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    out = str(tmp_path / "run")
    assert main(["train", "majority", "rotated-digits", "--out", out]) == 2
    assert "requires tabular data" in capsys.readouterr().err


def test_without_scikit_learn(table: list[str], capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "lacking", lambda: "needs scikit-learn: pip install 'shoal[sklearn]'")
    assert main(["train", "logistic-regression", *table, "--label", "ill"]) == 2
    assert "logistic-regression needs scikit-learn" in capsys.readouterr().err
    assert main(["train", "majority", *table, "--label", "ill", "--out", "run"]) == 0


def test_a_strangers_trees_are_one_line(table: list[str], capsys: Captured) -> None:
    pytest.importorskip("sklearn")
    assert main(["train", "gradient-boosting", *table, "--label", "ill", "--out", "run"]) == 0
    weights = load_file("run/model.safetensors")
    weights["features.right"][0] = 0
    save_file(weights, "run/model.safetensors")
    capsys.readouterr()
    assert main(["predict", "run", "t.csv"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the trees are damaged" in line


def test_they_are_listed(capsys: Captured) -> None:
    assert main(["list", "algorithms"]) == 0
    assert "majority, logistic-regression, ridge-regression, gradient-boosting" in capsys.readouterr().out
    assert main(["list", "algorithms", "gradient-boosting"]) == 0
    assert "learning_rate=0.1" in capsys.readouterr().out
