"""Random search: trials are a function of seed, number and name, inside the search space."""

from dataclasses import replace
from typing import Any

import pytest

from shoal.algorithms import algorithm_class, registry, settings_of
from shoal.experiments.config import RunConfig
from shoal.experiments.search import sample, trials, with_rate
from shoal.settings import search_space

SPACE: dict[str, dict[str, Any]] = {
    "weight": {"default": 1.0, "log10": [-2, 1]},
    "rate": {"default": 0.5, "uniform": [0.25, 0.75]},
    "size": {"default": 7, "log2": [0.5, 5.5], "whole": True},
    "how": {"default": "a", "choice": ["a", "b", None]},
}


def test_a_trial_is_the_same_everywhere_whatever_else_is_searched() -> None:
    assert sample(SPACE, 3, 0) == {"weight": 1.0, "rate": 0.5, "size": 7, "how": "a"}
    found = sample(SPACE, 0, 1)
    assert (found["size"], found["how"]) == (2, "b")
    assert (found["weight"], found["rate"]) == pytest.approx((0.08658596568764823, 0.3595965744097215))
    assert [sample({name: SPACE[name]}, 0, 1)[name] for name in SPACE] == list(found.values())
    assert sample({"other": SPACE["weight"]}, 0, 1)["other"] != found["weight"]


def config(algorithm: str, lr: float | None = 1e-3, seed: int = 0) -> RunConfig:
    return RunConfig("linear", algorithm, 5, lr=lr, seed=seed)


def test_the_first_trial_is_the_defaults_and_a_longer_search_starts_with_a_shorter_one() -> None:
    first, *others = trials(config("fish", 0.02), 4)
    assert first == config("fish", 0.02)
    assert all(set(c.settings) == {"meta_lr"} and 10**-4.5 <= c.lr <= 10**-2.5 for c in others)
    assert trials(config("fish", 0.02), 2) == [first, others[0]]
    assert [c.lr for c in trials(config("fish", 0.02, seed=1), 4)[1:]] != [c.lr for c in others]
    (rates,) = {tuple(c.lr for c in trials(config(n, seed=7), 5)) for n in ("erm", "fish", "idgm")}
    assert len(set(rates)) == 5


@pytest.mark.parametrize("name", registry.names())
def test_every_search_space_is_of_the_algorithms_settings(name: str) -> None:
    """Trial 0 omits the defaults, so both must agree."""
    cls = algorithm_class(name)
    space = search_space(cls)
    assert {s: settings_of(cls).get(s) for s in space} == sample(space, 0, 0)


@pytest.mark.parametrize(
    ("fields", "lr", "schedule", "wanted"),
    [
        ({}, None, None, (1e-3, None)),
        ({}, 0.1, "cosine", (0.1, "cosine")),
        ({"weights": "w.pt"}, None, None, (5e-5, "warmup:10")),
        ({"weights": "w.pt"}, 1e-3, None, (1e-3, None)),
        ({"weights": "w.pt"}, None, "cosine", (5e-5, "cosine")),
        ({"model": "bert-base-uncased"}, None, None, (5e-5, "warmup:10")),
        ({"weights": "w.pt", "model_options": {"frozen": True}}, None, None, (1e-3, None)),
    ],
)
def test_the_rate_follows_the_model(fields: dict[str, Any], lr: Any, schedule: Any, wanted: Any) -> None:
    chosen, shown = with_rate(replace(config("erm", lr=lr), schedule=schedule, **{"steps": 200, **fields}))
    assert (chosen.lr, chosen.schedule) == wanted
    assert bool(shown) is (lr is None and wanted[0] == 5e-5)
    assert with_rate(chosen)[0] == chosen
