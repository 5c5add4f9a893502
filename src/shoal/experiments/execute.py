"""One way to run: ``execute(configs, store, executor)`` does what is missing in the store."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.run import Turns, check
from shoal.experiments.store import Store
from shoal.training.processes import pick_device
from shoal.training.stopping import Interrupted, Signals
from shoal.training.world import world

ATTEMPTS = 3
"""How often a run may take its process down with it."""
PARALLEL = 10
"""Runs in parallel on a CUDA device."""
STREAMS = 32
"""So many has torch; then the first comes again, and two runs on one stream break each other's graphs."""
FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))

Tell = Callable[[RunConfig, int, str], None]
Done = Callable[[RunRecord], None]


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


class Executor(Protocol):
    """Where runs happen; what comes out is the same everywhere."""

    def run(self, tally: Tally, how: dict[str, Any], tell: Tell | None) -> None:
        """Does the runs that wait in ``tally`` and reports to it what became of them."""


def execute(
    configs: Sequence[RunConfig],
    store: Store,
    executor: Executor | None = None,
    *,
    engine: str = "local",
    device: str | None = None,
    jobs: int | None = None,
    progress: bool = False,
    how: Mapping[str, Any] | None = None,
    tell: Tell | None = None,
    done: Done | None = None,
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
        executor: executor, from :func:`make_executor` (default: one for the next three options).
        engine: ``local`` (this machine) or ``ray``.
        device: device, such as ``cpu`` or ``cuda`` (default: CUDA if available).
        jobs: number of runs in parallel (default: one per core, or one per GPU).
        progress: show progress on stderr.
        how: options that do not change results, see :func:`shoal.experiments.run.prepare`.
        tell: called with a run, its step and a note on progress.
        done: called with each new record, including those of failed runs.

    Returns:
        The records, and the errors of failed runs.
    """
    executor = executor or make_executor(engine, device=device, jobs=jobs)
    if progress:
        from shoal.experiments.display import Display

        display = Display(configs, len({c.identity for c in store.missing(configs)}))
        tell, done = display.tell, display.done
    tally = Tally(configs, store, done)
    try:
        if tally.waiting:
            executor.run(tally, dict(how or {}), tell)
    except KeyboardInterrupt as stop:
        number = getattr(stop, "signal", None) or signal.SIGINT
        resume = f"Resume with: {store.resume}" if store.weights else "The same command resumes."
        raise Interrupted(f"interrupted. Finished runs are saved. {resume}", number) from stop
    return Outcome(store.found(configs), tally.failed)


class Tally:
    """What is still to run and what became of the rest, whoever runs them."""

    def __init__(self, configs: Sequence[RunConfig], store: Store, done: Done | None) -> None:
        self.store, self.done = store, done
        missing = {c.identity: c for c in store.missing(configs)}
        for config in missing.values():
            check(config)
        self.waiting = deque(missing.values())
        self.name = store.name() if missing else ""
        self.failed: dict[str, str] = {}
        self._deaths = Counter[str]()

    def ended(self, config: RunConfig, error: str | None) -> None:
        """A run was kept, or failed (see :func:`settle`)."""
        record = self.store.find(config, fresh=True) if error is None else None
        if record is None:
            error = error or f"a worker recorded it, but not in {self.store.folder}"
            if any(words in error for words in FULL):
                why = (
                    f"{error}. Finished runs are saved; free some disk space, then resume with: "
                    f"{self.store.resume}"
                )
                raise OSError(errno.ENOSPC, why)
            self.failed[config.identity] = error
            record = self.store.look(config) or self.store.fail(config, error)
        if self.done:
            self.done(record)

    def lost(self, config: RunConfig, how: str) -> None:
        """Its worker was killed, or the run took it down: tried again, with an end to it."""
        self._deaths[config.identity] += 1
        if self._deaths[config.identity] < ATTEMPTS:
            self.waiting.append(config)
        else:
            why = f"its process ended {ATTEMPTS} times ({how})"
            self.store.fail(config, why)
            self.ended(config, why)


def settle(
    config: RunConfig,
    store: Store,
    device: str | None,
    tell: Callable[[int, str], None],
    how: Mapping[str, Any],
) -> str | None:
    """One run to its record, or to the record of its failure; returns that failure in one line.

    The checkpoints of a run that fails stay: the next attempt resumes from them.
    """
    with store.claimed(config, lambda: tell(0, "waiting for another process")):
        try:
            if store.find(config, fresh=True) is None:  # else its worker was killed after it had saved it
                store.keep(store.run(config, device, tell, how))
        except Exception as error:
            return _failed(config, store, error)
    return None


def _failed(config: RunConfig, store: Store, error: Exception) -> str | None:
    if not store.missing([config]):  # another did it meanwhile: there are no locks here
        return None
    line = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    store.fail(config, line, "".join(traceback.format_exception(error)))
    return line


def make_executor(engine: str = "local", *, device: str | None = None, jobs: int | None = None) -> Executor:
    """Create an executor of runs, on this machine or on a Ray cluster.

    Args:
        engine: ``local`` (worker processes or CUDA streams) or ``ray``.
        device: device, such as ``cpu`` or ``cuda`` (default: CUDA if available).
        jobs: number of runs in parallel (default: one per core; on CUDA 10, or one per GPU if there are
            several).

    Raises:
        InputError: Ray is not installed.
    """
    from shoal.experiments import cluster  # which imports this module

    if engine == "ray":
        cluster.load_ray()
        return cluster.Ray(device, jobs)
    return Local(device, jobs)


@dataclass(frozen=True)
class Local:
    """This machine: the executor that suits the runs that are missing."""

    device: str | None = None
    jobs: int | None = None

    def run(self, tally: Tally, how: dict[str, Any], tell: Tell | None) -> None:
        import torch

        count, cuda = len(tally.waiting), pick_device(self.device).type == "cuda"
        several = cuda and self.device is None and torch.cuda.device_count() > 1
        executor: Executor = Workers(self.device, self.jobs)
        if count == 1 or self.jobs == 1 or (not cuda and count_cores() == 1 and self.jobs is None):
            executor = InProcess(self.device)
        elif cuda and not several:
            executor = Streams(self.device, self.jobs or PARALLEL)
        executor.run(tally, how, tell)


@dataclass(frozen=True)
class InProcess:
    """One run after the other, here."""

    device: str | None = None

    def run(self, tally: Tally, how: dict[str, Any], tell: Tell | None) -> None:
        while tally.waiting:
            config = tally.waiting.popleft()
            tally.ended(config, settle(config, tally.store, self.device, _telling(tell, config), how))


def _telling(tell: Tell | None, config: RunConfig) -> Callable[[int, str], None]:
    return partial(tell, config) if tell else lambda step, note: None


@dataclass(frozen=True)
class Streams:
    """In one process, each run on a CUDA stream of its own, so that their small kernels overlap.

    A run that Python drives kernel by kernel gains nothing from others, and one whose examples do not fit
    in the device's memory may need all of it: such a run has the device to itself.
    """

    device: str | None = None
    jobs: int = PARALLEL

    def run(self, tally: Tally, how: dict[str, Any], tell: Tell | None) -> None:
        import torch

        device, store, stop = pick_device(self.device), tally.store, None
        count = min(self.jobs, STREAMS, len(tally.waiting))
        free = [torch.cuda.Stream(device) for _ in range(count)]
        active: dict[str, tuple[RunConfig, Iterator[Turns], Turns | None, Any]] = {}
        with Signals() as signals, world(device, bool(how.get("deterministic"))):
            while active or (tally.waiting and not signals.asked):
                alone = any(turns is not None and not _small(turns) for _, _, turns, _ in active.values())
                if tally.waiting and free and not alone and not signals.asked:
                    config = tally.waiting.popleft()
                    if store.claim(config):
                        steps = _steps(config, store, self.device, _telling(tell, config), how, signals)
                        active[config.identity] = config, steps, None, free.pop()
                    else:
                        tally.waiting.append(config)
                        time.sleep(0 if active else 0.2)
                for identity, (config, steps, turns, stream) in list(active.items()):
                    error = None
                    try:
                        with torch.cuda.stream(stream):
                            now = next(steps)
                        if turns is None:  # what its data were made from may be another run's too
                            stream.synchronize()
                        active[identity] = config, steps, now, stream
                        continue
                    except StopIteration:
                        pass
                    except Interrupted as asked:  # the others too shall save where they are
                        stop = asked
                    except Exception as problem:
                        error = _failed(config, store, problem)
                    del active[identity]
                    free.append(stream)
                    store.claim(config, lock=False)
                    if stop is None or error is not None or store.find(config) is not None:
                        tally.ended(config, error)
        if stop is not None or tally.waiting:
            raise stop or KeyboardInterrupt


def _steps(
    config: RunConfig, store: Store, device: str | None, tell: Any, how: Mapping[str, Any], signals: Signals
) -> Iterator[Turns]:
    """A claimed run in small steps, to its record in the store."""
    from shoal.experiments import baselines

    if store.find(config, fresh=True) is not None:
        return
    if baselines.is_one(config) or type(store).run is not Store.run:
        store.keep(store.run(config, device, tell, how))
        return
    place = store.workplace(config)
    turns = Turns(config, device, tell, place, how, resume_hint=store.resume, weights=store.weights)
    yield turns
    for _ in turns.take(signals):
        yield turns
    assert turns.record is not None
    store.keep(turns.record)


def _small(turns: Turns) -> bool:
    training = turns.training
    return training is None or (training.unroll > 0 and training.gathers)


def count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Workers:
    """Worker processes on this machine: one per core, or one per CUDA device.

    A worker saves its record itself, so that nothing depends on this process being there to take it. Killed
    itself, this process leaves workers that end at their next sign of life.
    """

    device: str | None = None
    jobs: int | None = None

    def run(self, tally: Tally, how: dict[str, Any], tell: Tell | None) -> None:
        workers = [Worker(device, tally.store, how) for device in self._devices(len(tally.waiting))]
        try:
            for worker in workers:
                worker.give(tally.waiting)
            while busy := [w for w in workers if w.job]:
                ready = wait([w.pipe for w in busy])
                for worker in (w for w in busy if w.pipe in ready):
                    job, message = worker.job, worker.receive()
                    assert job is not None
                    if message is None:
                        tally.lost(job, f"exit code {worker.process.exitcode}")
                        worker.start()
                    elif len(message) == 2:
                        if isinstance(message[1], Warning):
                            warnings.warn(message[1], stacklevel=2)
                        elif tell:
                            tell(job, *message)
                        continue
                    else:
                        worker.job = None
                        tally.ended(job, message[0])
                    worker.give(tally.waiting)
        finally:
            for worker in workers:
                if worker.job:
                    worker.process.terminate()
            for worker in workers:
                worker.end()

    def _devices(self, runs: int) -> list[str]:
        """One for each worker: all CUDA devices in turn, or the CPU as often as there are cores."""
        import torch

        if pick_device(self.device).type == "cpu":
            cores = count_cores()
            # Sharing cores beats a second round in which some of them idle.
            default = runs if cores < runs < 2 * cores else cores
            return ["cpu"] * min(self.jobs or default, runs)
        every = [self.device] if self.device else [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        return [every[n % len(every)] for n in range(min(self.jobs or len(every), runs))]


class Worker:
    """A process that runs what it is given, and what it is running."""

    def __init__(self, device: str, store: Store, how: dict[str, Any]) -> None:
        self.device, self.store, self.how = device, store, how
        self.job: RunConfig | None = None
        self.start()

    def start(self) -> None:
        # Not "fork": a forked child may inherit a lock that a torch thread holds, and cannot use CUDA.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        args = (theirs, os.getpid(), self.device, self.store, self.how)
        self.process = context.Process(target=_serve, args=args, daemon=True)
        with _inherited(one_thread=self.device == "cpu"), _without_main(self.store):
            self.process.start()
        theirs.close()  # so that its end is seen here

    def give(self, waiting: deque[RunConfig]) -> None:
        self.job = waiting.popleft() if waiting else None
        if self.job:
            with contextlib.suppress(OSError):  # killed while idle: `receive` will find out
                self.pipe.send(self.job)

    def receive(self) -> tuple[Any, ...] | None:
        """A step and a note, or the error (``None`` where it was kept) of a run that ended.

        ``None`` where the process has ended.
        """
        try:
            message: tuple[Any, ...] = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return None
        return message

    def end(self) -> None:
        if self.job:
            while (message := self.receive()) is not None:
                if len(message) == 1:  # it was just done, and will not end by the signal
                    break
        self.pipe.close()  # if it waits for more
        self.process.join()


@contextlib.contextmanager
def _inherited(one_thread: bool) -> Iterator[None]:
    """A process started in this block does not hear Ctrl-C; with ``one_thread`` it computes with one.

    Ctrl-C reaches the whole group, and the parent decides. A run per core gains more than several threads
    per run.
    """
    before, mask = os.environ.get("OMP_NUM_THREADS"), getattr(signal, "pthread_sigmask", None)  # Windows
    blocked = mask(signal.SIG_BLOCK, {signal.SIGINT}) if mask else None
    if one_thread:
        os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        os.environ.pop("OMP_NUM_THREADS", None)
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before
        if mask:
            mask(signal.SIG_SETMASK, blocked)


@contextlib.contextmanager
def _without_main(store: Store) -> Iterator[None]:
    """A process started in this block does not import the user's script, which would start it all again.

    Python does that for what a script defines; runs are plain data and need nothing of it.
    """
    main = sys.modules["__main__"]
    names = [name for name in ("__file__", "__spec__") if name in main.__dict__]
    hidden: dict[str, Any] = {name: main.__dict__[name] for name in names}
    if type(store).__module__ == "__main__":
        hidden = {}
    main.__dict__.update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        main.__dict__.update(hidden)


def _serve(pipe: Connection, parent: int, device: str, store: Store, how: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def tell(step: int, note: str | Warning) -> None:
        try:
            if os.getppid() == parent:
                pipe.send((step, note))
                return
        except OSError:
            pass
        os._exit(1)  # nobody is there any more; what was saved will be resumed

    def warn(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        """To be shown by the process that users started, in its way and each once."""
        tell(0, message if isinstance(message, Warning) else category(message))

    warnings.showwarning = warn
    while True:
        try:
            config: RunConfig = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            error = settle(config, store, device, tell, how)
        except KeyboardInterrupt:  # asked to end; where it was is saved
            return
        with contextlib.suppress(OSError):  # nobody is there any more
            pipe.send((error,))
