"""Pretrained backbones: the learning rate that follows them, and features of frozen ones."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import shoal
from shoal.cli import main
from shoal.errors import InputError
from shoal.experiments import frozen
from shoal.experiments.config import RunConfig, read_config
from shoal.experiments.run import Turns, _factor, prepare, run
from shoal.experiments.search import is_pretrained, with_format, with_rate
from shoal.training.stopping import Signals

BACKBONE = "mobilenetv2_035"
needs_timm = pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")


def config(**more: Any) -> RunConfig:
    return RunConfig("linear", "erm", more.pop("steps", 200), **more)


@pytest.mark.parametrize(
    ("fields", "lr", "schedule", "wanted"),
    [
        ({}, None, None, (1e-3, None)),
        ({}, 0.1, "cosine", (0.1, "cosine")),
        ({"weights": "w.pt"}, None, None, (5e-5, "warmup:10")),
        ({"weights": "w.pt", "steps": 3}, None, None, (5e-5, "warmup:1")),
        ({"weights": "w.pt", "steps": 10**6}, None, None, (5e-5, "warmup:500")),
        ({"weights": "w.pt"}, 1e-3, None, (1e-3, None)),
        ({"weights": "w.pt"}, None, "cosine", (5e-5, "cosine")),
        ({"weights": "w.pt"}, None, "constant", (5e-5, None)),
        ({"model": "resnet18", "model_options": {"pretrained": True}}, None, None, (5e-5, "warmup:10")),
        ({"model": "resnet18", "model_options": {"pretrained": False}}, None, None, (1e-3, None)),
        ({"model": "bert-base-uncased"}, None, None, (5e-5, "warmup:10")),
        ({"weights": "w.pt", "model_options": {"frozen": True}}, None, None, (1e-3, None)),
    ],
)
def test_the_rate_follows_the_model(fields: dict[str, Any], lr: Any, schedule: Any, wanted: Any) -> None:
    chosen, shown = with_rate(config(**fields), lr, schedule)
    assert (chosen.optimizer_options["lr"], chosen.schedule) == wanted
    assert bool(shown) is (lr is None and wanted[0] == 5e-5)
    assert with_rate(chosen, chosen.optimizer_options["lr"], chosen.schedule)[0] == chosen


@pytest.mark.parametrize(
    ("fields", "auto"),
    [
        ({}, False),
        ({"weights": "w.pt"}, False),
        ({"model": "small-cnn", "weights": "w.pt"}, False),
        ({"model": "resnet18"}, False),
        ({"model": "resnet18", "weights": "w.pt"}, True),
        ({"model": "resnet50.tv_in1k"}, True),
        ({"model": "resnet50.tv_in1k", "model_options": {"frozen": True}}, False),
        ({"model": "bert-base-uncased"}, True),
        ({"dataset": "amazon"}, True),
        ({"dataset": "amazon", "model_options": {"pretrained": False}}, False),
    ],
)
def test_backbones_are_computed_in_what_is_fastest(fields: dict[str, Any], auto: bool) -> None:
    plain = RunConfig(**{"dataset": "linear", "algorithm": "erm", "steps": 9, **fields})
    chosen = with_format(plain)
    assert (chosen.precision, chosen.memory_format) == (("auto", "auto") if auto else (None, None))
    assert (chosen.identity == plain.identity) is not auto
    pinned = replace(plain, precision="fp32", memory_format="contiguous")
    assert with_format(pinned) == pinned
    assert pinned.identity == plain.identity


def test_datasets_of_text_bring_a_pretrained_model() -> None:
    assert is_pretrained(RunConfig("amazon", "erm", 9))
    assert not is_pretrained(RunConfig("amazon", "erm", 9, model_options={"pretrained": False}))
    assert not is_pretrained(RunConfig("rotated-digits", "erm", 9))


def test_warm_up_then_another_schedule() -> None:
    rates = [_factor(config(steps=10, schedule="warmup:4"), t) for t in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    both = config(steps=10, schedule="warmup:4,cosine")
    assert _factor(both, 5) == pytest.approx((1 + math.cos(math.pi / 2)) / 2)
    assert _factor(both, 1) == pytest.approx(0.5 * (1 + math.cos(math.pi / 10)) / 2)
    assert _factor(config(steps=10, schedule="warmup:2,linear"), 5) == 0.5
    assert _factor(config(steps=10, schedule="warmup:2,step:0.5:3"), 6) == 0.25
    for wrong in ("warmup", "warmup:0", "warmup:x", "warmup:-1", "warmup:2,cos", "cos"):
        with pytest.raises(InputError, match=r"schedule|warmup"):
            config(schedule=wrong)


def test_a_warm_up_is_resumed_to_the_same_bits(tmp_path: Path) -> None:
    whole = config(steps=12, schedule="warmup:8,cosine", batch_size=4)
    run(whole, "cpu", folder=tmp_path / "whole")
    how = {"checkpoint_every": 5}
    turns = Turns(whole, "cpu", folder=tmp_path / "part", how=how)
    with Signals(True) as signals:
        for _ in (stages := turns.take(signals)):
            assert turns.training is not None
            if turns.training.step >= 5:
                stages.close()  # type: ignore[attr-defined]
                break
    assert turns.record is None
    run(whole, "cpu", folder=tmp_path / "part", how=how)
    same = [(tmp_path / d / "model.safetensors").read_bytes() for d in ("whole", "part")]
    assert same[0] == same[1]


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    for d, domain in enumerate(("lima", "oslo", "rome")):
        for c, label in enumerate(("dark", "light")):
            (tmp_path / "pics" / domain / label).mkdir(parents=True)
            for i in range(10):
                colour = (60 * d + i, 40 + 150 * c, 9 * i)
                Image.new("RGB", (40, 40), colour).save(tmp_path / "pics" / domain / label / f"{i}.png")
    return tmp_path


GIVEN = ["--data", "size=32", "--batch-size", "4", "--device", "cpu", "--model", BACKBONE, "--steps", "6"]


@needs_timm
def test_a_head_is_trained_on_features_that_are_kept(
    images: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Computed once, for all algorithms and held-out domains; the run then predicts from image files."""
    computed: list[int] = []
    plain = frozen._computed
    monkeypatch.setattr(frozen, "_computed", lambda *a: computed.append(1) or plain(*a))
    monkeypatch.setattr(frozen, "_last", {})
    given = ["pics", *GIVEN, "--freeze-backbone"]
    for algorithm, out in (("erm", ["oslo", "rome"]), ("coral", ["lima"])):
        assert main(["train", algorithm, *given, "--held-out", *out, "--out", f"r-{algorithm}"]) == 0
        monkeypatch.setattr(frozen, "_last", {})  # as in another process
    assert len(computed) == 1
    assert "pretrained" not in capsys.readouterr().err  # a new head is trained: 0.001
    assert read_config(images / "r-erm").model_options == {"frozen": True}
    training = prepare(read_config(images / "r-erm"), "cpu")
    trained = load_file(images / "r-erm" / "model.safetensors")
    moved = {n for n, v in training.model.state_dict().items() if not torch.equal(trained[n], v)}
    assert moved == {"head.weight", "head.bias"}
    assert main(["predict", "r-erm", "pics/lima/dark", "--out", "p.csv"]) == 0
    assert len((images / "p.csv").read_text().splitlines()) == 11
    # The features of the cache are those of the images.
    again: Any = training.data.examples
    raw: Any = shoal.data.sets.load("image-folder", folder="pics", size=32, augment=False).examples
    x = torch.stack([raw[i][0] for i in range(3)])
    torch.testing.assert_close(training.model.eval().features(x), again.x[:3], rtol=1e-4, atol=1e-5)
    # A changed image has other features.
    Image.new("RGB", (40, 40), (200, 0, 0)).save(images / "pics/lima/dark/0.png")
    prepare(read_config(images / "r-erm"), "cpu")
    assert len(computed) == 2


@needs_timm
def test_compare_takes_weights_and_model_options(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from shoal.models import build

    theirs = build(BACKBONE, input_shape=(3, 32, 32), classes=9, seed=5)
    torch.save(theirs.features.body.state_dict(), "w.pt")
    few = ["--algorithms", "erm", "--seeds", "1", "--search", "2", "--held-out", "oslo", "--jobs", "1"]
    given = ["compare", "pics", *GIVEN, *few, "--weights", "w.pt", "--model-set", "dropout=0.1"]
    assert main([*given, "--plan", "--out", "out"]) == 0
    shown = capsys.readouterr().err
    assert "The model is pretrained: learning rate 5e-05, with a warmup of 1 step" in shown
    plan = json.loads((images / "out" / "image-folder.plan.json").read_text())
    every = [RunConfig.from_dict(one["config"]) for one in plan]
    assert every[0].algorithm == "majority"  # what any of them must beat
    runs = [r for r in every if r.algorithm == "erm"]
    assert {(r.weights, r.model_options["dropout"], r.schedule) for r in runs} == {("w.pt", 0.1, "warmup:1")}
    assert runs[0].optimizer_options["lr"] == 5e-5
    assert 1e-5 <= runs[1].optimizer_options["lr"] <= 10**-3.5


def test_what_cannot_be_frozen_is_said(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["train", "erm", "pics", "--freeze-backbone", "--out", "x"]
    assert main(given) == 2
    assert "--freeze-backbone requires a timm model" in capsys.readouterr().err
    assert main([*given, "--model", "small-cnn"]) == 2
    assert "frozen" in capsys.readouterr().err
