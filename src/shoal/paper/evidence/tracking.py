"""Gradients' agreement along the way, of Fish and of ERM."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.experiments.config import RunConfig
from shoal.paper.evidence.records import Kept, Records
from shoal.paper.evidence.verdicts import Check, Judged, Options, judged, span, spread, unjudged

TENTH = 0.1
"""The share of a training, at its start or end, that gradients' agreement is averaged over."""
TRACKED = 3
"""Seeds of `shoal track`."""


def tracked(records: Records, dataset: str) -> tuple[list[Kept], bool]:
    """The seeds of one tracking of a dataset, and whether it is in the experiment's own setting."""
    groups: dict[Path, list[Kept]] = {}
    for kept in records.tracks:
        if kept.content["config"]["dataset"] == dataset:
            groups.setdefault(kept.path.parent, []).append(kept)
    ordered = sorted(groups.values(), key=lambda g: (_usual_track(g[0].content["config"]), len(g)))
    return (ordered[-1], _usual_track(ordered[-1][0].content["config"])) if ordered else ([], False)


def _usual_track(config: Mapping[str, Any]) -> bool:
    # Here and below: what imports torch, which reading a page does not need.
    from shoal.paper import recipes, tracking

    mine = RunConfig.from_dict(config)
    if mine.dataset in recipes.datasets():
        models = {recipes.settings(mine.dataset, p)["model"] for p in recipes.PRESETS}
        return mine.model in models
    plan = tracking.plan(mine.dataset, mine.seed + 1)
    return mine.identity in {c.identity for c in plan}


def _part(values: Sequence[float | None], end: bool) -> float:
    size = max(1, round(TENTH * len(values)))
    part = values[-size:] if end else values[:size]
    known = [v for v in part if v is not None and math.isfinite(v)]
    return statistics.fmean(known) if known else math.nan


def _change(result: Mapping[str, Any], name: str) -> float:
    """After an update less before it, over all of training."""
    pairs = zip(result[name]["after"]["normalised"], result[name]["before"]["normalised"], strict=True)
    known = [a - b for a, b in pairs if a is not None and b is not None]
    return statistics.fmean(known) if known else math.nan


METHODS = {"Fish": "fish", "ERM": "erm"}


def _track_rows(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    rows = []
    for label, name in METHODS.items():
        after = [r[name]["after"]["normalised"] for r in results]
        raw = [_part(r[name]["after"]["raw"], end=True) for r in results]
        scores = [r["scores"][name][-1] for r in results if r["scores"][name][-1] is not None]
        rows.append(
            [
                label,
                spread([_part(v, end=False) for v in after], 3),
                spread([_part(v, end=True) for v in after], 3),
                spread([_change(r, name) for r in results], 4),
                f"{statistics.fmean(raw):.2e}",
                spread([100 * s for s in scores]),
            ]
        )
    constants = [r["constant"] for r in results if r.get("constant")]
    for label, every in (
        ("constant classifier", constants),
        ("constant and wrong", [c["wrong"] for c in constants]),
    ):
        known = [c for c in every if c["normalised"] is not None]
        if known:
            raw = [c["raw"] for c in known if c["raw"] is not None]
            scores = [100 * c["score"] for c in known if c["score"] is not None]
            cosine = spread([c["normalised"] for c in known], 3)
            shown = f"{statistics.fmean(raw):.2e}" if raw else "–"
            rows.append([label, cosine, cosine, "–", shown, spread(scores)])
    return rows


Results = Sequence[Mapping[str, Any]]


def _tracking(
    records: Records, options: Options, tell: Callable[[Results], tuple[str, list[Check]]]
) -> Judged:
    """``tell`` makes a few words and checks of the seeds of one dataset."""
    names = options.get("datasets") or [options["dataset"]]
    checks, rows, used, ours = list[Check](), list[list[str]](), list[Kept](), list[str]()
    counts, small, data = list[int](), list[str](), dict[str, Results]()
    for name in names:
        kept, usual = tracked(records, name)
        if not kept:
            checks.append(Check(name, None))
            continue
        data[name] = [k.content for k in kept]
        where = f"{name}: " if len(names) > 1 else ""
        said, own = tell(data[name])
        checks += [Check(where + c.what, c.holds) for c in own]
        ours.append(where + said)
        rows += [[name, *row] for row in _track_rows(data[name])]
        used += kept
        counts.append(len(kept))
        small += [] if usual else [name]
    made = judged(
        checks,
        ours="; ".join(ours) or "–",
        seeds=span(counts),
        columns=TRACK_COLUMNS,
        rows=rows,
        used=used,
        data=data,
    )
    if small:
        return unjudged(made, f"Tracked in another setting than the paper's: {', '.join(small)}.")
    return made


TRACK_COLUMNS = (
    "dataset",
    "model",
    "cosine, first tenth",
    "cosine, last tenth",
    "change by an update",
    "GIP, last tenth",
    "unseen score (%)",
)


def gip_rises(records: Records, options: Options) -> Judged:
    def tell(results: Results) -> tuple[str, list[Check]]:
        rise = {}
        for label, name in METHODS.items():
            after = [r[name]["after"]["normalised"] for r in results]
            rise[label] = statistics.fmean(_part(v, end=True) - _part(v, end=False) for v in after)
        return f"Fish {rise['Fish']:+.3f}, ERM {rise['ERM']:+.3f}", [
            Check("Fish's rises or holds", rise["Fish"] >= -options["within"]),
            Check("ERM's does not rise", rise["ERM"] <= options["within"]),
        ]

    return _tracking(records, options, tell)


def gip_update(records: Records, options: Options) -> Judged:
    def tell(results: Results) -> tuple[str, list[Check]]:
        change = {label: statistics.fmean(_change(r, n) for r in results) for label, n in METHODS.items()}
        return f"ERM {change['ERM']:+.4f}, Fish {change['Fish']:+.4f}", [
            Check("ERM's update lowers it", change["ERM"] < 0),
            Check("Fish's does not", change["Fish"] >= -options["within"]),
        ]

    return _tracking(records, options, tell)


def gip_end(records: Records, options: Options) -> Judged:
    def tell(results: Results) -> tuple[str, list[Check]]:
        ends = {
            k: [_part(r[n]["after"]["normalised"], end=True) for r in results] for k, n in METHODS.items()
        }
        pairs = zip(results, *ends.values(), strict=True)
        checks = [Check(f"seed {r['config']['seed']}", fish > erm) for r, fish, erm in pairs]
        return ", ".join(f"{label} {spread(values, 3)}" for label, values in ends.items()), checks

    return _tracking(records, options, tell)
