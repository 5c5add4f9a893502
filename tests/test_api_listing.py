"""``shoal list``: algorithms, baselines, recipes and datasets."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from shoal import datasets as sets
from shoal.algorithms import algorithm_class, registry
from shoal.api.listing import listing
from shoal.errors import InputError


def test_all_algorithms_and_datasets() -> None:
    found = listing()
    content = json.loads(json.dumps(found.to_dict(), default=str))
    assert [each["name"] for each in content["algorithms"]] == registry.names()
    assert [each["name"] for each in content["datasets"]] == sets.registry.names()
    assert content == json.loads(json.dumps(listing(["algorithms", "datasets"]).to_dict(), default=str))
    for name in ("fish", "pacs", "gradient-boosting", "erm++"):
        assert name in str(found)


def test_algorithms_have_costs_needs_and_papers() -> None:
    entries = {each["name"]: each for each in listing(["algorithms"]).algorithms}
    assert entries["erm"]["cost"] == 1
    assert entries["fish"]["cost"] > 1
    assert "features" in entries["coral"]["needs"]
    for name, each in entries.items():
        assert (each["paper"], each["batches"]) == (
            algorithm_class(name).reference,
            algorithm_class(name).draw,
        )


def test_datasets_are_listed_without_torch() -> None:
    code = "import sys, shoal.api.listing as a; str(a.listing(['datasets'])); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


def test_names_of_several_kinds_in_full() -> None:
    found = listing(["fish", "Office_Home", "logistic-regression", "lp-ft"])
    fish, linear, recipe = found.algorithms
    (dataset,) = found.datasets
    assert fish["settings"]["meta_lr"]["default"] == 0.5
    assert fish["settings"]["meta_lr"]["search"]["choice"] == [0.05, 0.1, 0.5]
    assert linear["settings"]["C"]["default"] == 1.0
    assert (recipe["algorithm"], recipe["family"]) == ("erm", "recipe")
    assert dataset["domains"] == ["art", "clipart", "product", "real"]
    assert dataset["settings"]["size"]["default"] == 224
    assert "meta_lr" in str(found)


@pytest.mark.parametrize(("name", "nearest"), [("fihs", "fish"), ("pasc", "pacs"), ("majorty", "majority")])
def test_unknown_names(name: str, nearest: str) -> None:
    with pytest.raises(InputError, match=f"'{name}'. Did you mean '{nearest}'"):
        listing(["algorithms", name])
