"""What a signature declares is what is checked and searched, whatever a value is."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nasty_values import NASTY
from shoal import datasets as sets
from shoal import models
from shoal.errors import InputError
from shoal.settings import Range, check, checked, choice, coerce, log2, log10, search_space, settings


def declared(
    rate: Annotated[float, Range(above=0, most=1, search=log10(-3, 0))] = 0.5,
    size: Annotated[int, Range(1, search=log2(0, 3))] = 3,
    start: Annotated[int, Range(0)] | Annotated[float, Range(0, 1)] = 0,
    limit: Annotated[float | None, Range(0, below=1, search=choice(0.1, None))] = None,
    how: Literal["first", "exact"] = "first",
    names: str | Sequence[str | int] | None = None,
    flag: bool = True,
    kinds: Mapping[str, str] | None = None,
    model: torch.nn.Module | None = None,
    free: Unknown = None,  # type: ignore[name-defined] # noqa: F821
) -> None: ...


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        *(("rate", value, 0.5) for value in (0.5, np.float32(0.5), Fraction(1, 2), torch.tensor(0.5))),
        ("rate", 1, 1.0),
        ("size", np.int64(4), 4),
        ("start", 1, 1),
        ("start", 1.0, 1.0),
        ("limit", None, None),
        ("how", "exact", "exact"),
        ("names", ("a", 3), ("a", 3)),
        ("names", [np.int64(3), "a"], [3, "a"]),
        ("names", np.array(["a", "b"]), ["a", "b"]),
        ("flag", np.bool_(False), False),
        ("kinds", {"a": "b"}, {"a": "b"}),
        ("free", "x", "x"),
    ],
)
def test_what_is_right_comes_out_plain(name: str, value: Any, plain: Any) -> None:
    found = check(declared, {name: value}, "it")[name]
    assert found == plain
    assert type(found) is type(plain)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("rate", value) for value in (0, True, "0.5", 10**400, math.nan, math.inf, 1.5, [0.5])),
        *(("size", value) for value in (0, 2.5, "3", True, None)),
        *(("start", value) for value in (-1, 3.0)),
        *(("names", value) for value in (["a", None], {"a"})),
    ],
)
def test_what_is_wrong_is_named(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"^{name} of it must be ") as refused:
        check(declared, {name: value}, "it")
    assert len(str(refused.value)) < 200


def test_the_nearest_name_is_suggested() -> None:
    for wrong, near in (({"how": "frist"}, "first"), ({"rat": 1}, "rate")):
        with pytest.raises(InputError, match=f"Did you mean '{near}'"):
            check(declared, wrong, "it")


def test_the_search_space_is_part_of_the_declaration() -> None:
    assert search_space(declared) == {
        "rate": {"default": 0.5, "log10": [-3, 0]},
        "size": {"default": 3, "log2": [0, 3], "whole": True},
        "limit": {"default": None, "choice": [0.1, None]},
    }


def test_checked_functions_check_whenever_they_are_called() -> None:
    @checked
    def twice(value: Annotated[int, Range(1)], *rest: Any, by: float = 2.0) -> float:
        return value * by

    assert twice(2, by=np.float32(3)) == 6.0
    with pytest.raises(InputError, match=r"value must .*got 0"):
        twice(0)
    with pytest.raises(InputError, match="option of twice: 'buy'"):
        twice(1, buy=2)  # type: ignore[call-arg]


SCALARS = (
    st.integers(-(2**53), 2**53)
    | st.floats()
    | st.text()
    | st.none()
    | st.binary()
    | st.booleans()
    | st.complex_numbers()
)


@given(SCALARS | st.lists(SCALARS, max_size=2))
def test_any_value_is_taken_as_it_is_or_refused(value: Any) -> None:
    for kind in (int, float, bool, str, Annotated[int, Range(0, 5)] | None, Literal["a", 1], list[int]):
        with contextlib.suppress(InputError):
            assert coerce(kind, value, "it") in (value, str(value))  # a name may be a number


CHECKS = {"model": models.check_options, "dataset": sets.check_options}
OPTIONS = [("model", name, option) for name in models.registry.names() for option in models.options_of(name)]
OPTIONS += [("dataset", n, o) for n in sets.registry.names() for o in settings(sets.registry.module(n).load)]


@pytest.mark.parametrize(("kind", "name", "option"), OPTIONS)
def test_no_option_of_a_model_or_dataset_ends_in_a_traceback(kind: str, name: str, option: str) -> None:
    refused = {}
    for label, value in NASTY.items():
        try:
            CHECKS[kind](name, {option: value})
        except InputError as error:
            refused[label] = str(error)
    assert "odd" in refused
    assert all(option in message and len(message) < 300 for message in refused.values())
