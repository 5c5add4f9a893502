"""``retrain=True``: a search for the number of steps, then a training on training and validation examples."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.data import DomainData
from shoal.errors import InputError
from shoal.experiments.record import RunRecord
from shoal.training.averaging import interpolate
from shoal.training.callbacks import PHASES, Callback, State
from shoal.training.retraining import with_validation
from shoal.training.stopping import Diverged
from training.finetuning import assert_close, data, erm, fish, fit, frozen, network, union
from training.test_averaging import exponential
from training.test_resume import captured

pytestmark = pytest.mark.filterwarnings("ignore:wise_ft interpolates", "ignore:average='swad", "ignore:swad")


def followed(loop: Any, given: DomainData, steps: int) -> list[dict[str, Tensor]]:
    """The weights after each step of a loop by hand on all examples."""
    seen = []

    def look(step: int, now: nn.Module) -> None:
        seen.append({k: v.detach().clone() for k, v in now.state_dict().items()})

    loop(network(), given, steps, seen=look)
    return seen


LOOPS = pytest.mark.parametrize(("algorithm", "loop"), [("erm", erm), ("fish", fish)])


@LOOPS
@pytest.mark.parametrize("turned", [False, True])
def test_as_a_run_on_all_examples(algorithm: str, loop: Any, turned: bool) -> None:
    given = data(turned)
    search = fit(algorithm, None, given)
    run = fit(algorithm, None, given, retrain=True)
    steps = search.selected.step
    assert steps < 12 or not turned
    by_hand = network()
    loop(by_hand, union(turned), steps)
    assert_close(run.model, by_hand)
    assert run.selected.step == steps
    assert run.history == search.history
    x, y = given.examples.batch(torch.arange(60, 90))  # type: ignore[attr-defined]
    assert run.accuracy("test") == pytest.approx(float((by_hand(x).argmax(1) == y).double().mean()))


def test_what_the_record_says(tmp_path: Path) -> None:
    search = fit("fish", folder=tmp_path / "search")
    run = fit("fish", folder=tmp_path / "run", retrain=True)
    record = RunRecord.from_dict(json.loads((tmp_path / "run" / "record.json").read_text()))
    assert record.config.retrain is True
    assert list(record.history[:-1]) == [p.to_dict() for p in search.history]
    assert record.selected == len(search.history)
    assert set(record.scores) == {"train", "test"}  # no held-out validation is left
    assert (
        record.rule
        == run.rule
        == "retrained with the validation data, last step (the search: best on validation)"
    )
    assert len(record.curve("validation")[0]) == len(search.history)
    assert record.scores["train"]["sizes"] == [30, 30]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [k for k, _ in itertools.groupby(line["phase"] for line in lines)] == ["train", "retrain"]
    loaded = shoal.load(tmp_path / "run", model=network())
    torch.testing.assert_close(loaded.model.state_dict(), run.model.state_dict(), rtol=0, atol=0)
    assert "retrain | True" in (tmp_path / "run" / "card.md").read_text()
    assert "retrain |" not in (tmp_path / "search" / "card.md").read_text()
    with pytest.raises(InputError, match="unknown split 'validation'"):
        run.scores("validation")


def test_the_warm_start_is_repeated() -> None:
    """From the initial weights, for as many steps as it had, whatever share of the data they were."""
    for warm in ("head:5", 5, 0.6):  # 40 examples are 8 batches
        run = fit("erm", warm_start=warm, retrain=True, select="last")
        by_hand = network()
        if warm == "head:5":
            with frozen(by_hand, by_hand.head):
                erm(by_hand, union(), 5, by_hand.head.parameters(), slots=1)
        else:
            erm(by_hand, union(), 5, slots=1)
        erm(by_hand, union(), 12)
        assert_close(run.model, by_hand)
        assert [p.step for p in run.warm_up] == [5]


@LOOPS
@pytest.mark.parametrize("average", ["sma", "ema:0.8", "swad"])
def test_averages(algorithm: str, loop: Any, average: str) -> None:
    """Of the retraining: sma from the same start on, after swad over the steps that it found."""
    options: dict[str, Any] = {"average": average, "eval_every": 1, "steps": 20}
    turned = average == "swad"
    search = fit(algorithm, None, data(turned), **options)
    run = fit(algorithm, None, data(turned), retrain=True, **options)
    first, last = 2, search.selected.step
    if turned:
        first, last = (int(word) for word in search.rule.split(" of steps ")[1].split(" (")[0].split(" to "))
    seen = followed(loop, union(turned), last)
    if average == "ema:0.8":
        mean = exponential([list(w.values()) for w in seen], 0.8)
        wanted = dict(zip(seen[0], mean, strict=True))
    else:
        wanted = {k: torch.stack([w[k] for w in seen[first - 1 :]]).mean(0) for k in seen[0]}
    assert_close(run.model, wanted)
    assert f"(the search: {search.rule})" in run.rule


def test_interpolated_by_the_alpha_of_the_search() -> None:
    given = data(turned=True)
    options: dict[str, Any] = {"wise_ft": "validation", "select": "last"}
    search, run = fit("erm", None, given, **options), fit("erm", None, given, retrain=True, **options)
    alpha = search.record["interpolation"]["alpha"]
    assert alpha < 1
    assert run.record["interpolation"] == search.record["interpolation"]
    end = fit("erm", None, given, retrain=True, select="last").model.state_dict()
    assert_close(run.model, interpolate(network().state_dict(), end, alpha))


class Counts(Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []
        self.last: list[str] = []

    def on_step(self, state: State) -> None:
        self.seen.append(state.phase)

    def on_end(self, state: State) -> None:
        self.last += [state.phase] if state.last else []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Any) -> None:
        self.seen = list(state["seen"])


def test_phases() -> None:
    counts = Counts()
    run = fit("fish", warm_start=2, retrain=True, callbacks=[counts], track_every=2, steps=6)
    wanted = {"warm start": 2, "train": 6, "retrain warm start": 2, "retrain": run.selected.step}
    assert {k: len(list(v)) for k, v in itertools.groupby(counts.seen)} == wanted
    assert tuple(wanted) == PHASES
    assert counts.last == ["retrain"]
    assert [a["step"] for a in run.agreement] == [0, 2, 4]


def test_a_schedule_is_not_scaled() -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)

    given = data(turned=True)
    run = fit("erm", None, given, retrain=True, schedule=schedule)
    assert run.selected.step < 12
    whole = fit("erm", None, with_validation(given), steps=run.selected.step, schedule=schedule)
    assert_close(run.model, whole.model)


def test_captured_is_as_eager() -> None:
    options: dict[str, Any] = {"warm_start": "head:20", "steps": 20, "eval_every": 10}
    whole = fit("fish", retrain=True, **options)
    with captured():
        run = fit("fish", retrain=True, **options)
    assert run.captured
    assert_close(run.model, whole.model)


def test_features_of_a_plain_network() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()

    run = fit("coral", model(), retrain=True)
    whole = fit("coral", model(), with_validation(data()), steps=run.selected.step)
    assert_close(run.model, whole.model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in run.model.modules())


class TestUnion:
    def test_domains_keep_their_names_and_order(self) -> None:
        found = with_validation(data())
        assert found.splits["train"].names == ("a", "b")
        assert [found.splits["train"].indices_of(d).tolist() for d in (0, 1)] == [
            [*range(30)],
            [*range(30, 60)],
        ]
        assert set(found.splits) == {"train", "test"}

    def test_only_of_training_domains(self) -> None:
        """Validation examples of other domains are not trained on."""
        x, y = torch.randn(8, 4).double(), torch.arange(8) % 2
        run = fit("erm", retrain=True, given=None)
        assert run.selected.scores["train"].sizes == (30, 30)
        part = {"a": (x, y), "b": (x, y)}
        found = shoal.fit(
            "erm", network(), part, validation={"b": (x, y), "c": (x, y)}, test={"d": (x, y)}, retrain=True,
            steps=2, progress=False, device="cpu",
        )  # fmt: skip
        assert found.selected.scores["train"].sizes == (8, 16)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no validation": ({"validation": None}, r"retrain=True .*require validation data"),
    "other domains": ({}, r"retrain=True needs validation examples of the training domains"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    x, y = torch.randn(8, 4).double(), torch.arange(8) % 2
    usual: dict[str, Any] = {"validation": {"v": (x, y)}, "retrain": True, "steps": 2}
    with pytest.raises(InputError, match=message):
        shoal.fit("erm", network(), {"a": (x, y)}, progress=False, **usual | options)


def test_a_retraining_that_diverges(tmp_path: Path) -> None:
    """The record of `shoal train` keeps what the search found."""
    calls = itertools.count()

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, y) * (math.nan if len(calls_seen) > 12 else 1)

    calls_seen: list[int] = []

    class Count(Callback):
        def on_step(self, state: State) -> None:
            calls_seen.append(next(calls))

    with pytest.raises(Diverged, match=r"retraining: the loss .*step 2"):
        fit("erm", loss=loss, retrain=True, callbacks=[Count()])
