"""Kill workers and drivers of sweeps at random moments (SIGKILL); every run must be recorded once.

    python benchmarks/kills.py --kills 6

A driver executes a sweep of short runs on the dataset ``linear``, locally or on Ray. This script kills it or
one of its workers at random moments, starts it again when it has ended, and goes on with another sweep until
there were enough kills of each kind. At the end of each sweep the folder must have one record per run and
nothing else, and the records the history and selected step of an uninterrupted execution.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shoal.experiments.config import RunConfig
from shoal.experiments.execute import execute
from shoal.experiments.run import run
from shoal.experiments.store import Store

WORKERS = {"local": "popen_loky", "ray": "ray::_work"}
"""How the command lines of worker processes are recognized."""


def configs(runs: int, steps: int) -> list[RunConfig]:
    names = ("erm", "fish", "groupdro")
    options: dict[str, Any] = {"batch_size": 8, "eval_every": steps // 3}
    return [RunConfig("linear", names[n % 3], steps, seed=n, **options) for n in range(runs)]


def drive(folder: str, engine: str, runs: int, steps: int) -> int:
    """The command that is killed, and given again."""
    given: dict[str, Any] = {"engine": engine, "device": "cpu", "options": {"checkpoint_every": 50}}
    given |= {"jobs": 2} if engine == "local" else {}
    return 1 if execute(configs(runs, steps), Store(folder), **given).failed else 0


def descendants(pid: int) -> dict[int, str]:
    """The command lines of all processes that a process has started, by their ids."""
    parents, words = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            words[int(path.name)] = (path / "cmdline").read_text()
        except OSError:
            continue
    found = {pid}
    while more := {p for p, parent in parents.items() if parent in found} - found:
        found |= more
    return {p: words[p] for p in found - {pid}}


def kill(driver: subprocess.Popen[bytes], engine: str, target: str, chance: random.Random) -> bool:
    """Kill the driver or one of its workers; whether there was one."""
    if target == "driver":
        victims = [driver.pid]
    else:
        victims = [p for p, words in descendants(driver.pid).items() if WORKERS[engine] in words]
    if not victims:
        return False
    try:
        os.kill(chance.choice(victims), signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def sweep(
    engine: str, target: str, most: int, chance: random.Random, runs: int, steps: int
) -> tuple[int, int]:
    """One sweep that is disturbed up to ``most`` times and then completed: kills and starts of the driver."""
    kills = starts = 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--drive", folder, "--engine", engine]
        command += ["--runs", str(runs), "--steps", str(steps)]
        while True:
            driver = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            starts += 1
            while driver.poll() is None:
                time.sleep(chance.uniform(0.5, 15))
                if kills < most and driver.poll() is None:
                    kills += kill(driver, engine, target, chance)
            if driver.returncode == 0:
                break
            if starts > 3 * most + 5:
                raise SystemExit(f"{engine}, {target}: the sweep does not end.")
        check(Store(folder), configs(runs, steps))
    return kills, starts


def check(store: Store, wanted: list[RunConfig]) -> None:
    found = {path.relative_to(store.folder).as_posix() for path in store.folder.rglob("*")}
    expected = {f"{config.identity}.json" for config in wanted}
    assert found == expected, f"other files: {found ^ expected}"
    for config in wanted:
        if config.identity not in REFERENCE:
            REFERENCE[config.identity] = run(config, "cpu")
        record, alone = store.find(config), REFERENCE[config.identity]
        assert record is not None, config
        assert (record.status, record.history, record.selected) == (
            alone.status,
            alone.history,
            alone.selected,
        ), config


REFERENCE: dict[str, Any] = {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=6, help="kills of each kind")
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--seed", type=int, default=0)
    kinds = [f"{engine}-{target}" for engine in WORKERS for target in ("worker", "driver")]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.drive:
        return drive(args.drive, args.engine, args.runs, args.steps)
    chance = random.Random(args.seed)
    packages = ", ".join(
        f"{name} {version(name)}" for name in ("shoal", "torch", "joblib", "filelock", "ray")
    )
    print(f"Python {platform.python_version()}, {packages}; {os.cpu_count()} cores.\n")
    print("| engine | killed | kills | sweeps | starts of the driver | runs | recorded once, identical |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for kind in args.kinds:
        engine, target = kind.split("-")
        kills = sweeps = starts = 0
        while kills < args.kills:
            most = min(4, args.kills - kills)
            more, times = sweep(engine, target, most, chance, args.runs, args.steps)
            kills, starts, sweeps = kills + more, starts + times, sweeps + 1
        runs = sweeps * args.runs
        print(f"| {engine} | {target} | {kills} | {sweeps} | {starts} | {runs} | {runs} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
