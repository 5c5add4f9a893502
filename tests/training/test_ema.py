"""The exponential moving average, against a loop over a list of all weights."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import InputError
from shoal.training.averaging import EMA
from training.finetuning import assert_close, data, erm, fish, fit, network
from training.test_resume import BY_CRASH, check, send


def naive(weights: list[Tensor], decay: float) -> Tensor:
    mean = weights[0].double()
    for t, now in enumerate(weights[1:], 2):
        share = min(decay, (1 + t) / (10 + t))
        mean = share * mean + (1 - share) * now.double()
    return mean


def path(steps: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(3, 2, generator=draw).to(dtype) for _ in range(steps)]


@pytest.mark.parametrize("decay", [0.1, 0.5, 0.9, 0.999])
def test_as_the_formula(decay: float) -> None:
    weights, average = path(200), EMA(decay)
    assert average.weights() is None
    for step, now in enumerate(weights, 1):
        average.update(step, [now])
        (mean,) = average.weights() or []
        torch.testing.assert_close(mean, naive(weights[:step], decay), rtol=0, atol=1e-10)
        assert average.span == (1, step)
    assert not average.done


def test_half_precision_is_averaged_in_single() -> None:
    weights, average = path(300, torch.bfloat16), EMA(0.99)
    for step, now in enumerate(weights, 1):
        average.update(step, [now])
    (mean,) = average.weights() or []
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean.double(), naive(weights, 0.99), rtol=0, atol=1e-5)


def test_a_saved_state_goes_on_to_the_bit() -> None:
    weights, whole, first = path(30, torch.float32), EMA(0.9), EMA(0.9)
    for step, now in enumerate(weights, 1):
        whole.update(step, [now])
        if step <= 17:
            first.update(step, [now])
    again = EMA(0.9)
    again.load_state_dict(first.state_dict())
    for step in range(18, 31):
        again.update(step, [weights[step - 1]])
    assert torch.equal((again.weights() or [])[0], (whole.weights() or [])[0])
    with pytest.raises(InputError, match=r"saved with .*0\.9.*this one has .*0\.8"):
        EMA(0.8).load_state_dict(first.state_dict())


@pytest.mark.parametrize("decay", [0, 1, -0.5, 2, float("nan")])
def test_a_decay_that_is_none(decay: float) -> None:
    with pytest.raises(InputError, match="decay must be between 0 and 1"):
        EMA(decay)


def test_no_parameters() -> None:
    average = EMA()
    average.update(1, [])
    average.update(2, [])
    assert average.weights() == []


def followed(loop: Any, model: nn.Module, steps: int) -> list[dict[str, Tensor]]:
    seen = []

    def look(step: int, now: nn.Module) -> None:
        seen.append({k: v.detach().clone() for k, v in now.state_dict().items()})

    loop(model, data(), steps, seen=look)
    return seen


@pytest.mark.parametrize("decay", [None, 0.7])
@pytest.mark.parametrize(("algorithm", "loop"), [("erm", erm), ("fish", fish)])
def test_whole_trainings(algorithm: str, loop: Any, decay: float | None) -> None:
    """With Fish it is the mean of θ after each meta-step; every evaluation is of the mean so far."""
    run = fit(algorithm, average="ema", average_decay=decay, select="last")
    seen = followed(loop, network(), 12)
    mean = {k: naive([w[k] for w in seen], decay or 0.999) for k in seen[0]}
    assert_close(run.model, mean)
    assert run.rule == "last step, ema of steps 1 to 12"
    by_hand = network()
    x, y = data().examples.batch(torch.arange(60, 90))  # type: ignore[attr-defined]
    for point in run.history:
        by_hand.load_state_dict({k: naive([w[k] for w in seen[: point.step]], decay or 0.999) for k in mean})
        loss = nn.functional.cross_entropy(by_hand(x), y).item()
        assert point.scores["test"].loss == pytest.approx(loss, abs=1e-10)


def test_the_best_mean_is_selected_with_statistics_of_its_own() -> None:
    """BatchNorm's are those of the mean's features on training data."""
    run = fit("fish", network(nn.BatchNorm1d(6)), average="ema", average_decay=0.8)
    assert run.rule == "best on validation, ema"
    x, _ = data().examples.batch(torch.from_numpy(data().splits["train"].examples()).long())  # type: ignore[attr-defined]
    z = run.model.features[0](x)
    torch.testing.assert_close(run.model.features[1].running_mean, z.mean(0), rtol=0, atol=1e-10)


@BY_CRASH
@pytest.mark.parametrize("more", [{}, {"select": "last"}, {"warm_start": "head:3"}], ids=str)
def test_resumed(tmp_path: Path, act: Any, more: dict[str, Any]) -> None:
    check(tmp_path, [2, 7], act, average="ema", average_decay=0.9, **more)


def test_resumed_in_half_precision(tmp_path: Path) -> None:
    check(tmp_path, [7], send(signal.SIGTERM), average="ema", precision="bf16", algorithm="erm")
