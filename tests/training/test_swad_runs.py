"""SWAD in whole trainings: what it warns of, what the record says, which weights count without a start."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.data import DomainData, Domains, TensorData
from shoal.training.loop import Training
from shoal.training.options import Options
from shoal.training.stopping import Diverged

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(40, 3, generator=GENERATOR)
Y = (X[:, 0] > 0).long()
PARTS = {"a": (X[:20], Y[:20]), "b": (X[20:], Y[20:])}
TURNED = {"turned": (X, 1 - Y)}
"""Validation whose loss rises from the first step on."""


def fit(**options: Any) -> tuple[shoal.Fit, list[str], dict[int, Tensor]]:
    """The run, what it warned of, and the first layer's weights after every step."""
    torch.manual_seed(0)
    model, seen = nn.Linear(3, 2), dict[int, Tensor]()

    def follow(step: int, note: str) -> None:
        seen[step] = model.weight.detach().double().clone()

    given: dict[str, Any] = {
        "validation": PARTS,
        "steps": 20,
        "batch_size": 8,
        "log_every": 1,
        "device": "cpu",
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        run = shoal.fit("erm", model, PARTS, progress=follow, **{**given, **options})
    return run, [str(w.message) for w in caught if issubclass(w.category, UserWarning)], seen


@pytest.mark.parametrize(("steps", "every"), [(20, 5), (20, 20), (8, 1), (161, 20)])
def test_too_few_evaluations_are_warned_of_at_the_beginning(steps: int, every: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"average": "swad", "validation": TURNED, "steps": steps, "eval_every": every}
    run, messages, _ = fit(folder=tmp_path / "run", **options)
    count = -(-steps // every)
    if count >= 9:
        assert messages == []
        assert "average" not in run.record["notes"]
        return
    assert messages[0].startswith(
        f"average='swad' has {count} evaluation{'s' * (count > 1)} (steps={steps}, eval_every={every}). "
        "It needs 3 to find a start and 9 to find an end"
    )
    assert messages[0].endswith(f"Set eval_every={max(1, steps // 50)}.")
    assert messages[0][:-1] in run.record["notes"]["average"]
    kept = json.loads((tmp_path / "run" / "record.json").read_text())
    assert kept["notes"]["average"] == run.record["notes"]["average"]


@pytest.mark.parametrize("average", ["swad", "swad-paper"])
def test_without_a_start_the_weights_are_those_of_the_rule_and_the_record_says_so(average: str) -> None:
    run, messages, seen = fit(average=average, eval_every=2)
    steps = range(19, 21) if average == "swad" else range(1, 21)
    assert run.rule == f"last step, {average} of steps {steps[0]} to 20 ({average} found no start)"
    mean = torch.stack([seen[step] for step in steps]).mean(0)
    torch.testing.assert_close(run.model.weight.detach().double(), mean, rtol=1e-5, atol=1e-6)
    [message] = messages
    assert f"{average} found no start in 10 evaluations" in message
    assert f"the mean over steps {steps[0]} to 20, " in message
    assert run.record["notes"] == {"average": message[:-1]}


def test_a_start_is_no_reason_to_warn() -> None:
    run, messages, _ = fit(average="swad", eval_every=1, validation=TURNED, lr=0.1)
    assert messages == []
    assert "average" not in run.record["notes"]
    assert run.rule.startswith("last step, swad of steps ")
    assert run.last.step < 20


def test_the_ratio_moves_the_end() -> None:
    ends = []
    for ratio in (1.01, None, 3.0):
        options = {} if ratio is None else {"average_ratio": ratio}
        run, _, _ = fit(average="swad-paper", eval_every=1, validation=TURNED, steps=60, lr=0.1, **options)
        ends.append(run.last.step)
    assert ends[0] < ends[1] < ends[2] <= 60


def test_a_training_that_diverges_after_the_start_does_not_call_its_weights_averaged() -> None:
    seen = 0

    def loss(output: Tensor, y: Tensor) -> Tensor:
        nonlocal seen
        seen += output.requires_grad
        return nn.functional.cross_entropy(output, y) * (float("nan") if seen > 16 else 1.0)

    splits = {"train": Domains.from_indices({"a": range(20), "b": range(20, 40)})}
    splits["validation"] = Domains.from_indices({"turned": range(40, 80)})
    examples = TensorData(torch.cat([X, X]), torch.cat([Y, 1 - Y]))
    data = DomainData(examples, splits, classes=2, input_shape=(3,), model="mlp")
    options = Options(20, 8, average="swad", eval_every=1, lr=0.01, loss=loss, progress=False, device="cpu")
    training = Training("erm", nn.Linear(3, 2), data, options)
    with pytest.raises(Diverged):
        training.run()
    assert training.average is not None
    assert training.average.started
    assert training.selected[1] == "best on validation"
