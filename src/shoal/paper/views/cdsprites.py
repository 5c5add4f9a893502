"""CdSprites-N in tables and pictures, with the paper's claims beside."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.paper.published import claims
from shoal.paper.views.plots import Curves, Said, cdsprites_figure
from shoal.report.tables import Table, percent

PARTS_OF_THE_PAPER = ("Adam", "IDGM")
ABOUT = 5.0
"""Points of accuracy by which a figure may differ and still agree with "about"."""


def by_method(records: Iterable[RunRecord]) -> dict[str, list[RunRecord]]:
    found: dict[str, list[RunRecord]] = {}
    for record in records:
        found.setdefault(record.config.name, []).append(record)
    return found


def curves(records: Iterable[RunRecord], split: str) -> Curves:
    return {m: [r.curve(split) for r in rs if r.history] for m, rs in by_method(records).items()}


def demo_table(records: Sequence[RunRecord]) -> Table:
    table = Table(["method", "trained domains", "unseen domain", "optimizer", "passes"])
    for method, runs in by_method(records).items():
        config = runs[0].config
        rate = config.optimizer_options["lr"]
        table.add(
            method,
            percent([r.score("train", last=True) for r in runs]),
            percent([r.score("test", last=True) for r in runs]),
            f"{config.optimizer.capitalize()} {rate:g}",
            f"{runs[0].history[-1]['passes']:,}" if runs[0].history else "–",
        )
    return table


def judge(value: float, claim: Mapping[str, Any]) -> str:
    """Whether a mean accuracy in percent agrees with what the paper says."""
    if math.isnan(value):
        return "no result"
    if claim["relation"] == "at least":
        return "agrees" if value >= claim["value"] - ABOUT / 2 else "disagrees"
    return "agrees" if abs(value - claim["value"]) <= ABOUT else "disagrees"


def rows(parts: Mapping[str, Sequence[RunRecord]]) -> list[dict[str, Any]]:
    """One entry for each part, method and N: accuracies over seeds at the last and at the selected step."""
    said = claims("cdsprites")
    found = []
    for part, records in parts.items():
        for method, runs in by_method(records).items():
            for number in sorted({r.config.data_options["domains"] for r in runs}):
                seeds = [r for r in runs if r.config.data_options["domains"] == number]
                scores = {
                    f"{split} {when}": [r.score(split, last=when == "last") for r in seeds]
                    for split in ("train", "test")
                    for when in ("last", "selected")
                }
                entry: dict[str, Any] = {
                    "part": part,
                    "method": method,
                    "domains": number,
                    "seeds": [r.config.seed for r in seeds],
                    "diverged": sum(r.status == "diverged" for r in seeds),
                    "seconds": sum(r.seconds for r in seeds),
                    **scores,
                    "paper": "",
                    "verdict": "",
                }
                # The paper speaks of Adam and of one palette; other parts are ours alone.
                if part in PARTS_OF_THE_PAPER:
                    for claim in said:
                        if claim["method"] == method and claim["domains"] == number:
                            mean = 100 * statistics.mean(scores[f"{claim['split']} last"])
                            verdict = judge(mean, claim)
                            entry["paper"] += f"{claim['split']}: {claim['words']}  "
                            entry["verdict"] += f"{claim['split']} {verdict}  "
                found.append(entry)
    return found


def table(entries: Iterable[Mapping[str, Any]]) -> Table:
    """At the last step, and at the step best on validation, which is drawn like the test domain."""
    found = Table(
        [
            "part",
            "method",
            "N",
            "train, last",
            "test, last",
            "test, selected (oracle-like)",
            "paper",
            "verdict",
        ]
    )
    entries = list(entries)
    most = max((len(e["seeds"]) for e in entries), default=0)
    for e in entries:
        notes = [f"{e['diverged']} diverged"] if e["diverged"] else []
        if len(e["seeds"]) < most:
            notes.append(f"{len(e['seeds'])} of {most} seeds")
        found.add(
            e["part"],
            e["method"] + (f" ({', '.join(notes)})" if notes else ""),
            e["domains"],
            percent(e["train last"]),
            percent(e["test last"]),
            percent(e["test selected"]),
            e["paper"].strip() or "–",
            e["verdict"].strip() or "–",
        )
    return found


def listed(parts: Mapping[str, Sequence[RunConfig]]) -> list[str]:
    """Runs by name, those that differ in their seed alone together."""
    found: dict[str, list[str]] = {}
    for part, configs in parts.items():
        for c in configs:
            found.setdefault(f"{c.name} ({part}), N={c.data_options['domains']}", []).append(str(c.seed))
    return [f"{name}, seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}" for name, seeds in found.items()]


def figure(entries: Iterable[Mapping[str, Any]]) -> Any:
    main = [e for e in entries if e["part"] in PARTS_OF_THE_PAPER]

    def series(split: str) -> dict[str, dict[int, list[float]]]:
        found: dict[str, dict[int, list[float]]] = {}
        for e in main:
            values = [v for v in e[f"{split} last"] if not math.isnan(v)]
            if values:
                found.setdefault(e["method"], {})[e["domains"]] = values
        return found

    return cdsprites_figure(series("train"), series("test"), {s: marks(s) for s in ("train", "test")})


def marks(split: str) -> list[Said]:
    """What the paper says of the accuracies in ``split``, to be drawn beside ours."""
    return [(c["method"], c["domains"], c["value"]) for c in claims("cdsprites") if c["split"] == split]
