"""What is measured along the way, and what a training is judged by."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score
from torch import Tensor, nn
from torch.utils.data import ConcatDataset

import shoal
from shoal.data import DomainData, Domains, Examples, Task, TensorData
from shoal.errors import InputError
from shoal.training import predictions
from shoal.training.evaluate import Evaluator, Scores
from shoal.training.metrics import METRICS, metric
from shoal.training.predictions import Named
from shoal.training.progress import scores_note


def network(outputs: int = 3, *between: nn.Module) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 16), *between, nn.ReLU(), nn.Linear(16, outputs))


def example_data(classes: int | None = 3, measures: tuple[str, ...] = (), seed: int = 0) -> DomainData:
    """Three splits of 200 examples; in the test split groups overlap, and one does not count."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(600, 4)).astype(np.float32)
    noisy = x @ draw.normal(size=4) + 0.5 * draw.normal(size=600)
    y: Any = noisy.astype(np.float32)[:, None]
    if classes is not None:
        y = np.digitize(noisy, np.quantile(noisy, np.arange(1, classes) / classes))
    order = draw.permutation(600)
    train, validation, test = order[:200], order[200:400], order[400:]
    splits = {
        "train": Domains.from_indices({"a": train[:100], "b": train[100:]}),
        "validation": Domains.from_indices({"a": validation[:50], "b": validation[50:]}),
        "test": Domains.from_indices({"c": test[:150], "d": test[100:], "e": test[:3]}),
    }
    return DomainData(
        TensorData(torch.from_numpy(x), torch.from_numpy(y)),
        splits,
        classes=classes,
        input_shape=(4,),
        model="mlp",
        measures=measures,
        uncounted=frozenset(["e"]),
    )


def fit(model: nn.Module, data: DomainData, **options: Any) -> shoal.Fit:
    given = {"steps": 6, "batch_size": 8, "eval_every": 1, "device": "cpu", "progress": False} | options
    return shoal.fit("erm", model, data, **given)


class Scripted:
    """A metric that says what it was told to, once an evaluation of three splits."""

    def __init__(self, *values: float, higher: bool = True) -> None:
        self.values = [v for v in values for _ in range(3)]
        self.higher_is_better = higher

    def __call__(self, output: Any, y: Any, groups: Domains) -> float:
        return self.values.pop(0)


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_measures_are_those_of_what_the_model_predicts(batch: int) -> None:
    data = example_data()
    model = network()
    names = ["worst-group accuracy", "10th-percentile accuracy", "macro F1", "AUC", "accuracy"]
    found = Evaluator(
        data.examples,
        data.splits,
        task=Task(2, 2),
        batch_size=batch,
        metrics=[metric(n) for n in names],
        selects=METRICS["AUC"],
        uncounted=data.uncounted,
    )(model)
    x, y = data.examples.x, data.examples.y.numpy()  # type: ignore[attr-defined]
    logits = model(x).detach().numpy()
    for split, domains in data.splits.items():
        which = domains.examples()
        hits = logits.argmax(1) == y
        parts = {n: hits[domains.indices_of(g)].mean() for g, n in enumerate(domains.names)}
        counted = [v for n, v in parts.items() if n != "e"]
        expected = {
            "worst-group accuracy": min(counted),
            "10th-percentile accuracy": np.percentile(counted, 10),
            "macro F1": f1_score(y[which], logits[which].argmax(1), average="macro"),
            "AUC": roc_auc_score(
                y[which], torch.tensor(logits[which]).double().softmax(1), multi_class="ovr"
            ),
            "accuracy": hits[which].mean(),
        }
        assert found[split].more == pytest.approx(expected, rel=1e-6)
        assert found[split]["AUC"] == found[split].judged == found[split].more["AUC"]
        assert dict(zip(found[split].names, found[split].values, strict=True)) == pytest.approx(parts)


def test_only_what_metrics_need_is_kept() -> None:
    data = example_data()

    def kept(*names: str) -> list[Any]:
        asked = []

        class Watched(Evaluator):
            def _pass(self, model: nn.Module, wanted: Any) -> Any:
                asked.append(list(wanted))
                return super()._pass(model, wanted)

        every = [metric(n) for n in names]
        evaluator = Watched(data.examples, data.splits, task=Task(2, 2), metrics=every)
        evaluator(network())
        evaluator(network())
        return asked

    assert kept() == [[], []]
    assert kept("accuracy", "worst-group accuracy", "loss") == [[], []]
    assert kept("macro F1") == [["class", "y"], ["class"]]
    assert kept("AUC", "accuracy") == [["output", "y"], ["output"]]


@pytest.mark.parametrize("names", [("macro F1", "AUC"), ()])
def test_scores_do_not_depend_on_who_is_in_a_batch(names: tuple[str, ...]) -> None:
    """No statistics of test batches: not with another batch size, nor with examples in another order."""
    data = example_data()
    model = network(3, nn.BatchNorm1d(16), nn.Dropout(0.5)).train()
    with torch.no_grad():
        model(3 + 2 * torch.randn(64, 4, generator=torch.Generator().manual_seed(1)))  # unlike the data
    x, y = data.examples.x, data.examples.y  # type: ignore[attr-defined]
    turned = np.random.default_rng(0).permutation(len(y))
    place = np.argsort(turned)
    other = TensorData(x[turned], y[turned])
    splits = {
        split: Domains.from_indices({n: place[d.indices_of(g)] for g, n in enumerate(d.names)})
        for split, d in data.splits.items()
    }

    def scores(examples: Any, where: Any, size: int) -> Any:
        every = [metric(n) for n in names]
        found = Evaluator(examples, where, task=Task(2, 2), batch_size=size, metrics=every)(model)
        return {split: (s.average, s.values, dict(s.more)) for split, s in found.items()}

    alone = scores(data.examples, data.splits, 1)
    assert scores(data.examples, data.splits, 200) == alone
    assert scores(data.examples, data.splits, 3) == alone
    assert scores(other, splits, 7) == alone
    assert model.training


def test_regression_is_judged_by_correlation() -> None:
    data = example_data(None, ("worst-group Pearson r", "Pearson r", "mse"))
    run = fit(network(1), data)
    at = run.scores("test")
    output, y = run.model(data.examples.x).detach().numpy()[:, 0], data.examples.y.numpy()[:, 0]  # type: ignore[attr-defined]
    domains = data.splits["test"]
    rs = [np.corrcoef(output[p], y[p])[0, 1] for p in (domains.indices_of(0), domains.indices_of(1))]
    assert at.more["worst-group Pearson r"] == pytest.approx(min(rs), rel=1e-5)
    which = domains.examples()
    assert at.more["Pearson r"] == pytest.approx(np.corrcoef(output[which], y[which])[0, 1], rel=1e-5)
    assert at.more["mse"] == pytest.approx(at.average)
    assert run.rule == "best on validation by worst-group Pearson r"
    judged = [p.scores["validation"].judged for p in run.history]
    assert run.selected.scores["validation"].judged == max(judged)
    assert "worst-group Pearson r" in repr(run)


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


def test_patience_waits_for_the_metric() -> None:
    script = Scripted(0.1, 0.5, 0.4, math.nan, 0.3, 0.9)
    run = fit(network(), example_data(), metric=script, patience=3)
    assert [p.step for p in run.history] == [1, 2, 3, 4, 5]
    assert run.selected.step == 2


def test_a_plateau_is_one_of_the_metric() -> None:
    script = Scripted(0.1, 0.2, 0.15, 0.15, 0.15, 0.15, 0.15, *[0.0] * 6)
    run = fit(network(), example_data(), metric=script, warm_start="plateau", batch_size=100)
    assert len(run.warm_up) == 7
    assert run.warm_up[1].scores["validation"].judged == 0.2


def test_swad_keeps_to_the_loss() -> None:
    options: dict[str, Any] = {"average": "swad", "steps": 60, "lr": 0.1}
    plain = fit(network(), example_data(), **options)
    judged = fit(network(), example_data(), metric="AUC", **options)
    assert "swad of steps" in plain.rule
    assert plain.rule == judged.rule
    torch.testing.assert_close(plain.model.state_dict(), judged.model.state_dict(), rtol=0, atol=0)


def test_the_datasets_first_measure_selects_unless_another_is_asked_for() -> None:
    data = example_data(measures=("macro F1", "accuracy"))
    run = fit(network(), data)
    assert (run.rule, run.scores().selects) == ("best on validation by macro F1", "macro F1")
    assert list(run.scores().more) == ["macro F1", "accuracy"]
    run = fit(network(), data, metric="loss")
    assert (run.rule, run.scores().selects) == ("best on validation by loss", "loss")
    assert run.scores().more["loss"] == run.scores().loss
    assert run.selected.scores["validation"].loss == min(p.scores["validation"].loss for p in run.history)  # type: ignore[type-var]


def test_without_a_metric_all_is_as_it_was() -> None:
    run = fit(network(), example_data())
    assert run.rule == "best on validation"
    written = run.scores().to_dict()
    assert list(written) == ["metric", "average", "mean", "loss", "domains", "sizes"]
    assert Scores.from_dict(written) == run.scores()  # as records of before have it
    named = fit(network(), example_data(), metric="accuracy")
    assert named.selected.step == run.selected.step
    assert named.scores().more == {"accuracy": run.scores().average}


def test_scores_come_back_from_plain_data() -> None:
    scores = Scores("accuracy", ("a",), (0.5,), (4,), 0.5, 1.0, {"AUC": math.nan, "loss": 1.0}, "loss", False)
    written = json.loads(json.dumps(scores.to_dict(), allow_nan=False))
    assert written["metrics"] == {"AUC": None, "loss": 1.0}
    back = Scores.from_dict(written)
    assert math.isnan(back.more["AUC"])
    assert (back.selects, back.higher, back.judged) == ("loss", False, 1.0)
    lower = Scores("accuracy", ("a",), (0.5,), (4,), 0.5, 1.0, {"loss": 0.5}, "loss", False)
    assert lower.better_than(back)
    assert not back.better_than(lower)


def test_notes_name_what_selects() -> None:
    parts: dict[str, Any] = {"names": ("a",), "values": (0.5,), "sizes": (4,), "average": 0.5}
    assert scores_note("test", Scores("accuracy", **parts)) == "test 50.0%"
    assert scores_note("test", Scores("mse", **parts)) == "test mse 0.5"
    by_f1 = Scores("accuracy", **parts, more={"macro F1": 0.25}, selects="macro F1", higher=True)
    assert scores_note("val", by_f1) == "val macro F1 0.25"
    notes: list[str] = []
    fit(network(), example_data(), metric="AUC", progress=lambda step, note: notes.append(note))
    assert "validation AUC 0." in notes[-1]


@pytest.mark.parametrize(
    ("classes", "outputs", "options", "message"),
    [
        (3, 3, {"metric": "macro f2"}, r"unknown metric 'macro f2'\. Did you mean"),
        (3, 3, {"metric": "Pearson r"}, "'Pearson r' is for regression, and this is classification"),
        (
            None,
            1,
            {"metric": "AUC"},
            "'AUC' is for classification, ordinal, multilabel, and this is regression",
        ),
        (3, 3, {"predictions": True}, "predictions require folder="),
    ],
)
def test_wrong_metrics_are_refused_before_training(
    classes: int | None, outputs: int, options: Any, message: str
) -> None:
    model = network(outputs)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(InputError, match=message):
        fit(model, example_data(classes), **options)
    torch.testing.assert_close(before, model.state_dict(), rtol=0, atol=0)


class Stopped(Exception):
    pass


def stopping(at: int) -> Callable[[int, str], None]:
    def tell(step: int, note: str) -> None:
        if step >= at:
            raise Stopped

    return tell


def test_a_resumed_training_goes_on_to_the_same_choice(tmp_path: Path) -> None:
    options: dict[str, Any] = {"metric": "worst-group accuracy", "patience": 20, "steps": 12}
    whole = fit(network(), example_data(), folder=tmp_path / "whole", **options)
    broken = {"folder": tmp_path / "broken", **options}
    with pytest.raises(Stopped):
        fit(network(), example_data(), progress=stopping(5), **broken)
    with pytest.raises(InputError, match="another training: metric was 'worst-group accuracy', now 'AUC'"):
        fit(network(), example_data(), resume=True, **broken | {"metric": "AUC"})
    run = fit(network(), example_data(), resume=True, **broken)
    assert [p.to_dict() for p in run.history] == [p.to_dict() for p in whole.history]
    torch.testing.assert_close(run.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


# Predictions


def lines(values: Iterable[Any]) -> str:
    return "".join(f"{v}\n" for v in values)


def test_predictions_are_of_the_selected_weights_in_order_of_index(tmp_path: Path) -> None:
    data = example_data()
    run = fit(network(), data, folder=tmp_path, predictions="mine", eval_limit=10, seed=3)
    assert run.selected.step < 6 or run.last.step == 6
    names = sorted(p.name for p in (tmp_path / "predictions").iterdir())
    assert names == [
        "mine_split:test_seed:3_epoch:best_pred.csv",
        "mine_split:val_seed:3_epoch:best_pred.csv",
    ]
    classes = run.model(data.examples.x).argmax(1).numpy()  # type: ignore[attr-defined]
    for name, split in zip(names, ("test", "validation"), strict=True):
        which = np.unique(data.splits[split].indices)
        assert (tmp_path / "predictions" / name).read_text() == lines(classes[which])
        scores, others = predictions.evaluate(data, split, classes[which])
        assert others == {}
        assert scores.average == (classes[which] == data.examples.y.numpy()[which]).mean()  # type: ignore[attr-defined]


@pytest.mark.parametrize("shape", [(50,), (50, 1), (50, 2)])
@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64])
def test_files_are_as_pandas_writes_them(shape: tuple[int, ...], kind: Any) -> None:
    values = (1000 * np.random.default_rng(0).normal(size=shape) ** 5).astype(kind)
    expected = pandas.DataFrame(values).to_csv(index=False, header=False)
    assert predictions.as_text(values) == expected


def test_real_numbers_come_back_as_they_were(tmp_path: Path) -> None:
    data = example_data(None, ("Pearson r", "worst-group mse"))
    run = fit(network(1), data, folder=tmp_path, predictions=True)
    path = tmp_path / "predictions" / "data_split:test_seed:0_epoch:best_pred.csv"
    values = predictions.read(path, None)
    which = data.splits["test"].examples()
    output = run.model(data.examples.x).detach().numpy()[which, 0]  # type: ignore[attr-defined]
    np.testing.assert_allclose(values, output, rtol=1e-5)
    scores, _ = predictions.evaluate(data, "test", values)
    assert dict(scores.more) == pytest.approx(run.scores().more, rel=1e-5)


def test_names_of_files_say_what_they_are_of() -> None:
    named = Named("rotated-digits", "id_validation", "fold", "A")
    assert predictions.file_name(named) == "rotated-digits_split:id_val_fold:A_epoch:best_pred.csv"
    assert predictions.parse_name(predictions.file_name(named)) == named
    assert predictions.parse_name(predictions.file_name(named).replace(":", "-")) == named
    odd = Named("a_split_b", "oracle", "seed", "12")
    assert predictions.parse_name(predictions.file_name(odd)) == odd
    assert predictions.parse_name("mine.csv") is None


def test_a_system_without_colons_gets_dashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = predictions.write_atomically

    def refusing(path: Path, content: bytes) -> None:
        if ":" in path.name:
            raise OSError(22, "Invalid argument")
        write(path, content)

    monkeypatch.setattr(predictions, "write_atomically", refusing)
    fit(network(), example_data(), folder=tmp_path, predictions=True, eval_splits=["test"], select="last")
    assert [p.name for p in (tmp_path / "predictions").iterdir()] == [
        "data_split-test_seed-0_epoch-best_pred.csv"
    ]

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(predictions, "write_atomically", full)
    with pytest.raises(InputError, match=r"could not be written to .* \(No space left on device\)"):
        fit(network(), example_data(), folder=tmp_path / "full", predictions=True)


class Known(Examples):
    """Examples whose labels are known without reading any."""

    def __init__(self, y: np.ndarray) -> None:
        self.labels = y

    def __len__(self) -> int:
        return len(self.labels)

    def known_labels(self) -> np.ndarray:
        return self.labels

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("an example was read")


class Unknown:
    def __init__(self, y: np.ndarray, wrap: Callable[[Any], Any]) -> None:
        self._y, self.wrap = y, wrap

    def __getitem__(self, index: int) -> tuple[None, Any]:
        return None, self.wrap(self._y[index])


def test_labels() -> None:
    y = np.arange(10) % 3
    which = np.array([1, 5, 9])

    several = ConcatDataset([Known(y[:4]), Known(y[4:])])
    for examples in (Known(y), several, TensorData(torch.zeros(10), torch.tensor(y))):
        assert predictions.labels_of(examples, which).tolist() == [1, 2, 0]
    for wrap in (int, torch.tensor, lambda v: torch.tensor([v]).float()):
        assert predictions.labels_of(Unknown(y, wrap), which).ravel().tolist() == [1, 2, 0]


def test_a_tensor_of_the_device_is_what_the_metric_gets_as_an_array() -> None:
    seen: list[Any] = []

    def own(output: np.ndarray, y: np.ndarray, groups: Domains) -> Tensor:
        seen.append((output.shape, y.shape, groups.names, int(groups.indices.max())))
        return torch.tensor(0.5)

    run = fit(network(), example_data(), metric=own, steps=1, eval_splits=["test"], select="last")
    assert seen == [((200, 3), (200,), ("c", "d", "e"), 199)]
    assert run.scores().more == {"own": 0.5}
