"""Models, data, losses and algorithms that do not go together are refused before any step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.algorithms import Algorithm
from shoal.errors import InputError
from shoal.models import FeatureModel
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
    "best of nothing": ({"select": "best"}, "validation"),
    "patience with nothing": ({"patience": 3}, "patience: 3 requires validation"),
    "optimizer instance": ({"optimizer": SGD(network().parameters(), 0.1)}, "optimizer must"),
    "optimizer of others": (
        {"optimizer": lambda p: SGD(nn.Linear(1, 1).parameters(), 0.1)},
        "optimizer must train the parameters",
    ),
    "nothing to train": ({"model": network().requires_grad_(False)}, "no parameter that requires a gradient"),
    "no parameter": ({"model": nn.Linear(3, 2).requires_grad_(False)}, "nothing to train"),
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


class NoPair(Algorithm):
    def objective(self, out: Any, step: Any) -> Any:
        return self.losses(out).mean()


def test_an_algorithm_that_returns_something_else() -> None:
    with pytest.raises(InputError, match="objective must return a pair"):
        fit(NoPair)
