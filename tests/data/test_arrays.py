"""Arrays and datasets of every form: each trains as what its labels are, or one line says why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

import shoal
import shoal.models
from shoal.data import TensorData, from_arrays, from_dataset
from shoal.errors import InputError

COUNT = 60
X = np.random.default_rng(0).normal(size=(COUNT, 4)).astype(np.float32)
T = torch.from_numpy(X)
Y = (X[:, 0] > 0).astype(np.int64)
Z = X[:, 1] * 3
WORDS = np.array(["no", "yes"])[Y]
SITES = ["a", "b", "c"] * 20


class Given(Dataset[Any]):
    """Examples as they are listed, with whatever attributes are asked for."""

    def __init__(self, items: list[Any], **attributes: Any) -> None:
        self.items, self.reads = items, 0
        for name, value in attributes.items():
            setattr(self, name, value)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.items[index]


def each(make: Callable[[int], Any], **attributes: Any) -> Given:
    return Given([make(n) for n in range(COUNT)], **attributes)


def pairs(x: Any, y: Any, **attributes: Any) -> Given:
    return each(lambda n: (x[n], y[n]), **attributes)


CLASSES: dict[str, Callable[[], Any]] = {
    "numpy integers": lambda: pairs(X.astype(np.float64), Y),
    "text": lambda: pairs(T, WORDS.tolist()),
    "a list of dicts": lambda: [{"x": x, "y": y} for x, y in zip(T, Y.tolist(), strict=True)],
    "dicts": lambda: each(lambda n: {"image": X[n], "label": WORDS[n]}),
    "classes and targets": lambda: pairs(T, Y.tolist(), classes=["no", "yes"], targets=Y.tolist()),
}
NAMED = dict.fromkeys(("text", "dicts", "classes and targets"), ("no", "yes"))


def fitted(data: Any, model: nn.Module | None = None, **options: Any) -> shoal.Fit:
    if model is None:
        model = shoal.models.build(data.model, input_shape=data.input_shape, classes=data.classes, seed=0)
    return shoal.fit("erm", model, data, steps=3, progress=False, device="cpu", **options)


def halves(dataset: Any) -> tuple[Any, Any]:
    if isinstance(dataset, list):
        return dataset[:30], dataset[30:]
    return Subset(dataset, range(30)), Subset(dataset, range(30, COUNT))


class TestWhatWorks:
    @pytest.mark.parametrize("name", CLASSES)
    def test_classes(self, name: str) -> None:
        data = from_dataset(CLASSES[name](), SITES, held_out="c")
        assert (data.classes, data.input_shape, data.model) == (2, (4,), "tabular")
        assert data.class_names == NAMED.get(name, ())
        assert [int(data.examples[n][1]) for n in range(COUNT)] == Y.tolist()
        x, y = data.examples[7]
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
        torch.testing.assert_close(x, T[7])
        one, other = halves(CLASSES[name]())
        run = fitted({"a": one, "b": one}, nn.Linear(4, 2), test={"c": other})
        right = (run.model(T[30:]).argmax(1) == torch.from_numpy(Y[30:])).float().mean()
        assert run.accuracy("c") == run.score() == pytest.approx(float(right))

    def test_arrays(self) -> None:
        run = fitted({"a": (X, WORDS), "b": (T, WORDS.tolist())}, nn.Linear(4, 2), test={"c": (X, WORDS)})
        assert run.scores().metric == "accuracy"
        for x, y in ((X, np.array([3 + 4 * y for y in Y])), (T.double(), torch.tensor(3 + 4 * Y))):
            data = from_arrays(x, y, np.array(SITES), held_out="c")
            assert (data.class_names, data.classes, data.splits["test"].names) == (("3", "7"), 2, ("c",))
            assert data.examples[:][1].tolist() == Y.tolist()  # type: ignore[misc]
        assert from_arrays(X, Z, SITES).classes is None
        images = from_arrays(np.zeros((12, 3, 16, 16), np.uint8), ["x", "y"] * 6, [0, 0, 1] * 4)
        assert (images.model, images.input_shape, [*images.splits]) == (
            "small-cnn",
            (3, 16, 16),
            ["train", "validation"],
        )

    def test_the_task_can_be_set(self) -> None:
        whole = pairs(T, Y.astype(np.float32).tolist())
        assert from_dataset(whole, SITES, task="classification").classes == 2
        assert from_dataset(whole, SITES, task="regression").classes is None
        data = from_dataset(pairs(T, WORDS), SITES, classes=["yes", "no", "maybe"])
        assert (data.classes, data.class_names) == (3, ("yes", "no", "maybe"))
        assert [int(data.examples[n][1]) for n in range(5)] == [1 - int(y) for y in Y[:5]]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(T[0], 1)])


def picture() -> Any:
    return pytest.importorskip("PIL.Image").new("RGB", (8, 8))


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a stream": (Stream, "is a Stream; .*__getitem__"),
    "whole floats": (lambda: pairs(T, Y.astype(float)), "set task='classification' or task='regression'"),
    "no label": (lambda: each(lambda n: {"x": T[n], "kind": 1}), "'x', 'kind'; .* one of label, labels"),
    "x alone": (lambda: TensorDataset(T), r"example 0 of the dataset is .* pair \(x, y\)"),
    "a weight": (lambda: each(lambda n: (T[n], 1, 0.5)), "a sample weight goes into a dict"),
    "two inputs": (lambda: each(lambda n: (T[n], T[n], 1)), r"\(\(a, b\), y\)"),
    "text in a dict": (
        lambda: each(lambda n: {"x": T[n], "id": "p1", "label": 1}),
        "'id' of .* tokenize text",
    ),
    "an image": (lambda: each(lambda n: (picture(), 1)), "has a Image as an input; .*ToTensor"),
    "no label's value": (lambda: pairs(T, [None] * COUNT), "has the label None; it must be "),
    "a NaN label": (
        lambda: pairs(T, [1.5] * 6 + [float("nan")] * 60),
        r"example \d+ of the dataset has the label nan; .* finite",
    ),
    "labels of two kinds": (lambda: each(lambda n: (T[n], n % 2 or "no")), "some .* are text and others"),
    "one class": (lambda: pairs(T, ["no"] * COUNT), "the label is 'no' in every example"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str) -> None:
    make, says = WRONG[name]
    with pytest.raises(InputError, match=says):
        from_dataset(make(), SITES)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"x": np.array([["a"]] * COUNT)}, "x has an array of <U1"),
        ({"x": X[:, 0]}, r"shape \(60,\)"),
        ({"y": np.zeros(COUNT, int)}, "'0' in every example"),
        ({"y": [None, *Y[1:]]}, "example 0 of y has the label None"),
        ({"domains": SITES[1:]}, "60 examples and 59 domains"),
        ({"y": np.arange(COUNT)}, "60 different whole numbers; set task="),
    ],
)
def test_wrong_arrays(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        from_arrays(**{"x": X, "y": Y, "domains": SITES, **change})


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        (
            pairs(T, Y.tolist()),
            pairs(T, Z.tolist()),
            "whole numbers as labels and domain .* floating-point numbers as",
        ),
        (pairs(T, Y), pairs(T[:, :3], Y), r"x \(4,\) float32.* x \(3,\) float32"),
        ((T, Y), (T, Y, Y, Y), "domain 'train: b' has 4 parts"),
        ((T, Y, Y + 1), (T, Y, X[:, 0]), "domain 'b' .* has a weight that is not"),
        ((T, Y, Y + 1), (T, Y, 0 * Y), "every weight of domain 'b' is 0"),
        (({"a": T, "b": T}, Y), ({"a": T, "b": T[1:]}, Y), "x has 59 examples and y has 60"),
        (TensorData(T, torch.from_numpy(Y)), (T, np.where(Y, np.inf, Z)), "example .* finite number"),
    ],
)
def test_domains_that_are_not_alike(one: Any, other: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        fitted({"a": one, "b": other}, nn.Linear(4, 2))
