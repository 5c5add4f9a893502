"""DomainBed's three model selection rules, as functions of what was measured.

Each seed selects among all its hyperparameter trials:

- ``training``: the step and trial with the best mean score on the out-splits of the training domains.
- ``leave-one-out``: the step and trial with the best mean, over the training domains, of a domain's score at
  that step in the run that held it out too.
- ``oracle``: the trial with the best score on the out-split of the held-out domain, at the last step. This
  uses the test domain.

The score is that on the in-split of the held-out domain, at the selected step, of the run that held out this
domain alone. Of equals the higher trial wins, and in it the earlier step, as in DomainBed; a run that
diverged is never selected.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shoal.errors import InputError, check_names
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.statistics import mean_of, summarize
from shoal.training.metrics import METRICS


class Key(NamedTuple):
    """Identifies a run of a sweep; ``held_out`` is sorted."""

    dataset: str
    algorithm: str
    held_out: tuple[str, ...]
    seed: int
    trial: int

    def __str__(self) -> str:
        which = f"{self.algorithm} on {self.dataset}, {' and '.join(self.held_out)} held out"
        return f"{which}, seed {self.seed}, hyperparameter trial {self.trial}"


class Point(NamedTuple):
    """Scores at a step, by domain: on in-splits and on out-splits."""

    step: int
    inside: Mapping[str, float]
    outside: Mapping[str, float]


Points = Sequence[Point]
Scored = list[tuple[Point, float]]
"""Points that may be selected, each with its selection score."""


class Run(NamedTuple):
    points: Points
    metric: str
    diverged: bool


@dataclass(frozen=True)
class Sweep:
    """The planned runs, and those that finished or diverged."""

    planned: tuple[Key, ...]
    runs: Mapping[Key, Run]

    @property
    def datasets(self) -> list[str]:
        return list(dict.fromkeys(key.dataset for key in self.planned))


def key_of(config: RunConfig) -> Key:
    if not (protocol := config.protocol):
        raise InputError(f"the run {config.identity} of {config.name!r} is not one of a sweep.")
    out = tuple(sorted(protocol["held_out"]))
    return Key(config.dataset, config.name, out, protocol["seed"], protocol.get("trial", 0))


def sweep(configs: Iterable[RunConfig], records: Iterable[RunRecord]) -> Sweep:
    """What of a plan has been run; a failed run counts as missing."""
    planned: dict[Key, str] = {}
    for config in configs:
        if planned.setdefault(key := key_of(config), config.identity) != config.identity:
            raise InputError(f"two different runs are both {key}; compare them separately.")
    known = {identity: key for key, identity in planned.items()}
    done = [r for r in records if r.status != "failed" and r.config.identity in known]
    return Sweep(tuple(planned), {known[r.config.identity]: _run(r) for r in done})


def _run(record: RunRecord) -> Run:
    held_out, points = set(record.config.protocol["held_out"]), []
    for measured in record.history:
        point = _point(measured)
        if not held_out <= set(point.inside) or not set(point.outside) - held_out:
            raise InputError(
                f"the record of run {record.config.identity} has no scores to select by at step "
                f"{point.step}; remove it to repeat the run."
            )
        points.append(point)
    metric = next((s["metric"] for m in record.history for s in m["scores"].values()), "accuracy")
    return Run(points, metric, record.status != "finished")


def _point(measured: Mapping[str, Any]) -> Point:
    def domains(*splits: str) -> dict[str, float]:
        scores = [measured["scores"][s]["domains"] for s in splits if s in measured["scores"]]
        return {n: math.nan if v is None else v for each in scores for n, v in each.items()}

    return Point(measured["step"], domains("train", "test"), domains("validation", "oracle"))


def _mean(values: Iterable[float]) -> float:
    """NumPy's, as in DomainBed: another rounding would break ties differently."""
    return float(np.mean(list(values)))


def _training(points: Points, pairs: Mapping[str, Points], name: str) -> Scored:
    return [(p, _mean(v for n, v in p.outside.items() if n != name)) for p in points]


def _leave_one_out(points: Points, pairs: Mapping[str, Points], name: str) -> Scored:
    scores = [{p.step: p.inside[other] for p in own} for other, own in pairs.items()]
    times = Counter(p.step for p in points)
    common = [p for p in points if times[p.step] == 1 and all(p.step in own for own in scores)]
    return [(p, _mean(own[p.step] for own in scores)) for p in sorted(common, key=lambda p: p.step)]


def _oracle(points: Points, pairs: Mapping[str, Points], name: str) -> Scored:
    last = sorted(points, key=lambda p: p.step)[-1]
    return [(last, last.outside[name])]


class Rule(NamedTuple):
    """``scored`` takes the points of a trial, those of its runs with a pair held out, and the domain."""

    words: str
    scored: Callable[[Points, Mapping[str, Points], str], Scored]
    pairs: bool = False
    """Whether it needs runs that hold out pairs of domains."""


RULES = {
    "training": Rule("training-domain validation", _training),
    "leave-one-out": Rule("leave-one-domain-out validation", _leave_one_out, pairs=True),
    "oracle": Rule("test-domain validation (oracle)", _oracle),
}


def select(found: Sweep, dataset: str, rule: str = "training") -> list[dict[str, Any]]:
    """What each seed selects, for every algorithm and held-out domain, as plain data.

    ``status`` is ``scored``; ``missing`` where not all runs are there, for the best of some is not the best
    of all; or ``diverged``, where every trial diverged. ``missing`` lists the missing runs.
    """
    check_names("rule", [rule], RULES)
    check_names("dataset", [dataset], found.datasets)
    keys = [key for key in found.planned if key.dataset == dataset]
    alone = dict.fromkeys(key.held_out[0] for key in keys if len(key.held_out) == 1)
    domains = alone | dict.fromkeys(name for key in keys for name in key.held_out)
    for key, run in found.runs.items():
        if key.dataset == dataset and run.points:
            domains |= dict.fromkeys([*run.points[0].inside, *run.points[0].outside])
    trials: dict[tuple[str, int], set[int]] = {}
    for key in keys:
        trials.setdefault((key.algorithm, key.seed), set()).add(key.trial)
    return [
        {"algorithm": algorithm, "held_out": name, "seed": seed}
        | _select(found, RULES[rule], Key(dataset, algorithm, (name,), seed, 0), sorted(tried), list(domains))
        for (algorithm, seed), tried in trials.items()
        for name in alone
    ]


def _select(
    found: Sweep, rule: Rule, first: Key, trials: Sequence[int], domains: Sequence[str]
) -> dict[str, Any]:
    """``first`` is the run of trial 0 that held out the domain alone."""
    name = first.held_out[0]
    others = [other for other in domains if rule.pairs and other != name]
    choice: dict[str, Any] = dict.fromkeys(("trial", "step", "selection_score", "score", "metric"))
    choice |= {"status": "missing", "diverged": 0, "missing": []}
    if rule.pairs and len(domains) < 3:
        words = f"{rule.words} on {first.dataset}, which has two domains and needs three"
        return choice | {"missing": [words]}
    groups = [(name,), *(tuple(sorted((name, other))) for other in others)]
    keys = {trial: [first._replace(held_out=out, trial=trial) for out in groups] for trial in trials}
    if missing := [str(key) for own in keys.values() for key in own if key not in found.runs]:
        return choice | {"missing": missing}
    runs = {trial: [found.runs[key] for key in own] for trial, own in keys.items()}
    usable = {n: own for n, own in runs.items() if not any(r.diverged or not r.points for r in own)}
    scored = []
    for trial, (alone, *pairs) in usable.items():
        points = {other: run.points for other, run in zip(others, pairs, strict=True)}
        if not (own := rule.scored(alone.points, points, name)):
            missing.append(f"a step at which {keys[trial][0]} and its pairs were all evaluated")
        scored += [(trial, p.step, score, p.inside[name]) for p, score in own if math.isfinite(score)]
    choice |= {"diverged": len(runs) - len(usable), "missing": missing}
    if missing:
        return choice
    metric = next((own[0].metric for own in usable.values()), "accuracy")
    sign = 1 if lower_is_better(metric) else -1
    best = min(scored, key=lambda each: (sign * each[2], -each[0]), default=None)  # the first of equal steps
    if best is None or not math.isfinite(best[3]):
        return choice | {"status": "diverged", "metric": metric}
    selected = dict(zip(("trial", "step", "selection_score", "score"), best, strict=True))
    return choice | selected | {"status": "scored", "metric": metric}


def lower_is_better(metric: str) -> bool:
    """Whether lower values of a metric are better; an unknown one is taken for an error."""
    return metric not in METRICS or not METRICS[metric].higher


def results(found: Sweep, dataset: str, rule: str = "training") -> dict[str, Any]:
    """The results on a dataset as plain data: a row for each algorithm, in the order of the plan.

    Means and standard errors are over seeds; an average is first taken over the held-out domains, seed by
    seed.
    """
    choices = select(found, dataset, rule)
    names, seeds, algorithms = (
        list(dict.fromkeys(choice[name] for choice in choices)) for name in ("held_out", "seed", "algorithm")
    )
    metric = next((c["metric"] for c in choices if c["metric"]), None)
    return {
        "dataset": dataset,
        "rule": rule,
        "words": RULES[rule].words,
        "metric": metric,
        "held_out": names,
        "seeds": seeds,
        "search": len({key.trial for key in found.planned if key.dataset == dataset}),
        "rows": [_row(a, [c for c in choices if c["algorithm"] == a], names, metric) for a in algorithms],
        "choices": choices,
        "missing": list(dict.fromkeys(words for c in choices for words in c["missing"])),
    }


def _row(
    algorithm: str, choices: Sequence[Mapping[str, Any]], names: Sequence[str], metric: str | None
) -> dict[str, Any]:
    def summary(values: Sequence[float | None], *some: str) -> dict[str, Any]:
        states = {c["status"] for c in choices if c["held_out"] in some} - {"scored"}
        return summarize(values, metric) | {"status": sorted(states)}

    scores = {name: [c["score"] for c in choices if c["held_out"] == name] for name in names}
    by_seed = list(zip(*scores.values(), strict=True))
    return {
        "algorithm": algorithm,
        "domains": {name: summary(values, name) for name, values in scores.items()},
        "average": summary([mean_of(values) for values in by_seed], *names),
        "diverged": sum(c["diverged"] for c in choices),
    }
