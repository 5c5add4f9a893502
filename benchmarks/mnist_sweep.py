"""DomainBed's protocol on the real MNIST: the ten methods of the paper's table, and IDGM.

    python benchmarks/mnist_sweep.py               # runs what is missing, and shows the tables

Cut to what half an hour on one GPU allows: default hyperparameters instead of a search, fewer steps than
5,001. MNIST's files are read from SHOAL_DATA.
"""

from __future__ import annotations

import argparse
import sys

import shoal

ALGORITHMS = ["erm", "irm", "groupdro", "mixup", "mldg", "coral", "mmd", "dann", "cdann", "fish", "idgm"]
STEPS = {"coloured-mnist": 1500, "rotated-mnist": 1200}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", default="runs/mnist-sweep")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    failed = 0
    for dataset, steps in STEPS.items():
        fixed = {"seeds": 3, "search": 1, "eval_every": 300, "precision": "bf16", "jobs": args.jobs}
        out = f"{args.out}/{dataset}"
        result = shoal.sweep(dataset, algorithms=ALGORITHMS, steps=steps, out=out, **fixed)
        print(result)
        failed += len(result.failed)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
