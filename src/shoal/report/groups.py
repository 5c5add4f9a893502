"""Which runs belong together, and what comes of comparing them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord, judged, row_of
from shoal.experiments.results import spread
from shoal.experiments.selection import lower_is_better
from shoal.terminal import clean

NAMED = 6
"""Names in a sentence."""
APART = ("algorithm", "label", "settings", "seed", "draw", "optimizer_options", "protocol")
"""In which runs of a comparison differ."""
ONCE = {"eval_every": None}
ASIDE = ("eval_every", "eval_limit", "digest")
"""Runs that differ in these are shown apart, but more telling differences name them."""
Kept = tuple[Path, Mapping[str, Any]]
"""The result of a comparison, and the folder it lies in."""


@dataclass(frozen=True)
class Run:
    """A record, where it was found, and the command that was typed where its folder tells."""

    record: RunRecord
    path: str
    command: str = ""

    @cached_property
    def identity(self) -> str:
        return self.record.config.identity


@dataclass(frozen=True)
class Group:
    """Runs of one dataset that belong together, and what came of them.

    ``result`` is from :func:`shoal.experiments.compare.results`. Of a ``comparison`` and a ``sweep`` it is of
    the runs that validation chose; else it is :func:`means` of all.
    """

    kind: str
    result: Mapping[str, Any]
    runs: Sequence[Run]
    chosen: frozenset[str] = frozenset()
    """Identities of runs; empty where nothing was chosen."""
    rule: str = ""
    """How settings were chosen, in words."""
    apart: str = ""
    """What tells these runs from others of the dataset."""
    planned: bool = False
    """Whether ``result`` is of `shoal compare`, which knows what was to be run."""


@dataclass(frozen=True)
class Trouble:
    """What is no record but belongs to the story."""

    words: str
    more: str = ""


def grouped(runs: Sequence[Run], kept: Sequence[Kept], troubles: list[Trouble]) -> list[Group]:
    """Comparisons as they were made, then whatever else can be compared, then single runs."""
    groups: list[Group] = []
    taken: set[int] = set()
    seen: list[Any] = []
    for folder, result in ((folder, _current(result)) for folder, result in kept):
        if (own := result.get("identities")) is not None:
            if own in seen:  # a copy, or the same folder twice
                continue
            seen.append(own)
        mine = [r for r in runs if _belongs(r, folder, result)]
        name = f"compare-{result['dataset']}.json in {folder}"
        there = result["runs"] - result.get("runs_missing", 0)
        if len(mine) > there:
            troubles.append(Trouble(f"{name} is older than its runs."))
            continue
        if len(mine) < there:
            troubles.append(Trouble(f"{name} is of {there:,} runs; records of {len(mine):,} are here."))
        taken |= {id(r) for r in mine}
        tried, metric = result.get("search", 1), result.get("metric") or "score"
        rule = (
            f"For each algorithm and seed, the step with the best validation {metric} in the training "
            f"domains was taken{f', of {tried} settings tried' if tried > 1 else ''}."
        )
        chosen = _chosen(result["trials"], mine)
        groups.append(Group("comparison", result, mine, chosen, rule, apart=str(folder), planned=True))
    left = [r for r in runs if id(r) not in taken]
    order = {"comparison": 0, "sweep": 0, "runs": 1}
    rest = [replace(_group(part), apart=apart) for apart, part in split_up(left)] if left else []
    found = sorted([*groups, *rest], key=lambda g: order[g.kind])
    datasets = [g.result["dataset"] for g in found]
    return [
        replace(g, apart=(g.apart or g.kind) if datasets.count(g.result["dataset"]) > 1 else "")
        for g in found
    ]


def _current(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """A result that an earlier version wrote, with what the rule of this one recommends."""
    from shoal.experiments import compare

    if "criterion" in result:
        return result
    lower = result["lower_is_better"]
    rows = _completed(result["rows"], lower)
    about = None if result.get("runs_missing") else compare.recommendation(rows, lower)
    return {**result, "rows": rows, "criterion": "mean", "recommendation": about}


def _completed(rows: Iterable[Mapping[str, Any]], lower: bool) -> list[dict[str, Any]]:
    """With the worst domain of each row, and whether it is a control."""
    from shoal.experiments import compare

    return [
        {**row, "worst": compare.worst(row, lower), "control": compare.is_control(row["algorithm"])}
        for row in rows
    ]


def _belongs(run: Run, folder: Path, result: Mapping[str, Any]) -> bool:
    from shoal.experiments import compare

    config = run.record.config
    if isinstance(own := result.get("identities"), list):  # results of an earlier version have none
        return run.identity in own
    return (
        folder in Path(run.path).parents
        and config.dataset == result["dataset"]
        and config.steps == result["steps"]
        and not config.protocol
        and config.seed in result["seeds"]
        and compare.named(config.data_options.get("test", result["left_out"][0])) in result["left_out"]
        and config.name in [row["algorithm"] for row in result["rows"]]
    )


def split_up(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Runs that differ in nothing but what a comparison varies, with what tells them from others."""
    from shoal.experiments import baselines

    parts: dict[str, tuple[dict[str, Any], list[Run]]] = {}
    for run in runs:
        what = _fixed(run.record.config)
        parts.setdefault(json.dumps(what, sort_keys=True, default=str), (what, []))[1].append(run)
    for key, (mine, part) in list(parts.items()):
        if baselines.is_one(part[0].record.config):  # they are measured once, at their end
            alike = [k for k, (other, _) in parts.items() if k != key and other | ONCE == mine | ONCE]
            if len(alike) == 1:
                parts[alike[0]][1].extend(parts.pop(key)[1])
    datasets = list(dict.fromkeys(what["dataset"] for what, _ in parts.values()))
    found = []
    for mine, part in parts.values():
        others = [other for other, _ in parts.values() if other["dataset"] == mine["dataset"]]
        differ = [k for k in mine if any(k not in other or other[k] != mine[k] for other in others)]
        differ = [k for k in differ if k not in ASIDE] or differ
        values = [mine[k] for k in differ if isinstance(mine[k], (int, float, str))]
        place = datasets.index(mine["dataset"]), [(isinstance(v, str), v) for v in values]
        found.append((place, ", ".join(f"{k} {plain(mine[k])}" for k in differ), part))
    return [(name, part) for _, name, part in sorted(found, key=lambda f: f[0])]


def _fixed(config: RunConfig) -> dict[str, Any]:
    """What a comparison does not vary, with the options of data and model by their own names.

    Methods that take other numbers of minibatches a step are comparable where they see as many in all.
    """
    found = {k: v for k, v in vars(config).items() if k not in APART}
    data, model = (dict(found.pop(part)) for part in ("data_options", "model_options"))
    data.pop("test", None)
    if data.get("seed") == config.seed:
        del data["seed"]
    if each := found.pop("domains_per_step"):
        found |= {"minibatches": found.pop("steps") * each, "eval_every": (config.eval_every or 0) * each}
    options = {f"data {k}" if k in found else k: v for k, v in data.items()}
    options |= {f"model {k}": v for k, v in model.items()}
    return options | found | {"protocol": bool(config.protocol)}


def _group(runs: Sequence[Run]) -> Group:
    """Runs that differ in what a comparison varies, compared if they can be."""
    if all(r.record.config.protocol for r in runs):
        return _sweep(runs)
    if not _comparable(runs):
        return Group("runs", means(runs), runs)
    from shoal.experiments import compare

    records = [r.record for r in runs]
    erm = [r.config.name for r in records if r.config.algorithm == compare.BASELINE and not r.config.draw]
    baseline = erm[0] if erm and compare.BASELINE not in erm else compare.BASELINE  # it may be called "ERM"
    planned = [*(r.config for r in records), *_holes(r.config for r in records)]
    result = compare.results(planned, records, baseline)
    numbers = sorted({t["tried"] for t in result["trials"]})
    many = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
    metric = result["metric"] or "score"
    steps = " or ".join(sorted({r.record.rule for r in runs}))
    rule = f"The step of a run: {steps}."
    if note := next((n for r in records if (n := r.notes.get("validation"))), None):
        rule += f" Validation is {note}."
    elif others := list(dict.fromkeys(name for r in records for name in strange(r))):
        rule += f" Validation is of domains that were not trained on: {listed(others)}."
    if numbers[-1] > 1:
        rule = (
            f"Of the runs of an algorithm, seed and domain left out ({many}), the one with the best "
            f"validation {metric} was taken. {rule}"
        )
    return Group("comparison", result, runs, _chosen(result["trials"], runs), rule)


def strange(record: RunRecord) -> list[str]:
    """Domains of validation that were not trained on, where it is known which were."""
    scores = record.history[-1]["scores"] if record.history else {}
    known = scores.get("train", {}).get("domains", ())
    return [d for d in scores.get("validation", {}).get("domains", ()) if d not in known] if known else []


def _chosen(trials: Iterable[Mapping[str, Any]], runs: Iterable[Run]) -> frozenset[str]:
    """The identities of the runs that trials name by their settings."""
    from shoal.experiments import compare

    def key(algorithm: str, seed: int, settings: Mapping[str, Any], lr: Any, left_out: Any) -> str:
        return json.dumps([algorithm, seed, dict(settings), lr, left_out], sort_keys=True, default=str)

    wanted = set()
    for t in trials:
        if t.get("chosen") is not None:
            parts = (t["algorithm"], t["seed"], t["settings"], t["lr"])
            wanted |= {key(*parts, t.get("fold", t["left_out"])), key(*parts, None)}
    found = set()
    for run in runs:
        config = run.record.config
        lr, place = config.optimizer_options.get("lr"), config.data_options.get("test")
        left_out = None if place is None else compare.named(place)
        if key(config.name, config.seed, config.settings, lr, left_out) in wanted:
            found.add(run.identity)
    return frozenset(found)


def _holes(configs: Iterable[RunConfig]) -> list[RunConfig]:
    """What would have to be run for every algorithm to have the same seeds and domains left out."""
    found: dict[str, dict[tuple[Any, int], RunConfig]] = {}
    for config in configs:
        place = config.data_options.get("test")
        found.setdefault(config.name, {})[json.dumps(place), config.seed] = config
    cells = dict.fromkeys(cell for own in found.values() for cell in own)
    places, seeds = dict.fromkeys(p for p, _ in cells), dict.fromkeys(s for _, s in cells)
    holes = []
    for own in found.values():
        first = next(iter(own.values()))
        for place in places:
            test = {} if place == "null" else {"test": json.loads(place)}
            options = {k: v for k, v in first.data_options.items() if k != "test"} | test
            holes += [replace(first, seed=s, data_options=options) for s in seeds if (place, s) not in own]
    return holes


def _comparable(runs: Sequence[Run]) -> bool:
    """Whether there are several algorithms, all with a score on validation and on test."""
    records = [r.record for r in runs]
    splits = [set(m["scores"]) for r in records for m in r.history]
    return (
        len({r.config.name for r in records}) > 1
        and bool(splits)
        and all({"validation", "test"} <= s for s in splits)
        and all(None not in m["scores"]["validation"]["domains"].values() for r in records for m in r.history)
        and all("lr" in r.config.optimizer_options for r in records)
    )


def _sweep(runs: Sequence[Run]) -> Group:
    """By training-domain validation, in the form of a comparison."""
    from shoal.experiments import compare, selection

    try:
        found = selection.sweep([r.record.config for r in runs], [r.record for r in runs])
        result = selection.results(found, runs[0].record.config.dataset)
    except (InputError, LookupError):
        return Group("runs", means(runs), runs)
    if not result["left_out"]:
        return Group("runs", means(runs), runs)
    metric = result["metric"]
    scored = {(c["algorithm"], c["left_out"], c["trial"]): c for c in result["choices"]}
    names, trials = result["left_out"], result["trials"]
    every = [
        {"algorithm": a, "left_out": n, "seed": t, "chosen": None, "status": "missing", "diverged": 0}
        | (
            {k: c[k] for k in ("status", "diverged")} | {"test": c["score"]}
            if (c := scored.get((a, n, t)))
            else {}
        )
        for a in (row["algorithm"] for row in result["rows"])
        for n in names
        for t in trials
    ]
    rows = [compare._row(row["algorithm"], every, names, trials, metric, {}) for row in result["rows"]]
    lower = metric is not None and lower_is_better(metric)
    rows = _completed(rows, lower)
    compare._rank(rows, metric)
    picked = {(c["algorithm"], c["left_out"], c["trial"], c["draw"]) for c in result["choices"]}
    keys = {r.identity: selection.key_of(r.record.config) for r in runs}
    chosen = frozenset(
        i
        for i, k in keys.items()
        if len(k.left_out) == 1 and (k.algorithm, *k.left_out, k.trial, k.draw) in picked
    )
    content = {
        "dataset": result["dataset"],
        "metric": metric,
        "lower_is_better": lower,
        "baseline": next((r["algorithm"] for r in rows if r["algorithm"] == compare.BASELINE), None),
        "recommendation": None if result["missing"] else compare.recommendation(rows, lower),
        "left_out": names,
        "seeds": trials,
        "rows": rows,
        "runs": len(runs),
        "runs_missing": len(result["missing"]),
        "missing": result["missing"],
    }
    draws = f"{result['draws']} trial{'s' * (result['draws'] != 1)} of a random search"
    return Group("sweep", content, runs, chosen, f"Settings and step: {result['words']}, among {draws}.")


def means(runs: Sequence[Run]) -> dict[str, Any]:
    """Every algorithm's mean over seeds in each domain of the test split, at the step each run selected.

    Of runs without a test split it is of validation, or else of the training examples; ``split`` says so.
    """
    rows, each_name = [row_of(run.record) for run in runs], called(runs)
    found: dict[str, dict[str, dict[int, list[float]]]] = {}
    splits = [s for r in runs for m in r.record.history for s in m["scores"]]
    split = next((s for s in ("test", "validation", "train") if s in splits), splits[0] if splits else "test")
    scored = [_by_domain(run.record, split) for run in runs]
    metric = next((name for name, _ in scored if name is not None), None)
    for name, row, (own_metric, domains) in zip(each_name, rows, scored, strict=True):
        mine = found.setdefault(name, {})
        for domain, value in domains.items() if own_metric == metric else ():
            mine.setdefault(domain, {}).setdefault(row["seed"], []).append(value)
    names = list(dict.fromkeys(name for mine in found.values() for name in mine))
    seeds = sorted({row["seed"] for row in rows})
    lost = [name for name, r in zip(each_name, runs, strict=True) if r.record.status != "finished"]

    def summary(values: Sequence[float | None], algorithm: str) -> dict[str, Any]:
        return spread(values, metric) | {"trials": {"diverged": lost.count(algorithm)}}

    table = []
    for algorithm, mine in found.items():
        # Another algorithm's seeds are not missing here.
        own = [
            s
            for s in seeds
            if any((r["seed"], n) == (s, algorithm) for n, r in zip(each_name, rows, strict=True))
        ]
        each = {n: [_average(mine.get(n, {}).get(s)) for s in own] for n in names}
        whole = [list(v) for v in zip(*each.values(), strict=True)]
        over = [None if None in v else statistics.fmean(x for x in v if x is not None) for v in whole]
        table.append(
            {
                "algorithm": algorithm,
                "rank": None,
                "domains": {n: summary(v, algorithm) for n, v in each.items()},
                "average": summary(over, algorithm),
                "runs_diverged": lost.count(algorithm),
            }
        )
    lower = metric is not None and lower_is_better(metric)
    return {
        "dataset": str(runs[0].record.config.dataset),
        "metric": metric,
        "lower_is_better": lower,
        "baseline": None,
        "left_out": names,
        "seeds": seeds,
        "rows": _completed(table, lower),
        "missing": [],
        "split": split,
        "several": len({run.record.config.name for run in runs}) > 1,
    }


def called(runs: Sequence[Run]) -> list[str]:
    """Each run's algorithm, with those of its settings in which other runs of that name differ."""

    def settings(run: Run) -> dict[str, Any]:
        config = run.record.config
        return {**config.settings, **config.optimizer_options, "draw": config.draw}

    found = []
    for run in runs:
        mine, name = settings(run), run.record.config.name
        others = [settings(r) for r in runs if r.record.config.name == name]
        keys = dict.fromkeys(k for other in [mine, *others] for k in other)
        differ = [k for k in keys if any(other.get(k) != mine.get(k) for other in others)]
        found.append(", ".join([name, *(f"{k} {plain(mine.get(k))}" for k in differ)]))
    return found


def test_domains(record: RunRecord) -> list[str]:
    return list(record.history[-1]["scores"].get("test", {}).get("domains", ())) if record.history else []


def _average(values: Sequence[float] | None) -> float | None:
    return statistics.fmean(values) if values else None


def _by_domain(record: RunRecord, split: str) -> tuple[str | None, dict[str, float]]:
    """What a finished run measured in a split, by domain; of one domain what it was judged by."""
    if not record.history or record.status != "finished":
        return None, {}
    shown = record.history[record.selected]["scores"].get(split)
    if shown is None:
        return None, {}
    metric, values = shown["metric"], shown["domains"]
    if len(values) == 1:
        metric, values = metric_of(shown), dict.fromkeys(values, judged_by(shown))
    return metric, {n: v for n, v in values.items() if v is not None and math.isfinite(v)}


def metric_of(scores: Mapping[str, Any]) -> str:
    """What a split was judged by."""
    return judged(scores)[0]


def judged_by(scores: Mapping[str, Any]) -> float | None:
    """The value of :func:`metric_of`."""
    return judged(scores)[1]


def listed(names: Iterable[object]) -> str:
    """In words; of many the first."""
    every = [clean(str(n)) for n in names]
    if len(every) > NAMED:
        return f"{', '.join(every[:NAMED])} and {len(every) - NAMED} more"
    return " and ".join([", ".join(every[:-1]), every[-1]] if len(every) > 1 else every)


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
