"""``shoal.fit`` from input to selected weights; wrong input is refused before the first step."""

import gc
import json
import multiprocessing
import pickle
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import shoal
from shoal.api.fit import as_domain_data
from shoal.data import Domains, Task, TensorData
from shoal.errors import InputError
from shoal.experiments.record import RunRecord
from shoal.models import FeatureModel
from shoal.training.callbacks import CallbackError
from shoal.training.evaluate import Evaluator, Scores, sample
from shoal.training.stopping import Diverged


def domain(number: int, examples: int = 40, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    y = torch.arange(examples) % 2
    x = torch.stack([4.0 * y - 2, torch.full((examples,), float(number))], 1)
    return x + noise * torch.randn(examples, 2, generator=draw), y


def split(*numbers: int, **options: Any) -> dict[str, tuple[Tensor, Tensor]]:
    return {f"d{n}": domain(n, **options) for n in numbers}


def network(*, dropout: float = 0.0, outputs: int = 2) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, outputs))


def two_parts() -> FeatureModel:
    *features, head = network()
    return FeatureModel(nn.Sequential(*features), head)


def fit(
    algorithm: Any = "fish", model: nn.Module | None = None, train: Any = None, **options: Any
) -> shoal.Fit:
    given: dict[str, Any] = {"steps": 10, "batch_size": 8, "lr": 0.01, "device": "cpu", "progress": False}
    train = split(0, 1, 2) if train is None else train
    if "optimizer" in options:
        del given["lr"]  # which is the optimizer's own then
    return shoal.fit(algorithm, network() if model is None else model, train, **given | options)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


def assert_same(a: nn.Module, b: nn.Module) -> None:
    torch.testing.assert_close(a.state_dict(), b.state_dict(), rtol=0, atol=0)


def differ(a: nn.Module, b: nn.Module) -> bool:
    return any(not torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


class Noisy(Dataset):
    """A plain dataset with a random transform."""

    def __init__(self, number: int) -> None:
        self.x, self.y = domain(number)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        noise = torch.rand(2) + torch.as_tensor(np.random.rand(2)) + random.random()
        return self.x[i] + 0.01 * noise.float(), int(self.y[i])


class TestInput:
    def test_tensors_arrays_and_datasets_are_one(self) -> None:
        forms: list[Callable[[Tensor, Tensor], Any]] = [
            lambda x, y: (x, y),
            lambda x, y: (x.numpy(), y.numpy()),
            lambda x, y: [x.numpy(), y.tolist()],
            TensorDataset,
            TensorData,
        ]
        runs = [
            fit(train={n: form(*d) for n, d in split(0, 1).items()}, test={"d5": form(*domain(5))})
            for form in forms
        ]
        for run in runs[1:]:
            assert_same(run.model, runs[0].model)
            assert run.history == runs[0].history

    def test_a_data_object_holds_its_own_splits(self) -> None:
        data = as_domain_data(split(0, 1), None, split(5))
        assert fit(train=data).history == fit(train=split(0, 1), test=split(5)).history
        with pytest.raises(InputError, match="already defines the task and the validation and test"):
            fit(train=data, test=split(5))


class TestResult:
    def test_scores_by_name(self) -> None:
        x, y = domain(1)
        run = fit(validation=split(3), test={"d1": (x, 1 - y), "d5": domain(5)}, steps=60)
        point = run.selected
        assert run.accuracy("d3") == point.scores["validation"]["d3"]
        assert run.accuracy("d0") == point.scores["train"]["d0"]
        # A name in several splits means the test's domain.
        assert run.accuracy("d1") == point.scores["test"]["d1"] != point.scores["train"]["d1"]
        assert run.accuracy("test") == run.scores().average == run.scores("test").average
        assert run.scores("train").names == ("d0", "d1", "d2")
        with pytest.raises(InputError, match=r"domain or split 'd9'.*Known: .*d5"):
            run.accuracy("d9")
        with pytest.raises(InputError, match=r"split 'tets'\. Did you mean 'test'"):
            run.scores("tets")
        assert "Fish, best on validation" in repr(run)

    def test_history(self) -> None:
        run = fit(steps=25, eval_every=10)
        assert [p.step for p in run.history] == [10, 20, 25]
        assert [p.passes for p in run.history] == [30, 60, 75]
        assert run.last is run.history[-1]
        assert run.selected is run.last
        assert run.rule == "last step"
        assert not run.captured
        assert run.seconds > 0
        assert len(fit(steps=50).history) == 10

    def test_the_loss_is_the_mean_since_the_point_before(self) -> None:
        each = [p.loss for p in fit(steps=6, eval_every=1).history]
        halves = [p.loss for p in fit(steps=6, eval_every=3).history]
        assert halves == pytest.approx([np.mean(each[:3]), np.mean(each[3:])])

    def test_evaluating_does_not_touch_the_training(self) -> None:
        train = {"a": Noisy(0), "b": Noisy(1)}
        often, seldom = (fit(model=network(dropout=0.5), train=train, eval_every=e) for e in (1, 10))
        assert_same(often.model, seldom.model)

    def test_progress_is_told(self) -> None:
        told: list[tuple[int, str]] = []
        fit(steps=120, eval_every=60, progress=lambda step, note: told.append((step, note)))
        steps = [step for step, _ in told]
        assert steps == sorted(set(steps))
        assert {50, 60, 100, 120} <= set(steps)
        assert told[0] == (1, "")
        assert "d0" in dict(told)[50]
        assert "train" in told[-1][1]

    def test_random_state_outside_is_untouched(self) -> None:
        torch.manual_seed(11)
        np.random.seed(11)
        random.seed(11)
        before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        fit(model=network(dropout=0.5), train={"a": Noisy(0), "b": Noisy(1)}, warm_start=3)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert np.random.get_state()[1].tolist() == before[1]
        assert random.getstate() == before[2]

    def test_workers_change_nothing(self) -> None:
        train = {"a": Noisy(0), "b": Noisy(1)}
        runs = [
            fit(
                model=network(dropout=0.2),
                train=train,
                test={"t": Noisy(5)},
                workers=w,
            )
            for w in (0, 2)
        ]
        assert_same(runs[0].model, runs[1].model)
        assert runs[0].last.loss == runs[1].last.loss

    @pytest.mark.parametrize("fails", [False, True])
    def test_workers_end_with_the_training(self, fails: bool) -> None:
        """Not when the garbage collector comes, which it does not here."""

        class Failing(shoal.Callback):
            def on_step(self, state: Any) -> None:
                if fails:
                    raise KeyError("on purpose")

        options: dict[str, Any] = {"train": {"a": Noisy(0), "b": Noisy(1)}, "test": {"t": Noisy(5)}}
        options |= {"workers": 1, "track_every": 1, "callbacks": [Failing()], "average": "sma"}
        before = set(multiprocessing.active_children())
        gc.disable()
        try:
            with pytest.raises(CallbackError) if fails else nullcontext():
                fit(model=network(dropout=0.2), **options)
            assert set(multiprocessing.active_children()) <= before
        finally:
            gc.enable()

    def test_regression(self) -> None:
        train = {n: (x, x[:, :1] * 2 - 1) for n, (x, _) in split(0, 1).items()}
        run = fit(model=network(outputs=1), train=train, steps=300, test={"t": train["d1"]})
        x, y = train["d1"]
        assert run.scores().metric == "mse"
        assert run.score("t") == pytest.approx((run.model(x) - y).square().mean().item(), rel=1e-5)
        assert run.score() == run.score("test") == run.scores().average < 1.0
        with pytest.raises(InputError, match=r"not defined for regression; use score\('t'\) for the mse"):
            run.accuracy("t")
        assert run.algorithm.task.classes is None

    def test_ones_own_loss(self) -> None:
        run = fit(loss=lambda output, y: 0 * output.sum() + 7.0, steps=2)
        assert run.last.loss == 7.0


def overfitted(**options: Any) -> shoal.Fit:
    """Validation labels are turned round: the better the training, the worse the score."""
    x, y = domain(1)
    return fit(model=network(), validation={"v": (x, 1 - y)}, steps=60, eval_every=2, **options)


class TestSelection:
    def test_best_is_kept_and_in_the_model(self) -> None:
        run = overfitted()
        assert run.rule == "best on validation"
        best = max(p.scores["validation"].average for p in run.history)
        assert run.scores("validation").average == best > run.last.scores["validation"].average
        x, y = domain(1)
        predicted = run.model.eval()(x).argmax(1)
        assert float((predicted == 1 - y).float().mean()) == pytest.approx(best)
        assert run.selected is next(p for p in run.history if p.scores["validation"].average == best)

    def test_last(self) -> None:
        run = overfitted(select="last")
        assert run.selected is run.last
        assert run.last.step == 60
        assert_same(run.model, fit(steps=60).model)

    @pytest.mark.parametrize("select", ["best", "last"])
    def test_patience(self, select: str) -> None:
        given: dict[str, Any] = {"validation": split(3), "steps": 60, "eval_every": 2, "select": select}
        scores = [p.scores["validation"].average for p in fit(**given).history]
        run = fit(**given, patience=4)
        best = scores.index(max(scores[: len(run.history)]))
        assert best > 0
        assert len(run.history) == best + 5 < len(scores)
        assert run.selected.step == (run.history[best] if select == "best" else run.last).step


class TestWarmStart:
    @pytest.mark.parametrize(("warm", "steps"), [(7, 7), (0.5, 8), (0.01, 1), (1.0, 15)])
    def test_steps_and_shares(self, warm: float, steps: int) -> None:
        run = fit(warm_start=warm)  # 120 examples, 8 a batch: 15 batches are one pass
        assert [p.step for p in run.warm_up] == [steps]
        assert run.last.step == 10

    def test_is_erm_first_and_then_a_fresh_optimizer(self) -> None:
        made: list[torch.optim.Optimizer] = []

        def maker(params: Any) -> torch.optim.Optimizer:
            made.append(torch.optim.Adam(params, 0.01))
            return made[-1]

        one = fit(model=network(dropout=0.2), warm_start=7, optimizer=maker)
        taken = sorted({int(s["step"]) for s in o.state.values()} for o in made)
        assert sorted(map(max, taken)) == [7, 30]
        model = network(dropout=0.2)
        fit("erm", model, steps=7, domains_per_step=1)
        fit(model=model)
        assert_same(one.model, model)

    def test_plateau_goes_on_from_the_best(self) -> None:
        x, y = domain(1)
        rates = iter([1e-9, 0.1])  # the main training, made first, hardly moves: it shows where it began
        run = fit(
            validation={"v": (x, 1 - y)},
            warm_start="plateau",
            steps=1,
            optimizer=lambda p: torch.optim.Adam(p, next(rates)),
            select="last",
        )
        scores = [p.scores["validation"].average for p in run.warm_up]
        assert len(scores) == scores.index(max(scores)) + 6
        assert run.scores("validation").average == max(scores) > scores[-1]


def evaluate(model: nn.Module, examples: Any, domains: Domains, **options: Any) -> Scores:
    return Evaluator(examples, {"only": domains}, **options)(model)["only"]


class TestEvaluate:
    @pytest.mark.parametrize("classification", [True, False])
    @pytest.mark.parametrize("plain", [True, False], ids=["dataset", "tensors"])
    def test_overlapping_domains_against_a_loop(self, classification: bool, plain: bool) -> None:
        x, y = domain(0, 12)
        if not classification:
            y = torch.stack([x[:, 0], x[:, 1] ** 2], 1)
        examples: Any = TensorDataset(x, y) if plain else TensorData(x, y)
        parts = {"a": [9, 1, 2, 7], "b": [2, 7, 5], "c": [11]}
        model = nn.Sequential(network(), nn.BatchNorm1d(2), nn.Dropout(0.5)).train()
        before = weights(model)
        found = evaluate(
            model,
            examples,
            Domains.from_indices(parts),
            task=Task(1, 3 if classification else None),
            batch_size=4,
        )
        assert model.training
        torch.testing.assert_close(before, model.state_dict(), rtol=0, atol=0)
        model.eval()
        points = {}
        for i in sorted({i for part in parts.values() for i in part}):
            output = model(x[i : i + 1])[0]
            hit = output.argmax() == y[i] if classification else (output - y[i]).square().mean()
            points[i] = hit.item()
        for name, part in parts.items():
            assert found[name] == pytest.approx(np.mean([points[i] for i in part]), rel=1e-5)
        assert found.average == pytest.approx(np.mean(list(points.values())), rel=1e-5)
        assert found.sizes == (4, 3, 1)
        assert found.metric == ("accuracy" if classification else "mse")

    def test_limit_is_shared_evenly_over_domains(self) -> None:
        x, y = domain(0, 12)
        domains = Domains.from_indices({"a": [9, 1, 2, 7], "b": [2, 7, 5]})
        few = sample(domains, 3, y.numpy())
        assert (few.names, few.sizes.tolist()) == (("a", "b"), [2, 2])
        found = evaluate(network(), TensorData(x, y), domains, limits={"only": 3}, task=Task(1, 3))
        whole = evaluate(network(), TensorData(x, y), few, task=Task(1, 3))
        average = (4 * whole["a"] + 3 * whole["b"]) / 7
        assert found == replace(whole, sampled=(len(few.examples()), 5), average=pytest.approx(average))
        assert Scores.from_dict(found.to_dict()) == found

    def test_scores(self) -> None:
        accuracy = Scores("accuracy", ("a", "b"), (0.5, 0.8), (10, 30), 0.7)
        error = Scores("mse", ("a", "b"), (0.5, 0.8), (10, 30), 0.7)
        assert accuracy.mean == pytest.approx(0.65)
        assert (accuracy.worst, error.worst) == (0.5, 0.8)
        assert accuracy["b"] == 0.8
        higher = {"values": (0.6, 0.9), "average": 0.8}
        assert Scores("accuracy", ("a", "b"), sizes=(1, 1), **higher).better_than(accuracy)
        assert not Scores("mse", ("a", "b"), sizes=(1, 1), **higher).better_than(error)
        assert not accuracy.better_than(accuracy)
        assert accuracy.to_dict() == {
            "metric": "accuracy",
            "average": 0.7,
            "mean": pytest.approx(0.65),
            "loss": None,
            "domains": {"a": 0.5, "b": 0.8},
            "sizes": [10, 30],
        }
        assert Scores.from_dict(accuracy.to_dict()) == accuracy
        with pytest.raises(InputError, match=r"domain 'bb'\. Did you mean 'b'"):
            accuracy["bb"]


class TestDiverged:
    def test_tells_what_was_measured_before(self) -> None:
        train = {n: (x, x[:, :1]) for n, (x, _) in split(0, 1).items()}
        with pytest.raises(
            Diverged, match=r"fish: the (loss|gradient) of domain 'd[01]' became (inf|nan) at step .*learning"
        ) as caught:
            fit(
                model=nn.Linear(2, 1),
                train=train,
                steps=200,
                eval_every=1,
                optimizer=lambda p: torch.optim.SGD(p, 3.0),
            )
        steps = [p.step for p in caught.value.history]
        assert len(steps) > 1
        assert steps == list(range(1, len(steps) + 1))
        assert np.isfinite([p.loss for p in caught.value.history]).all()


def shifted(n: int) -> tuple[Tensor, Tensor]:
    x, y = domain(n)
    return x, y + 1


def with_nan() -> tuple[Tensor, Tensor]:
    x, y = domain(1)
    x[3, 1] = float("nan")
    return x, y


def numbers(n: int) -> tuple[Tensor, Tensor]:
    x, _ = domain(n)
    return x, x[:, 0]


SGD = torch.optim.SGD
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one domain": ({"train": split(0)}, "Fish compares domains .*'d0'"),
    "one domain a step": ({"domains_per_step": 1}, "domains_per_step.*1"),
    "too many domains a step": ({"domains_per_step": 4}, "domains_per_step=4.* 3 "),
    "more batches a step than domains to keep something for": (
        {"algorithm": "groupdro", "draw": "pooled", "domains_per_step": 4},
        "GroupDRO .*3 domains; domains_per_step=4",
    ),
    "features of a layer that is not there": (
        {"algorithm": "coral", "settings": {"features": "head"}},
        "features.*'head'",
    ),
    "empty domain": (
        {"train": split(0, 1) | {"none": (torch.empty(0, 2), torch.empty(0).long())}},
        "'.*none' has no",
    ),
    "labels from 1": ({"train": {"a": shifted(0), "b": shifted(1)}}, "from 1 to 2"),
    "label too large": ({"classes": 2, "test": {"t": shifted(1)}}, "labels range from 0 to 2.*classes=2"),
    "nan": ({"train": {"a": domain(0), "b": with_nan()}}, "example 3 of domain 'b' .*nan"),
    "nan in test": ({"test": {"t": with_nan()}}, "example 3 of domain 't' .*nan"),
    "optimizer's lr -1": ({"optimizer": lambda p: SGD(p, lr=-1)}, "optimizer.*learning rate.*-1"),
    "shapes": (
        {"model": network(outputs=1), "train": {"a": numbers(0), "b": numbers(1)}},
        r"\(2, 1\).*\(2,\)",
    ),
    "too few outputs": ({"model": network(outputs=3), "classes": 2}, r"\(2, 3\).*classes=2"),
    "one output for classes": ({"model": network(outputs=1)}, "one output"),
    "float64 for a float32 model": (
        {"train": {n: (x.double(), y) for n, (x, y) in split(0, 1).items()}},
        "torch.float64",
    ),
    "unknown algorithm": ({"algorithm": "fsh"}, "'fsh'. Did you mean 'fish'"),
    "train is a list": ({"train": [domain(0), domain(1)]}, "train must.*got"),
    "no domain": ({"train": {}}, "train is empty"),
    "test is a pair": ({"test": domain(0)}, "test must.*got"),
    "best of nothing": ({"select": "best"}, "validation"),
    "patience with nothing": ({"patience": 3}, "patience .*validation"),
    "optimizer instance": ({"optimizer": SGD(network().parameters(), 0.1)}, "optimizer must"),
    "optimizer makes none": ({"optimizer": lambda p: None}, "optimizer must .*got NoneType"),
    "nothing to train": ({"model": network().requires_grad_(False)}, "no parameter that requires a gradient"),
    "capture on a CPU": ({"capture": True}, "capture=True .*CUDA"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_wrong_input_is_refused_before_any_step(given: dict[str, Any], message: str) -> None:
    model = given.get("model", network())
    before, mode, passes = weights(model), model.training, []
    hook = model.register_forward_pre_hook(lambda module, _: passes.append(module.training))
    with pytest.raises(InputError, match=message) as caught:
        fit(**{**given, "model": model})
    hook.remove()
    assert str(caught.value).count("\n") <= 1
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not any(passes)  # no pass in training mode
    assert model.training is mode


@pytest.mark.parametrize("name", ["groupdro", "dann", "cdann", "fishr"])
def test_batches_that_mix_domains_go_by_their_place(name: str) -> None:
    """As many as there are domains are none too many; others take any number."""
    run = fit(name, two_parts(), draw="pooled", domains_per_step=3, steps=3)
    assert differ(run.model, two_parts())
    assert differ(fit("erm", two_parts(), domains_per_step=4, steps=3).model, two_parts())


def test_numpy_arrays_in_float64_train_a_float32_model() -> None:
    x, y = domain(0)
    arrays = {"a": (x.double().numpy(), y.numpy()), "b": (x.double().numpy(), y.numpy())}
    run = fit("fish", network(), train=arrays, steps=np.int64(2), progress=False)  # type: ignore[arg-type]
    assert not run.model.training


class TestUse:
    def test_predicts(self) -> None:
        run = fit(test=split(3))
        x, y = domain(3)
        found = run.predict(x)
        assert float((found == y.numpy()).mean()) == pytest.approx(run.accuracy("d3"))
        assert (run.predict(x.numpy()) == found).all()

    def test_is_saved_and_loaded(self, tmp_path: Path) -> None:
        run = fit(test=split(3))
        assert run.save(tmp_path / "kept") == tmp_path / "kept"
        again = shoal.load(tmp_path / "kept", model=network())
        assert (again.predict(domain(3)[0]) == run.predict(domain(3)[0])).all()
        assert again.record["config"]["dataset"] == "python"
        with pytest.raises(InputError, match="contains a run"):
            run.save(tmp_path / "kept")

    def test_is_a_table(self) -> None:
        pytest.importorskip("pandas")
        run = fit(test=split(3), eval_every=5)
        frame = run.to_frame()
        assert list(frame.columns) == ["step", "selected", "split", "domain", "metric", "value"]
        assert set(frame.step) == {5, 10}
        last = frame[frame.selected & (frame.domain == "d3")]
        assert last.value.item() == run.accuracy("d3")
        assert "<td>d3</td>" in run._repr_html_()

    def test_can_be_pickled(self) -> None:
        run = pickle.loads(pickle.dumps(fit()))
        assert len(run.predict(domain(3)[0])) == 40

    def test_has_the_record_of_a_run(self, tmp_path: Path) -> None:
        run = fit("erm", optimizer=torch.optim.RMSprop, folder=tmp_path / "run", warm_start=2)
        record = RunRecord.from_dict(json.loads((tmp_path / "run" / "record.json").read_text()))
        assert record.history == tuple(json.loads(json.dumps(p.to_dict())) for p in run.history)
        assert record.config.optimizer_options == {"class": "RMSprop"}
        assert (record.config.steps, record.config.warm_start, record.status) == (10, 2, "finished")
