"""A comparison of algorithms as text, tables, CSV and a figure; its recommendation as sentences."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping
from typing import Any

from shoal.errors import InputError
from shoal.experiments.progress import duration
from shoal.files import as_csv as rows_as_csv
from shoal.files import dump_json
from shoal.report.plots import compare_figure
from shoal.report.tables import Table, cell, clean, cut, listed, many, number
from shoal.terminal import in_markdown

Result = Mapping[str, Any]
"""Of :func:`shoal.experiments.compare.results`."""
IMBALANCED = 0.8
"""Accuracy of a constant prediction from which another metric is suggested."""
WIDEST, MOST_COLUMNS = 40, 20
"""Characters of a domain's name in a terminal, and domains with a column there; files have all."""
COLUMNS = (
    *("algorithm", "held_out", "seed", "status", "metric", "score", "selection_score", "trial", "lr", "step"),
)
"""Of a case, in the CSV file."""


def table(result: Result, written: Callable[[str], str] = str, most: int | None = None) -> Table:
    """A row for every algorithm, best first; ``written`` is how names of domains are escaped.

    Of more than ``most`` domains only the average and the worst are shown.
    """
    rows, names, metric, baseline = (result[k] for k in ("rows", "held_out", "metric", "baseline"))
    shown, several, of = most is None or len(names) <= most, len(names) > 1, metric or "score"
    average = "average " * several

    def worst(row: Result) -> str:
        about = row["worst"]
        return f"{number(about['mean'], metric)} ({written(clean(about['domain']))})" if about else "–"

    def difference(row: Result) -> str:
        return "–" if row["algorithm"] == baseline else cell(row["difference"], sign="+")

    columns: dict[str, Callable[[Result], object]] = {
        "rank": lambda row: "–" if row["rank"] is None else row["rank"],
        "algorithm": lambda row: row["algorithm"],
    }
    for name in names if shown else ():
        columns[written(clean(name))] = lambda row, name=name: cell(row["domains"][name])  # type: ignore[misc]
    if several or not shown:
        columns |= {f"average {of}": lambda row: cell(row["average"]), "worst domain": worst}
    for name in dict.fromkeys(n for row in rows for n, v in row["metrics"].items() if v["mean"] is not None):
        columns[f"{average}{name}"] = lambda row, name=name: cell(row["metrics"].get(name))  # type: ignore[misc]
    if baseline:
        columns[f"difference to {baseline}"] = difference
    if has_intervals(result):
        columns["95 % interval"] = lambda row: interval(row["over_domains"], metric)
    columns[f"validation {of}"] = lambda row: cell(row["validation"])
    found = Table([*columns])
    for row in rows:
        found.add(*(value(row) for value in columns.values()))
    return found


def has_intervals(result: Result) -> bool:
    """Whether some row has an interval over domains."""
    return any((row["over_domains"] or {}).get("low") is not None for row in result["rows"])


def interval(about: Result | None, metric: str | None, sign: str = "+") -> str:
    """``low to high``, or a dash."""
    if about is None or about["low"] is None:
        return "–"
    return f"{number(about['low'], metric, sign)} to {number(about['high'], metric, sign)}"


def recommended(result: Result) -> list[str]:
    """The recommendation in sentences: the algorithm, its expected score, the reason; empty without one."""
    about, metric = result.get("recommendation"), result["metric"]
    if about is None:
        return []
    percent, points = (" %", " percentage points") if metric == "accuracy" else ("", "")
    caution = "".join(f"Caution: {line}. " for line in cautions(result))
    domains, nearest = about["domains"], _described(about["nearest"])
    worst = next(row["worst"] for row in result["rows"] if row["algorithm"] == about["nearest"])

    def ends(low: float, high: float) -> str:
        return f"{number(low, metric)} to {number(high, metric)}"

    def gap(other: Result) -> str:
        mean = f"{number(other['mean'], metric, '+')}{points}"
        return f"{mean} (95 % interval {interval(other, metric)})"

    if about["state"] == "few":
        least = "at least three, held out in three groups, are needed"
        first = f"{caution}No recommendation: {many(domains, 'held-out domain')}; {least}."
        return [clean(first), clean(f"Start with {nearest}, the simplest algorithm.")]
    if about["state"] == "majority":
        why = "is not shown to beat a constant prediction (the majority baseline)"
        return [clean(f"{caution}No recommendation: {nearest} {why}: {gap(about['majority'])}.")]
    first = f"Use {nearest}"
    if about["state"] == "tied":
        names = listed([about["row"], *about["tied"]])
        first = f"Tied: {names} cannot be told apart on {domains} domains. {first}, the simplest"
    best, reference, least = about["alternative"], about["reference"], about["detectable"]
    others = [*{other["to"]: other for other in (reference, best) if other}.values()]
    lines = [
        f"{caution}{first}.",
        f"Expect {metric} {number(about['expected'], metric)}{percent} on a new domain: "
        f"{ends(*about['mean'])} on average, {ends(*about['new_domain'])} in a single one (95 % intervals "
        f"from {domains} held-out domains, of which the worst had {number(worst['mean'], metric)}{percent} "
        f"({worst['domain']})).",
        *(f"Its difference to {other['to']} is {gap(other)}." for other in others),
    ]
    if least is not None:
        needed = about["domains_needed"]
        more = f"; {needed:,} domains would usually tell it from {best['to']}" if needed else ""
        below = f"differences below {number(least, metric)}{points} usually go unnoticed"
        lines.append(f"With {domains} domains, {below}{more}.")
    return [clean(line) for line in lines]


def cautions(result: Result) -> list[str]:
    """What makes a recommendation doubtful, whatever the scores: leakage, impossible classes, imbalance."""
    lines = list(result.get("cautions", ()))
    shares = [row["average"]["mean"] for row in result["rows"] if row["algorithm"] == "majority"]
    if result["metric"] == "accuracy" and shares and (shares[0] or 0.0) >= IMBALANCED:
        lines.append(
            f"a constant prediction is correct in {number(shares[0], 'accuracy')} %, so that accuracy says "
            "little; compare by --metric AUC or 'macro recall', which count all classes alike"
        )
    return lines


def _described(name: str) -> str:
    """The name of a row with the summary of its algorithm, if it has one."""
    from shoal.algorithms import registry
    from shoal.experiments.baselines import SUMMARIES

    try:
        module = "" if name in SUMMARIES else registry.module(name.partition(":")[0]).__doc__ or ""
    except InputError:  # an algorithm of a package that is not installed here
        module = ""
    summary = SUMMARIES.get(name, module.partition("\n")[0].partition(": ")[2])
    return f"{name} ({summary[:1].lower()}{summary[1:].rstrip('.')})" if summary else name


def protocol(result: Result) -> list[str]:
    """How the numbers were measured, in sentences."""
    metric, seeds, search = result["metric"] or "score", len(result["seeds"]), result["search"]
    better = "lower is better" if result["lower_is_better"] else "higher is better"
    unit = "in percent" if metric == "accuracy" else f"({better})"
    race = result.get("race") or {}
    most = "up to " * bool(race.get("left"))
    over = f"mean ± standard deviation over {most}{seeds} seeds"
    over = over if seeds > 1 else f"only seed {result['seeds'][0]}"
    trials = (
        f"the defaults and {most}{many(search - 1, 'trial')} of random search"
        if search > 1
        else "the defaults"
    )
    folds, fits = result.get("folds"), result.get("baseline_fits", 0)
    runs = f"{result['runs'] - result['runs_missing'] - fits:,} runs of {result['steps']:,} steps"
    on = f" on {', '.join(result['devices'])}" if result["devices"] else ""
    baselines = f", and {many(fits, 'fit')} of baselines" if fits else ""
    interval = f"95 % interval of the difference to {result['baseline']}: paired by domain, seeds averaged, "
    controls = [row["algorithm"] for row in result["rows"] if row["control"]]
    lines = [
        f"{metric[:1].upper()}{metric[1:]} {unit} on held-out domains; {over}.",
        f"Hyperparameters per algorithm and seed: {trials}. Selected: the {'trial and ' * (search > 1)}step "
        f"with the best validation {metric} on the training domains.",
        f"Domains were held out in {folds} groups; each domain is scored separately." if folds else "",
        f"{runs}{on}{baselines}, {duration(result['seconds'])} of training.",
        *_race(race),
        f"{interval}Student's t, not corrected for several rows." if has_intervals(result) else "",
        f"{units[:1].upper()}{units[1:]}." if (units := result.get("units")) else "",
        f"Controls (never recommended): {', '.join(controls)}." if controls else "",
    ]
    return [clean(line) for line in lines if line]


HOW = {
    "majority": "the majority class is better on average",
    "chance": "{by} is better by more than chance",
    "average": "{by} is better on average",
    "incomplete": "scores are missing",
    "control": "with {by}",
}
"""How a row leaves a race."""


def _race(race: Mapping[str, Any]) -> list[str]:
    """The stages of a race, and which rows left it when and why."""
    if not race:
        return []
    done, stages, left = race["done"], race["stages"], race["left"]
    lines = []
    if done < len(stages):
        why = {"budget": ": the time budget was used up", "interrupted": ": it was interrupted"}
        lines.append(
            f"The comparison ended after stage {done} ({stages[done - 1]}) of {len(stages)}"
            f"{why.get(race['ended'], '')}; the same call continues."
        )
    groups: dict[tuple[int, str], list[str]] = {}
    for name, about in left.items():
        key = about["stage"], HOW[about["how"]].format(by=about["by"])
        groups.setdefault(key, []).append(name)
    parts = [f"{listed(names)} after stage {stage} ({why})" for (stage, why), names in groups.items()]
    if parts:
        lines.append(
            "Left the race, with the scores of fewer seeds and trials and so without a rank: "
            f"{'; '.join(parts)}. A full comparison: --exhaustive."
        )
    return lines


def notes(result: Result) -> list[str]:
    """What is missing, failed or doubtful, in sentences."""
    kinds = {"unable": "Not compared", "excluded": "Not held out, only trained on"}
    kinds |= {"warned": "Warning, held-out domains"}
    lines = []
    for kind, what in kinds.items():
        reasons = result.get(kind, {})
        groups = {why: [n for n in reasons if reasons[n] == why] for why in reasons.values()}
        lines += [f"{what}: {listed(names)} ({why})." for why, names in groups.items()]
    lines += [f"A run of {name} failed: {error}" for name, error in result.get("failed", {}).items()]
    if diverged := [f"{r['algorithm']} {r['runs_diverged']}" for r in result["rows"] if r["runs_diverged"]]:
        lines.append(f"Diverged runs, which were not selected: {', '.join(diverged)}.")
    for metric, names in result.get("undefined", {}).items():
        lines.append(f"{metric} is undefined in {listed(names)}; its average is over the other domains.")
    if lost := dict.fromkeys(t["held_out"] for t in result["cases"] if t["status"] == "undefined"):
        lines.append(
            f"The metric is undefined in some cases with these domains held out: {listed(list(lost))}."
        )
    if missing := result["missing"]:
        count = f"{result['runs_missing']:,} of {result['runs']:,} runs are missing"
        lines.append(f"{count}: {listed(missing, '; ')}.")
    if any(row["rank"] is None and not row["left"] for row in result["rows"]):
        lines.append("Algorithms without a score in every case have no rank.")
    return [clean(line) for line in lines]


def text(result: Result) -> str:
    """For a terminal: the recommendation, the table, then the protocol and notes."""
    first, rest = recommended(result), [*protocol(result), *notes(result)]
    if (count := len(result["held_out"])) > MOST_COLUMNS:
        rest.append(f"The scores on each of the {count:,} domains are in the files.")
    scores = table(result, lambda name: cut(name, WIDEST), MOST_COLUMNS).text()
    return "\n".join([*first, *[""] * bool(first), scores, "", *rest])


def markdown(result: Result) -> str:
    """For ``comparison.md``."""
    title = f"# Algorithms on {in_markdown(result.get('title') or result['dataset'])}"
    parts = recommended(result), [*protocol(result), *notes(result)]
    first, rest = ([f"- {in_markdown(line)}" for line in part] for part in parts)
    return "\n".join([title, "", *first, "", table(result, html.escape).markdown(), "", *rest, ""])


def as_csv(result: Result) -> str:
    """A line for every algorithm, held-out domain and seed, with the selected settings as JSON."""
    lines: list[list[Any]] = [[*COLUMNS, "average", "worst", "worst_domain", "settings"]]
    rows = {row["algorithm"]: row for row in result["rows"]}
    for case in result["cases"]:
        row, settings = rows[case["algorithm"]], case.get("settings")
        worst = row["worst"] or {}
        whole = (row["average"]["mean"], worst.get("mean"), worst.get("domain"))
        lines.append([*map(case.get, COLUMNS), *whole, "" if settings is None else json.dumps(settings)])
    return rows_as_csv(lines)


def as_html(result: Result) -> str:
    """For a notebook."""
    parts = recommended(result), [*protocol(result), *notes(result)]
    first, rest = ("".join(f"<p>{html.escape(line)}</p>" for line in part) for part in parts)
    return f"{first}{table(result, most=MOST_COLUMNS).html()}{rest}"


FILES = {".md": markdown, ".csv": as_csv, ".json": lambda result: dump_json(result).decode()}
"""The files of a comparison, by extension."""


def figure(result: Result) -> Any:
    """Every algorithm on every held-out domain, with matplotlib."""
    rows = [row for row in result["rows"] if row["average"]["mean"] is not None]
    if not rows:
        raise InputError("there is no result yet.")
    seeds = len(result["seeds"])
    over = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    title = f"{result.get('title') or result['dataset']}, {over}"
    return compare_figure(rows, result["metric"], result["baseline"], title, result["lower_is_better"])
