"""Settings: what a signature declares is what is checked, described and searched; whatever a value is."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nasty_values import NASTY
from shoal import models, settings
from shoal.algorithms import Algorithm, build, settings_of
from shoal.data import Task, sets
from shoal.errors import InputError
from shoal.experiments import baselines
from shoal.experiments.config import RunConfig
from shoal.settings import Range, check, checked, choice, coerce, log2, log10, plain_number, search_space


class Plain(Algorithm):
    """A user's own, without annotations."""

    def __init__(self, model, loss, task, *, weight=1, name="a", flag=False, other=None, **more):  # type: ignore[no-untyped-def]
        super().__init__(model, loss, task, **more)
        self.given = weight, name, flag, other


def test_an_algorithm_without_annotations_takes_the_types_of_its_defaults() -> None:
    model, task = torch.nn.Linear(2, 2), Task(2, 2)

    def made(**given: Any) -> Any:
        return build(Plain, model, torch.nn.functional.cross_entropy, task, **given).given  # type: ignore[attr-defined]

    assert settings_of(Plain) == {"weight": 1, "name": "a", "flag": False, "other": None}
    assert made(weight=0.5, name=3, other=[1]) == (0.5, 3, False, [1])
    for wrong in ({"weight": "0,5"}, {"weight": True}, {"weight": math.nan}, {"flag": "x"}, {"nothing": 1}):
        with pytest.raises(InputError):
            made(**wrong)
        if "nothing" not in wrong:
            with pytest.raises(InputError):
                Plain(model, None, task, **wrong)


def declared(
    model: object,
    rate: Annotated[float, Range(above=0, most=1, search=log10(-3, 0))] = 0.5,
    size: Annotated[int, Range(1, search=log2(0, 3))] = 3,
    start: Annotated[int, Range(0)] | Annotated[float, Range(0, 1, what="a share")] = 0,
    limit: Annotated[float | None, Range(0, below=1, search=choice(0.1, None))] = None,
    how: Literal["first", "exact"] = "first",
    names: str | list[str] | None = None,
    flag: bool = True,
    file: str | Path = "",
    kinds: Mapping[str, str] | None = None,
    made: Callable[[], Unknown] | None = None,  # type: ignore[name-defined] # noqa: F821
    free: Any = None,
) -> None:
    """As a function of ours would be."""


def taken(**given: Any) -> Any:
    (value,) = check(declared, given, "it").values()
    return value


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"rate": 1}, 1.0),
        ({"rate": np.float32(0.5)}, 0.5),
        ({"rate": Fraction(1, 4)}, 0.25),
        ({"size": 4.0}, 4),
        ({"size": np.int64(4)}, 4),
        ({"start": 1}, 1),
        ({"start": 1.0}, 1.0),
        ({"limit": None}, None),
        ({"limit": 0}, 0.0),
        ({"how": "exact"}, "exact"),
        ({"names": ("a", "b")}, ["a", "b"]),
        ({"flag": np.bool_(False)}, False),
        ({"kinds": {"a": "b"}}, {"a": "b"}),
        ({"made": 5}, 5),
        ({"free": "x"}, "x"),
    ],
)
def test_what_is_right_comes_out_plain(given: dict[str, Any], value: Any) -> None:
    found = taken(**given)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rate": 0}, "rate of it must be a number above 0 and at most 1, got 0."),
        ({"rate": True}, "rate of it must be a number above 0 and at most 1, got True."),
        ({"rate": "0.5"}, "got '0.5'. Did you mean 0.5?"),
        ({"rate": 10**400}, "got a number of 401 digits."),
        ({"size": 2.5}, "size of it must be a whole number of at least 1, got 2.5."),
        ({"size": "1_000"}, "got '1_000'. Did you mean 1000?"),
        ({"size": 2**63}, "got 9223372036854775808."),
        ({"start": 3.0}, "a whole number of at least 0 or a share from 0 to 1, got 3.0. Did you mean 3?"),
        ({"limit": 1}, "a number of at least 0 and below 1 or None (null on the command line), got 1."),
        ({"how": "frist"}, "how of it must be 'first' or 'exact', got 'frist'. Did you mean 'first'?"),
        ({"how": None}, "how of it must be 'first' or 'exact', got None."),
        ({"names": ["a", None]}, "names of it must be text or a list of text or None"),
        ({"names": "a\0b"}, "names of it must be text"),
        ({"flag": 1}, "flag of it must be true or false, got 1."),
        ({"kinds": "a"}, "kinds of it must be a mapping or None"),
        ({"file": "x" * 10_000, "rate": []}, "rate of it"),
        ({"rat": 1}, "unknown setting of it: 'rat'. Did you mean 'rate'?"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        check(declared, given, "it")
    assert message in str(refused.value)
    assert len(str(refused.value)) < 300


def test_the_search_space_is_part_of_the_declaration() -> None:
    assert search_space(declared) == {
        "rate": {"default": 0.5, "log10": [-3, 0]},
        "size": {"default": 3, "log2": [0, 3], "whole": True},
        "limit": {"default": None, "choice": [0.1, None]},
    }


def test_a_class_has_the_settings_of_parents_it_hands_things_on_to() -> None:
    class Above:
        def __init__(self, a: int = 1, b: int = 2) -> None: ...

    class Handing(Above):
        def __init__(self, c: int = 3, **more: Any) -> None: ...

    class Keeping(Above):
        def __init__(self, c: int = 3) -> None: ...

    assert set(settings.settings(Handing)) == {"a", "b", "c"}
    assert set(settings.settings(Keeping)) == {"c"}


def test_checked_functions_check_whenever_they_are_called() -> None:
    @checked
    def twice(value: Annotated[int, Range(1)], *rest: Any, by: float = 2.0) -> float:
        return value * by

    assert twice(2, by=np.float32(3)) == 6.0
    with pytest.raises(InputError, match="value of twice must be a whole number of at least 1, got 0"):
        twice(0)
    with pytest.raises(TypeError, match="missing"):
        twice()  # type: ignore[call-arg]


@given(st.text())
def test_any_text_is_a_plain_number_or_none(text: str) -> None:
    found = plain_number(text)
    assert found is None or text.strip().isascii()
    if found is None and text.isascii() and not any(c in text.lower() for c in "_nai"):
        with pytest.raises(ValueError):
            float(text)


@given(
    st.one_of(
        st.integers(), st.floats(), st.text(), st.none(), st.binary(), st.booleans(), st.complex_numbers()
    )
)
def test_any_value_is_taken_or_refused(value: Any) -> None:
    for kind in (int, float, bool, str, Annotated[int | None, Range(0, 5)], Literal["a", 1], list[int]):
        with contextlib.suppress(InputError):
            found = coerce(kind, value, "it")
            assert found is None or found == value or str(found) == str(value) or found == float(value)


SHAPES = {"sprite-cnn": (3, 32, 32), "mnist-cnn": (1, 12, 12), "small-cnn": (1, 8, 8)}


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name in models.registry.names() for option in models.options_of(name)],
)
def test_no_option_of_a_model_ends_in_a_traceback(name: str, option: str) -> None:
    refused = {}
    for label, value in NASTY.items():
        try:
            models.build(name, input_shape=SHAPES.get(name, (4,)), classes=2, seed=0, **{option: value})
        except InputError as error:
            refused[label] = str(error)
    assert {"nan", "inf", "'0,5'", "[]", "odd"} <= set(refused)
    assert all(option in message and len(message) < 300 for message in refused.values())


MADE = ("linear", "rotated-digits", "coloured-digits")
"""Datasets that are made in no time, without files."""


@pytest.mark.parametrize(
    ("name", "option"),
    [(n, o) for n in sets.registry.names() for o in settings.settings(sets.registry.module(n).load)],
)
def test_no_option_of_a_dataset_ends_in_a_traceback(name: str, option: str) -> None:
    refused = []
    for label, value in NASTY.items():
        try:
            sets.check_options(name, {option: value})
            if name in MADE:
                sets.load(name, **{option: value})
        except InputError as error:
            refused.append((label, str(error)))
    labels = [label for label, _ in refused]
    assert "odd" in labels
    assert "b''" in labels
    assert all(option in message and len(message) < 600 for _, message in refused)


@pytest.mark.parametrize(
    ("name", "setting"), [(n, s) for n, space in baselines.SPACES.items() for s in space]
)
def test_no_setting_of_a_baseline_ends_in_a_traceback(name: str, setting: str) -> None:
    pytest.importorskip("sklearn")
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(30, 2)), np.arange(30) % 2
    classes = None if name == baselines.RIDGE else 2
    for label, value in NASTY.items():
        config = RunConfig("linear", name, 20, settings={setting: value})
        try:
            baselines.check_baseline(config)
        except InputError:
            continue
        assert label not in ("nan", "inf", "odd", "True")
        with mock.patch.object(baselines, "TREES", 2), contextlib.suppress(InputError):
            baselines._fit(config, x, y, classes)
