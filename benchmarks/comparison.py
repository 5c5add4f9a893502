"""Every algorithm on every small dataset, with settings searched inside the training domains.

    python benchmarks/comparison.py                        # runs what is missing, and shows the tables
    python benchmarks/comparison.py heart digits           # some of them

Calls `shoal.compare` with what is fixed here. MNIST and the heart data are read from SHOAL_DATA.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import shoal
from shoal.experiments.statistics import plus_minus
from shoal.report.tables import Table

# On the real MNIST at most 200 runs were to be had: the ten of the paper's table, IDGM, and five later ones,
# with Fish's control on one of the two.
SIXTEEN = [
    *["erm", "irm", "groupdro", "mixup", "mldg", "coral", "mmd", "dann", "cdann", "fish", "idgm"],
    *["vrex", "fishr", "and-mask", "pcgrad", "sam"],
]
# Fish makes S optimizer steps where others make one. With its batches regrouped it does so too, on the same
# examples, and knows nothing of domains.
ALL = {"algorithms": ["all", "fish:regrouped"]}
LONG = {"seeds": 3, "search": 2, "steps": 1000, "batch_size": 64, "eval_every": 250}
MNIST = {**LONG, "precision": "bf16"}
DIGITS = {**ALL, "seeds": 5, "search": 2, "steps": 300, "batch_size": 16}
SPRITES = {**ALL, **LONG, "data_options": {"domains": 10, "size": 32}, "eval_limit": 20000}
COMPARISONS: dict[str, dict[str, dict[str, Any]]] = {
    "heart": {"heart": {**ALL, "seeds": 5, "search": 3, "steps": 300, "batch_size": 32}},
    "digits": {
        "coloured-digits": {"held_out": "-90%", **DIGITS},
        "rotated-digits": {"held_out": "75°", **DIGITS},
    },
    "mnist": {
        "coloured-mnist": {"held_out": "-90%", "algorithms": SIXTEEN, **MNIST},
        "rotated-mnist": {"held_out": "0°", "algorithms": [*SIXTEEN, "fish:regrouped"], **MNIST},
    },
    "cdsprites": {"cdsprites": SPRITES},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("which", nargs="*", choices=[*COMPARISONS, []], help="(default: all)")
    parser.add_argument("--out", default="runs/comparison")
    parser.add_argument("--device")
    parser.add_argument("--jobs", type=int)
    args = parser.parse_args()
    found = {}
    for name in args.which or COMPARISONS:
        for data, options in COMPARISONS[name].items():
            found[data] = shoal.compare(data, **options, device=args.device, jobs=args.jobs, out=args.out)
            print(found[data])
    print(f"\n{overall(found).markdown()}")
    return int(any(one.failed for one in found.values()))


def overall(found: Mapping[str, shoal.Comparison]) -> Table:
    """Averages over held-out domains by dataset, and the mean rank where all algorithms were compared."""
    rows = {name: {row["algorithm"]: row for row in one.result["rows"]} for name, one in found.items()}
    most = max(map(len, rows.values()))
    whole = [d for d, by_name in rows.items() if len(by_name) == most]
    names = {name for by_name in rows.values() for name in by_name}
    ranks = {n: fmean(rows[d][n]["rank"] for d in whole) for n in names if all(n in rows[d] for d in whole)}
    table = Table(["algorithm", *rows, f"mean rank in {len(whole)}"])
    for name in sorted(ranks, key=lambda n: ranks[n]):
        cells = [
            plus_minus(100 * v for v in rows[d][name]["average"]["values"]) if name in rows[d] else ""
            for d in rows
        ]
        table.add(name, *cells, f"{ranks[name]:.1f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
