"""WiSE-FT: interpolation between the weights at the start and the selected ones."""

from __future__ import annotations

import copy
import json
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import InputError
from shoal.experiments.record import RunRecord
from shoal.training.averaging import interpolate
from training.finetuning import assert_close, data, erm, fish, fit, frozen, network
from training.test_resume import BY_CRASH, TURNED, check, send

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

    def test_the_ends_are_exact(self) -> None:
        a, b = {"w": torch.randn(50)}, {"w": torch.randn(50) * 1e6}
        assert torch.equal(interpolate(a, b, 0)["w"], a["w"])
        assert torch.equal(interpolate(a, b, 1)["w"], b["w"])

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision(self, dtype: torch.dtype) -> None:
        a, b = torch.randn(50).to(dtype), torch.randn(50).to(dtype)
        found = interpolate({"w": a}, {"w": b}, 0.3)["w"]
        assert found.dtype == dtype
        torch.testing.assert_close(found, (0.7 * a.double() + 0.3 * b.double()).to(dtype))

    def test_a_mask_of_infinities_stays(self) -> None:
        mask = {"mask": torch.tensor([0.0, -torch.inf])}
        assert torch.equal(interpolate(mask, mask, 0.5)["mask"], mask["mask"])

    @pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan"), True])
    def test_alpha(self, alpha: Any) -> None:
        with pytest.raises(InputError, match="alpha must be a number from 0 to 1"):
            interpolate({}, {}, alpha)

    @pytest.mark.parametrize("other", [{}, {"v": torch.zeros(2)}, {"w": torch.zeros(3)}], ids=str)
    def test_another_model(self, other: dict[str, Tensor]) -> None:
        with pytest.raises(InputError, match="of different models"):
            interpolate({"w": torch.zeros(2)}, other, 0.5)


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


class Frozen(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


def test_frozen_batchnorm_keeps_its_statistics() -> None:
    run = fit("erm", network(Frozen(6)), wise_ft=0.5)
    assert torch.equal(run.model.features[1].running_mean, torch.zeros(6).double())


def test_the_record(tmp_path: Path) -> None:
    fit("erm", wise_ft="validation", folder=tmp_path)
    content = json.loads((tmp_path / "record.json").read_text())
    record = RunRecord.from_dict(content)
    assert record.config.wise_ft == "validation"
    assert list(record.interpolation["scores"]) == ["0", *(f"0.{n}" for n in range(1, 10)), "1"]
    for wrong in ({"alpha": "a"}, {"beta": 1}, {"alpha": 1, "scores": 3}, []):
        with pytest.raises(InputError):
            RunRecord.from_dict({**content, "interpolation": wrong})


def test_a_new_head_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="randomly initialised, train it first with warm_start='head'"):
        fit("erm", wise_ft=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit("erm", wise_ft=0.5, warm_start="head")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no validation": (
        {"wise_ft": "validation", "eval_splits": ["test"]},
        "wise_ft='validation'.* validation data",
    ),
    "too much": ({"wise_ft": 1.5}, "wise_ft must be .*a number from 0 to 1"),
    "no word": ({"wise_ft": "valid"}, "wise_ft must be .*Did you mean 'validation'"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit(**options)


RESUMED: dict[str, dict[str, Any]] = {
    "number": {"wise_ft": 0.4},
    "validation": {"wise_ft": "validation", "validation": TURNED},
    "warm start": {"wise_ft": "validation", "warm_start": "head:3"},
    "swad": {"wise_ft": "validation", "average": "swad", "eval_every": 1},
    "ema": {"wise_ft": 0.5, "average": "ema", "select": "last"},
}


@pytest.mark.parametrize("options", RESUMED.values(), ids=RESUMED.keys())
def test_resumed(tmp_path: Path, options: dict[str, Any]) -> None:
    check(tmp_path, [2, 8], send(signal.SIGTERM), **options)


@BY_CRASH
def test_stopped_when_all_is_trained(tmp_path: Path, act: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While α is chosen."""
    from shoal.training.selection import Selection

    options: dict[str, Any] = {"wise_ft": "validation", "folder": tmp_path / "run", "steps": 4}
    whole = fit("fish", **{**options, "folder": tmp_path / "whole"})
    choose = Selection._interpolate

    def stop(self: Selection, start: Any) -> None:
        act(0)
        choose(self, start)

    monkeypatch.setattr(Selection, "_interpolate", stop)
    with pytest.raises((KeyboardInterrupt, Exception)):
        fit("fish", **options)
    monkeypatch.undo()
    run = fit("fish", resume=True, **options)
    assert_close(run.model, whole.model)
    assert run.record["interpolation"] == whole.record["interpolation"]


def test_in_a_run_of_shoal_train(tmp_path: Path) -> None:
    run = shoal.train(
        "erm", "rotated-digits", steps=4, wise_ft="validation", warm_start="head:2", out=tmp_path / "r",
        progress=False, device="cpu",
    )  # fmt: skip
    assert "interpolated by" in str(run)
    assert run.record.interpolation["alpha"] in [n / 10 for n in range(11)]
