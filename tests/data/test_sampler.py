"""The sampler's promises, for any number of domains, batches and sizes."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from shoal.data import DomainBatchSampler, Domains, WithDomain
from shoal.data.sampler import SMALL, key, permute
from shoal.errors import InputError


@st.composite
def samplers(draw: st.DrawFn, kind: str = "domains", sizes_up_to: int = 80) -> DomainBatchSampler:
    sizes = draw(st.lists(st.integers(1, sizes_up_to), min_size=1, max_size=40))
    domains = Domains.from_sizes({f"d{i}": n for i, n in enumerate(sizes)})
    slots = draw(st.integers(1, len(sizes)))
    batch, seed = draw(st.integers(1, 12)), draw(st.integers(-5, 2**70))
    return DomainBatchSampler(domains, batch, slots, draw=kind, seed=seed)  # type: ignore[arg-type]


def examples(plan: list) -> list[int]:
    return sorted(i for _, indices in plan for i in indices.tolist())


# The permutation


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_permutation_is_one_to_one(n: int, seed: int) -> None:
    assert np.array_equal(np.sort(permute(key(seed), n, np.arange(n))), np.arange(n))


def test_permutation_at_one_position_at_a_time_and_of_many_sizes_at_once() -> None:
    sizes = np.array([1, 2, SMALL, SMALL + 1, 1000])
    keys, positions = key(3, np.arange(5)), np.array([0, 1, 7, 30, 999])
    together = permute(keys, sizes, positions)
    alone = [int(permute(keys[[i]], int(n), positions[[i]])[0]) for i, n in enumerate(sizes)]
    assert together.tolist() == alone
    huge = permute(key(1), 10**15, np.arange(10**15 - 1000, 10**15))
    assert len(set(huge.tolist())) == 1000
    assert huge.max() < 10**15


@pytest.mark.parametrize("n", [2, 3, 5])
def test_all_orders_of_few_are_equally_likely(n: int) -> None:
    orders = permute(key(7, np.arange(24_000))[:, None], n, np.arange(n))
    counts = np.array(list(Counter(map(tuple, orders.tolist())).values()))
    assert chi_square_z(counts, int(np.prod(np.arange(1, n + 1)))) < 4


@pytest.mark.parametrize("n", [SMALL, SMALL + 1, 49, 200])
@pytest.mark.parametrize("pair", [(0, 1), (0, 6), (5, 11)])
def test_pairs_of_positions_are_uniform_and_independent(n: int, pair: tuple[int, int]) -> None:
    """That is what fails first when the mixing is weak: with 6 rounds these deviate by 10 sigma."""
    values = permute(key(8, np.arange(100_000))[:, None], n, np.array(pair))
    counts = np.bincount(values[:, 0] * n + values[:, 1], minlength=n * n)
    assert counts[:: n + 1].sum() == 0
    assert chi_square_z(counts[~np.eye(n, dtype=bool).ravel()], n * (n - 1)) < 4


def chi_square_z(counts: np.ndarray, cells: int) -> float:
    """How many sigma from uniform: Wilson and Hilferty's cube root, normal even for two cells."""
    expected = counts.sum() / cells
    chi_square = ((counts - expected) ** 2 / expected).sum() + (cells - len(counts)) * expected
    spread = 2 / (9 * (cells - 1))
    return float(abs((chi_square / (cells - 1)) ** (1 / 3) - (1 - spread)) / np.sqrt(spread))


def test_other_keys_give_other_orders() -> None:
    orders = {
        tuple(permute(key(*parts), 50, np.arange(50))) for parts in [(0,), (1,), (0, 0), (0, 1), (1, 0)]
    }
    assert len(orders) == 5
    assert key(-1)[0] == key(2**64 - 1)[0]


# The draws


@settings(max_examples=50, deadline=None)
@given(samplers())
def test_domains_are_dealt_once_a_pass_and_distinct_in_a_step(sampler: DomainBatchSampler) -> None:
    count, slots = len(sampler.domains), sampler.domains_per_step
    dealt = []
    for step in range(2 * count):  # 2·S passes
        numbers = [d for d, _ in sampler.plan(step)]
        assert len(set(numbers)) == slots
        dealt += numbers
        assert max(Counter(dealt).values()) - min(Counter(dealt).get(d, 0) for d in range(count)) <= 1
    assert set(Counter(dealt).values()) == {2 * slots}


@settings(max_examples=50, deadline=None)
@given(samplers(sizes_up_to=25), st.sampled_from(["domains", "one-domain"]))
def test_every_example_once_a_pass_of_its_domain(sampler: DomainBatchSampler, draw: str) -> None:
    slots, size = sampler.domains_per_step, sampler.batch_size
    sampler = DomainBatchSampler(sampler.domains, size, slots, draw=draw, seed=sampler.seed)  # type: ignore[arg-type]
    met: dict[int, list[int]] = {}
    for step in range(3 * len(sampler.domains)):
        visited: dict[int, list[int]] = {}
        for d, indices in sampler.plan(step):
            assert d is not None
            visited.setdefault(d, []).extend(indices.tolist())
        for d, drawn in visited.items():
            met.setdefault(d, []).extend(drawn)
    for d, drawn in met.items():
        own = sampler.domains.indices_of(d).tolist()
        for start in range(0, len(drawn), len(own)):
            one_pass = drawn[start : start + len(own)]
            assert len(set(one_pass)) == len(one_pass)
            assert set(one_pass) <= set(own)


def test_each_pass_of_a_domain_has_its_own_order() -> None:
    sampler = DomainBatchSampler(np.arange(100) % 2, 10, 1)
    drawn = np.concatenate([b for step in range(40) for d, b in sampler.plan(step) if d == 0]).reshape(-1, 50)
    assert len({tuple(one_pass) for one_pass in drawn.tolist()}) == len(drawn) == 4


def test_one_domain_gives_all_batches_of_a_step() -> None:
    sampler = DomainBatchSampler(np.arange(60) % 6, 2, 4, draw="one-domain")
    numbers = [[d for d, _ in sampler.plan(step)] for step in range(12)]
    assert all(len(set(n)) == 1 and len(n) == 4 for n in numbers)
    assert Counter(n[0] for n in numbers) == dict.fromkeys(range(6), 2)


@settings(max_examples=30, deadline=None)
@given(samplers())
def test_regrouped_has_the_examples_of_domains(sampler: DomainBatchSampler) -> None:
    same = {"seed": sampler.seed, "steps": 1}
    other = DomainBatchSampler(
        sampler.domains, sampler.batch_size, sampler.domains_per_step, draw="regrouped", **same
    )
    for step in range(8):
        assert examples(other.plan(step)) == examples(sampler.plan(step))
        assert all(d is None for d, _ in other.plan(step))


def test_regrouped_mixes_domains() -> None:
    sampler = DomainBatchSampler(np.arange(4000) % 4, 64, 4, draw="regrouped")
    for step in range(20):
        for _, indices in sampler.plan(step):
            shares = np.bincount(indices % 4, minlength=4)
            assert shares.min() >= 4  # 16 each are expected
            assert shares.max() < 40


def test_pooled_uses_each_example_once_a_pass() -> None:
    domains = Domains.from_indices({"a": range(20), "b": range(10, 36)})  # 36 examples, 10 of them in both
    sampler = DomainBatchSampler(domains, 4, 3, draw="pooled")
    drawn = [examples(sampler.plan(step)) for step in range(6)]
    assert sorted(chain(*drawn[:3])) == sorted(chain(*drawn[3:])) == list(range(36))
    assert drawn[0] != drawn[3]
    assert sampler.steps == 3


@settings(max_examples=50, deadline=None)
@given(samplers("balanced", sizes_up_to=12))
def test_balanced_takes_each_domain_once_in_as_many_examples(sampler: DomainBatchSampler) -> None:
    count, size = len(sampler.domains), sampler.domains_per_step * sampler.batch_size
    steps = 1 + 3 * count * 12 // size
    numbers, indices = sampler.plans(0, steps)
    assert indices.shape == (steps, sampler.domains_per_step, sampler.batch_size)
    assert numbers is None
    drawn = indices.ravel()
    origin = (
        np.searchsorted(sampler.domains.offsets, drawn, side="right") - 1
    )  # domains lie one after another
    whole = len(drawn) // count
    for block in origin[: whole * count].reshape(whole, count):
        assert sorted(block.tolist()) == list(range(count))
    for d in range(count):  # every example once a pass over its domain
        own, met = sampler.domains.indices_of(d).tolist(), drawn[origin == d].tolist()
        for start in range(0, len(met), len(own)):
            one_pass = met[start : start + len(own)]
            assert len(set(one_pass)) == len(one_pass)
        assert set(met) <= set(own)


def test_balanced_shuffles_the_domains_and_each_domains_examples() -> None:
    sampler = DomainBatchSampler(Domains.from_sizes({"a": 40, "b": 8, "c": 1, "d": 8}), 8, 4, draw="balanced")
    drawn = sampler.plans(0, 100)[1].ravel().reshape(-1, 4)
    starts = np.searchsorted([40, 48, 49], drawn, side="right")
    assert len({tuple(row) for row in starts.tolist()}) == 24  # all orders of four
    passes = drawn[starts == 1].reshape(-1, 8)  # of "b"
    assert len({tuple(one_pass) for one_pass in passes.tolist()}) == len(passes) == 100
    assert set(drawn[starts == 2].tolist()) == {48}  # a domain of one example gives it every time
    assert len(drawn[starts == 0]) == len(drawn[starts == 2]) == 800


def test_balanced_with_many_more_domains_than_a_step_has_places() -> None:
    sampler = DomainBatchSampler(np.arange(1000) % 500, 2, 3, draw="balanced")
    steps = [examples(sampler.plan(k)) for k in range(500)]
    assert all(len({i % 500 for i in step}) == 6 for step in steps[:83])  # within the first 500 examples
    assert sorted(chain(*(sampler.plan(k)[s][1].tolist() for k in range(500) for s in range(3)))) == sorted(
        list(range(1000)) * 3
    )


@settings(max_examples=30, deadline=None)
@given(samplers("balanced"), st.integers(0, 10**6))
def test_one_balanced_step_is_that_of_many(sampler: DomainBatchSampler, start: int) -> None:
    _, indices = sampler.plans(start, start + 5)
    for k in range(5):
        plan = sampler.plan(start + k)
        assert all(d is None for d, _ in plan)
        assert np.array_equal(np.stack([i for _, i in plan]), indices[k])


def test_by_size_draws_in_proportion() -> None:
    domains = Domains.from_sizes({"small": 10, "medium": 30, "large": 60})
    sampler = DomainBatchSampler(domains, 4, 5, by_size=True, seed=1)
    numbers = Counter(d for step in range(1000) for d, _ in sampler.plan(step))
    assert [round(numbers[d] / 5000, 1) for d in range(3)] == [0.1, 0.3, 0.6]
    drawn = [
        i
        for step in range(100)
        for d, batch in sampler.plan(step)
        for i in batch
        if i in domains.indices_of(d)
    ]
    assert len(drawn) == 2000
    batch = next(b for d, b in DomainBatchSampler(domains, 20, 9, by_size=True).plan(1) if d == 0)
    assert set(Counter(batch.tolist()).values()) == {2}  # ten examples, twenty places


@pytest.mark.parametrize("kind", ["domains", "one-domain", "pooled", "balanced", "regrouped"])
def test_order_depends_on_seed_and_step_only(kind: str) -> None:
    def make(seed: int) -> DomainBatchSampler:
        return DomainBatchSampler(np.arange(500) % 5, 8, 3, draw=kind, seed=seed)  # type: ignore[arg-type]

    one, two = make(3), make(3)
    for step in (17, 2, 10**9):
        assert str(one.plan(step)) == str(two.plan(step))
        assert str(one.plan(step)) != str(make(4).plan(step))


def test_the_order_within_a_step_is_shuffled() -> None:
    """With S = T the same domains come every step; the first must not always be the same one."""
    sampler = DomainBatchSampler(np.arange(30) % 3, 2, 3)
    firsts = Counter(sampler.plan(step)[0][0] for step in range(300))
    assert all(70 < firsts[d] < 130 for d in range(3))


@settings(max_examples=30, deadline=None)
@given(samplers(), st.integers(0, 30))
def test_resuming_goes_on_as_if_never_stopped(sampler: DomainBatchSampler, step: int) -> None:
    slots = sampler.domains_per_step
    sampler.steps = 7
    straight = [batch for _ in range(6) for batch in sampler]
    assert len(sampler) == 7 * slots
    assert straight == [b.tolist() for k in range(42) for _, b in sampler.plan(k)]
    sampler.set_step(step)
    rest = list(sampler)
    assert rest == straight[step * slots : (step // 7 + 1) * 7 * slots]
    assert list(sampler)[:slots] == [b.tolist() for _, b in sampler.plan((step // 7 + 1) * 7)]


@settings(max_examples=30, deadline=None)
@given(samplers(), st.integers(0, 30), st.data())
def test_resuming_within_a_step(sampler: DomainBatchSampler, step: int, data: st.DataObject) -> None:
    slots = sampler.domains_per_step
    sampler.steps = 7
    straight = [batch for _ in range(6) for batch in sampler]
    drawn = step * slots + data.draw(st.integers(0, slots - 1))
    sampler.set_step(*divmod(drawn, slots))
    assert list(sampler) == straight[drawn : (step // 7 + 1) * 7 * slots]
    assert next(iter(sampler)) == straight[(step // 7 + 1) * 7 * slots]  # the next pass is a whole one


def test_epochs_are_passes() -> None:
    sampler = DomainBatchSampler(np.arange(60) % 3, 4, 2, steps=5)
    passes = [list(sampler) for _ in range(3)]
    for epoch in (1, 1, 0, 2):
        sampler.set_epoch(epoch)
        assert list(sampler) == passes[epoch]
    sampler.set_step(7, 1)
    sampler.set_epoch(1)  # step 7 is in it
    assert list(sampler) == passes[1][5:]
    sampler.set_step(7)
    with pytest.raises(InputError, match=r"set_step\(7\) is in epoch 1 of 5 steps, but .* starts epoch 0"):
        sampler.set_epoch(0)
    with pytest.raises(InputError, match="batch=2 must be less than 2"):
        sampler.set_step(0, 2)


# Parts of batches


@settings(max_examples=40, deadline=None)
@given(samplers(), st.integers(1, 4), st.integers(1, 3))
def test_processes_split_each_batch_and_deal_none(
    sampler: DomainBatchSampler, processes: int, pieces: int
) -> None:
    """At the same place all processes are in one domain, and together have the batch of a single one."""
    slots, size = sampler.domains_per_step, sampler.batch_size * processes * pieces
    make = lambda **more: DomainBatchSampler(  # noqa: E731
        sampler.domains, size, slots, seed=sampler.seed, steps=3, **more
    )
    shares = [list(make(share=(i, processes), pieces=pieces)) for i in range(processes)]
    plan = [pair for step in range(3) for pair in make().plan(step)]
    assert {len(part) for share in shares for part in share} == {sampler.batch_size}
    assert all(len(share) == len(make(pieces=pieces)) == 3 * slots * pieces for share in shares)
    for place, (domain, batch) in enumerate(plan):
        assert domain is not None
        mine = set(sampler.domains.indices_of(domain).tolist())
        now = slice(place * pieces, (place + 1) * pieces)
        parts = [part for share in shares for part in share[now]]
        assert all(set(part) <= mine for part in parts)
        assert Counter(chain(*parts)) == Counter(batch.tolist())


def test_pieces_resume_by_optimizer_steps() -> None:
    """A trainer that accumulates two pieces has made three steps after six of them."""
    sampler = DomainBatchSampler(np.arange(60) % 3, 8, 2, share=(1, 2), pieces=2, steps=5)
    straight = list(sampler)
    sampler.set_step(*divmod(3, 2))
    assert list(sampler) == straight[6:]


# Mixed batches


@given(samplers(), st.integers(1, 3), st.integers(1, 3))
def test_mixed_batches_are_the_batches_of_a_step(
    sampler: DomainBatchSampler, processes: int, pieces: int
) -> None:
    """Every part has equally many examples of each domain of the step, and together they are its batches."""
    slots, size = sampler.domains_per_step, sampler.batch_size * processes * pieces
    make = lambda **more: DomainBatchSampler(  # noqa: E731
        sampler.domains, size, slots, seed=sampler.seed, steps=3, mixed=True, **more
    )
    whole = list(make())
    assert len(whole) == len(make()) == 3
    for step, batch in enumerate(whole):
        assert batch == [i for _, indices in make().plan(step) for i in indices.tolist()]
    shares = [list(make(share=(i, processes), pieces=pieces)) for i in range(processes)]
    for step, batch in enumerate(whole):
        parts = [part for share in shares for part in share[step * pieces : (step + 1) * pieces]]
        assert Counter(chain(*parts)) == Counter(batch)
        domains = Counter(d for d, _ in make().plan(step) for _ in range(sampler.batch_size))
        for part in parts:
            assert Counter(np.searchsorted(sampler.domains.offsets, part, side="right") - 1) == domains


def test_mixed_batches_resume_and_have_epochs() -> None:
    sampler = DomainBatchSampler(np.arange(60) % 3, 8, 2, mixed=True, pieces=2, steps=5)
    straight = list(sampler) + list(sampler)
    assert sampler.batches_per_step == 1
    sampler.set_step(*divmod(3, sampler.batches_per_step))
    assert list(sampler) == straight[6:10]
    sampler.set_epoch(1)
    assert list(sampler) == straight[10:]
    with pytest.raises(InputError, match="batch=1 must be less than 1"):
        sampler.set_step(0, 1)


def test_splitting_later_is_splitting_at_construction() -> None:
    later = DomainBatchSampler(np.arange(60) % 3, 8, 2)
    later.split(share=(1, 2), pieces=2)
    assert list(later) == list(DomainBatchSampler(np.arange(60) % 3, 8, 2, share=(1, 2), pieces=2))
    with pytest.raises(InputError, match="batch_size=8 cannot be cut into 3 equal parts"):
        later.split(pieces=3)


PATIENTS = [(float(i), i % 2) for i in range(5)]
SITES = ["oslo", "lima", "oslo", "lima", "rome"]


def test_items_with_their_domain() -> None:
    data = WithDomain(PATIENTS, SITES)
    assert data.domains.names == ("lima", "oslo", "rome")
    assert [data[i] for i in range(len(data))] == [(*PATIENTS[i], d) for i, d in enumerate([1, 0, 1, 0, 2])]
    as_mappings = WithDomain([{"x": x, "y": y} for x, y in PATIENTS], SITES)
    assert as_mappings[4] == {"x": 4.0, "y": 0, "domain": 2}
    in_own_order = WithDomain(PATIENTS, Domains.from_indices({"b": [3, 4], "a": [2, 0, 1]}))
    assert [in_own_order[i][2] for i in range(5)] == [1, 1, 1, 0, 0]


def test_items_with_their_domain_are_read_together_where_the_dataset_can() -> None:
    class Together(list):  # type: ignore[type-arg]
        def __getitems__(self, indices: list[int]) -> list[object]:
            return [("together", self[i]) for i in indices]

    assert WithDomain(Together("abcde"), SITES).__getitems__([4, 1]) == [
        ("together", "e", 2),
        ("together", "b", 0),
    ]
    assert WithDomain(PATIENTS, SITES).__getitems__([4, 1]) == [(4.0, 0, 2), (1.0, 1, 0)]


@pytest.mark.parametrize(
    ("domains", "message"),
    [
        (["a", "b"], "domains hold 2 entries and the dataset 5 examples"),
        (Domains.from_indices({"a": [0, 1, 2, 3], "b": [3]}), "each example must be in one domain"),
        (Domains.from_indices({"a": [0, 1, 2, 3], "b": [5]}), "each example must be in one domain"),
    ],
)
def test_items_with_wrong_domains_are_refused(domains: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        WithDomain(PATIENTS, domains)


def test_items_that_cannot_carry_a_domain_are_refused() -> None:
    with pytest.raises(InputError, match=r"item 0 of the dataset is a str; it must be a tuple"):
        WithDomain(["text"], [0])[0]


def test_in_a_plain_dataloader() -> None:
    labels = np.repeat(["x", "y", "z"], [30, 3, 12])
    sampler = DomainBatchSampler(labels, batch_size=5, domains_per_step=2)
    loader = DataLoader(list(enumerate(labels)), batch_sampler=sampler)  # type: ignore[arg-type]
    batches = [set(names) for _, names in loader]
    assert len(batches) == len(loader) == 2 * 5  # ceil(45 / 10) steps of two batches
    assert all(len(names) == 1 for names in batches)
    assert all(batches[i] != batches[i + 1] for i in range(0, 10, 2))


def test_default_domains_per_step() -> None:
    assert DomainBatchSampler(range(16), 1).domains_per_step == 16
    assert DomainBatchSampler(range(17), 1).domains_per_step == 5
    assert DomainBatchSampler([0, 0], 1).plan(5)[0][0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size of DomainBatchSampler must be "),
        ({"batch_size": 2.5}, r"batch_size .* must be "),
        ({"domains_per_step": 0}, "domains_per_step .* must be "),
        ({"domains_per_step": 4}, "domains_per_step=4 but there are 3 domains"),
        ({"domains_per_step": 4, "draw": "regrouped"}, "at most 3"),
        ({"draw": "poold"}, "draw .* must be "),
        ({"draw": "pooled", "by_size": True}, "by_size=True"),
        ({"draw": "balanced", "by_size": True}, 'by_size=True with draw="balanced"'),
        ({"steps": 0}, "steps .* must be "),
        ({"seed": "a"}, "seed .* must be "),
        ({"share": (0, 3)}, "batch_size=2 cannot be cut into 3 equal parts .* a multiple of 3"),
        ({"share": (0, 2), "pieces": 2}, r"4 equal parts \(2 processes, pieces=2\)"),
        ({"share": (2, 2)}, r"share=\(2, 2\); it must be \(process, processes\), counted from 0"),
        ({"share": 2}, r"share .* must be "),
        ({"share": (-1, 2)}, r"share=\(-1, 2\); it must be \(process, processes\)"),
        ({"pieces": 0}, "pieces .* must be "),
    ],
)
def test_refused_at_construction(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        DomainBatchSampler([0, 1, 2], **{"batch_size": 2, **arguments})


def test_more_batches_than_domains_where_they_need_not_be_distinct() -> None:
    for more in ({"draw": "pooled"}, {"draw": "one-domain"}, {"draw": "balanced"}, {"by_size": True}):
        assert len(DomainBatchSampler([0, 1, 1], 2, 7, **more).plan(3)) == 7  # type: ignore[arg-type]
