"""Lists of runs while processes are killed: is every run recorded once, with the same result?

Run: python benchmarks/under_fire.py [--commands sweep compare train] [--runs 200] [--kills 10] [--seed 0].
`shoal sweep`, `shoal compare` and `shoal train --seeds` are each done with the local engine and on a Ray
cluster of two nodes on this machine, undisturbed and with kills (SIGKILL) of workers, nodes and the command
itself spread over it at random. Whenever the command has ended before all runs are recorded it is given
again, at once, so that what a killed one has left may still be at work. Meanwhile the records are looked at
every 20 ms: none may change once it is there. Exits with 1 unless every run has one record, equal to the
undisturbed one but for clocks, and all tables are equal byte for byte.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

DATA = ["linear", "--data-options.per_domain", "100", "--steps", "600", "--device", "cpu"]
TRIED = ["--algorithms", "erm", "fish", "--seeds", "2", "--search"]


class Command(NamedTuple):
    """What is typed; ``each`` runs come of one unit of the number in its last option."""

    words: list[str]
    each: int
    records: str
    working: str


COMMANDS = {
    "sweep": Command(["sweep", *DATA, *TRIED], 12, "runs/*.json", "runs/working/*"),
    "compare": Command(["compare", *DATA, "--no-baselines", *TRIED], 4, "runs/*.json", "runs/working/*"),
    "train": Command(["train", "fish", *DATA, "--seeds"], 1, "seed-*/record.json", "seed-*"),
}
CLOCKS = {"seconds", "examples_per_second", "environment", "command", "git"}
PATIENCE = 1800.0
"""Seconds in which a sweep must come to its end, kills included."""
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--runs", type=int, default=200, help="of each command, rounded up")
    parser.add_argument("--kills", type=int, default=10, help="of each command with each engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["local", "ray"], help="kill only this engine's sweep")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    chance, done = random.Random(given.seed), list[Sweep]()
    with tempfile.TemporaryDirectory(prefix="shoal-under-fire-") as folder:
        for name, engine, kills in itertools.product(given.commands, ("local", "ray"), (0, given.kills)):
            if given.only and given.only != engine and (kills or engine == "ray"):
                continue
            kinds = ["driver", "worker"] if engine == "local" else ["node", "driver", "worker"]
            aims = [kinds[n % len(kinds)] for n in range(kills)]
            chance.shuffle(aims)
            number = math.ceil(given.runs / COMMANDS[name].each)
            with nodes(engine) as cluster:
                out = Path(folder) / f"{name}-{engine}-{kills}"
                done.append(Sweep(name, out, number, cluster, aims, chance))
                done[-1].run()
            print(f"{done[-1].name}: {done[-1].seconds:.0f} s", file=sys.stderr, flush=True)
        for sweep in done:
            sweep.compare(next(s for s in done if s.command == sweep.command))
    print_table(done)
    return 0 if all(not s.differences for s in done) else 1


@contextlib.contextmanager
def nodes(engine: str) -> Any:
    """A Ray cluster of two nodes on this machine, and how to lose the second and have a new one."""
    if engine == "local":
        yield None
        return
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    cluster.second = cluster.add_node(**NODE)
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        yield cluster
    finally:
        cluster.shutdown()


@dataclass
class Sweep:
    """One command to its end, ``aims`` being what is killed on the way."""

    command: str
    out: Path
    number: int
    cluster: Any
    aims: list[str]
    chance: random.Random
    seconds: float = 0.0
    commands: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    rewritten: set[str] = field(default_factory=set)
    differences: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        manner = "kills" if self.aims or self.struck else "undisturbed"
        return f"{self.command}, {'ray' if self.cluster else 'local'}, {manner}"

    @property
    def runs(self) -> int:
        return COMMANDS[self.command].each * self.number

    def run(self) -> None:
        command = [sys.executable, "-m", "shoal", *COMMANDS[self.command].words, str(self.number)]
        command += ["--out", str(self.out)]
        if self.cluster:
            command += ["--engine", "ray"]
        over, began = threading.Event(), time.monotonic()
        watcher = threading.Thread(target=self._watch, args=(over,))
        watcher.start()
        log = self.out.with_suffix(".log").open("ab")
        try:
            while self._recorded() < self.runs or not self.commands:
                if time.monotonic() - began > PATIENCE:
                    self.differences.append(f"{self._recorded()} of {self.runs} runs after {PATIENCE:.0f} s")
                    break
                self.commands += 1
                driver = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
                try:
                    self._fire(driver)
                    driver.wait(PATIENCE)
                finally:
                    if driver.poll() is None:
                        driver.kill()
            else:
                if driver.returncode != 0:  # killed after the last record: the tables are still to be made
                    subprocess.run(command, stdout=log, stderr=log, check=True)
                    self.commands += 1
        finally:
            over.set()
            watcher.join()
            log.close()
        self.seconds = time.monotonic() - began

    def _fire(self, driver: subprocess.Popen[bytes]) -> None:
        """Kills at random, evenly spread over the runs, until this driver has ended."""
        while self.aims:
            number = sum(self.struck.values())
            share = (number + 0.2 + 0.6 * self.chance.random()) / (number + len(self.aims) + 0.5)
            while driver.poll() is None and self._recorded() < share * self.runs:
                time.sleep(0.02)
            time.sleep(1.5 * self.chance.random())
            if driver.poll() is not None:
                return
            if self._strike(self.aims[0], driver):
                self.struck[self.aims.pop(0)] += 1

    def _strike(self, aim: str, driver: subprocess.Popen[bytes]) -> bool:
        if aim == "node":
            self.cluster.remove_node(self.cluster.second, allow_graceful=False)
            time.sleep(5 * self.chance.random())
            self.cluster.second = self.cluster.add_node(**NODE)
            return True
        found = [driver.pid] if aim == "driver" else self._workers(driver.pid)
        if not found:
            return False
        try:
            os.kill(self.chance.choice(found), signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def _workers(self, driver: int) -> list[int]:
        """The processes of this sweep that have a run: the driver's children, or those in Ray's hands."""
        found = []
        for lock in self.out.glob(f"{COMMANDS[self.command].working}/.lock"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                process = int(lock.read_text().split()[0])
                words = Path(f"/proc/{process}/cmdline").read_text()
                parent = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
                if words.startswith("ray::") if self.cluster else parent == driver:
                    found.append(process)
        return found

    def _files(self) -> dict[str, Path]:
        found = self.out.glob(COMMANDS[self.command].records)
        return {str(path.relative_to(self.out)): path for path in found}

    def _recorded(self) -> int:
        return sum(b'"status": "failed"' not in path.read_bytes() for path in self._files().values())

    def _watch(self, over: threading.Event) -> None:
        """Notes records that are written again: another file, size or time than at first sight."""
        seen: dict[str, tuple[int, int, int]] = {}
        while not over.wait(0.02):
            for name, path in self._files().items():
                with contextlib.suppress(FileNotFoundError):
                    state = path.stat()
                    now = (state.st_ino, state.st_size, state.st_mtime_ns)
                    if seen.setdefault(name, now) != now:
                        self.rewritten.add(name)

    def compare(self, peace: Sweep) -> None:
        mine, theirs = self.records(), peace.records()
        checks = {
            f"{self.runs - len(mine)} runs lost": len(mine) == self.runs,
            "other runs than planned": mine.keys() == theirs.keys(),
            f"{len(self.rewritten)} records written twice": not self.rewritten,
            "runs left as failed": all(r["status"] != "failed" for r in mine.values()),
            "runs left at work": not list((self.out / "runs" / "working").glob("*")),
            f"{len(self.aims)} kills not done": not self.aims,
        }
        self.differences += [what for what, right in checks.items() if not right]
        self.differences += [f"record {i}" for i in theirs if i in mine and mine[i] != theirs[i]]
        tables = [p.name for p in peace.out.glob(f"{self.command}*") if p.suffix in (".csv", ".tex", ".html")]
        if self.command != "train" and not tables:
            self.differences.append("no tables")
        for table in tables:
            own = self.out / table
            if not own.exists() or own.read_bytes() != (peace.out / table).read_bytes():
                self.differences.append(table)

    def records(self) -> dict[str, Any]:
        return {name: timeless(json.loads(path.read_text())) for name, path in self._files().items()}


def timeless(nest: Any) -> Any:
    """Without what differs from run to run; numbers as text, so that NaN is equal to itself."""
    if isinstance(nest, dict):
        return {k: timeless(v) for k, v in nest.items() if k not in CLOCKS}
    return [timeless(v) for v in nest] if isinstance(nest, list) else repr(nest)


def print_table(sweeps: list[Sweep]) -> None:
    import torch

    ray = next((__import__("ray").__version__ for s in sweeps if s.cluster), "–")
    print(f"Python {platform.python_version()}, torch {torch.__version__}, ray {ray}, {os.cpu_count()} cores")
    print(
        f"{'command':<26} {'runs':>5} {'driver':>7} {'worker':>7} {'node':>5} {'commands':>9} {'seconds':>8} "
        f"{'ratio':>6} {'rewritten':>10}  identical"
    )
    for s in sweeps:
        peace = next(p for p in sweeps if (p.command, bool(p.cluster)) == (s.command, bool(s.cluster)))
        kills = [s.struck[kind] for kind in ("driver", "worker", "node")]
        verdict = "no: " + "; ".join(s.differences[:5]) if s.differences else "yes"
        print(
            f"{s.name:<26} {s.runs:5} {kills[0]:7} {kills[1]:7} {kills[2]:5} {s.commands:9} {s.seconds:8.0f} "
            f"{s.seconds / peace.seconds:6.2f} {len(s.rewritten):10}  {verdict}"
        )
    struck = sum(sum(s.struck.values()) for s in sweeps)
    print(f"\n{struck} kills; 'ratio': to the same engine undisturbed; 'identical': to the command's first.")


if __name__ == "__main__":
    sys.exit(main())
