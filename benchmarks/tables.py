"""What reading and encoding a table costs, beside ``pandas.read_csv`` alone.

    python benchmarks/tables.py [--rows 200000] [--timestamp]

A CSV file of ten numbers, a category and a domain (and a time stamp) is read, its kinds are decided, an
encoder is fitted and all rows are encoded; each in a process of its own, with the imports counted out.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd


def write(path: Path, rows: int, timestamp: bool) -> None:
    random = np.random.default_rng(0)
    columns = {f"x{n}": random.normal(10.0 * n, n + 1, rows).round(4) for n in range(10)}
    frame = pd.DataFrame(columns).assign(
        colour=random.choice(["red", "green", "blue"], rows), site=random.integers(0, 20, rows)
    )
    if timestamp:
        frame["when"] = pd.Timestamp("2020-01-01") + pd.to_timedelta(
            random.integers(0, 10**8, rows), unit="s"
        )
    frame.to_csv(path, index=False)


def measure(how: str, path: str) -> None:
    """CPU seconds and the growth of the largest resident set, as JSON."""
    from shoal.data.tables import Encoder, as_table

    pd.read_csv(__file__, nrows=0)
    pd.array(["x"], pd.StringDtype("pyarrow"))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    if how == "pandas":
        pd.read_csv(path)
    else:
        table = as_table(path)
        Encoder.fit(table).transform(table)
    cpu, after = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"cpu_s": round(cpu, 3), "mib": round((after - before) / 1024)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--timestamp", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        write(path, args.rows, args.timestamp)
        for how in ("pandas", "shoal"):
            code = f"import runpy; runpy.run_path({__file__!r})['measure']({how!r}, {str(path)!r})"
            done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
            print(f"{how:8}{done.stdout.strip()}")


if __name__ == "__main__":
    main()
