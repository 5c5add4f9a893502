"""How long 50,000 records take to load and tabulate, against reading each of them.

python benchmarks/results_store.py [--records 50000]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.cli import main as shoal
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord, read_record
from shoal.experiments.results import load
from shoal.experiments.store import INDEX, record_files

DATASETS = {
    "pacs": ["art", "cartoon", "photo", "sketch"],
    "digits": ["0°", "15°", "30°", "45°", "60°", "75°"],
}
ALGORITHMS = ["erm", "fish", "idgm", "irm", "vrex", "coral", "mmd", "dann", "groupdro", "mixup"]


def record(number: int) -> RunRecord:
    """Like those of a comparison: ten evaluations of three splits, about 9 KB."""
    chance = random.Random(number)
    dataset = chance.choice(list(DATASETS))
    out = chance.choice(DATASETS[dataset])
    rest = [name for name in DATASETS[dataset] if name != out]
    algorithm = ALGORITHMS[number % len(ALGORITHMS)]
    config = RunConfig(
        dataset,
        algorithm,
        1000,
        data_options={"test": out},
        settings={} if algorithm == "erm" else {f"{algorithm}_weight": 10 ** chance.uniform(-2, 2)},
        optimizer_options={"lr": 10 ** chance.uniform(-5, -3)},
        seed=number,
        eval_every=100,
        select="best",
        label=algorithm,
    )

    def scores(names: list[str]) -> dict[str, Any]:
        found = {name: chance.random() for name in names}
        mean = sum(found.values()) / len(found)
        whole = {"metric": "accuracy", "average": mean, "mean": mean, "loss": chance.random()}
        return {**whole, "domains": found, "sizes": [500] * len(names)}

    history = tuple(
        {
            "step": step,
            "passes": 3 * step,
            "loss": chance.random(),
            "scores": {"train": scores(rest), "validation": scores(rest), "test": scores([out])},
        }
        for step in range(100, 1001, 100)
    )
    environment = {"shoal": "0.1.0", "python": "3.11", "torch": "2", "device": "cpu", "threads": "1"}
    return RunRecord(config, "finished", history, 7, "best on validation", 12.5, environment)


def write(folder: Path, numbers: range) -> None:
    """Without waiting for the disk, as Store.save would for each."""
    for number in numbers:
        made = record(number)
        (folder / f"{made.config.identity}.json").write_text(json.dumps(made.to_dict()), encoding="utf-8")


def timed(what: str, work: Callable[[], Any], base: float | None = None) -> float:
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    ratio = f"{base / seconds:8.1f} × as fast as reading all" if base else ""
    print(f"{what:44} {seconds:8.2f} s{ratio}", flush=True)
    return seconds


def table(folder: Path, *more: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        assert shoal(["results", str(folder), *more]) == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=50_000)
    count = parser.parse_args().records
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write(folder, range(count))
        files = sorted(folder.glob("*.json"))
        size = sum(path.stat().st_size for path in files)
        print(f"{count:,} records of {size / count / 1000:.1f} KB")
        base = timed("read_record of each", lambda: [read_record(path) for path in files])
        timed("looking at each file's size and time", lambda: record_files(folder), base)
        timed("first load, which writes the index", lambda: load(folder), base)
        print(f"{'the index':44} {(folder / INDEX).stat().st_size / 1e6:8.1f} MB")
        timed("second load", lambda: load(folder), base)
        write(folder, range(count, count + 100))
        timed("load with 100 new records", lambda: load(folder), base)
        results = load(folder)
        assert len(results) == count + 100
        timed("grouping by dataset and algorithm", lambda: results.group(["dataset", "algorithm"]), base)
        query = 'algorithm == "fish" and test > 0.5 and lr < 1e-4'
        timed("a query", lambda: results.where(query), base)
        timed("shoal results", lambda: table(folder), base)
        timed(
            "shoal results --group dataset algorithm",
            lambda: table(folder, "--group", "dataset", "algorithm"),
            base,
        )
        timed("shoal results --csv", lambda: table(folder, "--csv", str(folder / "all.csv")), base)


if __name__ == "__main__":
    main()
