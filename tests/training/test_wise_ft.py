"""WiSE-FT: interpolation between the weights at the start and the selected ones."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from shoal.training.averaging import interpolate
from training.finetuning import assert_close, data, erm, fish, fit, frozen, network

pytestmark = pytest.mark.filterwarnings("ignore:wise_ft interpolates", "ignore:average='swad|swad found")


class TestInterpolate:
    @pytest.mark.parametrize("alpha", [0, 0.0, 0.3, 0.5, 0.9, 1])
    def test_as_the_formula(self, alpha: float) -> None:
        start, end = network(nn.BatchNorm1d(6)), network(nn.BatchNorm1d(6))
        erm(end, data(), 9)
        found = interpolate(start.state_dict(), end.state_dict(), alpha)
        for name, value in end.state_dict().items():
            wanted = (1 - alpha) * start.state_dict()[name] + alpha * value
            if not value.is_floating_point():
                wanted = value
            torch.testing.assert_close(found[name], wanted, rtol=0, atol=1e-10)
            assert found[name].dtype == value.dtype
            assert found[name].data_ptr() != value.data_ptr()
        assert int(found["features.1.num_batches_tracked"]) == 9

    def test_a_mask_of_infinities_stays(self) -> None:
        mask = {"mask": torch.tensor([0.0, -torch.inf])}
        assert torch.equal(interpolate(mask, mask, 0.5)["mask"], mask["mask"])


def accuracy(model: nn.Module, given: Any, split: str) -> float:
    x, y = given.examples.batch(torch.from_numpy(given.splits[split].examples()).long())
    return float((model(x).argmax(1) == y).double().mean())


@pytest.mark.parametrize(("algorithm", "loop"), [("erm", erm), ("fish", fish)])
def test_a_number(algorithm: str, loop: Any) -> None:
    run = fit(algorithm, wise_ft=0.3, select="last")
    end = network()
    loop(end, data(), 12)
    wanted = interpolate(network().state_dict(), end.state_dict(), 0.3)
    assert_close(run.model, wanted)
    end.load_state_dict(wanted)
    for split in ("train", "validation", "test"):
        assert run.accuracy(split) == pytest.approx(accuracy(end, data(), split))
    assert run.rule == "last step, interpolated by 0.3 from the start"
    assert run.record["interpolation"] == {"alpha": 0.3}
    assert run.record["history"][run.record["selected"]] == run.selected.to_dict()
    assert len(run.record["history"]) == len(run.history) + 1


@pytest.mark.parametrize("turned", [False, True])
def test_chosen_on_validation(turned: bool) -> None:
    given = data(turned)
    run = fit("erm", None, given, wise_ft="validation", select="last", steps=30)
    end = network()
    erm(end, given, 30)
    model, scores = network(), {}
    for n in range(11):
        model.load_state_dict(interpolate(network().state_dict(), end.state_dict(), n / 10))
        scores[n / 10] = accuracy(model, given, "validation")
    best = max(a for a, score in scores.items() if score == max(scores.values()))
    found = run.record["interpolation"]
    assert {float(a): s for a, s in found["scores"].items()} == pytest.approx(scores)
    assert found["alpha"] == best
    assert (best < 0.5) is turned
    assert_close(run.model, interpolate(network().state_dict(), end.state_dict(), best))
    assert run.accuracy("validation") == pytest.approx(scores[best])


def test_from_the_end_of_the_warm_start() -> None:
    """The start is the model with its linear probe."""
    run = fit("fish", warm_start="head:5", wise_ft=0.4, select="last")
    start = network()
    with frozen(start, start.head):
        erm(start, data(), 5, start.head.parameters(), slots=1)
    end = copy.deepcopy(start)
    fish(end, data(), 12)
    assert_close(run.model, interpolate(start.state_dict(), end.state_dict(), 0.4))


@pytest.mark.parametrize("average", ["sma", "ema", "swad"])
def test_to_the_averaged_weights(average: str) -> None:
    options: dict[str, Any] = {"average": average, "eval_every": 1}
    end = fit("fish", **options)
    run = fit("fish", wise_ft=0.6, **options)
    assert_close(run.model, interpolate(network().state_dict(), end.model.state_dict(), 0.6))
    assert run.rule == f"{end.rule}, interpolated by 0.6 from the start"


def test_statistics_of_batchnorm() -> None:
    """Anew between the ends, which have their own."""

    def trained(**options: Any) -> nn.Module:
        return fit("erm", network(nn.BatchNorm1d(6)), select="last", **options).model

    end = trained()
    assert_close(trained(wise_ft=1), end)
    assert_close(trained(wise_ft=0), network(nn.BatchNorm1d(6)))
    half: Any = trained(wise_ft=0.5)
    x, _ = data().examples.batch(torch.from_numpy(data().splits["train"].examples()).long())  # type: ignore[attr-defined]
    wanted = half.features[0](x).mean(0)
    torch.testing.assert_close(half.features[1].running_mean, wanted, rtol=0, atol=1e-10)


def test_a_new_head_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="randomly initialised, train it first with warm_start='head'"):
        fit("erm", wise_ft=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit("erm", wise_ft=0.5, warm_start="head")
