"""Options mean what they say or are refused, before any step."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shoal
from shoal.algorithms import Algorithm, registry
from shoal.errors import InputError
from shoal.models import FeatureModel
from shoal.training import loop
from shoal.training.options import Options

NAMES = [f.name for f in fields(Options)]


class Nasty:
    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = object.__hash__


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, 10**30, 10**5000, np.int64(3), np.int64(-3)]),
    st.floats(),
    st.sampled_from([math.nan, math.inf, -0.0, 1e-300, 1e300, np.float32(0.5), 0.5, 500.0, 1.0]),
    st.text(max_size=5),
    st.sampled_from(["cpu", "meta", "cuda:999", "xpu", "mps", "best", "fp16", "sma", "plateau", "AUC"]),
    st.sampled_from(["swad", "swad-paper", "ema", "head", "head:2"]),
    st.binary(max_size=3),
    st.lists(st.one_of(st.text(max_size=3), st.integers(), st.none()), max_size=3),
    st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), st.integers(), max_size=2),
    st.sampled_from(
        [(), set(), object(), Nasty(), [[]], np.zeros(3), np.array(["best"]), torch.zeros(2), 1j, int, len]
    ),
)


@settings(deadline=None, max_examples=500)
@given(st.dictionaries(st.sampled_from(NAMES), values, max_size=2))
def test_any_value_is_taken_or_refused(given: dict[str, Any]) -> None:
    with refused():
        Options(**{"steps": 3, **given})


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """An error in this block is one of ours, and short."""
    errors = list[str]()
    try:
        yield
    except InputError as error:
        errors.append(str(error))
    assert not any("\n" in text or len(text) > 500 for text in errors), errors


def domain(number: int, examples: int = 24, classes: int = 2) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    y = torch.arange(examples) % classes
    return torch.randn(examples, 3, generator=draw) + y[:, None], y


def network(classes: int = 2) -> FeatureModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return FeatureModel(nn.Sequential(nn.Linear(3, 8), nn.Tanh()), nn.Linear(8, classes))


def fit(algorithm: Any = "erm", model: nn.Module | None = None, **options: Any) -> shoal.Fit:
    base: dict[str, Any] = {"steps": 2, "batch_size": 4, "device": "cpu", "progress": False}
    data = options.pop("train", {"a": domain(0), "b": domain(1), "c": domain(2)})
    return shoal.fit(algorithm, model or network(), data, **base | options)


TRIED = sorted(set(NAMES) - {"optimizer", "schedule", "loss", "metric", "progress", "compile", "predictions"})


@pytest.mark.filterwarnings("ignore:wise_ft interpolates")
@settings(deadline=None, max_examples=150)
@given(st.dictionaries(st.sampled_from(TRIED), values, max_size=2))
def test_what_is_taken_can_be_trained_with(given: dict[str, Any]) -> None:
    large = {
        "steps": 5,
        "batch_size": 500,
        "workers": 0,
        "warm_start": 50,
        "accumulate": 8,
        "domains_per_step": 40,
    }
    given = {k: v for k, v in given.items() if not (k in large and isinstance(v, int) and v > large[k])}
    with refused():
        fit(validation={"v": domain(3)}, **given)


class TestLearningRate:
    def test_of_an_optimizer_class(self) -> None:
        def rate(**options: Any) -> float:
            made = Options(steps=1, **options).make_optimizer([nn.Parameter(torch.zeros(1))])
            return float(made.param_groups[0]["lr"])

        assert rate(optimizer=torch.optim.SGD, lr=0.5) == 0.5
        assert rate(optimizer=torch.optim.Adagrad) == 0.01  # its own
        assert rate(lr=0.25) == 0.25
        assert rate() == 1e-3
        assert rate(optimizer=lambda p: torch.optim.SGD(p, 0.125)) == 0.125

    def test_given_twice(self) -> None:
        with pytest.raises(InputError, match=r"lr=0.5 and an optimizer function.*torch.optim.SGD"):
            fit(optimizer=lambda p: torch.optim.SGD(p, 0.1), lr=0.5)

    def test_changes_the_training(self) -> None:
        low, high = (fit(optimizer=torch.optim.SGD, lr=r).model.head.bias for r in (1e-3, 0.5))
        assert not torch.allclose(low, high)


@pytest.mark.parametrize("name", ["irm", "vrex", "cdann", "fishr", "idgm"])
def test_a_share_of_the_training_is_no_number_of_steps(name: str) -> None:
    with pytest.raises(
        InputError, match=r"start of .* fraction of the training from 0 to 2, got 500.0. Did you mean 500"
    ):
        fit(name, settings={"start": 500.0})
    fit(name, settings={"start": 500})
    fit(name, settings={"start": 0.5})


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "average_start": ({"average_start": 1}, "average_start=1 requires average='sma'"),
    "average_start after the end": ({"average": "sma", "average_start": 9}, "after the last of 2 steps"),
    "average_ratio": ({"average_ratio": 1.2, "average": "sma"}, "average_ratio=1.2 requires average='swad'"),
    "average_decay": ({"average_decay": 0.9, "average": "sma"}, "average_decay=0.9 requires average='ema'"),
    "average_decay of 1": ({"average_decay": 1.0, "average": "ema"}, "average_decay must be .* below 1"),
    "warm_select": ({"warm_select": "best"}, "requires warm_start"),
    "warm_select without validation": ({"warm_start": 2, "warm_select": "best"}, "require validation"),
    "track_layers": ({"track_layers": True}, "require track_every"),
    "patience": ({"patience": 2}, "validation"),
    "splits as a word": ({"eval_splits": "test"}, "eval_splits must be a list of 'train' or .*, got 'test'"),
    "predictions": ({"predictions": True}, "require folder="),
    "device": ({"device": "meta"}, "'meta' is not a device for training"),
    "device that is not there": ({"device": "cuda:99"}, "cuda:99"),
    "held_out": (
        {"algorithm": "mldg", "settings": {"held_out": 3}},
        "held_out of MLDG must be below 3, the domains per step; got 3",
    ),
    "algorithm": ({"algorithm": 5}, "algorithm must be a name or a subclass"),
    "algorithm of another kind": ({"algorithm": nn.Linear}, "algorithm must be a name or a subclass"),
}


@pytest.mark.parametrize(("options", "message"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_what_cannot_be_is_refused(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop.Training, "run", lambda *_: pytest.fail("it was trained"))
    with pytest.raises(InputError, match=message):
        fit(**options)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).unflatten(1, (2, 5))


@pytest.mark.parametrize("loss", [None, lambda o, y: o.mean()])
def test_an_output_for_each_position_needs_labels_for_each(loss: Any) -> None:
    x, y = domain(0)
    data = shoal.data.DomainData(
        shoal.data.TensorData(x, y), {"train": shoal.data.Domains.from_sizes({"a": len(x)})}, 2, (3,), ""
    )
    with pytest.raises(InputError, match=r"output has shape \(2, 2, 5\)"):
        shoal.fit("erm", Dense(), data, steps=1, loss=loss, progress=False)


class Pair(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


def test_outputs_that_cannot_be_scored() -> None:
    loss = lambda o, y: nn.functional.cross_entropy(o[0], y)  # noqa: E731
    with pytest.raises(InputError, match=r"output is a tuple .*eval_splits=\[\]"):
        fit(model=Pair(3, 2), classes=2, loss=loss)
    fit(model=Pair(3, 2), classes=2, loss=loss, eval_splits=[])
    train = {n: (x, x[:, 0]) for n, (x, _) in {"a": domain(0), "b": domain(1)}.items()}
    with pytest.raises(InputError, match=r"output is of shape \(2, 3\) and the targets are \(2,\)"):
        fit(model=nn.Linear(3, 3), train=train, loss=lambda o, y: o.mean())


WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0]))
NO_MEANS = {
    "weight": WEIGHTED,
    "ignore_index": nn.CrossEntropyLoss(ignore_index=1),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "of the batch": lambda o, y: nn.functional.cross_entropy(o, y) + o.std(),
}


class TestLoss:
    @pytest.mark.parametrize("kind", NO_MEANS)
    def test_that_is_no_mean_of_examples(self, kind: str) -> None:
        loss: Any = NO_MEANS[kind]
        known = kind in ("weight", "ignore_index")  # what pieces are divided by is known
        with pytest.raises(InputError, match="accumulate=2 needs a loss that is the mean of its examples'"):
            fit("mixup" if known else "erm", loss=loss, accumulate=2)
        with pytest.raises(InputError, match="Fishr needs a loss that is the mean"):
            fit("fishr", loss=loss)
        fit(loss=loss)

    def test_that_is_not_a_number(self) -> None:
        with pytest.raises(InputError, match=r"must return one number.*shape \(2,\)"):
            fit(loss=nn.CrossEntropyLoss(reduction="none"))

    @pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(label_smoothing=0.1), nn.functional.cross_entropy])
    def test_that_is_one(self, loss: Any) -> None:
        fit(loss=loss, accumulate=2)
        fit("fishr", loss=loss)

    def test_regression(self) -> None:
        train = {n: (x, x[:, :1] * 2) for n, (x, _) in {"a": domain(0), "b": domain(1)}.items()}
        fit(model=nn.Linear(3, 1), train=train, loss=nn.HuberLoss(), accumulate=2)
        with pytest.raises(InputError, match="mean of its examples'"):
            fit(model=nn.Linear(3, 1), train=train, loss=nn.HuberLoss(reduction="sum"), accumulate=2)

    def test_pieces_give_the_same_where_it_is_allowed(self) -> None:
        whole, pieces = (fit(loss=nn.CrossEntropyLoss(), accumulate=k).model for k in (1, 2))
        torch.testing.assert_close(whole.state_dict(), pieces.state_dict())


class WithoutLosses(Algorithm):
    def objective(self, views: Sequence[Any]) -> Any:
        return self.losses(views).mean(), {}


class ScalarLosses(Algorithm):
    def objective(self, views: Sequence[Any]) -> Any:
        loss = self.losses(views).mean()
        return loss, {"losses": loss.detach()}


class LogsNumbers(Algorithm):
    def objective(self, views: Sequence[Any]) -> Any:
        losses = self.losses(views)
        return losses.mean(), {"losses": losses.detach(), "mine": 1.5}


class NoPair(Algorithm):
    def objective(self, views: Sequence[Any]) -> Any:
        return self.losses(views).mean()


class ManyNumbers(Algorithm):
    def objective(self, views: Sequence[Any]) -> Any:
        return self.losses(views), {"losses": self.losses(views)}


class NoLog(Algorithm):
    def step(self, batches: Any, engine: Any) -> Any:
        super().step(batches, engine)


class FewGradients(Algorithm):
    def gradient(self, batches: Any, engine: Any) -> Any:
        found, log = super().gradient(batches, engine)
        return found[:-1], log


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (WithoutLosses, "WithoutLosses must log 'losses', a tensor with one number per batch"),
        (ScalarLosses, "ScalarLosses must log 'losses'"),
        (LogsNumbers, "LogsNumbers logs 'mine', which must be a tensor with one number; got 1.5"),
        (NoPair, r"NoPair.objective must return a pair"),
        (ManyNumbers, r"ManyNumbers.objective must return a pair"),
        (NoLog, "NoLog must log 'losses'"),
        (FewGradients, "3 gradients for 4 parameters"),
    ],
)
def test_an_algorithm_of_ones_own_that_is_none(algorithm: type[Algorithm], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit(algorithm)


class TestLazy:
    def model(self) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2))

    def test_trains(self) -> None:
        run = fit(model=self.model(), steps=60, lr=0.05)
        assert run.accuracy("train") > 0.8
        again = fit(model=self.model(), steps=60, lr=0.05)
        torch.testing.assert_close(run.model.state_dict(), again.model.state_dict(), rtol=0, atol=0)

    def test_resumes(self, tmp_path: Any) -> None:
        whole = fit(model=self.model(), steps=6)

        def stop(step: int, note: str) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fit(model=self.model(), steps=6, folder=tmp_path, checkpoint_every=1, progress=stop)
        resumed = fit(model=self.model(), steps=6, folder=tmp_path, resume=True, checkpoint_every=1)
        torch.testing.assert_close(whole.model.state_dict(), resumed.model.state_dict(), rtol=0, atol=0)


class NoDoubles(TorchDispatchMode):
    """As a device that has no float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype == torch.float64:
            raise TypeError(f"{func} makes float64")
        return made


@pytest.mark.parametrize("name", registry.names())
def test_a_device_without_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.tensors.WITHOUT_FLOAT64", {"cpu"})
    monkeypatch.setattr(Tensor, "double", lambda self: self)  # which is called on copies on the CPU only
    with NoDoubles():
        fit(name, steps=2, test={"t": domain(5)})


class TestCollapse:
    @pytest.mark.parametrize("every", [20, 100])
    def test_is_said_once(self, every: int) -> None:
        """With statistics of BatchNorm that are far behind the weights."""
        at = torch.arange(60)
        data = {n: (10 + domain(k, 60)[0], torch.where(at < 40, 0, 1)) for k, n in enumerate("ab")}
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8, momentum=1e-9), nn.Linear(8, 2))
        with pytest.warns(
            UserWarning, match=r"always guessing .* gives 66.7%.*learning rate \(0.1\)"
        ) as said:
            fit(model=model, train=data, steps=100, lr=0.1, eval_every=every)
        assert len(said) == 1

    @pytest.mark.parametrize("name", ["erm", "groupdro", "irm", "reweighted"])
    def test_is_not_said_of_healthy_trainings(self, name: str) -> None:
        """Rare classes, small learning rates and noise; a warning would be an error here."""
        x, y = domain(0, 500)
        rare = (x, (torch.arange(500) % 20 == 0).long())
        noise = (torch.randn(500, 3), y)
        for data in ({"a": rare, "b": rare}, {"a": noise, "b": noise}, {"a": domain(0), "b": domain(1)}):
            for lr in (1e-2, 1e-4):
                fit(name, train=data, steps=60, lr=lr)


def test_settings_are_a_mapping() -> None:
    assert isinstance(Options(steps=1).settings, Mapping)
