"""A long list of runs on worker processes that may fail or be killed: each run is recorded once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from shoal.bench.config import RunConfig
from shoal.bench.record import RunRecord, Store
from shoal.bench.run import check, run
from shoal.files import write_atomically

ATTEMPTS = 3
"""How often a run may take its process down with it."""

Tell = Callable[[RunConfig, int, str], None]


class SweepStore(Store):
    """Records, the runs at work with their checkpoints, and what failed."""

    def workplace(self, config: RunConfig) -> Path:
        return self.folder / "working" / config.identity

    def failure(self, config: RunConfig) -> Path:
        return self.folder / "failed" / f"{config.identity}.txt"

    def keep(self, record: RunRecord) -> None:
        """The record first: whatever is left of the run after it is only litter."""
        self.save(record)
        shutil.rmtree(self.workplace(record.config), ignore_errors=True)
        self.failure(record.config).unlink(missing_ok=True)

    def fail(self, config: RunConfig, why: str) -> None:
        path = self.failure(config)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, f"{config.to_dict()}\n\n{why}\n".encode())


@dataclass
class Outcome:
    records: list[RunRecord]
    failed: dict[str, str] = field(default_factory=dict)
    """Identity → the last line of what was said."""


def sweep(
    configs: Sequence[RunConfig],
    store: SweepStore,
    *,
    devices: Sequence[str],
    how: Mapping[str, Any] | None = None,
    tell: Tell | None = None,
    done: Callable[[RunRecord], None] | None = None,
) -> Outcome:
    """Runs what the store lacks, one worker process for each of ``devices``, such as ``["cpu", "cpu"]``.

    A worker saves its record itself, so that nothing depends on this process being there to take it. A run
    that fails is written down with its error and the others go on; one whose process is killed goes on from
    its last checkpoint in another, up to :data:`ATTEMPTS` times. The same call again does what is missing,
    failed runs included. Killed itself, this process leaves workers that end at their next sign of life.
    """
    missing = {c.identity: c for c in store.missing(configs)}
    for config in missing.values():
        check(config)
    waiting, failed = deque(missing.values()), dict[str, str]()
    attempts = dict.fromkeys(missing, 0)
    workers = [Worker(device, store, dict(how or {})) for device in devices[: len(missing)]]
    try:
        for worker in workers:
            worker.give(waiting)
        while any(worker.job for worker in workers):
            for worker in _ready(workers):
                job, message = worker.job, worker.hear()
                assert job is not None
                if message is None:  # it was killed, or the run took it down
                    attempts[job.identity] += 1
                    if attempts[job.identity] < ATTEMPTS:
                        waiting.append(job)
                    else:
                        why = f"its process ended {ATTEMPTS} times (exit code {worker.code})"
                        store.fail(job, why)
                        failed[job.identity] = why
                    worker.restart()
                elif message[0] == "told":
                    if tell:
                        tell(job, *message[1:])
                    continue
                elif message[0] == "failed":
                    failed[job.identity] = str(message[1]).splitlines()[-1]
                elif done and (record := store.find(job)) is not None:
                    done(record)
                worker.give(waiting)
    finally:
        for worker in workers:
            worker.end()
    return Outcome(store.found(configs), failed)


def _ready(workers: Sequence[Worker]) -> list[Worker]:
    """Those at work that have something to say, or nothing any more."""
    busy = [w for w in workers if w.job]
    heard = wait([w.pipe for w in busy])
    return [w for w in busy if w.pipe in heard]


class Worker:
    """A process that runs what it is given, and what it is running."""

    def __init__(self, device: str, store: SweepStore, how: dict[str, Any]) -> None:
        self.device, self.store, self.how = device, store, how
        self.job: RunConfig | None = None
        self.code: int | None = None
        self._start()

    def _start(self) -> None:
        # Not "fork": a forked child may inherit a lock that a torch thread holds, and cannot use CUDA.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, os.getpid(), self.device, self.store.folder, self.how), daemon=True
        )
        before = os.environ.get("OMP_NUM_THREADS")
        if self.device == "cpu":  # one run a core gains more than several threads a run
            os.environ["OMP_NUM_THREADS"] = "1"
        try:
            self.process.start()
        finally:
            if before is None:
                os.environ.pop("OMP_NUM_THREADS", None)
            else:
                os.environ["OMP_NUM_THREADS"] = before
        theirs.close()  # so that its end is seen here

    def give(self, waiting: deque[RunConfig]) -> None:
        self.job = waiting.popleft() if waiting else None
        if self.job:
            with contextlib.suppress(OSError):  # killed while idle: `hear` will find out
                self.pipe.send(self.job)

    def hear(self) -> tuple[Any, ...] | None:
        """What it says; ``None`` where it has ended."""
        try:
            message: tuple[Any, ...] = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            self.code = self.process.exitcode
            return None
        return message

    def restart(self) -> None:
        self.pipe.close()
        self._start()

    def end(self) -> None:
        if self.job:
            self.process.terminate()
        else:
            self.pipe.close()  # it waits for more
        self.process.join()


def _serve(pipe: Connection, parent: int, device: str, folder: Path, how: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    store = SweepStore(folder)

    def tell(step: int, note: str) -> None:
        try:
            if os.getppid() == parent:
                pipe.send(("told", step, note))
                return
        except OSError:
            pass
        os._exit(1)  # nobody is there any more; what was saved will be gone on with

    while True:
        try:
            config: RunConfig = pipe.recv()
        except EOFError:
            return
        try:
            if store.find(config) is None:  # a worker killed after it had saved it
                store.keep(run(config, device, tell, store.workplace(config), how))
            pipe.send(("done",))
        except KeyboardInterrupt:  # asked to end; where it was is saved
            return
        except Exception as error:
            said = (str(error).splitlines() or [""])[0]
            text = f"{''.join(traceback.format_exception(error))}\n{type(error).__name__}: {said}"
            store.fail(config, text)
            shutil.rmtree(store.workplace(config), ignore_errors=True)
            pipe.send(("failed", text))
