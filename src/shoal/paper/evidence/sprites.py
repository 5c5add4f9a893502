"""CdSprites-N: accuracy against the number of domains."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.paper import cdsprites
from shoal.paper.evidence.records import Kept, Records
from shoal.paper.evidence.verdicts import (
    HOLDS,
    Check,
    Judged,
    Options,
    judged,
    sign,
    span,
    spread,
    unjudged,
)

SEEDS = 5
"""Of the paper."""


@dataclass(frozen=True)
class Sprites:
    """The runs of `shoal reproduce cdsprites`: those there should be, and those there are, by identity."""

    parts: Mapping[str, Sequence[RunConfig]]
    known: Mapping[str, Kept]
    usual: bool = True
    """Whether they are in the setting of that command's defaults."""
    words: str = ""

    def runs(self, method: str, number: int | None = None, part: str | None = None) -> list[RunConfig]:
        """Those of a method, with N domains; by default in the part of the figure that is the paper's."""
        names = [part] if part else ["Adam", "IDGM"]
        every = [c for name in names for c in self.parts.get(name, ()) if c.name == method]
        return [c for c in every if number is None or c.data_options["domains"] == number]

    def values(self, runs: Iterable[RunConfig], split: str) -> list[float]:
        """In percent at the last step, of those that finished."""
        found = [self.known[c.identity].content for c in runs if c.identity in self.known]
        every = [100 * r.score(split, last=True) for r in found if r.status == "finished"]
        return [v for v in every if math.isfinite(v)]

    def diverged(self, runs: Iterable[RunConfig]) -> int:
        found = [self.known[c.identity].content for c in runs if c.identity in self.known]
        return sum(r.status != "finished" for r in found)

    @property
    def numbers(self) -> list[int]:
        return sorted({c.data_options["domains"] for c in self.parts.get("Adam", ())})


def find_sprites(runs: Sequence[Kept]) -> Sprites:
    """In the experiment's own setting where there is any such run, else in the most frequent other one."""
    mine = [
        k
        for k in runs
        if k.content.config.dataset == "cdsprites" and "domains" in k.content.config.data_options
    ]
    known = {k.content.config.identity: k for k in mine}
    seeds = range(max([SEEDS, *(k.content.config.seed + 1 for k in mine)]))

    def there(numbers: Sequence[int], passes: int | None, size: int) -> dict[str, list[RunConfig]]:
        found = cdsprites.figure(numbers, seeds, passes, size)
        return {p: [c for c in cs if c.seed < SEEDS or c.identity in known] for p, cs in found.items()}

    def any_known(parts: Mapping[str, Sequence[RunConfig]]) -> bool:
        return any(c.identity in known for cs in parts.values() for c in cs)

    usual = there(cdsprites.NUMBERS, None, 64)
    if any_known(usual):
        return Sprites(usual, known)
    others = Counter((_passes(k.content.config), k.content.config.data_options.get("size", 64)) for k in mine)
    for (passes, size), _ in others.most_common():
        same = [k.content.config for k in mine if _passes(k.content.config) == passes]
        try:
            parts = there(sorted({c.data_options["domains"] for c in same}), passes, size)
        except InputError:
            continue
        if any_known(parts):
            return Sprites(parts, known, False, f"{size}×{size} pixels and {passes:,} passes a run")
    return Sprites(usual, {})


def _passes(config: RunConfig) -> int:
    return config.steps * (config.domains_per_step or 1)


RELATIONS: Mapping[str, Callable[[float, Options], bool]] = {
    "about": lambda mean, check: abs(mean - check["value"]) <= check["within"],
    "at least": lambda mean, check: mean >= check["value"],
    "below": lambda mean, check: mean < check["value"],
}
OTHER = {"train": "test", "test": "train"}
SIGNS = {"about": "≈", "at least": "≥", "below": "<"}


def sprites(records: Records, options: Options) -> Judged:
    """``checks``: a method's mean accuracy at some N in a ``relation`` to a ``value``."""
    found, part = records.sprites, options.get("part")
    checks, rows, used, planned, means = [], [], list[Kept](), 0, dict[str, dict[int, float]]()
    counts: list[int] = []
    for asked in options["checks"]:
        split = asked.get("split", "test")
        for number in asked.get("numbers") or found.numbers:
            runs = found.runs(asked["method"], number, part)
            values, lost = found.values(runs, split), found.diverged(runs)
            planned += len(runs)
            used += [found.known[c.identity] for c in runs if c.identity in found.known]
            holds = RELATIONS[asked["relation"]](statistics.fmean(values), asked) if values else None
            checks.append(Check(f"{asked['method']}, N = {number}", holds))
            said = f"{SIGNS[asked['relation']]} {asked['value']}"
            of = f"{len(values)} of {len(runs) or SEEDS}" + (f", {lost} diverged" if lost else "")
            beside = spread(found.values(runs, OTHER[split]))
            steps = " to ".join(f"{n:,}" for n in sorted({c.steps for c in runs}))
            rows.append([asked["method"], str(number), spread(values), said, of, beside, steps, sign(holds)])
            if values:
                counts.append(len(values))
                means.setdefault(asked["method"], {})[number] = statistics.fmean(values)
    ours = "; ".join(f"{m} {_in_short(v, len(means) > 1)}" for m, v in means.items()) or "–"
    split = options["checks"][0].get("split", "test")
    columns = (
        "method",
        "N",
        f"{split} accuracy (%)",
        "the claim",
        "seeds",
        f"{OTHER[split]} (%)",
        "steps",
        HOLDS,
    )
    made = judged(
        checks, ours=ours, seeds=span(counts), columns=columns, rows=rows, used=used, planned=planned
    )
    return _of_sprites(found, made)


def _in_short(means: Mapping[int, float], among_others: bool) -> str:
    """By N; where there are many, their range."""
    if among_others and len(means) > 2:
        return f"{min(means.values()):.1f} to {max(means.values()):.1f} (N={min(means)} to {max(means)})"
    return ", ".join(f"{mean:.1f} (N={number})" for number, mean in means.items())


def _of_sprites(found: Sprites, made: Judged) -> Judged:
    made = replace(made, data=found)
    if found.usual:
        return made
    return unjudged(
        made, f"The runs that are there are of {found.words}, which is not the paper's experiment."
    )


def sprites_similar(records: Records, options: Options) -> Judged:
    found = records.sprites
    checks, rows, used, planned = [], [], list[Kept](), 0
    gaps: list[float] = []
    counts: list[int] = []
    for number in found.numbers:
        each = [found.runs(options[which], number) for which in ("one", "other")]
        one, other = (found.values(runs, "test") for runs in each)
        planned += sum(map(len, each))
        used += [found.known[c.identity] for runs in each for c in runs if c.identity in found.known]
        gap = statistics.fmean(one) - statistics.fmean(other) if one and other else None
        holds = None if gap is None else abs(gap) <= options["within"]
        checks.append(Check(f"N = {number}", holds))
        rows.append(
            [str(number), spread(one), spread(other), "–" if gap is None else f"{gap:+.1f}", sign(holds)]
        )
        if gap is not None:
            gaps.append(gap)
            counts += [len(one), len(other)]
    ours = f"apart by {min(gaps):+.1f} to {max(gaps):+.1f} points" if gaps else "–"
    columns = ("N", f"{options['one']} (%)", f"{options['other']} (%)", "difference", HOLDS)
    made = judged(
        checks, ours=ours, seeds=span(counts), columns=columns, rows=rows, used=used, planned=planned
    )
    return _of_sprites(found, made)
