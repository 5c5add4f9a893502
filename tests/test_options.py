"""An option is declared once, and that is what is checked, filled in by recipes, written down and typed."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from cyclopts import App, Parameter
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from typing_extensions import Unpack

import shoal
from nasty_values import NASTY
from shoal.cli.flags import command
from shoal.errors import InputError
from shoal.options import FitOptions, TrainOptions, as_flags, declared
from shoal.training.stopping import Diverged
from training.test_setup import domain, fit


@pytest.mark.parametrize("name", declared(FitOptions))
def test_any_value_is_taken_or_refused_by_name(name: str) -> None:
    """What is taken gets as far as the data, of which there are none."""
    model = nn.Linear(1, 1)
    for value in NASTY.values():
        with pytest.raises(InputError, match=rf"\b{name}\b|train is empty"):
            shoal.fit("erm", model, {}, **{name: value})


TRIED = sorted(set(declared(FitOptions)) - {"compile", "progress", "loss", "metric", "wandb", "predictions"})
SMALL = {"steps": 5, "batch_size": 500, "workers": 0, "warm_start": 50, "accumulate": 8}
VALUES = (
    st.none() | st.booleans() | st.integers(-1, 3) | st.floats() | st.sampled_from([np.int64(2), [], {}])
) | st.sampled_from(["last", "bf16", "sma:2", "swad", "ema:0.5", "plateau", "head", "warmup:2,cosine", "sgd"])


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.sampled_from(TRIED), VALUES, max_size=2))
def test_what_is_taken_can_be_trained_with(given: dict[str, Any]) -> None:
    given = {k: v for k, v in given.items() if not (k in SMALL and isinstance(v, int) and v > SMALL[k])}
    with contextlib.suppress(InputError, Diverged):
        fit(validation={"a": domain(3)}, **given)


def job(source: str, *, out: str | None = None, **options: Unpack[TrainOptions]) -> dict[str, Any]:
    """Train.

    Args:
        source: table.
        out: folder for the result.
        **options: options.
    """
    return dict(options)


def typed(*words: str) -> dict[str, Any]:
    app = App(default_parameter=Parameter(negative_iterable=(), negative_none=(), consume_multiple=True))
    app.command(command(job, "train"), name="train")
    function, bound, _ = app.parse_args(["train", "a.csv", *words], exit_on_error=False, print_error=False)
    return function(*bound.args, **bound.kwargs)  # type: ignore[no-any-return]


GIVEN: dict[str, Any] = {
    **{"label": "ill", "drop": ["a", "b"], "kinds": {"zip": "categorical"}, "day_first": False},
    **{"steps": 20, "lr": 0.001, "settings": {"meta_lr": 0.5, "order": "exact"}, "warm_start": 0.1},
    **{"average": "sma:5", "freeze_backbone": True, "select": "last", "jobs": 2, "device": "cpu"},
}


def test_options_are_typed_as_flags_and_read_back() -> None:
    assert typed() == {}
    assert typed(*as_flags(GIVEN)) == GIVEN
    for words in (["--steps", "0"], ["--lr", "x"], ["--warm-start", "head:0"]):
        with pytest.raises(InputError, match=words[0][2:].replace("-", "_")):
            typed(*words)
