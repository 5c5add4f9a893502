"""DomainBed's protocol: splits, plans and a tiny run."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.batch import DomainData, TensorData
from shoal.data.domains import Domains
from shoal.errors import InputError
from shoal.experiments import protocol, selection
from shoal.experiments.run import prepare, run
from shoal.experiments.store import Store

DIGITS: dict[str, dict[str, Any]] = {"rotated-digits": {}}
ABOUT = {"held_out": ["0°"], "seed": 0}
SIZES = (("a", 0, 50), ("b", 50, 103), ("c", 200, 7))
PLAIN = {name: np.arange(start, start + size) for name, start, size in SIZES}


def data_of(domains: dict[str, Any], shape: tuple[int, ...] = (2,), **splits: Domains) -> DomainData:
    """All examples in one split, if no others are given."""
    own = splits or {"train": Domains.from_indices(domains)}
    count = 1 + max(int(d.indices.max()) for d in own.values())
    examples = TensorData(torch.zeros(count, *shape), torch.zeros(count, dtype=torch.long))
    return DomainData(examples, own, 2, shape, "mlp", {"test": "gone", "examples": "scaled"})


def of(data: DomainData, split: str, name: str) -> set[int]:
    domains = data.splits[split]
    return set(domains.indices_of(domains.number(name)).tolist()) if name in domains.names else set()


class TestSplits:
    @pytest.mark.parametrize("names", [["a"], ["b", "c"]])
    def test_a_fifth_of_each_domain_is_out(self, names: list[str]) -> None:
        data = protocol.resplit(data_of(PLAIN), names, 0)
        assert list(data.splits) == ["train", "validation", "test", "oracle"]
        for name, rows in PLAIN.items():
            inside, outside = ("test", "oracle") if name in names else ("train", "validation")
            assert of(data, inside, name) | of(data, outside, name) == set(rows.tolist())
            assert not of(data, inside, name) & of(data, outside, name)
            assert len(of(data, outside, name)) == len(rows) // 5

    def test_a_seed_has_one_split_by_name_whatever_is_held_out(self) -> None:
        def out_of_a(names: list[str], seed: int, domains: Any = PLAIN) -> set[int]:
            data = protocol.resplit(data_of(domains), names, seed)
            return of(data, "oracle" if "a" in names else "validation", "a")

        every = {tuple(sorted(out_of_a(n, 0))) for n in (["a"], ["b"], ["a", "b"], ["b", "c"])}
        assert len(every) == 1
        assert out_of_a(["a"], 0, dict(reversed(PLAIN.items()))) == out_of_a(["a"], 0) != out_of_a(["a"], 1)

    @settings(max_examples=30, deadline=None)
    @given(chance=st.integers(0, 2**32), pair=st.booleans(), seed=st.integers(0, 5))
    def test_no_example_is_on_two_sides_where_domains_overlap(
        self, chance: int, pair: bool, seed: int
    ) -> None:
        rng = np.random.default_rng(chance)
        domains = {
            n: np.append(rng.choice(120, 40, False), np.arange(20) + 200 + 20 * i)
            for i, n in enumerate("abcd")
        }
        names = ["b", "d"] if pair else ["c"]
        data = protocol.resplit(data_of(domains), names, seed)
        sides = [set(d.indices.tolist()) for d in data.splits.values()]
        assert not any(one & other for one, other in itertools.combinations(sides, 2))
        gone = set().union(*(domains[n].tolist() for n in names))
        assert sides[2] | sides[3] == gone
        assert sides[0] | sides[1] == set().union(*(d.tolist() for d in domains.values())) - gone

    @pytest.mark.parametrize(
        ("domains", "names"),
        [(PLAIN, ["aa"]), (PLAIN | {"x": [210]}, ["a"]), ({"a": range(10), "b": range(10, 20)}, ["a", "b"])],
    )
    def test_what_cannot_be_split(self, domains: Any, names: list[str]) -> None:
        with pytest.raises(InputError):
            protocol.resplit(data_of({n: np.array(rows) for n, rows in domains.items()}), names, 0)


class TestPlan:
    def test_every_combination_once_and_more_seeds_or_trials_keep_them(self) -> None:
        found = protocol.plan(DIGITS, ["erm", "fish"], seeds=2, search=3, pairs=True)
        assert len(found) == (6 + 15) * 2 * 2 * 3
        assert len({c.identity for c in found}) == len({selection.run_key(c) for c in found}) == len(found)
        assert {(c.steps, c.eval_every, c.select) for c in found} == {(5001, 100, "last")}
        assert {c.seed == c.protocol["seed"] for c in found} == {True}
        first = [c.protocol["held_out"] for c in found[::6]][:6]
        assert first == [["0°"], ["15°"], ["30°"], ["45°"], ["60°"], ["75°"]]
        few = protocol.plan(DIGITS, ["erm"], seeds=1, search=2)
        assert {c.identity for c in few} < {c.identity for c in found}

    def test_trials_are_shared_by_algorithms_and_held_out_domains(self) -> None:
        found = protocol.plan(DIGITS, ["erm", "irm"], seeds=3, search=30)
        tried: dict[Any, set[Any]] = {}
        for c in found:
            where = c.protocol["seed"], c.protocol.get("trial", 0)
            tried.setdefault(where, set()).add((c.lr, c.batch_size))
        assert all(len(values) == 1 for values in tried.values())
        assert {next(iter(v)) for (_, n), v in tried.items() if n == 0} == {(1e-3, 64)}
        rates, sizes = zip(*(next(iter(v)) for (_, n), v in tried.items() if n), strict=True)
        assert len(set(rates)) == 3 * 29
        assert 10**-4.5 <= min(rates) < 10**-4 < 10**-3 < max(rates) <= 10**-2.5
        assert 8 <= min(sizes) < 16 < 256 < max(sizes) <= 512


def test_from_plan_to_numbers(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"pairs": True, "steps": 2, "eval_every": 1}
    every = protocol.plan(DIGITS, ["erm"], seeds=1, search=1, **fields)
    configs = [config for config in every if "0°" in config.protocol["held_out"]]
    other = replace(configs[0], protocol=ABOUT | {"seed": 1})
    one, two = (prepare(c, "cpu").setup.data.splits for c in (configs[0], other))
    assert one["train"].indices.tolist() != two["train"].indices.tolist()
    store = Store(tmp_path)
    for config in configs:
        store.save(run(config, "cpu"))
    records = store.found(configs)
    for rule in selection.RULES:
        (result,) = selection.sweep_results(configs, records, rule)
        (case,) = result["cases"]
        assert (case["status"], result["missing"], result["metric"]) == ("scored", [], "accuracy")
        point = records[0].history[case["step"] - 1]["scores"]
        assert case["score"] == point["test"]["domains"]["0°"]
        assert case["run"] == configs[0].identity
