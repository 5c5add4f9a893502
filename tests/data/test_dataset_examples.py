"""Datasets of every form that people have: each trains as what its labels are, or one line says why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

import shoal
import shoal.models
from shoal.data import from_dataset
from shoal.data.examples import READ
from shoal.errors import InputError

COUNT = 60
X = np.random.default_rng(0).normal(size=(COUNT, 4)).astype(np.float32)
T = torch.from_numpy(X)
Y = (X[:, 0] > 0).astype(np.int64)
Z = X[:, 1] * 3
WORDS = np.array(["no", "yes"])[Y]


class Given(Dataset[Any]):
    """Examples as they are listed, with whatever attributes are asked for."""

    def __init__(self, items: list[Any], **attributes: Any) -> None:
        self.items = items
        self.reads = 0
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
    "python ints": lambda: pairs(T, Y.tolist()),
    "numpy integers": lambda: pairs(T, Y),
    "integer tensors": lambda: pairs(T, torch.from_numpy(Y)),
    "uint8 tensors": lambda: pairs(T, torch.from_numpy(Y).to(torch.uint8)),
    "tensors of one element": lambda: pairs(T, torch.from_numpy(Y)[:, None]),
    "arrays of one element": lambda: pairs(T, Y[:, None]),
    "booleans": lambda: pairs(T, (Y == 1).tolist()),
    "boolean tensors": lambda: pairs(T, torch.from_numpy(Y == 1)),
    "text": lambda: pairs(T, WORDS.tolist()),
    "numpy text": lambda: pairs(T, WORDS),
    "numpy x": lambda: pairs(X, Y.tolist()),
    "float64 x": lambda: pairs(X.astype(np.float64), Y.tolist()),
    "lists as x": lambda: pairs(X.tolist(), Y.tolist()),
    "a list of tuples": lambda: list(zip(T, Y.tolist(), strict=True)),
    "a list of dicts": lambda: [{"x": x, "y": y} for x, y in zip(T, Y.tolist(), strict=True)],
    "dicts of x and y": lambda: each(lambda n: {"x": X[n], "y": int(Y[n])}),
    "dicts of image and label": lambda: each(lambda n: {"image": T[n], "label": WORDS[n]}),
    "dicts with an id": lambda: each(lambda n: {"id": f"p{n}", "features": X[n], "target": Y[n]}),
    "triples": lambda: each(lambda n: (T[n], int(Y[n]), {"site": "a"})),
    "TensorDataset": lambda: TensorDataset(T, torch.from_numpy(Y)),
    "TensorDataset of three": lambda: TensorDataset(T, torch.from_numpy(Y), torch.zeros(COUNT)),
    "Subset": lambda: Subset(TensorDataset(T, torch.from_numpy(Y)), range(COUNT)),
    "ConcatDataset": lambda: ConcatDataset(
        [
            Subset(TensorDataset(T, torch.from_numpy(Y)), range(20)),
            Subset(pairs(T, Y.tolist()), range(20, COUNT)),
        ]
    ),
    "targets": lambda: pairs(T, Y.tolist(), targets=Y.tolist()),
    "classes and targets": lambda: pairs(T, Y.tolist(), classes=["no", "yes"], targets=Y.tolist()),
    "a column called batch": lambda: pairs(T, Y.tolist(), batch=np.arange(COUNT)),
    "a method called batch": lambda: pairs(T, Y.tolist(), batch=lambda size: None),
    "targets that are not what comes out": lambda: pairs(T, Y.tolist(), targets=(Y + 5).tolist()),
}
NAMED = {
    **{"booleans": ("False", "True"), "boolean tensors": ("False", "True"), "text": ("no", "yes")},
    **{"numpy text": ("no", "yes"), "dicts of image and label": ("no", "yes")},
    "classes and targets": ("no", "yes"),
}
UNUSED = ("triples", "dicts with an id", "TensorDataset of three")
QUANTITIES: dict[str, Callable[[], Any]] = {
    "python floats": lambda: pairs(T, Z.tolist()),
    "numpy floats": lambda: pairs(X, Z.astype(np.float64)),
    "floating tensors": lambda: pairs(T, torch.from_numpy(Z)),
    "dicts": lambda: each(lambda n: {"x": X[n], "y": float(Z[n])}),
    "TensorDataset": lambda: TensorDataset(T, torch.from_numpy(Z)),
}
SITES = ["a", "b", "c"] * 20


def fitted(data: Any, model: nn.Module | None = None, **options: Any) -> shoal.Fit:
    if model is None:
        model = shoal.models.build(data.model, input_shape=data.input_shape, classes=data.classes, seed=0)
    return shoal.fit("erm", model, data, steps=3, progress=False, device="cpu", **options)


def halves(dataset: Any) -> tuple[Any, Any]:
    if isinstance(dataset, list):
        return dataset[:30], dataset[30:]
    return Subset(dataset, range(30)), Subset(dataset, range(30, COUNT))


@pytest.mark.filterwarnings("ignore:not used")
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
        run = fitted(data)
        assert run.scores().metric == "accuracy"
        assert run.accuracy("c") == run.score("c") == run.score()
        assert bool(data.notes.get("example")) == (name in UNUSED)

    @pytest.mark.parametrize("name", CLASSES)
    def test_classes_by_domain(self, name: str) -> None:
        one, other = halves(CLASSES[name]())
        run = fitted({"a": one, "b": one}, nn.Linear(4, 2), test={"c": other})
        assert run.scores().metric == "accuracy"
        right = (run.model(T[30:]).argmax(1) == torch.from_numpy(Y[30:])).float().mean()
        assert run.accuracy("c") == pytest.approx(float(right))

    @pytest.mark.parametrize("name", QUANTITIES)
    def test_quantities(self, name: str) -> None:
        data = from_dataset(QUANTITIES[name](), SITES, held_out="c")
        assert data.classes is None
        run = fitted(data)
        assert run.scores().metric == "mse"
        one, other = halves(QUANTITIES[name]())
        head = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
        run = fitted({"a": one, "b": one}, head, test={"c": other})
        assert run.score("c") == pytest.approx(
            float((head(T[30:]).detach() - torch.from_numpy(Z[30:])).square().mean())
        )

    def test_a_method_of_its_own_puts_batches_together(self) -> None:
        """A dataset that follows the loader's protocol is taken as it is."""

        class Own(Given):
            def collate(self, items: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
                return torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])

        dataset = Own([(T[n], int(Y[n])) for n in range(COUNT)], targets=Y.tolist())
        data = from_dataset(dataset, SITES, held_out="c")
        assert data.examples is dataset
        assert data.classes == 2
        fitted(data)

    def test_arrays_with_text_labels(self) -> None:
        run = fitted({"a": (X, WORDS), "b": (T, WORDS.tolist())}, nn.Linear(4, 2), test={"c": (X, WORDS)})
        assert run.scores().metric == "accuracy"

    def test_hugging_face(self) -> None:
        hub = pytest.importorskip("datasets")
        kinds = hub.Features(
            {
                "x": hub.Sequence(hub.Value("float32")),
                "label": hub.ClassLabel(names=["no", "yes"]),
                "batch": hub.Value("int64"),
            }
        )
        rows = hub.Dataset.from_dict(
            {"x": X.tolist(), "label": Y.tolist(), "batch": [0] * COUNT}, features=kinds
        )
        data = from_dataset(rows.remove_columns("batch"), SITES, held_out="c")
        assert (data.classes, data.class_names, data.input_shape) == (2, ("no", "yes"), (4,))
        fitted(data)
        both = from_dataset(rows, SITES, held_out="c")
        assert set(both.examples[0][0]) == {"x", "batch"}
        with pytest.raises(InputError, match=r"cannot take two training examples \(dict of 'x', 'batch'\)"):
            fitted(both, nn.Linear(4, 2))
        with pytest.raises(InputError, match=r"there is no default model for examples of shape \(\)"):
            fitted(both)
        with pytest.raises(InputError, match="by its index"):
            from_dataset(rows.to_iterable_dataset(), SITES)

    def test_a_task_is_what_it_is_said_to_be(self) -> None:
        whole = pairs(T, Y.astype(np.float32).tolist())
        assert from_dataset(whole, SITES, task="classification").classes == 2
        assert from_dataset(whole, SITES, task="regression").classes is None
        counts = from_dataset(pairs(T, Y.tolist()), SITES, task="regression", held_out="c")
        assert fitted(counts).scores().metric == "mse"
        assert counts.examples[0][1].dtype == torch.float32
        head = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
        run = fitted({"a": (T, Y), "b": (T, Y)}, head, test={"c": (T, Y)}, task="regression")
        assert run.scores().metric == "mse"
        own = fitted({"a": (T, Y.astype(np.float32)), "b": whole}, head, loss=nn.functional.mse_loss)
        assert own.scores("train").metric == "mse"

    def test_names_of_classes(self) -> None:
        data = from_dataset(pairs(T, WORDS), SITES, classes=["yes", "no", "maybe"])
        assert (data.classes, data.class_names) == (3, ("yes", "no", "maybe"))
        assert [int(data.examples[n][1]) for n in range(5)] == [1 - int(y) for y in Y[:5]]

    def test_listed_labels_spare_the_examples(self) -> None:
        dataset = Given([(T[0], n % 7) for n in range(3 * READ)], targets=[n % 7 for n in range(3 * READ)])
        assert from_dataset(dataset, ["a", "b", "c"] * READ).classes == 7
        assert dataset.reads < 40

    def test_a_random_transform_leaves_random_numbers_alone(self) -> None:
        class Noisy(Given):
            def __getitem__(self, index: int) -> Any:
                return torch.randn(4), index % 2

        torch.manual_seed(1)
        wanted = torch.rand(1)
        torch.manual_seed(1)
        from_dataset(Noisy([0] * COUNT), SITES)
        assert torch.rand(1) == wanted


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(T[0], 1)])


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a stream": (Stream, "is a Stream; a dataset that gives any example by its index"),
    "whole floats": (lambda: pairs(T, Y.astype(float)), "set task='classification' or task='regression'"),
    "whole floating tensors": (
        lambda: TensorDataset(T, torch.from_numpy(Y).float()),
        r"only integer values \(0, 1\)",
    ),
    "no label": (lambda: each(lambda n: {"x": T[n], "kind": 1}), "'x', 'kind': none of label, labels"),
    "two labels": (lambda: each(lambda n: {"x": T[n], "y": 1, "label": 1}), "several of label, labels"),
    "x alone": (lambda: TensorDataset(T), r"example 0 of the dataset is 1 part; .* pair \(x, y\)"),
    "a tensor": (lambda: each(lambda n: T[n]), r"is a Tensor; an example must be a pair \(x, y\)"),
    "two inputs": (lambda: each(lambda n: (T[n], T[n], 1)), r"\(\(a, b\), y\)"),
    "text as x": (lambda: each(lambda n: ("words", 1)), "has text as its input; tokenize"),
    "text in a dict": (lambda: each(lambda n: {"text": "words", "label": 1}), "'text' is text: tokenize"),
    "an image": (
        lambda: each(lambda n: (picture(), 1)),
        "has a Pillow image as its input; convert it to a tensor",
    ),
    "no label's value": (
        lambda: pairs(T, [None] * COUNT),
        "has the label None; it must be ",
    ),
    "a NaN label": (lambda: pairs(T, [float("nan")] * COUNT), "a label that is not finite"),
    "labels of two kinds": (lambda: each(lambda n: (T[n], n % 2 or "no")), "some .* are text and others"),
    "x of several lengths": (
        lambda: each(lambda n: (torch.zeros(1 + n % 3), 1)),
        r"example 1 of the dataset is \(2,\) float32 and the first is \(1,\)",
    ),
    "an error inside": (lambda: Broken(), "cannot be read: KeyError"),
    "many text labels": (
        lambda: Given([(T[0], "ab"[n % 2]) for n in range(READ + 1)]),
        r"name the classes in their order \(classes=\[…\]\)",
    ),
    "many labels": (lambda: Given([(T[0], n % 2) for n in range(READ + 1)]), "say it: classes=N"),
    "nothing": (lambda: Given([]), "the dataset has no examples"),
}


class Broken(Given):
    def __init__(self) -> None:
        super().__init__([0] * COUNT)

    def __getitem__(self, index: int) -> Any:
        raise KeyError("column")


def picture() -> Any:
    return pytest.importorskip("PIL.Image").new("RGB", (8, 8))


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str) -> None:
    make, says = WRONG[name]
    with pytest.raises(InputError, match=says):
        from_dataset(make(), SITES)


def test_labels_beyond_the_model_are_named_before_training() -> None:
    labels = Y.tolist()
    labels[41] = 5
    for dataset in (
        pairs(T, labels),
        TensorDataset(T, torch.tensor(labels)),
        list(zip(T, labels, strict=True)),
    ):
        with pytest.raises(InputError, match=r"example 41 of domain 'a' .*labels range from 0 to 5"):
            fitted({"a": dataset, "b": dataset}, nn.Linear(4, 2))
    with pytest.raises(InputError, match=r"labels range from 0 to 5; with classes=3"):
        fitted(from_dataset(pairs(T, labels), ["a"] * COUNT, classes=3))
    labels[41] = -1
    with pytest.raises(InputError, match="labels range from -1 to 1"):
        fitted({"a": pairs(T, labels), "b": pairs(T, labels)}, nn.Linear(4, 2))


def test_a_label_that_no_look_found() -> None:
    dataset = Given([(T[0], n % 2) for n in range(5000)])
    dataset.items[1234] = (T[0], 7)
    data = from_dataset(dataset, ["a", "b"] * 2500, classes=2)
    with pytest.raises(InputError, match=r"example 1234 of the dataset has the label 7; .* below 2"):
        data.examples[1234]


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        (pairs(T, Y.tolist()), pairs(T, Z.tolist()), "whole numbers in domain 'train: a' and floating in"),
        (pairs(T, Y.tolist()), pairs(T, WORDS), "labels are text in domain 'train: b' and whole numbers in"),
        (pairs(T, Y), pairs(T[:, :3], Y), r"is \(4,\) float32 in domain 'train: a' but \(3,\) float32"),
        (pairs(T, Y), pairs(T.double(), Y), r"float32 in domain 'train: a' but \(4,\) float64"),
        (pairs(T, Y), each(lambda n: {"a": T[n], "b": T[n], "y": 1}), r"but a: \(4,\) float32, b: \(4,\)"),
        (pairs(T, Y), Stream(), "domain 'train: b' is a Stream"),
        ((T, Y), (T, Y, Y, Y), "domain 'train: b' has 4 parts"),
        ((T, Y), (T, Y, Y + 1), "domain 'train: a' has no sample weights"),
        ((T, Y), (T, Y[:3]), "x has 60 examples and y has 3"),
    ],
)
def test_domains_that_are_not_alike(one: Any, other: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        fitted({"a": one, "b": other}, nn.Linear(4, 2))


def test_what_is_not_used_is_said() -> None:
    with pytest.warns(UserWarning, match=r"not used: what an example has beyond \(x, y\)"):
        from_dataset(CLASSES["triples"](), SITES)
    one, other = halves(CLASSES["dicts with an id"]())
    with pytest.warns(UserWarning, match="not used: 'id' of the examples"):
        fitted({"a": one, "b": other}, nn.Linear(4, 2))


def test_a_model_is_needed() -> None:
    for model in (None, "tabular"):
        with pytest.raises(InputError, match="model must be "):
            shoal.fit("erm", model, {"a": (T, Y)}, steps=1)  # type: ignore[arg-type]


def test_one_output_is_no_classification() -> None:
    head = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    with pytest.raises(InputError, match="labels are whole numbers, which are classes"):
        fitted({"a": pairs(T, Y.tolist()), "b": (T, Y)}, head)
    with pytest.raises(InputError, match=r"output has shape \(2, 2\) and the floating targets \(2,\)"):
        fitted({"a": pairs(T, Z.tolist())}, nn.Linear(4, 2))
