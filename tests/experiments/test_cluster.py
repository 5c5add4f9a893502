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

from shoal.cli import main
from shoal.errors import InputError
from shoal.experiments import cluster
from shoal.experiments.cluster import Ray
from shoal.experiments.config import RunConfig
from shoal.experiments.execute import ATTEMPTS, Store, execute
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


SWEEP = "sweep linear --data per_domain=100 --algorithms erm fish --seeds 1 --search 1"
SWEEP += " --steps 60 --eval-every 20 --device cpu"


def test_tables_are_those_of_the_local_engine(store: Store, tmp_path: Path) -> None:
    assert main([*SWEEP.split(), "--out", str(tmp_path / "local"), "--jobs", "1"]) == 0
    assert main([*SWEEP.split(), "--out", str(tmp_path / "ray"), "--engine", "ray"]) == 0
    tables = sorted(p.name for p in (tmp_path / "local").glob("sweep*"))
    assert len(tables) == 9
    for name in tables:
        assert (tmp_path / "ray" / name).read_bytes() == (tmp_path / "local" / name).read_bytes()
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


def test_no_more_at_once_than_asked_for(store: Store) -> None:
    wanted, seen = configs(600, 60), list[str]()
    execute(wanted, store, Ray(jobs=1), done=lambda r: seen.append(r.config.label))
    assert seen == ["0", "1"]


def test_a_run_goes_on_from_its_checkpoint_when_its_worker_is_killed(store: Store) -> None:
    (config,) = wanted = configs(2000)
    told, killed = list[int](), list[int]()

    def kill() -> None:
        until(lambda: saved(store, config) >= 400)
        os.kill(holder(store, config), signal.SIGKILL)
        killed.extend((saved(store, config), len(told)))

    thread = meanwhile(kill)
    outcome = execute(wanted, store, Ray(), how=QUICK, tell=lambda c, step, note: told.append(step))
    thread.join()
    assert [numbers(r) for r in outcome.records] == alone(wanted)
    step, before = killed
    assert 0 < min(told[:before]) < step
    assert step <= min(told[before + 1 :]) < 2000  # one may have been on its way


@pytest.mark.slow
def test_a_run_that_takes_its_worker_down_is_given_up(store: Store) -> None:
    (config,), killed, over = configs(10**6), set[int](), threading.Event()

    def kill() -> None:
        while not over.wait(0.05):
            process = holder(store, config)
            if process not in {0, *killed}:
                killed.add(process)
                os.kill(process, signal.SIGKILL)

    thread = meanwhile(kill)
    try:
        outcome = execute([config], store, Ray())
    finally:
        over.set()
        thread.join()
    assert len(killed) == ATTEMPTS
    assert f"ended {ATTEMPTS} times (WorkerCrashedError)" in outcome.failed[config.identity]
    assert not outcome.records


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
    from shoal.experiments.status import in_use

    return in_use(folder)


@pytest.mark.slow
def test_a_node_that_does_not_see_the_folder_is_named(
    nodes: Any, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A path that leads to each process's current folder stands for one that is not shared."""
    monkeypatch.chdir(tmp_path)
    other = nodes.add_node(num_cpus=2, object_store_memory=80 * 2**20)
    monkeypatch.chdir(nodes.home)
    apart, wanted = Store("/proc/self/cwd/runs"), configs(60)
    try:
        with pytest.raises(
            InputError, match=r"cannot access /proc/self/cwd/runs, which must be a folder"
        ) as found:
            execute(wanted, apart, Ray())
        assert other.node_id[:8] in str(found.value)
        assert "more nodes" not in str(found.value)
        monkeypatch.setattr(cluster, "_check_nodes", lambda *given: None)  # as if it came later
        with pytest.raises(InputError, match="cannot access /proc/self/cwd/runs"):
            execute(wanted, apart, Ray(cpus=2))
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
        for gpus in (None, 0.25):
            failed = execute([config], store, Ray(gpus=gpus)).failed
            assert "device='cuda:0', but torch finds no CUDA device" in failed[config.identity]
        assert len(execute([config], store, Ray(device="cpu")).records) == 1
    finally:
        nodes.remove_node(other)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gpus": 1}, "no node of the cluster has 1 CPUs and 1 GPUs"),
        ({"cpus": 5}, "no node of the cluster has 5 CPUs and 0 GPUs"),
        ({"gpus": float("nan")}, "a fraction of a GPU such as 0.25, or an integer"),
        ({"gpus": 1.5}, "a fraction of a GPU such as 0.25, or an integer"),
        ({"gpus": 1, "device": "cpu"}, "contradict each other"),
        ({"gpus": 0, "device": "cuda"}, "contradict each other"),
        ({"device": "cuda:1"}, "use 'cpu' or 'cuda'"),
    ],
)
def test_needs_that_cannot_be_met(given: dict[str, Any], message: str, store: Store) -> None:
    with pytest.raises(InputError, match=message):
        execute(configs(60), store, Ray(**given))


@pytest.mark.parametrize("option", ["--address auto", "--gpus-per-run 0.5", "--cpus-per-run 2"])
def test_options_of_the_other_engine_are_refused(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SWEEP.split(), *option.split(), "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    name = option.split()[0].removeprefix("--")
    assert name in message.replace("_", "-")
    assert "belongs to" in message
    assert len(message.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nonsense"])
def test_an_address_where_no_cluster_is(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    command = [*SWEEP.split(), "--engine", "ray", "--address", address, "--out", str(tmp_path)]
    assert main(command) == 2
    assert f"shoal: no Ray cluster at address {address!r}: " in capsys.readouterr().err


def test_without_ray_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main([*SWEEP.split(), "--engine", "ray", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "pip install 'shoal[ray]'" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()
