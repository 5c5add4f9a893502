"""Every algorithm on every small dataset, with settings searched inside the training domains.

    python benchmarks/comparison.py --plan                 # write down all runs, and run nothing
    python benchmarks/comparison.py heart digits           # some of them
    python benchmarks/comparison.py --no-run               # tables from the runs that are there

Calls `shoal compare` with what is fixed here. MNIST and the heart data are read from SHOAL_DATA.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean

from shoal.cli import main as shoal
from shoal.report.tables import Table, percent

# On the real MNIST at most 200 runs were to be had: the ten of the paper's table, IDGM, and five later ones,
# with Fish's control on one of the two.
SIXTEEN = [
    *["erm", "irm", "groupdro", "mixup", "mldg", "coral", "mmd", "dann", "cdann", "fish", "idgm"],
    *["vrex", "fishr", "and-mask", "pcgrad", "sam"],
]
MNIST = [
    *["--seeds", "3", "--search", "2", "--steps", "1000", "--batch-size", "64", "--eval-every", "250"],
    *["--precision", "bf16"],
]
# Fish makes S optimizer steps where others make one. With its batches regrouped it does so too, on the same
# examples, and knows nothing of domains.
ALL = ["--algorithms", "all", "fish:regrouped"]
DIGITS = [*ALL, "--seeds", "5", "--search", "2", "--steps", "300", "--batch-size", "16"]
SPRITES = [
    *ALL,
    *["--data", "domains=10", "size=32", "--seeds", "3", "--search", "2", "--steps", "1000"],
    *["--batch-size", "64", "--eval-every", "250", "--eval-limit", "20000"],
]
COMPARISONS: dict[str, list[list[str]]] = {
    "heart": [["heart", *ALL, "--seeds", "5", "--search", "3", "--steps", "300", "--batch-size", "32"]],
    "digits": [
        ["coloured-digits", "--held-out=-90%", *DIGITS],
        ["rotated-digits", "--held-out", "75°", *DIGITS],
    ],
    "mnist": [
        ["coloured-mnist", "--held-out=-90%", "--algorithms", *SIXTEEN, *MNIST],
        ["rotated-mnist", "--held-out", "0°", "--algorithms", *SIXTEEN, "fish:regrouped", *MNIST],
    ],
    "cdsprites": [["cdsprites", *SPRITES]],
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", nargs="*", choices=[*COMPARISONS, []], help="(default: all)")
    parser.add_argument("--out", default="runs/comparison")
    parser.add_argument("--device")
    parser.add_argument("--jobs")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--no-run", action="store_true")
    given = parser.parse_args()
    more: list[str] = []
    for option in ("device", "jobs"):
        if value := getattr(given, option):
            more += [f"--{option.replace('_', '-')}", value]
    more += ["--plan"] * given.plan + ["--no-run"] * given.no_run
    code = 0
    for name in given.which or COMPARISONS:
        for arguments in COMPARISONS[name]:
            code = max(code, shoal(["compare", *arguments, *more, "--out", given.out]))
    if not given.plan:
        print(f"\n{overall(Path(given.out)).markdown()}")
    return code


def overall(folder: Path) -> Table:
    """Averages over domains left out by dataset, and the mean rank where all algorithms were compared."""
    found = [json.loads(p.read_text(encoding="utf-8")) for p in sorted(folder.glob("compare-*.json"))]
    rows = {r["dataset"]: {row["algorithm"]: row for row in r["rows"]} for r in found}
    most = max(map(len, rows.values()), default=0)
    whole = [d for d, by_name in rows.items() if len(by_name) == most]
    names = {name for by_name in rows.values() for name in by_name}
    ranks = {n: fmean(rows[d][n]["rank"] for d in whole) for n in names if all(n in rows[d] for d in whole)}
    table = Table(["algorithm", *rows, f"mean rank in {len(whole)}"])
    for name in sorted(ranks, key=lambda n: ranks[n]):
        cells = [percent(rows[d][name]["average"]["values"]) if name in rows[d] else "" for d in rows]
        table.add(name, *cells, f"{ranks[name]:.1f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
