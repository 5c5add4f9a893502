"""Runs on a Ray cluster of two nodes: the same records, and nothing lost with a worker."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_execute import alone, configs, names, numbers
from test_store import files

import shoal
from shoal.errors import InputError
from shoal.experiments import cluster
from shoal.experiments.config import RunConfig
from shoal.experiments.execute import execute
from shoal.experiments.store import Store

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cluster of two nodes, whose workers have this folder for their current one."""
    pytest.importorskip("ray")
    ray = cluster.load_ray()
    from ray.cluster_utils import Cluster

    before, home = Path.cwd(), tmp_path_factory.mktemp("home")
    os.chdir(home)
    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        made.add_node(**NODE)
        ray.init(made.address, log_to_driver=False, logging_level="CRITICAL")
        yield home
    finally:
        ray.shutdown()
        made.shutdown()
        os.chdir(before)


@pytest.fixture
def store(nodes: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Store:
    monkeypatch.chdir(nodes)
    return Store(tmp_path / "runs")


def test_runs_are_recorded_as_on_one_machine_and_failures_repeated(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It also shows that workers have the SHOAL_DATA of this process."""
    monkeypatch.setenv("SHOAL_DATA", "/no/images/here")
    wanted = configs(2)
    bad = RunConfig("rotated-mnist", "erm", 5, label="bad")
    outcome = execute([bad, *wanted], store, engine="ray")
    assert [numbers(r) for r in outcome.records] == alone(wanted)
    assert "/no/images/here" in outcome.failed[bad.identity]
    assert files(store.folder) == names([bad, *wanted])
    times = [store.path(c).stat().st_mtime_ns for c in (bad, *wanted)]
    assert execute([bad, *wanted], store, engine="ray").failed.keys() == {bad.identity}
    again = [store.path(c).stat().st_mtime_ns for c in (bad, *wanted)]
    assert (again[0] > times[0], again[1:]) == (True, times[1:])


def test_a_run_whose_worker_is_killed_resumes(store: Store) -> None:
    (config,) = wanted = configs(1, 400)
    over = threading.Event()

    def kill() -> None:
        lock = store.workplace(config) / ".lock"
        while not over.wait(0.05):
            if list(store.workplace(config).glob("checkpoints/step-*")):
                os.kill(int(lock.read_text().split()[1]), signal.SIGKILL)
                return

    killer = threading.Thread(target=kill)
    killer.start()
    outcome = execute(wanted, store, engine="ray", options={"checkpoint_every": 20})
    over.set()
    killer.join()
    assert [numbers(r) for r in outcome.records] == alone(wanted)
    assert files(store.folder) == names(wanted)


def test_what_is_not_there(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for device, message in (("cuda", "no node of the cluster"), ("cuda:1", "use 'cpu' or 'cuda'")):
        with pytest.raises(InputError, match=message):
            execute(configs(1), store, engine="ray", device=device)
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    with pytest.raises(InputError, match="no Ray cluster at address 'nonsense'"):
        execute(configs(1), store, engine="ray")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'shoal\[ray\]'"):
        shoal.sweep("linear", algorithms="erm", engine="ray", out=tmp_path / "out", progress=False)
