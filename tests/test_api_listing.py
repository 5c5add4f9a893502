"""``shoal list``: algorithms, baselines, recipes and datasets."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from shoal import datasets as sets
from shoal.algorithms import registry
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


def test_datasets_are_listed_without_torch() -> None:
    code = "import sys, shoal.api.listing as a; str(a.listing(['datasets'])); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize(("name", "nearest"), [("fihs", "fish"), ("pasc", "pacs"), ("majorty", "majority")])
def test_unknown_names(name: str, nearest: str) -> None:
    with pytest.raises(InputError, match=f"'{name}'. Did you mean '{nearest}'"):
        listing(["algorithms", name])
