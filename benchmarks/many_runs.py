"""Twenty small runs side by side, against one after the other; each must end as it does alone.

python benchmarks/many_runs.py [--runs 20] [--device cpu]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace

import torch

from shoal.experiments.config import RunConfig
from shoal.experiments.execute import Store, execute, make_executor
from shoal.paper import cdsprites


def small(runs: int, cuda: bool) -> dict[str, list[RunConfig]]:
    """Lists of runs that differ in their seed alone; the data are the same."""
    passes = 3000 if cuda else 200
    sprites = [
        [
            replace(config, data_options={**config.data_options, "seed": 0}, eval_every=config.steps // 2)
            for config in cdsprites.configs(
                [method],
                [10],
                range(runs),
                passes=passes,
                size=size,
                per_domain=1000,
                width=width,
                eval_limit=500,
            )
        ]
        for method, size, width in (
            (cdsprites.FISH, 32, 24),
            (cdsprites.ERM, 32, 24),
            (cdsprites.FISH, 64, 32),
        )
    ]
    digits = RunConfig("rotated-digits", "fish", 600 if cuda else 50, batch_size=32)
    return {
        "Fish, CdSprites-10, 32×32": sprites[0],
        "ERM, CdSprites-10, 32×32": sprites[1],
        **({"Fish, CdSprites-10, 64×64": sprites[2]} if cuda else {}),
        "Fish, rotated digits": [replace(digits, seed=seed) for seed in range(runs)],
    }


def timed(
    configs: list[RunConfig], device: str, jobs: int | None, deterministic: bool = False
) -> tuple[float, dict[str, bytes]]:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder, weights=True)
        began = time.monotonic()
        how = {"deterministic": deterministic}
        execute(configs, store, make_executor(device=device, jobs=jobs), how=how)
        seconds = time.monotonic() - began
        weights = {c.identity: (store.workplace(c) / "model.safetensors").read_bytes() for c in configs}
    return seconds, weights


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    cuda = given.device == "cuda"
    where = torch.cuda.get_device_name() if cuda else "cpu"
    print(f"torch {torch.__version__}, {where}, {given.runs} runs each")
    failed = False
    for name, configs in small(given.runs, cuda).items():
        first = Store(tempfile.mkdtemp())
        execute(configs[:1], first, make_executor(device=given.device))  # first use of the device
        alone, _ = timed(configs, given.device, 1)
        beside, _ = timed(configs, given.device, None)
        few = [replace(c, steps=c.steps // 6, eval_every=None) for c in configs[:5]]
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as beside others: another number rounds sums in another way
        (_, one), (_, many) = (timed(few, given.device, n, deterministic=True) for n in (1, None))
        torch.set_num_threads(threads)
        same = sum(one[k] == many[k] for k in one)
        failed |= same < len(one)
        print(
            f"  {name:28} one after the other {alone:6.1f} s, side by side {beside:6.1f} s: "
            f"{alone / beside:.2f} × as fast; {same} of {len(one)} checked end with the same bits",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
