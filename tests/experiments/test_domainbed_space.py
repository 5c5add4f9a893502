"""What a sweep tries is what DomainBed's registry says, for small and for large images."""

from __future__ import annotations

from typing import Any

import pytest

from references import domainbed_space as domainbed
from shoal.algorithms import algorithm_class
from shoal.algorithms.penalty import Schedule
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
