"""Recipes for WILDS, and the whole way on imitations: train, select, predict, score, ablate."""

from __future__ import annotations

import json
import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imitations.wilds import WILDS
from references.fish_epoch import epoch_steps
from shoal.cli import main
from shoal.data.sets import load
from shoal.errors import InputError
from shoal.files import read_yaml
from shoal.paper import recipes, tables
from shoal.paper.published import claims
from shoal.paper.recipes import Changes, Variant

TEXT = ("civilcomments", "amazon")
SMALL = Changes(epochs=1, seeds=1)


@pytest.fixture
def data(wilds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_DATA", str(wilds))
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    return wilds


def small(dataset: str, root: Path, **more: Any) -> Changes:
    options = {"tokenizer": str(root / "tiny-bert")} if dataset in TEXT else {}
    return Changes(epochs=1, seeds=1, data_options=options, **more)


def fish(dataset: str, root: Path, preset: str = "paper") -> Any:
    (config,) = recipes.runs(dataset, [Variant("Fish")], preset=preset, changes=small(dataset, root))
    return config


SGD, ADAM = {"momentum": 0.9}, {"amsgrad": True}
DENSENET, RESNET18 = "densenet121", "resnet18"
PRETRAINED, RESNET = "densenet121.tv_in1k", "resnet50.tv_in1k"  # torchvision's, with weights
BERT, DISTILBERT = "bert-base-uncased", "distilbert-base-uncased"
WORST, AVERAGE, TENTH = "worst-group accuracy", "accuracy", "10th-percentile accuracy"
PUBLISHED: dict[tuple[str, str], tuple[Any, ...]] = {
    # The paper's tables "Hyperparameters for ERM" and "for Fish": model, optimizer, its other options, rate,
    # batch, ERM's weight decay, ε, meta-steps, warm start ("plateau": "best val. metric"), whose weights go
    # on, metric. Then what it leaves open: epochs, whether ERM's rate falls, as WILDS does, steps between
    # evaluations.
    ("camelyon17", "paper"): (
        *(DENSENET, "sgd", SGD, 1e-3, 32, 0.0, 0.01, 3, 500, None, AVERAGE, "best"),
        *(20, False, None),
    ),
    ("civilcomments", "paper"): (
        *(BERT, "adam", {}, 1e-5, 16, 0.01, 0.05, 5, "plateau", None, WORST, "best"),
        *(5, False, None),
    ),
    ("fmow", "paper"): (
        *(PRETRAINED, "adam", {}, 1e-4, 64, 0.0, 0.01, 5, "plateau", None, AVERAGE, "best"),
        *(12, True, None),
    ),
    ("iwildcam", "paper"): (
        *(RESNET, "adam", {}, 1e-4, 16, 0.0, 0.01, 10, "plateau", None, "macro F1", "best"),
        *(18, False, None),
    ),
    ("poverty", "paper"): (
        *(RESNET18, "adam", {}, 1e-3, 64, 0.0, 0.1, 5, None, None, "Pearson r", "best"),
        *(200, True, None),
    ),
    ("amazon", "paper"): (
        *(BERT, "adam", {}, 2e-6, 8, 0.01, 0.01, 5, "plateau", None, TENTH, "best"),
        *(3, False, None),
    ),
    # src/config.py and src/main.py of the authors' program; ε is meta_lr / meta_steps. Evaluations are every
    # print_iters steps or once an epoch; `save_best_model` keeps the last on FMoW; the warm start is
    # evaluated as often, so that on Camelyon17 it has one evaluation, and on FMoW again the last is kept.
    ("camelyon17", "authors-code"): (
        *(DENSENET, "sgd", SGD, 1e-4, 32, 0.0, 0.01 / 3, 3, 10_000, None, AVERAGE, "best"),
        *(20, False, None),
    ),
    ("civilcomments", "authors-code"): (
        *(DISTILBERT, "adam", ADAM, 1e-5, 16, 0.0, 0.05 / 5, 5, 20_000, "best", WORST, "best"),
        *(5, False, 500),
    ),
    ("fmow", "authors-code"): (
        *(PRETRAINED, "adam", ADAM, 1e-4, 64, 0.0, 0.01 / 5, 5, 24_000, None, WORST, "last"),
        *(12, False, 500),
    ),
    ("iwildcam", "authors-code"): (
        *(RESNET, "adam", ADAM, 1e-4, 16, 0.0, 0.01 / 10, 10, 24_000, "best", "macro F1", "best"),
        *(18, False, 500),
    ),
    ("poverty", "authors-code"): (
        *(RESNET18, "adam", ADAM, 1e-3, 64, 0.0, 0.1 / 5, 5, None, None, "worst-group Pearson r", "best"),
        *(200, False, None),
    ),
    ("amazon", "authors-code"): (
        *(DISTILBERT, "adam", ADAM, 2e-6, 8, 0.0, 0.01 / 5, 5, 31_000, "best", TENTH, "best"),
        *(3, False, 500),
    ),
}
SEEDS = {"camelyon17": 10, "civilcomments": 3, "fmow": 3, "iwildcam": 3, "poverty": 3, "amazon": 3}
LEADERBOARD = {"camelyon17": 10, "civilcomments": 5, "fmow": 3, "iwildcam": 3, "poverty": 5, "amazon": 3}


def test_every_recipe_is_in_the_table() -> None:
    assert {d for d, _ in PUBLISHED} == set(recipes.datasets()) == set(WILDS)
    assert {p for _, p in PUBLISHED} == set(recipes.PRESETS)


@pytest.mark.parametrize(("dataset", "preset"), PUBLISHED)
def test_as_published(dataset: str, preset: str, data: Path) -> None:
    (model, optimizer, options, rate, batch, decay, epsilon, slots, warm, warm_select, metric, select,
     epochs, falls, every) = PUBLISHED[dataset, preset]  # fmt: skip
    small_options = {"tokenizer": str(data / "tiny-bert")} if dataset in TEXT else {}
    changes = Changes(data_options=small_options)
    variants = [Variant("Fish"), Variant("erm", "erm")]
    found = recipes.runs(dataset, variants, preset=preset, changes=changes)
    assert [c.seed for c in found] == [n for n in range(SEEDS[dataset]) for _ in variants]
    assert {c.data_options.get("fold") for c in found} == ({"A"} if dataset == "poverty" else {None})
    train = load(dataset, **found[0].data_options).splits["train"]
    examples = len(train.examples())
    for config in found:
        inner = config.algorithm == "fish"
        of_optimizer = dict(config.optimizer_options)
        assert of_optimizer.pop("weight_decay", 0.0) == (0.0 if inner else decay)
        assert (config.optimizer, of_optimizer) == (optimizer, {"lr": rate, **options})
        assert config.model == model
        assert (config.batch_size, config.domains_per_step) == (batch, slots if inner else 1)
        assert (config.metric, config.select or "best") == (metric, select)
        assert config.eval_splits == ["validation", "test"]
        assert config.clip is config.average is config.patience is None
        assert (config.precision, config.memory_format) == ("fp32", "contiguous")
        epoch = math.ceil(examples / (batch * (slots if inner else 1)))
        if inner and preset == "authors-code":
            generator = random.Random(config.seed)
            domains = range(len(train))
            epoch = epoch_steps(train.sizes, batch, slots, partial(generator.sample, domains, slots))
        assert config.steps == epochs * max(1, epoch)
        assert config.eval_every == min(every or max(1, epoch), config.steps)
        assert config.schedule == (f"step:0.96:{epoch}" if falls and not inner else None)
        assert (config.warm_start, config.warm_select) == ((warm, warm_select) if inner else (None, None))
        expected = {"meta_lr": pytest.approx(epsilon, rel=1e-6), "inner_state": "carry"}
        if preset == "authors-code":
            expected |= {"buffers": "interpolate", "inner_state": max(1, epoch)}
        assert config.settings == (expected if inner else {})


def test_a_warm_start_shrinks_with_the_epochs(data: Path) -> None:
    assert fish("camelyon17", data).warm_start == 25  # 500 of 20 epochs
    assert fish("amazon", data, "authors-code").warm_start == 10_333  # 31,000 of 3


@pytest.mark.parametrize("dataset", recipes.datasets())
def test_as_many_runs_as_the_leaderboard_asks_for(dataset: str, data: Path) -> None:
    options = {"tokenizer": str(data / "tiny-bert")} if dataset in TEXT else {}
    changes = Changes(leaderboard=True, data_options=options)
    found = recipes.runs(dataset, [Variant("Fish")], changes=changes)
    assert len({c.identity for c in found}) == LEADERBOARD[dataset]
    folds = [c.data_options.get("fold") for c in found]
    assert folds == (list("ABCDE") if dataset == "poverty" else [None] * len(found))


def test_seeds_and_the_leaderboard_are_two_answers() -> None:
    with pytest.raises(InputError, match=r"leaderboard and seeds=4"):
        Changes(leaderboard=True, seeds=4)


class TestEpochsOfTheAuthorsProgram:
    @given(
        st.lists(st.integers(1, 60), min_size=1, max_size=9),
        st.integers(1, 9),
        st.integers(1, 9),
        st.integers(0, 5),
    )
    def test_against_lists_of_examples(self, sizes: list[int], batch: int, slots: int, seed: int) -> None:
        slots = min(slots, len(sizes))
        draw = partial(random.Random(seed).sample, range(len(sizes)), slots)
        expected = epoch_steps(sizes, batch, slots, draw)
        assert recipes.steps_until_used_up(sizes, batch, slots, seed) == expected

    def test_all_domains_in_every_step(self) -> None:
        """Camelyon17: the smallest hospital decides, all but its last batch."""
        assert recipes.steps_until_used_up([320, 640, 960], 32, 3, seed=0) == 9

    def test_one_batch_each(self) -> None:
        assert recipes.steps_until_used_up([5, 5, 5], 8, 2, seed=0) == 0

    def test_more_domains_per_step_than_there_are(self) -> None:
        assert recipes.steps_until_used_up([50, 50], 8, 3, seed=0) == 0


class TestDifferences:
    @pytest.mark.parametrize("preset", recipes.PRESETS)
    def test_every_one_is_printed_beneath_the_table(
        self, preset: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        content = read_yaml(Path(recipes.__file__).parent / "presets" / "wilds.yaml")
        options = ["--no-run", "--preset", preset, "--out", str(tmp_path), "--algorithms", "fish"]
        given = [f"tokenizer={data / 'tiny-bert'}"]
        assert main(["reproduce", "wilds", *options, "--data", *given]) == 0
        printed = capsys.readouterr().out
        kept = (tmp_path / "wilds.md").read_text()
        entries = content["every"]["differs"][preset]
        assert len(entries) > 5
        for entry in entries:
            assert set(entry) - {"of"} == {"what", "why"}
            assert set(entry.get("of", ())) <= set(recipes.datasets())
            of = ", ".join(entry.get("of", ["all"]))
            line = f"- {of}: {entry['what']} ({entry['why']})."
            assert line in printed.splitlines()
            assert line in kept.splitlines()

    def test_only_of_the_datasets_that_are_shown(
        self, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        options = ["--datasets", "fmow", "--no-run", "--out", str(tmp_path), "--preset", "authors-code"]
        for what in ("wilds", "grouping"):
            assert main(["reproduce", what, *options]) == 0
            printed = capsys.readouterr().out
            assert "Differences from the authors' code" in printed
            assert "poverty" not in printed
            assert "fmow the last" in printed  # its step


class TestSettings:
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


LONG = ("civilcomments", "fmow", "iwildcam", "poverty")
"""Others of images and of text do the same in less time."""


@pytest.mark.parametrize(
    "dataset",
    [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in recipes.datasets()],
)
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
