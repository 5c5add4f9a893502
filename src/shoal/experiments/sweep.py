"""A long list of runs on worker processes that may fail or be killed: each run is recorded once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import shutil
import signal
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord, Store
from shoal.experiments.run import check, run
from shoal.files import write_atomically

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

ATTEMPTS = 3
"""How often a run may take its process down with it."""

Tell = Callable[[RunConfig, int, str], None]


class SweepStore(Store):
    """Records, the runs at work with their checkpoints, and what failed.

    The folder may be on a file system that several machines share. What holds there:

    - A record appears whole or not at all, and only after it is there does a worker say so.
    - A run has one worker at a time (:meth:`claimed`), from the look for its record until the record is kept.
      One that is started while another still has the run, such as one that a killed sweep has left, waits
      and then finds the record, or goes on from the checkpoints.
    - Where the file system has no locks, two workers may do a run at once. Checkpoints are written whole and
      named by their content, and both come to the same record: only time is lost.
    """

    def workplace(self, config: RunConfig) -> Path:
        return self.folder / "working" / config.identity

    def predictions(self, config: RunConfig) -> Path:
        return self.folder / "predictions" / config.identity

    def failure(self, config: RunConfig) -> Path:
        return self.folder / "failed" / f"{config.identity}.txt"

    @property
    def claims(self) -> Path:
        return self.folder / ".claims"

    def name(self) -> str:
        """What only those who see this very folder can know."""
        if not self.claims.exists():
            write_atomically(self.claims, secrets.token_hex(16).encode())
        return self.claims.read_text()

    @contextlib.contextmanager
    def claimed(self, config: RunConfig, wait: Callable[[], None]) -> Iterator[None]:
        """Within the block no other process has the run; calls ``wait`` now and then while another has it.

        A run is one byte in a file that all lock parts of. The lock ends with the process, however that ends.
        """
        with self.claims.open("r+b") as file:
            while not _locked(file, int(config.identity[:15], 16)):
                wait()
                time.sleep(0.2)
            yield

    def look(self, config: RunConfig) -> RunRecord | None:
        """As :meth:`find`, but a network file system is kept from answering by what it remembers."""
        with os.scandir(self.folder):  # opening a folder asks the server anew what is in it
            return self.find(config)

    def keep(self, record: RunRecord) -> None:
        """Predictions, then the record: whatever is left of the run after it is only litter."""
        made, kept = self.workplace(record.config) / "predictions", self.predictions(record.config)
        if made.is_dir():
            shutil.rmtree(kept, ignore_errors=True)  # of an attempt that was killed here
            kept.parent.mkdir(parents=True, exist_ok=True)
            made.replace(kept)
        self.save(record)
        shutil.rmtree(self.workplace(record.config), ignore_errors=True)
        self.failure(record.config).unlink(missing_ok=True)

    def found_some(self, configs: Sequence[RunConfig], failed: Mapping[str, str]) -> list[RunRecord]:
        """As :meth:`found`; an error where all there is are failures."""
        records = self.found(configs)
        if failed and not records:
            why = next(iter(failed.values()))
            raise ChildProcessError(f"every run failed, such as: {why} See {self.folder / 'failed'}")
        return records

    def fail(self, config: RunConfig, why: str) -> None:
        path = self.failure(config)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, f"{config.to_dict()}\n\n{why}\n".encode())


def _locked(file: IO[bytes], place: int) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # there are no locks here
        pass
    return True


@dataclass
class Outcome:
    records: list[RunRecord]
    failed: dict[str, str] = field(default_factory=dict)
    """Identity → the last line of what was said."""


class Tally:
    """What is still to run, and what became of the runs that were given out; whatever runs them."""

    def __init__(
        self, configs: Sequence[RunConfig], store: SweepStore, done: Callable[[RunRecord], None] | None
    ) -> None:
        self.configs, self.store, self.done = configs, store, done
        missing = {c.identity: c for c in store.missing(configs)}
        for config in missing.values():
            check(config)
        self.waiting = deque(missing.values())
        self.name = store.name() if missing else ""
        self.failed: dict[str, str] = {}
        self._deaths = Counter[str]()

    def ended(self, config: RunConfig, failure: str | None) -> None:
        """A worker says so (see :func:`settle`)."""
        if failure is not None:
            self.failed[config.identity] = failure.splitlines()[-1]
        elif (record := self.store.look(config)) is None:
            self.failed[config.identity] = f"a worker recorded it, but not in {self.store.folder}"
        elif self.done:
            self.done(record)

    def lost(self, config: RunConfig, how: str) -> None:
        """Its worker was killed, or the run took it down: tried again, with an end to it."""
        self._deaths[config.identity] += 1
        if self._deaths[config.identity] < ATTEMPTS:
            self.waiting.append(config)
        else:
            why = f"its process ended {ATTEMPTS} times ({how})"
            self.failed[config.identity] = why
            with contextlib.suppress(OSError):
                self.store.fail(config, why)

    def outcome(self) -> Outcome:
        return Outcome(self.store.found(self.configs), self.failed)


def settle(
    config: RunConfig, store: SweepStore, device: str, tell: Callable[[int, str], None], how: dict[str, Any]
) -> str | None:
    """A worker's part: one run, to its record or to a failure that is written down and returned.

    The checkpoints of a run that fails stay: the next attempt resumes from them.
    """
    with store.claimed(config, lambda: tell(0, "waits: another process has it")):
        try:
            if store.look(config) is None:  # else its worker was killed after it had saved it
                place = store.workplace(config)
                store.keep(run(config, device, tell, place, how, going_on="the same command again"))
        except Exception as error:
            if not store.missing([config]):  # another did it meanwhile: there are no locks here
                return None
            said = (str(error).splitlines() or [""])[0]
            text = f"{''.join(traceback.format_exception(error))}\n{type(error).__name__}: {said}"
            with contextlib.suppress(OSError):  # a full disk
                store.fail(config, text)
            return text
    return None


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
    that fails is written down with its error and the others go on; one whose process is killed resumes from
    its last checkpoint in another, up to :data:`ATTEMPTS` times. The same call again does what is missing,
    failed runs included, each from its last checkpoint. Killed itself, this process leaves workers that end
    at their next sign of life.
    """
    tally = Tally(configs, store, done)
    workers = [Worker(device, store, dict(how or {})) for device in devices[: len(tally.waiting)]]
    try:
        for worker in workers:
            worker.give(tally.waiting)
        while any(worker.job for worker in workers):
            for worker in _ready(workers):
                job, message = worker.job, worker.hear()
                assert job is not None
                if message is None:
                    tally.lost(job, f"exit code {worker.code}")
                    worker.restart()
                elif message[0] == "told":
                    if tell:
                        tell(job, *message[1:])
                    continue
                else:
                    tally.ended(job, message[1])
                worker.give(tally.waiting)
    finally:
        for worker in workers:
            worker.end()
    return tally.outcome()


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
            while (message := self.hear()) is not None:
                if message[0] != "told":  # it was just done, and will not end by the signal
                    break
        self.pipe.close()  # if it waits for more
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
        except (EOFError, OSError):
            return
        try:
            failure = settle(config, store, device, tell, how)
        except KeyboardInterrupt:  # asked to end; where it was is saved
            return
        with contextlib.suppress(OSError):  # nobody is there any more
            pipe.send(("ended", failure))
