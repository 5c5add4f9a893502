"""One way to run: ``execute(configs, store)`` does what is missing in the store."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from joblib.externals.loky import BrokenProcessPool, ProcessPoolExecutor

from shoal.experiments.config import RunConfig
from shoal.experiments.progress import Progress, State
from shoal.experiments.record import RunRecord
from shoal.experiments.run import check, run
from shoal.experiments.store import Store
from shoal.training.processes import pick_device
from shoal.training.stopping import Interrupted, Signals

ATTEMPTS = 3
"""How often a run may take its process down with it."""


class Lost(Exception):
    """The process of a run ended before the run did."""


@dataclass
class Outcome:
    """The records of all runs that finished or diverged, and the errors of the others."""

    records: list[RunRecord]
    failed: dict[str, str] = field(default_factory=dict)
    """Identity → the error in one line; the run's record in the store has the traceback too."""
    remaining: int = 0
    """Number of runs that were not started in time."""


def execute(
    configs: Sequence[RunConfig],
    store: Store,
    *,
    engine: str = "local",
    device: str | None = None,
    jobs: int | None = None,
    options: Mapping[str, Any] | None = None,
    progress: bool = False,
    until: float | None = None,
) -> Outcome:
    """Do the runs that are missing in ``store``, including failed ones.

    A run that raises an exception is recorded as failed and the others continue; one whose process is killed
    resumes from its last checkpoint, up to :data:`ATTEMPTS` times. After Ctrl-C or SIGTERM, runs save their
    state, and :class:`Interrupted` explains how to resume.

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
        options: options that do not change results, such as ``workers`` (see
            :data:`shoal.experiments.run.EXECUTION`).
        progress: show progress on stderr.
        until: time of ``time.monotonic()`` after which no further run is started, but one always is.

    Returns:
        The records, and the errors of failed runs.

    Raises:
        InputError: a configuration is invalid, or Ray is not available.
        OSError: not even the record of a failed run can be written.
        Interrupted: Ctrl-C or SIGTERM.
    """
    missing, failed = store.missing(configs), dict[str, str]()
    if not missing:
        return Outcome(store.found(configs))
    for config in missing:
        check(config)
    waiting, active, attempts = deque(missing), dict[Future[None], RunConfig](), Counter[str]()
    running, total = dict[str, RunConfig](), len({c.identity for c in configs})
    started, stopping = math.inf, False  # the clock starts with the first step, not with the processes

    def may_start() -> bool:
        late = until is not None and time.monotonic() > until and len(waiting) < len(missing)
        return bool(waiting) and not signals.asked and not late

    def state() -> State:
        """By the number of runs that have ended, and the steps of those that are running."""
        nonlocal started
        shares = [(config.describe(), store.fraction(config)) for config in list(running.values())]
        over = len(missing) - len(waiting) - len(shares)
        done, now = over + sum(share for _, share in shares), time.monotonic()
        started = min(started, now) if done else math.inf
        names = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares if share)
        note = f"{total - len(missing) + over}/{total} runs: {names}"[:100].rstrip(": ")
        known = over or (done and now - started > 60)  # the first steps are slow
        seconds = (now - started) * (len(missing) - done) / done if known else None
        return (total - len(missing) + done) / total, seconds, note

    def ended(config: RunConfig) -> None:
        elsewhere = f"a worker recorded it, but not in {store.folder}"
        record = store.read(config) or store.fail(config, elsewhere)
        if record.status == "failed":
            failed[config.identity] = record.error
            display.print(f"failed: {config.describe()}: {record.error}")

    with Progress("runs", state, progress) as display, Signals() as signals:
        display.print(f"{len(missing)} of {total} runs to do.")
        try:
            with closing(_pool(engine, store, device, jobs, len(missing), options or {})) as pool:
                while active or may_start():
                    while len(active) < pool.size and may_start():
                        config = waiting.popleft()
                        running[config.identity] = config
                        active[pool.submit(config)] = config
                    if signals.asked and not stopping:
                        stopping = True
                        pool.stop()
                    for future in wait(active, 0.5, FIRST_COMPLETED).done:
                        config = active.pop(future)
                        del running[config.identity]
                        try:
                            pool.result(future)
                        except (Interrupted, Lost) as error:
                            attempts[config.identity] += 1
                            if signals.asked or attempts[config.identity] < ATTEMPTS:
                                waiting.appendleft(config)
                                continue
                            store.fail(config, f"its process ended {ATTEMPTS} times ({error})")
                        ended(config)
            if signals.asked and waiting:
                raise KeyboardInterrupt
        except KeyboardInterrupt as stop:
            number = getattr(stop, "signal", None) or signals.asked or signal.SIGINT
            text = "interrupted. Finished runs are saved, and the same command resumes the others."
            raise Interrupted(text, number) from stop
        display.print(f"{len(missing) - len(failed) - len(waiting)} of {len(missing)} runs done.")
    store.clean(configs)
    return Outcome(store.found(configs), failed, len(waiting))


def _pool(
    engine: str, store: Store, device: str | None, jobs: int | None, most: int, options: Mapping[str, Any]
) -> Any:
    if engine == "ray":
        from shoal.experiments.cluster import RayPool

        return RayPool(store, device, jobs, options)
    return LocalPool(store, device, min(count_jobs(device, jobs), most), options)


def run_one(config: RunConfig, store: Store, device: str | None, options: Mapping[str, Any]) -> None:
    """Do a run and save its record, also if it fails; the next attempt resumes from its checkpoints.

    Warnings of the data are not repeated: whoever planned the runs has shown them.
    """

    def report(step: int, note: str = "") -> None:
        with suppress(OSError):  # a full disk
            store.progress(config).write_text(str(step))

    def pause() -> None:
        if signals.asked:
            raise Interrupted("it was stopped by a signal", signals.asked)
        time.sleep(0.2)

    with Signals() as signals, warnings.catch_warnings(action="ignore"), store.lock(config, pause):
        report(0)
        with suppress(OSError), os.scandir(store.folder):
            pass  # a network file system then asks its server what is in the folder
        if store.find(config) is not None:  # a process was killed after it had saved the record
            return
        how: dict[str, Any] = {"progress": report, "options": options, "weights": store.weights}
        try:
            store.save(run(config, device, store.workplace(config), **how))
        except Exception as error:
            line = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            store.fail(config, line, "".join(traceback.format_exception(error)))


class LocalPool:
    """Does one run at a time in this process, or several in processes of loky.

    Each process is in an executor of its own, so that a killed one takes no other down.
    """

    def __init__(self, store: Store, device: str | None, size: int, options: Mapping[str, Any]) -> None:
        self.store = Store(store.folder.absolute(), weights=store.weights)
        self.device, self.size, self.options = device, size, options
        self.idle, self.active = list[tuple[str, Any]](), dict[Future[None], tuple[str, Any]]()
        if size > 1:
            # loky replaces a process that has grown much, such as by a dataset in memory: no problem.
            warnings.filterwarnings("ignore", "A worker stopped while some jobs were given", UserWarning)
            devices = ["cpu"] if pick_device(device).type == "cpu" else _gpus(device)
            self.idle = [(place, _process(place)) for place in (devices * size)[:size]]

    def submit(self, config: RunConfig) -> Future[None]:
        """Start a run."""
        if self.size == 1:
            run_one(config, self.store, self.device, self.options)
            done = Future[None]()
            done.set_result(None)
            return done
        device, process = self.idle.pop()
        args = run_one, config, self.store, device, self.options
        try:
            future: Future[None] = process.submit(*args)
        except BrokenProcessPool:  # it was killed in its last run, or while it was idle
            process.shutdown(kill_workers=True)
            process = _process(device)
            future = process.submit(*args)
        self.active[future] = device, process
        return future

    def result(self, future: Future[None]) -> None:
        """Raises what ended a run; :class:`Lost` if its process has ended before."""
        if future in self.active:
            self.idle.append(self.active.pop(future))
        try:
            future.result()
        except BrokenProcessPool as error:
            raise Lost((str(error).splitlines() or [""])[0]) from error

    def stop(self) -> None:
        """Ask active runs to save their state and to end."""
        for _, process in self.active.values():
            for pid in list(process._processes):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    def close(self) -> None:
        """End all processes."""
        for _, process in [*self.idle, *self.active.values()]:
            process.shutdown(kill_workers=bool(self.active))


def _process(device: str) -> Any:
    """An executor of one process, which starts to import what runs need."""
    # One thread: a run per core gains more than several threads per run.
    env = {"OMP_NUM_THREADS": "1"} if device == "cpu" else None
    process = ProcessPoolExecutor(1, env=env, initializer=_prepare_process, initargs=(os.getpid(),))
    process.submit(count_jobs, "cpu")
    return process


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

    named = device not in (None, "cuda")
    return [str(device)] if named else [f"cuda:{i}" for i in range(torch.cuda.device_count())]
