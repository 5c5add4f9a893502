"""A comparison of algorithms as text, Markdown, CSV and HTML; its recommendation as sentences."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping
from typing import Any

from shoal.experiments.progress import duration
from shoal.files import as_csv, dump_json
from shoal.report.tables import Table, cell, clean, cut, listed, many, number
from shoal.terminal import in_markdown

Result = Mapping[str, Any]
"""Of :func:`shoal.experiments.compare.results`."""
IMBALANCED = 0.8
"""Accuracy of a constant prediction from which another metric is suggested."""
WIDEST, MOST_COLUMNS = 40, 20
"""Characters of a domain's name in a terminal, and domains with a column there; files have all."""
COLUMNS = ("algorithm", "held_out", "seed", "status", "metric", "score", "selection_score", "trial", "lr")
"""Of a case, in the CSV file."""


def table(result: Result, written: Callable[[str], str] = str, most: int | None = None) -> Table:
    """A row for every algorithm, best first; ``written`` is how names of domains are escaped.

    Of more than ``most`` domains only the average and the worst are shown.
    """
    rows, names, metric, baseline = (result[k] for k in ("rows", "held_out", "metric", "baseline"))
    shown = names if most is None or len(names) <= most else []
    titles, average = [written(clean(name)) for name in shown], "average " * (len(names) > 1)
    further = dict.fromkeys(n for row in rows for n, v in row["metrics"].items() if v["mean"] is not None)
    columns = ["rank", "algorithm", *titles]
    if overall := len(names) > 1 or not shown:
        columns += [f"average {metric or 'score'}", "worst domain"]
    columns += [f"{average}{name}" for name in further]
    columns += [f"difference to {baseline}", "95 % interval"] if baseline else []
    found = Table([*columns, f"validation {metric or 'score'}"])
    for row in rows:
        cells = ["–" if row["rank"] is None else row["rank"], row["algorithm"]]
        cells += [cell(row["domains"][name]) for name in shown]
        if overall:
            worst = row["worst"]
            where = f"{number(worst['mean'], metric)} ({written(clean(worst['domain']))})" if worst else "–"
            cells += [cell(row["average"]), where]
        cells += [cell(row["metrics"].get(name)) for name in further]
        if baseline:
            over = row["over_domains"]
            cells += [number(over["mean"], metric, "+") if over else "–", interval(over, metric)]
        found.add(*cells, cell(row["validation"]))
    return found


def interval(difference: Result | None, metric: str | None) -> str:
    """The interval of a difference, or a dash."""
    if difference is None or difference["low"] is None:
        return "–"
    return f"{number(difference['low'], metric, '+')} to {number(difference['high'], metric, '+')}"


# Sentences


def recommended(result: Result) -> list[str]:
    """The recommendation in sentences: the algorithm, its expected score, the reason; empty without one."""
    advice, metric = result.get("recommendation"), result["metric"]
    if advice is None:
        return []
    percent, points = (" %", " percentage points") if metric == "accuracy" else ("", "")
    caution = "".join(f"Caution: {line}. " for line in cautions(result))
    domains, nearest = advice["domains"], advice["nearest"]
    rows = {row["algorithm"]: row for row in result["rows"]}

    def score(value: float) -> str:
        return number(value, metric)

    def gap(other: Result) -> str:
        mean = f"{number(other['mean'], metric, '+')}{points}"
        return f"{mean} on average over {domains} domains (95 % interval {interval(other, metric)})"

    if advice["state"] == "few":
        least = "at least three, held out in three groups, are needed"
        first = f"{caution}No recommendation: {many(domains, 'held-out domain')}; {least}."
        return [clean(first), clean(f"Start with {nearest}, the simplest algorithm.")]
    if advice["state"] == "majority":
        first = (
            f"{caution}No recommendation: no algorithm is shown to predict better than a constant in a new"
        )
        lines = [f"{first} domain. Nearest is {nearest}: {gap(advice['majority'])}."]
        worse = [name for name in result["held_out"] if _worse_than_constant(result, rows, name, nearest)]
        if worse:
            lines.append(
                f"{nearest} is worse than a constant prediction in {listed(worse)}: look for what differs "
                "there, with `shoal diagnose`, before training anything else."
            )
        return [clean(line) for line in lines]
    first, best, reference = f"Use {nearest}", advice["alternative"], advice["reference"]
    if advice["state"] == "tied":
        names = listed([advice["row"], *advice["tied"]])
        first = f"Tied: {names} cannot be told apart on {domains} domains. {first}, the simplest"
    (low, high), (lowest, highest), worst = advice["mean"], advice["new_domain"], rows[nearest]["worst"]
    lines = [
        f"{caution}{first}.",
        f"Expect {metric} {score(advice['expected'])}{percent} on a new domain. The average over such "
        f"domains is {score(low)} to {score(high)}, and a single one will have {score(lowest)} to "
        f"{score(highest)} (95 % intervals from {domains} held-out domains; the worst of them, "
        f"{worst['domain']}, had {score(worst['mean'])}).",
    ]
    for other in {other["to"]: other for other in (reference, best) if other}.values():
        lines.append(f"Compared with {other['to']}, {nearest} has {gap(other)}.")
    if (least := advice["detectable"]) is not None:
        more = f"With {domains} domains, differences below {score(least)}{points} usually go unnoticed"
        if needed := advice["domains_needed"]:
            more += f"; about {needed:,} would be needed to tell {nearest} from {best['to']}"
        lines.append(f"{more}.")
    return [clean(line) for line in lines]


def _worse_than_constant(result: Result, rows: Mapping[str, Result], domain: str, nearest: str) -> bool:
    score, constant = (rows[name]["domains"][domain]["mean"] for name in (nearest, "majority"))
    return bool(score > constant if result["lower_is_better"] else score < constant)


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


def protocol(result: Result) -> list[str]:
    """How the numbers were measured, in sentences."""
    metric, seeds, search = result["metric"] or "score", len(result["seeds"]), result["search"]
    race, fits, folds = result.get("race") or {}, result.get("baseline_fits", 0), result.get("folds")
    better = "lower is better" if result["lower_is_better"] else "higher is better"
    most = "up to " * bool(race.get("left"))
    over = f"mean ± standard deviation over {most}{seeds} seeds" if seeds > 1 else "one seed"
    more = f" and {most}{many(search - 1, 'trial')} of random search" * (search > 1)
    runs = f"{result['runs'] - result['runs_missing'] - fits:,} runs of {result['steps']:,} steps"
    on = f" on {', '.join(result['devices'])}" * bool(result["devices"])
    lines = [
        f"{metric} on held-out domains ({'in percent' if metric == 'accuracy' else better}); {over}.",
        f"Hyperparameters per algorithm and seed: the defaults{more}. Selected: the "
        f"{'trial and ' * (search > 1)}step with the best validation {metric} on the training domains.",
        f"{runs}{on}, and {many(fits, 'fit')} of baselines, {duration(result['seconds'])} of training.",
        *_race(race),
    ]
    if folds:
        lines.append(f"Domains were held out in {folds} groups; each domain is scored separately.")
    if result["baseline"]:
        how = "paired by domain, seeds averaged, Student's t, not corrected for several rows"
        lines.append(f"95 % interval of the difference to {result['baseline']}: {how}.")
    if units := result.get("units"):
        lines.append(f"{units}.")
    if controls := [row["algorithm"] for row in result["rows"] if row["control"]]:
        lines.append(f"Controls (never recommended): {', '.join(controls)}.")
    return [clean(f"{line[:1].upper()}{line[1:]}") for line in lines]


HOW = {
    "majority": "the majority class is better on average",
    "chance": "{by} is better by more than chance",
    "average": "{by} is better on average",
    "incomplete": "scores are missing",
    "control": "with {by}",
}
"""How a row leaves a race."""
ENDED = {"budget": ": the time budget was used up", "interrupted": ": it was interrupted"}


def _race(race: Mapping[str, Any]) -> list[str]:
    """After which stage a race ended, and which rows left it when and why."""
    lines, groups = [], dict[str, list[str]]()
    if race and (done := race["done"]) < len(race["stages"]):
        stage = f"stage {done} ({race['stages'][done - 1]}) of {len(race['stages'])}"
        why = ENDED.get(race["ended"], "")
        lines.append(f"The comparison ended after {stage}{why}; the same call continues.")
    for name, exit in race.get("left", {}).items():
        why = f"after stage {exit['stage']} ({HOW[exit['how']].format(by=exit['by'])})"
        groups.setdefault(why, []).append(name)
    if groups:
        parts = "; ".join(f"{listed(names)} {why}" for why, names in groups.items())
        what = "Left the race, with the scores of fewer seeds and trials and so without a rank"
        lines.append(f"{what}: {parts}. A full comparison: --exhaustive.")
    return lines


def notes(result: Result) -> list[str]:
    """What is missing, failed or doubtful, in sentences."""
    kinds = {"unable": "Not compared", "excluded": "Only trained on, unless named by held_out"}
    kinds |= {"warned": "Warning, held-out domains"}
    lines, missing = list[str](), result["missing"]
    for kind, what in kinds.items():
        names = dict[str, list[str]]()
        for name, why in result.get(kind, {}).items():
            names.setdefault(why, []).append(name)
        lines += [f"{what}: {listed(domains)} ({why})." for why, domains in names.items()]
    lines += [f"A run of {name} failed: {error}" for name, error in result.get("failed", {}).items()]
    if diverged := [f"{r['algorithm']} {r['runs_diverged']}" for r in result["rows"] if r["runs_diverged"]]:
        lines.append(f"Diverged runs, which were not selected: {', '.join(diverged)}.")
    for metric, domains in result.get("undefined", {}).items():
        lines.append(f"{metric} is undefined in {listed(domains)}; its average is over the other domains.")
    if lost := dict.fromkeys(c["held_out"] for c in result["cases"] if c["status"] == "undefined"):
        lines.append(f"The metric is undefined in some cases, with these held out: {listed(list(lost))}.")
    if missing:
        count = f"{result['runs_missing']:,} of {result['runs']:,} runs are missing"
        lines.append(f"{count}: {listed(missing, '; ')}. Algorithms without all their runs have no rank.")
    return [clean(line) for line in lines]


# Whole comparisons


def text(result: Result) -> str:
    """For a terminal: the recommendation, the table, then the protocol and notes."""
    first, rest = recommended(result), [*protocol(result), *notes(result)]
    if (count := len(result["held_out"])) > MOST_COLUMNS:
        rest.append(f"The scores on each of the {count:,} domains are in the files.")
    scores = table(result, lambda name: cut(name, WIDEST), MOST_COLUMNS).text()
    return "\n".join([*first, *[""] * bool(first), scores, "", *rest])


def as_html(result: Result) -> str:
    """For a notebook."""
    parts = recommended(result), [*protocol(result), *notes(result)]
    first, rest = ("".join(f"<p>{html.escape(line)}</p>" for line in part) for part in parts)
    return f"{first}{table(result, most=MOST_COLUMNS).html()}{rest}"


def files(result: Result) -> dict[str, bytes]:
    """The files of a comparison: all of it, a document, and a line for every algorithm, domain and seed."""
    title = f"# Algorithms on {in_markdown(result.get('title') or result['dataset'])}"
    parts = recommended(result), [*protocol(result), *notes(result)]
    first, rest = ([f"- {in_markdown(line)}" for line in part] for part in parts)
    document = [title, "", *first, "", table(result, html.escape).markdown(), "", *rest, ""]
    lines = [[*map(case.get, COLUMNS), json.dumps(case.get("settings"))] for case in result["cases"]]
    return {
        "comparison.json": dump_json(result),
        "comparison.md": "\n".join(document).encode(errors="backslashreplace"),
        "comparison.csv": as_csv([[*COLUMNS, "settings"], *lines]).encode(errors="backslashreplace"),
    }
