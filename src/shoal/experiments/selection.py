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
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


def lower_is_better(metric: str | None) -> bool:
    """Whether lower values of a metric are better; an unknown one is taken for an error."""
    return metric is not None and (metric not in METRICS or not METRICS[metric].higher)


# Tables


def table(cases: pandas.DataFrame, lower: bool = False) -> list[dict[str, Any]]:
    """A row of plain data for each algorithm, best first.

    An average is over domains, seed by seed; that of a further metric is over the domains in which all cases
    have a value of it. Only an algorithm with a score in every case has a rank: means over other cases are
    not comparable.
    """
    metric, (extra, lacks) = metric_of(cases), further_metrics(cases)
    rows = []
    for algorithm, own in cases.groupby("algorithm", sort=False):
        row: dict[str, Any] = {"algorithm": algorithm, "rank": None, "worst": None, "metrics": {}}
        row["domains"] = {
            name: _summary(each["score"], metric, each) | {"fold": each["fold"].iloc[0]}
            for name, each in own.groupby("held_out", sort=False)
        }
        row["average"] = _summary(_over_domains(own, own["score"]), metric, own)
        row["validation"] = _summary(_over_domains(own, own["selection_score"]), metric, own)
        for name in extra.columns[extra.loc[own.index].notna().any()]:
            known = own[~own["held_out"].isin(lacks[name])]
            row["metrics"][name] = _summary(_over_domains(known, extra.loc[known.index, name]), name, own)
        row["runs_diverged"] = int(own.drop_duplicates(["fold", "seed"])["diverged"].sum())
        if own["score"].notna().all():
            means = {name: summary["mean"] for name, summary in row["domains"].items()}
            worst = (max if lower else min)(means, key=lambda name: means[name])
            row["worst"] = {"domain": worst, **row["domains"][worst]}
        rows.append(row)
    sign = 1 if lower else -1
    scores = {r["algorithm"]: rounded(sign * r["average"]["mean"]) for r in rows if r["worst"]}
    for row in rows:
        if row["worst"]:
            row["rank"] = 1 + sum(score < scores[row["algorithm"]] for score in scores.values())

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        mean = row["average"]["mean"]
        return row["rank"] is None, row["rank"], mean is None, sign * (mean or 0.0)

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


def _over_domains(cases: pandas.DataFrame, values: Any) -> Any:
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
    own_test = next((_test_name(record) for record in done.values() if record.history), "test")
    groups: dict[tuple[Any, ...], list[RunConfig]] = {}
    for config in configs:
        names = own_test if config.held_out is None else config.held_out
        groups.setdefault((config.name, fold_name(names), config.seed), []).append(config)
    cases = []
    for (algorithm, fold, seed), tried in groups.items():
        found = [done.get(config.identity) for config in tried]
        missing = [n for n, record in enumerate(found) if record is None]
        case: dict[str, Any] = {"algorithm": algorithm, "fold": fold, "seed": seed, "trials": len(tried)}
        case |= {"missing": missing, "diverged": sum(r is not None and r.status != "finished" for r in found)}
        number = None if missing else best_trial([record for record in found if record is not None])
        names = tried[0].held_out
        several = names if isinstance(names, (list, tuple)) and len(names) > 1 else (None,)
        for domain in several:
            cases.append(case | {"held_out": domain or fold} | _outcome(tried, found, number, domain))
            if missing:
                gone = any(tried[n].identity in lost for n in missing)
                cases[-1]["status"] = "failed" if gone else "missing"
    frame = _frame(cases)
    in_folds = (frame["fold"] != frame["held_out"]).any()  # which have their own order
    return frame.sort_values("held_out", kind="stable", ignore_index=True) if in_folds else frame


def _frame(cases: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    numbers = {"score": float, "selection_score": float, "diverged": int, "seed": int, "trials": int}
    return pandas.DataFrame(cases, dtype=object).astype(numbers)


def _outcome(
    tried: Sequence[RunConfig], found: Sequence[RunRecord | None], number: int | None, domain: str | None
) -> dict[str, Any]:
    """The selected trial and its scores, in one ``domain`` of a fold."""
    case: dict[str, Any] = dict.fromkeys(("trial", "step", "run", "metric", "settings", "lr"))
    case |= {"score": math.nan, "selection_score": math.nan, "metrics": {}}
    if number is None or (record := found[number]) is None:
        lost = any(record is not None and record.status != "finished" for record in found)
        return case | {"status": "diverged" if lost else "undefined"}
    config, scores = tried[number], record.scores["test"]
    metric, value = selection_score(scores)
    if domain is None:
        values = {scores["metric"]: scores["average"], **(scores.get("metrics") or {})}
    else:
        each = {scores["metric"]: scores["domains"], **(scores.get("by_domain") or {})}
        values = {name: by_domain.get(domain) for name, by_domain in each.items()}
        value = values.get(metric)
    known = value is not None and math.isfinite(value)
    return case | {
        "status": "scored" if known else "diverged" if value in (math.inf, -math.inf) else "undefined",
        "trial": number,
        "step": record.history[record.selected]["step"],
        "run": config.identity,
        "settings": dict(config.settings),
        "lr": config.lr,
        "metric": metric,
        "score": value if known else math.nan,
        "selection_score": selection_score(_validation(record))[1],
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
    if "validation" in record.scores:
        selected: Mapping[str, Any] = record.scores["validation"]
        return selected
    every = [m["scores"]["validation"] for m in record.history if "validation" in m["scores"]]
    best = min if lower_is_better(selection_score(every[0])[0]) else max
    return best(every, key=lambda scores: selection_score(scores)[1] or 0.0)


def _test_name(record: RunRecord) -> str:
    """The name of a dataset's own test split: its domain, if it has only one."""
    names = list(record.scores["test"]["domains"])
    return names[0] if len(names) == 1 else "test"


def fold_name(held_out: Any) -> str:
    """A held-out domain, or those of a fold."""
    return " and ".join(map(str, held_out)) if isinstance(held_out, (list, tuple)) else str(held_out)


# DomainBed

RUN = ["algorithm", "held_out", "seed", "trial"]
Run = tuple[Any, ...]
"""The values of :data:`RUN`; ``held_out`` is a sorted tuple."""


def run_key(config: RunConfig) -> Run:
    """What identifies a run of a sweep on its dataset: the values of :data:`RUN`."""
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
    known = {identity: key for key, identity in planned.items()}
    done = {known[i]: r for r in records if r.status != "failed" and (i := r.config.identity) in known}
    points = pandas.DataFrame(
        [(*key, *point) for key, record in done.items() for point in _points(record)],
        columns=[*RUN, "step", "domain", "inside", "outside"],
    ).drop_duplicates([*RUN, "step", "domain"], keep="last")
    alone = list(dict.fromkeys(out[0] for _, out, _, _ in planned if len(out) == 1))
    named = [name for _, out, _, _ in planned for name in out]
    domains = list(dict.fromkeys([*alone, *named, *points["domain"]]))
    trials: dict[tuple[str, int], set[int]] = {}
    for algorithm, _, seed, trial in planned:
        trials.setdefault((algorithm, seed), set()).add(trial)
    measured = [s["metric"] for r in done.values() for m in r.history for s in m["scores"].values()]
    metric = next(iter(measured), None)
    cases = []
    for name in alone:
        others = [other for other in domains if rule == "leave-one-out" and other != name]
        out = [(name,), *(tuple(sorted((name, other))) for other in others)]
        scored = _scored(points, name, others, rule)
        for (algorithm, seed), tried in trials.items():
            needed = {(algorithm, group, seed, trial): trial for trial in sorted(tried) for group in out}
            case: dict[str, Any] = {"algorithm": algorithm, "held_out": name, "fold": name, "seed": seed}
            case |= dict.fromkeys(("trial", "step", "run"))
            case |= {"trials": len(tried), "metric": metric, "metrics": {}}
            case |= {"missing": [_words(k, configs[0].dataset) for k in needed if k not in done]}
            if rule == "leave-one-out" and len(domains) < 3:
                case["missing"] = [f"{RULES[rule]}, which needs three domains, not {len(domains)}"]
            lost = {trial for k, trial in needed.items() if k in done and done[k].status != "finished"}
            case |= {"diverged": len(lost), "score": math.nan, "selection_score": math.nan}
            case["status"] = "missing" if case["missing"] else "diverged" if lost == tried else "undefined"
            usable = scored[scored["trial"].isin(tried - lost)]
            usable = usable[(usable["algorithm"] == algorithm) & (usable["seed"] == seed)]
            if not case["missing"] and len(usable):
                order = usable.assign(sign=usable["selection_score"] * (1 if lower_is_better(metric) else -1))
                best = order.sort_values(["sign", "trial", "step"], ascending=[True, False, True]).iloc[0]
                case |= {"status": "scored" if math.isfinite(best["score"]) else "undefined"}
                case |= {key: best[key] for key in ("selection_score", "score")}
                case |= {key: int(best[key]) for key in ("trial", "step")}
                case["run"] = planned[algorithm, (name,), seed, case["trial"]]
            cases.append(case)
    return _frame(cases)


def _words(key: Run, dataset: str) -> str:
    algorithm, held_out, seed, trial = key
    which = f"{algorithm} on {dataset}, {' and '.join(held_out)} held out"
    return f"{which}, seed {seed}, hyperparameter trial {trial}"


def _points(record: RunRecord) -> Iterator[tuple[int, str, float, float]]:
    """Step, domain, and its scores on the in-split and the out-split, at every evaluation."""
    held_out = set(record.config.protocol["held_out"])
    for measured in record.history:
        scores = {split: found["domains"] for split, found in measured["scores"].items()}
        inside = {**scores.get("train", {}), **scores.get("test", {})}
        outside = {**scores.get("validation", {}), **scores.get("oracle", {})}
        if not held_out <= set(inside) or not set(outside) - held_out:
            raise InputError(
                f"the record of run {record.config.identity} has no scores to select by at step "
                f"{measured['step']}; remove it to repeat the run."
            )
        for name in {**inside, **outside}:
            pair = (inside.get(name), outside.get(name))
            yield measured["step"], name, *(math.nan if v is None else v for v in pair)


def _scored(points: pandas.DataFrame, name: str, others: Sequence[str], rule: str) -> pandas.DataFrame:
    """The steps that may be selected, each with its selection score and the score on the held-out domain."""
    index = ["algorithm", "seed", "trial", "step"]
    alone = points[points["held_out"].map(lambda out: out == (name,)).astype(bool)]
    values, column = alone[alone["domain"] != name], "outside"
    if rule == "oracle":
        last = alone.groupby(["algorithm", "seed", "trial"])["step"].transform("max")
        values = alone[(alone["domain"] == name) & (alone["step"] == last)]
    elif rule == "leave-one-out":
        pairs = {tuple(sorted((name, other))): other for other in others}
        values, column = points[points["held_out"].map(pairs.get) == points["domain"]], "inside"
    wide = values.pivot(index=index, columns="domain", values=column)
    wide = wide.reindex(columns=others) if rule == "leave-one-out" else wide
    # NumPy's mean, as in DomainBed: another rounding would break ties differently.
    means = np.ascontiguousarray(wide.to_numpy(float)).mean(axis=1) if len(wide) else []
    scored = pandas.Series(means, wide.index, dtype=float, name="selection_score")
    test = alone[alone["domain"] == name].set_index(index)["inside"].rename("score")
    return scored[np.isfinite(scored)].to_frame().join(test, how="inner").reset_index()


def sweep_results(
    configs: Sequence[RunConfig], records: Sequence[RunRecord], rule: str = "training"
) -> list[dict[str, Any]]:
    """The results of a sweep by a rule as plain data, for each dataset, with algorithms in planned order."""
    results = []
    for dataset in dict.fromkeys(config.dataset for config in configs):
        own = [config for config in configs if config.dataset == dataset]
        cases = domainbed_cases(own, records, rule)
        order, metric = list(dict.fromkeys(cases["algorithm"])), metric_of(cases)
        rows = sorted(table(cases, lower_is_better(metric)), key=lambda row: order.index(row["algorithm"]))
        results.append(
            {"dataset": dataset, "rule": rule, "rule_name": RULES[rule], "metric": metric, "rows": rows}
            | summary_of(cases)
            | {"missing": list(dict.fromkeys(words for own in cases["missing"] for words in own))}
        )
    return results


def summary_of(cases: pandas.DataFrame) -> dict[str, Any]:
    """What every result has: the held-out domains, seeds, number of trials, and the cases as plain data."""
    columns = ("held_out", "seeds", "search", "cases")
    plain = cases.astype(object).where(cases.notna(), None).to_dict("records")
    values = list(dict.fromkeys(cases["held_out"])), sorted(set(cases["seed"])), max(cases["trials"]), plain
    return dict(zip(columns, values, strict=True))
