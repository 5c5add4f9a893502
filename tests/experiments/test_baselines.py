"""Baselines as models: what scikit-learn fitted is loaded, used and exported as any other network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import shoal
from shoal.errors import InputError
from shoal.experiments import baselines
from shoal.experiments.config import RunConfig
from shoal.models import build


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


# Trained as any algorithm


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    age, colour = draw.normal(50, 10, 160), draw.choice(["red", "blue"], 160)
    risk = age + 10 * (colour == "red") + draw.normal(0, 4, 160)
    lines = [
        f"{a:.2f},{c},{'abc'[n % 3]},{'yes' if r > 55 else 'no'},{r:.1f}"
        for n, (a, c, r) in enumerate(zip(age, colour, risk, strict=True))
    ]
    Path("t.csv").write_text("\n".join(["age,colour,site,ill,risk", *lines]))
    own = {"data": "t.csv", "domain": "site", "held_out": "b", "label": "ill", "drop": ["risk"]}
    return {**own, "out": "run", "progress": False}


@pytest.mark.parametrize(
    "name", ["majority", "logistic-regression", "gradient-boosting", "ridge-regression", "regression trees"]
)
def test_trained_used_and_exported_like_any_run(name: str, table: dict[str, Any]) -> None:
    pytest.importorskip("sklearn")
    numbers = name in ("ridge-regression", "regression trees")
    table |= {"label": "risk", "drop": ["ill"]} if numbers else {}
    name = baselines.BOOSTING if name == "regression trees" else name
    scores = shoal.train(name, **table).record.chosen["test"]
    model = shoal.load("run")
    found = model.predict("t.csv")
    rows = np.array([line.split(",") for line in Path("t.csv").read_text().splitlines()[1:]])
    test = rows[:, 2] == "b"
    truth = rows[test, 4].astype(float) if numbers else rows[test, 3]
    if numbers:
        error = np.square(found[test] - truth).mean()
        assert error == pytest.approx(scores["average"], rel=1e-4)
    else:
        assert (found[test] == truth).mean() == pytest.approx(scores["average"])
    assert shoal.train(name, **table).record.chosen["test"] == scores
    shoal.export("run", "m.pt2", format="torch-export")
    assert Path("m.pt2").exists()


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("gradient-boosting", {"settings": {"depth": 3}}, "depth"),
        ("gradient-boosting", {"settings": {"learning_rate": -1}}, "learning_rate"),
        ("majority", {"settings": {"C": 1}}, "'C'"),
        ("logistic-regression", {"lr": 0.1}, "^lr: "),
        ("ridge-regression", {}, "does not predict classes"),
        ("gradient-bosting", {}, "Did you mean 'gradient-boosting'"),
        ("majority", {"data": "rotated-digits", "label": None, "domain": None, "drop": None}, ""),
    ],
)
def test_what_cannot_be_is_named(name: str, options: Any, says: str, table: dict[str, Any]) -> None:
    pytest.importorskip("sklearn")
    with pytest.raises(InputError, match=says):
        shoal.train(name, **table | options)
    assert not Path("run").exists()


def test_without_scikit_learn(table: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "lacking", lambda: "needs scikit-learn: pip install 'shoal[sklearn]'")
    with pytest.raises(InputError, match="logistic-regression needs scikit-learn"):
        shoal.train("logistic-regression", **table)
    assert shoal.train("majority", **table).finished


def test_damaged_trees_of_a_run_are_refused(table: dict[str, Any]) -> None:
    pytest.importorskip("sklearn")
    shoal.train("gradient-boosting", **table)
    weights = load_file("run/model.safetensors")
    weights["features.right"][0] = 0
    save_file(weights, "run/model.safetensors")
    with pytest.raises(InputError, match="damaged"):
        shoal.load("run")
