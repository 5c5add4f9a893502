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
SPRITES = [
    *["--data", "domains=10", "size=32", "--seeds", "3", "--search", "2", "--steps", "1000"],
    *["--batch", "64", "--eval-every", "250", "--eval-limit", "20000"],
]
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
    "cdsprites": [["cdsprites", *SPRITES]],
}
REGROUPED = ["--algorithms", "fish", "--draw", "regrouped"]
"""Fish makes as many optimizer steps on the same examples, and knows nothing of domains."""
CONTROLS = [
    ["rotated-mnist", "--leave-out", "0°", *MNIST, *REGROUPED],
    ["cdsprites", *SPRITES, *REGROUPED],
]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", nargs="*", help=f"of {', '.join(COMPARISONS)}, controls (default: all)")
    parser.add_argument("--out", default="runs/comparison")
    parser.add_argument("--device")
    parser.add_argument("--at-once")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--no-run", action="store_true")
    given = parser.parse_args()
    more: list[str] = []
    for option in ("device", "at_once"):
        if value := getattr(given, option):
            more += [f"--{option.replace('_', '-')}", value]
    more += ["--plan"] * given.plan + ["--no-run"] * given.no_run
    codes = []
    for name in given.which or [*COMPARISONS, "controls"]:
        out = f"{given.out}-controls" if name == "controls" else given.out
        for arguments in CONTROLS if name == "controls" else COMPARISONS[name]:
            codes.append(shoal(["compare", *arguments, *more, "--out", out]))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
