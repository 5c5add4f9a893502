"""One way to run: ``execute(configs, store, executor)`` does what is missing in the store."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.errors import InputError
from shoal.experiments import cluster, sweep
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.sweep import SweepStore as Store

Tell = Callable[[RunConfig, int, str], None]
Done = Callable[[RunRecord], None]


@dataclass
class Outcome:
    """The records of all runs that came to their end, and for the others what went wrong."""

    records: list[RunRecord]
    failed: dict[str, str] = field(default_factory=dict)
    """Identity → the last line of the error."""


class Executor(Protocol):
    """Where runs happen; what comes out is the same everywhere."""

    def run(
        self,
        configs: Sequence[RunConfig],
        store: Store,
        how: Mapping[str, Any],
        tell: Tell | None,
        done: Done | None,
    ) -> dict[str, str]:
        """Does the runs that the store lacks; returns those that failed."""


@dataclass(frozen=True)
class Workers:
    """Worker processes on this machine: one that is killed costs one retry."""

    device: str | None = None
    jobs: int | None = None

    def run(self, configs: Any, store: Any, how: Any, tell: Any, done: Any) -> dict[str, str]:
        devices = _devices(self.device, self.jobs)
        return sweep.sweep(configs, store, devices=devices, how=how, tell=tell, done=done).failed


@dataclass(frozen=True)
class Ray:
    """Tasks of a Ray cluster."""

    device: str | None = None
    jobs: int | None = None
    address: str | None = None
    gpus_per_run: float | None = None
    cpus_per_run: float | None = None

    def run(self, configs: Any, store: Any, how: Any, tell: Any, done: Any) -> dict[str, str]:
        cpus = 1.0 if self.cpus_per_run is None else self.cpus_per_run
        where: dict[str, Any] = {"address": self.address, "device": self.device, "jobs": self.jobs}
        where |= {"gpus": self.gpus_per_run, "cpus": cpus}
        return cluster.sweep(configs, store, **where, how=how, tell=tell, done=done).failed


def make_executor(
    engine: str = "local",
    *,
    device: str | None = None,
    jobs: int | None = None,
    address: str | None = None,
    gpus_per_run: float | None = None,
    cpus_per_run: float | None = None,
) -> Executor:
    """``local`` (worker processes, CUDA streams) or ``ray``; checked before any work."""
    if engine == "ray":
        cluster.load_ray()
        return Ray(device, jobs, address, gpus_per_run, cpus_per_run)
    for name, value in (("address", address), ("gpus_per_run", gpus_per_run), ("cpus_per_run", cpus_per_run)):
        if value is not None:
            raise InputError(f"{name} belongs to engine='ray'.")
    return Workers(device, jobs)


def execute(
    configs: Sequence[RunConfig],
    store: Store,
    executor: Executor | None = None,
    *,
    how: Mapping[str, Any] | None = None,
    tell: Tell | None = None,
    done: Done | None = None,
) -> Outcome:
    """Runs what ``store`` lacks. The same call again does what is missing, failed runs included."""
    failed = (executor or make_executor()).run(configs, store, how or {}, tell, done)
    return Outcome(store.found(configs), failed)


def _devices(device: str | None, jobs: int | None) -> list[str]:
    """One for each worker: all CUDA devices in turn, or the CPU as often as there are cores."""
    import torch

    from shoal.training.processes import pick_device

    if pick_device(device).type == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return ["cpu"] * (jobs or cores)
    every = [device] if device else [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    return [every[n % len(every)] for n in range(jobs or len(every))]
