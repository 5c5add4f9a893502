"""Tables with a column per dataset: random grouping, DomainBed, WILDS and ablations; and the recipes."""

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

from paper.conftest import QUICK
from references.fish_epoch import epoch_steps
from shoal.datasets import load
from shoal.errors import InputError
from shoal.paper import read, recipes
from shoal.paper.recipes import Variant
from shoal.paper.reproduce import reproduce

TABLES = read("presets/tables.yaml")
pytestmark = pytest.mark.usefixtures("in_process")


@pytest.fixture
def data(wilds_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Imitations of WILDS, and runs that are smaller still than quick ones."""
    monkeypatch.setenv("SHOAL_DATA", str(wilds_root))
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    tiny, quick = str(wilds_root / "tiny-bert"), read("presets/wilds.yaml")["every"]["quick"]
    text = {"model": tiny, "data_options": {"tokenizer": tiny, "max_tokens": 8}}
    monkeypatch.setitem(quick, "text", {**quick["text"], **text})
    small = {"steps": 3, "eval_limit": 20, "data_options": {"size": 16}}
    monkeypatch.setitem(quick, "images", {**quick["images"], **small})
    return wilds_root


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps by DomainBed's protocol."""
    plan = {"search": 1, "steps": 2, "eval_every": 2}
    monkeypatch.setitem(TABLES["domainbed"]["quick"], "plan", plan)


def columns(result: Any, heading: str = "") -> dict[str, Any]:
    return {c["dataset"]: c for c in result.data["tables"][heading]}


@pytest.mark.usefixtures("short")
def test_domainbed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"algorithms": "erm", "datasets": "coloured-digits", "out": tmp_path}
    result = reproduce("domainbed", **options, **QUICK)
    (column,) = columns(result).values()
    assert column["runs"] == 3
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "domainbed-quick").glob("*.json")}
    options["algorithms"] = ["erm", "fish:regrouped"]
    ours = columns(reproduce("domainbed", **options, **QUICK))["coloured-digits"]["ours"]
    assert {row: len(values["values"]) for row, values in ours.items()} == {"ERM": 1, "fish:regrouped": 1}
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())


def test_wilds(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    result = reproduce("wilds", datasets=["camelyon17", "amazon"], out=tmp_path, **QUICK)
    assert not result.problems
    for name, column in columns(result).items():
        assert list(column["ours"]) == ["Fish", "ERM (ours)"]
        assert column["metric"] == recipes.headline(name)
        assert {"Fish", "ERM (ours)", "ERM (by WILDS)"} == set(column["paper"])
    predictions = list((tmp_path / "wilds-quick" / "predictions").glob("*/*split:test*.csv"))
    assert len(predictions) == 2 * 2


def test_ablations(data: Path, tmp_path: Path) -> None:
    result = reproduce("ablation", only="warm-start", datasets="camelyon17", out=tmp_path, **QUICK)
    (column,) = columns(result, "Length of the ERM warm start").values()
    assert list(column["ours"]) == list(column["paper"])
    records = [json.loads(path.read_text()) for path in (tmp_path / "ablation-quick").glob("*.json")]
    assert sorted(r["config"]["warm_start"] for r in records) == [1, 2, 3]  # a tenth, half and all of 3 steps


def test_without_data_the_error_names_what_is_missing(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data_dir": tmp_path, "out": tmp_path / "out", "progress": False}
    for experiment in ("wilds", "ablation"):
        with pytest.raises(InputError, match=r"(?s)no data for camelyon17.*download server of WILDS"):
            reproduce(experiment, **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no data for pacs"):
        reproduce("domainbed", datasets="pacs", **options)


# Recipes

# The paper's tables "Hyperparameters for ERM" and "for Fish": model, optimizer, learning rate, batch, ERM's
# weight decay, ε, domains per step, warm start ("plateau": "best val. metric"), metric. Then what it leaves
# open: epochs, whether ERM's rate falls, as in WILDS, and steps between evaluations. Of the authors' program:
# src/config.py and src/main.py, where ε is meta_lr / meta_steps and Adam has amsgrad.
PUBLISHED = """
camelyon17    paper        densenet121             sgd  1e-3 32 0    0.01        3  500     accuracy 20 no -
civilcomments paper        bert-base-uncased       adam 1e-5 16 0.01 0.05        5  plateau worst-group_accuracy 5 no -
fmow          paper        densenet121.tv_in1k     adam 1e-4 64 0    0.01        5  plateau accuracy 12 yes -
iwildcam      paper        resnet50.tv_in1k        adam 1e-4 16 0    0.01        10 plateau macro_F1 18 no -
poverty       paper        resnet18                adam 1e-3 64 0    0.1         5  -       Pearson_r 200 yes -
amazon        paper        bert-base-uncased       adam 2e-6 8  0.01 0.01        5  plateau 10th-percentile_accuracy 3 no -
camelyon17    authors-code densenet121             sgd  1e-4 32 0    0.003333333 3  10000   accuracy 20 no -
civilcomments authors-code distilbert-base-uncased adam 1e-5 16 0    0.01        5  20000   worst-group_accuracy 5 no 500
fmow          authors-code densenet121.tv_in1k     adam 1e-4 64 0    0.002       5  24000   worst-group_accuracy 12 no 500
iwildcam      authors-code resnet50.tv_in1k        adam 1e-4 16 0    0.001       10 24000   macro_F1 18 no 500
poverty       authors-code resnet18                adam 1e-3 64 0    0.02        5  -       worst-group_Pearson_r 200 no -
amazon        authors-code distilbert-base-uncased adam 2e-6 8  0    0.002       5  31000   10th-percentile_accuracy 3 no 500
"""  # noqa: E501
SEEDS = {"camelyon17": 10}  # the others: 3


@pytest.mark.parametrize("line", PUBLISHED.strip().splitlines())
def test_recipes_are_as_published(line: str, data: Path) -> None:
    dataset, preset, model, optimizer, *numbers = line.split()
    rate, batch, decay, epsilon, slots = map(float, numbers[:5])
    warm, metric, epochs, falls, every = numbers[5:]
    found = recipes.runs(dataset, [Variant("Fish"), Variant("erm", "erm")], preset)
    assert [c.seed for c in found] == [n for n in range(SEEDS.get(dataset, 3)) for _ in range(2)]
    assert {c.data_options.get("fold") for c in found} == ({"A"} if dataset == "poverty" else {None})
    train = load(dataset, **found[0].data_options).splits["train"]
    authors = preset == "authors-code"
    options = {"momentum": 0.9} if optimizer == "sgd" else {"amsgrad": True} if authors else {}
    for config in found:
        inner = config.algorithm == "fish"
        own = dict(config.optimizer_options)
        assert own.pop("weight_decay", 0.0) == (0.0 if inner else decay)
        assert (config.model, config.optimizer, config.lr, own) == (model, optimizer, rate, options)
        assert (config.batch_size, config.domains_per_step) == (batch, slots if inner else 1)
        assert (config.metric, config.warm_start) == (
            metric.replace("_", " "),
            _warm(warm) if inner else None,
        )
        assert (config.select == "last") == ((dataset, authors) == ("fmow", True))  # which saves the last
        assert (config.precision, config.memory_format) == ("fp32", "contiguous")
        epoch = math.ceil(len(train.examples()) / (batch * (slots if inner else 1)))
        if inner and authors:
            draw = partial(random.Random(config.seed).sample, range(len(train)), int(slots))
            epoch = epoch_steps(train.sizes, int(batch), int(slots), draw)
        assert config.steps == int(epochs) * max(1, epoch)
        assert config.eval_every == min(max(1, epoch) if every == "-" else int(every), config.steps)
        assert config.schedule == (f"step:0.96:{epoch}" if falls == "yes" and not inner else None)
        expected = {"meta_lr": pytest.approx(epsilon, rel=1e-6), "inner_state": "carry"}
        if authors:
            expected |= {"interpolate_buffers": True, "inner_state": max(1, epoch)}
        assert config.settings == (expected if inner else {})


def _warm(text: str) -> int | str | None:
    return int(text) if text.isdecimal() else None if text == "-" else text


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=9),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 5),
)
def test_epochs_of_the_authors_program(sizes: list[int], batch: int, slots: int, seed: int) -> None:
    slots = min(slots, len(sizes))
    draw = partial(random.Random(seed).sample, range(len(sizes)), slots)
    assert recipes.steps_until_used_up(sizes, batch, slots, seed) == epoch_steps(sizes, batch, slots, draw)
