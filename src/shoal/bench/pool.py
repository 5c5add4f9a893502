"""Many runs, side by side in worker processes, saved as they finish."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shoal.bench.config import RunConfig
from shoal.bench.record import RunRecord, Store
from shoal.bench.run import check, run
from shoal.training.processes import pick_device


def run_all(
    configs: Sequence[RunConfig],
    store: Store,
    *,
    device: str | None = None,
    processes: int | None = None,
    how: Mapping[str, Any] | None = None,
    tell: Callable[[RunConfig, int, str], None] | None = None,
    done: Callable[[RunRecord], None] | None = None,
) -> list[RunRecord]:
    """The records of ``configs``, running what the store does not hold yet, each saved as it finishes.

    Several ``processes`` run side by side: by default one a core on the CPU, each with one thread, since a
    small network gains more from a core of its own than from a second thread; on CUDA one. Ctrl-C keeps
    what has finished; the same call then does the rest. ``how`` goes to :func:`shoal.bench.run.run`.
    """
    missing = list({c.identity: c for c in store.missing(configs)}.values())
    if missing:
        for config in missing:
            check(config)
        cuda = pick_device(device).type == "cuda"
        count = processes or (1 if cuda else _cores())
        if not processes and not cuda and count < len(missing) < 2 * count:
            count = len(missing)  # sharing cores beats a second round in which some of them idle
        runner = _alone if count == 1 or len(missing) == 1 else _side_by_side
        jobs = [Job(config, device, store.workplace(config), how or {}) for config in missing]
        for record in runner(jobs, min(count, len(missing)), tell):
            store.save(record)
            if done:
                done(record)
    return store.found(configs)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Job(NamedTuple):
    config: RunConfig
    device: str | None
    folder: Path | None
    how: Mapping[str, Any]

    def run(self, tell: Callable[[int, str], None] | bool) -> RunRecord:
        return run(self.config, self.device, tell, self.folder, self.how)


def _alone(jobs: Sequence[Job], processes: int, tell: Any) -> Iterator[RunRecord]:
    for job in jobs:
        yield job.run(partial(tell, job.config) if tell else False)


# What a worker process keeps for itself: the queue on which it says how far it is, and for whom it works.
_news: Any = None
_parent = 0


def _begin(news: Any, parent: int, one_thread: bool) -> None:
    global _news, _parent
    _news, _parent = news, parent
    news.cancel_join_thread()  # news that nobody reads must not keep a worker from ending
    # Ctrl-C reaches the whole group; the parent decides, and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if one_thread:
        torch.set_num_threads(1)


def _work(number: int, job: Job) -> RunRecord:
    def tell(step: int, note: str) -> None:
        if os.getppid() != _parent:  # killed, with nobody left to take the result
            os._exit(1)
        _news.put((number, step, note))

    return job.run(tell)


def _side_by_side(jobs: Sequence[Job], processes: int, tell: Any) -> Iterator[RunRecord]:
    # Not "fork": a forked child may inherit a lock that a torch thread holds, and cannot use CUDA.
    context = multiprocessing.get_context("spawn")
    one_thread = pick_device(jobs[0].device).type == "cpu"
    news = context.Queue()
    with _one_thread_each(one_thread):
        begin = (news, os.getpid(), one_thread)
        pool = ProcessPoolExecutor(processes, context, initializer=_begin, initargs=begin)
        try:
            waiting: set[Future[RunRecord]] = {
                pool.submit(_work, number, job) for number, job in enumerate(jobs)
            }
            while waiting:
                finished, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                try:
                    while tell:
                        number, step, note = news.get_nowait()
                        tell(jobs[number].config, step, note)
                except queue.Empty:
                    pass
                for future in finished:
                    yield future.result()
        except BaseException:
            workers = list(pool._processes.values())  # shutdown() forgets them
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.terminate()
            raise
        pool.shutdown()


@contextmanager
def _one_thread_each(one_thread: bool) -> Iterator[None]:
    """OpenMP reads this when a child starts; without it every child spins up a thread a core."""
    before = os.environ.get("OMP_NUM_THREADS")
    if one_thread:
        os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        else:
            os.environ["OMP_NUM_THREADS"] = before
