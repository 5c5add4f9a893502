"""From records to tables: what each algorithm selects among its trials, and its scores on held-out domains.

A *case* is an algorithm, a held-out domain and a seed: the hyperparameter trial that was selected without
the held-out domain, and its score there. Cases are rows of a DataFrame, whatever protocol they come from, and
:func:`table` makes a row for each algorithm of them. The ``status`` of a case is ``scored``; ``missing``
where not all runs are there, for the best of some is not the best of all, or ``failed`` where one of these
failed; ``diverged``; or ``undefined`` where runs finished without a score, such as AUC of one class.

:func:`trial_cases` reads the cases of a comparison, in which every run has selected its step;
:func:`domainbed_cases` those of a sweep by DomainBed's three rules:

- ``training``: the step and trial with the best mean score on the out-splits of the training domains.
- ``leave-one-out``: the step and trial with the best mean, over the training domains, of a domain's score at
  that step in the run that held it out too.
- ``oracle``: the trial with the best score on the out-split of the held-out domain, at the last step. This
  uses the test domain.

The score is that on the in-split of the held-out domain, at the selected step, of the run that held out this
domain alone. Of equals the higher trial is selected, and in it the earlier step, as in DomainBed; a trial of
which a run diverged is never selected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas

from shoal.errors import InputError, check_names
from shoal.experiments.config import RunConfig
from shoal.experiments.recommend import rounded
from shoal.experiments.record import RunRecord, selection_score
from shoal.experiments.statistics import summarize
from shoal.training.metrics import METRICS

RULES = {
    "training": "training-domain validation",
    "leave-one-out": "leave-one-domain-out validation",
    "oracle": "test-domain validation (oracle)",
}
UNKNOWN: dict[str, Any] = dict.fromkeys(("trial", "step", "run", "metric", "settings", "lr"))
UNKNOWN |= {"score": math.nan, "selection_score": math.nan, "metrics": {}}
"""Of a case in which nothing was selected."""
NUMBERS = {"score": float, "selection_score": float, "diverged": int, "seed": int, "trials": int}


def lower_is_better(metric: str | None) -> bool:
    """Whether lower values of a metric are better; an unknown one is taken for an error."""
    return metric is not None and (metric not in METRICS or not METRICS[metric].higher)


# Tables


def table(
    cases: pandas.DataFrame, lower: bool = False, left: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """A row of plain data for each algorithm, best first; those that ``left`` a race come last.

    An average is over domains, seed by seed; that of a further metric is over the domains in which all cases
    have a value of it. Only an algorithm with a score in every case has a rank, unless it has left: means
    over other cases, seeds or trials are not comparable.
    """
    metric, (extra, lacks), sign = metric_of(cases), further_metrics(cases), 1 if lower else -1
    rows = []
    for algorithm, group in cases.groupby("algorithm", sort=False):
        row: dict[str, Any] = {"algorithm": algorithm, "rank": None, "worst": None, "metrics": {}}
        row["left"] = (left or {}).get(str(algorithm))
        row["domains"] = {
            name: _summary(each["score"], metric, each) | {"fold": each["fold"].iloc[0]}
            for name, each in group.groupby("held_out", sort=False)
        }
        row["average"] = _summary(_by_seed(group, group["score"]), metric, group)
        row["validation"] = _summary(_by_seed(group, group["selection_score"]), metric, group)
        for name in extra.columns[extra.loc[group.index].notna().any()]:
            known = group[~group["held_out"].isin(lacks[name])]
            row["metrics"][name] = _summary(_by_seed(known, extra.loc[known.index, name]), name, group)
        row["runs_diverged"] = int(group.drop_duplicates(["fold", "seed"])["diverged"].sum())
        if group["score"].notna().all():
            worst = max(row["domains"].items(), key=lambda pair: sign * pair[1]["mean"])
            row["worst"] = {"domain": worst[0], **worst[1]}
        rows.append(row)
    ranked = [row for row in rows if row["worst"] and not row["left"]]
    scores = [rounded(sign * row["average"]["mean"]) for row in ranked]
    for row, score in zip(ranked, scores, strict=True):
        row["rank"] = 1 + sum(other < score for other in scores)

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        mean = row["average"]["mean"]
        return bool(row["left"]), row["rank"] or math.inf, mean is None, sign * (mean or 0.0)

    return sorted(rows, key=place)


def metric_of(cases: pandas.DataFrame) -> str | None:
    """The metric by which cases are scored; ``None`` where there is no score yet."""
    known = cases["metric"].dropna()
    return None if known.empty else str(known.iloc[0])


def further_metrics(cases: pandas.DataFrame) -> tuple[pandas.DataFrame, dict[str, list[str]]]:
    """A column for each further metric, and the domains in which some case has no value of it."""
    extra = pandas.DataFrame(list(cases["metrics"]), cases.index, dtype=float)
    known = cases["metrics"].map(len) > 0
    bad = ~np.isfinite(extra[known])
    return extra, {n: list(dict.fromkeys(cases.loc[known, "held_out"][bad[n]])) for n in map(str, extra)}


def summary_of(cases: pandas.DataFrame) -> dict[str, Any]:
    """What every result has: held-out domains, seeds, number of trials, missing runs, cases as plain data."""
    return {
        "metric": metric_of(cases),
        "held_out": list(dict.fromkeys(cases["held_out"])),
        "seeds": sorted(set(cases["seed"])),
        "search": max(cases["trials"]),
        "missing": list(dict.fromkeys(words for lines in cases["missing"] for words in lines)),
        "cases": cases.astype(object).where(cases.notna(), None).to_dict("records"),
    }


def _by_seed(cases: pandas.DataFrame, values: Any) -> Any:
    """The mean over domains for each seed; NaN where one is missing."""
    return values.groupby(cases["seed"], sort=False).agg(lambda each: each.mean(skipna=False))


def _summary(values: Any, metric: Any, cases: pandas.DataFrame) -> dict[str, Any]:
    plain = [None if math.isnan(value) else float(value) for value in values]
    return summarize(plain, metric) | {"status": cases["status"].value_counts().to_dict()}


# Comparisons


def trial_cases(
    configs: Sequence[RunConfig], records: Iterable[RunRecord], failed: Iterable[str] = ()
) -> pandas.DataFrame:
    """The cases of a comparison: the trial with the best score on validation, of equals the first.

    ``failed`` are identities of runs. Domains that are held out together (a fold) share their runs.
    """
    done, lost = {r.config.identity: r for r in records if r.status != "failed"}, set(failed)
    tests = [list(r.scores["test"]["domains"]) for r in done.values() if r.history]
    own_test = tests[0][0] if tests and len(tests[0]) == 1 else "test"
    groups: dict[tuple[Any, ...], list[RunConfig]] = {}
    for config in configs:
        fold = own_test if config.held_out is None else fold_name(config.held_out)
        groups.setdefault((config.name, fold, config.seed), []).append(config)
    cases = []
    for (algorithm, fold, seed), tried in groups.items():
        found = {n: r for n, config in enumerate(tried) if (r := done.get(config.identity)) is not None}
        missing = [n for n in range(len(tried)) if n not in found]
        diverged = sum(record.status != "finished" for record in found.values())
        case = UNKNOWN | {"algorithm": algorithm, "fold": fold, "seed": seed, "trials": len(tried)}
        which = f"hyperparameter trial{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        words = [f"{algorithm}, {fold} held out, seed {seed}, {which}"] if missing else []
        case |= {"missing": words, "diverged": diverged}
        number = None if missing else best_trial(list(found.values()))
        if number is not None:
            config, record = tried[number], found[number]
            case |= {"trial": number, "step": record.history[record.selected]["step"]}
            case |= {"run": config.identity, "settings": dict(config.settings), "lr": config.lr}
            case["selection_score"] = selection_score(_validation(record))[1]
        elif missing:
            case["status"] = "failed" if any(tried[n].identity in lost for n in missing) else "missing"
        else:
            case["status"] = "diverged" if diverged else "undefined"
        names = tried[0].held_out
        for domain in names if isinstance(names, (list, tuple)) and len(names) > 1 else (None,):
            scores = {} if number is None else _scores(found[number].scores["test"], domain)
            cases.append(case | {"held_out": domain or fold} | scores)
    frame = pandas.DataFrame(cases, dtype=object).astype(NUMBERS)
    in_folds = (frame["fold"] != frame["held_out"]).any()  # which have their own order
    return frame.sort_values("held_out", kind="stable", ignore_index=True) if in_folds else frame


def _scores(scores: Mapping[str, Any], domain: str | None) -> dict[str, Any]:
    """The score and further metrics on held-out domains, or on one ``domain`` of a fold."""
    metric, value = selection_score(scores)
    if domain is None:
        values = {scores["metric"]: scores["average"], **(scores.get("metrics") or {})}
    else:
        each = {scores["metric"]: scores["domains"], **(scores.get("by_domain") or {})}
        values = {name: by_domain.get(domain) for name, by_domain in each.items()}
        value = values.get(metric)
    known = value is not None and math.isfinite(value)
    return {
        "status": "scored" if known else "diverged" if value in (math.inf, -math.inf) else "undefined",
        "metric": metric,
        "score": value if known else math.nan,
        "metrics": {name: value for name, value in values.items() if name != metric},
    }


def best_trial(records: Sequence[RunRecord]) -> int | None:
    """The number of the best record on validation, of equals the first; ``None`` where none has a score."""
    scores = {}
    for number, record in enumerate(records):
        if record.status == "finished":
            metric, value = selection_score(_validation(record))
            if value is not None and math.isfinite(value):
                scores[number] = value if lower_is_better(metric) else -value
    return min(scores, key=lambda n: scores[n], default=None)


def _validation(record: RunRecord) -> Mapping[str, Any]:
    """The scores on validation at the selected step; the best of its search for a run that was then trained
    on the validation examples too."""
    every = [record.scores, *(m["scores"] for m in record.history)]
    known = [scores["validation"] for scores in every if "validation" in scores]
    best = min if lower_is_better(selection_score(known[0])[0]) else max
    return known[0] if "validation" in every[0] else best(known, key=lambda s: selection_score(s)[1] or 0.0)


def fold_name(held_out: Any) -> str:
    """A held-out domain, or those of a fold."""
    return " and ".join(map(str, held_out)) if isinstance(held_out, (list, tuple)) else str(held_out)


# DomainBed

Run = tuple[str, tuple[str, ...], int, int]
"""What identifies a run of a sweep on its dataset: algorithm, held-out domains (sorted), seed and trial."""
Points = dict[int, dict[str, tuple[float, float]]]
"""By step and domain, the scores on the in-split and the out-split."""


def run_key(config: RunConfig) -> Run:
    """What identifies a run of a sweep."""
    if not (protocol := config.protocol):
        raise InputError(f"the run {config.identity} of {config.name!r} is not one of a sweep.")
    return config.name, tuple(sorted(protocol["held_out"])), protocol["seed"], protocol.get("trial", 0)


def domainbed_cases(
    configs: Sequence[RunConfig], records: Iterable[RunRecord], rule: str = "training"
) -> pandas.DataFrame:
    """The cases of a sweep on one dataset by a rule of :data:`RULES`; ``missing`` lists runs."""
    check_names("rule", [rule], RULES)
    planned: dict[Run, str] = {}
    for config in configs:
        if planned.setdefault(key := run_key(config), config.identity) != config.identity:
            raise InputError(f"two different runs are both {_words(key, config.dataset)}.")
    identities = {record.config.identity: record for record in records if record.status != "failed"}
    done = {key: identities[identity] for key, identity in planned.items() if identity in identities}
    points = {key: _points(record) for key, record in done.items()}
    domains = dict.fromkeys([out[0] for _, out, _, _ in planned if len(out) == 1])
    alone = list(domains)
    domains |= dict.fromkeys(name for _, out, _, _ in planned for name in out)
    domains |= dict.fromkeys(
        name for steps in points.values() for domain_scores in steps.values() for name in domain_scores
    )
    trials: dict[tuple[str, int], dict[int, None]] = {}
    for algorithm, _, seed, trial in planned:
        trials.setdefault((algorithm, seed), {})[trial] = None
    measured = [s["metric"] for r in done.values() for m in r.history for s in m["scores"].values()]
    cases = []
    for name in alone:
        others = [other for other in domains if rule == "leave-one-out" and other != name]
        groups = [(name,), *((min(name, other), max(name, other)) for other in others)]
        for (algorithm, seed), tried in trials.items():
            needed = {(algorithm, out, seed, trial): trial for trial in sorted(tried) for out in groups}
            lost = {trial for key, trial in needed.items() if key in done and done[key].status != "finished"}
            case = UNKNOWN | {"algorithm": algorithm, "held_out": name, "fold": name, "seed": seed}
            case |= {"trials": len(tried), "diverged": len(lost), "metric": next(iter(measured), None)}
            case["missing"] = [_words(key, configs[0].dataset) for key in needed if key not in done]
            if rule == "leave-one-out" and len(domains) < 3:
                case["missing"] = [f"{RULES[rule]}, which needs three domains, not {len(domains)}"]
            case["status"] = "missing" if case["missing"] else "diverged" if lost == {*tried} else "undefined"
            if not case["missing"]:
                sign = -1 if lower_is_better(case["metric"]) else 1
                candidates = [
                    (sign * value, trial, -step)
                    for trial in tried.keys() - lost
                    for step, value in selectable(points, rule, (algorithm, (name,), seed, trial), others)
                    if math.isfinite(value)
                ]
                if candidates:
                    value, trial, step = max(candidates)
                    key = algorithm, (name,), seed, trial
                    score = points[key][-step][name][0]
                    case |= {"trial": trial, "step": -step, "run": planned[key], "score": score}
                    case["selection_score"] = sign * value
                    case["status"] = "scored" if math.isfinite(score) else "undefined"
            cases.append(case)
    return pandas.DataFrame(cases, dtype=object).astype(NUMBERS)


def selectable(
    points: Mapping[Run, Points], rule: str, key: Run, others: Sequence[str]
) -> list[tuple[int, float]]:
    """The steps of a run that may be selected, with their scores."""
    algorithm, (name,), seed, trial = key
    found, alone = list[tuple[int, float]](), points[key]
    for step, scores in alone.items():
        if rule == "training":
            values = [outside for domain, (_, outside) in scores.items() if domain != name]
        elif rule == "oracle":
            values = [scores[name][1]]
        else:
            pairs = {d: points[algorithm, (min(name, d), max(name, d)), seed, trial] for d in others}
            values = [pair.get(step, {}).get(d, (math.nan,))[0] for d, pair in pairs.items()]
        found.append((step, float(np.mean(values))))  # rounded as in DomainBed, for equal scores
    return found[-1:] if rule == "oracle" else found


def _words(key: Run, dataset: str) -> str:
    algorithm, held_out, seed, trial = key
    which = f"{algorithm} on {dataset}, {' and '.join(held_out)} held out"
    return f"{which}, seed {seed}, hyperparameter trial {trial}"


def _points(record: RunRecord) -> Points:
    """The scores of a run of a sweep, NaN where there is none."""
    found: Points = {}
    for measured in record.history:
        scores = {split: values["domains"] for split, values in measured["scores"].items()}
        inside = {**scores.get("train", {}), **scores.get("test", {})}
        outside = {**scores.get("validation", {}), **scores.get("oracle", {})}
        pairs = {name: (inside.get(name), outside.get(name)) for name in {**inside, **outside}}
        found[measured["step"]] = {
            name: (math.nan if a is None else a, math.nan if b is None else b)
            for name, (a, b) in pairs.items()
        }
    return found


def sweep_results(
    configs: Sequence[RunConfig], records: Sequence[RunRecord], rule: str = "training"
) -> list[dict[str, Any]]:
    """The results of a sweep by a rule as plain data, for each dataset, with algorithms in planned order."""
    results = []
    for dataset in dict.fromkeys(config.dataset for config in configs):
        cases = domainbed_cases([config for config in configs if config.dataset == dataset], records, rule)
        order, metric = list(dict.fromkeys(cases["algorithm"])), metric_of(cases)
        rows = sorted(table(cases, lower_is_better(metric)), key=lambda row: order.index(row["algorithm"]))
        results.append(
            {"dataset": dataset, "rule": rule, "rule_name": RULES[rule], "rows": rows} | summary_of(cases)
        )
    return results
