"""Every algorithm on every small dataset, with settings searched inside the training domains.

    python benchmarks/comparison.py --plan                 # write down all runs, and run nothing
    python benchmarks/comparison.py heart digits           # some of them
    python benchmarks/comparison.py --no-run               # tables from the runs that are there

Calls `shoal compare` with what is fixed here. MNIST and the heart data are read from SHOAL_DATA.
"""

from __future__ import annotations

import argparse
import sys

from shoal.cli import main as shoal

# On the real MNIST at most 200 runs were to be had: the ten of the paper's table, IDGM, and five later ones.
SIXTEEN = [
    *["erm", "irm", "groupdro", "mixup", "mldg", "coral", "mmd", "dann", "cdann", "fish", "idgm"],
    *["vrex", "fishr", "and-mask", "pcgrad", "sam"],
]
MNIST = [
    *["--algorithms", *SIXTEEN, "--seeds", "3", "--search", "2", "--steps", "1000", "--batch", "64"],
    *["--eval-every", "250", "--precision", "bf16"],
]
DIGITS = ["--seeds", "5", "--search", "2", "--steps", "300", "--batch", "16"]
COMPARISONS: dict[str, list[list[str]]] = {
    "heart": [["heart", "--seeds", "5", "--search", "3", "--steps", "300", "--batch", "32"]],
    "digits": [
        ["coloured-digits", "--leave-out=-90%", *DIGITS],
        ["rotated-digits", "--leave-out", "75°", *DIGITS],
    ],
    "mnist": [
        ["coloured-mnist", "--leave-out=-90%", *MNIST],
        ["rotated-mnist", "--leave-out", "0°", *MNIST],
    ],
    "cdsprites": [
        [
            *["cdsprites", "--data", "domains=10", "size=32", "--seeds", "3", "--search", "2"],
            *["--steps", "1000", "--batch", "64", "--eval-every", "250", "--eval-limit", "20000"],
        ]
    ],
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", nargs="*", choices=[*COMPARISONS, []], help="(default: all)")
    parser.add_argument("--out", default="runs/comparison")
    parser.add_argument("--device")
    parser.add_argument("--at-once")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--no-run", action="store_true")
    given = parser.parse_args()
    more = ["--out", given.out]
    for option in ("device", "at_once"):
        if value := getattr(given, option):
            more += [f"--{option.replace('_', '-')}", value]
    more += ["--plan"] * given.plan + ["--no-run"] * given.no_run
    codes = [shoal(["compare", *c, *more]) for name in given.which or COMPARISONS for c in COMPARISONS[name]]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
