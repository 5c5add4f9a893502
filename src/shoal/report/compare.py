"""Tables, text, CSV and the figure of a comparison of algorithms."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.errors import InputError
from shoal.experiments.progress import duration as _hours
from shoal.files import dump_json
from shoal.report.plots import compare_figure
from shoal.report.tables import Table, clean
from shoal.terminal import as_csv as rows_as_csv
from shoal.terminal import in_markdown

NAMED = 8
"""How many trials with missing runs a text names; the JSON names all."""
WIDEST, BESIDE = 40, 20
"""Characters of a domain's name in a terminal, and how many domains have a column there; files have all."""


def table(result: Mapping[str, Any], written: Callable[[str], str] = str, most: int | None = None) -> Table:
    """A row for every algorithm, best first; ``written`` is how names of domains go into the heading.

    Of more than ``most`` domains only the average is in it.
    """
    shown = result["held_out"] if most is None or len(result["held_out"]) <= most else []
    metric, baseline = result["metric"] or "score", result["baseline"]
    several, intervals, also = len(result["held_out"]) > 1, has_intervals(result), _also(result)
    found = Table(
        [
            "rank",
            "algorithm",
            *(written(clean(name)) for name in shown),
            *([f"average {metric}", "worst domain"] if several else []),
            *(f"average {name}" if several else name for name in also),
            *([f"difference to {baseline}"] if baseline else []),
            *(["95 % interval"] if intervals else []),
            f"validation {metric}",
        ]
    )
    for row in result["rows"]:
        found.add(
            "–" if row["rank"] is None else row["rank"],
            row["algorithm"],
            *(_cell(row["domains"][name]) for name in shown),
            *([_cell(row["average"]), _worst(row, written)] if several else []),
            *(_spread(row["also"][name]) if name in row["also"] else "–" for name in also),
            *([_against(row, baseline)] if baseline else []),
            *([_interval(row["over_domains"], result)] if intervals else []),
            _spread(row["validation"]),
        )
    return found


def has_intervals(result: Mapping[str, Any]) -> bool:
    """Whether some row has an interval over domains."""
    return any((row["over_domains"] or {}).get("low") is not None for row in result["rows"])


def _also(result: Mapping[str, Any]) -> list[str]:
    """Measures that have a value somewhere, beside the one that is compared."""
    known = [name for row in result["rows"] for name, v in row["also"].items() if v["mean"] is not None]
    return list(dict.fromkeys(known))


def _interval(about: Mapping[str, Any] | None, result: Mapping[str, Any]) -> str:
    if about is None or about["low"] is None:
        return "–"
    low, high = (_number(about[end], result["metric"], "+") for end in ("low", "high"))
    return f"{low} to {high}"


def _cell(values: Mapping[str, Any]) -> str:
    """Mean ± deviation, and how many seeds it is of if not of all; else why there is nothing."""
    known = sum(v is not None for v in values["values"])
    if not known:
        return next(
            (why for why in ("failed", "diverged", "undefined") if values["trials"].get(why)), "missing"
        )
    of = f" ({known} of {len(values['values'])})" if known < len(values["values"]) else ""
    return _spread(values) + of


def _worst(row: Mapping[str, Any], written: Callable[[str], str] = str) -> str:
    """The worst held-out domain's score and name."""
    if (about := row["worst"]) is None:
        return "–"
    return f"{_number(about['mean'], about['metric'])} ({written(clean(about['domain']))})"


def _number(value: float, metric: str | None, sign: str = "") -> str:
    return _spread({"mean": value, "sd": None, "metric": metric}, sign)


def _against(row: Mapping[str, Any], baseline: str) -> str:
    return "–" if row["algorithm"] == baseline else _spread(row["difference"], "+")


def _spread(values: Mapping[str, Any], sign: str = "") -> str:
    """Mean ± standard deviation over seeds, if they differ at all; accuracies in percent."""
    if values["mean"] is None:
        return "–"
    mean, sd = values["mean"], values["sd"]
    if sd is not None and sd <= 1e-12 * max(1.0, abs(mean)):
        sd = None
    if values["metric"] == "accuracy":
        mean, sd, digits = round(100 * mean, 9) + 0.0, sd and 100 * sd, ".1f"  # 1.25 is that whatever the sum
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
    over = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else f"only seed {result['seeds'][0]}"
    tried = result["search"]
    draws = f"the defaults and {_many(tried - 1, 'trial')} of random search"
    choice = "Selected: the trial and step" if tried > 1 else "Selected: the step"
    lines = [
        f"{metric[:1].upper()}{metric[1:]} {unit}on held-out domains; {over}.",
        f"Hyperparameter trials per algorithm and seed: {draws if tried > 1 else 'the defaults'}.",
        f"{choice} with the best validation {metric} on the training domains.",
    ]
    if count := result.get("folds"):
        lines.append(f"Domains were held out in {count} groups; each domain is scored separately.")
    scored = sum(sum(row["chosen"].values()) for row in result["rows"])
    usual = sum(row["chosen"].get("0", 0) for row in result["rows"])
    if tried > 1 and scored:
        lines.append(f"The default hyperparameters were selected in {usual} of {scored} cases.")
    fits = result.get("fits", 0)
    ran = result["runs"] - result["runs_missing"] - fits
    on = f" on {', '.join(result['devices'])}" if result["devices"] else ""
    more = f", and {fits:,} fits of scikit-learn models" if fits else ""
    took = _hours(result["seconds"])
    lines.append(f"{ran:,} runs of {result['steps']:,} steps{on}{more}, {took} of training.")
    if has_intervals(result):
        folds = f" in {result['folds']} folds" if result.get("folds") else ""
        lines.append(
            f"95 % interval: of the difference to {result['baseline']}, paired by domain over "
            f"{len(result['held_out'])} domains{folds} (Student's t, seeds averaged), not corrected for "
            "several rows."
        )
    if note := result.get("units"):
        lines.append(f"{note[:1].upper()}{note[1:]}.")
    if controls := [row["algorithm"] for row in result["rows"] if row.get("control")]:
        lines.append(f"Controls (never recommended): {', '.join(controls)}.")
    return [*lines, *recommended(result), *_troubles(result)]


def described(name: str) -> str:
    """What a row is, in a few plain words; nothing for an algorithm that does not say so."""
    from shoal.algorithms import registry
    from shoal.experiments.baselines import SUMMARIES

    if name in SUMMARIES:
        said = SUMMARIES[name]
        return f"{said[:1].lower()}{said[1:]}".rstrip(".")
    try:
        said = (registry.module(name.partition(":")[0]).__doc__ or "").partition("\n")[0]
    except InputError:  # of a plugin that is not installed here
        return ""
    return said.partition(": ")[2].rstrip(".")


def recommended(result: Mapping[str, Any]) -> list[str]:
    """What :func:`shoal.experiments.compare.recommendation` found, in sentences.

    First which method to use, then what to expect of it in a new domain, then why. Nothing where nothing can
    be said.
    """
    about = result.get("recommendation")
    if about is None:
        return []
    domains, metric = about["domains"], result["metric"]
    rows = {row["algorithm"]: row for row in result["rows"]}
    if about["take"] is None:
        begin, few = rows[about["begin"]], _many(domains, "held-out domain")
        if about.get("folds", domains) < domains:
            few = f"{few} in {_many(about['folds'], 'fold')}"
        why = f"{few}; a conclusion requires at least {about['needed']}."
        first = f"Start with {_called(begin)}, the simplest algorithm. {_achieved(begin, domains, metric)}"
        return [clean(f"No recommendation: {why}"), clean(first)]
    take, best = rows[about["take"]], rows[about["best"]]
    chance = about.get("majority")
    if chance is None or chance["better"]:
        lines = [f"Use {_called(take)}.", _expected(take, domains, result)]
    else:
        lines = [
            f"No recommendation: {_called(take)} is not better than a constant prediction (the majority "
            "baseline) by more than one standard error.",
            f"{_achieved(take, domains, metric)} The difference to the constant prediction is "
            f"{_against_majority(chance, result)}.",
        ]
    ahead = any(row["control"] and (row["rank"] or math.inf) < best["rank"] for row in result["rows"])
    lines.append(_why(about, take, best, metric, ahead))
    if chance is not None and chance["better"] and not chance["sure"]:
        gain = _against_majority(chance, result)
        lines.append(
            f"Its improvement over a constant prediction (the majority baseline) is uncertain: {gain}."
        )
    if (least := about.get("detectable")) is not None:
        lines.append(
            f"With {domains} domains, differences of less than {_number(least, metric)}{_points(metric)} "
            "would usually not be detected (paired t test at the 5 % level, power 80 %)."
        )
    return [clean(line) for line in lines]


def _called(row: Mapping[str, Any]) -> str:
    what = described(row["algorithm"])
    return f"{row['algorithm']} ({what})" if what else str(row["algorithm"])


def _score(value: float, metric: str | None) -> str:
    return _number(value, metric) + " %" * (metric == "accuracy")


def _points(metric: str | None) -> str:
    """The unit of a difference."""
    return " percentage points" * (metric == "accuracy")


def _gap(about: Mapping[str, Any], metric: str | None) -> str:
    difference, error = _number(abs(about["difference"]), metric), _number(about["se"], metric)
    return f"{difference}{_points(metric)}, standard error {error}"


def _expected(row: Mapping[str, Any], domains: int, result: Mapping[str, Any]) -> str:
    metric, units = result["metric"], f" ({result['units']})" if result.get("units") else ""
    average, worst = (_score(row[part]["mean"], metric) for part in ("average", "worst"))
    return (
        f"Its expected {metric} on a new domain is about {average}, the average over {domains} held-out "
        f"domains; on the worst of them ({row['worst']['domain']}) it was {worst}{units}."
    )


def _achieved(row: Mapping[str, Any], domains: int, metric: str | None) -> str:
    average, worst = (_score(row[part]["mean"], metric) for part in ("average", "worst"))
    where = row["worst"]["domain"]
    if domains == 1:
        return f"Its {metric} on {where} was {worst}."
    both = f"{average} on average and {worst} on the worst domain ({where})"
    return f"Over {domains} held-out domains its {metric} was {both}."


def _against_majority(about: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    difference = _number(about["difference"], result["metric"], "+")
    return f"{difference}{_points(result['metric'])}, 95 % interval {_interval(about, result)}"


def _scores(row: Mapping[str, Any], metric: str | None) -> str:
    """A row's name with its average and its worst domain."""
    worst = f"{_score(row['worst']['mean'], metric)} on the worst domain, {row['worst']['domain']}"
    return f"{row['algorithm']} ({_score(row['average']['mean'], metric)} on average, {worst})"


def _why(
    about: Mapping[str, Any],
    take: Mapping[str, Any],
    best: Mapping[str, Any],
    metric: Any,
    behind_control: bool,
) -> str:
    by = "average" + " among algorithms other than controls" * behind_control
    which = f"paired by domain, {about['domains']} domains"
    if about["among"] == 1:
        return "It is the only algorithm that can be recommended."
    if take is best:
        near, second = about.get("simpler"), about.get("second")
        if near is not None:
            lead = f"It has the best {by}, and no simpler algorithm is within one standard error"
            return f"{lead}: {near['row']} is worse by {_gap(near, metric)} ({which})."
        worse = (
            f" The next best, {second['row']}, is worse by {_gap(second, metric)} ({which})."
            if second
            else ""
        )
        return f"It has the best {by}, and no algorithm is simpler.{worse}"
    return (
        f"It is the simplest algorithm within one standard error of the best {by}, that of "
        f"{_scores(best, metric)}: the difference is {_gap(about['behind'], metric)} ({which})."
    )


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:NAMED])) + ", …" * (len(names) > NAMED)


def _troubles(result: Mapping[str, Any]) -> list[str]:
    unable = result.get("unable", {})
    lines = [
        f"Not compared: {', '.join(name for name in unable if unable[name] == why)} ({why})."
        for why in dict.fromkeys(unable.values())
    ]
    lines += [f"A run of {name} failed: {why}" for name, why in result.get("failed", {}).items()]
    diverged = {r["algorithm"]: r["runs_diverged"] for r in result["rows"] if r["runs_diverged"]}
    if diverged:
        who = ", ".join(f"{name} {count}" for name, count in diverged.items())
        lines.append(f"Diverged runs, which were not selected: {who}.")
    for what, part in (
        ("Not held out, only trained on", "excluded"),
        ("Warning, held-out domains", "warned"),
    ):
        if reasons := result.get(part):
            from shoal.experiments.compare import by_reason

            lines += [f"{what}: {line}." for line in by_reason(reasons)]
    for measure, names in result.get("undefined", {}).items():
        lines.append(f"{measure} is undefined in {_some(names)}; its average is over the other domains.")
    trials = result.get("trials") or []  # a sweep's result has none
    if undefined := list(dict.fromkeys(t["held_out"] for t in trials if t["status"] == "undefined")):
        some = any(t["held_out"] in undefined and t["status"] == "scored" for t in trials)
        what = "No score in some cases" if some else "No score"
        lines.append(
            f"{what} with {_some(undefined)} held out: the metric is undefined there or on validation."
        )
    if missing := result["missing"]:
        more = f"; and {len(missing) - NAMED:,} more" if len(missing) > NAMED else ""
        which = "; ".join(missing[:NAMED]) + more
        lines.append(f"{result['runs_missing']:,} of {result['runs']:,} runs are missing: {which}.")
    if any(row["rank"] is None for row in result["rows"]):
        cells = [v["values"] for r in result["rows"] for v in (*r["domains"].values(), r["average"])]
        some = any(None in values and any(v is not None for v in values) for values in cells)
        beside = "; a number in parentheses counts the scores that a mean is based on" if some else ""
        lines.append(f"Algorithms without a score in every case have no rank{beside}.")
    return [clean(line) for line in lines]


def _parts(result: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The recommendation, and how it came about."""
    first = recommended(result)
    return first, [line for line in words(result) if line not in first]


def text(result: Mapping[str, Any]) -> str:
    """For a terminal: the recommendation, the table, then how it came about."""
    first, rest = _parts(result)
    if (many := len(result["held_out"])) > BESIDE:
        rest.append(f"The scores on each of the {many:,} domains are in the files.")
    shown = table(result, _cut, BESIDE).text()
    return "\n".join([*first, *([""] if first else []), shown, "", *rest])


def _cut(name: str) -> str:
    return name if len(name) <= WIDEST else f"{name[: WIDEST - 1]}…"


def markdown(result: Mapping[str, Any]) -> str:
    heading = f"# Algorithms on {in_markdown(result.get('title') or result['dataset'])}"
    lead, rest = ([f"- {in_markdown(line)}" for line in lines] for lines in _parts(result))
    shown = table(result, html.escape).markdown()
    return "\n".join([heading, "", *lead, *([""] if lead else []), shown, "", *rest, ""])


COLUMNS = ("algorithm", "held_out", "seed", "status", "metric", "test", "validation", "chosen", "lr", "step")
OF_ROW = ("average", "worst", "worst_domain")


def as_csv(result: Mapping[str, Any]) -> str:
    """A line for every trial, with its row's average and worst domain; the settings it chose as JSON."""
    lines: list[list[Any]] = [[*COLUMNS, *OF_ROW, "settings"]]
    rows = {row["algorithm"]: row for row in result["rows"]}
    for trial in result["trials"]:
        settings = json.dumps(trial["settings"]) if "settings" in trial else ""
        row = rows[trial["algorithm"]]
        worst = row.get("worst") or {}
        whole = (row["average"]["mean"], worst.get("mean"), worst.get("domain"))
        lines.append([*(trial.get(name) for name in COLUMNS), *whole, settings])
    return rows_as_csv(lines)


def as_json(result: Mapping[str, Any]) -> str:
    return dump_json(result).decode()


def as_html(result: Mapping[str, Any]) -> str:
    """For a notebook."""
    lead, rest = ("".join(f"<p>{html.escape(line)}</p>" for line in lines) for lines in _parts(result))
    return f"{lead}{table(result, most=BESIDE).html()}{rest}"


FILES = {".md": markdown, ".csv": as_csv, ".json": as_json}
"""What a comparison is written as, by how the file's name ends."""


def figure(result: Mapping[str, Any]) -> Any:
    rows = [row for row in result["rows"] if row["average"]["mean"] is not None]
    if not rows:
        raise InputError("there is no result yet.")
    seeds = len(result["seeds"])
    over = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    title = f"{result.get('title') or result['dataset']}, {over}"
    return compare_figure(rows, result["metric"], result["baseline"], title, result["lower_is_better"])
