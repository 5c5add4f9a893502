"""Recipes: an algorithm and options by one name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shoal
from shoal.algorithms import registry
from shoal.errors import InputError
from shoal.experiments.baselines import SPACES
from shoal.experiments.compare import plan
from shoal.experiments.config import RunConfig
from shoal.options import TrainingOptions, declared
from shoal.training.options import complete
from shoal.training.recipes import find_recipe, recipes


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_is_made_of_known_parts(name: str) -> None:
    recipe = recipes()[name]
    assert recipe.algorithm in registry.names()
    assert recipe.options.keys() <= declared(TrainingOptions).keys()
    complete(**recipe.options)
    assert name not in registry.names()
    assert name not in SPACES


def test_by_name() -> None:
    assert find_recipe("ERM++") is recipes()["erm++"]
    assert find_recipe("LP_FT") is recipes()["lp-ft"]
    assert find_recipe("fish") is None
    assert find_recipe(nn.Linear) is None


def _domains(seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(40, 5, generator=generator), torch.randint(2, (40,), generator=generator))
        for name in "abc"
    }


def test_fit_is_the_algorithm_with_its_options() -> None:
    train, validation = _domains(0), _domains(1)
    weights = []
    for algorithm, options in (("swad", {}), ("erm", {"average": "swad"})):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
        run = shoal.fit(
            algorithm,
            model,
            train,
            validation=validation,
            steps=60,
            eval_every=2,
            lr=0.03,
            progress=False,
            **options,
        )
        weights.append(model.state_dict())
        assert run.record["config"]["average"] == "swad"
        assert run.record["config"]["algorithm"] == algorithm
    assert all(weights[0][k].equal(weights[1][k]) for k in weights[0])


@pytest.mark.parametrize("name", [n for n, r in recipes().items() if r.pretrained])
def test_needs_pretrained_weights(name: str) -> None:
    with pytest.raises(
        InputError, match=rf"{name!r} requires a pretrained model.*weights=".replace("+", r"\+")
    ):
        shoal.train(name, "rotated-digits", steps=2, progress=False)


def test_a_retrained_row_is_chosen_by_its_search(tmp_path: Path) -> None:
    model = shoal.models.build("small-cnn", input_shape=(1, 8, 8), classes=10, seed=0)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    found = shoal.compare(
        "rotated-digits",
        algorithms=["erm", "erm++"],
        held_out="75°",
        model="small-cnn",
        weights=tmp_path / "weights.safetensors",
        seeds=1,
        search=1,
        steps=10,
        eval_limit=100,
        jobs=1,
        out=tmp_path / "out",
        progress=False,
    )
    rows = {row["algorithm"]: row for row in found.result["rows"]}
    assert set(rows) == {"erm", "erm++"}
    assert all(row["validation"]["mean"] is not None for row in rows.values())
    (record,) = [r for r in found.records if r.config.name == "erm++"]
    assert record.config.retrain
    assert "validation" not in record.history[record.selected]["scores"]


def test_a_row_of_a_comparison() -> None:
    base = RunConfig("rotated-digits", "erm", 10)
    (config,) = plan(base, ["swad"], [None], [0], 1)
    assert (config.algorithm, config.average, config.name) == ("erm", "swad", "swad")
    (plain,) = plan(base, ["erm"], [None], [0], 1)
    assert plain.identity != config.identity
