"""What our loop costs beside bare PyTorch lines, on one CPU thread: seconds of a step, and of the imports.

    python benchmarks/fit_overhead.py

A network of three layers of width 64, 14 domains, batches of 32 from each. The bare lines draw batches, with
indices drawn ahead for many steps, and use fused Adam. A step is the slope between 300 and 3,000 steps, the
median over rounds in which both take turns. CPU seconds throughout.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import shoal

DOMAINS, BATCH, WIDTH, EACH = 14, 32, 64, 1000
SHORT, LONG, ROUNDS = 100, 1000, 3
META_LR, LR = 0.5, 1e-3


def data() -> dict[str, tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return {
        f"d{d}": (torch.randn(EACH, WIDTH, generator=draw), torch.randint(2, (EACH,), generator=draw))
        for d in range(DOMAINS)
    }


def network() -> nn.Module:
    torch.manual_seed(0)
    sizes = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)]
    return nn.Sequential(*sizes)


def bare_erm(steps: int) -> None:
    model, parts = network(), data()
    x, y = (torch.cat([part[n] for part in parts.values()]) for n in (0, 1))
    optimizer = torch.optim.Adam(model.parameters(), LR, fused=True)
    for first in range(0, steps, 64):
        for rows in torch.randint(len(y), (min(64, steps - first), DOMAINS * BATCH)):
            loss = cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def bare_fish(steps: int) -> None:
    model, parts = network(), data()
    x, y = (torch.cat([part[n] for part in parts.values()]) for n in (0, 1))
    optimizer, params = torch.optim.Adam(model.parameters(), LR, fused=True), list(model.parameters())
    offsets = torch.arange(DOMAINS)[:, None] * EACH
    for first in range(0, steps, 64):
        for rows in torch.randint(EACH, (min(64, steps - first), DOMAINS, BATCH)) + offsets:
            start = [p.detach().clone() for p in params]
            for d in torch.randperm(DOMAINS).tolist():
                loss = cross_entropy(model(x[rows[d]]), y[rows[d]])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                torch._foreach_lerp_(start, params, META_LR)
                torch._foreach_copy_(params, start)


def ours(name: str, steps: int) -> None:
    """One evaluation at the end in either length."""
    options: dict[str, Any] = {"lr": LR, "batch_size": BATCH, "domains_per_step": DOMAINS}
    options |= {"eval_every": steps, "steps": steps, "progress": False, "device": "cpu"}
    shoal.fit(name, network(), data(), **options)


def slope(run: Callable[[int], None]) -> float:
    times = []
    for steps in (SHORT, LONG):
        began = time.process_time()
        run(steps)
        times.append(time.process_time() - began)
    return (times[1] - times[0]) / (LONG - SHORT)


def importing(code: str) -> float:
    """CPU seconds of a new process, the median of some."""
    script = f"import time; {code}; print(time.process_time())"
    found = [
        float(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout)
        for _ in range(5)
    ]
    return statistics.median(found)


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {DOMAINS} × {BATCH}, slope {SHORT} to {LONG} steps, {ROUNDS} rounds")
    for name, bare in (("erm", bare_erm), ("fish", bare_fish)):
        ratios, steps = [], []
        for _ in range(ROUNDS):
            plain, fitted = slope(bare), slope(lambda n, name=name: ours(name, n))
            ratios.append(fitted / plain)
            steps.append(plain)
        bare_us, ratio = 1e6 * statistics.median(steps), statistics.median(ratios)
        print(f"{name:5} bare {bare_us:7.0f} µs   shoal.fit {ratio:.2f} ×", flush=True)
    plain = importing("import torch")
    needed = importing("import torch, shoal; shoal.fit")
    print(f"import torch {plain:.2f} CPU-s, with what shoal.fit needs {needed / plain:.2f} ×")


if __name__ == "__main__":
    main()
