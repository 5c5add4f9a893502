"""Runs on a Ray cluster: the runs, records and guarantees of worker processes."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import shoal
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.execute import Tally, Tell, count_cores, settle
from shoal.experiments.run import packages
from shoal.experiments.store import Store
from shoal.training.progress import losses_note

QUEUED = 1000
"""So many runs are handed to Ray at a time, those at work included."""
LOOK = 1.0
"""Seconds between two looks at how far runs are."""
GRACE = 10.0
"""Seconds in which runs that are cancelled may save where they are."""
ANSWER = 120.0
"""Seconds in which every node must answer at the start."""


class Needs(NamedTuple):
    """What Ray sets aside for a run."""

    cpus: float
    gpus: float

    def fit(self, node: Mapping[str, Any]) -> bool:
        has = node["Resources"]
        return has.get("CPU", 0) >= self.cpus and has.get("GPU", 0) >= self.gpus


@dataclass(frozen=True)
class Ray:
    """Each run is a task of a Ray cluster.

    The cluster is that of the variable ``RAY_ADDRESS``. Without it Ray is started on this machine,
    and ended afterwards; a Ray that this process is connected to already is used and left as it is. A run
    gets one CPU and, where the cluster has some and ``device`` is not ``"cpu"``, one GPU. At most ``jobs``
    runs are with Ray at a time.

    The store's folder must be one and the same on all nodes: records, checkpoints and how far runs are go
    through it, so that nothing depends on this process or on any node. Ray itself retries nothing: a run
    whose worker or node is lost is handed to Ray again here, and resumes from its last checkpoint. Should the
    lost worker still be at work on a node that is only out of reach, the run's claim in the store (see
    :class:`Store`) makes the new one wait. If this process is killed, Ray ends its tasks.
    """

    device: str | None = None
    jobs: int | None = None

    def run(self, tally: Tally, how: dict[str, Any], tell: Tell | None) -> None:
        ray, store = load_ray(), tally.store
        with _connected(ray, os.environ.get("RAY_ADDRESS")):
            needs = _needs(ray, self.device)
            own = {k: v for k, v in os.environ.items() if k.startswith("SHOAL_")}
            where = "cuda:0" if needs.gpus else "cpu"  # a worker sees no GPU but its own
            job = Job(store, store.folder.absolute(), tally.name, where, how, os.getcwd(), own)
            _check_nodes(ray, needs, job, {k: v for c in tally.waiting for k, v in packages(c).items()})
            task = ray.remote(num_cpus=needs.cpus, num_gpus=needs.gpus, max_retries=0)(_work)
            _run(ray, task, job, tally, self.jobs or QUEUED, Watch(store, tell))


def load_ray() -> Any:
    """Ray, if it is installed; told to be quiet, which it must be before it is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")  # what it says of workers that are killed
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # or it announces a change to come
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise InputError(f"the Ray engine requires Ray ({error}): pip install 'shoal[ray]'.") from error


@contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    quiet = {"log_to_driver": False, "logging_level": "CRITICAL"}
    here = {"num_cpus": count_cores(), "include_dashboard": False, "object_store_memory": 100 * 2**20}
    before = signal.getsignal(signal.SIGTERM)
    _check_answers(address)
    try:
        ray.init(address or "local", **quiet, **({} if address else here))
    except (OSError, RuntimeError, ValueError, ImportError, ray.exceptions.RayError) as error:
        what = f"no Ray cluster at address {address!r}" if address else "Ray could not be started here"
        why = (str(error).splitlines() or [repr(error)])[0].rstrip(".")
        hint = "\nIf the cluster requires a token, set RAY_AUTH_MODE=token here as well." if address else ""
        raise InputError(f"{what}: {why}.{hint}") from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # Ray has put its own there
    try:
        yield
    finally:
        ray.shutdown()


def _check_answers(address: str | None) -> None:
    """Ray itself would try for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), 10).close()
        except (OSError, OverflowError) as error:
            raise InputError(f"no Ray cluster at address {address!r}: {error}.") from error


def _needs(ray: Any, device: str | None) -> Needs:
    if device not in (None, "cpu", "cuda"):
        raise InputError(f"{device!r} cannot be chosen, Ray assigns the GPUs; use 'cpu' or 'cuda'.", "device")
    some = ray.cluster_resources().get("GPU", 0) > 0
    return Needs(1, 1 if device == "cuda" or (device is None and some) else 0)


class Job(NamedTuple):
    """What all runs share, wherever they are done."""

    store: Store
    folder: Path
    name: str
    device: str
    how: dict[str, Any]
    home: str
    environment: dict[str, str]


def _check_nodes(ray: Any, needs: Needs, job: Job, added: dict[str, str]) -> None:
    """Every node on which runs may be done sees the store's folder, and has Shoal and packages ``added``."""
    nodes = {n["NodeID"]: n["NodeManagerHostname"] for n in ray.nodes() if n["Alive"] and needs.fit(n)}
    if not nodes:
        raise InputError(
            f"no node of the cluster has {needs.cpus:g} CPUs and {needs.gpus:g} GPUs, which a run requires; "
            "request less, or add nodes."
        )
    folder, name, version = str(job.folder), job.name, shoal.__version__

    def look() -> str:
        """Sent by value: a node without Shoal can run it."""
        from importlib import metadata

        try:
            import shoal.experiments.execute
        except Exception as error:
            return f"cannot import shoal ({error}): install it there, or where its Ray was started"
        if shoal.__version__ != version:
            return f"has shoal {shoal.__version__}, not {version}"
        for package, needed in added.items():
            try:
                there = metadata.version(package)
            except metadata.PackageNotFoundError:
                return f"lacks the package {package}, which adds what is to run: install it there"
            if there != needed:
                return f"has {package} {there}, not {needed}"
        try:
            same = shoal.experiments.execute.Store(folder).claims.read_text() == name
        except OSError:
            same = False
        return "" if same else f"cannot access {folder}, which must be a folder shared by all nodes"

    placed = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    task = ray.remote(num_cpus=0, max_retries=0)(look)
    asked = {task.options(scheduling_strategy=placed(i, soft=False)).remote(): i for i in nodes}
    ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER)
    wrong = []
    for ref, node in asked.items():
        try:
            problem = ray.get(ref, timeout=0)
        except ray.exceptions.GetTimeoutError:
            problem = f"did not respond within {ANSWER:.0f} s"
        except ray.exceptions.RayError:
            continue  # lost meanwhile
        if problem:
            wrong.append(f"node {nodes[node]} ({node[:8]}) {problem}.")
    if wrong:
        more = f" ({len(wrong) - 1} more nodes are not ready either)" if len(wrong) > 1 else ""
        raise InputError(wrong[0] + more)


def _work(config: RunConfig, job: Job) -> str | None:
    """What a Ray worker does; returns how it failed, if it did."""
    import torch

    store = job.store
    store.folder = job.folder
    if not store.claims.exists() or store.name() != job.name:  # a node that has come later
        raise InputError(
            f"node {os.uname().nodename} cannot access {job.folder}; it must be shared by all nodes."
        )
    os.environ.update(job.environment)
    with suppress(OSError):  # relative paths mean the same as where this was started, if they can
        os.chdir(job.home)
    if job.device == "cpu":  # a run per core gains more than several threads per run
        torch.set_num_threads(1)
    try:
        return settle(config, store, job.device, lambda step, note: None, job.how)
    except KeyboardInterrupt:  # asked to end; where it was is saved
        raise RuntimeError("it was stopped by a signal") from None


def _run(ray: Any, task: Any, job: Job, tally: Tally, most: int, watch: Watch) -> None:
    running: dict[Any, RunConfig] = {}
    try:
        while tally.waiting or running:
            while tally.waiting and len(running) < most:
                config = tally.waiting.popleft()
                running[task.remote(config, job)] = config
            ray.wait(list(running), timeout=LOOK)
            ready, _ = ray.wait(list(running), num_returns=len(running), timeout=0)
            for ref in ready:
                _hear(ray, ref, running.pop(ref), tally)
            watch.look(running.values())
    except BaseException:  # Ctrl-C above all: runs may save where they are
        for ref in running:
            ray.cancel(ref)
        ray.wait(list(running), num_returns=len(running), timeout=GRACE)
        raise


def _hear(ray: Any, ref: Any, config: RunConfig, tally: Tally) -> None:
    try:
        failure = ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, InputError | ImportError):  # the node is not fit to run anything
            raise InputError(str(error.cause)) from error
        tally.lost(config, f"{type(error.cause).__name__}: {error.cause}")
    except ray.exceptions.RayError as error:
        tally.lost(config, type(error).__name__)
    else:
        tally.ended(config, failure)


class Watch:
    """Tells how far runs are by the logs that they write anyway: no message has to come from the nodes."""

    def __init__(self, store: Store, tell: Tell | None) -> None:
        self.store, self.tell = store, tell
        self.sizes: dict[str, int] = {}
        self.next = 0.0

    def look(self, running: Iterable[RunConfig]) -> None:
        """Now and then; where looking takes long, more rarely."""
        began = time.monotonic()
        if self.tell is None or began < self.next:
            return
        for config in running:
            with suppress(OSError, ValueError, LookupError, TypeError):  # not yet, no longer, half written
                self._look(config, self.store.workplace(config) / "metrics.jsonl", self.tell)
        self.next = time.monotonic() + max(LOOK, 10 * (time.monotonic() - began))

    def _look(self, config: RunConfig, path: Path, tell: Tell) -> None:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            before, self.sizes[config.identity] = self.sizes.get(config.identity), size
            if before is None or before == size:  # else what an earlier call has left
                return
            file.seek(max(0, size - 10_000))
            line: dict[str, Any] = {}
            for text in file.read().splitlines()[-2:]:  # losses are not in every line
                line |= json.loads(text)
        note = losses_note(line.get("losses", {}), 30) or f"loss {line['loss']:.3f}"
        tell(config, int(line["step"]), note)
