"""Runs that are killed at random instants and resumed: do they end as if nobody had touched them?

Run: python benchmarks/kills.py [--kills 100] [--seed 0] [--processes 2]. Every run below is a process of its
own. It is done once in peace; then again, killed (SIGKILL, with its loader workers) at a random instant,
resumed, killed again, until it is finished. Of the kills 4 in 10 wait for the writing of a checkpoint to
begin, 1 in 10 for that of the final weights and record. Exits with 1 unless weights, record and log are the
same, bit for bit, apart from clocks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

CLOCKS = {"seconds", "examples_per_second", "environment", "command", "git"}
PATIENCE = 240.0
"""Seconds in which a run that is left alone must end."""

DIGITS = "--batch-size 8 --eval-every 40 --log-every 7"
SPRITES = (
    "--dataset cdsprites --data domains=3 size=32 per_domain=60 --batch-size 8 --eval-every 40 --log-every 7"
)
COMMANDS = {
    "erm, sma, cosine, clip": "erm --dataset rotated-digits --steps 300 --average sma --average-start 50 "
    f"--schedule cosine --clip 1 --checkpoint-every 9 {DIGITS}",
    "erm, swad, bf16": f"erm {SPRITES} --steps 400 --average swad --precision bf16 --checkpoint-every 5",
    "fish, warm start 120": f"fish --dataset rotated-digits --steps 100 --warm-start 120 {DIGITS} "
    "--checkpoint-every 7",
    "fish, warm start plateau": f"fish {SPRITES} --steps 150 --warm-start plateau --checkpoint-every 5",
    "fish, linear, sma": "fish --dataset linear --steps 4000 --average sma --optimizer sgd --lr 0.01 "
    "--set inner_state=reset --checkpoint-every 90 --log-every 40",
    "reptile, swad, accumulate 2": f"reptile --dataset coloured-digits --steps 300 {DIGITS} --average swad "
    "--accumulate 2 --checkpoint-every 11",
    "smoothfish, bf16, cosine": f"smoothfish {SPRITES} --steps 150 --precision bf16 --schedule cosine "
    "--checkpoint-every 4",
    "smoothfish, adamw, patience": f"smoothfish --dataset coloured-digits --steps 250 --warm-start 0.5 "
    f"--optimizer adamw --patience 8 --checkpoint-every 6 {DIGITS}",
    "idgm, linear schedule": "idgm --dataset linear --steps 3000 --schedule linear --checkpoint-every 70",
    "idgm, warm start, clip": f"idgm {SPRITES} --steps 120 --warm-start 60 --clip 5 --checkpoint-every 6",
}
PLAIN: dict[str, dict[str, Any]] = {
    "fish, plain dataset": {"algorithm": "fish", "steps": 600, "select": "last", "checkpoint_every": 6},
    "erm, plain dataset, sma": {"algorithm": "erm", "steps": 700, "average": "sma", "warm_start": 50},
    "dann, plain dataset": {"algorithm": "dann", "steps": 500, "checkpoint_every": 7, "on_nan": "skip"},
    "fishr, plain dataset": {"algorithm": "fishr", "steps": 500, "checkpoint_every": 11},
    "idgm, plain dataset": {"algorithm": "idgm", "steps": 500, "clip": 1.0, "checkpoint_every": 9},
}
"""Read through a random transform by a number of workers that changes with every start."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="runs with this in their names")
    parser.add_argument("--plain", nargs=3, metavar=("NAME", "FOLDER", "WORKERS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.plain:
        train_plain(*given.plain)
        return 0

    names = [name for name in (*COMMANDS, *PLAIN) if given.only in name]
    shares = [given.kills * (n + 1) // len(names) - given.kills * n // len(names) for n in range(len(names))]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shoal-kills-") as folder:
        trials = [
            Trial(name, Path(folder), random.Random(f"{given.seed} {name}"), kills)
            for name, kills in zip(names, shares, strict=True)
        ]
        with ThreadPoolExecutor(given.processes) as pool:
            try:
                done = list(pool.map(Trial.run, trials))
            finally:
                stop_all()
    print_table(done, time.monotonic() - began)
    return 0 if all(not t.differences for t in done) else 1


class Trial:
    """One run, first in peace and then killed ``kills`` times, in as many folders as that takes."""

    def __init__(self, name: str, folder: Path, draw: random.Random, kills: int) -> None:
        self.name, self.draw, self.left = name, draw, kills
        self.folder = folder / "".join(c if c.isalnum() else "-" for c in name)
        self.seconds = 0.0
        self.kills, self.in_checkpoint, self.in_final, self.scratch, self.runs = 0, 0, 0, 0, 0
        self.differences: list[str] = []

    def run(self) -> Trial:
        began = time.monotonic()
        quiet = self.folder / "quiet"
        self._start(quiet, workers=0).finish()
        self.seconds = time.monotonic() - began
        expected = outcome(quiet)
        while self.left > 0 and not self.differences:
            self.runs += 1
            folder = self.folder / f"killed-{self.runs}"
            try:
                self._with_kills(folder)
                self.differences += compare(expected, outcome(folder))
            except RunFailed as error:
                self.differences.append(str(error))
        print(f"{self.name}: {self.verdict}", file=sys.stderr, flush=True)
        return self

    @property
    def verdict(self) -> str:
        return "no: " + "; ".join(self.differences) if self.differences else "yes"

    def _with_kills(self, folder: Path) -> None:
        while self.left > 0:
            before = half_written(folder)
            process = self._start(folder, workers=self.draw.choice([0, 1, 2]))
            aim = self.draw.choices(["anywhere", "checkpoint", "end"], [5, 4, 1])[0]
            if aim == "anywhere":
                killed = process.kill_after(self.draw.uniform(0, self.seconds))
            else:
                # From a random instant on, so that it is not always the first one.
                wait = self.draw.uniform(0, self.seconds) if aim == "checkpoint" else 0.0
                killed = process.kill_when_writing(folder, aim, wait)
            if not killed:
                process.finish()
                return
            self.kills += 1
            self.left -= 1
            new = half_written(folder) - before
            self.in_checkpoint += any(n.startswith((".step-", ".best-")) for n in new)
            self.in_final += any(n.startswith((".model.", ".record.")) for n in new)
            self.scratch += not any((folder / "checkpoints").glob("step-*.pt"))
        self._start(folder, workers=self.draw.choice([0, 1, 2])).finish()

    def _start(self, folder: Path, workers: int) -> Process:
        python = [sys.executable]
        if self.name in PLAIN:
            return Process([*python, __file__, "--plain", self.name, str(folder), str(workers)])
        if (folder / "config.yaml").exists():
            return Process([*python, "-m", "shoal", "resume", str(folder), "--device", "cpu"])
        begin = ["-m", "shoal", "train", *COMMANDS[self.name].split(), "--device", "cpu"]
        return Process([*python, *begin, "--out", str(folder)])


class RunFailed(Exception):
    pass


class Process:
    """One life of a run, in a process group of its own."""

    alive: ClassVar[set[Process]] = set()
    lock: ClassVar[threading.Lock] = threading.Lock()
    over: ClassVar[bool] = False

    def __init__(self, command: list[str]) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the object)
        with self.lock:
            if self.over:
                raise RunFailed("stopped")
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=self.errors,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            self.alive.add(self)

    def finish(self) -> None:
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RunFailed(f"did not end within {PATIENCE:.0f} s") from None
        self._forget()
        if code != 0:
            self.errors.seek(0)
            last = self.errors.read().decode(errors="replace").strip().splitlines()[-1:]
            raise RunFailed(f"ended with code {code}: {' '.join(last)}")

    def kill_after(self, seconds: float) -> bool:
        """False if it was over before."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return self.kill()
        return False

    def kill_when_writing(self, folder: Path, what: str, wait: float) -> bool:
        """Kills it as soon as there is a file that it has begun and not finished."""
        began, old = time.monotonic(), half_written(folder)
        try:
            self.process.wait(wait)
            return False
        except subprocess.TimeoutExpired:
            pass
        starts = (".step-", ".best-") if what == "checkpoint" else (".model.", ".record.")
        place = folder / "checkpoints" if what == "checkpoint" else folder
        while self.process.poll() is None and time.monotonic() - began < PATIENCE:
            for _ in range(100):
                if any(name.startswith(starts) and name not in old for name in names_in(place)):
                    return self.kill()
                time.sleep(0.0002)
        return False

    def kill(self) -> bool:
        """The process and its loader workers; False if it had come to its end by itself."""
        if self.process.returncode is not None:
            return False
        os.killpg(self.process.pid, signal.SIGKILL)  # not waited for yet: the number is still its own
        code = self.process.wait()
        self._forget()
        return code == -signal.SIGKILL

    def _forget(self) -> None:
        with self.lock:
            self.alive.discard(self)


def stop_all() -> None:
    with Process.lock:
        Process.over, left = True, list(Process.alive)
    for process in left:
        process.kill()


def names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def half_written(folder: Path) -> set[str]:
    """Files that a kill left behind in the middle of their writing."""
    names = [*names_in(folder), *names_in(folder / "checkpoints")]
    return {n for n in names if n.startswith((".step-", ".best-", ".model.", ".record."))}


@dataclass
class Outcome:
    weights: bytes
    record: Any
    lines: list[Any]


def outcome(folder: Path) -> Outcome:
    """What a run has left, without clocks."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return Outcome(
        (folder / "model.safetensors").read_bytes(),
        timeless(json.loads((folder / "record.json").read_text())),
        [timeless(json.loads(line)) for line in lines],
    )


def timeless(nest: Any) -> Any:
    """Numbers as text, so that NaN is equal to itself."""
    if isinstance(nest, dict):
        return {k: timeless(v) for k, v in nest.items() if k not in CLOCKS}
    if isinstance(nest, list):
        return [timeless(v) for v in nest]
    return repr(nest)


def compare(expected: Outcome, found: Outcome) -> Iterable[str]:
    if expected.weights != found.weights:
        yield "model.safetensors"
    # How a plain run was started says with how many workers.
    for record in (expected.record, found.record):
        record["config"].get("options", {}).pop("workers", None)
    if expected.record != found.record:
        yield "record.json in " + ", ".join(k for k, v in expected.record.items() if found.record.get(k) != v)
    if expected.lines != found.lines:
        pairs = zip(expected.lines, found.lines, strict=False)
        first = next((n for n, (a, b) in enumerate(pairs, 1) if a != b), "the number of lines")
        yield f"metrics.jsonl, line {first}"


def print_table(trials: list[Trial], seconds: float) -> None:
    print(
        f"{'run':<30} {'alone s':>8} {'runs':>5} {'kills':>6} {'in checkpoint':>14} {'in final files':>15} "
        f"{'from scratch':>13}  identical"
    )
    for t in trials:
        print(
            f"{t.name:<30} {t.seconds:8.1f} {t.runs:5} {t.kills:6} {t.in_checkpoint:14} {t.in_final:15} "
            f"{t.scratch:13}  {t.verdict}"
        )
    total = [sum(getattr(t, k) for t in trials) for k in ("kills", "in_checkpoint", "in_final", "scratch")]
    same = sum(t.runs for t in trials if not t.differences)
    print(
        f"\n{total[0]} kills, {total[1]} of them inside the writing of a checkpoint and {total[2]} inside "
        f"that of the final files; {total[3]} times there was no checkpoint yet. {same} of "
        f"{sum(t.runs for t in trials)} runs identical to one never killed. {seconds:.0f} s."
    )


def train_plain(name: str, folder: str, workers: str) -> None:
    """A run by ``shoal.fit``: BatchNorm and dropout, on examples that are made with random numbers."""
    import numpy as np
    import torch
    from torch import nn
    from torch.utils.data import Dataset

    import shoal
    from shoal.models import FeatureModel

    class Noisy(Dataset):
        def __init__(self, number: int, examples: int = 60) -> None:
            draw = torch.Generator().manual_seed(number)
            self.y = torch.arange(examples) % 3
            self.x = torch.randn(examples, 64, generator=draw) + self.y[:, None] + 0.3 * number

        def __len__(self) -> int:
            return len(self.y)

        def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
            noise = torch.randn(64) + float(np.random.rand()) + random.random()
            return self.x[i] + 0.1 * noise, int(self.y[i])

    torch.manual_seed(0)
    layers = [nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.3)]
    shoal.fit(
        train={f"domain {n}": Noisy(n) for n in range(3)},
        validation={"validation": Noisy(3)},
        model=FeatureModel(nn.Sequential(*layers), nn.Linear(128, 3)),
        folder=folder,
        resume=True,
        batch_size=16,
        eval_every=50,
        log_every=7,
        workers=int(workers),
        device="cpu",
        progress=False,
        **{"checkpoint_every": 7, **PLAIN[name]},
    )


if __name__ == "__main__":
    sys.exit(main())
