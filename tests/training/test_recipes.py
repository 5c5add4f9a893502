"""Recipes and their stages (warm starts, WiSE-FT, retraining) against plain loops in float64."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import shoal
from shoal.data import DomainData
from shoal.errors import InputError
from shoal.training.averaging import interpolate
from shoal.training.callbacks import Callback, CallbackError, State
from shoal.training.options import complete
from shoal.training.recipes import find_recipe, recipes, with_validation
from training.finetuning import assert_close, batches, data, erm, fish, fit, frozen, network, sgd, union

LOOPS = pytest.mark.parametrize(("algorithm", "loop"), [("erm", erm), ("fish", fish)])


# By name


def test_by_name_and_dataset() -> None:
    assert find_recipe("ERM++") is recipes()["erm++"]
    assert find_recipe("LP_FT") is recipes()["lp-ft"]
    assert find_recipe("fish") is find_recipe(nn.Linear) is None
    miro, names = recipes()["miro"], ("", "PACS", "vlcs", "office-home")
    assert [miro.fill({}, name)["miro"] for name in names] == [0.1, 0.01, 0.01, 0.1]
    assert miro.fill({"miro": 0.5}, "pacs")["miro"] == 0.5
    for recipe in recipes().values():
        for options in (recipe.options, *recipe.datasets.values()):
            complete(**options)  # which checks them


def test_what_is_given_wins_also_where_it_is_a_default() -> None:
    plain = fit("erm", draw="domains", select="last")
    off: dict[str, Any] = {"warm_start": None, "average": None, "retrain": False}
    run = fit("erm++", select="last", **off)
    assert_close(run.model, plain.model)
    assert (run.warm_up, run.rule) == ([], "last step")
    named, by_hand = (
        fit(name, eval_every=1, steps=20, **o) for name, o in (("swad", {}), ("erm", {"average": "swad"}))
    )
    assert_close(named.model, by_hand.model)
    assert named.record["config"]["algorithm"] == "swad"


# The released ERM++


def released(given: DomainData, head_steps: int, steps: int, start: int) -> nn.Module:
    """The loop of the authors' program: one network is trained, its average passes every batch after it."""
    model = network(nn.BatchNorm1d(6))
    average, count = copy.deepcopy(model), 0
    optimizers = sgd(model.head.parameters()), sgd(model.parameters())
    drawn = [*batches(given, head_steps, 2, "domains"), *batches(given, steps, 2, "domains")]
    for step, pairs in enumerate(drawn, 1):
        x, y = (torch.cat(both) for both in zip(*pairs, strict=True))
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizers[step > head_steps].step()
        count += step >= head_steps + start
        first = step <= head_steps + start  # until then the average shares the memory of the weights
        for p, q in zip(model.parameters(), average.parameters(), strict=True):
            q.data = p.data.clone() if first else (q.data * count + p.data) / (1 + count)
        average(x)
    return average.eval()


def test_erm_plus_plus_as_released() -> None:
    options: dict[str, Any] = {"warm_start": "head-train:7", "average": "online-sma:4", "steps": 15}
    search = fit("erm++", network(nn.BatchNorm1d(6)), select="last", retrain=False, **options)
    by_hand = released(data(), 7, 15, 4)
    assert_close(search.model, by_hand)
    x, y = data().examples.batch(torch.arange(60, 90))  # type: ignore[attr-defined]
    assert search.accuracy("test") == pytest.approx(float((by_hand(x).argmax(1) == y).double().mean()))
    run = fit("erm++", network(nn.BatchNorm1d(6)), **options)
    assert_close(run.model, released(union(), 7, run.selected.step, 4))
    assert "online-sma:4" in run.rule
    assert recipes()["erm++"].options == {
        **{"draw": "domains", "warm_start": "head-train", "average": "online-sma", "retrain": True}
    }


# Warm starts


def probed(model: Any, steps: int, given: DomainData | None = None) -> Any:
    with frozen(model, model.head):
        erm(model, given or data(), steps, model.head.parameters(), slots=1)
    return model


@LOOPS
def test_lp_ft_as_two_loops_by_hand(algorithm: str, loop: Any) -> None:
    run = fit(algorithm, warm_start="head:7", select="last")
    by_hand = probed(network(), 7)
    loop(by_hand, data(), 12)
    assert_close(run.model, by_hand)
    assert [p.step for p in run.warm_up] == [7]


# WiSE-FT


@pytest.mark.parametrize("alpha", [0.3, 1])
def test_interpolation_is_the_formula(alpha: float) -> None:
    start, end = network(nn.BatchNorm1d(6)), network(nn.BatchNorm1d(6))
    erm(end, data(), 9)
    found = interpolate(start.state_dict(), end.state_dict(), alpha)
    for name, value in end.state_dict().items():
        wanted = (1 - alpha) * start.state_dict()[name] + alpha * value
        torch.testing.assert_close(
            found[name], wanted if value.is_floating_point() else value, rtol=0, atol=1e-10
        )
        assert (found[name].dtype, found[name].data_ptr() == value.data_ptr()) == (value.dtype, False)
    mask = {"mask": torch.tensor([0.0, -torch.inf])}
    assert torch.equal(interpolate(mask, mask, 0.5)["mask"], mask["mask"])


def accuracy(model: nn.Module, given: Any, split: str) -> float:
    x, y = given.examples.batch(torch.from_numpy(given.splits[split].examples()).long())
    return float((model(x).argmax(1) == y).double().mean())


@LOOPS
def test_wise_ft_from_the_end_of_the_warm_start(algorithm: str, loop: Any) -> None:
    run = fit(algorithm, warm_start="head:5", wise_ft=0.3, select="last")
    start = probed(network(), 5)
    end = copy.deepcopy(start)
    loop(end, data(), 12)
    assert_close(run.model, wanted := interpolate(start.state_dict(), end.state_dict(), 0.3))
    end.load_state_dict(wanted)
    for split in ("train", "validation", "test"):
        assert run.accuracy(split) == pytest.approx(accuracy(end, data(), split))
    assert run.rule == "last step, interpolated by 0.3 from the start"
    assert run.record["interpolation"] == {"alpha": 0.3}
    assert len(run.record["history"]) == len(run.history) + 1


@pytest.mark.parametrize("turned", [False, True])
def test_alpha_chosen_on_validation_and_kept_by_a_retraining(turned: bool) -> None:
    given, options = data(turned), {"wise_ft": "validation", "select": "last", "steps": 30}
    run = fit("erm", None, given, **options)
    end, model, scores = network(), network(), {}
    erm(end, given, 30)
    for n in range(11):
        model.load_state_dict(interpolate(network().state_dict(), end.state_dict(), n / 10))
        scores[n / 10] = accuracy(model, given, "validation")
    best = max(a for a, score in scores.items() if score == max(scores.values()))
    found = run.record["interpolation"]
    assert {float(a): s for a, s in found["scores"].items()} == pytest.approx(scores)
    assert (found["alpha"], best < 0.5) == (best, turned)
    assert_close(run.model, interpolate(network().state_dict(), end.state_dict(), best))
    again = fit("erm", None, given, retrain=True, **options)
    assert again.record["interpolation"] == found
    end = network()
    erm(end, union(turned), 30)
    assert_close(again.model, interpolate(network().state_dict(), end.state_dict(), best))


# Retraining


@LOOPS
@pytest.mark.parametrize("turned", [False, True])
def test_retrained_as_a_run_on_all_examples(algorithm: str, loop: Any, turned: bool) -> None:
    search = fit(algorithm, None, data(turned))
    run = fit(algorithm, None, data(turned), retrain=True)
    steps = search.selected.step
    assert steps < 12 or not turned
    by_hand = network()
    loop(by_hand, union(turned), steps)
    assert_close(run.model, by_hand)
    assert (run.selected.step, run.history) == (steps, search.history)
    assert run.accuracy("test") == pytest.approx(accuracy(by_hand, data(turned), "test"))


def test_only_validation_examples_of_training_domains_are_trained_on() -> None:
    found = with_validation(data())
    assert set(found.splits) == {"train", "test"}
    train = found.splits["train"]
    assert [train.indices_of(d).tolist() for d in range(2)] == [[*range(30)], [*range(30, 60)]]
    x, y = torch.randn(8, 4).double(), torch.arange(8) % 2
    options: dict[str, Any] = {"retrain": True, "steps": 2, "progress": False, "device": "cpu"}
    for other in (None, {"v": (x, y)}):
        with pytest.raises(InputError, match="retrain=True needs validation examples of the training"):
            shoal.fit("erm", network(), {"a": (x, y), "b": (x, y)}, validation=other, **options)


# Resuming


class Kill(Callback):
    """Fails after so many steps of this process, whatever the stage."""

    def __init__(self, after: int) -> None:
        self.left = after

    def on_step(self, state: State) -> None:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("killed")


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("erm++", {"warm_start": "head-train:7", "average": "online-sma:4"}),
        ("auto", {"warm_start": "head:7", "layer_decay": 0.7, "l2_sp": 0.01}),
        ("fish", {"warm_start": 5, "wise_ft": "validation", "average": "ema:0.9", "track_every": 4}),
        ("fish", {"average": "swad", "eval_every": 1, "retrain": True, "head_lr": 0.01}),
        ("erm", {"miro": 0.1, "average": "sma", "patience": 5, "schedule": "cosine", "eval_every": 2}),
    ],
)
def test_resumed_is_as_uninterrupted_to_the_bit(
    tmp_path: Path, algorithm: str, options: dict[str, Any]
) -> None:
    def trained(folder: str, **more: Any) -> shoal.Fit:
        model = network(nn.BatchNorm1d(6), dropout=0.3)
        options_of_both = {"checkpoint_every": 3, "folder": tmp_path / folder, "resume": True}
        return fit(algorithm, model, data(turned=True), **{"steps": 14, **options, **options_of_both, **more})

    whole = trained("whole")
    kills = 0
    for after in (2, 8, 5, 11, 9, 4):
        try:
            trained("killed", callbacks=[Kill(after)])
        except CallbackError:
            kills += 1
    run = trained("killed")
    assert kills > 1
    torch.testing.assert_close(run.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    same = ("history", "selected", "rule", "warm_up", "agreement", "interpolation", "notes")
    assert {k: run.record[k] for k in same} == {k: whole.record[k] for k in same}
    for log in (tmp_path / "whole").rglob("metrics.jsonl"):
        other = tmp_path / "killed" / log.relative_to(tmp_path / "whole")
        both = ([json.loads(line) for line in path.read_text().splitlines()] for path in (log, other))
        one, two = ([(x["step"], x["phase"], x.get("scores")) for x in lines] for lines in both)
        assert one == two
