"""Random search: draws are a function of seed, number and name, inside what the space says."""

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.algorithms import algorithm_class, registry, settings_of
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.search import candidates, draw
from shoal.settings import search_space

SPACE: dict[str, dict[str, Any]] = {
    "weight": {"default": 1.0, "log10": [-2, 1]},
    "rate": {"default": 0.5, "uniform": [0.25, 0.75]},
    "size": {"default": 7, "log2": [0.5, 5.5], "whole": True},
    "how": {"default": "a", "choice": ["a", "b", None]},
}


def test_a_draw_is_the_same_everywhere() -> None:
    assert draw(SPACE, seed=3, number=0) == {"weight": 1.0, "rate": 0.5, "size": 7, "how": "a"}
    found = draw(SPACE, seed=0, number=1)
    assert (found["size"], found["how"]) == (2, "b")
    assert (found["weight"], found["rate"]) == pytest.approx((0.08658596568764823, 0.3595965744097215))


def test_a_setting_does_not_depend_on_the_others() -> None:
    backwards = dict(reversed(SPACE.items()))
    for number in range(5):
        whole = draw(SPACE, 1, number)
        assert draw(backwards, 1, number) == whole
        assert [draw({name: SPACE[name]}, 1, number)[name] for name in SPACE] == list(whole.values())
    assert draw({"other": SPACE["weight"]}, 1, 1)["other"] != draw(SPACE, 1, 1)["weight"]


def test_draws_fill_the_space_evenly() -> None:
    many = [draw(SPACE, 0, number) for number in range(1, 2001)]
    assert statistics.fmean(math.log10(d["weight"]) for d in many) == pytest.approx(-0.5, abs=0.1)
    assert statistics.fmean(d["rate"] for d in many) == pytest.approx(0.5, abs=0.02)
    assert {*range(1, 45)} <= {d["size"] for d in many} <= {*range(1, 46)}  # 2^5.5 is 45.3
    assert sum(d["size"] == 1 for d in many) / 2000 == pytest.approx(0.1, abs=0.02)  # 2^0.5 up to 2
    counts = [sum(d["how"] == choice for d in many) for choice in SPACE["how"]["choice"]]
    assert min(counts) > 600


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**70),
    st.integers(1, 10**6),
    st.tuples(st.floats(-30, 30), st.floats(-30, 30)).map(sorted),
    st.text(max_size=5),
)
def test_draws_stay_inside(seed: int, number: int, ends: list[float], name: str) -> None:
    low, high = ends

    def drawn(**about: Any) -> Any:
        return draw({name: {"default": 0, **about}}, seed, number)[name]

    assert low <= drawn(uniform=ends) <= high
    assert 10.0**low <= drawn(log10=ends) <= 10.0**high
    assert 2.0**low <= drawn(log2=ends) <= 2.0**high
    assert drawn(choice=ends) in ends
    whole = drawn(uniform=ends, whole=True)
    assert isinstance(whole, int)
    assert whole == math.floor(drawn(uniform=ends))
    assert drawn(uniform=ends, of=7) == whole / 7


@pytest.mark.parametrize(
    "about",
    [
        {"choice": [1]},  # no default
        {"default": 1},
        {"default": 1, "choice": [1], "log2": [0, 1]},
        {"default": 1, "log": [0, 1]},
        {"default": 1, "choice": []},
        {"default": 1, "uniform": [1, 0]},
        {"default": 1, "log10": [0, math.inf]},
        {"default": 1, "choice": ["a"], "whole": True},
        {"default": 1, "uniform": [0, 1], "of": 0},
    ],
)
def test_a_malformed_space_names_the_setting(about: Any) -> None:
    with pytest.raises(InputError, match="'odd'"):
        draw({**SPACE, "odd": about}, 0, 0)


def config(algorithm: str, lr: float = 1e-3, seed: int = 0) -> RunConfig:
    return RunConfig("linear", algorithm, 5, lr=lr, seed=seed)


def test_candidates() -> None:
    first, *drawn = candidates(config("fish", 0.02), 4)
    assert first == ({}, {"lr": 0.02})
    assert len(drawn) == 3
    assert all(set(settings) == {"meta_lr"} for settings, _ in drawn)
    assert all(10**-4.5 <= rate["lr"] <= 10**-2.5 for _, rate in drawn)
    assert candidates(config("fish", 0.02), 2) == [first, drawn[0]]
    assert candidates(config("fish", 0.02, seed=1), 4)[1:] != drawn


def test_candidates_of_a_pretrained_model() -> None:
    """Its first ones are the defaults of the space for large images."""
    weights = replace(config("dann", 5e-5), weights="some.safetensors")
    (settings, rate), *drawn = candidates(weights, 9)
    assert (settings, rate) == ({"discriminator_lr": 5e-5}, {"lr": 5e-5})
    assert all(1e-5 <= s["discriminator_lr"] <= 10**-3.5 for s, _ in drawn)
    assert candidates(config("dann"), 1) == [({}, {"lr": 1e-3})]


def test_every_algorithm_gets_the_same_rates() -> None:
    names = ("erm", "fish", "idgm")
    (rates,) = {tuple(rate["lr"] for _, rate in candidates(config(name, seed=7), 5)) for name in names}
    assert len(set(rates)) == 5


@pytest.mark.parametrize("name", registry.names())
def test_every_search_space_is_of_the_algorithms_settings(name: str) -> None:
    """Candidate 0 leaves the defaults unsaid, so both must say the same."""
    cls = algorithm_class(name)
    own = settings_of(cls)
    space = search_space(cls)
    assert {s: own.get(s) for s in space} == draw(space, 0, 0)
