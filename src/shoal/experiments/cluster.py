"""Runs on a Ray cluster, with the same records and guarantees as on one machine."""

from __future__ import annotations

import importlib
import os
import signal
import threading
from contextlib import suppress
from typing import Any

import shoal
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.execute import End, count_jobs, run_in_worker
from shoal.experiments.store import Store
from shoal.training.stopping import Interrupted

QUEUED = 1000
"""Most runs that are submitted to Ray at a time, including active ones."""
GRACE = 15.0
"""Seconds in which cancelled runs may save their state."""


class RayWorkers:
    """Each run is a task of a Ray cluster: of the one at ``RAY_ADDRESS``, else of one that is started here.

    A run reserves one CPU and, if the cluster has GPUs and ``device`` is not ``"cpu"``, one GPU. The folder
    of the store must be shared by all nodes: records, checkpoints and progress go through it. Ray itself
    retries nothing; if this process is killed, Ray ends its tasks.
    """

    def __init__(self, store: Store, device: str | None, jobs: int | None, how: dict[str, Any]) -> None:
        self.ray = load_ray()
        self.connected_before = self.ray.is_initialized()
        if not self.connected_before:
            _connect(self.ray)
        try:
            gpus = _gpus_per_run(self.ray, device)
        except InputError:
            self.close()
            raise
        variables = {k: v for k, v in os.environ.items() if k.startswith("SHOAL_")}
        store.folder.mkdir(parents=True, exist_ok=True)
        # A worker sees no GPU but its own.
        self.args = store, "cuda:0" if gpus else "cpu", how, os.getcwd(), shoal.__version__, variables
        self.task = self.ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_work)
        self.active: dict[Any, RunConfig] = {}
        self.most = jobs or QUEUED

    def free(self) -> bool:
        return len(self.active) < self.most

    def submit(self, config: RunConfig) -> None:
        self.active[self.task.remote(config, *self.args)] = config

    def wait(self) -> list[End]:
        self.ray.wait(list(self.active), timeout=1.0)
        ready, _ = self.ray.wait(list(self.active), num_returns=len(self.active), timeout=0)
        return [self._end(ref, self.active.pop(ref)) for ref in ready]

    def _end(self, ref: Any, config: RunConfig) -> End:
        errors = self.ray.exceptions
        try:
            end: End = self.ray.get(ref)
            return end
        except errors.RayTaskError as error:
            if isinstance(error.cause, OSError | InputError | ImportError):  # this concerns all runs
                raise error.cause from None
            return End(config, f"{type(error.cause).__name__}: {error.cause}", killed=True)
        except errors.RayError as error:
            return End(config, type(error).__name__, killed=True)

    def stop(self) -> None:
        for ref in self.active:
            self.ray.cancel(ref)
        if self.active:
            self.ray.wait(list(self.active), num_returns=len(self.active), timeout=GRACE)

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
        reason = (str(error).splitlines() or [repr(error)])[0].rstrip(".")
        raise InputError(f"{what}: {reason}.") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # which Ray has replaced


def _gpus_per_run(ray: Any, device: str | None) -> int:
    if device not in (None, "cpu", "cuda"):
        raise InputError(f"{device!r} cannot be chosen, Ray assigns the GPUs; use 'cpu' or 'cuda'.", "device")
    gpus = ray.cluster_resources().get("GPU", 0) >= 1
    if device == "cuda" and not gpus:
        raise InputError("no node of the cluster has a GPU; use 'cpu'.", "device")
    return int(gpus and device != "cpu")


def _work(
    config: RunConfig,
    store: Store,
    device: str,
    how: dict[str, Any],
    home: str,
    version: str,
    variables: dict[str, str],
) -> End:
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
    try:
        return run_in_worker(config, store, device, how)
    except Interrupted:
        return End(config, "it was stopped by a signal", killed=True)
