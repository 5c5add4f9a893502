"""The linear example and the theorem: exact computations, each in one file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shoal.paper.evidence.records import Kept, Records
from shoal.paper.evidence.verdicts import HOLDS, NOT_RUN, Check, Judged, Options, judged, sign

EARLY = 50
"""A place along a path: step 100, where Fish and IDGM have not left 93/93."""
Paths = Mapping[str, Mapping[str, Any]]


def linear_paths(records: Records) -> Paths:
    """By row: the path without weight decay."""
    kept = records.first("linear.json")
    return {r["row"]["label"]: r for r in kept.content if r["weight_decay"] == 0} if kept else {}


def _state(path: Mapping[str, Any], place: int = -1) -> str:
    return f"{100 * path['train'][place]:.0f}/{100 * path['test'][place]:.0f}"


def _until(path: Mapping[str, Any]) -> float:
    """The step at which it leaves 93/93 for good; infinite where it does not."""
    left = path["leaves_invariance"]
    return math.inf if left is None else float(left)


def _left(path: Mapping[str, Any]) -> str:
    left = _until(path)
    return "never" if math.isinf(left) else "never there" if left == path["steps"][0] else f"{left:.0f}"


def _linear(
    records: Records, checks: Sequence[Check], ours: str, said: Mapping[str, str] | None = None
) -> Judged:
    paths = linear_paths(records)
    steps = next(iter(paths.values()))["steps"]
    early = min(EARLY, len(steps) - 1)
    rows = [
        [name, (said or {}).get(name, "–"), _state(path, early), _state(path), _left(path)]
        for name, path in paths.items()
    ]
    columns = ("method", "the paper", f"step {steps[early]}", f"step {steps[-1]}", "leaves 93/93 at step")
    used = _about(records, "linear")
    return judged(checks, ours=ours, seeds="exact", columns=columns, rows=rows, used=used, data=paths)


def _about(records: Records, name: str) -> list[Kept]:
    """A record of one file, and what is known of how it was made."""
    return [k for k in (records.first(f"{name}.json"), records.first(f"{name}-about.json")) if k]


def linear_table(records: Records, options: Options) -> Judged:
    paths = linear_paths(records)
    if not paths:
        return Judged(NOT_RUN)
    checks, ours = [], []
    for name, (train, test) in options["values"].items():
        path = paths.get(name)
        holds = None if path is None else _near(path, (train, test), options["within"])
        checks.append(Check(f"{name} {train}/{test}", holds))
        if path is not None:
            ours.append(f"{name} {_state(path)}")
    said = {name: f"{train}/{test}" for name, (train, test) in options["values"].items()}
    return _linear(records, checks, "; ".join(ours), said)


def _near(path: Mapping[str, Any], wanted: Sequence[float], within: float) -> bool:
    return all(abs(100 * path[s][-1] - w) <= within for s, w in zip(("train", "test"), wanted, strict=True))


def linear_printed(records: Records, options: Options) -> Judged:
    kept = records.first("linear-about.json")
    if kept is None:
        return Judged(NOT_RUN)
    checks, rows = [], []
    for name, (train, test) in options["values"].items():
        got = [100 * v for v in kept.content["printed"][name]]
        holds = all(abs(a - b) <= options["within"] for a, b in zip(got, (train, test), strict=True))
        checks.append(Check(f"{name}: {train}/{test}", holds))
        rows.append([name, f"{train}/{test}", f"{got[0]:.0f}/{got[1]:.0f}", sign(holds)])
    ours = "; ".join(f"{name} {got}" for name, _, got, _ in rows)
    columns = ("row of the table", "printed", "what its weights give", HOLDS)
    return judged(checks, ours=ours, seeds="exact", columns=columns, rows=rows, used=[kept])


def _leaving(paths: Paths, names: Iterable[str]) -> str:
    return "leaving 93/93 at step: " + "; ".join(f"{n} {_left(paths[n])}" for n in names if n in paths)


def linear_same(records: Records, options: Options) -> Judged:
    paths = linear_paths(records)
    if not paths:
        return Judged(NOT_RUN)
    like = paths[options["like"]]
    checks = []
    for name in options["rows"]:
        path = paths.get(name)
        holds = None if path is None else abs(_until(path) - _until(like)) <= options["within"]
        checks.append(Check(name, holds))
    ours = _leaving(paths, [options["like"], *options["rows"]])
    return _linear(records, checks, ours)


def linear_longer(records: Records, options: Options) -> Judged:
    paths = linear_paths(records)
    if not paths:
        return Judged(NOT_RUN)
    than = paths[options["than"]]
    checks = [Check(n, _until(paths[n]) > _until(than) if n in paths else None) for n in options["rows"]]
    ours = _leaving(paths, [options["than"], *options["rows"]])
    return _linear(records, checks, ours)


def theorem(records: Records, options: Options) -> Judged:
    kept = records.first("theorem.json")
    if kept is None:
        return Judged(NOT_RUN)
    checks, rows = [], []
    for r in kept.content:
        gap, slope = r["one_minus_cos"][-1], r["slope"]
        name = f"S = {r['domains']}"
        checks.append(Check(f"cos → 1, {name}", gap < options["gap"]))
        checks.append(Check(f"slope, {name}", abs(slope - options["slope"]) <= options["within"]))
        rows.append([name, f"{r['one_minus_cos'][0]:.1e}", f"{gap:.1e}", f"{slope:.3f}"])
    alphas = kept.content[0]["alphas"]
    ours = "slopes " + ", ".join(f"{row[3]} ({row[0]})" for row in rows)
    columns = ("domains", f"1 − cos at α = {alphas[0]:g}", f"1 − cos at α = {alphas[-1]:g}", "slope")
    used = _about(records, "theorem")
    return judged(checks, ours=ours, seeds="exact", columns=columns, rows=rows, used=used, data=kept.content)
