"""Meta-batches are the sampler's plan, whatever reads them."""

import multiprocessing
import random
import subprocess
import threading
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from shoal.data import (
    DomainBatchSampler,
    DomainData,
    Domains,
    Examples,
    InMemory,
    MetaBatchLoader,
    TensorData,
    concatenate,
    from_dataset,
)
from shoal.data import loader as loader_module
from shoal.data.batch import batch_of, evaluation_view, known_labels
from shoal.data.loader import to_device
from shoal.errors import InputError

LABELS = np.arange(40) % 4


class Items(Dataset):
    """x is the index and random numbers, as a random transform would add them."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], int]:
        if index == 39:
            raise OSError("truncated image")
        noise = torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()])
        return {"index": torch.tensor(index), "noise": noise}, index % 4


def sampler(**more: Any) -> DomainBatchSampler:
    return DomainBatchSampler(LABELS, 4, 3, seed=5, **more)


def readable(**more: Any) -> DomainBatchSampler:
    return DomainBatchSampler(LABELS[:39], 4, 3, seed=5, **more)


@pytest.mark.parametrize("kind", ["domains", "regrouped"])
def test_tensors_are_gathered_as_planned(kind: str) -> None:
    data = TensorData(torch.arange(40.0)[:, None], torch.arange(40))
    plans = sampler(draw=kind)
    loader = MetaBatchLoader(data, plans, start=3, stop=9)
    assert len(loader) == 6
    for step, batches in enumerate(loader, start=3):
        assert [b.domain for b in batches] == [d for d, _ in plans.plan(step)]
        for batch, (_, indices) in zip(batches, plans.plan(step), strict=True):
            assert batch.y.tolist() == indices.tolist() == batch.x[:, 0].tolist()


def test_any_number_of_workers_gives_the_same_batches() -> None:
    def run(workers: int) -> list[Any]:
        loader = MetaBatchLoader(Items(), readable(), workers=workers, start=2, stop=6)
        first, again = ([[(b.x, b.y, b.domain) for b in step] for step in loader] for _ in range(2))
        assert str(first) == str(again)
        return first

    alone = run(0)
    assert str(alone) == str(run(2))
    assert len(alone) == 4
    for step, batches in enumerate(alone, start=2):
        for (x, y, domain, *_), (d, indices) in zip(batches, readable().plan(step), strict=True):
            assert x["index"].tolist() == indices.tolist()
            assert domain == d
            assert set(y.tolist()) == {d}
    noise = torch.cat([x["noise"].reshape(-1) for batches in alone for x, *_ in batches])
    assert len(noise.unique()) == len(noise)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("processes", [2, 3])
def test_shares_make_up_the_batch(processes: int, workers: int) -> None:
    """To the random numbers of each example, whichever process draws them."""
    common: dict[str, Any] = {"workers": workers, "start": 1, "stop": 3}
    whole = list(MetaBatchLoader(Items(), readable(), **common))
    shares = [
        list(MetaBatchLoader(Items(), readable(), **common, share=(n, processes))) for n in range(processes)
    ]
    for step, batches in enumerate(whole):
        for slot, batch in enumerate(batches):
            for n, share in enumerate(shares):
                part = share[step][slot]
                assert part.domain == batch.domain
                assert torch.equal(part.y, batch.y[n::processes])
                for key in ("index", "noise"):
                    assert torch.equal(part.x[key], batch.x[key][n::processes])


def test_shares_of_tensors_make_up_the_batch() -> None:
    data = TensorData(torch.arange(40.0)[:, None], torch.arange(40))
    whole = list(MetaBatchLoader(data, sampler(), stop=2))
    for n in range(3):
        part = list(MetaBatchLoader(data, sampler(), stop=2, share=(n, 3)))
        for batches, others in zip(whole, part, strict=True):
            for a, b in zip(batches, others, strict=True):
                assert torch.equal(a.x[n::3], b.x)
                assert torch.equal(a.y[n::3], b.y)


def test_the_users_random_numbers_are_left_alone() -> None:
    loader = iter(MetaBatchLoader(Items(), readable(), stop=3))
    next(loader)  # a DataLoader takes one number from torch when its iteration starts
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    next(loader)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])
    assert before[2] == random.getstate()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failing_example_is_named(workers: int) -> None:
    with pytest.raises(RuntimeError, match="example 39: OSError: truncated image"):
        list(MetaBatchLoader(Items(), sampler(), workers=workers, stop=10))


class Batched(Items):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(torch.tensor(index), 0) for index in indices]


def test_collate_and_batched_datasets() -> None:
    def stack(items: list[Any]) -> Any:
        return torch.stack([x for x, _ in items]) * 10, torch.tensor([y for _, y in items])

    (batch, *_), *_ = MetaBatchLoader(Batched(), readable(), collate=stack, stop=1)
    assert batch.x.tolist() == (readable().plan(0)[0][1] * 10).tolist()


def test_refused() -> None:
    data = TensorData(torch.zeros(40, 1), torch.zeros(40))
    with pytest.raises(InputError, match="start=3, stop=2"):
        MetaBatchLoader(data, sampler(), start=3, stop=2)
    with pytest.raises(InputError, match="workers=-1"):
        MetaBatchLoader(data, sampler(), workers=-1, stop=2)
    with pytest.raises(InputError, match="__getitem__"):
        MetaBatchLoader(iter([]), sampler(), stop=2)  # type: ignore[arg-type]
    three = TensorDataset(*[torch.zeros(40)] * 2, torch.arange(40))
    with pytest.raises(InputError, match=r"pair .*3 parts"):
        list(MetaBatchLoader(three, sampler(), stop=1))


class Pair(NamedTuple):
    a: Any
    b: Any


def test_nests_move() -> None:
    nest = {"a": [torch.zeros(1), (torch.ones(2), "text")], "b": Pair(torch.zeros(1), None)}
    moved = to_device(nest, "meta")
    assert moved["a"][0].device.type == moved["a"][1][0].device.type == moved["b"].a.device.type == "meta"
    assert moved["a"][1][1] == "text"
    assert isinstance(moved["b"], Pair)
    assert to_device(nest, None) is nest


# concatenate


def test_arrays_and_tensors_become_one_tensor_set() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 3)).astype(np.float32)
    data, domains = concatenate(
        {
            "a": (x[:2], np.array([0, 1])),
            "b": TensorData(torch.tensor(x[2:4]), torch.tensor([1, 1])),
            "c": TensorDataset(torch.tensor(x[4:]), torch.tensor([0])),
        }
    )
    assert isinstance(data, TensorData)
    assert np.array_equal(data.x.numpy(), x)
    assert data.y.tolist() == [0, 1, 1, 1, 0]
    assert isinstance(domains, Domains)
    assert domains.names == ("a", "b", "c")
    assert domains.indices_of(1).tolist() == [2, 3]


def test_other_datasets_are_chained() -> None:
    data, domains = concatenate({"a": (torch.zeros(2, 3), torch.zeros(2)), "b": Items()})
    assert domains.sizes.tolist() == [2, 40]
    assert data[5][1] == 3


@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        ({"a": (np.zeros((2, 3)), [0, 1]), "b": (np.zeros((2, 4)), [0, 1])}, r"x .*\(3,\).*'a'.*\(4,\).*'b'"),
        (
            {"a": (np.zeros((2, 3)), [0, 1]), "b": (np.zeros((2, 3)), [0.0, 1.0])},
            "y .*int64.*'a'.*float32.*'b'",
        ),
        ({"a": (np.zeros((2, 3)), [0])}, "'a': x has 2 examples and y has 1"),
        ({"a": (np.zeros((0, 3)), np.zeros(0))}, "'a' has no examples"),
        ({"a": (1, 2, 3, 4)}, "'a' has 4 parts"),
        ({"a": (np.array(["x"]), [0])}, "'a'"),
        ({}, "no datasets"),
    ],
)
def test_concatenate_refuses(datasets: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        concatenate(datasets)


class Frame(Dataset):
    """Columns and methods called as Shoal's own: as Hugging Face's `batch`, or a column as an attribute."""

    batch, evaluation, device, unguarded, problem, collate = [0], [1], "device", None, "none", "by hand"
    labels = y = [7] * 40

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(index)]), index % 4


def test_attributes_of_a_dataset_mean_nothing() -> None:
    """What a dataset can do is declared by its class, not concluded from names that it happens to have."""
    data = Frame()
    assert evaluation_view(data) is data
    assert known_labels(data) is None
    assert known_labels(ConcatDataset([data, data])) is None
    x, y = batch_of(data, [3, 9])
    assert (x[:, 0].tolist(), y.tolist()) == ([3, 9], [3, 1])
    for batches in MetaBatchLoader(data, sampler(), stop=2):
        assert all(b.x[:, 0].long().remainder(4).tolist() == b.y.tolist() for b in batches)
    domains = Domains.from_labels(LABELS)
    whole = DomainData(data, {"train": domains}, 4, (1,), "linear")
    assert whole.split_as({"train": domains}, {}).examples is data
    part = from_dataset(data, LABELS, held_out=3, classes=4)
    assert part.examples[5][1] == 1


def test_declared_abilities_are_used() -> None:
    class Halves(InMemory):
        device = torch.device("cpu")

        def __len__(self) -> int:
            return 40

        def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return indices / 2, indices % 4

        def evaluation(self) -> Examples:
            return TensorData(torch.zeros(40), torch.zeros(40))

    data = Halves()
    assert batch_of(data, [3])[0].tolist() == [1.5]
    assert isinstance(evaluation_view(data), TensorData)
    for batches in MetaBatchLoader(data, sampler(), stop=1):
        assert all((b.x * 2).long().remainder(4).tolist() == b.y.tolist() for b in batches)
    known = known_labels(ConcatDataset([data, TensorData(torch.zeros(2), torch.tensor([1, 0]))]))
    assert known is not None
    assert known.tolist() == [-1] * 40 + [1, 0]


@pytest.mark.skipif(multiprocessing.get_start_method() != "fork", reason="workers are not forked")
def test_a_signal_to_workers_that_are_still_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    """They live: one that ends before it has said how it takes signals would end the training."""
    init = loader_module._leave_signals_to_parent

    def slowly(worker: int) -> None:
        time.sleep(1.0)
        init(worker)

    monkeypatch.setattr(loader_module, "_leave_signals_to_parent", slowly)
    examples = [(torch.tensor([float(i)]), i % 2) for i in range(8)]
    sampler = DomainBatchSampler(["a"] * 4 + ["b"] * 4, 2, 2, steps=2)
    loader = MetaBatchLoader(examples, sampler, workers=2, stop=2)

    def to_all() -> None:
        workers = [str(child.pid) for child in multiprocessing.active_children()]
        subprocess.run(["kill", "-TERM", *workers], check=True)  # one from the parent would end them

    sent = threading.Timer(0.4, to_all)
    sent.start()
    try:
        assert len(list(loader)) == 2
    finally:
        sent.join()
        loader.close()
