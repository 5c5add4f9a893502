"""DomainBed's three ways to choose hyperparameters and step, as functions of what was measured.

Each seed chooses among all its trials of hyperparameters:

- ``training``: the step and trial with the best mean score on the training domains' out-splits.
- ``leave-one-out``: the step and trial with the best mean, over the training domains, of a domain's score at
  that step in the run that held it out too.
- ``oracle``: the trial with the best score on the out-split of the held-out domain, at the last step. This
  uses the test domain.

What is reported is the score on the in-split of the held-out domain, at that step, of the run that held out
this domain alone. Of equals the higher trial wins, and in it the earlier step, as in DomainBed; a run that
diverged is never chosen. In plain data a seed is called ``trial`` and a trial ``draw``, as in the records.
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
    """Which run of a sweep; ``held_out`` is sorted."""

    dataset: str
    algorithm: str
    held_out: tuple[str, ...]
    trial: int
    draw: int

    def __str__(self) -> str:
        which = f"{self.algorithm} on {self.dataset}, {' and '.join(self.held_out)} held out"
        return f"{which}, seed {self.trial}, hyperparameter trial {self.draw}"


class Point(NamedTuple):
    """Scores at a step, by domain: on in-splits and on out-splits."""

    step: int
    inside: Mapping[str, float]
    outside: Mapping[str, float]


@dataclass(frozen=True)
class Run:
    key: Key
    points: tuple[Point, ...]
    metric: str = "accuracy"
    diverged: bool = False


@dataclass(frozen=True)
class Sweep:
    """The runs that there should be, and those that there are."""

    planned: tuple[Key, ...]
    runs: Mapping[Key, Run]

    @property
    def datasets(self) -> list[str]:
        return list(dict.fromkeys(key.dataset for key in self.planned))


def key_of(config: RunConfig) -> Key:
    if not (protocol := config.protocol):
        raise InputError(f"the run {config.identity} of {config.name!r} has no protocol to select by.")
    out = tuple(sorted(protocol["held_out"]))
    return Key(config.dataset, config.name, out, protocol["trial"], protocol.get("draw", 0))


def sweep(configs: Iterable[RunConfig], records: Iterable[RunRecord]) -> Sweep:
    """What of a plan has been run; a run that failed counts as missing."""
    planned: dict[Key, str] = {}
    for config in configs:
        if planned.setdefault(key := key_of(config), config.identity) != config.identity:
            raise InputError(f"two different runs are both {key}; compare them separately.")
    known = {identity: key for key, identity in planned.items()}
    done = [r for r in records if r.status != "failed" and r.config.identity in known]
    return Sweep(tuple(planned), {(key := known[r.config.identity]): _run(r, key) for r in done})


def _run(record: RunRecord, key: Key) -> Run:
    points = tuple(_point(m) for m in record.history)
    for point in points:
        if not set(key.held_out) <= set(point.inside) or not set(point.outside) - set(key.held_out):
            raise InputError(
                f"the record of run {record.config.identity} lacks scores at step {point.step} to select by; "
                "remove it to repeat the run."
            )
    metrics = [s["metric"] for m in record.history for s in m["scores"].values()]
    return Run(key, points, metrics[0] if metrics else "accuracy", record.status != "finished")


def _point(measured: Mapping[str, Any]) -> Point:
    def domains(*splits: str) -> dict[str, float]:
        found = [measured["scores"][s]["domains"] for s in splits if s in measured["scores"]]
        return {n: math.nan if v is None else v for scores in found for n, v in scores.items()}

    return Point(measured["step"], domains("train", "test"), domains("validation", "oracle"))


Points = Sequence[Point]
Candidates = list[tuple[Point, float]]
"""Points that may be chosen, each with its selection score."""


def _mean(values: Iterable[float]) -> float:
    """NumPy's, as in DomainBed: what is rounded otherwise is no longer equal."""
    return float(np.mean(list(values)))


def _training(points: Points, pairs: Mapping[str, Points], name: str) -> Candidates:
    return [(p, _mean(v for n, v in p.outside.items() if n != name)) for p in points]


def _leave_one_out(points: Points, pairs: Mapping[str, Points], name: str) -> Candidates:
    scores = [{p.step: p.inside[other] for p in own} for other, own in pairs.items()]
    times = Counter(p.step for p in points)
    common = [p for p in points if times[p.step] == 1 and all(p.step in own for own in scores)]
    return [(p, _mean(own[p.step] for own in scores)) for p in sorted(common, key=_step)]


def _oracle(points: Points, pairs: Mapping[str, Points], name: str) -> Candidates:
    last = sorted(points, key=_step)[-1]
    return [(last, last.outside[name])]


def _step(point: Point) -> int:
    return point.step


class Rule(NamedTuple):
    """``candidates`` takes a trial's points, those of its runs with a pair held out, and the domain."""

    words: str
    candidates: Callable[[Points, Mapping[str, Points], str], Candidates]
    pairs: bool = False
    """Whether it needs runs that hold out pairs of domains."""


RULES = {
    "training": Rule("training-domain validation", _training),
    "leave-one-out": Rule("leave-one-domain-out validation", _leave_one_out, pairs=True),
    "oracle": Rule("test-domain validation (oracle)", _oracle),
}


def select(found: Sweep, dataset: str, rule: str = "training") -> list[dict[str, Any]]:
    """What each seed chose, for every algorithm and held-out domain, as plain data.

    ``status`` is ``scored``; ``missing`` where not all runs are there, for the best of some is not the best
    of all (of a sweep by DomainBed: where there is nothing to choose from); or ``diverged``, where every
    trial was lost. ``missing`` says what is not there, run by run.
    """
    check_names("rule", [rule], RULES)
    check_names("dataset", [dataset], found.datasets)
    keys = [key for key in found.planned if key.dataset == dataset]
    names = dict.fromkeys(key.held_out[0] for key in keys if len(key.held_out) == 1)
    every = dict(names) | dict.fromkeys(name for key in keys for name in key.held_out)
    for key, run in found.runs.items():
        if key.dataset == dataset and run.points:
            every |= dict.fromkeys([*run.points[0].inside, *run.points[0].outside])
    draws: dict[tuple[str, int], set[int]] = {}
    for key in keys:
        draws.setdefault((key.algorithm, key.trial), set()).add(key.draw)
    return [
        {"algorithm": algorithm, "held_out": name, "trial": trial}
        | _choice(found, RULES[rule], Key(dataset, algorithm, (name,), trial, 0), sorted(tried), list(every))
        for (algorithm, trial), tried in draws.items()
        for name in names
    ]


def _choice(
    found: Sweep, rule: Rule, first: Key, draws: Sequence[int], every: Sequence[str]
) -> dict[str, Any]:
    """``first`` is the run of the first trial that held out the domain alone."""
    name = first.held_out[0]
    others = [other for other in every if rule.pairs and other != name]
    choice: dict[str, Any] = dict.fromkeys(("draw", "step", "selection_score", "score", "metric"))
    choice |= {"status": "missing", "diverged": 0, "missing": []}

    def keys(draw: int) -> list[Key]:
        pairs = [tuple(sorted((name, other))) for other in others]
        return [first._replace(held_out=out, draw=draw) for out in ((name,), *pairs)]

    if rule.pairs and len(every) < 3:
        words = f"{rule.words} on {first.dataset}, which has two domains and needs three"
        return choice | {"missing": [words]}
    gone = [str(key) for draw in draws for key in keys(draw) if key not in found.runs]
    if gone:
        return choice | {"missing": gone}
    runs = {draw: [found.runs[key] for key in keys(draw)] for draw in draws}
    kept = {n: own for n, own in runs.items() if not any(r.diverged or not r.points for r in own)}
    candidates = []
    for draw, (alone, *pairs) in kept.items():
        scores = {other: run.points for other, run in zip(others, pairs, strict=True)}
        if not (own := rule.candidates(alone.points, scores, name)):
            gone.append(f"a step at which {alone.key} and its pairs were all evaluated")
        candidates += [(draw, p.step, score, p.inside[name]) for p, score in own if math.isfinite(score)]
    choice |= {"diverged": len(runs) - len(kept), "missing": gone}
    if gone:
        return choice
    metric = next((own[0].metric for own in kept.values()), "accuracy")
    sign = 1 if lower_is_better(metric) else -1
    best = min(candidates, key=lambda c: (sign * c[2], -c[0]), default=None)  # the first of equal steps
    if best is None or not math.isfinite(best[3]):
        return choice | {"status": "diverged", "metric": metric}
    chosen = dict(zip(("draw", "step", "selection_score", "score"), best, strict=True))
    return choice | chosen | {"status": "scored", "metric": metric}


def lower_is_better(metric: str) -> bool:
    """One that is not ours, such as another program's error, is better when it is lower."""
    return metric not in METRICS or not METRICS[metric].higher


def results(found: Sweep, dataset: str, rule: str = "training") -> dict[str, Any]:
    """A dataset's results as plain data: a row for each algorithm, in the order of the plan.

    Means and standard errors are over seeds; an average is first taken over the held-out domains, seed by
    seed.
    """
    choices = select(found, dataset, rule)
    names, trials, algorithms = (
        list(dict.fromkeys(choice[name] for choice in choices)) for name in ("held_out", "trial", "algorithm")
    )
    metric = next((c["metric"] for c in choices if c["metric"]), None)
    return {
        "dataset": dataset,
        "rule": rule,
        "words": RULES[rule].words,
        "metric": metric,
        "held_out": names,
        "trials": trials,
        "draws": len({key.draw for key in found.planned if key.dataset == dataset}),
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
