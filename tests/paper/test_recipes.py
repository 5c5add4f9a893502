"""Recipes for WILDS, and the whole way on imitations: train, select, predict, score, ablate."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from imitations.wilds import WILDS, maker
from shoal.cli import main
from shoal.data.sets import load
from shoal.errors import InputError
from shoal.paper import recipes, tables
from shoal.paper.published import claims
from shoal.paper.recipes import Changes, Variant

TEXT = ("civilcomments", "amazon")
SMALL = Changes(epochs=1, seeds=1)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Imitations of all six."""
    folder = tmp_path_factory.mktemp("wilds")
    for name in WILDS:
        maker(name)(folder, 0, "small")
    return folder


@pytest.fixture
def data(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_DATA", str(root))
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    return root


def small(dataset: str, root: Path, **more: Any) -> Changes:
    options = {"tokenizer": str(root / "tiny-bert")} if dataset in TEXT else {}
    return Changes(epochs=1, seeds=1, data_options=options, **more)


def fish(dataset: str, root: Path, preset: str = "paper") -> Any:
    (config,) = recipes.runs(dataset, [Variant("Fish")], preset=preset, changes=small(dataset, root))
    return config


class TestSettings:
    @pytest.mark.parametrize(
        ("dataset", "preset", "rate", "epsilon", "walk", "batch", "warm"),
        [
            ("camelyon17", "paper", 1e-3, 0.01, 3, 32, 25),  # 500 of 20 epochs
            ("camelyon17", "authors-code", 1e-4, 0.01 / 3, 3, 32, 500),
            ("civilcomments", "paper", 1e-5, 0.05, 5, 16, "plateau"),
            ("civilcomments", "authors-code", 1e-5, 0.05 / 5, 5, 16, 4000),
            ("fmow", "paper", 1e-4, 0.01, 5, 64, "plateau"),
            ("fmow", "authors-code", 1e-4, 0.01 / 5, 5, 64, 2000),
            ("iwildcam", "authors-code", 1e-4, 0.01 / 10, 10, 16, 1333),
            ("poverty", "paper", 1e-3, 0.1, 5, 64, None),
            ("poverty", "authors-code", 1e-3, 0.1 / 5, 5, 64, None),
            ("amazon", "authors-code", 2e-6, 0.01 / 5, 5, 8, 10333),
        ],
    )
    def test_fish_as_published(
        self,
        data: Path,
        dataset: str,
        preset: str,
        rate: float,
        epsilon: float,
        walk: int,
        batch: int,
        warm: Any,
    ) -> None:
        config = fish(dataset, data, preset)
        assert config.optimizer_options["lr"] == rate
        assert config.optimizer_options.get("weight_decay", 0.0) == 0.0
        assert config.settings["meta_lr"] == pytest.approx(epsilon, rel=1e-6)
        assert (config.domains_per_step, config.batch_size, config.warm_start) == (walk, batch, warm)

    def test_an_epoch_is_a_pass_over_the_examples_for_all(self, data: Path) -> None:
        count = len(load("camelyon17").splits["train"].examples())
        variants = [Variant(name, name) for name in recipes.ALGORITHMS]
        for config in recipes.runs("camelyon17", variants, changes=SMALL):
            seen = config.steps * config.batch_size * (config.domains_per_step or 1)
            assert count <= seen < count + config.batch_size * (config.domains_per_step or 1)
            assert config.eval_every == config.steps

    def test_baselines_split_a_batch_over_groups(self, data: Path) -> None:
        variants = [Variant(n, n) for n in ("irm", "coral", "groupdro", "erm", "reweighted")]
        found = {c.algorithm: c for c in recipes.runs("fmow", variants, changes=SMALL)}
        for name in ("irm", "coral", "groupdro"):
            assert (found[name].domains_per_step, found[name].batch_size) == (8, 8)
        for name in ("erm", "reweighted"):
            assert (found[name].domains_per_step, found[name].batch_size) == (1, 64)
        assert found["irm"].settings == {"weight": 1.0, "start": 500}
        assert found["coral"].settings == {"weight": 0.1}
        assert found["erm"].schedule == f"step:0.96:{found['erm'].eval_every}"
        assert all(c.warm_start is None for c in found.values())
        assert {n for n, c in found.items() if c.data_options.get("group_by") == "year"} == {
            *("irm", "coral", "groupdro", "reweighted")
        }

    def test_as_many_seeds_as_the_benchmark_asks_for(self, data: Path) -> None:
        assert [c.seed for c in recipes.runs("camelyon17", [Variant("Fish")])] == list(range(10))
        folds = recipes.runs("poverty", [Variant("Fish")])
        assert [c.data_options["fold"] for c in folds] == list("ABCDE")
        assert len({c.identity for c in folds}) == 5

    def test_what_selects(self, data: Path) -> None:
        assert fish("fmow", data).metric == "accuracy"
        assert fish("fmow", data, "authors-code").metric == "worst-group accuracy"
        assert fish("poverty", data).metric == "Pearson r"
        assert fish("poverty", data, "authors-code").metric == "worst-group Pearson r"

    def test_names_are_checked(self) -> None:
        with pytest.raises(InputError, match="Did you mean 'fmow'"):
            recipes.runs("fmo", [])
        with pytest.raises(InputError, match="unknown preset 'papers'"):
            recipes.settings("fmow", "papers")


class TestAblations:
    def test_alpha_times_epsilon_is_constant(self, data: Path) -> None:
        found = recipes.runs("camelyon17", recipes.ablation("rates", "camelyon17"), changes=SMALL)
        assert len({c.optimizer_options["lr"] for c in found}) == 5
        products = [c.optimizer_options["lr"] * c.settings["meta_lr"] for c in found]
        assert all(math.isclose(p, products[0], rel_tol=1e-9) for p in products)

    def test_warm_starts(self, data: Path) -> None:
        found = recipes.runs("camelyon17", recipes.ablation("warm-start", "camelyon17"), changes=SMALL)
        assert [c.warm_start for c in found] == [0.1, 0.5, "plateau"]

    def test_gammas(self, data: Path) -> None:
        found = recipes.runs("camelyon17", recipes.ablation("smoothfish", "camelyon17"), changes=SMALL)
        assert [c.settings["gamma"] for c in found] == [0.0, 0.1, 0.2, 0.5, 0.8, 1.0]

    def test_rows_are_those_that_the_paper_has_numbers_for(self) -> None:
        for claim in claims("wilds"):
            if claim["table"] in recipes.ABLATIONS:
                rows = [v.label for v in recipes.ablation(claim["table"], claim["dataset"])]
                assert rows == list(claim["values"]), claim

    def test_every_dataset_has_numbers_in_the_main_table(self) -> None:
        for name in recipes.datasets():
            claim = tables.wilds_claim("main", name)
            assert claim["metric"] == recipes.headline(name)
            assert "Fish" in claim["values"]


ABLATED = {
    "camelyon17": "warm-start",
    "civilcomments": "smoothfish",
    "fmow": "grouping",
    "iwildcam": "rates",
    "poverty": "meta-steps",
    "amazon": "grouping",
}


@pytest.mark.parametrize("dataset", recipes.datasets())
def test_from_files_to_a_table(
    dataset: str,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Train ERM and, from a warm start, Fish; select, predict; score what was predicted again; ablate."""
    if dataset in TEXT:
        pytest.importorskip("transformers")
        tiny = str(data / "tiny-bert")
        options = ["--model", tiny, "--data", f"tokenizer={tiny}", "max_tokens=16"]
    else:
        options = ["--model", "small-cnn", "--data", "size=16", "--batch-size", "16"]
    options += ["--epochs", "0.1", "--seeds", "1", "--eval-limit", "60", "--device", "cpu", "--jobs", "1"]
    options += ["--datasets", dataset, "--out", str(tmp_path / "out"), "--json"]
    assert main(["reproduce", "wilds", "--algorithms", "fish", "erm", *options]) == 0
    (column,) = json.loads(capsys.readouterr().out)["columns"]
    assert (column["runs"], column["missing"]) == (2, 0)
    assert column["paper"]["Fish"]
    records = [json.loads(p.read_text()) for p in (tmp_path / "out" / "wilds").glob("*.json")]
    assert {r["config"]["algorithm"] for r in records} == {"fish", "erm"}

    files = sorted((tmp_path / "out" / "wilds" / "predictions").glob("*/*split:test*.csv"))
    assert len(files) == 2
    size = [f"size={16}"] if dataset not in TEXT else []
    assert main(["evaluate", str(files[0]), "--json", *(["--data", *size] if size else [])]) == 0
    scored = json.loads(capsys.readouterr().out)
    assert column["metric"] in json.dumps(scored)

    what = ABLATED[dataset]
    assert main(["reproduce", what, *options]) == (1 if what == "meta-steps" else 0)
    found = json.loads(capsys.readouterr().out)
    (ablated,) = found["columns"]
    assert len(ablated["ours"]) == (
        3 if what in ("warm-start", "grouping", "meta-steps") else ablated["runs"]
    )
    assert ablated["missing"] == len(found["failed"])
    if what == "meta-steps":  # there are 13 countries to train on
        assert "20" in found["failed"][0]
    else:
        assert not found["failed"]
