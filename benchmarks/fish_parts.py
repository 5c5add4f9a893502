"""Which part of Fish finds the shape? Variations on the demo's setting, and direct IDGM beside them.

    python benchmarks/fish_parts.py --seeds 2        # on one core ten minutes a run of IDGM, two to five else

Everything is as in `shoal demo` (32×32, N = 10, Adam, inner state carried), with twice its passes, but for
what the row's name says. Runs that are in the folder already are not repeated.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from shoal.experiments.config import RunConfig
from shoal.experiments.execute import Store, execute
from shoal.paper.cdsprites import CARRY, DEMO, Method, configs, demo_table

RESET = {**CARRY, "inner_state": "reset"}
SETTING = {**DEMO, "passes": 12_000}


def rows(seeds: range) -> list[RunConfig]:
    adam = [
        Method("Fish", "fish", CARRY),
        Method("Fish, inner state reset", "fish", RESET),
        Method("SmoothFish, γ=0: no walk, reset", "smoothfish", {**RESET, "gamma": 0.0}),
        Method("IDGM", "idgm"),
    ]
    palette = [Method("Fish, random palette", "fish", CARRY)]
    return [
        *configs(adam, [10], seeds, **SETTING),
        *configs(palette, [10], seeds, palette="random", **SETTING),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("fish-parts"))
    parser.add_argument("--no-run", action="store_true", help="only show the runs that are there")
    given = parser.parse_args()
    store, every = Store(given.out), rows(range(given.seeds))
    records = store.found(every) if given.no_run else execute(every, store).usable()
    print(demo_table(records).text())


if __name__ == "__main__":
    main()
