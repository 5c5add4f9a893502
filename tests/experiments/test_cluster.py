"""Sweeps on a Ray cluster of two nodes: the same tables, and nothing lost with a worker or a node."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.errors import InputError
from shoal.experiments import cluster
from shoal.experiments.cluster import Ray
from shoal.experiments.config import RunConfig
from shoal.experiments.execute import Store, execute
from shoal.experiments.record import RunRecord
from shoal.experiments.run import run

QUICK = {"checkpoint_every": 200}
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""A node that is gone is missed after seconds."""


def configs(*steps: int) -> list[RunConfig]:
    return [
        RunConfig("linear", "erm", s, batch_size=8, eval_every=s // 2, seed=n, label=f"{n}")
        for n, s in enumerate(steps)
    ]


def numbers(record: RunRecord) -> object:
    return record.config, record.status, record.history, record.selected


def alone(wanted: list[RunConfig]) -> list[object]:
    return [numbers(run(c, "cpu")) for c in wanted]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two nodes, whose workers have the folder ``nodes.home`` for their current one."""
    pytest.importorskip("ray")
    ray = cluster.load_ray()
    from ray.cluster_utils import Cluster

    before, home = Path.cwd(), tmp_path_factory.mktemp("home")
    os.chdir(home)
    head = {**NODE, "include_dashboard": False, "_system_config": SOON}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        made.home, made.second = home, made.add_node(**NODE)
        ray.init(made.address, log_to_driver=False, logging_level="CRITICAL")
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
        os.chdir(before)


@pytest.fixture
def store(nodes: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Store:
    monkeypatch.chdir(nodes.home)
    monkeypatch.setattr(cluster, "LOOK", 0.2)
    return Store(tmp_path / "runs")


def meanwhile(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def holder(store: Store, config: RunConfig) -> int:
    """The process that has the run; 0 if it has not begun."""
    try:
        return int((store.workplace(config) / ".lock").read_text().split()[0])
    except (OSError, IndexError):
        return 0


def saved(store: Store, config: RunConfig) -> int:
    """The step of the newest checkpoint."""
    found = (store.workplace(config) / "checkpoints").glob("step-*")
    return max((int(p.name.split("-")[1]) for p in found), default=0)


SWEEP: dict[str, Any] = {"algorithms": ["erm", "fish"], "seeds": 1, "search": 1, "steps": 60}
SWEEP |= {"eval_every": 20, "data_options": {"per_domain": 100}, "device": "cpu", "progress": False}


def test_tables_are_those_of_the_local_engine(store: Store, tmp_path: Path) -> None:
    shoal.sweep("linear", **SWEEP, out=tmp_path / "local", jobs=1)
    shoal.sweep("linear", **SWEEP, out=tmp_path / "ray", engine="ray")
    for path in (tmp_path / "local").glob("sweep*"):
        assert (tmp_path / "ray" / path.name).read_bytes() == path.read_bytes()
    records = {p.name for p in (tmp_path / "local" / "runs").glob("*.json")}
    assert {p.name for p in (tmp_path / "ray" / "runs").glob("*.json")} == records
    assert len(records) == 6
    assert not any((tmp_path / "ray" / "runs" / "working").iterdir())


def test_a_run_that_fails_is_written_down_and_tried_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It also shows that workers have this process's SHOAL_DATA."""
    monkeypatch.setenv("SHOAL_DATA", "/no/pictures/here")
    wanted, seen = configs(60, 60), list[str]()
    bad = RunConfig("rotated-mnist", "erm", 5, label="bad")
    outcome = execute([bad, *wanted], store, Ray(), done=lambda r: seen.append(r.config.label))
    assert [numbers(r) for r in outcome.records] == alone(wanted)
    assert sorted(seen) == ["0", "1", "bad"]
    assert outcome.failed.keys() == {bad.identity}
    assert "/no/pictures/here" in outcome.failed[bad.identity]
    record = store.look(bad)
    assert record is not None
    assert "Traceback" in record.traceback
    seen.clear()
    again = execute([bad, *wanted], store, Ray(), done=lambda r: seen.append(r.config.label))
    assert (len(again.records), again.failed.keys()) == (2, {bad.identity})
    assert seen == ["bad"]


def test_a_run_goes_on_from_its_checkpoint_when_its_worker_is_killed(store: Store) -> None:
    (config,) = wanted = configs(2000)
    killed = list[int]()

    def kill() -> None:
        until(lambda: saved(store, config) >= 400)
        os.kill(holder(store, config), signal.SIGKILL)
        killed.append(saved(store, config))

    thread = meanwhile(kill)
    outcome = execute(wanted, store, Ray(), how=QUICK)
    thread.join()
    assert [numbers(r) for r in outcome.records] == alone(wanted)
    assert 400 <= killed[0] < 2000


@pytest.mark.slow
def test_a_node_that_goes_takes_nothing_with_it(nodes: Any, store: Store) -> None:
    wanted = configs(2000, 2000, 2000)

    def remove() -> None:
        until(lambda: sum(saved(store, c) > 0 for c in wanted) >= 2)
        nodes.remove_node(nodes.second, allow_graceful=False)

    thread = meanwhile(remove)
    try:
        outcome = execute(wanted, store, Ray(), how=QUICK)
        thread.join()
    finally:
        nodes.second = nodes.add_node(**NODE)
    assert [numbers(r) for r in outcome.records] == alone(wanted)
    assert not outcome.failed


def test_one_that_is_stopped_saves_where_its_runs_are(store: Store) -> None:
    wanted = configs(10**6, 10**6, 60)

    def stop(config: RunConfig, step: int, note: str) -> None:
        assert note.startswith("loss 0.")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(wanted, store, Ray(), tell=stop)
    assert any(saved(store, c) > 0 for c in wanted[:2])
    until(lambda: not any(map(busy, (store.workplace(c) for c in wanted))), 5)


def busy(folder: Path) -> bool:
    from shoal.training.folder import RunFolder

    try:
        with RunFolder(folder):
            return False
    except InputError:
        return True


@pytest.mark.slow
def test_a_node_that_does_not_see_the_folder_is_named(
    nodes: Any, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A path that leads to each process's current folder stands for one that is not shared."""
    monkeypatch.chdir(tmp_path)
    other = nodes.add_node(num_cpus=2, object_store_memory=80 * 2**20)
    monkeypatch.chdir(nodes.home)
    apart = Store("/proc/self/cwd/runs")
    try:
        with pytest.raises(
            InputError, match=r"cannot access /proc/self/cwd/runs, which must be a folder"
        ) as found:
            execute(configs(60), apart, Ray())
        assert other.node_id[:8] in str(found.value)
    finally:
        nodes.remove_node(other)
        shutil.rmtree(nodes.home / "runs", ignore_errors=True)
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to be found")
@pytest.mark.slow
def test_runs_go_to_gpus_where_there_are_some(nodes: Any, store: Store) -> None:
    """Ray believes what it is told: here that there is a GPU, which torch then does not find."""
    other, (config,) = nodes.add_node(**NODE, num_gpus=1), configs(60)
    try:
        failed = execute([config], store, Ray()).failed
        assert "cuda:0" in failed[config.identity]
        assert len(execute([config], store, Ray(device="cpu")).records) == 1
    finally:
        nodes.remove_node(other)


@pytest.mark.parametrize(
    ("device", "message"), [("cuda", "no node of the cluster"), ("cuda:1", "use 'cpu' or 'cuda'")]
)
def test_devices_that_no_node_has(device: str, message: str, store: Store) -> None:
    with pytest.raises(InputError, match=message):
        execute(configs(60), store, Ray(device))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nonsense"])
def test_an_address_where_no_cluster_is(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(InputError, match=f"no Ray cluster at address '{address}'"):
        shoal.sweep("linear", **SWEEP, engine="ray", out=tmp_path)


def test_without_ray_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'shoal\[ray\]'"):
        shoal.sweep("linear", **SWEEP, engine="ray", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
