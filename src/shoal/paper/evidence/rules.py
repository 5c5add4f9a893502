"""How claims are judged: each rule reads the records of one kind of experiment."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from shoal.errors import InputError
from shoal.experiments import protocol, selection
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.statistics import plus_minus
from shoal.paper import linear, recipes, tables
from shoal.paper.cdsprites import counted
from shoal.paper.evidence.records import SEEDS, Kept, Records, Sprites
from shoal.paper.evidence.verdicts import (
    HOLDS,
    RELATIONS,
    TOLERANCE,
    Check,
    Claim,
    Judged,
    compared,
    sign,
    span,
    together,
)
from shoal.paper.published import claims as published
from shoal.paper.tables import is_share
from shoal.paper.tracking import SIDES, scientific, summary

Options = Mapping[str, Any]
Judge = Callable[[Records, Options], Judged]
EARLY = 50
"""A place along a linear path: step 100, where Fish and IDGM have not left 93/93."""
NOT_COUNTED = "not counted"
"""Of a row that is shown beside those that are judged."""
OTHER = {"train": "test", "test": "train"}
FOLDERS = {"main": "wilds", "random grouping": "grouping"}
"""Where the records of a table are, if not in a folder of its name."""


def every_claim() -> list[Claim]:
    return [Claim(**entry) for entry in published("claims")]


def judge(claim: Claim, records: Records, obstacles: Mapping[str, str] | None = None) -> Judged:
    """``obstacles`` say, by experiment, what kept it from being run here."""
    try:
        judged = JUDGES[claim.judge](records, claim.options)
    except (InputError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        text = f"{type(error).__name__}: {error}".rstrip(".")
        unusual = f"The records cannot be read as those of this experiment ({text})."
        return Judged([Check("readable", True)], unusual=unusual)
    return replace(judged, obstacle=(obstacles or {}).get(claim.needs, ""))


# Exact computations and timings, each in one file


def _with_about(records: Records, name: str) -> list[Kept]:
    """A record of one file, and what is known of how it was made."""
    return [k for k in (records.first(f"{name}.json"), records.first(f"{name}-about.json")) if k]


def linear_paths(records: Records, options: Options) -> Judged:
    """Where paths end (``values``), or how long they stay invariant beside another.

    ``decay`` is their weight decay. Predictions are invariant where w₁ + b is above 0; with ``margin`` it is
    a premise that no end point is nearer to 0 than that.
    """
    kept = records.first("linear.json")
    decay, premises = options.get("decay", 0), options.get("premises", ())
    paths = {r["row"]["label"]: r for r in kept.content if r["weight_decay"] == decay} if kept else {}
    if not paths:
        return Judged()
    until = {
        n: math.inf if p["leaves_invariance"] is None else p["leaves_invariance"] for n, p in paths.items()
    }
    ends = {name: linear.margin(p) for name, p in paths.items()}

    def state(name: str, place: int = -1) -> str:
        return "/".join(f"{100 * paths[name][split][place]:.0f}" for split in ("train", "test"))

    def left(name: str) -> str:
        never = "never" if until[name] == paths[name]["steps"][0] else f"{until[name]:.0f}"
        return "never" if math.isinf(until[name]) else never

    values, other = options.get("values", {}), str(options.get("like") or options.get("than"))
    checks = []
    for name in values or options["rows"]:
        holds = None
        if name in paths and values:
            holds = _near([paths[name][split][-1] for split in ("train", "test")], values[name])
        elif name in paths and "than" in options:
            holds = until[name] > until[other]
        elif name in paths:
            both = until[name], until[other]  # neither may leave: ∞ − ∞ is no number
            holds = both[0] == both[1] or abs(both[0] - both[1]) <= options["within"]
        what = f"{name} {_slashed(values[name])}" if values else name
        checks.append(Check(what, holds, name in premises))
    there = [name for name in ([] if values else [other]) + list(values or options["rows"]) if name in paths]
    margin = options.get("margin")
    if margin:
        near = ", ".join(f"{name} {ends[name]:+.3f}" for name in there if abs(ends[name]) < margin)
        what = f"w₁ + b at least {margin:g} away from 0"
        checks.append(Check(f"{what} ({near})" if near else what, not near, premise=True))
    shown = {n: f"{state(n)} (w₁ + b = {ends[n]:+.3f})" if margin else state(n) for n in there}
    ours = "; ".join(f"{name} {shown[name] if values else left(name)}" for name in there)
    steps = next(iter(paths.values()))["steps"]
    early = min(EARLY, len(steps) - 1)
    printed = {name: _slashed(values[name]) for name in values}
    rows = [
        [name, printed.get(name, "–"), state(name, early), state(name), left(name), f"{ends[name]:+.3f}"]
        for name in paths
    ]
    columns = ("method", "the paper", f"step {steps[early]}", f"step {steps[-1]}", "leaves 93/93 at step")
    return Judged(
        checks,
        ours if values else f"leaving 93/93 at step: {ours}",
        "exact",
        (*columns, "w₁ + b at the end"),
        rows,
        _with_about(records, "linear"),
        data=paths,
    )


def _slashed(values: Sequence[float]) -> str:
    return "/".join(f"{v:g}" for v in values)


def _near(shares: Sequence[float], percents: Sequence[float]) -> bool:
    about = RELATIONS["about"][1]
    return all(about(100 * a, b) for a, b in zip(shares, percents, strict=True))


def linear_printed(records: Records, options: Options) -> Judged:
    kept = records.first("linear-about.json")
    if kept is None:
        return Judged()
    checks, rows = [], []
    for name, values in options["values"].items():
        got = kept.content["printed"][name]
        checks.append(Check(f"{name}: {_slashed(values)}", _near(got, values)))
        rows.append([name, _slashed(values), "/".join(f"{100 * v:.0f}" for v in got), sign(checks[-1])])
    ours = "; ".join(f"{name} {got}" for name, _, got, _ in rows)
    columns = ("row of the table", "printed", "what its weights give", HOLDS)
    return Judged(checks, ours, "exact", columns, rows, [kept])


def theorem(records: Records, options: Options) -> Judged:
    kept = records.first("theorem.json")
    if kept is None:
        return Judged()
    checks, rows = [], []
    for r in kept.content:
        gap, slope = r["one_minus_cos"][-1], r["slope"]
        name = f"S = {r['domains']}"
        checks.append(Check(f"cos → 1, {name}", gap < options["gap"]))
        near = abs(slope - options["slope"]) <= options["within"]
        checks.append(Check(f"slope, {name}", near, premise=True))
        rows.append([name, f"{r['one_minus_cos'][0]:.1e}", f"{gap:.1e}", f"{slope:.3f}"])
    alphas = kept.content[0]["alphas"]
    ours = "slopes " + ", ".join(f"{row[3]} ({row[0]})" for row in rows)
    columns = ("domains", f"1 − cos at α = {alphas[0]:g}", f"1 − cos at α = {alphas[-1]:g}", "slope")
    return Judged(checks, ours, "exact", columns, rows, _with_about(records, "theorem"), data=kept.content)


def cost(records: Records, options: Options) -> Judged:
    """Ratios on the network that the claim is about; on others they are shown."""
    checks, rows, ours, rounds, data = list[Check](), [], [], list[int](), []
    kept = records.files.get("cost.json", ())
    for one in kept:
        device = str(one.content.get("environment", {}).get("device", "?"))
        for row in one.content["rows"]:
            data.append({**row, "device": device})
            ratio, erm, holds = float(row["ratio_to_fish"]), row.get("ratio_to_erm"), NOT_COUNTED
            how = f"{row['network']}, {row['how']}" if row.get("how") else str(row["network"])
            if row["method"] == options["method"]:
                ours.append(f"{ratio:.1f} × ({how}, {device})")
                rounds.append(len(row.get("rounds", ())))
                if row["network"] == options["network"]:
                    checks.append(Check(f"{how} on {device}", options["low"] <= ratio <= options["high"]))
                    holds = sign(checks[-1])
            plain = "–" if erm is None else f"{float(erm):.2f} ×"
            rows.append([device, how, str(row["method"]), f"{ratio:.2f} ×", plain, holds])
    columns = ("device", "network", "method", "of Fish's step", "of S plain steps", HOLDS)
    seeds = f"{span(rounds)} rounds" if rounds else "–"
    return Judged(checks, "; ".join(ours), seeds, columns, rows, kept, data=data)


# CdSprites-N


def sprites(records: Records, options: Options) -> Judged:
    """``checks``: a method's mean accuracy at some N in a relation to a value, or above another method's.

    With ``together`` the numbers of a check stand or fall together. What is ``shown`` is not counted.
    """
    runs_of, default = records.sprites, {"split": "test", "part": options.get("part")}
    checks, rows, every = list[Check](), list[list[str]](), dict[str, RunConfig]()
    values: dict[str, dict[int, list[float]]] = {}
    for asked in options["checks"]:
        asked, method = {**default, **asked}, asked["method"]
        own, rest = list[Check](), list[Check]()
        for number in asked.get("numbers") or runs_of.numbers:
            runs = runs_of.runs(method, number, asked["part"])
            every |= {c.identity: c for c in runs}
            if known := runs_of.values(runs, asked["split"]):
                values.setdefault(method, {})[number] = known
            claim, (first, *lost) = _asked(runs_of, runs, number, asked)
            own.append(first)
            rest += lost
            rows.append(
                [method, str(number), *_sprite_cells(runs_of, runs, asked["split"], claim, sign(first))]
            )
        if asked.get("together"):
            where = f"N = {', '.join(map(str, asked['numbers']))}" if "numbers" in asked else "every N"
            own = [together(f"{method}, {where}", own, bool(asked.get("premise")))]
        checks += own + rest
    for beside in options.get("shown", ()):
        beside = {**default, **beside}
        for number in beside.get("numbers") or runs_of.numbers:
            runs = runs_of.runs(beside["method"], number, beside["part"])
            every |= {c.identity: c for c in runs}
            cells = _sprite_cells(runs_of, runs, beside["split"], "–", NOT_COUNTED)
            rows.append([beside["as"], str(number), *cells])
    ours = "; ".join(f"{m} {_in_short(by_number, len(values) > 1)}" for m, by_number in values.items())
    split = options["checks"][0].get("split", "test")
    scores = (f"{split} accuracy (%)", "the claim", "seeds", f"{OTHER[split]} (%)")
    counts = span(len(known) for by_number in values.values() for known in by_number.values())
    once, used = list(dict.fromkeys(checks)), runs_of.kept(every.values())
    columns = ("method", "N", *scores, "steps", HOLDS)
    return _of_sprites(records, Judged(once, ours, counts, columns, rows, used, len(every)))


def _asked(
    runs_of: Sprites, runs: Sequence[RunConfig], number: int, asked: Options
) -> tuple[str, list[Check]]:
    """What a check says of one N, in signs, and whether it holds; then whether runs diverged."""
    name, values = f"{asked['method']}, N = {number}", runs_of.by_seed(runs, asked["split"])
    lost = runs_of.diverged(runs)
    if "than" not in asked:
        sign_of = RELATIONS[asked["relation"]][0]
        return f"{sign_of} {asked['value']}", compared(name, list(values.values()), lost, asked)
    other = asked["than"]
    rivals = runs_of.by_seed(runs_of.runs(other, number, asked["part"]), asked["split"])
    what = f"{asked['method']} above {other}, N = {number}"
    apart = [values[seed] - rivals[seed] for seed in values if seed in rivals]
    if not values and lost:
        return f"> {other}", [Check(what, False)]
    return f"> {other}", [together(what, [Check(what, gap > TOLERANCE) for gap in apart])]


def _sprite_cells(
    runs_of: Sprites, runs: Sequence[RunConfig], split: str, claim: str, holds: str
) -> list[str]:
    values, other = (plus_minus(runs_of.values(runs, name)) for name in (split, OTHER[split]))
    seeds = counted(len(runs_of.values(runs, split)), len(runs) or SEEDS, runs_of.diverged(runs))
    steps = " to ".join(f"{n:,}" for n in sorted({c.steps for c in runs})) or "–"
    return [values, claim, seeds, other, steps, holds]


def _in_short(values: Mapping[int, Sequence[float]], among_others: bool) -> str:
    """Means by N; where there are many, their range."""
    means = {number: statistics.fmean(values[number]) for number in sorted(values)}
    if among_others and len(means) > 2:
        return f"{min(means.values()):.1f} to {max(means.values()):.1f} (N={min(means)} to {max(means)})"
    return ", ".join(f"{mean:.1f} (N={number})" for number, mean in means.items())


def _of_sprites(records: Records, judged: Judged) -> Judged:
    unusual = records.sprites.unusual
    why = (
        f"The available runs use {unusual}, which differs from the experiment of the paper."
        if unusual
        else ""
    )
    return replace(judged, data=records.sprites, unusual=why)


def _signed(gap: float) -> str:
    return f"{round(gap, 1) + 0.0:+.1f}"  # adding 0 makes −0.0 a 0.0


def sprites_similar(records: Records, options: Options) -> Judged:
    """That the means of two methods are near each other; a third may be ``shown``."""
    runs_of, names = records.sprites, [options["one"], options["other"], *options.get("shown", {})]
    checks, rows, used, planned = list[Check](), [], list[Kept](), 0
    gaps, counts = list[float](), list[int]()
    for number in runs_of.numbers:
        runs = [runs_of.runs(name, number) for name in names]
        one, other, *rest = (runs_of.values(own, "test") for own in runs)
        planned += sum(map(len, runs))
        used += [kept for own in runs for kept in runs_of.kept(own)]
        holds, shown = None, "–"
        if one and other:
            gaps.append(statistics.fmean(one) - statistics.fmean(other))
            counts += [len(one), len(other)]
            holds, shown = abs(gaps[-1]) <= TOLERANCE, _signed(gaps[-1])
        checks.append(Check(f"N = {number}", holds, number in options.get("premises", ())))
        cells = [plus_minus(one), plus_minus(other), shown, sign(checks[-1]), *map(plus_minus, rest)]
        lost = {name: runs_of.diverged(own) for name, own in zip(names[:2], runs, strict=False)}
        checks += [Check(f"{n}, N = {number}: {k} diverged", False, True) for n, k in lost.items() if k]
        rows.append([str(number), *cells])
    ours = f"apart by {_signed(min(gaps))} to {_signed(max(gaps))} points" if gaps else "–"
    beside = [f"{title}, not counted (%)" for title in options.get("shown", {}).values()]
    columns = ("N", f"{options['one']} (%)", f"{options['other']} (%)", "difference", HOLDS, *beside)
    return _of_sprites(records, Judged(checks, ours, span(counts), columns, rows, used, planned))


# Gradients' agreement along the way, of Fish and of ERM

Results = Sequence[Mapping[str, Any]]


DIRECTIONS: Mapping[str, Callable[[float, float], bool]] = {
    "rises": lambda value, within: value > within,
    "does not rise": lambda value, within: value <= within,
    "falls": lambda value, within: value < -within,
    "does not fall": lambda value, within: value >= -within,
}
"""What a check says of a change; one that is not larger than ``within`` counts as none."""


def gip(records: Records, options: Options) -> Judged:
    """What ``checks`` say of a measure, each with every seed."""
    names = options["datasets"]
    checks, rows, used, ours = list[Check](), list[list[str]](), list[Kept](), list[str]()
    counts, small, data = list[int](), list[str](), dict[str, Results]()
    for name in names:
        kept, usual = records.tracked(name)
        if not kept:
            checks.append(Check(name, None))
            continue
        data[name] = [k.content for k in kept]
        where = f"{name}: " if len(names) > 1 else ""
        text, own = _tracked(data[name], options)
        lost = records.lost_tracks(kept[0].path.parent)
        own += [Check(f"{lost} diverged", False, premise=True)] if lost else []
        checks += [c._replace(what=where + c.what) for c in own]
        ours.append(where + text)
        rows += [[name, *row] for row in _track_rows(data[name])]
        used += kept
        counts.append(len(kept))
        small += [] if usual else [name]
    tenths = ("cosine, first tenth", "cosine, last tenth", "change by an update", "GIP, last tenth")
    columns = ("dataset", "model", *tenths, "held-out score (%)")
    why = f"Tracked in a different setting from the paper: {', '.join(small)}." if small else ""
    return Judged(checks, "; ".join(ours), span(counts), columns, rows, used, data=data, unusual=why)


def _tracked(results: Results, options: Options) -> tuple[str, list[Check]]:
    """``measure``: the ``end`` of training, its ``rise`` over the start, or the ``change`` by an update."""
    measured = {}
    for label, row in summary(results).items():
        if label in SIDES.values():
            after, start = ([_or_nan(v) for v in row[name]] for name in ("after", "start"))
            rise = [a - b for a, b in zip(after, start, strict=True)]
            change = [_or_nan(v) for v in row["change"]]
            measured[label] = {"end": after, "rise": rise, "change": change}[options["measure"]]
    within = TOLERANCE / 100 if options["measure"] == "rise" else 0.0
    checks = []
    for asked in options["checks"]:
        values, each = measured[asked["method"]], list[bool]()
        if "relation" in asked:
            each += [DIRECTIONS[asked["relation"]](v, within) for v in values]
        if "than" in asked:
            each += [a - b > within for a, b in zip(values, measured[asked["than"]], strict=True)]
        if "below" in asked:
            each += [b - a > within for a, b in zip(values, measured[asked["below"]], strict=True)]
        words, premise = asked["words"], bool(asked.get("premise"))
        checks.append(together(words, [Check(words, holds) for holds in each], premise))
    digits = options["digits"]
    shown = {label: f"{statistics.fmean(v):+.{digits}f}" for label, v in measured.items()}
    if options["measure"] == "end":
        shown = {label: plus_minus(v, digits) for label, v in measured.items()}
    return ", ".join(f"{label} {text}" for label, text in shown.items()), checks


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _track_rows(results: Results) -> list[list[str]]:
    rows = []
    for label, row in summary(results).items():
        cosines = [plus_minus(row["start"], 3), plus_minus(row["after"], 3), plus_minus(row["change"], 4)]
        scores = plus_minus([100 * s for s in row["score"] if s is not None])
        rows.append([label, *cosines, scientific(row["raw"]), scores])
    return rows


# Tables with one column per dataset: WILDS, its ablations, random grouping, DomainBed


class Cell(NamedTuple):
    """Our values for a row of a table on a dataset, and the paper's number with what it prints after ±."""

    dataset: str
    metric: str
    row: str
    values: Sequence[float]
    paper: Sequence[float] | None
    smaller: str = ""
    """What is not as in the paper's experiment; nothing where all is."""
    diverged: int = 0
    """Runs that diverged, which have no score."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def digits(self) -> int:
        return 1 if is_share(self.metric) else 3

    @property
    def tolerance(self) -> float:
        return TOLERANCE if is_share(self.metric) else TOLERANCE / 100

    def close(self) -> bool:
        """Whether ours is near the paper's number, or within its own ±."""
        number, *deviation = self.paper or (math.nan,)
        return abs(self.mean - number) <= max(self.tolerance, *deviation)


Cells = tuple[list[Cell], list[Kept], list[str]]


def cells(records: Records, table: str) -> Cells:
    """What there is of a table, the records it is from, and the datasets that the paper's table has."""
    if table == "DomainBed":
        return _domainbed(records, table)
    folder = FOLDERS.get(table, table)
    mine = [k for k in records.runs if k.path.parent.name == folder]
    found, used = list[Cell](), list[Kept]()
    for dataset in dict.fromkeys(k.content.config.dataset for k in mine):
        own = [k for k in mine if k.content.config.dataset == dataset]
        if dataset in recipes.datasets():
            found += _recipe_cells(table, dataset, [k.content for k in own])
        elif all(k.content.config.protocol for k in own):
            found += _protocol_cells(dataset, [k.content for k in own], table)
        else:
            continue  # CdSprites, which has claims of its own
        used += own
    wanted = [c["dataset"] for c in published("wilds") if (c["table"], c["split"]) == (table, "test")]
    return found, used, wanted


def _domainbed(records: Records, table: str) -> Cells:
    """From sweeps on the datasets of DomainBed's table; wanted are those that have none."""
    found, used, missing = list[Cell](), list[Kept](), list[str]()
    sweeps = [k for k in records.runs if k.content.config.protocol and k.path.parent.name != "grouping"]
    for claim in published("domainbed"):
        if claim["table"] == table and claim["names"]:
            own = [k for k in sweeps if _is(k.content.config.dataset, claim["names"])]
            for dataset in dict.fromkeys(k.content.config.dataset for k in own):
                same = [k.content for k in own if k.content.config.dataset == dataset]
                found += _protocol_cells(dataset, same, table)
            used += own
            missing += [] if own else [claim["names"][0]]
    return found, used, missing


def _recipe_cells(table: str, dataset: str, records: Sequence[RunRecord]) -> list[Cell]:
    labels = list(dict.fromkeys(r.config.name for r in records))
    metric = recipes.headline(dataset)
    if FOLDERS.get(table) == "grouping":
        paper = tables.grouping_claims().get(dataset, {"values": {}})["values"]
    else:
        claim = tables.wilds_claim(table, dataset)
        metric, paper = claim["metric"], tables.wilds_rows(claim["values"], labels)
    models = {recipes.settings(dataset, p)["model"] for p in recipes.PRESETS}
    result = []
    for label in labels:
        mine = [r for r in records if r.config.name == label]
        own, lost = ([r for r in mine if r.status == status] for status in ("finished", "diverged"))
        others = sorted({str(r.config.model) for r in own if r.config.model not in models})
        others += [f"{n:,} examples per split" for n in {r.config.eval_limit for r in own} if n]
        others += sorted({text for r in own if (text := _shortened(r.config))})
        rates = table == "rates"
        others += sorted({text for r in own for text in recipes.changed(r.config, any_rate=rates)})
        trials = [(r.config.seed, r.config.data_options.get("fold")) for r in own]
        others += ["several settings in one folder"] * (len(set(trials)) < len(trials))
        scale = 100 if is_share(metric) else 1
        values = [scale * s for r in own if (s := r.measure("test", metric)) is not None]
        cell = Cell(dataset, metric, label, values, paper.get(label), ", ".join(others), len(lost))
        result.append(cell)
    return result


def _shortened(config: RunConfig) -> str:
    """Whether it has fewer epochs than its recipe, where evaluations once an epoch tell."""
    every = [recipes.settings(config.dataset, preset) for preset in recipes.PRESETS]
    if config.eval_every is None or config.eval_every in [r.get("eval_every") for r in every]:
        return ""
    epochs = min(r["epochs"] for r in every)
    return f"fewer than {epochs} epochs" if round(config.steps / config.eval_every) < epochs else ""


def _protocol_cells(dataset: str, records: Sequence[RunRecord], table: str) -> list[Cell]:
    """DomainBed's: the average over held-out domains, by training-domain validation, one value per trial."""
    most = max(r.config.steps for r in records)
    own = [r for r in records if r.config.steps == most]
    result = selection.results(selection.sweep([r.config for r in own], own), dataset)
    every = [c for c in published("domainbed") if _is(dataset, c["names"]) and c["table"] == table]
    claim = every[0] if every else {"values": {}}
    titles = {plain(claim.get("rows", {}).get(t, t)): t for t in claim["values"]}
    order = {title: place for place, title in enumerate(claim["values"])}
    smaller = f"{most:,} of {protocol.STEPS:,} steps" if most < protocol.STEPS else ""
    found = []
    for row in result["rows"]:
        values = [100 * v for v in row["average"]["values"] if v is not None]
        title = titles.get(plain(row["algorithm"]), row["algorithm"])
        metric, paper = result["metric"] or "accuracy", claim["values"].get(title)
        found.append(Cell(dataset, metric, title, values, paper, smaller))
    return sorted(found, key=lambda cell: order.get(cell.row, len(order)))


def plain(name: str) -> str:
    """Spelling and hyphens do not count; a way of drawing does."""
    return "".join(c for c in name.lower() if c.isalnum() or c == ":")


def _is(dataset: str, names: Iterable[str]) -> bool:
    return plain(dataset) in map(plain, names)


def _table(
    found: Sequence[Cell], used: Sequence[Kept], checks: Sequence[Check], ours: Iterable[str]
) -> Judged:
    rows = []
    for c in found:
        printed = " ± ".join(f"{v:.{c.digits}f}" for v in c.paper or ()) or "–"
        seeds = counted(len(c.values), len(c.values) + c.diverged, c.diverged)
        rows.append([c.dataset, c.metric, c.row, plus_minus(c.values, c.digits), printed, seeds])
    lost = [
        Check(f"{c.dataset}, {c.row}: {c.diverged} diverged", False, True)
        for c in found
        if c.diverged and checks
    ]
    small = dict.fromkeys(f"{c.dataset} ({c.smaller})" for c in found if c.smaller)
    why = f"Run in a smaller setting than in the paper: {', '.join(small)}." if small else ""
    columns = ("dataset", "metric", "row", "ours", "the paper", "seeds")
    counts = span(len(c.values) for c in found)
    every = [*checks, *lost]
    return Judged(every, "; ".join(ours), counts, columns, rows, used, data=list(found), unusual=why)


def table_values(records: Records, options: Options) -> Judged:
    """That our means are near the paper's numbers; with ``row``, that row's carry the claim."""
    found, used, wanted = cells(records, options["table"])
    known = [c for c in found if c.values and c.paper is not None]
    carried = options.get("row")
    checks = [Check(f"{c.dataset}, {c.row}", c.close(), carried not in (None, c.row)) for c in known]
    ours = [f"{sum(bool(c.holds) for c in checks)} of {len(checks)} numbers agree"] if checks else []
    datasets = {c.dataset for c in known if carried in (None, c.row)}
    if carried:
        wanted = list(dict.fromkeys([*wanted, *(c.dataset for c in found)]))
    return _table(found, used, [*checks, *(Check(n, None) for n in wanted if n not in datasets)], ours)


def table_ahead(records: Records, options: Options) -> Judged:
    """That ``row`` is above the rows ``than``, or above all of the paper's, on each of ``datasets``."""
    found, used, _ = cells(records, options["table"])
    checks, ours = [], []
    for dataset in options["datasets"]:
        own = {c.row: c for c in found if c.dataset == dataset and c.values}
        others = [own[r] for r in options.get("than") or own if r in own and r != options["row"]]
        if options["row"] not in own or not others:
            checks.append(Check(dataset, None))
            continue
        mine, best = own[options["row"]], max(others, key=lambda c: c.mean)
        checks.append(Check(f"{dataset} against {best.row}", mine.mean > best.mean))
        lacking = (
            [] if "than" in options else [r for r in tables.rivals(options["table"], dataset) if r not in own]
        )
        if checks[-1].holds and lacking:
            checks.append(Check(f"{dataset} against {', '.join(lacking)}", None))
        ours.append(f"{dataset} {mine.mean - best.mean:+.{mine.digits}f} against {best.row}")
    return _table(found, used, checks, ours)


def table_flat(records: Records, options: Options) -> Judged:
    """That the rows of a dataset, ``but`` some, do not differ by more than the tolerance."""
    found, used, _ = cells(records, options["table"])
    checks, ours = [], []
    for dataset in recipes.datasets():
        own = [c for c in found if c.dataset == dataset and c.values and c.row not in options["but"]]
        holds = None
        if len(own) > 1:
            apart = max(c.mean for c in own) - min(c.mean for c in own)
            holds = apart <= own[0].tolerance
            ours.append(f"{dataset}: within {apart:.{own[0].digits}f}")
        checks.append(Check(dataset, holds))
    return _table(found, used, checks, ours)


def table_shown(records: Records, options: Options) -> Judged:
    found, used, _ = cells(records, options["table"])
    if not any(c.values for c in found):
        return Judged()
    judged = _table(found, used, [Check("shown", True)], [f"{len(found)} rows"])
    return replace(judged, unusual="The paper reports no numbers and draws no conclusion.")


def domainbed_rank(records: Records, options: Options) -> Judged:
    found, used, missing = cells(records, options["table"])
    if missing:
        return Judged(unusual=f"It requires all datasets; missing records: {', '.join(missing)}.")
    average = next(c for c in published("domainbed") if c["table"] == options["table"] and not c["names"])
    means, datasets = {}, {c.dataset for c in found}
    for row in average["values"]:
        own = [c.mean for c in found if c.row == row and c.values]
        if len(own) == len(datasets):
            means[row] = statistics.fmean(own)
    order, row = sorted(means, key=lambda r: -means[r]), options["row"]
    whole = len(order) == len(average["values"])
    rank = order.index(row) + 1 == options["rank"] if whole else None
    above = means[row] > means["ERM"] if {"ERM", row} <= set(means) else None
    checks = [Check(f"rank {options['rank']}", rank), Check("above ERM", above)]
    return _table(found, used, checks, [", ".join(f"{r} {means[r]:.2f}" for r in order[:3])])


JUDGES: Mapping[str, Judge] = {
    rule.__name__: rule
    for rule in (
        *(linear_paths, linear_printed, theorem, cost, sprites, sprites_similar, gip),
        *(table_values, table_ahead, table_flat, table_shown, domainbed_rank),
    )
}
"""By the name that ``claims.yaml`` calls them."""
