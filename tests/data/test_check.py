"""Wrong data are found, and the message says what, where, and what would be right."""

from typing import Any

import numpy as np
import pytest
import torch

from shoal.data import Domains, TensorData
from shoal.data.batch import as_examples
from shoal.data.check import check_examples, check_outputs
from shoal.errors import InputError

DOMAINS = Domains.from_indices({"a": [0, 1, 2], "b": [3, 4]})  # example 5 is in no domain
NAN, INF = float("nan"), float("inf")


def data(y: Any = (0, 1, 2, 0, 1, 2), *values: tuple[int, float]) -> TensorData:
    x = torch.zeros(6, 2)
    for index, value in values:
        x[index, 1] = value
    return TensorData(x, torch.tensor(y))


@pytest.mark.parametrize(
    ("examples", "classes", "message"),
    [
        (data([0] * 6, (4, NAN)), 3, "example 1 of domain 'b' .example 4 of all. has a feature"),
        (data([0] * 6, (1, -INF)), 3, "example 1 of domain 'a' has a feature that is not finite"),
        (data([1, 2, 3, 1, 2, 3]), 3, r"labels range from 1 to 3; with classes=3 .* 0 to 2: subtract 1"),
        (data(), 2, r"example 2 of domain 'a' .*labels range from 0 to 2; .*0 to 1"),
        (data([0, 1, 2, 0, -1, 2]), 3, "example 1 of domain 'b' .example 4 of all.*from -1 to 2;"),
        (data([0.0, 1.0, 2.0, 0.0, 1.0, 2.0]), 3, r"labels are torch.float32.*y.long\(\)"),
        (data([[0], [1], [2], [0], [1], [2]]), 3, r"labels have shape \(6, 1\).*squeeze"),
        (data([0.0, 1.0, 2.0, NAN, 1.0, 2.0]), None, "example 3 of all. has a target"),
    ],
)
def test_tensors_refused(examples: TensorData, classes: int | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_examples(examples, DOMAINS, classes)


def test_good_tensors_pass() -> None:
    check_examples(data([0.5] * 6), DOMAINS, None)
    check_examples(TensorData(torch.zeros(6), torch.zeros(6, dtype=torch.uint8)), DOMAINS, 300)
    check_examples(data([0, 1, 2, 0, 1, -1], (5, NAN)), DOMAINS, 3)  # in no domain


ZERO = torch.zeros(2)


@pytest.mark.parametrize(
    ("item", "classes", "message"),
    [
        (({"f": [torch.tensor([INF])]}, 0), 2, "example 0 of domain 'b' .example 3 of all. has a feature"),
        ((np.array([NAN]), 0), 2, "example 0 of domain 'b' .example 3 of all. has a feature"),
        ((ZERO, 2), 2, "example 0 of domain 'b'.*from 2 to 2; with classes=2 .* from 0 to 1"),
        ((ZERO, 0.5), 2, "labels are torch.float64"),
        ((ZERO, NAN), None, "target that is not finite"),
        ((ZERO, 0, 0), 2, "must be a pair.*3 parts"),
        ((ZERO, 0, -1.0), 2, "example 3 of all. has a weight that is not at least 0"),
        (ZERO, 2, "must be a pair"),
    ],
)
def test_other_datasets_are_sampled(item: Any, classes: int | None, message: str) -> None:
    good = (ZERO, 1 if classes else 0.5)
    items = [good, good, good, item, good, good]
    with pytest.raises(InputError, match=message):
        check_examples(as_examples(items), DOMAINS, classes)
    check_examples(as_examples(items), DOMAINS, classes, sample=1)


def test_outputs() -> None:
    y = torch.zeros(8)
    check_outputs(torch.zeros(8, 3), y, 3)
    check_outputs(torch.zeros(8, 2), y, None)  # a mean and a variance: the user's loss knows
    check_outputs({"logits": torch.zeros(8, 3)}, y, 3)
    for shape, target, classes, kind, message in (
        ((8, 3), y, 4, "", r"\(8, 3\).*with classes=4 it must be \(8, 4\)"),
        ((8,), y, 2, "", "one logit for each class"),
        ((4, 3), y, 3, "", "must be the batch, 8"),
        ((8, 1), y, None, "", r"8×8 pairs: .squeeze\(1\) the output"),
        ((8,), y[:, None], None, "", r"8×8 pairs: .squeeze\(1\) the targets"),
        ((8, 3), torch.zeros(8, 2), None, "multilabel", "one logit for each label"),
    ):
        with pytest.raises(InputError, match=message):
            check_outputs(torch.zeros(shape), target, classes, kind)
