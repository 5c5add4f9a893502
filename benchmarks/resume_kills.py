"""Kill trainings at random moments (SIGKILL) and resume them; results must be those of uninterrupted ones.

    python benchmarks/resume_kills.py --kills 100

Every case is an algorithm or a recipe on a small network with BatchNorm and dropout, on the CPU. A child
process trains it in a folder and is killed after a random time, again and again until it ends by itself; then
its weights, scores and log must equal those of a run that was never killed, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # here, so that no child has to; optimizers import it
import torch.utils.tensorboard
from torch import nn

import shoal

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (name, {})
        for name in ("erm", "fish", "coral", "groupdro", "dann", "eqrm", "fishr", "sam", "pcgrad")
    },
    "fish, warm start, EMA": ("fish", {"warm_start": 30, "average": "ema:0.9"}),
    "swad": ("swad", {"eval_every": 5}),
    "lp-ft, WiSE-FT": ("lp-ft", {"wise_ft": "validation"}),
    "erm++": ("erm++", {"warm_start": "head-train:30", "average": "online-sma:20"}),
    "auto": ("auto", {"layer_decay": 0.7, "l2_sp": 0.01}),
    "miro": ("erm", {"miro": 0.1, "average": "sma", "retrain": True}),
    "tracked, cosine": ("fish", {"track_every": 7, "schedule": "cosine", "patience": 3}),
}


def train(folder: Path, case: str) -> None:
    """Trains to the end, from the newest checkpoint on, and writes down what came out."""
    torch.manual_seed(0)
    data = {}
    for number, name in enumerate(("oslo", "lima", "rome")):
        y = torch.arange(80) % 2
        data[name] = (torch.randn(80, 2, 6, 6) + y[:, None, None, None] + 0.3 * number, y)
    stem = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2))
    features = nn.Sequential(stem, nn.Conv2d(6, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = shoal.models.FeatureModel(features, nn.Linear(8, 2))
    part = {name: (x[:60], y[:60]) for name, (x, y) in data.items()}
    held = {name: (x[60:], y[60:]) for name, (x, y) in data.items()}
    algorithm, options = CASES[case]
    given: dict[str, Any] = {"steps": 60, "eval_every": 15, "checkpoint_every": 5, "batch_size": 8}
    given |= {"progress": False, "device": "cpu", "lr": 0.01}
    run = shoal.fit(algorithm, model, part, validation=held, folder=folder, resume=True, **given | options)
    weights = b"".join(v.numpy().tobytes() for v in run.model.state_dict().values())
    record = {
        k: run.record[k] for k in ("history", "selected", "rule", "warm_up", "agreement", "interpolation")
    }
    lines = [
        {**json.loads(line), "seconds": 0, "examples_per_second": 0}
        for log in sorted(folder.rglob("metrics.jsonl"))
        for line in log.read_text().splitlines()
    ]
    found = [hashlib.sha256(weights).hexdigest(), json.loads(json.dumps(record, default=dict)), lines]
    (folder / "found.json").write_text(json.dumps(found))


def trained(folder: Path, case: str, seconds: float | None = None) -> bool:
    """Whether a child process came to the end of a training before it was killed."""
    child = os.fork()
    if child == 0:
        try:
            warnings.simplefilter("ignore")
            train(folder, case)
            os._exit(0)
        finally:
            os._exit(1)
    ends = time.monotonic() + (3600 if seconds is None else seconds)
    while time.monotonic() < ends:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert status == 0, "a training failed"
            return True
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    draw, kills, differ, began = random.Random(args.seed), 0, [], time.monotonic()
    for number, case in enumerate(CASES):
        with tempfile.TemporaryDirectory() as folder:
            whole, killed, own = Path(folder, "whole"), Path(folder, "killed"), 0
            start = time.monotonic()
            trained(whole, case)
            seconds, most = time.monotonic() - start, (args.kills - kills) / (len(CASES) - number)
            while not trained(killed, case, draw.uniform(0.1, 0.5) * seconds if own < most else None):
                own += 1
            kills += own
            same = (whole / "found.json").read_text() == (killed / "found.json").read_text()
            differ += [] if same else [case]
            print(
                f"{case}: {own} kills, {'equal' if same else 'DIFFERENT'}, {seconds:.1f} s uninterrupted",
                flush=True,
            )
    print(
        f"{kills} kills, {len(CASES)} cases, {time.monotonic() - began:.0f} s, different: {differ or 'none'}"
    )
    raise SystemExit(bool(differ))


if __name__ == "__main__":
    main()
