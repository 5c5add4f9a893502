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
from shoal.data.sampler import BLOCK, key
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
            _Steps(dataset, sampler, collate or collate_of(dataset), share),
            batch_size=None,
            sampler=range(start, stop),
            collate_fn=_identity,
            num_workers=workers,
            # Of its own: a loader that begins draws a number, which must not be one of the training's.
            generator=torch.Generator(),
            worker_init_fn=_own_session,
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
        device: torch.device = self.dataset.device  # type: ignore[attr-defined]
        for start in range(self.start, self.stop, BLOCK):
            numbers, indices = self.sampler.plans(start, min(start + BLOCK, self.stop))
            parts = [indices] if isinstance(indices, np.ndarray) else [rows[None] for rows in indices]
            for part in parts:  # of steps that are all of the same size
                rows = part[:, :, first::every]
                steps, slots, size = rows.shape
                blocks = np.broadcast_to(np.arange(slots), (steps, slots)) if numbers is None else numbers
                number = np.arange(start, start + steps)[:, None]
                columns = [rows.reshape(steps, -1), np.repeat(blocks, size, axis=1), number]
                plan, start = torch.from_numpy(np.concatenate(columns, axis=1)), start + steps
                if device.type == "cuda":
                    plan = plan.pin_memory().to(device, non_blocking=True)
                yield from (Draw(row, (size,) * slots) for row in plan.unbind())

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


class _Steps(Dataset[Any]):
    """Of a step x, y and perhaps weights, under random numbers of their own, and the domains of its blocks.

    Wrong data are an answer too: the main process raises the error.
    """

    def __init__(
        self, dataset: Any, sampler: Any, collate: Callable[[list[Any]], Any], share: tuple[int, int]
    ) -> None:
        self.dataset, self.sampler, self.collate, self.share = dataset, sampler, collate, share

    def __getitem__(self, step: int) -> tuple[Any, NDArray[Any]]:
        numbers, indices = self.sampler.plans(step, step + 1)
        first, every = self.share
        rows, places = indices[0][:, first::every].tolist(), np.arange(len(indices[0]))
        seeds = key(self.sampler.seed, ITEMS, step, places).tolist()
        blocks = places if numbers is None else numbers[0]
        try:
            with seeded(0):
                read = (self._block(s + first, r, every) for s, r in zip(seeds, rows, strict=True))
                return self._collated([item for items in read for item in items]), blocks
        except InputError as error:
            return error, blocks

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
        if isinstance(parts, (list, tuple)) and len(parts) in (2, 3):
            weight = parts[2] if len(parts) == 3 else None
            if weight is None or (
                isinstance(weight, Tensor) and weight.ndim == 1 and weight.is_floating_point()
            ):
                return parts
        got = f"{len(parts)} parts" if isinstance(parts, (list, tuple)) else type(parts).__name__
        raise InputError(
            f"an item of the dataset must be a pair (x, y), but there came {got}; a third part is a "
            "sample weight, one floating number."
        )


def _identity(batch: Any) -> Any:
    return batch


def _own_session(worker: int) -> None:
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
