"""What a signature declares is what is checked, whatever a value is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pytest
import torch

from nasty_values import NASTY
from shoal import datasets as sets
from shoal import models
from shoal.errors import InputError
from shoal.settings import Range, check, settings


def declared(
    rate: Annotated[float, Range(above=0, most=1)] = 0.5,
    size: Annotated[int, Range(1)] = 3,
    start: Annotated[int, Range(0)] | Annotated[float, Range(0, 1)] = 0,
    how: Literal["first", "exact"] = "first",
    names: str | Sequence[str | int] | None = None,
    model: torch.nn.Module | None = None,
) -> None: ...


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
