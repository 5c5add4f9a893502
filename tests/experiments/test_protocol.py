"""DomainBed's protocol: splits, plans and a tiny run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import models
from shoal.data import sets
from shoal.data.batch import DomainData, TensorData
from shoal.data.domains import Domains
from shoal.errors import InputError
from shoal.experiments import protocol, selection
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.run import prepare, run
from shoal.experiments.search import is_pretrained
from shoal.experiments.store import Store

DIGITS = {"rotated-digits": {}}
ABOUT = {"held_out": ["0°"], "trial": 0}


def data_of(domains: dict[str, Any], shape: tuple[int, ...] = (2,), **splits: Domains) -> DomainData:
    """All examples in one split, if no others are given."""
    own = splits or {"train": Domains.from_indices(domains)}
    count = 1 + max(int(d.indices.max()) for d in own.values())
    examples = TensorData(torch.zeros(count, *shape), torch.zeros(count, dtype=torch.long))
    return DomainData(examples, own, 2, shape, "mlp", {"test": "gone", "examples": "scaled"})


def of(data: DomainData, split: str, name: str) -> set[int]:
    domains = data.splits[split]
    return set(domains.indices_of(domains.number(name)).tolist()) if name in domains.names else set()


PLAIN = {
    name: np.arange(start, start + size)
    for name, start, size in (("a", 0, 50), ("b", 50, 103), ("c", 200, 7))
}


class TestSplits:
    @pytest.mark.parametrize("names", [["a"], ["b", "c"], ["c"]])
    def test_a_fifth_of_each_domain_is_out(self, names: list[str]) -> None:
        data = protocol.resplit(data_of(PLAIN), names, 0)
        assert list(data.splits) == ["train", "validation", "test", "oracle"]
        for name, rows in PLAIN.items():
            inside, outside = ("test", "oracle") if name in names else ("train", "validation")
            assert of(data, inside, name) | of(data, outside, name) == set(rows.tolist())
            assert not of(data, inside, name) & of(data, outside, name)
            assert len(of(data, outside, name)) == len(rows) // 5
            others = [s for s in data.splits if s not in (inside, outside)]
            assert not any(of(data, split, name) for split in others)

    def test_a_trial_has_one_split_whatever_is_held_out(self) -> None:
        def cuts(trial: int) -> list[set[int]]:
            """Each domain's out-split, for everything that can be left out."""
            found = []
            for names in [*itertools.combinations("abc", 1), *itertools.combinations("abc", 2)]:
                data = protocol.resplit(data_of(PLAIN), names, trial)
                found.append(set().union(*(of(data, s, n) for s in ("validation", "oracle") for n in "abc")))
            return found

        assert all(cut == cuts(0)[0] for cut in cuts(0))
        for name in "ab":
            own = set(PLAIN[name].tolist())
            assert cuts(0)[0] & own != cuts(1)[0] & own

    def test_the_cut_is_by_the_name_not_the_place(self) -> None:
        equal = {name: np.arange(40) + 40 * n for n, name in enumerate("abc")}
        first = protocol.resplit(data_of(equal), ["a"], 0)
        turned = protocol.resplit(data_of(dict(reversed(equal.items()))), ["a"], 0)
        for name in "bc":
            assert of(first, "validation", name) == of(turned, "validation", name)
        at = {name: {i % 40 for i in of(first, "validation", name)} for name in "bc"}
        assert at["b"] != at["c"]

    @settings(max_examples=40, deadline=None)
    @given(seed=st.integers(0, 2**32), pair=st.booleans(), trial=st.integers(0, 5))
    def test_no_example_is_on_two_sides_where_domains_overlap(
        self, seed: int, pair: bool, trial: int
    ) -> None:
        chance = np.random.default_rng(seed)
        domains = {
            n: np.append(chance.choice(120, 40, False), np.arange(20) + 200 + 20 * i)
            for i, n in enumerate("abcd")
        }
        names = ["b", "d"] if pair else ["c"]
        data = protocol.resplit(data_of(domains), names, trial)
        sides = [set(d.indices.tolist()) for d in data.splits.values()]
        for one, other in itertools.combinations(sides, 2):
            assert not one & other
        gone = set().union(*(domains[n].tolist() for n in names))
        assert sides[2] | sides[3] == gone
        assert sides[0] | sides[1] == set().union(*(d.tolist() for d in domains.values())) - gone
        for name in names:  # a fifth, but for those that another domain decides on
            assert 0.05 < len(of(data, "oracle", name)) / 60 < 0.35

    def test_all_splits_of_a_dataset_are_put_together(self) -> None:
        parts = {
            "train": Domains.from_indices({"a": np.arange(20), "b": np.arange(20, 40)}),
            "validation": Domains.from_indices({"a": np.arange(40, 50)}),
            "test": Domains.from_indices({"c": np.arange(50, 60)}),
        }
        data = protocol.resplit(data_of({}, **parts), ["a"], 0)
        assert of(data, "test", "a") | of(data, "oracle", "a") == {*range(20), *range(40, 50)}
        assert set(data.splits["train"].names) == {"b", "c"}
        assert data.notes == {"examples": "scaled"}  # those on the old splits say nothing of the new ones

    def test_it_does_not_depend_on_how_the_set_itself_was_split(self) -> None:
        whole = Domains.from_indices(PLAIN)
        one = data_of({}, train=whole)
        odd = whole.indices % 2 == 1
        other = data_of({}, test=whole.filter(odd).select(["c", "b", "a"]), train=whole.filter(~odd))
        for name in "abc":
            assert of(protocol.resplit(one, ["a"], 3), "train", name) == (
                of(protocol.resplit(other, ["a"], 3), "train", name)
            )

    @pytest.mark.parametrize(
        ("domains", "names"),
        [(PLAIN, ["aa"]), (PLAIN | {"x": [210]}, ["a"]), ({"a": range(10), "b": range(10, 20)}, ["a", "b"])],
    )
    def test_what_cannot_be_split(self, domains: Any, names: list[str]) -> None:
        with pytest.raises(InputError):
            protocol.resplit(data_of({n: np.array(rows) for n, rows in domains.items()}), names, 0)


class TestConfig:
    def test_it_is_part_of_the_identity(self) -> None:
        plain = RunConfig("rotated-digits", "erm", 2)
        variants: list[dict[str, Any]] = [
            {},
            ABOUT,
            ABOUT | {"trial": 1},
            ABOUT | {"draw": 1},
            ABOUT | {"held_out": ["15°"]},
            ABOUT | {"held_out": ["0°", "15°"]},
        ]
        assert len({replace(plain, protocol=p).identity for p in variants}) == len(variants)
        assert replace(plain, protocol={}).identity == plain.identity

    @pytest.mark.parametrize(
        ("fields", "named"),
        [
            ({"protocol": {"hled_out": ["a"], "trial": 0}}, "held_out"),
            ({"protocol": {"held_out": "a", "trial": 0}}, "held_out"),
            ({"protocol": {"held_out": [], "trial": 0}}, "held_out"),
            ({"protocol": {"held_out": ["a", "a"], "trial": 0}}, "held_out"),
            ({"protocol": {"held_out": ["a", "b", "c"], "trial": 0}}, "held_out"),
            ({"protocol": {"held_out": ["a"], "trial": -1}}, "trial"),
            ({"protocol": {"held_out": ["a"], "trial": 0, "draw": True}}, "draw"),
            ({"protocol": ABOUT, "holdout": 0.2}, "holdout"),
            ({"protocol": ABOUT, "data_options": {"held_out": "0°"}}, "held_out"),
        ],
    )
    def test_wrong_ones_are_refused(self, fields: dict[str, Any], named: str) -> None:
        with pytest.raises(InputError, match=named):
            RunConfig("rotated-digits", "erm", 2, **fields)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Iterator[DomainData]:
    """What rotated-digits would be with images of 224 × 224 and a model that has dropout."""
    data = data_of({"30°": [0, 1], "0°": [2, 3], "15°": [4, 5]}, (3, 224, 224))
    module = type("Model", (), {"build": staticmethod(lambda input_shape, classes, dropout=0.0: None)})
    monkeypatch.setattr(sets, "load", lambda name, **options: data)
    monkeypatch.setattr(models.registry, "module", lambda name: module)
    return data


class TestPlan:
    def test_every_combination_once(self) -> None:
        found = protocol.plan(DIGITS, ["erm", "fish"], trials=2, draws=3, pairs=True)
        assert len(found) == (6 + 15) * 2 * 2 * 3
        assert len({c.identity for c in found}) == len({selection.key_of(c) for c in found}) == len(found)
        assert {(c.steps, c.eval_every, c.select) for c in found} == {(5001, 100, "last")}
        assert {c.seed == c.protocol["trial"] for c in found} == {True}
        first = [c.protocol["held_out"] for c in found[::6]][:6]
        assert first == [["0°"], ["15°"], ["30°"], ["45°"], ["60°"], ["75°"]]

    def test_more_of_a_comparison_keeps_its_runs(self) -> None:
        few = {c.identity for c in protocol.plan(DIGITS, ["erm"], trials=1, draws=2)}
        many = {c.identity for c in protocol.plan(DIGITS, ["fish", "erm"], trials=2, draws=3, pairs=True)}
        assert few < many

    def test_the_first_draw_is_the_defaults(self) -> None:
        found = protocol.plan(DIGITS, ["irm"], trials=2, draws=1)
        assert {(c.batch_size, c.lr, str(c.settings)) for c in found} == {(64, 1e-3, "{}")}

    def test_draws_are_in_range_and_shared_by_what_is_held_out(self) -> None:
        found = protocol.plan(DIGITS, ["erm", "irm"], trials=3, draws=30)
        drawn: dict[Any, set[Any]] = {}
        for c in found:
            where = c.protocol["trial"], c.protocol.get("draw", 0)
            drawn.setdefault(where, set()).add((c.lr, c.batch_size))
        assert all(len(values) == 1 for values in drawn.values())
        rates, sizes = zip(*(next(iter(v)) for (_, n), v in drawn.items() if n), strict=True)
        assert len(set(rates)) == 3 * 29
        assert 10**-4.5 <= min(rates) < 10**-4 < 10**-3 < max(rates) <= 10**-2.5
        assert 8 <= min(sizes) < 16 < 256 < max(sizes) <= 512
        assert len({str(c.settings) for c in found if c.algorithm == "irm"}) == 3 * 29 + 1

    def test_large_images_have_spaces_of_their_own(self, large: DomainData) -> None:
        found = protocol.plan(DIGITS, ["erm"], trials=1, draws=40, eval_every=None)
        assert {c.eval_every for c in found} == {300}
        assert [c.protocol["held_out"] for c in found[::40]] == [["0°"], ["15°"], ["30°"]]
        first, *drawn = [c for c in found if c.protocol["held_out"] == ["0°"]]
        assert (first.lr, first.optimizer_options) == (5e-5, {"weight_decay": 0.0})
        assert (first.batch_size, first.model_options) == (32, {"dropout": 0.0})
        assert {c.model_options["dropout"] for c in drawn} == {0.0, 0.1, 0.5}
        rates, decays = [c.lr for c in drawn], [c.optimizer_options["weight_decay"] for c in drawn]
        assert 1e-5 <= min(rates) < 3e-5 < 2e-4 < max(rates) <= 10**-3.5
        assert 1e-6 <= min(decays) < 1e-5 < 1e-3 < max(decays) <= 1e-2
        assert 8 <= min(c.batch_size for c in drawn) < 16 < 32 < max(c.batch_size for c in drawn) <= 45

    def test_domainnet_has_numbers_of_its_own(self, large: DomainData) -> None:
        """Looked at every 1,000 steps, in batches of up to 2⁵; all else as with other large images."""
        found = protocol.plan({"domainnet": {}}, ["erm"], trials=3, draws=40)
        assert {(c.steps, c.eval_every) for c in found} == {(5001, 1000)}
        sizes = [c.batch_size for c in found if c.protocol.get("draw")]
        assert 8 <= min(sizes) < 12 < 28 < max(sizes) <= 32
        assert found[0].batch_size == 32
        assert max(c.lr for c in found) <= 10**-3.5
        assert {(c.precision, c.memory_format) for c in found} == {("fp32", "contiguous")}

    @pytest.mark.parametrize("dataset", ["vlcs", "pacs", "office-home", "terra-incognita", "domainnet"])
    def test_published_images_come_with_what_domainbed_published(
        self, large: DomainData, dataset: str
    ) -> None:
        """A ResNet-50 with torchvision's weights; the training domains are scored on augmented images."""
        found = protocol.plan({dataset: {}}, ["erm"], trials=1, draws=3)
        assert {c.model for c in found} == {"resnet50.tv_in1k"}
        assert {tuple(c.data_options.items()) for c in found} == {(("augment_validation", True),)}
        assert all(is_pretrained(c) for c in found)
        assert {tuple(c.model_options) for c in found} == {("dropout",)}  # BatchNorm: frozen, its default

    def test_what_is_given_counts_more(self, large: DomainData) -> None:
        options = {"augment_validation": False, "size": 96}
        found = protocol.plan({"pacs": options}, ["erm"], trials=1, draws=1, model="small-cnn")
        assert {c.model for c in found} == {"small-cnn"}
        assert found[0].data_options == options
        assert protocol.plan({"rotated-digits": {}}, ["erm"], trials=1, draws=1)[0].model is None

    def test_some_domains_ways_of_drawing_and_other_fields(self) -> None:
        found = protocol.plan(
            {"rotated-digits": {"seed": 3}},
            ["fish:regrouped"],
            trials=1,
            draws=2,
            pairs=True,
            held_out={"rotated-digits": ["15°"]},
            steps=7,
            eval_every=2,
            eval_limit=50,
            optimizer_options={"eps": 1e-7},
        )
        assert len(found) == 2 * (1 + 5)
        assert all("15°" in c.protocol["held_out"] for c in found)
        assert {(c.algorithm, c.draw, c.name) for c in found} == {("fish", "regrouped", "fish:regrouped")}
        assert {(c.steps, c.eval_every, c.eval_limit, c.data_options["seed"]) for c in found} == {
            (7, 2, 50, 3)
        }
        assert {c.optimizer_options["eps"] for c in found} == {1e-7}

    @pytest.mark.parametrize(
        ("options", "algorithm", "held_out", "named"),
        [({}, "erm", "15", "15°"), ({}, "emr", "0°", "emr"), ({"held_out": "0°"}, "erm", "0°", "held_out")],
    )
    def test_wrong_names(self, options: Any, algorithm: str, held_out: str, named: str) -> None:
        with pytest.raises(InputError, match=named):
            protocol.plan({"rotated-digits": options}, [algorithm], held_out={"rotated-digits": [held_out]})


class TestRuns:
    def test_the_loop_gets_the_splits_of_its_own_trial(self) -> None:
        """Also after another trial of the same dataset, which is kept."""
        seen = []
        for about in (ABOUT, ABOUT | {"trial": 1}, ABOUT | {"held_out": ["15°", "30°"]}, ABOUT):
            splits = prepare(RunConfig("rotated-digits", "erm", 1, protocol=about), "cpu").data.splits
            assert set(splits["test"].names) == set(about["held_out"])
            assert not set(splits["train"].names) & set(about["held_out"])
            seen.append(splits["train"].indices.tolist())
        assert seen[0] == seen[3]
        assert seen[0] != seen[1] != seen[2]

    def test_from_plan_to_numbers(self, tmp_path: Path) -> None:
        only = {"rotated-digits": ["0°"]}
        configs = protocol.plan(
            DIGITS, ["erm"], trials=1, draws=1, held_out=only, pairs=True, steps=2, eval_every=1
        )
        store = Store(tmp_path)
        for config in configs:
            store.save(run(config, "cpu"))
        records: list[RunRecord] = store.found(configs)
        assert set(records[0].history[0]["scores"]) == {"train", "validation", "test", "oracle"}
        found = selection.sweep(configs, records)
        for rule in selection.RULES:
            result = selection.results(found, "rotated-digits", rule)
            (choice,) = result["choices"]
            assert (choice["status"], result["missing"], result["metric"]) == ("scored", [], "accuracy")
            point = records[0].history[choice["step"] - 1]["scores"]
            assert choice["score"] == point["test"]["domains"]["0°"]
            if rule == "oracle":
                assert choice["selection_score"] == point["oracle"]["domains"]["0°"]
                assert choice["step"] == 2
