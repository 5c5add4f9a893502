"""Sampling is arithmetic: what step k draws is computed from (seed, k) alone, at the same cost for any k."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, Sampler

from shoal.data.domains import Domains
from shoal.errors import InputError
from shoal.options import Draw as Draw
from shoal.settings import Count, Range, checked

Seed = Annotated[int, Range(-(2**127), 2**127)]  # of a run, hashed, so that any will do
Position = Annotated[int, Range(0)]
Words = NDArray[np.uint64]

BLOCK = 64  # steps that are planned in one call
ROUNDS, SMALL = 8, 32  # with 6 rounds, or a smaller SMALL, pairs of positions are visibly dependent
DEAL, ORDER, EXAMPLES, POOLED, BY_SIZE, REGROUP = range(1, 7)  # what a key is for
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX1, MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
ONE, S27, S30, S31, S32 = (np.uint64(s) for s in (1, 27, 30, 31, 32))
ROUND = np.arange(1, ROUNDS + 1, dtype=np.uint64) * GOLDEN


def _mixed(x: Words) -> Words:
    """The finaliser of splitmix64: every bit in reaches every bit out."""
    x = (x ^ (x >> S30)) * MIX1
    x = (x ^ (x >> S27)) * MIX2
    return x ^ (x >> S31)


def key(*parts: int | NDArray[Any]) -> Words:
    """A 64-bit word from integers, or an array of them from arrays that broadcast."""
    word = np.zeros(1, dtype=np.uint64)  # never a scalar: numpy warns when those wrap around
    for part in parts:
        number = np.uint64(part % 2**64) if isinstance(part, int) else part.astype(np.uint64)
        word = _mixed((word ^ number) + GOLDEN)
    return word


def permute(key: Words, n: int | NDArray[Any], positions: NDArray[Any]) -> NDArray[np.int64]:
    """The elements at ``positions`` of a permutation of ``range(n)`` chosen by ``key``; no table is made.

    A number below a·b ≥ n is a pair (l, r); each round adds a keyed hash of one half to the other, l ← l +
    f(r) mod a or r ← r + f(l) mod b, which can be undone whatever f is (a Feistel network). Results of n or
    more go in again until they fall below n, which keeps it one-to-one; with a ≈ b ≈ √n that is rare. Halves
    of a few values mix too slowly, so for n ≤ SMALL the element is instead the rank of the position's hash
    among the n hashes, and all n! orders are equally likely. The arguments broadcast.
    """
    key, sizes, values = np.broadcast_arrays(key, np.asarray(n, dtype=np.uint64), positions.astype(np.uint64))
    result, small = np.empty(sizes.shape, dtype=np.int64), sizes <= SMALL
    for which, method in ((small, _ranks), (~small, _feistel)):
        if which.any():
            result[which] = method(key[which], sizes[which], values[which])
    return result


def _ranks(key: Words, sizes: Words, values: Words) -> NDArray[np.int64]:
    others: Words = np.arange(sizes.max(), dtype=np.uint64)
    hashes = _mixed(key[:, None] + others * GOLDEN)
    own = np.take_along_axis(hashes, values.astype(np.int64)[:, None], axis=1)
    rank: NDArray[np.int64] = ((hashes < own) & (others < sizes[:, None])).sum(axis=1)
    return rank


def _feistel(key: Words, sizes: Words, values: Words) -> NDArray[np.int64]:
    a = np.ceil(np.sqrt(sizes)).astype(np.uint64)
    b = (sizes + a - ONE) // a
    round_keys = _mixed(key + ROUND[:, None])
    result = _rounds(round_keys, a, b, values)
    while (outside := np.flatnonzero(result >= sizes)).size:
        result[outside] = _rounds(round_keys[:, outside], a[outside], b[outside], result[outside])
    return result.astype(np.int64)


def _rounds(round_keys: Words, a: Words, b: Words, values: Words) -> Words:
    left, right = np.divmod(values, b)
    for i, round_key in enumerate(round_keys):
        source, target, size = (left, right, b) if i % 2 else (right, left, a)
        word = (source + round_key) * MIX1
        word = (word ^ (word >> S32)) * MIX2
        target += ((word >> S32) * size) >> S32  # the upper 32 bits, scaled to [0, size)
        np.minimum(target, target - size, out=target)  # mod size: a negative difference is a huge number
    return left * b + right


class DomainBatchSampler(Sampler[list[int]]):
    """Sample batches of one domain each, with S consecutive batches from distinct domains.

    For any ``DataLoader(dataset, batch_sampler=DomainBatchSampler(labels, batch_size=32))``. Step k consists
    of S batches of B examples. The order of domains is a keyed permutation in which each of the T domains
    occurs once in T batches, and visit v of a domain takes positions vB to vB + B - 1 of its examples, which
    are permuted again for each epoch: every example is used once per epoch, and a domain smaller than B
    repeats its examples evenly. Any step can be computed without the earlier ones.

    One iteration has ``steps`` steps, and the next continues there: epoch p starts at step p · ``steps``.

    >>> sampler = DomainBatchSampler(["oslo"] * 4 + ["rome"] * 4, batch_size=2)
    >>> [sorted(i // 4 for i in batch) for batch in sampler][:2] in ([[0, 0], [1, 1]], [[1, 1], [0, 0]])
    True

    Args:
        domains: :class:`Domains`, or one label per example.
        batch_size: number of examples per batch, B.
        domains_per_step: number of domains per step, S (default: all if there are at most 16, otherwise 5).
        draw: how the batches of a step are sampled:

            - ``"domains"``: one batch from each of S distinct domains;
            - ``"one-domain"``: S batches from the same domain, each domain once in T steps (Reptile);
            - ``"pooled"``: S batches from all examples, each example once per epoch;
            - ``"balanced"``: S mixed batches with an equal share of each domain, whatever its size;
            - ``"regrouped"``: the S·B examples of ``"domains"`` at the same step and seed, shuffled over the
              S batches: a control that changes only the grouping.
        by_size: sample domains in proportion to their sizes, with replacement. A step may then contain a
            domain twice, and an example may be repeated before all others were used.
        seed: random seed.
        steps: number of steps per iteration (default: as many as sample the number of examples once).
        mixed: yield the S batches of a step as one list of S·B indices, as the functions of
            :mod:`shoal.penalties` take it; :class:`~shoal.data.WithDomain` adds the domain of each example.
        share: as in :meth:`split`.
        pieces: as in :meth:`split`.
    """

    @checked
    def __init__(
        self,
        domains: Domains | Any,
        batch_size: Count,
        domains_per_step: Count | None = None,
        *,
        draw: Draw = "domains",
        by_size: bool = False,
        seed: Seed = 0,
        steps: Count | None = None,
        mixed: bool = False,
        share: tuple[int, int] = (0, 1),
        pieces: Count = 1,
    ) -> None:
        if by_size and draw in ("pooled", "balanced"):
            raise InputError(f'by_size=True and draw="{draw}" both set how often domains are sampled.')
        self.domains = domains if isinstance(domains, Domains) else Domains.from_labels(domains)
        self.draw, self.by_size, self.seed = draw, by_size, seed
        self.batch_size, self.mixed = batch_size, mixed
        self.split(share, pieces)
        count = len(self.domains)
        default = count if count <= 16 else 5
        self.domains_per_step = default if domains_per_step is None else domains_per_step
        if draw in ("domains", "regrouped") and not by_size and self.domains_per_step > count:
            wrong = f"domains_per_step={self.domains_per_step} but there are {count} domains"
            raise InputError(f"{wrong}, and a step takes distinct ones; it must be at most {count}.")
        examples = self.domains.examples() if draw == "pooled" or steps is None else np.arange(0)
        self._pool = examples if draw == "pooled" else None
        self.steps = steps or math.ceil(len(examples) / (self.domains_per_step * self.batch_size))
        self._next, self._batch = 0, 0
        self._step_is_set = False  # by set_step

    @property
    def batches_per_step(self) -> int:
        """The number of optimizer steps of a training loop per step: S, or 1 if batches are mixed."""
        return 1 if self.mixed else self.domains_per_step

    @checked
    def split(self, share: tuple[int, int] = (0, 1), pieces: Count = 1) -> None:
        """Yield parts of batches, all of the same size, so that their gradients can be averaged.

        Args:
            share: ``(i, n)`` for process i of n: its part of the batch of *every* domain, so that all
                processes use the same domains at the same time.
            pieces: number of consecutive pieces of each batch, to accumulate gradients over as many batches;
                a piece of a mixed batch has examples of all S domains.
        """
        if len(share) != 2 or not 0 <= share[0] < share[1]:
            right = "(process, processes), counted from 0, such as (0, 2)"
            raise InputError(f"share={share}; it must be {right}.")
        self.share, self.pieces = share, pieces
        if self.batch_size % (parts := self.share[1] * self.pieces):
            raise InputError(
                f"batch_size={self.batch_size} cannot be cut into {parts} equal parts ({self.share[1]} "
                f"processes, pieces={self.pieces}); it must be a multiple of {parts}."
            )

    @checked
    def plan(self, step: Position) -> list[tuple[int | None, NDArray[np.int64]]]:
        """Return, for each batch of a step, its domain (``None`` if mixed) and B example indices."""
        numbers, indices = self.plans(step, step + 1)
        domains = [None] * len(indices[0]) if numbers is None else numbers[0].tolist()
        return list(zip(domains, indices[0], strict=True))

    def plans(self, start: int, stop: int) -> tuple[NDArray[np.int64] | None, NDArray[np.int64]]:
        """Return the batches of steps ``start`` to ``stop`` − 1, which costs little more than one step.

        They are the domains (steps, S), or ``None`` if batches mix domains, and indices (steps, S, B).
        """
        slots, size, count = self.domains_per_step, self.batch_size, stop - start
        steps = np.arange(start, stop)
        positions = np.arange(start * slots * size, stop * slots * size)
        numbers = None
        if self.draw == "pooled":
            assert self._pool is not None
            passes, element = np.divmod(positions, len(self._pool))
            drawn = self._pool[permute(key(self.seed, POOLED, passes), len(self._pool), element)]
        elif self.draw == "balanced":
            visit, place = np.divmod(positions, len(self.domains))
            d = permute(key(self.seed, DEAL, visit), len(self.domains), place)
            drawn = self._examples(d, visit, 1, steps)
        elif self.draw == "one-domain":
            d, visit = self._domains(steps, 1)
            drawn, numbers = self._examples(d, visit, slots * size, steps), np.repeat(d, slots, axis=1)
        else:
            d, visit = self._domains(steps, slots)
            drawn, numbers = self._examples(d, visit, size, steps), d
            if self.draw == "regrouped":
                words = key(self.seed, REGROUP, steps)[:, None]
                order = permute(words, slots * size, np.arange(slots * size)[None])
                drawn, numbers = np.take_along_axis(drawn.reshape(count, -1), order, axis=1), None
        return numbers, drawn.astype(np.int64).reshape(count, slots, size)

    def _domains(self, steps: NDArray[Any], slots: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The domains of each step and, for each, how many times it was dealt before; a row a step.

        Deals are numbered k·slots, k·slots + 1, …; deal p is element p mod T of a permutation that is kept
        for lcm(T, slots) deals. Then no step straddles two permutations, and ``slots`` ≤ T neighbours on
        a circle are distinct. The order within the step is shuffled, so that no domain always goes first.
        """
        domains, count = self.domains, len(self.domains)
        places = np.arange(slots)[None]
        if self.by_size:
            words = key(self.seed, BY_SIZE, steps[:, None], places)
            entries = words % np.uint64(len(domains.indices))
            d = np.searchsorted(domains.offsets, entries.astype(np.int64), side="right") - 1
            return d, np.broadcast_to(places, d.shape)
        deals = steps[:, None] * slots + places
        superpass = steps * slots // math.lcm(count, slots)
        d = permute(key(self.seed, DEAL, superpass)[:, None], count, deals % count)
        order = permute(key(self.seed, ORDER, steps)[:, None], slots, places)
        return np.take_along_axis(d, order, axis=1), np.take_along_axis(deals // count, order, axis=1)

    def _examples(self, d: NDArray[Any], visit: NDArray[Any], size: int, steps: NDArray[Any]) -> NDArray[Any]:
        """The example indices (steps, slots, size) of each domain's ``visit``."""
        offsets = self.domains.offsets
        start, n = offsets[d][..., None], (offsets[d + 1] - offsets[d])[..., None]
        if self.by_size:  # a fresh permutation for each (step, slot); no count of visits is kept
            passes, element = np.divmod(np.arange(size), n)
            words = key(self.seed, EXAMPLES, steps[:, None, None], visit[..., None], passes)
        else:
            passes, element = np.divmod(visit[..., None] * size + np.arange(size), n)
            words = key(self.seed, EXAMPLES, d[..., None], passes)
        indices: NDArray[Any] = self.domains.indices[start + permute(words, n, element)]
        return indices

    @checked
    def set_step(self, step: Position, batch: Position = 0) -> None:
        """Start the next iteration at a step, without its first ``batch`` batches.

        After n optimizer steps of a trainer: ``set_step(*divmod(n, sampler.batches_per_step))``.
        """
        if batch >= (count := self.batches_per_step):
            raise InputError(f"batch={batch} must be less than {count}, the number of batches per step.")
        self._next, self._batch, self._step_is_set = step, batch, True

    @checked
    def set_epoch(self, epoch: Position) -> None:
        """Start the next iteration at an epoch, unless :meth:`set_step` set a step within it."""
        if self._next // self.steps == epoch:
            return
        if self._step_is_set:
            where = f"epoch {self._next // self.steps} of {self.steps} steps, but the trainer starts {epoch}"
            advice = "let the trainer set where to resume, or set steps to the whole training"
            raise InputError(f"set_step({self._next}) is in {where}; {advice}.")
        self._next, self._batch = epoch * self.steps, 0

    def __iter__(self) -> Iterator[list[int]]:
        first, skipped = self._next, self._batch
        self._next, self._batch, self._step_is_set = (first // self.steps + 1) * self.steps, 0, False
        index, every = self.share
        blocks = (self.plans(k, min(k + BLOCK, self._next)) for k in range(first, self._next, BLOCK))
        steps = (rows for _, indices in blocks for rows in indices)  # each (S, B)
        batches = (batch for rows in steps for batch in np.split(rows, self.batches_per_step))
        parts = (batch[:, index::every] for batch in islice(batches, skipped, None))
        return (piece.ravel().tolist() for part in parts for piece in np.split(part, self.pieces, axis=1))

    def __len__(self) -> int:
        return self.steps * self.batches_per_step * self.pieces


class WithDomain(Dataset[Any]):
    """Adds the domain index to each item of ``dataset``: ``(x, y)`` becomes ``(x, y, domain)``.

    A mapping gets the key ``"domain"``. Domains are numbered from 0 in the order of ``domains.names``: the
    sorted order of the labels.

    >>> WithDomain([("anna", 0), ("ben", 1)], ["oslo", "lima"])[0]
    ('anna', 0, 1)

    Args:
        dataset: a map-style dataset whose items are tuples or lists ``(x, y)``, or mappings.
        domains: one label (integer or string) for each example, or a :class:`Domains` in which each example
            is in one domain.
    """

    domains: Domains

    def __init__(self, dataset: Any, domains: Domains | Any) -> None:
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            kind = type(dataset).__name__
            raise InputError(f"{kind} has no __getitem__ and __len__; a map-style dataset is needed.")
        self.dataset = dataset
        self.domains = domains if isinstance(domains, Domains) else Domains.from_labels(domains)
        if not np.array_equal(np.sort(self.domains.indices), np.arange(len(dataset))):
            counts = (
                f"domains hold {len(self.domains.indices)} entries and the dataset {len(dataset)} examples"
            )
            raise InputError(f"{counts}; each example must be in one domain.")
        self._numbers = np.empty(len(dataset), dtype=np.int64)
        self._numbers[self.domains.indices] = np.repeat(np.arange(len(self.domains)), self.domains.sizes)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several items at once, which is faster with Hugging Face datasets; called by ``DataLoader``."""
        several = getattr(self.dataset, "__getitems__", None)
        items = several(indices) if several else [self.dataset[i] for i in indices]
        return [self._with_domain(item, i) for item, i in zip(items, indices, strict=True)]

    def _with_domain(self, item: Any, index: int) -> Any:
        domain = int(self._numbers[index])
        if isinstance(item, Mapping):
            return {**item, "domain": domain}
        if isinstance(item, (tuple, list)):
            return (*item, domain)
        kind = type(item).__name__
        raise InputError(f"item {index} of the dataset is a {kind}; it must be a tuple (x, y) or a mapping.")
