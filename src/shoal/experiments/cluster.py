"""Runs on a Ray cluster, with the same records and guarantees as on one machine."""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import shoal
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.execute import Lost, count_jobs, run_one
from shoal.experiments.store import Store

QUEUED = 1000
"""Most runs that are submitted to Ray at a time, including active ones."""
GRACE = 15.0
"""Seconds in which cancelled runs may save their state."""


class RayPool:
    """Each run is a task of a Ray cluster: of the one at ``RAY_ADDRESS``, else of one that is started here.

    A run reserves one CPU and, if the cluster has GPUs and ``device`` is not ``"cpu"``, one GPU. The folder
    of the store must be shared by all nodes: records, checkpoints and progress go through it. Ray itself
    retries nothing; if this process is killed, Ray ends its tasks.
    """

    def __init__(
        self, store: Store, device: str | None, jobs: int | None, options: Mapping[str, Any]
    ) -> None:
        self.store, self.size = Store(store.folder.absolute(), weights=store.weights), jobs or QUEUED
        self.ray, self.active = load_ray(), dict[Future[None], Any]()
        self.connected_before = self.ray.is_initialized()
        if not self.connected_before:
            _connect(self.ray)
        gpus = int(self.ray.cluster_resources().get("GPU", 0) >= 1)
        if device not in (None, "cpu", "cuda") or (device == "cuda" and not gpus):
            self.close()
            why = "cannot be chosen, as Ray assigns the GPUs" if gpus else "is on no node of the cluster"
            raise InputError(f"{device!r} {why}; use 'cpu' or 'cuda'.", "device")
        gpus *= device != "cpu"
        self.store.folder.mkdir(parents=True, exist_ok=True)
        variables = {k: v for k, v in os.environ.items() if k.startswith("SHOAL_")}
        # A worker sees no GPU but its own.
        self.args = "cuda:0" if gpus else "cpu", options, os.getcwd(), shoal.__version__, variables
        self.task = self.ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_work)

    def submit(self, config: RunConfig) -> Future[None]:
        task = self.task.remote(config, self.store, *self.args)
        future: Future[None] = task.future()
        self.active[future] = task
        return future

    def result(self, future: Future[None]) -> None:
        del self.active[future]
        try:
            future.result()
        except Exception as error:
            cause = getattr(error, "cause", error)  # what the task has raised
            lost = isinstance(cause, self.ray.exceptions.RayError)
            raise (Lost(type(cause).__name__) if lost else cause) from error

    def stop(self) -> None:
        tasks = list(self.active.values())
        for task in tasks:
            self.ray.cancel(task)
        if tasks:
            self.ray.wait(tasks, num_returns=len(tasks), timeout=GRACE)

    def close(self) -> None:
        if not self.connected_before:
            self.ray.shutdown()


def load_ray() -> Any:
    """Ray, without messages about usage statistics and killed workers."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise InputError(f"the Ray engine requires Ray ({error}): pip install 'shoal[ray]'.") from error


def _connect(ray: Any) -> None:
    address = os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "CRITICAL"}
    if address is None:
        options |= {"address": "local", "num_cpus": count_jobs("cpu"), "include_dashboard": False}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**options)
    except (OSError, RuntimeError, ValueError, ImportError, ray.exceptions.RayError) as error:
        what = f"no Ray cluster at address {address!r}" if address else "Ray could not be started here"
        raise InputError(f"{what}: {(str(error).splitlines() or [repr(error)])[0]}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # which Ray has replaced


def _work(
    config: RunConfig, store: Store, device: str, options: Any, home: str, version: str, variables: Any
) -> None:
    """What a Ray worker does. An InputError ends the whole execution: the node cannot do any run."""
    import torch

    node = f"node {os.uname().nodename}"
    if shoal.__version__ != version:
        raise InputError(f"{node} has shoal {shoal.__version__}, not {version}.")
    if not store.folder.is_dir():
        raise InputError(f"{node} cannot access {store.folder}, which must be shared by all nodes.")
    os.environ.update(variables)
    with suppress(OSError):  # relative paths then mean the same as in the process that was started
        os.chdir(home)
    if device == "cpu":  # a run per core gains more than several threads per run
        torch.set_num_threads(1)
    run_one(config, store, device, options)
