"""Models, data, losses and algorithms that do not go together are refused before any step."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shoal
from shoal.algorithms import Algorithm, registry
from shoal.errors import InputError
from shoal.models import FeatureModel


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


def test_outputs_that_cannot_be_scored_are_not() -> None:
    train = {n: (x, x[:, 0]) for n, (x, _) in {"a": domain(0), "b": domain(1)}.items()}
    given: list[dict[str, Any]] = [
        {"model": Pair(3, 2), "classes": 2, "loss": lambda o, y: nn.functional.cross_entropy(o[0], y)},
        {"model": nn.Linear(3, 3), "train": train, "loss": lambda o, y: o.mean()},
    ]
    for options in given:
        with pytest.warns(UserWarning, match="nothing is evaluated"):
            assert not fit(**options).last.scores


@pytest.mark.parametrize(
    ("optimizer", "lr", "found"),
    [
        (torch.optim.SGD, 0.5, 0.5),
        (torch.optim.Adagrad, None, 0.01),
        ("adamw", None, 1e-3),
        ("sgd", 0.25, 0.25),
    ],
)
def test_the_learning_rate(optimizer: Any, lr: float | None, found: float) -> None:
    assert fit(optimizer=optimizer, lr=lr).record["config"]["lr"] == found


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


class NoPair(Algorithm):
    def objective(self, views: Sequence[Any]) -> Any:
        return self.losses(views).mean()


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
        (NoPair, r"NoPair.objective must return a pair"),
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
