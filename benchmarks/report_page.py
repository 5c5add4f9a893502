"""How large the page of 500 runs is, and how fast Chromium opens it.

python benchmarks/report_page.py [--keep DIR]
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.report import page
from shoal.report.groups import Run, grouped

DATASETS = {
    "pacs": ["art", "cartoon", "photo", "sketch", "clip art"],
    "digits": ["0°", "15°", "30°", "45°", "60°"],
}
ALGORITHMS = ["erm", "fish", "idgm", "irm", "vrex", "coral", "mmd", "dann", "groupdro", "mixup"]
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1280,900 --dump-dom"
)
WATCH = """<script>addEventListener("load", () => {
  const laid = document.body.offsetHeight, at = performance.getEntriesByType("navigation")[0];
  document.body.dataset.times = [at.domContentLoadedEventEnd, performance.now(), laid].map(Math.round);
});</script></body>"""


def record(dataset: str, out: str, algorithm: str, seed: int, chance: random.Random) -> RunRecord:
    """Like those of a comparison: ten evaluations of three splits and the agreement of gradients."""
    rest = [name for name in DATASETS[dataset] if name != out]
    config = RunConfig(
        dataset,
        algorithm,
        1000,
        data_options={"test": out},
        settings={} if algorithm == "erm" else {"weight": chance.random(), "start": 0.1},
        seed=seed,
        eval_every=100,
        select="best",
        holdout=0.2,
        label=algorithm,
    )

    def scores(names: list[str], at: float) -> dict[str, Any]:
        found = {name: at * chance.uniform(0.8, 1) for name in names}
        mean = sum(found.values()) / len(found)
        return {"metric": "accuracy", "average": mean, "mean": mean, "loss": 1.0, "domains": found}

    history, agreement = [], []
    for step in range(100, 1001, 100):
        at = 1 - 0.7 * 0.7 ** (step / 100)
        splits = {"train": scores(rest, at), "validation": scores(rest, at), "test": scores([out], 0.8 * at)}
        history.append({"step": step, "passes": 3 * step, "loss": 1 - at, "scores": splits})
        values = [[1.0 if a == b else chance.uniform(-0.2, 0.9) for b in rest] for a in rest]
        matrix = {"domains": rest, "values": values}
        point = {"step": step, "mean_cosine": at / 2, "sign_agreement": at / 3, "matrix": matrix}
        agreement.append(point)
    where = {"shoal": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "numpy": "2.3", "device": "cpu"}
    usual = RunRecord(config, "finished", tuple(history), 9, "best on validation", 12.5, where)
    return RunRecord(**{**vars(usual), "agreement": tuple(agreement)})


def opened(path: Path) -> list[int] | None:
    """Milliseconds until the page was read, and until it was laid out; ``None`` without Chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        return None
    with tempfile.TemporaryDirectory() as profile:
        command = [chromium, *FLAGS.split(), f"--user-data-dir={profile}", path.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'data-times="(\d+),(\d+),', done.stdout)
    return [int(found[1]), int(found[2])] if found else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the page there")
    given = parser.parse_args()
    chance = random.Random(0)
    runs = [
        Run(record(dataset, out, algorithm, seed, chance), f"runs/{dataset}-{algorithm}-{out}-{seed}.json")
        for dataset, domains in DATASETS.items()
        for algorithm in ALGORITHMS
        for out in domains
        for seed in range(5)
    ]
    began = time.perf_counter()
    html = page.render(page.Content(grouped(runs, [], []), title=f"{len(runs)} runs"))
    took = time.perf_counter() - began
    print(f"{len(runs)} runs: {len(html.encode()) / 1e6:.2f} MB, made in {took:.1f} s")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text(html.replace("</body>", WATCH), encoding="utf-8")
        if given.keep:
            (given.keep / "report-500.html").write_text(html, encoding="utf-8")
        for _ in range(3):
            times = opened(path)
            if times is None:
                print("Chromium is not there, or the page did not load")
                return
            print(f"read after {times[0]} ms, laid out after {times[1]} ms")


if __name__ == "__main__":
    main()
