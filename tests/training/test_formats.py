"""Memory formats and precisions: the same results in each, and a trial that leaves no trace."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.models import FeatureModel
from shoal.optim import Fish
from shoal.training import formats
from shoal.training.engine import Engine
from shoal.training.formats import Format, lay_out
from shoal.training.loop import Training
from shoal.training.options import complete


def images(size: int = 12, dtype: torch.dtype = torch.float64) -> dict[str, tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(size) % 2
    return {
        name: (
            torch.randn(size, 3, 8, 8, generator=draw, dtype=torch.float64).to(dtype)
            + y[:, None, None, None],
            y,
        )
        for name in "abc"
    }


def network(between: nn.Module | None = None) -> FeatureModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        body = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3, groups=6),
            nn.Conv2d(6, 5, 1),
            nn.Tanh(),
            between or nn.Identity(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        return FeatureModel(body, nn.Linear(20, 2)).double()


def fit(name: str, model: nn.Module, **options: Any) -> Any:
    own: dict[str, Any] = {
        "steps": 4,
        "batch_size": 6,
        "domains_per_step": 3,
        "eval_every": 2,
        "progress": False,
    }
    data = images()
    return shoal.fit(name, model, data, validation=data, device="cpu", **own | options)


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


class Views(nn.Module):
    """Which cannot take its input with the channels last."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1).view(x.shape)


class Watching(nn.Module):
    """Keeps how its inputs lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[bool, bool]] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add((self.training, x.is_contiguous(memory_format=torch.channels_last)))
        return x


# One of each kind.
KINDS = ["erm", "fish", "idgm", "smoothfish", "reptile", "coral", "dann", "groupdro", "fishr", "mixup", "irm"]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_finds_the_same_with_the_channels_last(name: str) -> None:
    plain, other = network(), network()
    # Not Adam, which divides gradients that are zero up to rounding by their size.
    sgd: dict[str, Any] = {"optimizer": torch.optim.SGD, "lr": 0.01}
    one, two = fit(name, plain, **sgd), fit(name, other, **sgd, memory_format="channels-last")
    assert two.record["environment"]["memory_format"] == "channels-last"
    assert difference(plain, network()) > 1e-4
    assert difference(plain, other) < 1e-12
    for a, b in zip(one.history, two.history, strict=True):
        assert a.scores["validation"].loss == pytest.approx(b.scores["validation"].loss, abs=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        *({"average": "sma"}, {"average": "swad", "eval_every": 1}, {"accumulate": 2}, {"clip": 0.1}),
        *(
            {"warm_start": 3},
            {"track_every": 1},
            {"select": "last"},
        ),
    ],
    ids=str,
)
def test_whatever_the_options(options: dict[str, Any]) -> None:
    plain, other = network(), network()
    with pytest.warns() if "swad" in options.values() else nullcontext():
        fit("fish", plain, optimizer=torch.optim.SGD, lr=0.1, **options)
        fit("fish", other, optimizer=torch.optim.SGD, lr=0.1, memory_format="channels-last", **options)
    assert difference(plain, other) < 1e-12


def test_inputs_and_weights_are_laid_out_while_it_trains() -> None:
    seen: list[bool] = []

    class Look(shoal.Callback):
        def on_step(self, state: Any) -> None:
            weight = state.model.features[0].weight
            slow = state.optimizer.state[weight]["slow"]
            moment = state.optimizer.state[weight]["exp_avg"]
            seen.extend(t.is_contiguous(memory_format=torch.channels_last) for t in (weight, slow, moment))

    watching = Watching()
    model = FeatureModel(nn.Sequential(watching, *network().features), network().head)
    model.features[0], model.features[1] = model.features[1], model.features[0]  # a convolution first
    result = fit("fish", model, memory_format="channels-last", callbacks=[Look()])
    assert all(seen)
    assert len(seen) == 12
    assert watching.seen >= {(True, True), (False, True)}
    assert all(p.is_contiguous() for p in model.parameters())
    assert result.record["config"]["memory_format"] == "channels-last"


@pytest.mark.parametrize("name", ["fish", "erm", "dann"])
def test_a_resumed_run_is_bit_identical(tmp_path: Path, name: str) -> None:
    class Stop(shoal.Callback):
        def on_checkpoint(self, state: Any) -> None:
            if state.step == 3:
                raise KeyboardInterrupt

    options: dict[str, Any] = {"memory_format": "channels-last", "checkpoint_every": 3, "average": "sma"}
    whole, parts = network(), network()
    fit(name, whole, folder=tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        fit(name, network(), folder=tmp_path / "parts", callbacks=[Stop()], **options)
    fit(name, parts, folder=tmp_path / "parts", resume=True, callbacks=[shoal.Callback()], **options)
    assert difference(whole, parts) == 0


def test_a_model_that_cannot_is_trained_as_it_is() -> None:
    plain, other = network(Views()), network(Views())
    fit("erm", plain)
    with pytest.warns(UserWarning, match="not computed in channels-last fp32, in which it fails: view size"):
        result = fit("erm", other, memory_format="channels-last")
    assert difference(plain, other) == 0
    assert result.record["config"]["memory_format"] == "channels-last"


def test_auto_on_the_cpu_is_contiguous_and_tries_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_seconds", None)
    plain, other = network(), network()
    fit("erm", plain)
    result = fit("erm", other, memory_format="auto", precision="auto")
    assert difference(plain, other) == 0
    found = result.record["environment"]
    assert (found["memory_format"], found["precision"]) == ("contiguous", "fp32")
    assert "trial" not in found


class Clock:
    """In place of timing: the time of every format, and what the trial was run on."""

    def __init__(self, seconds: dict[Format, float]) -> None:
        self.seconds, self.tried = seconds, list[tuple[bool, bool]]()

    def __call__(self, setup: Training, batches: Any, timed: bool) -> float:
        weight = setup.model.features[0].weight
        last = not weight.is_contiguous() and weight.is_contiguous(memory_format=torch.channels_last)
        half = bool(setup.algorithm.autocast().__class__ is torch.autocast)
        self.tried.append((last, half))
        assert all(b.x.is_contiguous() != last for b in batches)
        setup.model.train()
        setup.engine.begin()
        setup.algorithm.gradient(batches, setup.engine)
        with torch.no_grad():
            weight.zero_()
        return self.seconds[Format("channels-last" if last else "contiguous", "bf16" if half else "fp32")]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    every = [Format(m, p) for p in ("fp32", "bf16") for m in ("contiguous", "channels-last")]
    found = Clock(dict(zip(every, (4.0, 3.0, 3.5, 2.0), strict=True)))
    monkeypatch.setattr(formats, "_seconds", found)
    monkeypatch.setattr(formats, "candidates", lambda setup: every)
    return found


class TestTrial:
    """As on CUDA, but for the clock."""

    def test_takes_the_fastest_and_is_recorded(self, clock: Clock, tmp_path: Path) -> None:
        result = fit("erm", network(), memory_format="auto", precision="auto", folder=tmp_path)
        assert clock.tried == [(False, False), (True, False), (False, True), (True, True)]
        found = result.record["environment"]
        assert (found["memory_format"], found["precision"]) == ("channels-last", "bf16")
        assert found["trial"].startswith("contiguous fp32 4000.0 ms, channels-last fp32 3000.0 ms, ")
        assert "channels-last" in (tmp_path / "card.md").read_text()
        first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
        assert first["format"]["precision"] == "bf16"

    def test_leaves_everything_as_it_was(self, clock: Clock) -> None:
        options = complete(
            steps=4, batch_size=6, memory_format="auto", precision="auto", device="cpu", progress=False
        )
        made = Training(
            "fish", network(nn.Dropout(0.5)), shoal.api.fit.as_domain_data(images(), None, None), options
        )
        tensors = [*made.algorithm.parameters(), *made.algorithm.buffers()]
        before = [(t.data_ptr(), t.stride(), t.detach().clone()) for t in tensors]
        random, state = torch.get_rng_state(), made.engine.optimizer.state_dict()
        choice = formats.choose(made, 0)
        assert choice.format == Format("channels-last", "bf16")
        for tensor, (place, stride, value) in zip(tensors, before, strict=True):
            assert (tensor.data_ptr(), tensor.stride()) == (place, stride)
            assert torch.equal(tensor, value)
        assert torch.equal(torch.get_rng_state(), random)
        assert made.engine.optimizer.state_dict() == state
        assert all(p.grad is None for p in made.model.parameters())


def test_gradients_are_laid_out_as_the_parameters() -> None:
    """As fused optimizers on CUDA want them."""
    model = nn.Conv2d(3, 4, 3).double()
    lay_out(model)
    engine = Engine(Fish(torch.optim.SGD(model.parameters(), 0.1), 2))
    seen: list[tuple[int, ...]] = []
    engine.optimizer.inner.register_step_pre_hook(lambda *_: seen.append(model.weight.grad.stride()))
    engine.apply([torch.ones_like(p).contiguous() for p in model.parameters()])
    assert seen == [model.weight.stride()]
