"""Which claims of the paper hold? A verdict for each, from the records of `shoal reproduce`.

    python benchmarks/claims.py shoal-reproduce benchmarks/results/records/2026-11-17.tar.gz

Folders and archives of records are read together; the linear example and the theorem are computed here. A
claim is a list of checks. Some of them carry it; others are premises: what it takes for granted, or what
nobody doubts, such as that ERM fits its training data. The verdict is

- agrees: every check holds, premises included, and none lacks its record;
- disagrees: no check that carries the claim holds;
- partly: some check that carries it holds, and another check does not or has no record;
- not run: there is no record for any check that carries it.

A mean agrees with a printed number within 2 points of accuracy, or 0.02 of a cosine. Bounds such as "over
90 %" are taken as printed. "Always" and "with every seed" are one check. Of a claim "from N = 10" or "until
N = 20" the boundary carries it, since at N = 5 all methods are at chance and at N = 50 all have learned. A
run that diverged counts against a claim. The tables of DomainBed and WILDS are beside the paper's in `shoal
reproduce` itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shoal.paper import linear
from shoal.paper.theorem import check_theorem
from shoal.report.tables import Table

TOLERANCE = 2.0
NUMBERS = (5, 10, 15, 20, 30, 40, 50)
PASSES, UPDATES = 12_000, 1500
RELATIONS: dict[str, Callable[[float, float], bool]] = {
    "about": lambda ours, value: abs(ours - value) <= TOLERANCE,
    "at least": lambda ours, value: ours >= value,
    "below": lambda ours, value: ours < value,
}
FISH, RANDOM, ERM, IDGM, REPTILE = "Fish", "Fish, random grouping", "ERM", "IDGM", "Reptile"


class Check(NamedTuple):
    """One thing that a claim says; ``holds`` is ``None`` where there is no record to tell."""

    ours: str
    holds: bool | None
    premise: bool = False


def verdict(checks: Sequence[Check]) -> str:
    carried = [c.holds for c in checks if not c.premise and c.holds is not None]
    if not carried:
        return "not run"
    if not any(carried):
        return "disagrees"
    return "agrees" if all(c.holds for c in checks) else "partly"


def contents(paths: Sequence[Path]) -> Iterator[Any]:
    """What the JSON files in folders and archives hold."""
    for path in paths:
        if path.is_dir():
            for file in sorted(path.rglob("*.json")):
                yield json.loads(file.read_text(encoding="utf-8"))
            continue
        with tarfile.open(path) as archive:
            for member in archive:
                file_of = archive.extractfile(member) if member.name.endswith(".json") else None
                if file_of is not None:
                    yield json.load(file_of)


def _before_and_after(point: Any, method: str) -> tuple[float, float]:
    """Mean cosines around an update."""
    own = point["models"][method] if "models" in point else {"before": point, "after": point["after"]}
    return own["before"]["mean_cosine"], own["after"]["mean_cosine"]


class Evidence:
    """Records by what they are of."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.sprites: dict[tuple[str, str, int], dict[int, Any]] = {}
        """By part, method and N: records by seed."""
        self.tracks: dict[str, dict[int, list[tuple[float, float]]]] = {FISH: {}, ERM: {}}
        """By method and seed: mean cosines before and after every update."""
        self.costs: list[Any] = []
        for content in contents(paths):
            if not isinstance(content, dict):
                continue
            config = content.get("config", {})
            if "rows" in content and "ratio_to_fish" in content["rows"][0]:
                self.costs += content["rows"]
            elif config.get("dataset") == "cdsprites" and content["status"] in ("finished", "diverged"):
                self._add(content, config)

    def _add(self, record: Any, config: Any) -> None:
        data = config["data_options"]
        if data.get("size", 64) != 64 or data.get("per_domain"):
            return  # smaller than the paper's
        if agreement := record["agreement"]:
            if (data["domains"], config["steps"]) == (15, 1000) and record["status"] == "finished":
                label = FISH if config["draw"] is None else ERM
                for method in (FISH, ERM) if "models" in agreement[0] else (label,):  # version 0.3: both
                    own = [_before_and_after(point, method) for point in agreement]
                    self.tracks[method][config["seed"]] = own
            return
        part = "palette" if data.get("palette") == "random" else config.get("optimizer") or "adam"
        if config["settings"].get("trust", 0) is None:
            part = "as printed"
        elif config["batch_size"] != 64:
            return
        names = {"erm": ERM, "reptile": REPTILE, "idgm": IDGM}
        method = names.get(config["algorithm"], RANDOM if config["draw"] == "regrouped" else FISH)
        passes = config["steps"] * (config["domains_per_step"] or 1)
        if method == IDGM and part == "adam":
            if config["steps"] < UPDATES or UPDATES % config["eval_every"]:
                return
        elif passes != PASSES:
            return
        self.sprites.setdefault((part, method, data["domains"]), {})[config["seed"]] = record

    def accuracies(self, part: str, method: str, number: int, split: str) -> tuple[dict[int, float], int]:
        """In percent by seed at the last step, of IDGM after 1,500 updates; and how many runs diverged."""
        values, lost = {}, 0
        for seed, record in self.sprites.get((part, method, number), {}).items():
            last = UPDATES if (method, part) == (IDGM, "adam") else record["config"]["steps"]
            scores = {m["step"]: m["scores"] for m in record["history"]}
            lost += last not in scores
            if last in scores:
                values[seed] = 100 * scores[last][split]["average"]
        return values, lost

    def number(
        self,
        method: str,
        numbers: Sequence[int],
        relation: str,
        value: float,
        *,
        split: str = "test",
        part: str = "adam",
        premise: bool = False,
        together: bool = False,
    ) -> list[Check]:
        """That the mean over seeds is in a relation to a number; ``together``: one check for all N."""
        checks, rest = [], []
        for n in numbers:
            values, lost = self.accuracies(part, method, n, split)
            mean = statistics.fmean(values.values()) if values else None
            holds = RELATIONS[relation](mean, value) if mean is not None else False if lost else None
            shown = "–" if mean is None else f"{mean:.1f}"
            checks.append(
                Check(
                    f"{method} {shown} (N={n}, {len(values)} seed{'s' * (len(values) != 1)})", holds, premise
                )
            )
            rest += [Check(f"{method}: {lost} diverged (N={n})", False, True)] if lost else []
        if together:
            each = [c.holds for c in checks]
            holds = False if False in each else None if None in each else True
            checks = [Check("; ".join(c.ours for c in checks if c.holds is not None), holds, premise)]
        return checks + rest

    def above(self, method: str, other: str, number: int, part: str = "adam") -> Check:
        """That a method is above another by more than the tolerance with every seed."""
        mine, theirs = (self.accuracies(part, m, number, "test")[0] for m in (method, other))
        gaps = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
        ours = f"{method} − {other} {min(gaps):+.1f} to {max(gaps):+.1f} (N={number})" if gaps else ""
        return Check(ours, all(gap > TOLERANCE for gap in gaps) if gaps else None)

    def similar(self, number: int) -> Check:
        fish, idgm = (self.accuracies("adam", m, number, "test")[0].values() for m in (FISH, IDGM))
        if not fish or not idgm:
            return Check("", None, number == 5)
        gap = statistics.fmean(fish) - statistics.fmean(idgm)
        return Check(f"{gap:+.1f} (N={number})", abs(gap) <= TOLERANCE, number == 5)

    def grouped(self, part: str, *others: str) -> list[Check]:
        """That Fish is ahead at N = 10; the paper's numbers are premises."""
        printed = {FISH: 100, RANDOM: 50, ERM: 50}
        numbers = [self.number(m, [10], "about", v, part=part, premise=True) for m, v in printed.items()]
        return [
            *(self.above(FISH, other, 10, part) for other in others),
            *(c for own in numbers for c in own),
        ]

    def agreement(self, model: str) -> list[dict[str, float]]:
        """By seed: how much the cosine rises in training, its end, and the mean change by an update."""
        result = []
        for _, own in sorted(self.tracks[model].items()):
            after = [value for _, value in own]
            tenth = max(1, round(len(own) / 10))
            end, start = statistics.fmean(after[-tenth:]), statistics.fmean(after[:tenth])
            change = statistics.fmean(a - b for b, a in own)
            result.append({"rise": end - start, "end": end, "change": change})
        return result

    def tracked(self, what: str, holds: Callable[[float, float], bool], premise: bool = False) -> Check:
        """Whether something holds of Fish's value and ERM's with every seed."""
        pairs = [(f[what], e[what]) for f, e in zip(*map(self.agreement, (FISH, ERM)), strict=True)]
        ours = "; ".join(f"Fish {f:+.4f}, ERM {e:+.4f}" for f, e in pairs)
        return Check(f"{what}: {ours}", all(holds(f, e) for f, e in pairs) if pairs else None, premise)


def claims(e: Evidence) -> Iterator[tuple[str, str, list[Check]]]:
    """Title, what the paper says, and the checks of every claim."""
    rows = {(r["method"], r["weight_decay"]): r for m in linear.METHODS for r in linear.measure(m)}
    one = "IDGM, normalised, γ=0.1"

    def ends(method: str, state: str, decay: float = 0.0, premise: bool = False) -> Check:
        ours = rows[method, decay]["states"][linear.STEPS]
        return Check(f"{method} {ours}", ours == state, premise)

    def until(method: str) -> int:
        return int(rows[method, 0.0]["invariant_until"])

    yield (
        "The linear example: ERM trusts spurious features, IDGM and Fish do not",
        "ERM 97/57; IDGM and Fish 93/93",
        [ends(one, "93/93"), ends("Fish", "93/93"), ends("ERM", "97/57", premise=True)],
    )
    wanted = {"ERM": "97/57", "IDGM and Fish": "93/93"}
    yield (
        "The weights printed in table 1 give its accuracies",
        "; ".join(f"{name} {state}" for name, state in wanted.items()),
        [Check(f"{name} {state}", state == wanted[name]) for name, state in linear.printed().items()],
    )
    like = [("IGA, λ=100", False), ("IGA, λ=1", True)]
    yield (
        "On the linear example IGA is no better than ERM",
        "as ERM",
        [
            Check(f"{m} until {until(m)}, ERM {until('ERM')}", abs(until(m) - until("ERM")) <= 2, p)
            for m, p in like
        ],
    )
    yield (
        "Fish and IDGM stay invariant longer than ERM (our reading)",
        "–",
        [Check(f"{m} until {until(m)}", until(m) > until("ERM")) for m in (one, "IDGM, raw, γ=2.5", "Fish")],
    )
    decided = [ends(m, "93/93", 0.008) for m in (one, "IDGM, raw, γ=2.5", "Fish")]
    margins = {m: abs(rows[m, 0.008]["w1+b"]) for m in ("ERM", one, "IDGM, raw, γ=2.5", "Fish")}
    near = Check(f"|w1+b| at least {min(margins.values()):.3f}", min(margins.values()) >= 0.01, True)
    yield (
        "The linear example with weight decay 0.008 (our control)",
        "ERM 97/57; IDGM and Fish 93/93",
        [*decided, ends("ERM", "97/57", 0.008, True), near],
    )
    slopes = [check_theorem(domains) for domains in (2, 3, 4)]
    yield (
        "What Fish adds points along the gradient of the inner product",
        "cos → 1; 1 − cos falls with α²",
        [
            Check(f"1 − cos {r.one_minus_cos[-1]:.1e} (S={r.domains})", r.one_minus_cos[-1] < 1e-3)
            for r in slopes
        ]
        + [Check(f"slope {r.slope:.3f} (S={r.domains})", abs(r.slope - 2) <= 0.1, True) for r in slopes],
    )
    fits = [(FISH, False), (IDGM, False), (ERM, True)]
    both: dict[str, Any] = {"split": "train", "together": True}
    yield (
        "CdSprites-N: all methods fit the training domains",
        "100",
        [c for m, p in fits for c in e.number(m, NUMBERS, "about", 100, premise=p, **both)],
    )
    yield (
        "CdSprites-N: ERM is near random until N = 20",
        "50 at N ≤ 20",
        e.number(ERM, [15, 20], "about", 50) + e.number(ERM, [5, 10], "about", 50, premise=True),
    )
    yield (
        "CdSprites-N: ERM reaches 95 % only for N ≥ 40",
        "below 95 before N = 40",
        e.number(ERM, [30], "below", 95)
        + e.number(ERM, [5, 10, 15, 20], "below", 95, premise=True)
        + e.number(ERM, [40, 50], "at least", 95, premise=True),
    )
    for method in (FISH, IDGM):
        yield (
            f"CdSprites-N: {method} is over 90 % from N = 10",
            "over 90",
            e.number(method, [10], "at least", 90)
            + e.number(method, [15, 20, 30, 40, 50], "at least", 90, premise=True),
        )
        yield (
            f"CdSprites-N: {method} is near 100 % from N = 20",
            "100",
            e.number(method, [20], "about", 100) + e.number(method, [30, 40, 50], "about", 100, premise=True),
        )
    yield "CdSprites-N: Fish performs like direct IDGM", "the same curve", [e.similar(n) for n in NUMBERS]
    measured = [r for r in e.costs if (r["network"], r["method"]) == ("sprite-cnn", "IDGM, exact")]
    ratios = [
        Check(f"{r['ratio_to_fish']:.1f} × ({r['how']})", 5 <= r["ratio_to_fish"] <= 20) for r in measured
    ]
    yield "Fish is about ten times faster than direct IDGM", "about 10 ×", ratios
    yield (
        "Fish raises the gradients' agreement in training, ERM does not",
        "Fish up, ERM not",
        [
            e.tracked("rise", lambda fish, erm: fish > 0.02 and fish > erm + 0.02),
            e.tracked("rise", lambda fish, erm: erm <= 0.02, premise=True),
        ],
    )
    yield (
        "An update of ERM lowers the agreement, one of Fish does not",
        "ERM lowers it",
        [
            e.tracked("change", lambda fish, erm: erm < 0 and erm < fish),
            e.tracked("change", lambda fish, erm: fish >= 0, premise=True),
        ],
    )
    higher = e.tracked("end", lambda fish, erm: fish > erm)
    yield "At the end Fish's gradients agree better than ERM's", "Fish above ERM", [higher]
    pattern = "Fish 100, random grouping 50, ERM 50"
    yield "Random grouping undoes Fish on CdSprites-10", pattern, e.grouped("adam", RANDOM)
    stays = e.number(REPTILE, NUMBERS, "about", 50, together=True)
    yield "Reptile stays at 50 % on CdSprites-N", "50", stays
    stops = e.number(REPTILE, [30, 40, 50], "about", 56, split="train", together=True)
    yield "Reptile's train accuracy stops at 56 % for N > 20", "56", stops
    yield "CdSprites-10 under plain SGD (our control)", pattern, e.grouped("sgd", RANDOM, ERM)
    yield "CdSprites-10 with another palette (our control)", pattern, e.grouped("palette", RANDOM, ERM)
    unbounded = e.number(IDGM, [10], "at least", 90, part="as printed")
    yield "CdSprites-10, IDGM without a trust ratio (our control)", "over 90", unbounded


def table(records: Sequence[Path]) -> str:
    """The verdicts as Markdown."""
    rows = Table(["claim", "the paper", "measured", "verdict"])
    for title, paper, checks in claims(Evidence(records)):
        known = "; ".join(dict.fromkeys(c.ours for c in checks if c.holds is not None)) or "–"
        rows.add(title, paper, known, verdict(checks))
    return rows.markdown()


def accuracies(records: Sequence[Path]) -> str:
    """Held-out accuracy on CdSprites-N at the last step, mean ± standard deviation (seeds), as Markdown."""
    evidence, methods = Evidence(records), (ERM, FISH, RANDOM, REPTILE, IDGM)
    rows = Table(["N", *methods])
    for number in NUMBERS:
        cells = []
        for method in methods:
            values = list(evidence.accuracies("adam", method, number, "test")[0].values())
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            cells.append(f"{statistics.fmean(values):.1f}{spread} ({len(values)})" if values else "–")
        rows.add(number, *cells)
    return rows.markdown()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", nargs="+", type=Path, help="folders and .tar.gz archives of records")
    print(table(parser.parse_args().records))


if __name__ == "__main__":
    main()
