"""Does the race of `shoal compare` recommend what the exhaustive comparison recommends?

    python benchmarks/replay.py --data DATA --out runs/replay

Six datasets of at most 2,000 rows are compared exhaustively. The race then runs in the same folder, where it
finds the records of its runs: it is replayed. ``DATA`` has the tables of benchmarks/natural.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd

import shoal
from shoal.datasets.example import write_table

TABLES = {"gusto": ("day30", "regl"), "vote2016": ("votetrump", "state"), "beijing": ("PM2.5", "station")}
REVIEWS = "product_reviews", "positive", "category"
EFFORT: dict[str, Any] = {"seeds": 2, "search": 2, "folds": 4, "progress": False}


def sources(data: Path, out: Path) -> dict[str, tuple[Any, dict[str, str]]]:
    """Data and options by name; of large tables 1,600 rows of the eight largest domains."""
    write_table(out / "patients.csv")
    found: dict[str, tuple[Any, dict[str, str]]] = {
        "heart": ("heart", {}),
        "patients": (str(out / "patients.csv"), {"label": "ill", "domain": "hospital"}),
    }
    for name, label, domain in [*((n, *roles) for n, roles in TABLES.items()), REVIEWS]:
        frame = pd.read_csv(data / f"{name}.csv.gz").dropna(subset=[label, domain])
        frame = frame[frame[domain].isin(frame[domain].value_counts().index[:8])]
        frame.sample(1600, random_state=0).to_csv(out / f"{name}.csv", index=False)
        found[name] = str(out / f"{name}.csv"), {"label": label, "domain": domain}
    found["beijing"][1]["task"] = "regression"  # its label has whole numbers only
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    print("| data | exhaustive | race | runs | runs of the race | score of the race's row | of the other |")
    print("|---|---|---|---|---|---|---|")
    for name, (data, options) in sources(given.data, given.out).items():
        out = given.out / name
        whole = shoal.compare(data, **options, **EFFORT, exhaustive=True, out=out)  # type: ignore[arg-type]
        race = shoal.compare(data, **options, **EFFORT, out=out)  # type: ignore[arg-type]
        rows = {row["algorithm"]: row["average"]["mean"] for row in whole.result["rows"]}
        found: list[Any] = [each.recommendation for each in (whole, race)]
        named = [each.row or f"none (nearest {each.nearest})" for each in found]
        counts = [str(len(each.records)) for each in (whole, race)]
        scores = [f"{rows[each.nearest]:.4g}" for each in reversed(found)]
        print(f"| {' | '.join([name, *named, *counts, *scores])} |", flush=True)


if __name__ == "__main__":
    main()
