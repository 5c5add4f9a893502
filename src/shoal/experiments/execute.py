"""One way to run: ``execute(configs, store)`` does what is missing in the store."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from joblib.externals.loky import BrokenProcessPool, ProcessPoolExecutor

from shoal.experiments.config import RunConfig
from shoal.experiments.progress import Progress, Runs
from shoal.experiments.record import RunRecord
from shoal.experiments.run import check, run
from shoal.experiments.store import Store
from shoal.terminal import clean
from shoal.training.processes import pick_device
from shoal.training.stopping import Interrupted, Signals

ATTEMPTS = 3
"""How often a run may take its process down with it."""
Warnings = list[tuple[type[Warning], str]]
"""Those of a run: their categories and messages."""


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
    missing, failed, waiting = store.missing(configs), dict[str, str](), deque[RunConfig]()
    for config in missing:
        check(config)
    if missing:
        runs, waiting = Runs(configs, missing, store), deque(missing)
        with Progress("runs", runs.state, progress) as display, Signals() as signals:
            display.print(f"{runs.title}.")

            def ended(config: RunConfig, caught: Warnings) -> None:
                for category, message in caught:
                    warnings.warn(message, category, stacklevel=5)
                if (record := store.read(config)) is None:
                    store.fail(config, f"a worker recorded it, but not in {store.folder}")
                    record = store.read(config)
                assert record is not None
                if record.status == "failed":
                    failed[config.identity] = record.error
                    display.print(f"failed: {runs.describe(config)}: {clean(record.error)}")
                runs.add(record)

            def may_start() -> bool:
                late = until is not None and time.monotonic() > until and len(waiting) < len(missing)
                return bool(waiting) and not signals.asked and not late

            try:
                shared = Store(store.folder.absolute(), weights=store.weights)
                if engine == "ray":
                    from shoal.experiments.cluster import RayPool

                    pool: Any = RayPool(shared, device, jobs, options or {})
                    _run(pool, waiting, may_start, store, signals, ended)
                elif (count := min(count_jobs(device, jobs), len(missing))) > 1:
                    pool = LocalPool(shared, device, count, options or {})
                    _run(pool, waiting, may_start, store, signals, ended)
                while may_start():
                    ended(config := waiting.popleft(), run_one(config, store, device, options or {}))
                if signals.asked and waiting:
                    raise KeyboardInterrupt
            except KeyboardInterrupt as stop:
                number = getattr(stop, "signal", None) or signals.asked or signal.SIGINT
                text = "interrupted. Finished runs are saved, and the same command resumes the others."
                raise Interrupted(text, number) from stop
            display.print(f"{len(missing) - len(failed) - len(waiting)} of {len(missing)} runs done.")
    store.clean(configs)
    return Outcome(store.found(configs), failed, len(waiting))


def _run(
    pool: Any,
    waiting: deque[RunConfig],
    may_start: Callable[[], bool],
    store: Store,
    signals: Signals,
    ended: Callable[[RunConfig, Warnings], None],
) -> None:
    """Submit runs until all have ended; those whose process was killed are submitted again."""
    attempts, active, stopping = Counter[str](), dict[Future[Warnings], RunConfig](), False
    try:
        while active or may_start():
            while len(active) < pool.size and may_start():
                config = waiting.popleft()
                active[pool.submit(config)] = config
            if signals.asked and not stopping:
                stopping = True
                pool.stop()
            for future in wait(active, 0.5, FIRST_COMPLETED).done:
                config = active.pop(future)
                try:
                    ended(config, future.result())
                except (Interrupted, BrokenProcessPool, Lost) as error:
                    attempts[config.identity] += 1
                    if signals.asked or attempts[config.identity] < ATTEMPTS:
                        waiting.appendleft(config)
                        continue
                    reason = (str(error).splitlines() or [""])[0]
                    store.fail(config, f"its process ended {ATTEMPTS} times ({reason})")
                    ended(config, [])
    finally:
        pool.close()


def run_one(config: RunConfig, store: Store, device: str | None, options: Mapping[str, Any]) -> Warnings:
    """Do a run and save its record, also if it fails; returns the warnings of the run.

    The checkpoints of a run that fails stay: the next attempt resumes from them.
    """
    file = store.progress(config)

    def report(step: int, note: str = "") -> None:
        with contextlib.suppress(OSError):  # a full disk
            file.write_text(str(step))

    with Signals() as signals, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")

        def pause() -> None:
            if signals.asked:
                raise Interrupted("it was stopped by a signal", signals.asked)
            time.sleep(0.2)

        with store.lock(config, pause):
            report(0)
            with contextlib.suppress(OSError), os.scandir(store.folder):
                pass  # a network file system then asks its server what is in the folder
            if store.find(config) is not None:  # a process was killed after it had saved the record
                return []
            how: dict[str, Any] = {"progress": report, "options": options, "weights": store.weights}
            try:
                store.save(run(config, device, store.workplace(config), **how))
            except Exception as error:
                line = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                store.fail(config, line, "".join(traceback.format_exception(error)))
    return list({(w.category, str(w.message)): None for w in caught})


class LocalPool:
    """Processes of loky, each in an executor of its own, so that a killed one takes no other down."""

    def __init__(self, store: Store, device: str | None, count: int, options: Mapping[str, Any]) -> None:
        # loky replaces a process that has grown much, such as by a dataset in memory, which is no problem.
        warnings.filterwarnings("ignore", "A worker stopped while some jobs were given", UserWarning)
        devices = ["cpu"] if pick_device(device).type == "cpu" else _gpus(device)
        self.store, self.options, self.size = store, options, count
        self.idle = queue.SimpleQueue[tuple[str, Any]]()
        self.active = dict[Future[Warnings], Any]()
        for number in range(count):
            place = devices[number % len(devices)]
            self.idle.put((place, _process(place)))

    def submit(self, config: RunConfig) -> Future[Warnings]:
        device, process = self.idle.get()
        args = run_one, config, self.store, device, self.options
        try:
            future = process.submit(*args)
        except BrokenProcessPool:  # it was killed in its last run, or while it was idle
            process.shutdown(kill_workers=True)
            process = _process(device)
            future = process.submit(*args)
        self.active[future] = process
        future.add_done_callback(lambda ended: self.idle.put((device, self.active.pop(ended))))
        return future

    def stop(self) -> None:
        for process in list(self.active.values()):
            for pid in list(process._processes):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    def close(self) -> None:
        for process in list(self.active.values()):
            process.shutdown(kill_workers=True)
        while not self.idle.empty():
            self.idle.get()[1].shutdown()


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

    if device not in (None, "cuda"):
        return [str(device)]
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())]
