"""LP-FT: a warm start that trains only the head, then all of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from algorithms.every_algorithm import network as toy_network
from shoal.errors import InputError
from shoal.models import FeatureModel
from shoal.training.callbacks import Callback, State
from training.finetuning import assert_close, data, erm, examples, fish, fit, frozen, network
from training.test_resume import captured


def probed(model: FeatureModel, steps: int) -> FeatureModel:
    with frozen(model, model.head):
        erm(model, data(), steps, model.head.parameters(), slots=1)
    return model


@pytest.mark.parametrize(("algorithm", "loop"), [("erm", erm), ("fish", fish)])
def test_as_two_loops_by_hand(algorithm: str, loop: Any) -> None:
    run = fit(algorithm, warm_start="head:7", select="last")
    by_hand = probed(network(), 7)
    loop(by_hand, data(), 12)
    assert_close(run.model, by_hand)
    assert [p.step for p in run.warm_up] == [7]


def test_the_rest_is_frozen_and_in_evaluation_mode() -> None:
    """BatchNorm's statistics and dropout too: the probe is that of the pretrained features."""

    class Look(Callback):
        def __init__(self) -> None:
            self.seen = list[tuple[bool, ...]]()
            self.after: dict[str, Tensor] = {}

        def on_step(self, state: State) -> None:
            if state.phase == "warm start":
                grads = {p.requires_grad for p in state.model.features.parameters()}
                modes = {m.training for m in state.model.features.modules()}
                self.seen.append((*grads, *modes, state.model.head.training))
                self.after = {k: v.clone() for k, v in state.model.state_dict().items()}

    look, model = Look(), network(nn.BatchNorm1d(6), dropout=0.5)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    run = fit("fish", model, warm_start="head:6", eval_every=2, callbacks=[look])
    assert look.seen == [(False, False, True)] * 6  # also after evaluations
    changed = {k for k, v in before.items() if not torch.equal(v, look.after[k])}
    assert changed == {"head.weight", "head.bias"}
    assert all(p.requires_grad for p in run.model.parameters())
    assert not torch.equal(run.model.features[0].weight, before["features.0.weight"])


def test_what_was_frozen_before_stays_so() -> None:
    model = network()
    model.features[0].bias.requires_grad_(False)
    before = model.features[0].bias.clone()
    run = fit(model=model, warm_start="head:2")
    assert not run.model.features[0].bias.requires_grad
    assert torch.equal(run.model.features[0].bias, before)
    assert run.model.features[0].weight.requires_grad


def test_a_plain_network_and_an_algorithm_with_features() -> None:
    """The head is the last linear layer; ``coral`` records its input meanwhile."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    body = model[0].weight.detach().clone()
    rates = iter([1e-12, 0.1])  # of the main training, which hardly moves, and of the probe
    run = fit("coral", model, warm_start="head:4", optimizer=lambda p: torch.optim.SGD(p, next(rates)))
    torch.testing.assert_close(run.model[0].weight, body, rtol=0, atol=1e-9)
    assert len(run.warm_up) == 1


def test_captured_is_as_eager() -> None:
    options: dict[str, Any] = {"warm_start": "head:20", "steps": 20, "eval_every": 10}
    whole = fit("fish", **options)
    with captured():
        run = fit("fish", **options)
    assert run.captured
    assert_close(run.model, whole.model)


class Odd(nn.Module):
    """Its linear layer does not return the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 2).double(), nn.Parameter(torch.ones(2).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def no_head() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 2, 1), nn.Flatten()).double()


def frozen_head() -> nn.Module:
    model = network()
    model.head.requires_grad_(False)
    return model


REFUSED: dict[str, tuple[Any, str, str]] = {
    "no head": (no_head, "head", "warm_start.*Sequential has no head"),
    "not its output": (Odd, "head:3", "warm_start.*Odd has no head"),
    "nothing else": (lambda: nn.Linear(4, 2).double(), "head", "Linear has no other parameters"),
    "frozen": (frozen_head, "head", "no parameter of it requires a gradient"),
}


@pytest.mark.parametrize(("make", "warm", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_is_refused(make: Any, warm: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit(model=make(), warm_start=warm)


def test_the_head_of_a_regression() -> None:
    """It ends with a reshape."""
    x, _ = examples(0)
    train = {"a": (x.float(), x[:, 0].float())}
    run = shoal.fit("erm", toy_network(None), train, steps=3, warm_start="head", progress=False, device="cpu")
    assert [p.step for p in run.warm_up] == [1]
