"""DomainBed's three ways to choose settings and step, as functions of what was measured.

Each trial chooses among all its draws of settings:

- ``training``: the step and draw with the best mean score on the training domains' out-splits.
- ``leave-one-out``: the step and draw with the best mean, over the training domains, of a domain's score at
  that step in the run that left it out too.
- ``oracle``: the draw with the best score on the out-split of the domain left out, at the last step. This
  looks at the test domain.

What is reported is the score on the in-split of the domain left out, at that step, of the run that left out
this domain alone. Of equals the lower draw wins, then the earlier step; a run that diverged is never chosen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shoal.errors import InputError, check_names
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.training.metrics import METRICS


class Key(NamedTuple):
    """Which run of a comparison; ``left_out`` is sorted."""

    dataset: str
    algorithm: str
    left_out: tuple[str, ...]
    trial: int
    draw: int

    def __str__(self) -> str:
        out = " and ".join(self.left_out)
        return f"{self.algorithm} on {self.dataset}, {out} left out, trial {self.trial}, draw {self.draw}"


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

    def of(self, dataset: str) -> list[Key]:
        return [key for key in self.planned if key.dataset == dataset]


def key_of(config: RunConfig) -> Key:
    if not config.protocol:
        raise InputError(f"the run {config.identity} of {config.name!r} has no protocol to select by.")
    about = config.protocol
    out = tuple(sorted(about["leave_out"]))
    return Key(config.dataset, config.name, out, about["trial"], about.get("draw", 0))


def sweep(configs: Iterable[RunConfig], records: Iterable[RunRecord]) -> Sweep:
    """What of a plan has been run."""
    planned: dict[Key, str] = {}
    for config in configs:
        if planned.setdefault(key := key_of(config), config.identity) != config.identity:
            raise InputError(f"two runs that differ are both {key}; compare them apart.")
    known = {identity: key for key, identity in planned.items()}
    found = {known[i]: run_of(r, known[i]) for r in records if (i := r.config.identity) in known}
    return Sweep(tuple(planned), found)


def run_of(record: RunRecord, key: Key) -> Run:
    points = tuple(_point(m) for m in record.history)
    for point in points:
        if not set(key.left_out) <= set(point.inside) or not set(point.outside) - set(key.left_out):
            raise InputError(
                f"the record of run {record.config.identity} lacks scores at step {point.step} to select by; "
                "remove it, and the run is done again."
            )
    metrics = [s["metric"] for m in record.history for s in m["scores"].values()]
    return Run(key, points, metrics[0] if metrics else "accuracy", record.status != "finished")


def _point(measured: Mapping[str, Any]) -> Point:
    scores = measured["scores"]

    def domains(*splits: str) -> dict[str, float]:
        each = (item for s in splits if s in scores for item in scores[s]["domains"].items())
        return {name: math.nan if value is None else value for name, value in each}

    return Point(measured["step"], domains("train", "test"), domains("validation", "oracle"))


class Candidate(NamedTuple):
    """What may be chosen: ``judged`` by this, ``score`` is reported."""

    draw: int
    step: int
    judged: float
    score: float


def training_domains(runs: Mapping[frozenset[str], Run], name: str) -> list[Candidate]:
    alone = runs[frozenset([name])]
    return [
        Candidate(
            alone.key.draw,
            point.step,
            statistics.fmean(value for domain, value in point.outside.items() if domain != name),
            point.inside[name],
        )
        for point in alone.points
    ]


def leave_one_out(runs: Mapping[frozenset[str], Run], name: str) -> list[Candidate]:
    alone = runs[frozenset([name])]
    others = {next(iter(out - {name})): run for out, run in runs.items() if len(out) == 2}
    found = {other: {p.step: p.inside[other] for p in run.points} for other, run in others.items()}
    return [
        Candidate(
            alone.key.draw,
            point.step,
            statistics.fmean(scores[point.step] for scores in found.values()),
            point.inside[name],
        )
        for point in alone.points
        if all(point.step in scores for scores in found.values())
    ]


def oracle(runs: Mapping[frozenset[str], Run], name: str) -> list[Candidate]:
    alone = runs[frozenset([name])]
    last = max(alone.points, key=lambda point: point.step)
    return [Candidate(alone.key.draw, last.step, last.outside[name], last.inside[name])]


@dataclass(frozen=True)
class Rule:
    """``candidates`` of one draw, from its runs by what they left out; ``pairs``: it needs pairs left out."""

    name: str
    words: str
    candidates: Callable[[Mapping[frozenset[str], Run], str], list[Candidate]]
    pairs: bool = False


RULES = {
    rule.name: rule
    for rule in (
        Rule("training", "training-domain validation", training_domains),
        Rule("leave-one-out", "leave-one-domain-out validation", leave_one_out, pairs=True),
        Rule("oracle", "test-domain validation (oracle)", oracle),
    )
}


def select(found: Sweep, dataset: str, rule: str = "training") -> list[dict[str, Any]]:
    """What each trial chose, for every algorithm and domain left out, as plain data.

    ``status`` is ``scored``; ``missing`` where not all runs are there, for the best of some is not the best
    of all; or ``diverged``, where every draw was lost. ``missing`` says what is not there, run by run.
    """
    check_names("rule", [rule], RULES)
    check_names("dataset", [dataset], found.datasets)
    keys = found.of(dataset)
    every, names = domains_of(found, dataset), _left_out(keys)
    draws: dict[tuple[str, int], list[int]] = {}
    for key in keys:
        draws.setdefault((key.algorithm, key.trial), []).append(key.draw)
    return [
        {"algorithm": algorithm, "left_out": name, "trial": trial}
        | _choice(found, RULES[rule], Key(dataset, algorithm, (name,), trial, 0), sorted(set(tried)), every)
        for (algorithm, trial), tried in draws.items()
        for name in names
    ]


def domains_of(found: Sweep, dataset: str) -> list[str]:
    """All that are known of: those left out, and those with a score."""
    names = [name for key in found.of(dataset) for name in key.left_out]
    scored = [n for k, run in found.runs.items() if k.dataset == dataset for n in _scored(run)]
    return list(dict.fromkeys([*_left_out(found.of(dataset)), *names, *scored]))


def _scored(run: Run) -> list[str]:
    return [*run.points[0].inside, *run.points[0].outside] if run.points else []


def _left_out(keys: Iterable[Key]) -> list[str]:
    """The domains left out alone, in the order of the runs."""
    return list(dict.fromkeys(key.left_out[0] for key in keys if len(key.left_out) == 1))


def _choice(
    found: Sweep, rule: Rule, first: Key, draws: Sequence[int], every: Sequence[str]
) -> dict[str, Any]:
    """``first`` is the run of the first draw that left out the domain alone."""
    name = first.left_out[0]
    left_out = [(name,), *(tuple(sorted((name, o))) for o in every if rule.pairs and o != name)]
    tried = {n: [first._replace(left_out=out, draw=n) for out in left_out] for n in draws}
    nothing = {"status": "missing", "draw": None, "step": None, "judged": None, "score": None, "metric": None}
    if rule.pairs and len(every) < 3:
        gone = [f"{rule.words} on {first.dataset}, which has two domains and needs three"]
    else:
        gone = [str(key) for keys in tried.values() for key in keys if key not in found.runs]
    if gone:
        return nothing | {"diverged": 0, "missing": gone}
    runs = {n: {frozenset(key.left_out): found.runs[key] for key in keys} for n, keys in tried.items()}
    lost = [n for n, own in runs.items() if any(r.diverged or not r.points for r in own.values())]
    candidates = {n: rule.candidates(own, name) for n, own in runs.items() if n not in lost}
    if apart := [tried[n][0] for n, own in candidates.items() if not own]:
        said = [f"a step at which {key} and its pairs were all evaluated" for key in apart]
        return nothing | {"diverged": len(lost), "missing": said}
    metric = _metric(runs[n][frozenset([name])] for n in draws if n not in lost)
    best = choose((c for own in candidates.values() for c in own), lower_is_better(metric))
    return nothing | _as_data(best) | {"diverged": len(lost), "missing": [], "metric": metric}


def _metric(runs: Iterable[Run]) -> str:
    return next((run.metric for run in runs), "accuracy")


def _as_data(best: Candidate | None) -> dict[str, Any]:
    if best is None or not math.isfinite(best.score):
        return {"status": "diverged"}
    return {"status": "scored", **best._asdict()}


def choose(candidates: Iterable[Candidate], lower: bool = False) -> Candidate | None:
    """The best; of equals the lower draw, then the earlier step."""
    known = [c for c in candidates if math.isfinite(c.judged)]
    return min(known, key=lambda c: (c.judged if lower else -c.judged, c.draw, c.step), default=None)


def lower_is_better(metric: str) -> bool:
    """One that is not ours, such as another program's error, is better when it is lower."""
    return metric not in METRICS or not METRICS[metric].higher


def results(found: Sweep, dataset: str, rule: str = "training") -> dict[str, Any]:
    """A dataset's results as plain data: a row for each algorithm, in the order of the plan.

    Means and standard errors are over trials; an average is first taken over the domains left out, trial by
    trial.
    """
    choices = select(found, dataset, rule)
    names, trials = _distinct(choices, "left_out"), _distinct(choices, "trial")
    metrics = [c["metric"] for c in choices if c["metric"]]
    return {
        "dataset": dataset,
        "rule": rule,
        "words": RULES[rule].words,
        "metric": metrics[0] if metrics else None,
        "left_out": names,
        "trials": trials,
        "draws": len({key.draw for key in found.of(dataset)}),
        "rows": [_row(a, choices, names) for a in _distinct(choices, "algorithm")],
        "choices": choices,
        "missing": list(dict.fromkeys(words for c in choices for words in c["missing"])),
    }


def _distinct(choices: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    return list(dict.fromkeys(choice[name] for choice in choices))


def _row(algorithm: str, choices: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    mine = {(c["left_out"], c["trial"]): c for c in choices if c["algorithm"] == algorithm}
    trials = list(dict.fromkeys(trial for _, trial in mine))
    scores = {name: [mine[name, trial]["score"] for trial in trials] for name in names}
    whole = [list(values) for values in zip(*scores.values(), strict=True)]
    return {
        "algorithm": algorithm,
        "domains": {n: summary(scores[n]) | {"status": _states(mine, [n])} for n in names},
        "average": summary([None if None in v else statistics.fmean(v) for v in whole])
        | {"status": _states(mine, names)},
        "diverged": sum(c["diverged"] for c in mine.values()),
    }


def _states(mine: Mapping[tuple[str, int], Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    return sorted({c["status"] for (name, _), c in mine.items() if name in names} - {"scored"})


def summary(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean and standard error of those known, from the deviation with n − 1; one value a trial."""
    known = [v for v in values if v is not None]
    error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None
    return {"values": list(values), "mean": statistics.fmean(known) if known else None, "se": error}


def every_result(found: Sweep, rule: str = "training") -> Iterator[dict[str, Any]]:
    return (results(found, dataset, rule) for dataset in found.datasets)
