"""Meta-batches are the sampler's plan, whatever reads them."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from shoal.data import (
    DomainBatchSampler,
    MetaBatch,
    MetaBatchLoader,
    TensorData,
)
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


@pytest.mark.parametrize("draw", ["domains", "regrouped", "one-domain", "pooled", "balanced"])
@pytest.mark.parametrize("share", [(0, 1), (1, 3)])
def test_tensors_are_gathered_as_planned(draw: Any, share: tuple[int, int]) -> None:
    data = TensorData(torch.arange(40.0)[:, None], torch.arange(40), torch.ones(40))
    plans = sampler(draw=draw)
    loader = MetaBatchLoader(data, plans, start=60, stop=70, share=share)  # past a block of plans
    assert len(loader) == len(list(loader)) == 10
    for step, batch in enumerate(loader, start=60):
        numbers, rows = zip(*plans.plan(step), strict=True)
        parts = [each[share[0] :: share[1]] for each in rows]
        assert batch.sizes == tuple(map(len, parts))
        assert batch.y.tolist() == batch.x[:, 0].tolist() == np.concatenate(parts).tolist()
        assert batch.ids.tolist() == [n if d is None else d for n, d in enumerate(numbers)]
        for block, part, domain in zip(batch.split(), parts, batch.ids, strict=True):
            assert block.y.tolist() == part.tolist()
            assert block.sizes == (len(part),)
            assert {*block.domain.tolist()} == {int(domain)}
            assert block.weight is not None


def test_any_number_of_workers_gives_the_same_batches() -> None:
    def run(workers: int) -> list[MetaBatch]:
        loader = MetaBatchLoader(Items(), readable(), workers=workers, start=2, stop=6)
        first, again = list(loader), list(loader)
        loader.close()
        assert str(first) == str(again)
        return first

    alone = run(0)
    assert str(alone) == str(run(2))
    assert len(alone) == 4
    for step, batch in enumerate(alone, start=2):
        numbers, rows = zip(*readable().plan(step), strict=True)
        assert batch.x["index"].tolist() == np.concatenate(rows).tolist()
        assert batch.ids.tolist() == list(numbers)
        assert batch.y.tolist() == batch.domain.tolist()
    noise = torch.cat([batch.x["noise"].reshape(-1) for batch in alone])
    assert len(noise.unique()) == len(noise)


@pytest.mark.parametrize("workers", [0, 1])
def test_shares_make_up_the_batch(workers: int) -> None:
    """To the random numbers of each example, whichever process draws them."""
    common: dict[str, Any] = {"workers": workers, "start": 1, "stop": 3}
    whole = list(MetaBatchLoader(Items(), readable(), **common))
    for n in range(3):
        parts = list(MetaBatchLoader(Items(), readable(), **common, share=(n, 3)))
        for batch, part in zip(whole, parts, strict=True):
            for block, own in zip(batch.split(), part.split(), strict=True):
                pairs = [(own.y, block.y), (own.domain, block.domain)]
                pairs += [(own.x[name], block.x[name]) for name in ("index", "noise")]
                assert all(torch.equal(a, b[n::3]) for a, b in pairs)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failing_example_is_named(workers: int) -> None:
    with pytest.raises(InputError, match=r"^example 39 of the dataset cannot be read: OSError: trunc"):
        list(MetaBatchLoader(Items(), sampler(), workers=workers, stop=10))


def test_refused() -> None:
    data = TensorData(torch.zeros(40, 1), torch.zeros(40))
    with pytest.raises(InputError, match="start=3, stop=2"):
        MetaBatchLoader(data, sampler(), start=3, stop=2)
    three = TensorDataset(*[torch.zeros(40)] * 2, torch.arange(40))
    for workers in (0, 1):  # an error in a worker reads as any other
        with pytest.raises(InputError, match=r"^an item of the dataset must be a pair .*3 parts"):
            list(MetaBatchLoader(three, sampler(), workers=workers, stop=1))
