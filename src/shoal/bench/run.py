"""RunConfig → RunRecord, one at a time or many at once."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import queue
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

import shoal
from shoal.algorithms import algorithm_class, settings_of
from shoal.bench.config import OPTIMIZERS, RunConfig
from shoal.bench.record import Measurement, RunRecord, Store
from shoal.data import sets
from shoal.data.batch import DomainData
from shoal.errors import check_names
from shoal.models import build
from shoal.training.engine import pick_device
from shoal.training.loop import Diverged, Point, Training
from shoal.training.options import Options

Tell = Callable[[int, str], None]


@lru_cache(maxsize=1)
def _loaded(dataset: str, options: str) -> DomainData:
    """The last dataset is kept: neighbouring runs of a comparison mostly share it."""
    return sets.load(dataset, **json.loads(options))


def prepare(config: RunConfig, device: str | None = None, tell: Tell | bool = False) -> Training:
    """The training that a configuration describes, checked and ready."""
    data = _loaded(config.dataset, json.dumps(dict(config.data_options), sort_keys=True))
    model = build(
        config.model or data.model,
        input_shape=data.input_shape,
        classes=data.classes,
        seed=config.seed,
        **config.model_options,
    )
    optimizer = getattr(torch.optim, OPTIMIZERS[config.optimizer])
    options = Options(
        steps=config.steps,
        batch_size=config.batch_size,
        domains_per_step=config.domains_per_step,
        settings=config.settings,
        optimizer=lambda params: optimizer(params, **config.optimizer_options),
        draw=config.draw,  # type: ignore[arg-type]
        seed=config.seed,
        warm_start=config.warm_start,
        eval_every=config.eval_every,
        eval_limit=config.eval_limit,
        select=config.select,  # type: ignore[arg-type]
        device=device,
        progress=tell,
    )
    return Training(config.algorithm, model, data, options, label=config.name)


def run(config: RunConfig, device: str | None = None, tell: Tell | bool = False) -> RunRecord:
    """Trains and records. A loss that is no longer finite is a result too, not an error."""
    training = prepare(config, device, tell)
    status, error = "finished", ""
    try:
        training.run()
    except Diverged as stop:
        status, error = "diverged", str(stop)
    return record_of(config, training, status, error)


def record_of(config: RunConfig, training: Training, status: str = "finished", error: str = "") -> RunRecord:
    history = training.history
    chosen = training.best[0] if training.best else (history[-1] if history else None)
    return RunRecord(
        config=config,
        status=status,
        history=tuple(_measurement(p) for p in history),
        selected=history.index(chosen) if chosen else -1,
        rule="best on validation" if training.best else "last step",
        seconds=round(training.seconds, 3),
        environment=environment(training.device),
        error=error,
        warm_up=tuple(_measurement(p) for p in training.warm.history) if training.warm else (),
    )


def _measurement(point: Point) -> Measurement:
    scores = {split: s.to_dict() for split, s in point.scores.items()}
    return {"step": point.step, "passes": point.passes, "loss": point.loss, "scores": scores}


def environment(device: torch.device) -> dict[str, str]:
    cuda = device.type == "cuda"
    return {
        "shoal": shoal.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "threads": str(torch.get_num_threads()),
    }


def run_all(
    configs: Sequence[RunConfig],
    store: Store,
    *,
    device: str | None = None,
    processes: int | None = None,
    tell: Callable[[RunConfig, int, str], None] | None = None,
    done: Callable[[RunRecord], None] | None = None,
) -> list[RunRecord]:
    """The records of ``configs``, running what the store does not hold yet, each saved as it finishes.

    Several ``processes`` run side by side: by default one a core on the CPU, each with one thread, since a
    small network gains more from a core of its own than from a second thread; on CUDA one. Ctrl-C keeps
    what has finished; the same call then does the rest.
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
        for record in runner(missing, device, min(count, len(missing)), tell):
            store.save(record)
            if done:
                done(record)
    found = [store.find(c) for c in configs]
    return [_labelled(r, c) for r, c in zip(found, configs, strict=True) if r is not None]


def check(config: RunConfig) -> None:
    """Raises InputError for a configuration with a name that is not known, before others are started."""
    sets.registry.module(config.dataset)
    algorithm = algorithm_class(config.algorithm)
    check_names(f"setting of {algorithm.__name__}:", config.settings, settings_of(algorithm))


def _labelled(record: RunRecord, config: RunConfig) -> RunRecord:
    return RunRecord(**{**record.__dict__, "config": config})


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _alone(
    configs: Sequence[RunConfig], device: str | None, processes: int, tell: Any
) -> Iterator[RunRecord]:
    for config in configs:
        yield run(config, device, partial(tell, config) if tell else False)


# What a worker process keeps for itself: the queue on which it says how far it is.
_news: Any = None


def _begin(news: Any, one_thread: bool) -> None:
    global _news
    _news = news
    # Ctrl-C reaches the whole group; the parent decides, and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if one_thread:
        torch.set_num_threads(1)


def _work(number: int, config: RunConfig, device: str | None) -> RunRecord:
    return run(config, device, lambda step, note: _news.put((number, step, note)))


def _side_by_side(
    configs: Sequence[RunConfig], device: str | None, processes: int, tell: Any
) -> Iterator[RunRecord]:
    # Not "fork": a forked child may inherit a lock that a torch thread holds, and cannot use CUDA.
    context = multiprocessing.get_context("spawn")
    one_thread = pick_device(device).type == "cpu"
    with context.Manager() as manager, _one_thread_each(one_thread):
        news = manager.Queue()
        pool = ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(news, one_thread))
        try:
            waiting: set[Future[RunRecord]] = {
                pool.submit(_work, number, config, device) for number, config in enumerate(configs)
            }
            while waiting:
                finished, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                try:
                    while tell:
                        number, step, note = news.get_nowait()
                        tell(configs[number], step, note)
                except queue.Empty:
                    pass
                for future in finished:
                    yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list((pool._processes or {}).values()):
                process.terminate()
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
