"""From a dataset and a sampler to meta-batches, one per step."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from shoal.data.batch import Examples, MetaBatch, TensorData, as_examples
from shoal.data.sampler import BLOCK, key
from shoal.errors import InputError
from shoal.tensors import map_nest

ITEMS = 21  # what a key is for


def to_device(x: Any, device: torch.device | str | None) -> Any:
    """A tensor, or any nest of tensors, on ``device``; ``None`` leaves everything where it is."""
    if device is None:
        return x
    return map_nest(lambda part: part.to(device, non_blocking=True) if hasattr(part, "to") else part, x)


class MetaBatchLoader:
    """Load the batches that a :class:`DomainBatchSampler` plans, one :class:`MetaBatch` per step.

    :class:`TensorData` is gathered on its device. Other datasets are read by worker processes. The random
    numbers of a transform (from torch, numpy or ``random``) depend only on the seed of the sampler, the step
    and the position of the example in it, so that the batches do not depend on the number of workers.

    Args:
        dataset: map-style dataset of pairs ``(x, y)``, or :class:`Examples`.
        sampler: sampler that plans the batches.
        workers: number of processes that load examples.
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
        device: torch.device | str | None = None,
        start: int = 0,
        stop: int,
        share: tuple[int, int] = (0, 1),
        enter: Callable[[Any], Any] = lambda x: x,
    ) -> None:
        if workers < 0:
            raise InputError(f"workers={workers}; it must be at least 0.")
        if not 0 <= start <= stop:
            raise InputError(f"start={start}, stop={stop}; 0 ≤ start ≤ stop must hold.")
        self.examples, self.sampler, self.device = as_examples(dataset), sampler, device
        self.start, self.stop, self.share, self.enter = start, stop, share, enter
        self._loader: DataLoader[Any] | None = None
        if not isinstance(self.examples, TensorData):
            self._loader = DataLoader(
                _Steps(self.examples, sampler, share),
                batch_size=None,
                sampler=range(start, stop),
                collate_fn=_identity,
                num_workers=workers,
                # Of its own: a loader that begins draws a number, which must not be one of the training's.
                generator=torch.Generator(),
                worker_init_fn=_own_session,
                persistent_workers=workers > 0,
                pin_memory=device is not None and torch.device(device).type == "cuda",
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
        return map(self.gather, self.draws()) if self._loader is None else map(self._batch, self._loader)

    def draws(self) -> Iterator[Draw]:
        """The examples of each step, if they are in memory, for :meth:`gather`."""
        assert isinstance(self.examples, TensorData)
        (first, every), device, step = self.share, self.examples.device, self.start
        while step < self.stop:
            numbers, indices = self.sampler.plans(step, min(step + BLOCK, self.stop))
            for rows in [indices] if isinstance(indices, np.ndarray) else [each[None] for each in indices]:
                own = rows[:, :, first::every]  # of steps that are all of the same size
                steps, slots, size = own.shape
                blocks = np.broadcast_to(np.arange(slots), (steps, slots)) if numbers is None else numbers
                columns = [own.reshape(steps, -1), np.repeat(blocks, size, axis=1)]
                plan = torch.from_numpy(np.column_stack([*columns, np.arange(step, step + steps)]))
                if device.type == "cuda":
                    plan = plan.pin_memory().to(device, non_blocking=True)
                yield from (Draw(row, (size,) * slots) for row in plan.unbind())
                step += steps

    def gather(self, draw: Draw) -> MetaBatch:
        """The examples of a step, in memory."""
        x, y, *weight = self.examples.batch(draw.rows)
        return MetaBatch(self.enter(x), y, draw.domain, draw.sizes, *weight)

    def _batch(self, read: tuple[Any, NDArray[Any]] | InputError) -> MetaBatch:
        if isinstance(read, InputError):  # of a worker process; raised here, without the traceback of there
            self.close()
            raise InputError(read.args[0], read.option)
        parts, blocks = read
        size = len(parts[1]) // len(blocks)
        domain = torch.from_numpy(np.repeat(blocks, size))
        x, y, domain, *weight = to_device([*parts[:2], domain, *parts[2:]], self.device)
        return MetaBatch(self.enter(x), y, domain, (size,) * len(blocks), *weight)


class InOrder:
    """Plans each example once, in order, as a sampler plans steps of one batch; none mixes splits."""

    seed = 0

    def __init__(self, which: Mapping[str, NDArray[Any]], size: int) -> None:
        parts = {name: np.split(w, range(size, len(w), size)) for name, w in which.items() if len(w)}
        self.batches = [(name, len(rows)) for name, batches in parts.items() for rows in batches]
        self._rows = [rows.astype(np.int64)[None] for batches in parts.values() for rows in batches]

    def plans(self, start: int, stop: int) -> tuple[None, list[NDArray[Any]]]:
        return None, self._rows[start:stop]


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
    """What is read of each step: x, y and perhaps weights, and the domains of its blocks.

    Wrong data are an answer too: the main process raises the error.
    """

    def __init__(self, examples: Examples, sampler: Any, share: tuple[int, int]) -> None:
        self.examples, self.sampler, self.share = examples, sampler, share

    def __getitem__(self, step: int) -> tuple[Any, NDArray[Any]] | InputError:
        numbers, indices = self.sampler.plans(step, step + 1)
        blocks, size = indices[0].shape
        places, own = np.arange(blocks), slice(self.share[0], None, self.share[1])
        seeds = key(self.sampler.seed, ITEMS, step, places)[:, None] + np.arange(size, dtype=np.uint64)
        plan = zip(indices[0][:, own].ravel().tolist(), seeds[:, own].ravel().tolist(), strict=True)
        try:
            with seeded(0):
                items = [self._read(index, seed) for index, seed in plan]
                return self.examples.collated(items), places if numbers is None else numbers[0]
        except InputError as error:
            return error

    def _read(self, index: int, seed: int) -> Any:
        seed_all(seed)
        try:
            return self.examples[index]
        except OSError as error:  # a broken or missing file
            why = f"{type(error).__name__}: {error}"
            raise InputError(f"example {index} of the dataset cannot be read: {why}") from error
        except Exception as error:
            error.add_note(f"This happened in example {index} of the dataset.")
            raise


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
