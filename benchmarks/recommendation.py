"""Whether what `shoal compare` recommends is good in domains that nobody has seen.

    python benchmarks/recommendation.py --tasks 100 --jobs 16 --out recommendation.jsonl

A task is a generated table of 6 to 12 domains. A comparison recommends a row. Then every row is trained on
all these domains, with the settings that most of its trials chose, and scored on 30 fresh domains drawn
from the same generator (the mean of three seeds). Counted is in how many tasks the recommended row is within
one point of the best row there (controls included): 0.01 of accuracy, or of the variance in regression. Where
the rule finds that row no better than the majority class, and so recommends none, it is counted all the same;
beside it stands how often that happened, and how often it was right in fresh domains. To take a minute or two
per task, trainings are short, at a higher learning rate than the default, and the search has one setting.

Each task is a line of JSON in --out, which is resumed; the summary applies the rule of this version to the
scores in it. The same --seed makes the same tasks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.experiments import baselines, compare
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.run import run
from shoal.report.tables import Table

FRESH, FRESH_ROWS, REFITS = 30, 200, 3
POINT, RATE = 0.01, 3e-3
Array = NDArray[np.float64]


@dataclass
class World:
    """What all domains of a task have in common; :meth:`domain` draws one."""

    rng: np.random.Generator
    family: str
    columns: int

    def __post_init__(self) -> None:
        rng = self.rng
        self.weights = rng.normal(size=self.columns) * (rng.random(self.columns) < 0.6)
        self.weights[0] = 1.0
        self.noise = rng.uniform(0.3, 1.5)
        self.pairs = rng.choice(self.columns, size=(2, 2))
        self.spread = rng.uniform(0.2, 0.8)
        """How far the inputs of domains are apart."""
        self.reversed = rng.uniform(0.1, 0.35)
        self.strength = rng.uniform(0.5, 2.0)

    def domain(self, rows: int) -> tuple[Array, Array]:
        """Inputs, and labels: classes 0 and 1, or in regression a number."""
        rng, family = self.rng, self.family
        shift = self.spread * rng.normal(size=self.columns)
        if family == "covariate shift":
            shift = 2.0 * rng.normal(size=self.columns)
        x = rng.normal(size=(rows, self.columns)) + shift
        signal = SIGNALS.get(family, linear)(self, x)
        if family.startswith("regression"):
            return x, signal + self.noise * rng.normal(size=rows)
        if family == "noise":
            return x, (rng.random(rows) < 0.5).astype(float)
        if family == "label shift":
            signal = signal + 2.0 * rng.normal()
        y = (signal + self.noise * rng.logistic(size=rows) > 0).astype(float)
        if family == "shortcut":
            sign = -1.0 if rng.random() < self.reversed else 1.0
            shown = sign * self.strength * (2 * y - 1) + rng.normal(size=rows)
            x = np.column_stack([x, shown])
        return x, y


def linear(world: World, x: Array) -> Array:
    return x @ world.weights


def interaction(world: World, x: Array) -> Array:
    (a, b), (c, d) = world.pairs
    return 1.5 * x[:, a] * x[:, b] + np.abs(x[:, c]) * x[:, d] + 0.3 * linear(world, x)


def waves(world: World, x: Array) -> Array:
    return 2 * np.sin(1.5 * x[:, 0]) + 0.5 * linear(world, x)


def own_slopes(world: World, x: Array) -> Array:
    """Every domain has slopes of its own, around common ones."""
    return x @ (world.weights + 0.7 * world.rng.normal(size=world.columns))


SIGNALS: dict[str, Callable[[World, Array], Array]] = {
    "interaction": interaction,
    "covariate shift": waves,
    "own slopes": own_slopes,
    "regression, interaction": interaction,
}
FAMILIES = (
    *("linear", "interaction", "shortcut", "covariate shift", "label shift", "noise", "unequal sizes"),
    *("own slopes", "regression, linear", "regression, interaction"),
)


def tables(number: int, seed: int, folder: Path) -> tuple[str, Path, Path, list[str]]:
    """The family, the table that is compared on, the same with fresh domains, and the names of these."""
    rng = np.random.default_rng([seed, number])
    family = FAMILIES[number % len(FAMILIES)]
    world = World(rng, family, int(rng.integers(4, 11)))
    count, usual = int(rng.integers(6, 13)), int(rng.integers(50, 150))
    sizes = [usual] * count
    if family == "unequal sizes":
        sizes = [int(20 * 2 ** rng.uniform(0, 5)) for _ in range(count)]
    parts = [(f"d{n}", world.domain(size)) for n, size in enumerate(sizes)]
    fresh = [(f"fresh{n}", world.domain(FRESH_ROWS)) for n in range(FRESH)]
    given, whole = folder / "given.csv", folder / "whole.csv"
    _write(given, parts, family)
    _write(whole, [*parts, *fresh], family)
    return family, given, whole, [name for name, _ in fresh]


def _write(path: Path, parts: Sequence[tuple[str, tuple[Array, Array]]], family: str) -> None:
    columns = parts[0][1][0].shape[1]
    lines = [",".join([*(f"x{n}" for n in range(columns)), "domain", "y"])]
    for name, (x, y) in parts:
        for row, label in zip(x, y, strict=True):
            value = f"{label:.6f}" if family.startswith("regression") else ("no", "yes")[int(label)]
            lines.append(",".join([*(f"{v:.5f}" for v in row), name, value]))
    path.write_text("\n".join(lines))


def one(config: RunConfig) -> RunRecord:
    return run(config, "cpu")


def task(number: int, given: argparse.Namespace) -> dict[str, Any]:
    """The scores of a comparison and those in fresh domains, row by row."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    began = time.process_time()
    with tempfile.TemporaryDirectory() as name:
        family, path, whole, fresh = tables(number, given.seed, Path(name))
        options = {"file": str(path), "label": "y", "domain": "domain"}
        where = compare.layout("table", options)
        usual, steps = where.defaults, given.steps
        base = RunConfig("table", "erm", steps, options, batch_size=usual["batch"], eval_every=steps // 5)
        base = replace(base, optimizer_options={"lr": RATE})
        able = (
            compare.LeaveDomainsOut(base, usual["algorithms"], where.held_out, 1, 1)
            .checked("cpu", False)[0]
            .rows
        )
        asked = (where.held_out, range(given.seeds), given.search)
        configs = compare.plan(base, [*able, *baselines.names(where.classes)], *asked)
        result = compare.results(configs, [one(c) for c in configs])
        compared = time.process_time() - began
        rows = [row for row in result["rows"] if row["rank"] is not None]
        names = [row["algorithm"] for row in rows]
        chosen = {n: compare.selected_trial(configs, result["trials"], n) for n in names}
        fresh_scores: dict[str, list[list[float]]] = {name: [] for name in chosen}
        for seed in range(REFITS):  # the outer loop: all rows share the table of a seed
            for name, found in chosen.items():
                assert found is not None  # a row with a rank has chosen settings in every trial
                again = replace(found[0], data_options={**options, "file": str(whole), "held_out": fresh})
                fresh_scores[name].append(_test(one(compare.for_seed(again, seed))))
        kept = [_kept(r) | {"fresh": np.mean(fresh_scores[r["algorithm"]], 0).tolist()} for r in rows]
    return {
        "task": number,
        "family": family,
        "lower": result["lower_is_better"],
        "rows": kept,
        "seconds": [round(compared, 1), round(time.process_time() - began, 1)],
        "runs": len(configs),
    }


def _test(record: RunRecord) -> list[float]:
    return list(record.history[record.selected]["scores"]["test"]["domains"].values())


def _kept(row: dict[str, Any]) -> dict[str, Any]:
    """What the rule needs of a row."""
    domains = {name: {"values": about["values"]} for name, about in row["domains"].items()}
    kept = {name: row[name] for name in ("algorithm", "control", "rank", "worst", "average")}
    return {**kept, "domains": domains}


@dataclass
class Verdict:
    """What the rule recommends in a task, and what that and other ways to choose cost in fresh domains."""

    take: str
    none: bool
    gain: float
    """Over the majority class, in fresh domains."""
    regret: dict[str, float]
    worst: tuple[float, float]

    @classmethod
    def of(cls, content: dict[str, Any]) -> Verdict:
        rows, lower = {r["algorithm"]: r for r in content["rows"]}, content["lower"]
        sign = -1.0 if lower else 1.0
        about = compare.recommendation(list(rows.values()), lower)
        assert about is not None
        none = not about.get("majority", {"better": True})["better"]
        take = about["take"] or about["begin"]
        fresh = {name: float(np.mean(sign * np.array(r["fresh"]))) for name, r in rows.items()}
        best = max(fresh, key=lambda name: fresh[name])
        ways = {
            "rule": take,
            "rule, else majority": compare.MAJORITY if none else take,
            "best": about["best"],
        }
        ways |= {name: name for name in ("erm", baselines.BOOSTING, baselines.LOGISTIC, "majority")}
        ways[baselines.LOGISTIC] = next(n for n in (baselines.LOGISTIC, baselines.RIDGE) if n in rows)
        worst = tuple(float(np.min(sign * np.array(rows[name]["fresh"]))) for name in (take, best))
        regret = {way: fresh[best] - fresh[name] for way, name in ways.items() if name in fresh}
        return cls(take, none, fresh[take] - fresh[compare.MAJORITY], regret, worst)  # type: ignore[arg-type]


def summary(contents: Sequence[dict[str, Any]]) -> str:
    every = {c["task"]: Verdict.of(c) for c in contents}
    families = {f: [every[c["task"]] for c in contents if c["family"] == f] for f in FAMILIES}
    shown = Table(
        [
            *("family", "tasks", "within one point", "mean regret", "not better than majority", "rightly"),
            *("worst fresh domain", "of the best row", "recommended"),
        ]
    )
    for family, found in [*families.items(), ("all", list(every.values()))]:
        if not found:
            continue
        within = sum(v.regret["rule"] <= POINT for v in found)
        names = ", ".join(f"{name} {n}" for name, n in Counter(v.take for v in found).most_common())
        shown.add(
            *(family, len(found), within, f"{statistics.fmean(v.regret['rule'] for v in found):.4f}"),
            *(sum(v.none for v in found), sum(v.none and v.gain <= POINT for v in found)),
            *(f"{statistics.fmean(v.worst[n] for v in found):.3f}" for n in (0, 1)),
            names,
        )
    ways = Table(["always take", "within one point", "mean regret"])
    for way in next(iter(every.values())).regret:
        known = [v.regret[way] for v in every.values() if way in v.regret]
        ways.add(way, f"{sum(r <= POINT for r in known)} of {len(known)}", f"{statistics.fmean(known):.4f}")
    seconds = [c["seconds"][1] for c in contents]
    took = f"{statistics.fmean(seconds):.0f} s of processor time per task, {max(seconds):.0f} at most"
    return "\n".join([shown.markdown(), "", ways.markdown(), "", f"{took}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("recommendation.jsonl"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--search", type=int, default=1)
    parser.add_argument("--steps", type=int, default=150)
    given = parser.parse_args()
    same = {"seed": given.seed, "seeds": given.seeds, "search": given.search, "steps": given.steps}
    lines = given.out.read_text().splitlines() if given.out.exists() else []
    contents = [c for line in lines if (c := json.loads(line))["options"] == same]
    todo = [n for n in range(given.tasks) if n not in {c["task"] for c in contents}]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(given.jobs, max(1, len(todo))), mp_context=context) as pool:
        for future in as_completed([pool.submit(task, number, given) for number in todo]):
            content = future.result() | {"options": same}
            contents.append(content)
            with given.out.open("a") as file:
                file.write(json.dumps(content) + "\n")
            said = f"task {content['task']}: {content['family']}, {content['seconds'][1]:.0f} s"
            print(said, file=sys.stderr, flush=True)
    contents = sorted((c for c in contents if c["task"] < given.tasks), key=lambda c: c["task"])
    print(summary(contents))


if __name__ == "__main__":
    main()
