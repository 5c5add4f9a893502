"""The sampler's promises, for any number of domains, batches and sizes."""

from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import DomainBatchSampler, Domains, WithDomain
from shoal.data.sampler import key, permute
from shoal.errors import InputError

DRAWS = ["domains", "one-domain", "pooled", "balanced", "regrouped"]


@st.composite
def samplers(draw: st.DrawFn, kind: str = "domains", sizes_up_to: int = 80) -> DomainBatchSampler:
    sizes = draw(st.lists(st.integers(1, sizes_up_to), min_size=1, max_size=40))
    domains = Domains.from_sizes({f"d{i}": n for i, n in enumerate(sizes)})
    slots = draw(st.integers(1, len(sizes)))
    batch, seed = draw(st.integers(1, 12)), draw(st.integers(-5, 2**70))
    return DomainBatchSampler(domains, batch, slots, draw=kind, seed=seed)  # type: ignore[arg-type]


def again(sampler: DomainBatchSampler, size: int | None = None, **changes: Any) -> DomainBatchSampler:
    """Another sampler of the same domains and seed."""
    common = {"seed": sampler.seed, "draw": sampler.draw}
    size = size or sampler.batch_size
    return DomainBatchSampler(sampler.domains, size, sampler.domains_per_step, **(common | changes))


def examples(plan: list) -> list[int]:
    return sorted(i for _, indices in plan for i in indices.tolist())


def check_passes(drawn: list[int], own: list[int]) -> None:
    """Every example is used once before any is used again."""
    for start in range(0, len(drawn), len(own)):
        one_pass = drawn[start : start + len(own)]
        assert len(set(one_pass)) == len(one_pass)
        assert set(one_pass) <= set(own)


# The permutation


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_permutation_is_one_to_one(n: int, seed: int) -> None:
    assert np.array_equal(np.sort(permute(key(seed), n, np.arange(n))), np.arange(n))


# The draws

KNOWN = {
    "domains": ([158, 164, 154, 176], 11818),
    "one-domain": ([1, 2, 0, 1], 3749),
    "pooled": ([165, 58, 46, 91], 23500),
    "balanced": ([7, 1, 47, 62], 21125),
    "regrouped": ([164, 154, 24, 1], 13971),
    "by size": ([15, 14, 36, 7], 14753),
}


@pytest.mark.parametrize("draw", KNOWN)
def test_draws_are_those_of_earlier_versions(draw: str) -> None:
    labels = np.repeat(np.arange(5), [3, 40, 7, 100, 33])
    options = {"by_size": True} if draw == "by size" else {"draw": draw}
    sampler = DomainBatchSampler(labels, 4, 3, seed=11, **options)  # type: ignore[arg-type]
    _, indices = sampler.plans(10**6, 10**6 + 2)
    place = np.arange(1, 25).reshape(2, 3, 4)
    assert (indices[0, 0].tolist(), int((indices * place).sum())) == KNOWN[draw]


@settings(max_examples=40, deadline=None)
@given(samplers())
def test_domains_are_drawn_equally_often_and_distinct_in_a_step(sampler: DomainBatchSampler) -> None:
    count, slots = len(sampler.domains), sampler.domains_per_step
    drawn: Counter[int | None] = Counter()
    for step in range(2 * count):
        numbers = [d for d, _ in sampler.plan(step)]
        assert len(set(numbers)) == slots
        drawn.update(numbers)
        assert max(drawn.values()) - min(drawn.get(d, 0) for d in range(count)) <= 1
    assert set(drawn.values()) == {2 * slots}


@settings(max_examples=40, deadline=None)
@given(samplers(sizes_up_to=25), st.sampled_from(["domains", "one-domain", "balanced"]))
def test_every_example_once_per_pass_of_its_domain(sampler: DomainBatchSampler, draw: str) -> None:
    sampler = again(sampler, draw=draw)
    drawn = [i for k in range(3 * len(sampler.domains)) for _, batch in sampler.plan(k) for i in batch]
    origin = np.searchsorted(sampler.domains.offsets, drawn, side="right") - 1
    for d in range(len(sampler.domains)):
        check_passes(np.array(drawn)[origin == d].tolist(), sampler.domains.indices_of(d).tolist())
    if draw == "balanced":  # each domain once in as many examples
        count = len(sampler.domains)
        for block in origin[: len(origin) // count * count].reshape(-1, count):
            assert sorted(block.tolist()) == list(range(count))


@pytest.mark.parametrize("kind", DRAWS)
def test_order_depends_on_seed_and_step_only(kind: Any) -> None:
    one, two, other = (DomainBatchSampler(np.arange(500) % 5, 8, 3, draw=kind, seed=s) for s in (3, 3, 4))
    _, several = one.plans(10**9 - 2, 10**9 + 3)
    for step in (17, 2, 10**9):
        assert str(one.plan(step)) == str(two.plan(step))
        assert str(one.plan(step)) != str(other.plan(step))
    assert np.array_equal(np.stack([i for _, i in one.plan(10**9)]), several[2])


@settings(max_examples=30, deadline=None)
@given(samplers(), st.integers(0, 30), st.booleans(), st.data())
def test_resuming_at_any_batch(
    sampler: DomainBatchSampler, step: int, mixed: bool, data: st.DataObject
) -> None:
    sampler = again(sampler, mixed=mixed, steps=7)
    slots = sampler.batches_per_step
    straight = [batch for _ in range(6) for batch in sampler]
    assert len(sampler) == 7 * slots
    assert list(chain(*straight)) == [i for k in range(42) for _, b in sampler.plan(k) for i in b.tolist()]
    drawn = step * slots + data.draw(st.integers(0, slots - 1))
    sampler.set_step(*divmod(drawn, slots))
    end = (step // 7 + 1) * 7 * slots
    assert list(sampler) == straight[drawn:end]
    assert next(iter(sampler)) == straight[end : end + 1][0] if end < len(straight) else True


# Parts of batches


@settings(max_examples=40, deadline=None)
@given(samplers(), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_processes_split_each_batch(
    sampler: DomainBatchSampler, processes: int, pieces: int, mixed: bool
) -> None:
    """At the same place all processes have equally many examples of the same domains: together, the batch."""
    size = sampler.batch_size * processes * pieces
    whole = again(sampler, size, steps=3, mixed=mixed)
    shares = []
    for i in range(processes):
        part = again(sampler, size, steps=3, mixed=mixed)
        part.split(share=(i, processes), pieces=pieces)
        shares.append(list(part))
        assert len(part) == len(shares[-1]) == 3 * whole.batches_per_step * pieces
    for place, batch in enumerate(whole):
        parts = [part for share in shares for part in share[place * pieces : (place + 1) * pieces]]
        assert Counter(chain(*parts)) == Counter(batch)
        origins = [np.searchsorted(sampler.domains.offsets, sorted(p), side="right").tolist() for p in parts]
        assert all(origin == origins[0] for origin in origins)


# Items with their domain

PATIENTS = [(float(i), i % 2) for i in range(5)]
SITES = ["oslo", "lima", "oslo", "lima", "rome"]


def test_items_with_their_domain() -> None:
    data = WithDomain(PATIENTS, SITES)
    assert data.domains.names == ("lima", "oslo", "rome")
    assert [data[i] for i in range(len(data))] == [(*PATIENTS[i], d) for i, d in enumerate([1, 0, 1, 0, 2])]
    as_mappings = WithDomain([{"x": x, "y": y} for x, y in PATIENTS], SITES)
    assert as_mappings[4] == {"x": 4.0, "y": 0, "domain": 2}


@pytest.mark.parametrize(
    ("dataset", "domains", "message"),
    [
        (PATIENTS, ["a", "b"], "domains hold 2 entries and the dataset 5 examples"),
        (PATIENTS, Domains.from_indices({"a": [0, 1, 2, 3], "b": [3]}), "must be in one domain"),
        (PATIENTS, Domains.from_indices({"a": [0, 1, 2, 3], "b": [5]}), "must be in one domain"),
        (float("inf"), ["a"], "float has no __getitem__ and __len__"),
    ],
)
def test_items_with_wrong_domains_are_refused(dataset: Any, domains: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        WithDomain(dataset, domains)
    with pytest.raises(InputError, match=r"item 0 of the dataset is a str; it must be a tuple"):
        WithDomain(["text"], [0])[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 2.5}, r"batch_size .* must be "),
        ({"domains_per_step": 4}, "domains_per_step=4 but there are 3 domains"),
        ({"draw": "balanced", "by_size": True}, 'by_size=True and draw="balanced"'),
        ({"share": (0, 3)}, "batch_size=2 cannot be cut into 3 equal parts .* a multiple of 3"),
        ({"share": (0, 2), "pieces": 2}, r"4 equal parts \(2 processes, pieces=2\)"),
        ({"share": (2, 2)}, r"share=\(2, 2\); it must be \(process, processes\), counted from 0"),
    ],
)
def test_refused_at_construction(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        DomainBatchSampler([0, 1, 2], **{"batch_size": 2, **arguments})
