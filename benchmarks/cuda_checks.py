"""What only a CUDA device can show: captured steps equal eager ones, their speed, and runs side by side.

python benchmarks/cuda_checks.py
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products

import torch

from shoal.bench.experiments import cdsprites
from shoal.bench.pool import run_all
from shoal.bench.record import Store
from shoal.data.sets import load
from shoal.data.sprites import latent_grid, render
from shoal.models import build
from shoal.training.fit import Fit, fit

WALK = {"meta_lr": 0.1, "inner_state": "reset"}
CASES: list[tuple[str, dict[str, Any], int]] = [
    ("erm", {}, 1),
    ("fish", WALK, 10),
    ("fish", {"meta_lr": 0.3, "inner_state": "carry"}, 10),
    ("reptile", WALK, 10),
    ("smoothfish", {"gamma": 0.5, **WALK}, 10),
    ("idgm", {}, 10),
    ("idgm", {"method": "finite-difference"}, 10),
]


def trained(case: tuple[str, dict[str, Any], int], capture: bool, passes: int, **adam: bool) -> Fit:
    algorithm, settings, slots = case
    data = load("cdsprites", domains=10, size=64, per_domain=500)
    return fit(
        algorithm,
        build(data.model, input_shape=data.input_shape, classes=2, seed=0),
        data,
        steps=passes // slots,
        batch_size=64,
        domains_per_step=slots,
        settings=settings,
        optimizer=lambda p: torch.optim.Adam(p, 1e-3, **adam),
        eval_every=passes // slots,
        eval_limit=50,
        select="last",
        capture=capture,
        progress=False,
    )


def weights_of(run: Fit) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def main() -> int:
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    failed = False
    latents = latent_grid((0, 1))
    chosen = latents[torch.randperm(len(latents), generator=torch.Generator().manual_seed(0))[:100_000]]
    differ = int((render(chosen, 64) != render(chosen, 64, device="cuda").cpu()).sum())
    print(f"sprites drawn on CUDA: {differ} pixels differ from the CPU's in {len(chosen):,} images")
    failed |= differ > 0

    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    print("\ncaptured steps against eager ones, deterministic kernels, after 120 passes")
    for case in CASES:
        # The same arithmetic in both: a capturable Adam keeps its step count on the device.
        eager, captured = (weights_of(trained(case, c, 120, capturable=True)) for c in (False, True))
        equal = bool((eager == captured).all())
        failed |= not equal
        print(f"  {case[0]:12} {case[1]!s:50} {'equal bits' if equal else 'DIFFERENT'}", end="")
        print("" if equal else f" by up to {float((eager - captured).abs().max()):.1e}")
    torch.use_deterministic_algorithms(False)

    print("\nmilliseconds a pass, 64×64, batch 64")
    for case in CASES:
        slow, fast = (1000 / 600 * trained(case, c, 600).seconds for c in (False, True))
        print(f"  {case[0]:12} {case[1]!s:50} eager {slow:6.2f}  captured {fast:6.2f}", end="")
        print(f"  ratio {slow / fast:4.1f} (capture included)")

    print("\nseveral runs at once: 8 runs of Fish, N=10, 64×64, 4,000 passes each")
    for processes in (1, 4, 8):
        configs = cdsprites.configs(
            [cdsprites.FISH], [10], range(8), passes=4000, per_domain=2000, eval_limit=10
        )
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            run_all(configs, Store(folder), processes=processes)
            print(f"  {processes} processes: {time.monotonic() - began:.1f} s in all")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
