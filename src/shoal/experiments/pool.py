"""Many runs, side by side in worker processes, saved as they finish."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord, Store
from shoal.experiments.run import Turns, check, run
from shoal.training.processes import pick_device
from shoal.training.stopping import Interrupted, Signals
from shoal.training.world import world

TOGETHER = 10
STREAMS = 32
"""So many has torch; then the first comes again, and two runs on one stream spoil each other's graphs."""


def run_all(
    configs: Sequence[RunConfig],
    store: Store,
    *,
    device: str | None = None,
    jobs: int | None = None,
    how: Mapping[str, Any] | None = None,
    tell: Callable[[RunConfig, int, str], None] | None = None,
    done: Callable[[RunRecord], None] | None = None,
) -> list[RunRecord]:
    """The records of ``configs``, running what the store does not hold yet, each saved as it finishes.

    ``jobs`` of them side by side. On the CPU in processes, by default one a core, each with one thread,
    since a small network gains more from a core of its own than from a second thread. On CUDA in this
    process, by default ten and at most 32, where steps are captured and examples in memory; others come one
    after the other. Each gives the same as it would alone. Ctrl-C keeps what has finished; the same call then
    does the rest. ``how`` goes to :func:`shoal.experiments.run.run`.
    """
    missing = list({c.identity: c for c in store.missing(configs)}.values())
    if missing:
        for config in missing:
            check(config)
        cuda = pick_device(device).type == "cuda"
        count = jobs or (TOGETHER if cuda else _cores())
        if not jobs and not cuda and count < len(missing) < 2 * count:
            count = len(missing)  # sharing cores beats a second round in which some of them idle
        runner = _alone if count == 1 or len(missing) == 1 else (_together if cuda else _side_by_side)
        work = [Job(config, device, store.workplace(config), how or {}) for config in missing]
        for record in runner(work, min(count, len(missing)), tell):
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

    def turns(self, tell: Callable[[int, str], None] | bool) -> Turns:
        return Turns(self.config, self.device, tell, self.folder, self.how)


def _together(jobs: Sequence[Job], count: int, tell: Any) -> Iterator[RunRecord]:
    """Turn by turn in one process, each on a CUDA stream of its own, so that their small kernels overlap.

    A run that Python drives kernel by kernel gains nothing from company, and one whose examples do not fit
    in the device's memory may need all of it: such a run has the device to itself.
    """
    waiting = list(jobs)
    active: list[tuple[Turns, Iterator[None], torch.cuda.Stream]] = []
    stop: Interrupted | None = None
    device, deterministic = pick_device(jobs[0].device), bool(jobs[0].how.get("deterministic"))
    free = [torch.cuda.Stream(device) for _ in range(min(count, STREAMS))]
    with Signals(any(job.folder for job in jobs)) as signals, world(device, deterministic):
        while active or (waiting and not signals.asked):
            room = free and all(_small(turns) for turns, _, _ in active)
            if waiting and room and not signals.asked:
                job, stream = waiting.pop(0), free.pop()
                with torch.cuda.stream(stream):
                    turns = job.turns(partial(tell, job.config) if tell else False)
                stream.synchronize()  # what its data were made from may be another run's too
                active.append((turns, turns.take(signals), stream))
            for entry in list(active):
                turns, turn, stream = entry
                try:
                    with torch.cuda.stream(stream):
                        next(turn)
                except StopIteration:
                    active.remove(entry)
                    free.append(stream)
                    assert turns.record is not None
                    yield turns.record
                except Interrupted as asked:  # the others too shall save where they are
                    active.remove(entry)
                    stop = asked
    if stop is not None:
        raise stop
    if waiting:
        raise KeyboardInterrupt


def _small(turns: Turns) -> bool:
    training = turns.training
    return training is None or (training.unroll > 0 and training.gathers)


def _alone(jobs: Sequence[Job], count: int, tell: Any) -> Iterator[RunRecord]:
    for job in jobs:
        yield job.run(partial(tell, job.config) if tell else False)


# What a worker process keeps for itself: the queue on which it says how far it is, and for whom it works.
_news: Any = None
_parent = 0
_stopped = False


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

    global _stopped
    if _stopped:
        raise KeyboardInterrupt
    try:
        return job.run(tell)
    except KeyboardInterrupt:  # what is still waiting must not be begun
        _stopped = True
        raise


def _side_by_side(jobs: Sequence[Job], count: int, tell: Any) -> Iterator[RunRecord]:
    # Not "fork": a forked child may inherit a lock that a torch thread holds, and cannot use CUDA.
    context = multiprocessing.get_context("spawn")
    one_thread = pick_device(jobs[0].device).type == "cpu"
    news = context.Queue()
    with _one_thread_each(one_thread):
        begin = (news, os.getpid(), one_thread)
        pool = ProcessPoolExecutor(count, context, initializer=_begin, initargs=begin)
        try:
            with _ctrl_c_waits():
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
                # Those that came to their end first: what is raised for another ends all of it.
                for future in sorted(finished, key=lambda f: f.exception() is not None):
                    yield future.result()
        except BaseException as error:
            workers = list((pool._processes or {}).values())  # shutdown() forgets them
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.terminate()
            if isinstance(error, BrokenProcessPool):
                raise ChildProcessError(
                    "a worker process was killed, perhaps for lack of memory. Finished runs are kept; the "
                    "same command does the rest"
                ) from None
            raise
        pool.shutdown()


@contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Processes started in this block are born deaf to Ctrl-C, which would end them in a traceback."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
