"""From a dataset and a sampler to meta-batches, one per step."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from shoal.data.batch import InMemory, MetaBatch, collate_of, finished
from shoal.data.sampler import BLOCK, key, planned
from shoal.errors import InputError

ITEMS = 21  # what a key is for


def to_device(x: Any, device: torch.device | str | None) -> Any:
    """A tensor, or any nest of tensors, on ``device``; ``None`` leaves everything where it is."""
    if device is None:
        return x
    if isinstance(x, Tensor):
        return x.to(device, non_blocking=True)
    if isinstance(x, (list, tuple)):
        parts = [to_device(part, device) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    if hasattr(x, "to"):  # what a tokenizer returns, graphs, packed sequences
        return x.to(device)
    return {name: to_device(part, device) for name, part in x.items()} if isinstance(x, Mapping) else x


class MetaBatchLoader:
    """Load the batches that a :class:`DomainBatchSampler` plans, one :class:`MetaBatch` per step.

    Examples that are :class:`~shoal.data.InMemory`, such as :class:`TensorData`, are gathered on their
    device. Other datasets are read by worker processes. The random numbers of a transform (from torch, numpy
    or ``random``) depend only on the seed of the sampler, the step and the position of the example in it, so
    that the batches do not depend on the number of workers. On CUDA, the next batch is copied during the
    computation of the current one.

    Args:
        dataset: map-style dataset of pairs ``(x, y)``.
        sampler: sampler that plans the batches.
        workers: number of processes that load examples.
        collate: function that makes a batch of a list of examples (default: the method ``collate`` of the
            dataset, or that of torch).
        device: device of the batches.
        start: first step.
        stop: step after the last.
        share: ``(i, n)`` for part i of n of *each* block: every n-th example of it.
        enter: function that is applied to the inputs of a batch on the device.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: Any,
        *,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        device: torch.device | str | None = None,
        start: int = 0,
        stop: int,
        share: tuple[int, int] = (0, 1),
        enter: Callable[[Any], Any] | None = None,
    ) -> None:
        if workers < 0:
            raise InputError(f"workers={workers}; it must be at least 0.")
        if not 0 <= start <= stop:
            raise InputError(f"start={start}, stop={stop}; 0 ≤ start ≤ stop must hold.")
        self.dataset, self.sampler, self.device = dataset, sampler, device
        self.start, self.stop, self.share, self.enter = start, stop, share, enter
        self._cuda = device is not None and torch.device(device).type == "cuda"
        self._loader: DataLoader[Any] | None = None
        if isinstance(dataset, InMemory):
            return
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            kind = type(dataset).__name__
            raise InputError(f"{kind} has no __getitem__ and __len__; a map-style dataset is needed.")
        self._loader = DataLoader(
            _Steps(dataset, collate or collate_of(dataset)),
            batch_size=None,
            sampler=_Requests(sampler, start, stop, share),
            collate_fn=_as_it_is,
            num_workers=workers,
            # Of its own: a loader that begins draws a number, which must not be one of the training's.
            generator=torch.Generator(),
            worker_init_fn=_apart_from_signals,
            persistent_workers=workers > 0,
            pin_memory=self._cuda,
        )

    def __len__(self) -> int:
        return self.stop - self.start

    def close(self) -> None:
        """Stop the worker processes; iterating again starts new ones."""
        iterator: Any = None if self._loader is None else self._loader._iterator
        if self._loader is not None and iterator is not None:
            self._loader._iterator = None
            iterator._shutdown_workers()

    def __iter__(self) -> Iterator[MetaBatch]:
        if self._loader is None:
            return map(self.gather, self.draws())
        return self._copied_ahead(self._loader) if self._cuda else map(self._batch, self._loader)

    def draws(self) -> Iterator[Draw]:
        """What each step takes of examples in memory, for :meth:`gather`."""
        first, every = self.share
        for start in range(self.start, self.stop, BLOCK):
            numbers, indices = self.sampler.plans(start, min(start + BLOCK, self.stop))
            if isinstance(indices, np.ndarray):
                yield from self._draws(start, numbers, indices[:, :, first::every])
                continue
            for n, rows in enumerate(indices):  # steps of different sizes
                own = None if numbers is None else numbers[n : n + 1]
                yield from self._draws(start + n, own, rows[None, :, first::every])

    def _draws(self, start: int, numbers: NDArray[Any] | None, indices: NDArray[Any]) -> Iterator[Draw]:
        steps, slots, size = indices.shape
        blocks = np.broadcast_to(np.arange(slots), (steps, slots)) if numbers is None else numbers
        number = np.arange(start, start + steps)[:, None]
        plan = np.concatenate([indices.reshape(steps, -1), np.repeat(blocks, size, axis=1), number], axis=1)
        tensor, device = torch.from_numpy(plan), self.dataset.device  # type: ignore[attr-defined]
        if device.type == "cuda":
            tensor = tensor.pin_memory().to(device, non_blocking=True)
        for row in tensor.unbind():
            yield Draw(row, (size,) * slots)

    def gather(self, draw: Draw) -> MetaBatch:
        """The examples of a step, in memory."""
        dataset: Any = self.dataset
        x, y, *weight = dataset.batch(draw.rows)
        return MetaBatch(self._entered(x), y, draw.domain, draw.sizes, *weight)

    def _copied_ahead(self, loader: Iterable[Any]) -> Iterator[MetaBatch]:
        """Batches on the device, the next one being copied on a stream of its own."""
        copying = torch.cuda.Stream(self.device)
        ready: MetaBatch | None = None
        for loaded in loader:
            with torch.cuda.stream(copying):
                following = self._batch(loaded)
            if ready is not None:
                yield ready
            now = torch.cuda.current_stream(self.device)
            now.wait_stream(copying)
            for tensor in following.tensors:  # made on the other stream: not to be given away too early
                tensor.record_stream(now)
            ready = following
        if ready is not None:
            yield ready

    def _batch(self, loaded: tuple[Any, NDArray[Any]]) -> MetaBatch:
        parts, blocks = loaded
        if isinstance(parts, InputError):  # of a worker process; raised here, without the traceback of there
            self.close()
            raise InputError(parts.args[0], parts.option)
        x, y, *weight = to_device(parts, self.device)
        size = len(y) // len(blocks)
        domain = torch.from_numpy(np.repeat(blocks, size)).to(y.device, non_blocking=True)
        return MetaBatch(self._entered(x), y, domain, (size,) * len(blocks), *weight)

    def _entered(self, x: Any) -> Any:
        x = finished(self.dataset, x)
        return x if self.enter is None else self.enter(x)


class Draw(NamedTuple):
    """The examples of a step that are in memory, not gathered yet.

    Attributes:
        plan: the indices of B examples, then their domains, then the number of the step.
        sizes: number of examples of each block.
    """

    plan: Tensor
    sizes: tuple[int, ...]

    @property
    def rows(self) -> Tensor:
        return self.plan[: len(self.plan) // 2]

    @property
    def domain(self) -> Tensor:
        return self.plan[len(self.plan) // 2 : -1]

    @property
    def ids(self) -> Tensor:
        """The domain of each block."""
        return self.domain[:: self.sizes[0]]


class _Request(NamedTuple):
    """One step: a key for each block, their domains, the examples, and which share of each block they are."""

    seeds: list[int]
    blocks: NDArray[np.int64]
    rows: list[list[int]]
    share: tuple[int, int]


class _Requests:
    """The steps as requests, made lazily in the main process."""

    def __init__(self, sampler: Any, start: int, stop: int, share: tuple[int, int]) -> None:
        self.sampler, self.start, self.stop, self.share = sampler, start, stop, share

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[_Request]:
        first, every = self.share
        for step, (numbers, rows) in enumerate(planned(self.sampler, self.start, self.stop), self.start):
            blocks = np.arange(len(rows))
            seeds = key(self.sampler.seed, ITEMS, step, blocks).tolist()
            yield _Request(
                seeds, blocks if numbers is None else numbers, rows[:, first::every].tolist(), self.share
            )


class _Steps(Dataset[Any]):
    """Answers a request with x, y and perhaps weights, under random numbers that the request determines.

    Wrong data are an answer too: the main process raises the error.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate = dataset, collate

    def __getitem__(self, request: _Request) -> tuple[Any, NDArray[Any]]:
        items: list[Any] = []
        try:
            with seeded(0):
                for seed, rows in zip(request.seeds, request.rows, strict=True):
                    items += self._block(seed + request.share[0], rows, request.share[1])
                return self._collated(items), request.blocks
        except InputError as error:
            return error, request.blocks

    def _block(self, seed: int, rows: list[int], every: int) -> list[Any]:
        several = getattr(self.dataset, "__getitems__", None)
        try:
            if callable(several):
                seed_all(seed)
                return list(several(rows))
            items = []
            for n, index in enumerate(rows):
                seed_all(seed + every * n)
                rows = [index]  # for the message
                items.append(self.dataset[index])
            return items
        except InputError:
            raise
        except Exception as error:
            which = f"example {rows[0]}" if len(rows) == 1 else f"one of the examples {rows}"
            message = f"{which} of the dataset cannot be read: {type(error).__name__}: {error}"
            if isinstance(error, OSError):  # a broken or missing file
                raise InputError(message) from error
            raise RuntimeError(message) from error

    def _collated(self, items: list[Any]) -> Any:
        try:
            parts = self.collate(items)
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            advice = "make them the same shape, or give the dataset a method `collate`"
            raise InputError(f"the examples of a batch do not fit together ({why}); {advice}.") from error
        several = isinstance(parts, (list, tuple))
        if several and (len(parts) == 2 or (len(parts) == 3 and _is_weight(parts[2]))):
            return parts
        got = f"{len(parts)} parts" if several else type(parts).__name__
        raise InputError(
            f"an item of the dataset must be a pair (x, y), but there came {got}; a third part is a "
            "sample weight, one floating number."
        )


def _is_weight(values: Any) -> bool:
    return isinstance(values, Tensor) and values.ndim == 1 and values.is_floating_point()


def _as_it_is(batch: Any) -> Any:
    return batch


def _apart_from_signals(worker: int) -> None:
    """Ctrl-C and signals to the whole group leave the main process its workers to end a step with."""
    if hasattr(os, "setsid"):
        os.setsid()


def seed_all(seed: int, device: torch.device | None = None) -> None:
    """Seeds torch's generator of the CPU and of a CUDA ``device``, numpy's and Python's."""
    torch.default_generator.manual_seed(seed % 2**63)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed % 2**63)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators a transform may use, and put them back: in the main process they are the user's."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    seed_all(seed)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
