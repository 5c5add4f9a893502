"""DomainBed's protocol on the real MNIST: the ten methods of the paper's table, and IDGM.

    python benchmarks/mnist_sweep.py --plan        # the list of runs, and nothing is run
    python benchmarks/mnist_sweep.py               # runs what is missing, and shows the tables
    python benchmarks/mnist_sweep.py --no-run      # tables from the runs that are there

Cut to what half an hour on one GPU allows: default settings instead of 20 draws, fewer steps than 5,001.
MNIST's files are read from SHOAL_DATA.
"""

from __future__ import annotations

import argparse
import sys

from shoal.cli import main as shoal
from shoal.experiments import protocol

ALGORITHMS = ["erm", "irm", "groupdro", "mixup", "mldg", "coral", "mmd", "dann", "cdann", "fish", "idgm"]
STEPS = {"coloured-mnist": 1500, "rotated-mnist": 1200}
TRIALS, DRAWS, EVAL_EVERY, PRECISION = 3, 1, 300, "bf16"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="runs/mnist-sweep")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--no-run", action="store_true")
    parser.add_argument("--jobs", default="1")
    given = parser.parse_args()
    if given.plan:
        plan()
        return 0
    for dataset, steps in STEPS.items():
        arguments = ["--datasets", dataset, "--algorithms", *ALGORITHMS, "--steps", str(steps)]
        arguments += ["--seeds", str(TRIALS), "--search", str(DRAWS), "--eval-every", str(EVAL_EVERY)]
        arguments += ["--precision", PRECISION, "--out", f"{given.out}/{dataset}"]
        arguments += ["--no-run"] if given.no_run else ["--jobs", given.jobs]
        if code := shoal(["sweep", *arguments]):
            return code
    return 0


def plan() -> None:
    for dataset, steps in STEPS.items():
        configs = protocol.plan(
            {dataset: {}},
            ALGORITHMS,
            trials=TRIALS,
            draws=DRAWS,
            steps=steps,
            eval_every=EVAL_EVERY,
            precision=PRECISION,
        )
        print(
            f"{len(configs)} runs of {steps} steps on {dataset}, {PRECISION}, every {EVAL_EVERY} looked at:"
        )
        for c in configs:
            out, trial = ", ".join(c.protocol["leave_out"]), c.protocol["trial"]
            rate, size = c.optimizer_options["lr"], c.batch_size
            print(f"{c.identity}  {out:5}  {c.name:9} trial {trial}  rate {rate:g}  batch {size}")


if __name__ == "__main__":
    sys.exit(main())
