"""What is measured along the way, and which step is selected by it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score, roc_auc_score
from torch import nn

import shoal
from shoal.data import DomainData, Domains, Task, TensorData
from shoal.training.evaluate import Evaluator, Scores
from shoal.training.metrics import METRICS, metric


def network(outputs: int = 3, *between: nn.Module) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 16), *between, nn.ReLU(), nn.Linear(16, outputs))


def example_data(classes: int | None = 3, measures: tuple[str, ...] = ()) -> Any:
    """Three splits of 40 examples; in the test split groups overlap, and one does not count."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(120, 4)).astype(np.float32)
    noisy = x @ draw.normal(size=4) + 0.5 * draw.normal(size=120)
    y: Any = noisy.astype(np.float32)[:, None]
    if classes is not None:
        y = np.digitize(noisy, np.quantile(noisy, np.arange(1, classes) / classes))
    train, validation, test = np.split(draw.permutation(120), 3)
    splits = {
        "train": Domains.from_indices({"a": train[:20], "b": train[20:]}),
        "validation": Domains.from_indices({"a": validation[:10], "b": validation[10:]}),
        "test": Domains.from_indices({"c": test[:30], "d": test[20:], "e": test[:3]}),
    }
    examples = TensorData(torch.from_numpy(x), torch.from_numpy(y))
    own: dict[str, Any] = {"metrics": measures, "excluded_groups": frozenset("e"), "input_shape": (4,)}
    return DomainData(examples, splits, classes=classes, model="mlp", **own)


def fit(model: nn.Module, data: DomainData, **options: Any) -> shoal.Fit:
    given = {"steps": 6, "batch_size": 8, "eval_every": 1, "device": "cpu", "progress": False} | options
    return shoal.fit("erm", model, data, **given)


# What is measured


@pytest.mark.parametrize("batch", [7, 1000])
def test_metrics_are_those_of_the_model_s_predictions(batch: int) -> None:
    data, model = example_data(), network()
    names = ["worst-group accuracy", "10th-percentile accuracy", "macro F1", "AUC", "accuracy"]
    options: dict[str, Any] = {"metrics": [metric(n) for n in names], "selects": METRICS["AUC"]}
    options |= {"batch_size": batch, "excluded_groups": data.excluded_groups}
    found = Evaluator(data.examples, data.splits, Task(2, 3), **options)(model)
    y, logits = data.examples.y.numpy(), model(data.examples.x).detach().numpy()
    for split, domains in data.splits.items():
        which, hits = domains.examples(), logits.argmax(1) == y
        parts = {n: hits[domains.indices_of(g)].mean() for g, n in enumerate(domains.names)}
        counted = [v for n, v in parts.items() if n != "e"]
        p = torch.tensor(logits[which]).double().softmax(1)
        assert found[split].more == pytest.approx(
            {
                "worst-group accuracy": min(counted),
                "10th-percentile accuracy": np.percentile(counted, 10),
                "macro F1": f1_score(y[which], logits[which].argmax(1), average="macro"),
                "AUC": roc_auc_score(y[which], p, multi_class="ovr"),
                "accuracy": hits[which].mean(),
            },
            rel=1e-6,
        )
        assert found[split]["AUC"] == found[split].selection_score == found[split].more["AUC"]
        assert dict(zip(found[split].names, found[split].values, strict=True)) == pytest.approx(parts)


def test_scores_do_not_depend_on_who_is_in_a_batch() -> None:
    """No statistics of test batches."""
    data = example_data()
    model = network(3, nn.BatchNorm1d(16), nn.Dropout(0.5)).train()
    with torch.no_grad():
        model(3 + 2 * torch.randn(64, 4, generator=torch.Generator().manual_seed(1)))  # unlike the data
    found = []
    for size in (1, 7, 200):
        every = Evaluator(data.examples, data.splits, Task(2, 3), batch_size=size, metrics=[metric("AUC")])
        found.append({name: (s.average, s.values, dict(s.more)) for name, s in every(model).items()})
    assert found[0] == found[1] == found[2]
    assert model.training


def test_of_a_sample_the_average_is_over_all_examples_and_what_selects_over_domains() -> None:
    """Domain a has 300 examples, b has 30; the model is right on b alone."""
    y = torch.cat([torch.zeros(300), torch.ones(30)]).long()
    domains = Domains.from_sizes({"a": 300, "b": 30})
    model = nn.Linear(1, 2)
    nn.init.zeros_(model.weight)
    model.bias.data[:] = torch.tensor([0.0, 1.0])
    data = TensorData(torch.ones(330, 1), y)
    for limits in ({}, {"test": 40}):
        found = Evaluator(data, {"test": domains}, Task(2, 2), limits=limits)(model)["test"]
        assert found.sizes == ((20, 20) if limits else (300, 30))
        assert found.sampled == ((40, 330) if limits else None)
        assert (found.average, found.selection_score) == pytest.approx((30 / 330, 0.5))


@pytest.mark.parametrize(("size", "own"), [(7, False), (1, True), (1000, True)])
def test_the_loss_is_a_mean_over_domains(size: int, own: bool) -> None:
    """Also of a loss that Shoal knows nothing of, whatever is in a batch."""
    data, model = example_data(), network()
    loss = (lambda output, y: nn.functional.cross_entropy(output, y)) if own else nn.CrossEntropyLoss()
    disjoint = {"test": Domains.from_sizes({"a": 5, "b": 95})}
    found = Evaluator(data.examples, disjoint, Task(2, 3), loss=loss, batch_size=size)(model)["test"]
    with torch.no_grad():
        each = nn.functional.cross_entropy(model(data.examples.x), data.examples.y, reduction="none")
    assert found.loss == pytest.approx(float(each[:5].mean() + each[5:100].mean()) / 2, rel=1e-6)


# What selects


class Scripted:
    """A metric with given values, one per evaluation of three splits."""

    def __init__(self, *values: float, higher: bool = True) -> None:
        self.values = [v for v in values for _ in range(3)]
        self.higher_is_better = higher

    def __call__(self, output: Any, y: Any, groups: Domains) -> float:
        return self.values.pop(0)


@pytest.mark.parametrize(
    ("values", "higher", "step"),
    [
        ((0.1, 0.9, 0.3, 0.2, 0.9, 0.0), True, 2),
        ((0.5, 0.4, 0.7, 0.1, 0.2, 0.3), False, 4),
        ((math.nan, 0.1, math.nan, 0.3, 0.2, math.nan), True, 4),
        ((math.nan, 0.3, 0.1, math.nan, 0.2, math.nan), False, 3),
        ((math.nan,) * 6, True, 1),
    ],
)
def test_the_best_is_the_best_by_the_metric(values: tuple[float, ...], higher: bool, step: int) -> None:
    run = fit(network(), example_data(), metric=Scripted(*values, higher=higher))
    assert run.selected.step == step
    assert run.rule == "best on validation by Scripted"
    again = fit(network(), example_data(), steps=step, select="last")
    torch.testing.assert_close(run.model.state_dict(), again.model.state_dict(), rtol=0, atol=0)


@given(st.permutations([math.nan, 0.4, 0.8]))
def test_domains_count_equally_and_one_without_a_score_not_at_all(values: list[float]) -> None:
    def scores(metric: str, *values: float) -> Scores:
        return Scores(metric, tuple("abc"[: len(values)]), values, (1, 99, 5)[: len(values)], 0.5)

    found = scores("accuracy", *values)
    assert (found.selection_score, found.worst) == pytest.approx((0.6, 0.4))
    assert scores("accuracy", 0.9, 0.2).better_than(scores("accuracy", 0.1, 0.9))
    assert math.isnan(scores("accuracy", math.nan, math.nan).worst)
    lost = scores("mse", *values)  # outputs that are not finite
    assert math.isnan(lost.worst)
    assert scores("mse", 9.0, 9.0).better_than(lost)


@pytest.mark.parametrize("classes", [3, None])
def test_predictions_are_of_the_selected_weights_in_order_of_index(
    tmp_path: Path, classes: int | None
) -> None:
    data = example_data(classes)
    options = {"predictions": "mine", "eval_limit": 10, "seed": 3}
    run = fit(network(classes or 1), data, folder=tmp_path, **options)
    names = {split: f"mine_split:{split}_seed:3_epoch:best_pred.csv" for split in ("test", "val")}
    assert {p.name for p in (tmp_path / "predictions").iterdir()} == set(names.values())
    with torch.inference_mode():
        output = run.model(data.examples.x).numpy()
    for split, name in names.items():
        which = np.unique(data.splits[split.replace("val", "validation")].indices)
        expected = output[which].argmax(1) if classes else output[which, 0]
        np.testing.assert_allclose(np.loadtxt(tmp_path / "predictions" / name), expected, rtol=1e-5)
