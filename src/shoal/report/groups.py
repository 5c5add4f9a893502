"""Which runs belong together, and what comes of comparing them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord, selection_score
from shoal.experiments.selection import lower_is_better
from shoal.experiments.statistics import mean_of, summarize
from shoal.experiments.store import identity

NAMED = 6
"""Names in a sentence."""
APART = ("algorithm", "label", "settings", "seed", "draw", "lr", "optimizer_options", "protocol")
"""In which runs of a comparison differ."""
ONCE = {"eval_every": None}
ASIDE = ("eval_every", "eval_limit", "digest")
"""Runs that differ in these are shown apart, but more telling differences name them."""
Kept = tuple[Path, Mapping[str, Any]]
"""The file of a comparison's result, and its content."""


@dataclass(frozen=True)
class Run:
    """A record, where it was found, and the command that was typed where its folder tells."""

    record: RunRecord
    path: str
    command: str = ""

    @cached_property
    def identity(self) -> str:
        return identity(self.record, self.path)


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
    """How hyperparameters were chosen, in words."""
    apart: str = ""
    """What tells these runs from others of the dataset."""
    planned: bool = False
    """Whether ``result`` is of `shoal compare`, which knows what was to be run."""


class Trouble(NamedTuple):
    """What is no record but a reader must know."""

    words: str
    more: str = ""


def grouped(runs: Sequence[Run], comparisons: Sequence[Kept], troubles: list[Trouble]) -> list[Group]:
    """Comparisons as they were made, then whatever else can be compared, then single runs."""
    groups: list[Group] = []
    taken: set[str] = set()
    seen: list[Any] = []
    for path, result in comparisons:
        own, there = result["identities"], result["runs"] - result["runs_missing"]
        if own in seen:  # a copy
            continue
        seen.append(own)
        mine = [r for r in runs if r.identity in own]
        if len(mine) > there:
            troubles.append(Trouble(f"{path} is older than its runs and not used."))
            continue
        if len(mine) < there:
            troubles.append(Trouble(f"{path} refers to {there:,} runs; {len(mine):,} records were found."))
        taken |= {r.identity for r in mine}
        tried, metric = result["search"], result["metric"] or "score"
        rule = (
            f"For each algorithm and seed, the step with the best validation {metric} on the training "
            f"domains was selected{f', among {tried} hyperparameter trials' if tried > 1 else ''}."
        )
        groups.append(Group("comparison", result, mine, _chosen(result), rule, str(path.parent), True))
    left = [r for r in runs if r.identity not in taken]
    groups += [replace(_group(part), apart=apart) for apart, part in split_up(left)]
    groups.sort(key=lambda g: g.kind == "runs")
    names = [g.result["dataset"] for g in groups]
    return [
        replace(g, apart=(g.apart or g.kind) if names.count(g.result["dataset"]) > 1 else "") for g in groups
    ]


def _completed(rows: Iterable[Mapping[str, Any]], lower: bool) -> list[dict[str, Any]]:
    """With the worst domain of each row, and whether it is a control."""
    from shoal.experiments import compare

    return [
        {**row, "worst": compare.worst(row, lower), "control": compare.is_control(row["algorithm"])}
        for row in rows
    ]


def split_up(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Runs that differ in nothing but what a comparison varies, with what tells them from others."""
    from shoal.experiments import baselines

    parts: dict[str, tuple[dict[str, Any], list[Run]]] = {}
    for run in runs:
        fixed = _fixed(run.record.config)
        parts.setdefault(json.dumps(fixed, sort_keys=True, default=str), (fixed, []))[1].append(run)
    for key, (mine, part) in list(parts.items()):
        if baselines.is_one(part[0].record.config):  # they are measured once, at their end
            alike = [k for k, (other, _) in parts.items() if k != key and other | ONCE == mine | ONCE]
            if len(alike) == 1:
                parts[alike[0]][1].extend(parts.pop(key)[1])
    datasets = list(dict.fromkeys(fixed["dataset"] for fixed, _ in parts.values()))
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

    Methods that take other numbers of minibatches per step are comparable where they see as many in all.
    """
    found = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in APART}
    data, model = (dict(found.pop(part)) for part in ("data_options", "model_options"))
    data.pop("held_out", None)
    if data.get("seed") == config.seed:
        del data["seed"]
    if each := found.pop("domains_per_step"):
        found |= {"minibatches": found.pop("steps") * each, "eval_every": (config.eval_every or 0) * each}
    options = {f"data {k}" if k in found else k: v for k, v in data.items()}
    options |= {f"model {k}": v for k, v in model.items()}
    return options | found | {"protocol": bool(config.protocol)}


def _group(runs: Sequence[Run]) -> Group:
    """Runs that differ in what a comparison varies, compared if they can be."""
    from shoal.experiments import compare

    records = [r.record for r in runs]
    if all(r.config.protocol for r in records):
        return _sweep(runs)
    if not _comparable(records):
        return Group("runs", means(runs), runs)
    erm = [r.config.name for r in records if r.config.algorithm == compare.BASELINE and not r.config.draw]
    baseline = erm[0] if erm and compare.BASELINE not in erm else compare.BASELINE  # it may be called "ERM"
    configs = [r.config for r in records]
    result = compare.results([*configs, *_holes(configs)], records, baseline)
    numbers = sorted({t["tried"] for t in result["trials"]})
    rule = f"Selected step of each run: {' or '.join(sorted({r.rule for r in records}))}."
    if note := next((n for r in records if (n := r.notes.get("validation"))), None):
        rule += f" Validation is {note}."
    elif others := list(dict.fromkeys(name for r in records for name in strange(r))):
        rule += f" Validation domains that were not trained on: {listed(others)}."
    if numbers[-1] > 1:
        many = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
        rule = (
            f"Of the runs of an algorithm, seed and held-out domain ({many}), the one with the best "
            f"validation {result['metric'] or 'score'} was selected. {rule}"
        )
    return Group("comparison", result, runs, _chosen(result), rule)


def strange(record: RunRecord) -> list[str]:
    """Domains of validation that were not trained on, where it is known which were."""
    scores = record.history[-1]["scores"] if record.history else {}
    known = scores.get("train", {}).get("domains", ())
    return [d for d in scores.get("validation", {}).get("domains", ()) if d not in known] if known else []


def _chosen(result: Mapping[str, Any]) -> frozenset[str]:
    """The identities of the runs that validation chose."""
    return frozenset(t["run"] for t in result["trials"] if t["chosen"] is not None)


def _holes(configs: Iterable[RunConfig]) -> list[RunConfig]:
    """What would have to be run for every algorithm to have the same seeds and held-out domains."""
    found: dict[str, dict[tuple[str, int], RunConfig]] = {}
    for config in configs:
        held_out = json.dumps(config.data_options.get("held_out"))
        found.setdefault(config.name, {})[held_out, config.seed] = config
    every = dict.fromkeys(held_out for own in found.values() for held_out, _ in own)
    seeds = dict.fromkeys(seed for own in found.values() for _, seed in own)
    holes = []
    for own in found.values():
        first = next(iter(own.values()))
        for held_out in every:
            options = {k: v for k, v in first.data_options.items() if k != "held_out"}
            options |= {} if held_out == "null" else {"held_out": json.loads(held_out)}
            holes += [replace(first, seed=s, data_options=options) for s in seeds if (held_out, s) not in own]
    return holes


def _comparable(records: Sequence[RunRecord]) -> bool:
    """Whether there are several algorithms, all with a score on validation and on test."""
    scores = [m["scores"] for r in records for m in r.history]
    return (
        len({r.config.name for r in records}) > 1
        and bool(scores)
        and all({"validation", "test"} <= set(s) for s in scores)
        and all(None not in s["validation"]["domains"].values() for s in scores)
    )


def _sweep(runs: Sequence[Run]) -> Group:
    """By training-domain validation, in the form of a comparison."""
    from shoal.experiments import compare, selection

    records = [r.record for r in runs]
    try:
        planned = selection.sweep([r.config for r in records], records)
        found = selection.results(planned, records[0].config.dataset)
    except (InputError, LookupError):
        return Group("runs", means(runs), runs)
    if not found["held_out"]:
        return Group("runs", means(runs), runs)
    lower = found["metric"] is not None and lower_is_better(found["metric"])
    rows = [
        {**row, "rank": None, "runs_diverged": row["diverged"]} for row in _completed(found["rows"], lower)
    ]

    def worth(row: Mapping[str, Any]) -> float:
        mean = row["average"]["mean"]
        return math.inf if mean is None else mean if lower else -mean

    whole = [row for row in rows if None not in row["average"]["values"]]
    for row in whole:
        row["rank"] = 1 + sum(worth(other) < worth(row) - 1e-12 for other in whole)
    rows.sort(key=lambda row: (row["rank"] is None, row["rank"], worth(row)))
    picked = {(c["algorithm"], (c["held_out"],), c["seed"], c["trial"]) for c in found["choices"]}
    chosen = frozenset(r.identity for r in runs if selection.key_of(r.record.config)[1:] in picked)
    result = found | {
        "lower_is_better": lower,
        "baseline": next((r["algorithm"] for r in rows if r["algorithm"] == compare.BASELINE), None),
        "recommendation": None if found["missing"] else compare.recommendation(rows, lower),
        "trials": [],
        "rows": rows,
        "runs": len(runs),
        "runs_missing": len(found["missing"]),
    }
    trials = f"{found['search']} trial{'s' * (found['search'] != 1)} of random search"
    rule = f"Hyperparameters and step: {found['words']}, among {trials}."
    return Group("sweep", result, runs, chosen, rule)


def means(runs: Sequence[Run]) -> dict[str, Any]:
    """Every algorithm's mean over seeds in each domain of the test split, at the step each run selected.

    Of runs without a test split it is of validation, or else of the training examples; ``split`` says so.
    """
    records, names = [run.record for run in runs], called(runs)
    splits = [s for r in records for m in r.history for s in m["scores"]]
    split = next((s for s in ("test", "validation", "train") if s in splits), splits[0] if splits else "test")
    scored = [_by_domain(record, split) for record in records]
    metric = next((name for name, _ in scored if name is not None), None)
    values = [own if name == metric else {} for name, own in scored]
    domains = list(dict.fromkeys(domain for own in values for domain in own))
    table = []
    for algorithm in dict.fromkeys(names):
        own = [(r.config.seed, v) for n, r, v in zip(names, records, values, strict=True) if n == algorithm]
        seeds = sorted({seed for seed, _ in own})  # another algorithm's seeds are not missing here
        lost = sum(r.status != "finished" for n, r in zip(names, records, strict=True) if n == algorithm)

        def summary(numbers: Sequence[float | None], lost: int = lost) -> dict[str, Any]:
            return summarize(numbers, metric) | {"trials": {"diverged": lost}}

        each = {
            domain: [mean_of(v[domain] for s, v in own if s == seed and domain in v) for seed in seeds]
            for domain in domains
        }
        whole = [mean_of(v) for v in zip(*each.values(), strict=True)]
        row = {"algorithm": algorithm, "rank": None, "average": summary(whole), "runs_diverged": lost}
        table.append(row | {"domains": {domain: summary(v) for domain, v in each.items()}})
    lower = metric is not None and lower_is_better(metric)
    return {
        "dataset": str(records[0].config.dataset),
        "metric": metric,
        "lower_is_better": lower,
        "baseline": None,
        "held_out": domains,
        "seeds": sorted({r.config.seed for r in records}),
        "rows": _completed(table, lower),
        "missing": [],
        "split": split,
        "several": len({r.config.name for r in records}) > 1,
    }


def called(runs: Sequence[Run]) -> list[str]:
    """Each run's algorithm, with those of its settings in which other runs of that name differ."""
    configs = [run.record.config for run in runs]
    settings = [{**c.settings, **c.optimizer_options, "lr": c.lr, "draw": c.draw} for c in configs]
    found = []
    for config, mine in zip(configs, settings, strict=True):
        others = [s for c, s in zip(configs, settings, strict=True) if c.name == config.name]
        keys = dict.fromkeys(k for other in [mine, *others] for k in other)
        differ = [k for k in keys if any(other.get(k) != mine.get(k) for other in others)]
        found.append(", ".join([config.name, *(f"{k} {plain(mine.get(k))}" for k in differ)]))
    return found


def test_domains(record: RunRecord) -> list[str]:
    return list(record.history[-1]["scores"].get("test", {}).get("domains", ())) if record.history else []


def _by_domain(record: RunRecord, split: str) -> tuple[str | None, dict[str, float]]:
    """What a finished run measured in a split, by domain; of one domain its selection score."""
    shown = record.chosen.get(split) if record.status == "finished" else None
    if shown is None:
        return None, {}
    metric, values = shown["metric"], shown["domains"]
    if len(values) == 1:
        metric, value = selection_score(shown)
        values = dict.fromkeys(values, value)
    return metric, {n: v for n, v in values.items() if v is not None and math.isfinite(v)}


def listed(names: Iterable[object]) -> str:
    """In words; of many the first."""
    every = [str(n) for n in names] or ["no domain"]
    if len(every) > NAMED:
        return f"{', '.join(every[:NAMED])} and {len(every) - NAMED} more"
    return " and ".join([", ".join(every[:-1]), every[-1]] if len(every) > 1 else every)


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
