"""A comparison of algorithms as text, tables, CSV and a figure; its recommendation as sentences."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.errors import InputError
from shoal.experiments.progress import duration
from shoal.files import dump_json
from shoal.report.plots import compare_figure
from shoal.report.tables import Table, clean, cut
from shoal.terminal import as_csv as rows_as_csv
from shoal.terminal import in_markdown

Result = Mapping[str, Any]
"""Of :func:`shoal.experiments.compare.results`."""
NAMED = 8
"""Names in a sentence; the JSON file has all."""
WIDEST, MOST_COLUMNS = 40, 20
"""Characters of a domain's name in a terminal, and domains with a column there; files have all."""
STATES = ("failed", "diverged", "undefined", "missing")


def _four_digits(size: float) -> str:
    """The format of numbers of about this size, so that a mean and its deviation end at the same place."""
    if not 1e-4 <= size < 1e6:
        return ".3e" if size else ".0f"
    return f".{max(0, 3 - math.floor(math.log10(size)))}f"


def number(mean: float, metric: str | None, sign: str = "", error: float | None = None) -> str:
    """Mean ± error, if there is one; accuracies in percent."""
    error = error if error and error > 1e-12 * max(1.0, abs(mean)) else None
    digits = _four_digits(max(abs(mean), error or 0.0))
    if metric == "accuracy":
        mean, error, digits = round(100 * mean, 9) + 0.0, error and 100 * error, ".1f"  # never -0.0
    return f"{mean:{sign}{digits}}" + (f" ± {error:{digits}}" if error else "")


def cell(values: Mapping[str, Any] | None, error: str = "sd", sign: str = "") -> str:
    """Mean ± deviation over seeds, with their number if some have no score; else why there is none."""
    if values is None or values["mean"] is None:
        values = values or {}
        return next((state for state in STATES if state in values.get("status", ())), "–")
    known, every = sum(v is not None for v in values["values"]), len(values["values"])
    text = number(values["mean"], values["metric"], sign, values[error])
    return text if known == every else f"{text} ({known} of {every})"


def many(count: int, what: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def listed(names: Sequence[str], between: str = ", ") -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return between.join(names[:NAMED]) + more


def table(result: Result, written: Callable[[str], str] = str, most: int | None = None) -> Table:
    """A row for every algorithm, best first; ``written`` is how names of domains are escaped.

    Of more than ``most`` domains only the average and the worst are shown.
    """
    lines = [_line(row, result, written, most) for row in result["rows"]]
    found = Table([name for name, _ in lines[0]])
    for line in lines:
        found.add(*(value for _, value in line))
    return found


def _line(
    row: Result, result: Result, written: Callable[[str], str], most: int | None
) -> list[tuple[str, object]]:
    """The names of columns with the cells of a row."""
    names, metric, baseline = result["held_out"], result["metric"], result["baseline"]
    shown, several, of = most is None or len(names) <= most, len(names) > 1, metric or "score"
    line = [("rank", "–" if row["rank"] is None else row["rank"]), ("algorithm", row["algorithm"])]
    line += [(written(clean(name)), cell(row["domains"][name])) for name in names if shown]
    if several or not shown:
        worst = row["worst"] and f"{number(row['worst']['mean'], metric)} "
        worst = worst and f"{worst}({written(clean(row['worst']['domain']))})"
        line += [(f"average {of}", cell(row["average"])), ("worst domain", worst or "–")]
    every = [(name, v["mean"]) for other in result["rows"] for name, v in other["metrics"].items()]
    also = dict.fromkeys(name for name, mean in every if mean is not None)
    line += [(f"average {name}" if several else name, cell(row["metrics"].get(name))) for name in also]
    if baseline:
        same = row["algorithm"] == baseline
        line.append((f"difference to {baseline}", "–" if same else cell(row["difference"], sign="+")))
    if has_intervals(result):
        line.append(("95 % interval", _interval(row["over_domains"], metric)))
    return [*line, (f"validation {of}", cell(row["validation"]))]


def has_intervals(result: Result) -> bool:
    """Whether some row has an interval over domains."""
    return any((row["over_domains"] or {}).get("low") is not None for row in result["rows"])


def _interval(about: Mapping[str, Any] | None, metric: str | None) -> str:
    if about is None or about["low"] is None:
        return "–"
    return f"{number(about['low'], metric, '+')} to {number(about['high'], metric, '+')}"


def recommended(result: Result) -> list[str]:
    """The recommendation in sentences: the algorithm, its expected score, the reason; empty without one."""
    about, metric = result.get("recommendation"), result["metric"]
    if about is None:
        return []
    percent, points = (" %", " percentage points") if metric == "accuracy" else ("", "")
    domains, nearest, tied = about["domains"], _described(about["nearest"]), about["tied"]
    row = next(row for row in result["rows"] if row["algorithm"] == about["nearest"])

    def ends(low: float, high: float, sign: str = "") -> str:
        return f"{number(low, metric, sign)} to {number(high, metric, sign)}"

    def gap(difference: Mapping[str, Any]) -> str:
        interval = ends(difference["low"], difference["high"], "+")
        return f"{number(difference['mean'], metric, '+')}{points} (95 % interval {interval})"

    if about["state"] == "few":
        least = "at least three, held out in three groups, are needed"
        first = f"No recommendation: {many(domains, 'held-out domain')}; {least}."
        return [first, clean(f"Start with {nearest}, the simplest algorithm.")]
    if about["state"] == "majority":
        why = "is not shown to beat a constant prediction (the majority baseline)"
        return [clean(f"No recommendation: {nearest} {why}: {gap(about['majority'])}.")]
    first = f"Use {nearest}"
    if about["state"] == "tied":
        first = f"Tied: {listed([about['row'], *tied])} cannot be told apart on {domains} domains. {first}"
        first += ", the simplest"
    worst = f"{number(row['worst']['mean'], metric)}{percent} ({row['worst']['domain']})"
    lines = [
        f"{first}.",
        f"Expect {metric} {number(about['expected'], metric)}{percent} on a new domain: "
        f"{ends(*about['mean'])} on average, {ends(*about['new_domain'])} in a single one (95 % intervals "
        f"from {domains} held-out domains, of which the worst had {worst}).",
    ]
    lines += [
        f"Its difference to {other['to']} is {gap(other)}."
        for other in (about["reference"], about["alternative"])
        if other and (other is about["alternative"] or other["to"] != about["alternative"]["to"])
    ]
    if (least := about["detectable"]) is not None:
        more = (
            f"With {domains} domains, differences below {number(least, metric)}{points} usually go unnoticed"
        )
        needed = about["domains_needed"] and f"{about['domains_needed']:,} domains would usually tell it"
        lines.append(f"{more}{f'; {needed} from ' + about['alternative']['to'] if needed else ''}.")
    return [clean(line) for line in lines]


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
    return "\n".join(
        [
            *first,
            *[""] * bool(first),
            table(result, lambda name: cut(name, WIDEST), MOST_COLUMNS).text(),
            "",
            *rest,
        ]
    )


def markdown(result: Result) -> str:
    """For ``comparison.md``."""
    title = f"# Algorithms on {in_markdown(result.get('title') or result['dataset'])}"
    parts = recommended(result), [*protocol(result), *notes(result)]
    first, rest = ([f"- {in_markdown(line)}" for line in part] for part in parts)
    return "\n".join([title, "", *first, "", table(result, html.escape).markdown(), "", *rest, ""])


COLUMNS = ("algorithm", "held_out", "seed", "status", "metric", "score", "selection_score", "trial")


def as_csv(result: Result) -> str:
    """A line for every algorithm, held-out domain and seed, with the selected settings as JSON."""
    lines: list[list[Any]] = [[*COLUMNS, "lr", "step", "average", "worst", "worst_domain", "settings"]]
    rows = {row["algorithm"]: row for row in result["rows"]}
    for trial in result["cases"]:
        row, settings = rows[trial["algorithm"]], trial.get("settings")
        worst = row["worst"] or {}
        whole = (row["average"]["mean"], worst.get("mean"), worst.get("domain"))
        cells = [*map(trial.get, (*COLUMNS, "lr", "step")), *whole]
        lines.append([*cells, "" if settings is None else json.dumps(settings)])
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
