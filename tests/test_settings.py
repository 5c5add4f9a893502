"""What a signature declares is what is checked and searched, whatever a value is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch

from nasty_values import NASTY
from shoal import datasets as sets
from shoal import models
from shoal.errors import InputError
from shoal.settings import Range, check, choice, log2, log10, search_space, settings


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
) -> None: ...


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        *(("rate", value, 0.5) for value in (0.5, np.float32(0.5), Fraction(1, 2), torch.tensor(0.5))),
        ("rate", 1, 1.0),
        ("size", np.int64(4), 4),
        ("start", 1, 1),
        ("names", [np.int64(3), "a"], [3, "a"]),
        ("kinds", {3: "b"}, {3: "b"}),
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
        ("model", "a model"),
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


def test_no_option_of_a_model_or_dataset_ends_in_a_traceback() -> None:
    options = [(models.check_options, n, o) for n in models.registry.names() for o in models.options_of(n)]
    loads = {name: sets.registry.module(name).load for name in sets.registry.names()}
    options += [
        (sets.check_options, name, option) for name, load in loads.items() for option in settings(load)
    ]
    for function, name, option in options:
        for value in NASTY.values():
            try:
                function(name, {option: value})
            except InputError as error:
                found = str(error)
            else:
                found = option
            assert option in found
            assert len(found) < 300
        with pytest.raises(InputError):
            function(name, {option: NASTY["odd"]})
