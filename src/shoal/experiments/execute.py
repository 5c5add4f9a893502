"""One way to run: ``execute(configs, store)`` does what is missing in the store."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import os
import signal
import threading
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from joblib.externals.loky import BrokenProcessPool, ProcessPoolExecutor

from shoal.experiments.config import RunConfig
from shoal.experiments.progress import Progress, Runs, duration
from shoal.experiments.record import RunRecord
from shoal.experiments.run import check, run
from shoal.experiments.store import Store
from shoal.terminal import clean
from shoal.training.processes import pick_device
from shoal.training.stopping import Interrupted, Signals

__all__ = ["Outcome", "Store", "count_jobs", "duration", "execute"]

ATTEMPTS = 3
"""How often a run may take its process down with it."""
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class Outcome:
    """The records of all runs that finished or diverged, and for the others what went wrong."""

    records: list[RunRecord]
    failed: dict[str, str] = field(default_factory=dict)
    """Identity → the error in one line; the run's record in the store has the traceback too."""

    def usable(self) -> list[RunRecord]:
        """The records; an error where there are failures only."""
        if self.failed and not self.records:
            raise ChildProcessError(f"every run failed, such as: {next(iter(self.failed.values()))}")
        return self.records


def execute(
    configs: Sequence[RunConfig],
    store: Store,
    *,
    engine: str = "local",
    device: str | None = None,
    jobs: int | None = None,
    how: Mapping[str, Any] | None = None,
    progress: bool = False,
    done: Callable[[RunRecord], None] | None = None,
) -> Outcome:
    """Do the runs that are missing in ``store``, including failed ones.

    A run that raises an exception is recorded as failed and the others continue; one whose process is killed
    resumes from its last checkpoint, up to :data:`ATTEMPTS` times. A full disk ends the call. After Ctrl-C or
    SIGTERM, runs save their state, and :class:`Interrupted` explains how to resume.

    >>> from shoal.experiments.config import RunConfig
    >>> runs = [RunConfig("linear", "erm", steps=4, seed=seed) for seed in (0, 1)]
    >>> outcome = execute(runs, Store("runs"), device="cpu", jobs=1)
    >>> [record.status for record in outcome.records]
    ['finished', 'finished']

    Args:
        configs: configurations of the runs; duplicates are done once.
        store: folder of the records.
        engine: ``local`` (this machine) or ``ray``.
        device: device, such as ``cpu`` or ``cuda`` (default: CUDA if available).
        jobs: number of runs in parallel (default: one per core, or one per GPU).
        how: options that do not change results, see :func:`shoal.experiments.run.prepare`.
        progress: show progress on stderr.
        done: called with each new record, including those of failed runs.

    Returns:
        The records, and the errors of failed runs.

    Raises:
        InputError: a configuration is invalid, or Ray is not available.
        OSError: the disk is full.
        Interrupted: Ctrl-C or SIGTERM.
    """
    missing = {c.identity: c for c in store.missing(configs)}
    for config in missing.values():
        check(config)
    failed: dict[str, str] = {}
    if missing:
        runs = Runs(configs, list(missing.values()), store)
        with Progress("runs", runs.state, progress) as display, Signals() as signals:
            display.print(f"{runs.title}.")

            def ended(end: End) -> None:
                for category, message in end.warnings:
                    warnings.warn(message, category, stacklevel=4)
                error, record = end.error, store.look(end.config)
                if record is None or (error is None and record.status == "failed"):
                    error = error or f"a worker recorded it, but not in {store.folder}"
                    record = store.fail(end.config, error)
                if error is not None:
                    failed[end.config.identity] = error
                    display.print(f"failed: {runs.describe(end.config)}: {clean(error)}")
                runs.add(record)
                if done is not None:
                    done(record)

            try:
                workers = _workers(store, len(missing), engine, device, jobs, dict(how or {}))
                _run(workers, deque(missing.values()), store, signals, ended)
            except KeyboardInterrupt as stop:
                number = getattr(stop, "signal", None) or signals.asked or signal.SIGINT
                text = "interrupted. Finished runs are saved, and the same command resumes the others."
                raise Interrupted(text, number) from stop
            except OSError as error:
                if error.errno not in FULL:
                    raise
                text = f"{error.strerror}: {store.folder}. Finished runs are saved; free some disk space"
                raise OSError(error.errno, f"{text}, then resume with the same command.") from error
            display.print(f"{len(missing) - len(failed)} of {len(missing)} runs done.")
    store.clean(configs)
    return Outcome(store.found(configs), failed)


@dataclass
class End:
    """How a run ended: with a record, with an error, or because its process was killed."""

    config: RunConfig
    error: str | None = None
    warnings: Sequence[tuple[type[Warning], str]] = ()
    killed: bool = False


class Workers(Protocol):
    """Where runs are done."""

    def free(self) -> bool:
        """Whether a further run can be started."""

    def submit(self, config: RunConfig) -> None:
        """Start a run."""

    def wait(self) -> list[End]:
        """Wait, for a second at most, for runs to end."""

    def stop(self) -> None:
        """Ask active runs to save their state and end."""

    def close(self) -> None:
        """End all processes."""


def _workers(
    store: Store, runs: int, engine: str, device: str | None, jobs: int | None, how: dict[str, Any]
) -> Workers:
    shared = Store(store.folder.absolute(), weights=store.weights)
    if engine == "ray":
        from shoal.experiments.cluster import RayWorkers

        return RayWorkers(shared, device, jobs, how)
    count = min(count_jobs(device, jobs), runs)
    if count == 1:
        return InProcess(store, device, how)
    return LocalProcesses(shared, _devices(device, count), how)


def _run(
    workers: Workers,
    waiting: deque[RunConfig],
    store: Store,
    signals: Signals,
    ended: Callable[[End], None],
) -> None:
    """Submit runs until all have ended; those whose process was killed are submitted again."""
    attempts, active, stopping = Counter[str](), 0, False
    try:
        while active or (waiting and not stopping):
            while waiting and workers.free() and not signals.asked:
                workers.submit(waiting.popleft())
                active += 1
            if signals.asked and not stopping:
                stopping = True
                workers.stop()
            for end in workers.wait():
                active -= 1
                attempts[end.config.identity] += end.killed
                if not end.killed:
                    ended(end)
                elif stopping or attempts[end.config.identity] < ATTEMPTS:
                    waiting.append(end.config)
                else:
                    reason = f"its process ended {ATTEMPTS} times ({end.error})"
                    store.fail(end.config, reason)
                    ended(End(end.config, reason))
    finally:
        workers.close()
    if stopping and waiting:
        raise KeyboardInterrupt


def run_one(config: RunConfig, store: Store, device: str | None, how: Mapping[str, Any]) -> End:
    """Do a run and save its record, also if it fails.

    The checkpoints of a run that fails stay: the next attempt resumes from them.
    """
    file = store.progress(config)

    def report(step: int, note: str = "") -> None:
        with contextlib.suppress(OSError):  # a full disk
            file.write_text(str(step))

    with Signals() as signals:

        def wait() -> None:
            if signals.asked:
                raise Interrupted("interrupted", signals.asked)
            time.sleep(0.2)

        with store.lock(config, wait):
            report(0)
            with contextlib.suppress(OSError), os.scandir(store.folder):
                pass  # a network file system then asks its server what is in the folder
            if store.find(config) is not None:  # a process was killed after it had saved the record
                return End(config)
            try:
                place = store.workplace(config)
                store.save(run(config, device, place, progress=report, how=how, weights=store.weights))
            except Exception as error:
                if cause := _full_disk(error):
                    raise cause from error
                line = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                store.fail(config, line, "".join(traceback.format_exception(error)))
                return End(config, line)
    return End(config)


def _full_disk(error: BaseException | None) -> OSError | None:
    """The cause of an error, if it is a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return OSError(error.errno, os.strerror(error.errno))
        error = error.__cause__ or error.__context__
    return None


def run_in_worker(*args: Any) -> End:
    """:func:`run_one` in another process, with the warnings of the run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        end = run_one(*args)
    return replace(end, warnings=list({(w.category, str(w.message)): None for w in caught}))


class InProcess:
    """One run after another in this process."""

    def __init__(self, store: Store, device: str | None, how: Mapping[str, Any]) -> None:
        self.options = store, device, how
        self.submitted: list[RunConfig] = []

    def free(self) -> bool:
        return not self.submitted

    def submit(self, config: RunConfig) -> None:
        self.submitted.append(config)

    def wait(self) -> list[End]:
        return [run_one(self.submitted.pop(), *self.options) for _ in list(self.submitted)]

    def stop(self) -> None:
        """A training in progress has received the signal itself."""

    def close(self) -> None:
        """There is nothing to end."""


class LocalProcesses:
    """Processes of loky. Each has a pool of its own, so that a killed one takes no other down."""

    def __init__(self, store: Store, devices: Sequence[str], how: Mapping[str, Any]) -> None:
        # loky replaces a process that has grown much, such as by a dataset in memory, which is no problem.
        warnings.filterwarnings("ignore", "A worker stopped while some jobs were given", UserWarning)
        self.store, self.how = store, how
        self.idle = [(device, _start_process(device)) for device in devices]
        self.active: dict[Any, tuple[RunConfig, str, Any]] = {}

    def free(self) -> bool:
        return bool(self.idle)

    def submit(self, config: RunConfig) -> None:
        device, pool = self.idle.pop(0)
        args = config, self.store, device, self.how
        try:
            future = pool.submit(run_in_worker, *args)
        except BrokenProcessPool:  # it was killed while it was idle
            pool = _start_process(device)
            future = pool.submit(run_in_worker, *args)
        self.active[future] = config, device, pool

    def wait(self) -> list[End]:
        ends = []
        for future in concurrent.futures.wait(self.active, 0.5, concurrent.futures.FIRST_COMPLETED).done:
            config, device, pool = self.active.pop(future)
            try:
                ends.append(future.result())
            except Interrupted:
                ends.append(End(config, "it was stopped by a signal", killed=True))
            except BrokenProcessPool as broken:
                ends.append(End(config, str(broken).splitlines()[0], killed=True))
                pool.shutdown(kill_workers=True)
                pool = _start_process(device)
            self.idle.append((device, pool))
        return ends

    def stop(self) -> None:
        for _, _, pool in self.active.values():
            for pid in list(pool._processes):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    def close(self) -> None:
        for _, _, pool in self.active.values():
            pool.shutdown(kill_workers=True)
        for _, pool in self.idle:
            pool.shutdown()


def _start_process(device: str) -> Any:
    """A pool of one process, which starts to import what runs need."""
    # One thread: a run per core gains more than several threads per run.
    env = {"OMP_NUM_THREADS": "1"} if device == "cpu" else None
    pool = ProcessPoolExecutor(1, env=env, initializer=_prepare_process, initargs=(os.getpid(),))
    pool.submit(count_jobs, "cpu")
    return pool


def _prepare_process(parent: int) -> None:
    """A process ends with the one that started it, even if that is killed.

    Ctrl-C reaches all processes, but it is the parent that asks runs to end.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True).start()


def count_jobs(device: str | None = None, jobs: int | None = None) -> int:
    """Number of runs in parallel on this machine: ``jobs``, or one per core, or one per GPU."""
    if jobs is not None:
        return jobs
    if pick_device(device).type == "cpu":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return len(_gpus(device))


def _gpus(device: str | None) -> list[str]:
    import torch

    if device not in (None, "cuda"):
        return [str(device)]
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())]


def _devices(device: str | None, count: int) -> list[str]:
    each = ["cpu"] if pick_device(device).type == "cpu" else _gpus(device)
    return [each[n % len(each)] for n in range(count)]
