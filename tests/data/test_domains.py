"""Domains against plain dictionaries, and what it refuses."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import Domains
from shoal.errors import InputError


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(
        st.lists(st.integers(-5, 5), min_size=1, max_size=40),
        st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=10),
        st.lists(st.text(max_size=3), min_size=1, max_size=40),
    )
)
def test_labels_group_as_a_dictionary_does(labels: list) -> None:
    expected = {
        label: [i for i, other in enumerate(labels) if other == label] for label in sorted(set(labels))
    }
    domains = Domains.from_labels(labels)
    assert domains.names == tuple(str(label) for label in expected)
    assert [domains.indices_of(d).tolist() for d in range(len(domains))] == list(expected.values())
    assert domains.sizes.tolist() == [len(v) for v in expected.values()]
    assert domains.examples().tolist() == list(range(len(labels)))


def test_sizes_and_indices() -> None:
    domains = Domains.from_sizes({"art": 2, "photo": 3})
    assert domains.indices_of(1).tolist() == [2, 3, 4]
    domains = Domains.from_indices({"b": [4, 0], "a": np.array([4]), "c": torch.tensor([7])})
    assert domains.names == ("b", "a", "c")
    assert domains.examples().tolist() == [0, 4, 7]
    assert domains.indices.dtype == np.int32
    assert [domains.domain_at(position) for position in range(4)] == [0, 0, 1, 2]
    assert Domains.from_indices({"far": [2**40, 3]}).examples().tolist() == [3, 2**40]


def test_select_and_filter() -> None:
    domains = Domains.from_indices({"a": [0, 1], "b": [2], "c": [1, 5, 6]})
    chosen = domains.select(["c", 0])
    assert chosen.names == ("c", "a")
    assert [chosen.indices_of(d).tolist() for d in (0, 1)] == [[1, 5, 6], [0, 1]]
    assert domains.select("b").names == ("b",)
    assert Domains.from_labels([7, 7, 9]).select(1).names == ("9",)
    left = domains.filter(domains.indices > 1)
    assert (left.names, left.indices.tolist(), left.sizes.tolist()) == (("b", "c"), [2, 5, 6], [1, 2])


FEW = Domains.from_sizes({"art": 1, "photo": 1})
REFUSED: list[tuple[Any, Any, str]] = [
    (Domains.from_labels, ["a", None, "b"], "position 1 is None"),
    (Domains.from_labels, ["a", float("nan")], "position 1 is nan"),
    (Domains.from_labels, [], "one label per example"),
    (Domains.from_indices, {"a": [0], "b": []}, "'b' has no examples"),
    (Domains.from_indices, {"a": [0], "b": [3, -2]}, "'b' has index -2"),
    (Domains.from_indices, {"a": [True, False]}, "'a' has indices of shape .* mask"),
    (Domains.from_indices, {1: [0], "1": [1]}, "two domains have the name '1'"),
    (Domains.from_sizes, {"empty": 0}, "'empty' has 0 examples"),
    (FEW.select, ["art", 0], "'art' is listed twice"),
    (FEW.select, [3], "number 3 must be from 0 to 1"),
    (FEW.number, "phto", r"unknown domain 'phto'. Did you mean 'photo'\? Known: art, photo"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_refused(case: int) -> None:
    call, argument, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        call(argument)
