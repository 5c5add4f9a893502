"""Which recipe for a pretrained model? PACS, MobileNetV2 with ImageNet weights, each domain held out in turn.

    python benchmarks/pacs.py run --data ~/data --out runs/pacs
    python benchmarks/pacs.py table benchmarks/results/records/2026-11-17-pacs.jsonl.gz

``run`` does what is missing in ``--out``, tier by tier; the same command resumes. The kept records were made
with version 0.3, on images decoded once and augmented on the GPU.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
SAME: dict[str, Any] = {"steps": 600, "batch_size": 32, "domains_per_step": 3, "lr": 1e-4, "eval_every": 30}
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Method:
    name: str
    algorithm: str
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    batchnorm: bool = False
    """Whether BatchNorm's statistics are trained."""
    tier: int = 1


SWAD = {"average": "swad"}
PLUS = {"warm_start": "head", "average": "sma", "retrain": True}
METHODS = (
    Method("ERM", "erm", options=SWAD),
    Method("Fish", "fish", {"meta_lr": 0.5}, SWAD),
    Method("Fish, random grouping", "fish", {"meta_lr": 0.5}, {**SWAD, "draw": "regrouped"}),
    Method("CORAL", "coral", options=SWAD),
    Method("MIRO", "erm", options={**SWAD, "miro": 0.1}),
    Method("ERM++", "erm", options=PLUS, batchnorm=True),
    Method("LP-FT", "erm", options={**SWAD, "warm_start": "head"}, tier=2),
    Method("ERM, BatchNorm trained", "erm", options=SWAD, batchnorm=True, tier=2),
    Method("ERM++, BatchNorm frozen", "erm", options=PLUS, tier=2),
    Method("ERM++ and MIRO", "erm", options={**PLUS, "miro": 0.1}, tier=2),
    Method("Fish++", "fish", {"meta_lr": 0.5}, PLUS, tier=2),
    Method("SAGM", "sagm", options=SWAD, tier=3),
    Method("SAM", "sam", options=SWAD, tier=3),
    Method("GGA", "gga", options=SWAD, tier=3),
    Method("GroupDRO", "groupdro", options=SWAD, tier=3),
    Method("Mixup", "mixup", options=SWAD, tier=3),
    Method("Fishr", "fishr", options=SWAD, tier=3),
)


def plan() -> Iterator[tuple[Method, str, int]]:
    """Tier by tier, so that what is cut off by the clock is the last tier."""
    for tier, seed, method, held_out in itertools.product((1, 2, 3), SEEDS, METHODS, DOMAINS):
        if method.tier == tier:
            yield method, held_out, seed


def run(data: Path, out: Path) -> None:
    import shoal

    out.mkdir(parents=True, exist_ok=True)
    there = {r["key"] for r in read(out / "results.jsonl")} if (out / "results.jsonl").exists() else set()
    for method, held_out, seed in plan():
        if (key := f"{method.name} | {held_out} | {seed}") in there:
            continue
        trained = shoal.train(
            method.algorithm,
            "pacs",
            held_out=held_out,
            data_dir=data,
            data_options={"size": 112, "augment": True},
            model="mobilenetv2_100.ra_in1k",
            model_options={"freeze_batchnorm": not method.batchnorm},
            settings=method.settings,
            seed=seed,
            out=out / key.replace(" | ", "-").replace(" ", "-"),
            **SAME,
            **method.options,
        )
        record = trained.record
        points = [p for p in record.history if {"validation", "test"} <= p["scores"].keys()]
        best = max(points, key=lambda p: p["scores"]["validation"]["average"])
        result = {"key": key, "method": method.name, "held_out": held_out, "seed": seed}
        result["best"] = {"test": best["scores"]["test"]["average"]}
        result["final"] = {"rule": record.rule, "test": record.scores["test"]["average"]}
        with (out / "results.jsonl").open("a") as file:
            file.write(json.dumps(result) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    return [json.loads(line) for line in text.splitlines()]


def rows(results: list[dict[str, Any]]) -> dict[str, dict[tuple[str, int], float]]:
    """By row of the table: held-out accuracy in percent by domain and seed."""
    found: dict[str, dict[tuple[str, int], float]] = {}
    for r in results:
        at = r["held_out"], r["seed"]
        averaged = "swad" in r["final"]["rule"]
        if averaged:
            found.setdefault(r["method"], {})[at] = 100 * r["best"]["test"]
            found.setdefault(f"{r['method']} + SWAD", {})[at] = 100 * r["final"]["test"]
        else:
            found.setdefault(r["method"], {})[at] = 100 * r["final"]["test"]
    return found


DIFFERENCES = (
    ("Fish + SWAD", "ERM + SWAD"),
    ("Fish, random grouping + SWAD", "ERM + SWAD"),
    ("CORAL + SWAD", "ERM + SWAD"),
    ("LP-FT + SWAD", "ERM + SWAD"),
    ("SAGM + SWAD", "ERM + SWAD"),
    ("GroupDRO + SWAD", "ERM + SWAD"),
    ("MIRO + SWAD", "ERM + SWAD"),
    ("ERM++", "ERM + SWAD"),
    ("ERM++, BatchNorm frozen", "ERM + SWAD"),
    ("ERM++, BatchNorm frozen", "ERM++"),
    ("ERM", "ERM, BatchNorm trained"),
    ("Fish++", "ERM++, BatchNorm frozen"),
    ("Fish + SWAD", "ERM++, BatchNorm frozen"),
    ("Fish", "Fish, random grouping"),
    ("Fish + SWAD", "Fish, random grouping + SWAD"),
)


def table(path: Path) -> str:
    """Means, and differences with intervals clustered by domain, as Markdown."""
    from shoal.experiments.statistics import mean_interval

    names = {m.name for m in METHODS}
    found = rows([r for r in read(path) if r["method"] in names])
    lines = ["| method | " + " | ".join(DOMAINS) + " | mean | seeds | less ERM (95 %) |"]
    lines += ["|---|" + "---|" * (len(DOMAINS) + 3)]
    base = found["ERM"]
    for name, cells in found.items():
        means = []
        for d in DOMAINS:
            values = [v for (domain, _), v in cells.items() if domain == d]
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            means.append(f"{statistics.mean(values):.1f}{spread}" if values else "–")
        seeds = sorted({s for _, s in cells if all((d, s) in cells for d in DOMAINS)})
        by_seed = [statistics.mean(cells[d, s] for d in DOMAINS) for s in seeds]
        whole = f"{statistics.mean(by_seed):.1f}" if by_seed else "–"
        whole += f" ± {statistics.stdev(by_seed):.1f}" if len(by_seed) > 1 else ""
        both, paired = [k for k in cells if k in base], "–"
        if name != "ERM" and len(both) > 1:
            gap = mean_interval([cells[k] - base[k] for k in both], [domain for domain, _ in both])
            paired = f"{gap.mean:+.1f} ({gap.low:+.1f} to {gap.high:+.1f})"
        lines += [f"| {name} | " + " | ".join(means) + f" | {whole} | {len(seeds)} | {paired} |"]
    lines += ["", "| difference | mean | 95 % interval | pairs |", "|---|---|---|---|"]
    for one, other in DIFFERENCES:
        both = [k for k in found.get(one, {}) if k in found.get(other, {})]
        if len(both) > 1:
            differences = [found[one][k] - found[other][k] for k in both]
            gap = mean_interval(differences, [domain for domain, _ in both])  # seeds share a domain
            interval = f"{gap.low:+.2f} to {gap.high:+.2f}"
            lines += [f"| {one}, less {other} | {gap.mean:+.2f} | {interval} | {len(both)} |"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--data", type=Path, required=True)
    running.add_argument("--out", type=Path, required=True)
    commands.add_parser("table").add_argument("records", type=Path)
    args = parser.parse_args()
    run(args.data, args.out) if args.command == "run" else print(table(args.records))


if __name__ == "__main__":
    main()
