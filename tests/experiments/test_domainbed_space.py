"""What a sweep tries is what DomainBed's registry says, for small and for large images."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from references import domainbed_space as domainbed
from shoal import datasets as sets
from shoal.algorithms import algorithm_class
from shoal.algorithms.penalty import Schedule
from shoal.data.batch import DomainData, TensorData
from shoal.data.domains import Domains
from shoal.experiments import protocol, search
from shoal.settings import Size, search_space

SHARES = [0.0, 1e-9, 0.1, 0.249, 0.251, 1 / 3 - 1e-9, 1 / 3 + 1e-9, 0.499, 0.5, 0.7, 0.999, 1 - 2**-53]
NOT_THERE = {"mldg": {"inner_lr"}}
"""Searched here and not in DomainBed, whose virtual step has the learning rate of the others."""
OTHER_DEFAULTS = {("sand-mask", "tau"): 0.5, ("eqrm", "quantile_lr"): None}
"""With DomainBed's 1.0 nothing is learned; and a sweep's first trial takes EQRM's 1e-6 (tested below)."""

every_size = pytest.mark.parametrize("size", ["small", "large"])


def drawn(space: search.Space, share: float, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(search, "_uniform", lambda *_: share)
    return search.sample(space, 0, 1)


def steps(setting: str, value: Any) -> Any:
    """A share of a training of DomainBed's length, in steps."""
    return Schedule(1.0, value, steps=protocol.STEPS).start if setting == "start" else value


@every_size
@pytest.mark.parametrize("name", domainbed.ALGORITHMS)
def test_an_algorithms_settings(name: str, size: Size, monkeypatch: pytest.MonkeyPatch) -> None:
    space = search_space(algorithm_class(name), size)
    expected = domainbed.own(name, size)
    assert space.keys() - NOT_THERE.get(name, set()) == expected.keys()
    first = search.sample(space, 0, 0)
    for setting, entry in expected.items():
        default = OTHER_DEFAULTS.get((name, setting), entry.default)
        assert steps(setting, first[setting]) == default
        for share in SHARES:
            found = drawn(space, share, monkeypatch)[setting]
            wanted = entry.at(share)
            found = round(5000 * found) if setting == "start" else found
            assert found == (wanted if entry.whole or entry.choice else pytest.approx(wanted, rel=1e-12))
            assert type(found) is type(wanted)


@pytest.mark.parametrize(("name", "size"), [("small", protocol.SMALL), ("large", protocol.LARGE)])
def test_what_all_algorithms_share(name: str, size: protocol.Spaces, monkeypatch: pytest.MonkeyPatch) -> None:
    assert size.size == name
    expected = {"lr": domainbed.RATES[name], "batch_size": domainbed.BATCHES[name]}
    if name == "large":
        expected |= {"weight_decay": domainbed.DECAYS[name], "dropout": domainbed.DROPOUT}
    space = {**size.optimizer, **size.batch, **size.model}
    assert {k: v["default"] for k, v in space.items()} == {k: v.default for k, v in expected.items()}
    for share in SHARES:
        wanted = {k: v.at(share) for k, v in expected.items()}
        assert drawn(space, share, monkeypatch) == pytest.approx(wanted, rel=1e-12)
        batch = protocol.spaces_of("domainnet", (3, 224, 224)).batch
        (found,) = drawn(batch, share, monkeypatch).values()
        assert found == domainbed.DOMAINNET_BATCHES.at(share)


SIZES = {"small": "rotated-digits", "large": "pacs"}


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The runs of a sweep in which images are small or large."""

    def make(name: str, size: str, draws: int = 4, **common: Any) -> list[Any]:
        side = 28 if size == "small" else 224
        x, y = torch.zeros(4, 3, side, side), torch.zeros(4, dtype=torch.long)
        splits = {"train": Domains.from_indices({"a": [0, 1], "b": [2, 3]})}
        data = DomainData(TensorData(x, y), splits, 2, (3, side, side), "small-cnn")
        monkeypatch.setattr(sets, "load", lambda *_, **__: data)
        names = {SIZES[size]: ["a"]}
        return protocol.plan(
            {SIZES[size]: {}}, [name], seeds=1, search=draws, held_out=names, model="small-cnn", **common
        )

    return make


@pytest.mark.parametrize("name", ["dann", "cdann"])
def test_adversarial_runs_are_domainbeds(name: str, configs: Any) -> None:
    small, large = configs(name, "small"), configs(name, "large", 20)
    assert (small[0].settings, small[0].lr) == ({"form": "domainbed"}, 1e-3)
    assert (large[0].settings, large[0].lr) == ({"form": "domainbed", "discriminator_lr": 5e-5}, 5e-5)
    assert small[0].optimizer_options == {"betas": [0.5, 0.9]}
    assert large[0].optimizer_options == {"weight_decay": 0.0, "betas": [0.5, 0.9]}
    for config in small[1:] + large[1:]:
        assert config.optimizer_options["betas"] == [config.settings["beta1"], 0.9]
        assert set(config.settings) == {*domainbed.own(name, "small"), "form"}
    assert all(1e-5 <= c.settings["discriminator_lr"] <= 10**-3.5 for c in large[1:])
    assert {c.settings["beta1"] for c in large[1:]} == {0.0, 0.5}
    (plain,) = configs(name, "small", 1, optimizer="sgd")
    assert plain.optimizer_options == {}  # SGD has no betas


@pytest.mark.parametrize(
    ("name", "way"),
    [("erm", "domains"), ("sam", "domains"), ("fish", None), ("reweighted", None), ("erm:pooled", "pooled")],
)
def test_pooled_algorithms_get_a_batch_of_each_domain(name: str, way: str | None, configs: Any) -> None:
    assert {c.draw for c in configs(name, "small")} == {way}
