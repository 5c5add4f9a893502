"""Wrong data are found, and the message says what, where, and what would be right."""

from typing import Any

import numpy as np
import pytest
import torch

from shoal.data import Domains, TensorData, check
from shoal.data.check import check_examples, check_outputs
from shoal.errors import InputError

DOMAINS = Domains.from_indices({"a": [0, 1, 2], "b": [3, 4]})  # example 5 is in no domain


def data(x: Any = None, y: Any = None) -> TensorData:
    return TensorData(
        torch.zeros(6, 2) if x is None else x, torch.tensor([0, 1, 2, 0, 1, 2] if y is None else y)
    )


def with_value(index: int, value: float) -> torch.Tensor:
    x = torch.zeros(6, 2)
    x[index, 1] = value
    return x


@pytest.fixture(params=[2**24, 4], ids=["whole", "chunks"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "CHUNK", request.param)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize(
    ("examples", "classes", "message"),
    [
        (
            data(x=with_value(4, float("nan"))),
            3,
            "example 1 of domain 'b' .example 4 of all. has a feature that is nan",
        ),
        (data(x=with_value(1, float("-inf"))), 3, "example 1 of domain 'a' has a feature that is -inf"),
        (
            data(y=[1, 2, 3, 1, 2, 3]),
            3,
            r"labels range from 1 to 3; with classes=3 they must range from 0 to 2: subtract 1",
        ),
        (data(), 2, r"labels range from 0 to 2; .*0 to 1; set classes=3\? .*example 2 of domain 'a'"),
        (data(y=[0, 1, 2, 0, -1, 2]), 3, "from -1 to 2; .*example 1 of domain 'b' .example 4 of all"),
        (data(y=[0, 1, -(2**63), 0, 1, 1]), 3, "what NaN becomes as an integer.*example 2 of domain 'a'"),
        (data(y=[0.0, 1.0, 2.0, 0.0, 1.0, 2.0]), 3, r"labels are float32.*y.long\(\)"),
        (data(y=[[0], [1], [2], [0], [1], [2]]), 3, r"labels have shape \(6, 1\).*squeeze"),
        (data(), None, r"targets are int64.*y.float\(\)"),
        (
            data(y=[0.0, 1.0, 2.0, float("nan"), 1.0, 2.0]),
            None,
            "example 0 of domain 'b' .example 3 of all. has a target that is nan",
        ),
    ],
)
def test_tensors_refused(examples: TensorData, classes: int | None, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        check_examples(examples, DOMAINS, classes)
    assert str(caught.value).count("\n") <= 1


@pytest.mark.usefixtures("chunk")
def test_good_tensors_pass() -> None:
    check_examples(data(), DOMAINS, 3)
    check_examples(data(x=torch.zeros(6, 2, dtype=torch.uint8)), DOMAINS, 3)
    check_examples(data(y=[0.5] * 6), DOMAINS, None)
    check_examples(TensorData(torch.zeros(6), torch.zeros(6, dtype=torch.uint8)), DOMAINS, 300)


@pytest.mark.usefixtures("chunk")
def test_examples_in_no_domain_do_not_count() -> None:
    check_examples(data(x=with_value(5, float("nan")), y=[0, 1, 2, 0, 1, -1]), DOMAINS, 3)


def test_indices_beyond_the_dataset() -> None:
    with pytest.raises(InputError, match="'b' has example 9, but the dataset has 6 examples"):
        check_examples(data(), Domains.from_indices({"a": [0], "b": [9]}), 3)


@pytest.mark.parametrize(
    ("item", "classes", "message"),
    [
        (({"f": [torch.tensor([float("inf")])]}, 0), 2, "example 3 of domain 'b' has a feature"),
        ((np.array([np.nan]), 0), 2, "example 3 of domain 'b' has a feature"),
        ((torch.zeros(2), 2), 2, "label 2; with classes=2 labels must range from 0 to 1"),
        ((torch.zeros(2), 0.5), 2, "label 0.5; .*integer"),
        ((torch.zeros(2), float("nan")), None, "target that is not finite"),
        ((torch.zeros(2), 0, 0), 2, "3 parts"),
        (torch.zeros(2), 2, "Tensor; an item"),
    ],
)
def test_other_datasets_are_sampled(item: Any, classes: int | None, message: str) -> None:
    good = (torch.zeros(2), 1 if classes else 0.5)
    items = [good, good, good, item, good, good]
    with pytest.raises(InputError, match=message):
        check_examples(items, DOMAINS, classes)  # type: ignore[arg-type]
    check_examples(items, DOMAINS, classes, sample=1)  # type: ignore[arg-type]


def test_outputs() -> None:
    y = torch.zeros(8)
    check_outputs(torch.zeros(8, 3), y, 3)
    check_outputs(torch.zeros(8), y, None)
    check_outputs(torch.zeros(8, 1), y[:, None], None)
    check_outputs(torch.zeros(8, 2), y, None)  # a mean and a variance: the user's loss knows
    check_outputs({"logits": torch.zeros(8, 3)}, y, 3)
    for output, target, classes, message in (
        (torch.zeros(8, 3), y, 4, r"\(8, 3\); with classes=4 it must be \(8, 4\)"),
        (torch.zeros(8), y, 2, "one logit for each class"),
        (torch.zeros(4, 3), y, 3, "for 8 examples"),
        (torch.zeros(8, 1), y, None, r"8×8. Make the shapes equal: .squeeze\(1\) the output"),
        (torch.zeros(8), y[:, None], None, r"8×8. Make the shapes equal: .squeeze\(1\) the targets"),
    ):
        with pytest.raises(InputError, match=message):
            check_outputs(output, target, classes)
