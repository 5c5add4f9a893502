"""A comparison of algorithms in a table, in words, as CSV and as a picture."""

from __future__ import annotations

import csv
import html
import io
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from shoal.errors import InputError
from shoal.report.plots import compare_figure
from shoal.report.tables import Table, _clean

NAMED = 8
"""How many trials with missing runs a text names; the JSON names all."""
WIDEST, BESIDE = 40, 20
"""Characters of a domain's name in a terminal, and how many domains have a column there; files have all."""


def table(result: Mapping[str, Any], written: Callable[[str], str] = str, most: int | None = None) -> Table:
    """A row for every algorithm, best first; ``written`` is how names of domains go into the heading.

    Of more than ``most`` domains only the average is in it.
    """
    shown = result["left_out"] if most is None or len(result["left_out"]) <= most else []
    metric, baseline = result["metric"] or "score", result["baseline"]
    several, intervals, also = len(result["left_out"]) > 1, has_intervals(result), _also(result)
    found = Table(
        [
            "rank",
            "algorithm",
            *(written(_clean(name)) for name in shown),
            *([f"average {metric}"] if several else []),
            *(f"average {name}" if several else name for name in also),
            *([f"against {baseline}"] if baseline else []),
            *(["95 % interval"] if intervals else []),
            *(["mean rank"] if several else []),
            f"validation {metric}",
        ]
    )
    for row in result["rows"]:
        mean_rank = "–" if row["mean_rank"] is None else f"{row['mean_rank']:.1f}"
        found.add(
            "–" if row["rank"] is None else row["rank"],
            row["algorithm"],
            *(_cell(row["domains"][name]) for name in shown),
            *([_cell(row["average"])] if several else []),
            *(_spread(row["also"][name]) if name in row["also"] else "–" for name in also),
            *([_against(row, baseline)] if baseline else []),
            *([_interval(row["over_domains"], result)] if intervals else []),
            *([mean_rank] if several else []),
            _spread(row["validation"]),
        )
    return found


def has_intervals(result: Mapping[str, Any]) -> bool:
    """Whether some row has an interval over domains; results of an earlier version have none."""
    found = [row.get("over_domains") or {} for row in result["rows"]]
    return any(about.get("low") is not None for about in found)


def _also(result: Mapping[str, Any]) -> list[str]:
    """Measures that have a value somewhere, beside the one that all are judged by."""
    known = [
        name for row in result["rows"] for name, v in row.get("also", {}).items() if v["mean"] is not None
    ]
    return list(dict.fromkeys(known))


def _interval(about: Mapping[str, Any] | None, result: Mapping[str, Any]) -> str:
    if about is None or about["low"] is None:
        return "–"
    low, high = (_signed(about[end], result["metric"]) for end in ("low", "high"))
    return f"{low} to {high}"


def _signed(value: float, metric: str | None) -> str:
    return _spread({"mean": value, "sd": None, "metric": metric}, "+")


def _cell(values: Mapping[str, Any]) -> str:
    """Mean ± deviation, and how many seeds it is of if not of all; else why there is nothing."""
    known = sum(v is not None for v in values["values"])
    if not known:
        return next((why for why in ("diverged", "undefined") if values["trials"].get(why)), "missing")
    of = f" ({known} of {len(values['values'])})" if known < len(values["values"]) else ""
    return _spread(values) + of


def _against(row: Mapping[str, Any], baseline: str) -> str:
    return "–" if row["algorithm"] == baseline else _spread(row["difference"], "+")


def _spread(values: Mapping[str, Any], sign: str = "") -> str:
    """Mean ± standard deviation over seeds; accuracies in percent."""
    if values["mean"] is None:
        return "–"
    mean, sd = values["mean"], values["sd"]
    if values["metric"] == "accuracy":
        mean, sd, digits = 100 * mean, sd and 100 * sd, ".1f"
    else:
        digits = _four_digits(max(abs(mean), sd or 0))
    return f"{mean:{sign}{digits}}" + ("" if sd is None else f" ± {sd:{digits}}")


def _four_digits(size: float) -> str:
    """How to write numbers of about this size, so that a mean and its deviation end at the same place."""
    if not 1e-4 <= size < 1e6:
        return ".3e" if size else ".0f"
    return f".{max(0, 3 - math.floor(math.log10(size)))}f"


def words(result: Mapping[str, Any]) -> list[str]:
    """How the numbers came about, and what they do and do not say."""
    metric, seeds = result["metric"] or "score", len(result["seeds"])
    better = "(lower is better) " if result["lower_is_better"] else "(higher is better) "
    unit = "in percent " if metric == "accuracy" else better if result["metric"] else ""
    over = (
        f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else f"seed {result['seeds'][0]} alone"
    )
    tried = result["search"]
    draws = f"the defaults and {tried - 1} random draw{'s' * (tried > 2)} of settings"
    choice = "Settings and step are those" if tried > 1 else "The step is the one"
    lines = [
        f"{metric[:1].upper()}{metric[1:]} {unit}in a domain left out of training; {over}.",
        f"Each algorithm and seed tried {draws if tried > 1 else 'the defaults'}.",
        f"{choice} with the best validation {metric} in the training domains.",
    ]
    scored = sum(sum(row["chosen"].values()) for row in result["rows"])
    usual = sum(row["chosen"].get("0", 0) for row in result["rows"])
    if tried > 1 and scored:
        lines.append(f"The defaults were chosen in {usual} of {scored} trials.")
    fits = result.get("fits", 0)
    ran = result["runs"] - result["runs_missing"] - fits
    on = f" on {', '.join(result['devices'])}" if result["devices"] else ""
    more = f" and {fits:,} of scikit-learn" if fits else ""
    took = _hours(result["seconds"])
    lines.append(f"{ran:,} runs of {result['steps']:,} steps{on}{more}, {took} of training.")
    found = over_domains(result) if has_intervals(result) else verdict(result)
    return [*lines, *found, *recommended(result), *_troubles(result)]


def over_domains(result: Mapping[str, Any]) -> list[str]:
    """Whose interval over domains against the baseline leaves zero out, each taken alone."""
    rows = [r for r in result["rows"] if (r.get("over_domains") or {}).get("low") is not None]
    sign = -1 if result["lower_is_better"] else 1
    sure = [r for r in rows if r["over_domains"]["low"] > 0 or r["over_domains"]["high"] < 0]
    better = [r["algorithm"] for r in sure if sign * r["over_domains"]["mean"] > 0]
    worse = [r["algorithm"] for r in sure if sign * r["over_domains"]["mean"] < 0]
    said = [f"{how}: {', '.join(names)}" for how, names in (("better", better), ("worse", worse)) if names]
    return [
        f"The interval is of the difference to {result['baseline']} over {len(result['left_out'])} domains "
        f"(Student's t, seeds averaged), each row alone; without zero in it: {'; '.join(said) or 'none'}."
    ]


def recommended(result: Mapping[str, Any]) -> list[str]:
    """Which to take, in one sentence with its reason; nothing where nothing can be said."""
    about = result.get("recommendation")
    if about is None:
        return []
    take, count, domains = about["take"], about["compared"], about["domains"]
    among = " and ".join(about["among"])
    level = f"95 %, Bonferroni-corrected for {count} comparison{'s' * (count != 1)}"
    if (interval := about["interval"]) is not None:
        of_two = f", the better of {among}," if len(about["among"]) > 1 else ""
        return [
            f"Recommendation: take {take}, which over {domains} domains differs from {about['reference']}"
            f"{of_two} for the better by {_signed(interval['mean'], result['metric'])}, with an interval "
            f"({_interval(interval, result)}; {level}) that excludes zero."
        ]
    why = f"it is the better of {among} on average, and " if len(about["among"]) > 1 else ""
    if domains < 3:
        few = "one domain left out gives" if domains == 1 else f"{domains} domains left out give"
        return [
            f"Recommendation: take {take}; {why}{few} no interval over domains, so no evidence for others."
        ]
    if not count:
        return []
    who = "the other row does not beat" if count == 1 else f"none of the {count} other rows beats"
    return [
        f"Recommendation: take {take}; {why}{who} it by an interval over {domains} domains that excludes "
        f"zero ({level})."
    ]


def _hours(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36_000 else f"{seconds / 3600:.1f} h"


def verdict(result: Mapping[str, Any], one: str = "seed") -> list[str]:
    """Who differs from the baseline by more than two standard errors, and how many would by chance."""
    baseline, far = result["baseline"], "more than two standard errors of the paired difference"
    others = [row for row in result["rows"] if baseline and row["algorithm"] != baseline]
    whole = [row for row in others if None not in row["difference"]["values"]]
    judged = [row for row in whole if row["difference"]["se"] is not None]
    if not judged:
        alone = others and len(result["seeds"]) == 1
        return [f"One {one} cannot tell a difference from {baseline} from luck."] if alone else []
    named = [r for r in judged if abs(r["difference"]["mean"]) > 2 * r["difference"]["se"]]
    if not named:
        return [f"No algorithm differs from {baseline} by {far}."]
    lower = result["lower_is_better"]
    better = [r["algorithm"] for r in named if (r["difference"]["mean"] < 0) == lower]
    worse = [r["algorithm"] for r in named if (r["difference"]["mean"] < 0) != lower]
    lines = [
        f"{how} than {baseline} by {far}: {', '.join(names)}."
        for how, names in (("Better", better), ("Worse", worse))
        if names
    ]
    luck = len(judged) * chance_beyond(2, len(result["seeds"]) - 1)
    return [
        *lines,
        f"If none of these {len(judged)} truly differed, about {luck:.1f} would be named by chance.",
    ]


def chance_beyond(limit: float, freedom: int, cuts: int = 2000) -> float:
    """How likely |t| > ``limit`` is for Student's t: with t = √ν tan θ an integral of cos(θ)^(ν − 1)."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    first = math.atan(limit / math.sqrt(freedom))
    width = (math.pi / 2 - first) / cuts
    middles = (first + width * (i + 0.5) for i in range(cuts))
    return 2 * scale * width * sum(math.cos(theta) ** (freedom - 1) for theta in middles)


def _troubles(result: Mapping[str, Any]) -> list[str]:
    lines = [f"Not compared: {name} ({why})." for name, why in result.get("unable", {}).items()]
    lines += [f"A run of {name} failed: {why}" for name, why in result.get("failed", {}).items()]
    diverged = {r["algorithm"]: r["runs_diverged"] for r in result["rows"] if r["runs_diverged"]}
    if diverged:
        who = ", ".join(f"{name} {count}" for name, count in diverged.items())
        lines.append(f"Runs that diverged, and were not chosen: {who}.")
    trials = result.get("trials") or []  # a sweep's result has none
    if undefined := dict.fromkeys(t["left_out"] for t in trials if t["status"] == "undefined"):
        named = ", ".join(map(repr, list(undefined)[:NAMED])) + ", …" * (len(undefined) > NAMED)
        some = any(t["left_out"] in undefined and t["status"] == "scored" for t in trials)
        what = "In some trials no score" if some else "No score"
        lines.append(f"{what} with {named} left out: its measure is undefined there or on validation.")
    if missing := result["missing"]:
        more = f"; and of {len(missing) - NAMED:,} more trials" if len(missing) > NAMED else ""
        which = "; ".join(missing[:NAMED]) + more
        lines.append(f"{result['runs_missing']:,} of {result['runs']:,} runs are missing: {which}.")
    if any(row["rank"] is None for row in result["rows"]):
        cells = [v["values"] for r in result["rows"] for v in (*r["domains"].values(), r["average"])]
        some = any(None in values and any(v is not None for v in values) for values in cells)
        beside = "; where only some have one, their number stands beside the mean" if some else ""
        lines.append(f"No rank without a score in every trial{beside}.")
    return [_clean(line) for line in lines]


def text(result: Mapping[str, Any]) -> str:
    """For a terminal: the table, what to take, then the rest."""
    first = recommended(result)
    rest = [line for line in words(result) if line not in first]
    if (many := len(result["left_out"])) > BESIDE:
        rest.append(f"The scores in each of the {many:,} domains are in the files.")
    shown = table(result, _cut, BESIDE).text()
    return "\n".join([shown, "", *first, *([""] if first else []), *rest])


def _cut(name: str) -> str:
    return name if len(name) <= WIDEST else f"{name[: WIDEST - 1]}…"


def markdown(result: Mapping[str, Any]) -> str:
    heading = f"# Algorithms on {html.escape(result.get('title') or result['dataset'])}"
    lines = [f"- {html.escape(line, quote=False)}" for line in words(result)]
    return "\n".join([heading, "", table(result, html.escape).markdown(), "", *lines, ""])


COLUMNS = ("algorithm", "left_out", "seed", "status", "metric", "test", "validation", "chosen", "lr", "step")


def as_csv(result: Mapping[str, Any]) -> str:
    """A line for every trial; the settings it chose as JSON."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*COLUMNS, "settings"])
    for trial in result["trials"]:
        settings = json.dumps(trial["settings"]) if "settings" in trial else ""
        writer.writerow([*(trial.get(name) for name in COLUMNS), settings])
    return file.getvalue()


def figure(result: Mapping[str, Any]) -> Any:
    rows = [row for row in result["rows"] if row["average"]["mean"] is not None]
    if not rows:
        raise InputError("there is no result yet.")
    seeds = len(result["seeds"])
    over = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    title = f"{result.get('title') or result['dataset']}, {over}"
    return compare_figure(rows, result["metric"], result["baseline"], title, result["lower_is_better"])
