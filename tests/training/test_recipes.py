"""Recipes and their stages (warm starts, WiSE-FT, retraining) against plain loops in float64."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import shoal
from shoal.data import DomainData
from shoal.errors import InputError
from shoal.experiments.record import RunRecord
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


class Look(Callback):
    """What is frozen and in which mode, in the stage of a warm start."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, ...]] = []
        self.after: dict[str, Tensor] = {}

    def on_step(self, state: State) -> None:
        model: Any = state.model
        if state.stage == "warm start":
            grads = {p.requires_grad for p in model.features.parameters()}
            modes = {m.training for m in model.features.modules()}
            self.seen.append((*grads, *modes, model.head.training))
            self.after = {k: v.clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("warm", ["head:6", "head-train:6"])
def test_the_rest_is_frozen_and_its_statistics_move_in_training_mode_only(warm: str) -> None:
    look, model = Look(), network(nn.BatchNorm1d(6), dropout=0.5)
    model.features[0].bias.requires_grad_(False)  # type: ignore[index, union-attr]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    run = fit("fish", model, warm_start=warm, eval_every=2, callbacks=[look])
    assert look.seen == [(False, warm == "head-train:6", True)] * 6  # also after evaluations
    changed = {k for k, v in before.items() if not torch.equal(v, look.after[k])}
    moved = {f"features.1.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")}
    assert changed == {"head.weight", "head.bias"} | (moved if warm == "head-train:6" else set())
    frozen_before = [n for n, p in run.model.named_parameters() if not p.requires_grad]
    assert frozen_before == ["features.0.bias"]
    assert not torch.equal(run.model.features[0].weight, before["features.0.weight"])  # type: ignore[index]


def test_without_a_head_to_train() -> None:
    frozen_head = network()
    frozen_head.head.requires_grad_(False)
    with pytest.raises(InputError, match="no parameter that requires a gradient"):
        fit("erm", frozen_head, warm_start="head:3")
    model = nn.Sequential(nn.Conv1d(1, 2, 4), nn.Flatten()).double()
    train: Any = {"a": (torch.randn(9, 1, 4).double(), torch.arange(9) % 2)}
    with pytest.raises(InputError, match=r"warm_start.*no head"):
        shoal.fit("erm", model, train, steps=2, warm_start="head:3", progress=False)


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


def test_wise_ft_of_averaged_weights_and_of_batchnorm() -> None:
    for average in ("sma", "swad"):
        options: dict[str, Any] = {"average": average, "eval_every": 1}
        end, run = fit("fish", **options), fit("fish", wise_ft=0.6, **options)
        assert_close(run.model, interpolate(network().state_dict(), end.model.state_dict(), 0.6))
        assert run.rule == f"{end.rule}, interpolated by 0.6 from the start"

    def trained(**options: Any) -> Any:
        return fit("erm", network(nn.BatchNorm1d(6)), select="last", **options).model

    assert_close(trained(wise_ft=1.0), trained())
    assert_close(trained(wise_ft=0.0), network(nn.BatchNorm1d(6)))
    half = trained(wise_ft=0.5)  # between the ends, statistics are computed anew
    x, _ = data().examples.batch(torch.from_numpy(data().splits["train"].examples()).long())  # type: ignore[attr-defined]
    torch.testing.assert_close(half.features[1].running_mean, half.features[0](x).mean(0), rtol=0, atol=1e-10)


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


@LOOPS
@pytest.mark.parametrize("average", ["sma", "swad"])
def test_a_retraining_averages_over_the_same_steps(algorithm: str, loop: Any, average: str) -> None:
    options: dict[str, Any] = {"average": average, "eval_every": 1, "steps": 20}
    turned = average == "swad"
    search = fit(algorithm, None, data(turned), **options)
    run = fit(algorithm, None, data(turned), retrain=True, **options)
    first, last = 2, search.selected.step
    if turned:
        first, last = (int(n) for n in search.rule.split(" of steps ")[1].split(" (")[0].split(" to "))
    seen: list[dict[str, Tensor]] = []
    loop(
        network(),
        union(turned),
        last,
        seen=lambda step, now: seen.append({k: v.detach().clone() for k, v in now.state_dict().items()}),
    )
    assert_close(run.model, {k: torch.stack([w[k] for w in seen[first - 1 :]]).mean(0) for k in seen[0]})
    assert f"(the search: {search.rule})" in run.rule


@pytest.mark.parametrize("warm", ["head:5", 5, 0.6])  # 40 examples are 8 batches
def test_the_warm_start_is_repeated(warm: Any) -> None:
    run = fit("erm", warm_start=warm, retrain=True, select="last")
    by_hand = network()
    if warm == "head:5":
        probed(by_hand, 5, union())
    else:
        erm(by_hand, union(), 5, slots=1)
    erm(by_hand, union(), 12)
    assert_close(run.model, by_hand)
    assert [p.step for p in run.warm_up] == [5]


def test_stages_record_and_logs(tmp_path: Path) -> None:
    seen: list[str] = []

    class Stages(Callback):
        def on_step(self, state: State) -> None:
            seen.append(state.stage)

    options: dict[str, Any] = {"warm_start": 2, "steps": 6, "folder": tmp_path, "callbacks": [Stages()]}
    run = fit("fish", retrain=True, track_every=2, **options)
    wanted = {"warm start": 2, "train": 6, "retrain warm start": 2, "retrain": run.selected.step}
    assert Counter(seen) == wanted
    assert [a["step"] for a in run.agreement] == [0, 2, 4]
    record = RunRecord.from_dict(json.loads((tmp_path / "record.json").read_text()))
    assert list(record.history[:-1]) == [p.to_dict() for p in run.history]
    scores = record.history[record.selected]["scores"]
    assert set(scores) == {"train", "test"}  # no held-out validation is left
    assert scores["train"]["sizes"] == [30, 30]
    rule = "retrained with the validation data, last step (the search: best on validation)"
    assert record.rule == run.rule == rule
    folders = [tmp_path, *(tmp_path / "stages" / n for n in ("warm-start", "retrain-warm-start", "retrain"))]
    logs = [json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1]) for folder in folders]
    assert [line["phase"] for line in logs] == ["train", "warm start", "retrain warm start", "retrain"]
    loaded = shoal.load(tmp_path, model=network())
    torch.testing.assert_close(loaded.model.state_dict(), run.model.state_dict(), rtol=0, atol=0)


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
