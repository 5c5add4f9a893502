"""From a dataset and a sampler to meta-batches, one list of S domain batches a step."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset

from shoal.data.batch import DomainBatch, InMemory, TensorData, collate_of, finished, tensors_in
from shoal.data.domains import Domains
from shoal.data.sampler import DomainBatchSampler, key, planned
from shoal.errors import InputError, shown
from shoal.settings import checked

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
    """Load the batches that a :class:`DomainBatchSampler` plans, as lists of :class:`DomainBatch` per step.

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
        share: ``(i, n)`` for part i of n of *each* batch: every n-th example of it.
        enter: function that is applied to the inputs of a batch on the device.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: DomainBatchSampler,
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
        self._loader: DataLoader[Any] | None = None
        if isinstance(dataset, InMemory):
            return
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise InputError(
                f"{type(dataset).__name__} has no __getitem__ and __len__; sampling from domains "
                "requires a map-style dataset."
            )
        self._loader = DataLoader(
            _Items(dataset),
            batch_sampler=_Requests(sampler, start, stop, share),  # type: ignore[arg-type]
            collate_fn=_Collate(collate or collate_of(dataset)),  # type: ignore[arg-type]
            num_workers=workers,
            # Of its own: a loader that begins draws a number, which must not be one of the training's.
            generator=torch.Generator(),
            worker_init_fn=_leave_signals_to_parent,
            persistent_workers=workers > 0,
            pin_memory=device is not None and torch.device(device).type == "cuda",
        )

    def __len__(self) -> int:
        return self.stop - self.start

    def close(self) -> None:
        """Stop the worker processes; iterating again starts new ones."""
        if self._loader is None or self._loader._iterator is None:
            return
        # Left to the garbage collector, they live on until it runs, and may then not be told to end.
        iterator: Any = self._loader._iterator
        self._loader._iterator = None
        iterator._shutdown_workers()

    def __iter__(self) -> Iterator[list[DomainBatch]]:
        return self._gathered() if self._loader is None else self._grouped(self._loader)

    def _gathered(self) -> Iterator[list[DomainBatch]]:
        dataset: Any = self.dataset
        first, every = self.share
        for domains, indices in planned(self.sampler, self.start, self.stop):
            rows = torch.from_numpy(indices[:, first::every]).to(dataset.device, non_blocking=True)
            yield [self._batch(dataset.batch(row), d) for row, d in zip(rows, domains, strict=True)]

    def _grouped(self, loader: DataLoader[Any]) -> Iterator[list[DomainBatch]]:
        meta_batch = []
        cuda = self.device is not None and torch.device(self.device).type == "cuda"
        items = _plainly(loader)
        for batch in self._copied_ahead(items) if cuda else (self._batch(pair, d) for d, pair in items):
            meta_batch.append(batch)
            if len(meta_batch) == self.sampler.domains_per_step:
                yield meta_batch
                meta_batch = []

    def _copied_ahead(self, loader: Iterable[Any]) -> Iterator[DomainBatch]:
        """Batches on the device, the next one on its way there on a stream of its own."""
        aside = torch.cuda.Stream(self.device)
        ahead: DomainBatch | None = None
        for domain, pair in loader:
            with torch.cuda.stream(aside):
                coming = self._batch(pair, domain)
            if ahead is not None:
                yield ahead
            torch.cuda.current_stream(self.device).wait_stream(aside)
            for tensor in tensors_in(
                (coming.x, coming.y, coming.weight)
            ):  # filled on another stream: not to be given away
                tensor.record_stream(torch.cuda.current_stream(self.device))
            ahead = coming
        if ahead is not None:
            yield ahead

    def _batch(self, pair: Any, domain: int | None) -> DomainBatch:
        x, y, *weight = to_device(pair, self.device)
        x = finished(self.dataset, x)
        if self.enter is not None:
            x = self.enter(x)
        return DomainBatch(x, y, domain, *weight)


Request = tuple[int, int | None, list[int], tuple[int, int]]
"""A key, the domain, the examples, and which share of the batch they are."""


class _Requests:
    """The flat sequence of batches as requests, made lazily in the main process."""

    def __init__(
        self, sampler: DomainBatchSampler, start: int, stop: int, share: tuple[int, int] = (0, 1)
    ) -> None:
        self.sampler, self.start, self.stop, self.share = sampler, start, stop, share

    def __len__(self) -> int:
        return (self.stop - self.start) * self.sampler.domains_per_step

    def __iter__(self) -> Iterator[Request]:
        first, every = self.share
        steps = planned(self.sampler, self.start, self.stop)
        for step, (domains, rows) in enumerate(steps, self.start):
            seeds = key(self.sampler.seed, ITEMS, step, np.arange(len(rows))).tolist()
            for seed, domain, indices in zip(seeds, domains, rows, strict=True):
                yield seed, domain, indices[first::every].tolist(), self.share


class _Items(Dataset[Any]):
    """Answers such a request with ``(domain, items)``, under random numbers that the request determines."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, request: Request) -> tuple[int | None, list[Any]]:
        seed, domain, indices, (first, every) = request
        with seeded(seed + first):
            if callable(getattr(self.dataset, "__getitems__", None)):
                try:
                    return domain, self.dataset.__getitems__(indices)
                except Exception as error:
                    raise RuntimeError(f"examples {indices}: {type(error).__name__}: {error}") from error
            return domain, [self._item(i, seed + first + every * n) for n, i in enumerate(indices)]

    def _item(self, index: int, seed: int) -> Any:
        seed_all(seed)
        try:
            return self.dataset[index]
        except InputError:
            raise
        except Exception as error:
            raise RuntimeError(f"example {index}: {type(error).__name__}: {error}") from error


def _plainly(loader: DataLoader[Any]) -> Iterator[Any]:
    """What is wrong with the input, without the words that a worker process puts around it."""
    try:
        with _signals_held_back() if loader.num_workers else nullcontext():
            items = iter(loader)  # starts the workers
        yield from items
    except InputError as error:
        raise InputError(str(error).rsplit("InputError: ", 1)[-1].strip()) from None


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Workers forked in this block block SIGINT and SIGTERM until they have said how they take them.

    Those sent to this process meanwhile come at the end of the block. A server that forks workers would keep
    it for all that it ever starts, so it does without.
    """
    if not hasattr(signal, "sigtimedwait") or multiprocessing.get_start_method() != "fork":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_signals_to_parent(worker: int) -> None:
    """One to the whole group (Ctrl-C, a cluster's SIGTERM) leaves the parent its workers to end a step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None and hasattr(signal, "sigtimedwait"):  # not on macOS and Windows
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_end_with_parent, args=(parent, os.getppid()), daemon=True).start()


def _end_with_parent(parent: Any, above: int) -> None:
    """Ends this worker when the parent says so, or is no more.

    The process above is the parent if workers are forked from it, else the server that forks them.
    """
    while True:
        info = signal.sigtimedwait([signal.SIGTERM], 2.0)
        if info is not None and info.si_pid == parent.pid:
            os._exit(0)
        if os.getppid() != above or not parent.is_alive():
            os._exit(1)


class _Collate:
    """A class and not a closure: worker processes may have to pickle it."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, answer: tuple[int | None, list[Any]]) -> tuple[int | None, Any]:
        domain, items = answer
        pair = self.collate(items)
        several = isinstance(pair, (list, tuple))
        if several and len(pair) == 3 and _is_weight(pair[2]):
            return domain, pair
        if not several or len(pair) != 2:
            got = f"{len(pair)} parts" if several else type(pair).__name__
            raise InputError(
                f"an item of the dataset must be a pair (x, y), but there came {got}; a third part is a "
                "sample weight, one floating number."
            )
        return domain, pair


def _is_weight(values: Any) -> bool:
    return isinstance(values, Tensor) and values.ndim == 1 and values.is_floating_point()


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


@checked
def concatenate(datasets: Mapping[str, Any]) -> tuple[Dataset[Any], Domains]:
    """Concatenate one dataset per domain.

    If all are tensors or arrays, the result is a :class:`TensorData`. If all have a method ``collate``, that
    of the first is used.

    >>> import torch
    >>> oslo, rome = (torch.zeros(2, 3), torch.zeros(2)), (torch.ones(1, 3), torch.ones(1))
    >>> data, domains = concatenate({"oslo": oslo, "rome": rome})
    >>> len(data), domains.names
    (3, ('oslo', 'rome'))

    Args:
        datasets: by domain, a dataset or a pair ``(x, y)`` of arrays.

    Returns:
        The dataset and its :class:`Domains`.
    """
    if not datasets:
        raise InputError("no datasets; at least one domain is required, such as {'art': (x, y)}.")
    parts = {str(name): _in_memory(str(name), part) for name, part in datasets.items()}
    for name, part in parts.items():
        if not hasattr(part, "__len__"):
            raise InputError(f"domain {name!r} must be a dataset or a pair (x, y), got {shown(part)}.")
        if len(part) == 0:
            raise InputError(f"domain {name!r} has no examples; remove it.")
    domains = Domains.from_sizes({name: len(part) for name, part in parts.items()})
    if not all(type(part) is TensorData for part in parts.values()):
        joined: Any = ConcatDataset(parts.values())
        if all(getattr(part, "collate", None) for part in parts.values()):
            joined.collate = next(iter(parts.values())).collate
        return joined, domains
    (first, one), *others = parts.items()
    if not others:
        return one, domains
    for what in ("x", "y"):
        a = getattr(one, what)
        for name, other in others:
            b = getattr(other, what)
            if a.shape[1:] != b.shape[1:] or a.dtype != b.dtype:
                raise InputError(
                    f"{what} of an example is {tuple(a.shape[1:])} {a.dtype} in domain {first!r} but "
                    f"{tuple(b.shape[1:])} {b.dtype} in domain {name!r}; they must have the same shape "
                    "and type."
                )
    tensors: Sequence[TensorData] = list(parts.values())
    weights = [t.weight for t in tensors if t.weight is not None]
    if weights and len(weights) < len(tensors):
        without = next(name for name, part in parts.items() if part.weight is None)
        raise InputError(
            f"domain {without!r} has no sample weights, but other domains have; all or none must have them."
        )
    weight = torch.cat(weights) if weights else None
    return TensorData(torch.cat([t.x for t in tensors]), torch.cat([t.y for t in tensors]), weight), domains


def _in_memory(name: str, part: Any) -> Any:
    """A pair of tensors or arrays as :class:`TensorData`; a dataset as it is."""
    if isinstance(part, TensorDataset) and len(part.tensors) == 2:
        part = part.tensors
    if not isinstance(part, (tuple, list)):
        return part
    if len(part) not in (2, 3):
        raise InputError(
            f"domain {name!r} has {len(part)} parts; it must be a dataset, (x, y) or (x, y, weights)."
        )
    try:
        return TensorData(*map(_as_tensor, part))
    except (TypeError, ValueError) as error:
        raise InputError(f"domain {name!r}: {error}") from error


def _as_tensor(values: Any) -> Tensor:
    """A tensor as it is; an array with NumPy's usual float64 in torch's usual type, which models have."""
    if isinstance(values, Tensor):
        return values
    tensor = torch.as_tensor(np.asarray(values))
    return tensor.to(torch.get_default_dtype()) if tensor.dtype == torch.float64 else tensor
