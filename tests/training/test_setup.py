"""Models, data, losses and algorithms that do not go together are refused before any step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import shoal
from shoal.algorithms import Algorithm, registry
from shoal.data import Domains
from shoal.errors import InputError
from shoal.models import FeatureModel
from shoal.training.evaluate import MOST_DOMAINS, sample
from shoal.training.setup import TRAIN_SAMPLE
from shoal.training.stopping import Diverged


def domain(number: int, examples: int = 24) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    y = torch.arange(examples) % 2
    return torch.randn(examples, 3, generator=draw) + y[:, None], y


def changed(change: Callable[[Tensor, Tensor], Any]) -> dict[str, Any]:
    return {name: change(*domain(n)) for n, name in enumerate("ab")}


def network(classes: int = 2) -> FeatureModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return FeatureModel(nn.Sequential(nn.Linear(3, 8), nn.Tanh()), nn.Linear(8, classes))


def fit(algorithm: Any = "erm", model: nn.Module | None = None, **options: Any) -> shoal.Fit:
    base: dict[str, Any] = {"steps": 2, "batch_size": 4, "device": "cpu", "progress": False}
    data = options.pop("train", {"a": domain(0), "b": domain(1), "c": domain(2)})
    return shoal.fit(algorithm, model or network(), data, **base | options)


SGD = torch.optim.SGD
NAN = changed(lambda x, y: (x.index_fill(0, torch.tensor(3), torch.nan), y))
ONE_MORE = changed(lambda x, y: (x, y + 1))
EMPTY = {"a": domain(0), "none": (torch.empty(0, 3), torch.empty(0).long())}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one domain": ({"train": {"a": domain(0)}}, "Fish compares domains .*'a'"),
    "one domain per step": ({"domains_per_step": 1}, "domains_per_step.*1"),
    "too many domains per step": ({"domains_per_step": 4}, "domains_per_step=4.* 3"),
    "more batches than domains": (
        {"algorithm": "groupdro", "draw": "pooled", "domains_per_step": 4},
        "GroupDRO .*domains_per_step=4 .*3",
    ),
    "no layer": ({"algorithm": "coral", "settings": {"features": "nowhere"}}, "features.*'nowhere'"),
    "empty domain": ({"train": EMPTY}, "'.*none' has no"),
    "labels from 1": ({"train": ONE_MORE}, "from 1 to 2"),
    "label too large": ({"classes": 2, "test": ONE_MORE}, "labels range from 0 to 2.*classes=2"),
    "nan": ({"train": NAN}, "example 3 of domain 'a' .*not finite"),
    "nan in test": ({"test": NAN}, "example 3 of domain 'a' .*not finite"),
    "learning rate -1": ({"optimizer": lambda p: SGD(p, lr=-1)}, "optimizer.*learning rate.*-1"),
    "too few outputs": ({"model": network(3), "classes": 2}, r"\(2, 3\).*classes=2"),
    "one output for classes": ({"model": network(1)}, "one output"),
    "float64": ({"train": changed(lambda x, y: (x.double(), y))}, "torch.float64"),
    "unknown algorithm": ({"algorithm": "fsh"}, "'fsh'. Did you mean 'fish'"),
    "train is a list": ({"train": [domain(0), domain(1)]}, "train must.*got"),
    "no domain": ({"train": {}}, "train is empty"),
    "best of nothing": ({"select": "best"}, "validation"),
    "patience with nothing": ({"patience": 3}, "patience: 3 requires validation"),
    "optimizer instance": ({"optimizer": SGD(network().parameters(), 0.1)}, "optimizer must"),
    "optimizer makes none": ({"optimizer": lambda p: None}, "optimizer must .*got NoneType"),
    "optimizer of others": (
        {"optimizer": lambda p: SGD(nn.Linear(1, 1).parameters(), 0.1)},
        "optimizer must train the parameters",
    ),
    "nothing to train": ({"model": network().requires_grad_(False)}, "no parameter that requires a gradient"),
    "no parameter": ({"model": nn.Linear(3, 2).requires_grad_(False)}, "nothing to train"),
    "capture on a CPU": ({"capture": True}, "capture=True .*CUDA"),
    "no such device": ({"device": "cuda:7"}, "cuda:7"),
    "a loss per example": ({"loss": nn.CrossEntropyLoss(reduction="none")}, r"one number.*shape \(2,\)"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_input_is_refused_before_any_step(given: dict[str, Any], message: str) -> None:
    model = given.get("model", network())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    mode, passes = model.training, []
    hook = model.register_forward_pre_hook(lambda module, _: passes.append(module.training))
    with pytest.raises(InputError, match=message) as caught:
        fit(**{"algorithm": "fish", **given, "model": model})
    hook.remove()
    assert str(caught.value).count("\n") <= 1
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not any(passes)  # no pass in training mode
    assert model.training is mode


def test_a_loss_that_is_not_finite_ends_the_training() -> None:
    train = changed(lambda x, y: (x, x[:, :1]))
    with pytest.raises(Diverged, match=r"fish: the (loss|gradient).* became (inf|nan) at step") as stop:
        fit("fish", nn.Linear(3, 1), train=train, steps=200, eval_every=1, optimizer=lambda p: SGD(p, 3.0))
    steps = [point.step for point in stop.value.history]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 1


class Large(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (torch.empty(2**48).sum() if self.training else 0.0)


def test_a_batch_that_is_larger_than_the_memory() -> None:
    with pytest.raises(InputError, match="4 examples from each of 3 domains do not fit in memory"):
        fit("erm", Large(3, 2))


class Pair(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


def test_outputs_that_cannot_be_scored_are_not() -> None:
    pair = {"model": Pair(3, 2), "classes": 2, "loss": lambda o, y: F.cross_entropy(o[0], y)}
    numbers = changed(lambda x, y: (x, x[:, 0]))
    several = {"model": nn.Linear(3, 3), "train": numbers, "loss": lambda o, y: o.mean()}
    for options in (pair, several):
        with pytest.warns(UserWarning, match="nothing is evaluated"):
            assert not fit(**options).last.scores
        with pytest.raises(InputError, match="train without other splits"):
            fit(**options, test=options.get("train", {"a": domain(0)}))
    with pytest.raises(InputError, match="the model's output is a tuple"):
        fit(model=Pair(3, 2), train=numbers)


def test_a_model_that_cannot_be_compiled_runs_as_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(function: Any) -> Any:
        def compiled(*args: Any) -> Any:
            raise RuntimeError("no compiler\nis here")

        return compiled

    plain = fit("fish").model.state_dict()
    monkeypatch.setattr(torch, "compile", fail)
    torch.testing.assert_close(fit("fish", compile=True).model.state_dict(), plain, rtol=0, atol=0)
    assert "cannot be compiled (RuntimeError: no compiler)" in caplog.text


def test_channels_last_is_the_layout_while_it_trains_and_changes_nothing() -> None:
    layouts: list[bool] = []

    class Layout(shoal.Callback):
        def on_step(self, state: Any) -> None:
            layouts.append(state.model[0].weight.is_contiguous(memory_format=torch.channels_last))

    def trained(**options: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
        images = torch.rand(8, 3, 6, 6, generator=torch.Generator().manual_seed(1))
        return fit("fish", model, train=dict.fromkeys("ab", (images, domain(0, 8)[1])), **options).model

    plain, last = trained(), trained(memory_format="channels-last", callbacks=[Layout()])
    assert layouts == [True, True]
    assert last[0].weight.is_contiguous()
    torch.testing.assert_close(plain.state_dict(), last.state_dict())


CE = nn.CrossEntropyLoss
NO_MEANS: dict[str, Any] = {
    "weight": CE(weight=torch.tensor([1.0, 5.0])),
    "ignore_index": CE(ignore_index=1),
    "sum": CE(reduction="sum"),
    "of the batch": lambda o, y: F.cross_entropy(o, y) + o.std(),
}


@pytest.mark.parametrize("kind", NO_MEANS)
def test_a_loss_that_is_no_mean_of_examples(kind: str) -> None:
    loss = NO_MEANS[kind]
    known = kind == "weight"  # what pieces are divided by is known
    with pytest.raises(InputError, match="accumulate=2 needs a loss that is the mean of its examples'"):
        fit("mixup" if known else "erm", loss=loss, accumulate=2)
    with pytest.raises(InputError, match="Fishr needs a loss that is the mean"):
        fit("fishr", loss=loss)
    fit(loss=loss)


@pytest.mark.parametrize("loss", [CE(), NO_MEANS["weight"]], ids=["plain", "weighted"])
def test_pieces_give_the_same_where_they_are_allowed(loss: Any) -> None:
    whole, pieces = (fit(loss=loss, accumulate=k).model for k in (1, 2))
    torch.testing.assert_close(whole.state_dict(), pieces.state_dict())
    with pytest.raises(InputError, match=r"accumulate=2 .* that of VREx is not"):
        fit("vrex", loss=loss, accumulate=2)


class WithoutLosses(Algorithm):
    def objective(self, out: Any, step: Any) -> Any:
        return self.losses(out).mean(), {}


class NoPair(Algorithm):
    def objective(self, out: Any, step: Any) -> Any:
        return self.losses(out).mean()


class NoLog(Algorithm):
    def step(self, batch: Any, engine: Any, step: Any) -> Any:
        super().step(batch, engine, step)


class FewGradients(Algorithm):
    def gradient(self, batch: Any, engine: Any, step: Any) -> Any:
        found, log = super().gradient(batch, engine, step)
        return found[:-1], log


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (WithoutLosses, "WithoutLosses must log 'losses', a tensor with one number per domain"),
        (NoPair, "objective must return a pair"),
        (NoLog, "NoLog must log 'losses'"),
        (FewGradients, "3 gradients for 4 parameters"),
    ],
)
def test_an_algorithm_that_returns_something_else(algorithm: type[Algorithm], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit(algorithm)


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


def test_a_sample_to_evaluate_is_shared_by_domains_and_bounded() -> None:
    few = sample(Domains.from_indices({"a": [5, 5, 1, 2, 3], "b": [1, 2, 3, 4, 5, 6]}), 6)
    assert few.sizes.tolist() == [3, 3]
    assert len(few.examples()) < 6
    domains = Domains.from_sizes({str(n): 2 for n in range(MOST_DOMAINS + 1000)})
    assert len(sample(domains, 100).indices) == MOST_DOMAINS


@pytest.mark.parametrize(("limit", "sampled"), [(None, (TRAIN_SAMPLE, 8000)), (7000, (7000, 8000))])
def test_training_domains_are_sampled_and_scores_say_so(limit: int | None, sampled: tuple[int, int]) -> None:
    train, test = ({n: domain(0, size) for n in "ab"} for size in (4000, 3000))
    run = fit(train=train, test=test, eval_limit=limit)
    assert run.scores("train").sampled == sampled
    assert run.scores("test").sampled is None
    assert run.scores("test").sizes == (3000, 3000)


@pytest.mark.parametrize(
    ("steps", "test", "options", "count"),
    [
        *((100, 160, {}, 10), (100, 161, {}, 5), (100, 961, {}, 1), (3, 961, {}, 1), (3, 9, {}, 3)),
        *((100, 4000, {"eval_every": 10}, 10), (100, 4000, {"patience": 100}, 10)),
    ],
)
def test_evaluations_cost_no_more_than_training(steps: int, test: int, options: Any, count: int) -> None:
    """1,600 examples are trained on; evaluations of 2,000, 40 of them from train, are never too many."""
    train = {n: domain(0, 20) for n in "ab"}
    run = fit(train=train, validation={"t": domain(1, test)}, steps=steps, batch_size=8, **options)
    assert len(run.history) == count
    assert run.last.step == steps
