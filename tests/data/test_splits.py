"""No example is ever on both sides of a split."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import Domains, hold_out_domains, hold_out_examples
from shoal.data.splits import held_out_names, last_domain, split
from shoal.errors import InputError

overlapping = st.lists(st.sets(st.integers(0, 15), min_size=1), min_size=2, max_size=8).map(
    lambda sets: Domains.from_indices({f"d{i}": sorted(s) for i, s in enumerate(sets)})
)


def members(domains: Domains) -> dict[str, set[int]]:
    return {name: set(domains.indices_of(d).tolist()) for d, name in enumerate(domains.names)}


@settings(max_examples=60, deadline=None)
@given(overlapping, st.data())
def test_hold_out_domains_by_its_definition(domains: Domains, data: st.DataObject) -> None:
    names = data.draw(st.sets(st.sampled_from(domains.names), min_size=1))
    before = members(domains)
    seen = set().union(*(before[name] for name in names))
    expected = {n: before[n] - seen for n in domains.names if n not in names and before[n] - seen}
    if not expected:
        with pytest.raises(InputError, match=r"held out|nothing to train on"):
            hold_out_domains(domains, names)
        return
    train, test = hold_out_domains(domains, names)
    assert members(train) == expected
    assert members(test) == {name: before[name] for name in names}


@settings(max_examples=80, deadline=None)
@given(overlapping, st.floats(0.05, 0.95), st.integers(0, 99))
def test_hold_out_by_example(domains: Domains, share: float, seed: int) -> None:
    try:
        rest, held = hold_out_examples(domains, share, seed)
    except InputError:
        assert share * len(domains.examples()) < len(domains)  # too few for one to be given
        return
    assert not set(rest.examples()) & set(held.examples())
    assert rest.names == domains.names
    right, left = members(held), members(rest)
    for name, both in members(domains).items():
        assert left[name] | right.get(name, set()) == both
    again = hold_out_examples(domains, share, seed)
    assert members(again[0]) == left
    assert members(again[1]) == right


@pytest.mark.parametrize("share", [0.1, 0.25, 0.8])
def test_each_domain_gives_its_share(share: float) -> None:
    domains = Domains.from_sizes({"a": 1, "b": 2, "c": 7, "d": 1000})
    rest, held = hold_out_examples(domains, share, seed=3)
    assert rest.sizes[0] == 1  # a domain of one example stays
    assert "a" not in held.names
    for name in set(held.names) & {"c", "d"}:
        expected = share * domains.sizes[domains.number(name)]
        assert abs(held.sizes[held.number(name)] - expected) <= 1
    other = hold_out_examples(domains, share, seed=4)[1]
    assert members(other)["d"] != members(held)["d"]


@settings(max_examples=40, deadline=None)
@given(overlapping, st.lists(st.integers(0, 5), min_size=16, max_size=16), st.integers(0, 99))
def test_entities_stay_on_one_side(domains: Domains, entities: list[int], seed: int) -> None:
    of = np.array(entities)
    with warnings.catch_warnings(record=True):
        try:
            parts = split(domains, ["d0"], 0.4, seed, of)
        except InputError:
            return
    sides = [set(of[part.indices].tolist()) for part in parts.values()]
    assert not sides[0] & sides[1]
    assert not (sides[0] | sides[1]) & sides[2]
    assert parts["test"].names == ("d0",)


def test_names_of_held_out_domains() -> None:
    assert last_domain(["1", "10", "9"]) == "10"
    assert last_domain(["-3", "2", "+1"]) == "2"
    assert held_out_names("a", ["a", "b"]) == ["a"]
    assert held_out_names([], ["a"]) == []


TWO = Domains.from_sizes({"a": 1, "b": 9})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: held_out_names(["c"], ["a", "b"]), "unknown domain 'c'"),
        (lambda: held_out_names(["a", "b"], ["a", "b"]), "all 2 domains are held out"),
        (lambda: hold_out_domains(TWO, ["a", "b"]), "2 of 2 domains"),
        (lambda: hold_out_examples(TWO, 1.5, 0), r"share must be .* got 1\.5"),
        (lambda: hold_out_examples(Domains.from_labels(range(9)), 0.5, 0), "too few to hold out"),
    ],
)
def test_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
