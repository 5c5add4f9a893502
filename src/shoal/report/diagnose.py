"""Tables and conclusions of a diagnosis, from its plain data."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.report.tables import Table, clean, listed

Result = Mapping[str, Any]
FEW = 50
"""With fewer entities in a domain, only large differences can be seen."""
LARGE = {"classification": 0.02, "regression": 0.05}
"""A smaller generalization gap is negligible: of the accuracy, or of R²."""
SHOWN = 10
"""Classes and columns in a table."""
TESTS = {
    "labels": "label shift",
    "inputs": "input shift",
    "inputs within labels": "input shift given the label",
    "columns": "shift in a single column",
    "relation": "change in P(label | inputs)",
    "gradients": "conflicting gradients",
}
KINDS = {
    "labels": "label shift",
    "inputs": "input shift",
    "relation": "a change in the relation between inputs and labels",
}


def kinds(result: Result) -> list[str]:
    """In what the domains differ significantly.

    Other shares of labels alone change the inputs as a whole, every column, and P(y | x) as well. So where
    the shares differ, these count only if inputs of the same label differ too.
    """
    significant = set(result["significant"])
    labels, within = "labels" in significant, "inputs within labels" in significant
    beyond, relation = within or not labels, "relation" in significant
    inputs = bool(significant & {"inputs", "columns"}) or (within and labels and not relation)
    seen = {"labels": labels, "inputs": beyond and inputs, "relation": beyond and relation}
    return [kind for kind in seen if seen[kind]]


def named(result: Result, what: str) -> list[Mapping[str, Any]]:
    """The columns of which ``what`` (``changes`` or ``differs``) is significant, strongest first."""
    strength = "relation_p" if what == "changes" else "p"
    return sorted((c for c in result["columns"] if c[what]), key=lambda c: (c[strength], -c["share"]))


def gap_seen(result: Result) -> bool:
    """Whether the interval of the average gap, as it is shown, lies above 0."""
    low = (result["average"] or {}).get("low")
    return low is not None and float(_score(result, low)) > 0


def to_drop(result: Result) -> list[str]:
    """Columns to try without: those whose relation changes; else, with a gap, the one that differs most."""
    if "relation" in kinds(result) and (found := named(result, "changes")):
        return [str(c["name"]) for c in ([c for c in found if c["flips"]] or found)[:3]]
    if gap_seen(result) and "inputs" in kinds(result):
        return [str(c["name"]) for c in named(result, "differs")[:1]]
    return []


def _score(result: Result, value: float, sign: str = "-") -> str:
    """A score or a gap as text: accuracy in percent, or R²."""
    scale, digits = (100, 1) if result["task"] == "classification" else (1, 2)
    return f"{round(scale * value, digits) + 0.0:{sign}.{digits}f}"


def _metric(result: Result) -> str:
    return "accuracy %" if result["task"] == "classification" else "R²"


# Tables


def tables(result: Result) -> list[Table]:
    """Domains, tests, columns (where some differ) and gaps (where a model has learned)."""
    return [t for t in (_domains(result), _tests(result), _columns(result), _gaps(result)) if t.rows]


def _domains(result: Result) -> Table:
    shares, sizes = result["task"] == "classification", {"size": "examples", "taken": "sampled"}
    sizes |= {"entities": "entities"} if result["entities"] is not None else {}
    labels = list(result["domains"][0]["labels"])[:SHOWN]
    found = Table(["domain", *sizes.values(), *([f"label {n} %" for n in labels] if shares else labels)])
    for domain in result["domains"]:
        cells = [f"{100 * v:.1f}" if shares else f"{v:.4g}" for v in map(domain["labels"].get, labels)]
        found.add(domain["name"], *(f"{domain[n]:,}" for n in sizes), *cells)
    return found


def _tests(result: Result) -> Table:
    found = Table(["test for", "statistic", "under the null", "p", "p, corrected", "result"])
    for test in result["tests"]:
        untested = test["name"] == "relation" and not result["effects"]["relation_tested"]
        answer = "inconclusive" if untested else "significant" if test["significant"] else "not significant"
        numbers = (f"{test['statistic']:.3f}", f"{test['null']:.3f} ± {test['deviation']:.3f}")
        found.add(TESTS[test["name"]], *numbers, f"{test['p']:.3f}", f"{test['adjusted']:.3f}", answer)
    return found


def _columns(result: Result) -> Table:
    columns = named(result, "changes") + [c for c in named(result, "differs") if not c["changes"]]
    titles = ["variance between domains %", "p", "most different", "relation to the label", "p "]
    found = Table(["column", *titles])
    for c in columns[:SHOWN]:
        relation = "no change detected"
        if c["changes"]:  # in the two domains where the correlation is lowest and highest
            each, label = c["correlations"], f" with label {c['label']}" if c["label"] else ""
            ends = [f"{each[d]:+.2f} in {d}" for d in (min(each, key=each.get), max(each, key=each.get))]
            relation = f"{'flips' if c['flips'] else 'changes'}: correlation{label} {', '.join(ends)}"
        most = "{domain}: mean {mean:+.2f} SD".format(**c["most_different"])
        cells = (f"{100 * c['share']:.1f}", f"{c['p']:.3f}", most, relation)
        found.add(c["name"], *cells, f"{c['relation_p']:.3f}")
    return found


def _gaps(result: Result) -> Table:
    found = Table(["domain", f"{_metric(result)}, in training", "held out", "gap", "95 % interval"])
    for row in [*result["gaps"], *([result["average"]] if result["average"] else [])]:
        ends = [_score(result, row[end], "+") for end in ("low", "high") if row[end] is not None]
        scores = (_score(result, row[part]) for part in ("in_domain", "held_out"))
        found.add(row["name"], *scores, _score(result, row["gap"], "+"), " to ".join(ends) or "–")
    return found


# Conclusions


def reading(result: Result, command: str = "shoal compare DATA") -> list[str]:
    """What the numbers say, and what to try.

    ``command`` compares algorithms on these data.
    """
    gradients, conflict = result["gradients"], "gradients" in result["significant"]
    lines = [*_of_shifts(result), _of_gap(result)]
    lines.append("Gradients of the domains agree no less than those of random groups.")
    if conflict:
        domains = _quoted(gradients["conflicting"]) or "no particular domain"
        lines[-1] = f"Gradients conflict (mean cosine {gradients['mean']:.2f}), in: {domains}."
    lines.append(f"Suggestion: {_advice(result, command, conflict)}")
    if (names := to_drop(result)) and len(names) < len(result["columns"]):
        how = f": {command} --drop {shlex.join(names)}" if result["table"] else ""
        lines.append(f"Also compare without {_quoted(names)}{how}")
    return [clean(line) for line in (*lines, *_limits(result))]


def _quoted(names: Sequence[str]) -> str:
    return listed([repr(name) for name in names])


def _of_shifts(result: Result) -> list[str]:
    significant, effects, found = set(result["significant"]), result["effects"], kinds(result)
    least = min(domain["entities"] for domain in result["domains"])
    if found:
        lines = [f"Detected: {', '.join(KINDS[kind] for kind in found)}."]
    elif significant:
        lines = [f"A shift was detected, but its kind is unclear ({', '.join(result['significant'])})."]
    elif least < FEW:
        few = f"the smallest domain has {least} {'entities' if result['entities'] else 'examples'}"
        lines = [f"Inconclusive: no shift was detected, but {few}, so only large shifts could be."]
    else:
        lines = ["No shift was detected. A small one cannot be excluded."]
    if not effects["relation_tested"]:
        few = f"too few entities lie where several domains do (about {effects['overlap']:.0%})"
        lines.append(f"It is inconclusive whether P(label | inputs) changes: {few}.")
    if names := [c["name"] for c in named(result, "differs")]:
        lines.append(f"Columns that differ most between domains: {_quoted(names)}.")
    if "relation" in found and (names := [c["name"] for c in named(result, "changes")]):
        lines.append(f"Columns whose relation to the label changes: {_quoted(names)}.")
    return lines


def _span(result: Result, gap: Mapping[str, Any]) -> str:
    """A gap with its interval."""
    text = f"{_score(result, gap['gap'])} {'points' if result['task'] == 'classification' else 'of R²'}"
    if gap["low"] is None:
        return text
    return f"{text} (95 % interval {_score(result, gap['low'])} to {_score(result, gap['high'])})"


def _of_gap(result: Result) -> str:
    model, average = result["model"], result["average"]
    if average is None:
        numbers = f"{_score(result, model['score'])} against {_score(result, model['constant'])}"
        neither = "neither a linear model nor gradient boosting is better than a constant prediction"
        return f"No generalization gap is reported: {neither} ({_metric(result)} {numbers})."
    worst = max(result["gaps"], key=lambda g: g["gap"])
    zero = "" if gap_seen(result) else "not significantly different from 0, "
    return (
        f"Generalization gap of {model['name']}: {zero}{_span(result, average)} on average over held-out "
        f"domains; largest in {worst['name']!r}, {_span(result, worst)}."
    )


def _advice(result: Result, command: str, conflict: bool) -> str:
    found, average, large = kinds(result), result["average"], LARGE[result["task"]]
    if found == ["labels"]:
        return (
            "only label shift was detected, which domain generalization does not address; recalibrate the "
            f"predictions to the labels of the new domain. To check ERM: {command} --algorithms erm"
        )
    if average is None:
        return f"whether a model would be worse in a new domain is unknown until one has learned: {command}"
    if not gap_seen(result) or average["gap"] <= large:
        if not result["significant"]:
            return f"use ERM. If a new domain may differ from these, compare: {command}"
        size = "a generalization gap not significantly different from 0, but a large gap is not excluded"
        if average["high"] is not None and average["high"] <= large:
            size = "a negligible generalization gap"
        return f"use ERM, with {size}: {_span(result, average)}. To check: {command}"
    how, algorithms = "no gradient conflict was detected", "erm coral vrex groupdro"
    if conflict:
        how, algorithms = "gradients conflict", "erm fish fish:regrouped vrex coral"
    text = (
        f"the generalization gap is {_span(result, average)} and {how}, so compare: {command} --algorithms "
        f"{algorithms}. On most shifts no algorithm is reliably better than ERM "
        "(docs/evidence/comparisons.md)."
    )
    if "relation" in found:
        text += " If P(label | inputs) itself changes, no method can predict it; look for the cause."
    return text


def _limits(result: Result) -> list[str]:
    """What was tested, and what it cannot show."""
    settings, small = result["settings"], result["too_small"]
    whole = f" of {result['entities']:,} entities" if result["entities"] is not None else ""
    lines = [
        f"Sampled: {result['examples']:,} of {result['examples_in_all']:,} examples{whole} in "
        f"{len(result['domains'])} domains, from all splits. p-values are corrected for "
        f"{len(result['tests'])} tests (Holm): without any shift, at most {settings['level']:.0%} of "
        "diagnoses report one."
    ]
    if result["not_drawn"]:
        lines.append(f"{result['not_drawn']:,} more domains were not sampled; another seed samples others.")
    if small:
        names = listed([f"{name} ({size})" for name, size in small.items()])
        lines.append(f"Too small to test (fewer than {settings['least']} examples): {names}.")
    return lines


def text(result: Result, command: str = "shoal compare DATA") -> str:
    """Tables and reading for a terminal."""
    how: Any = {"break_long_words": False, "break_on_hyphens": False}
    lines = [
        textwrap.fill(line, 100, initial_indent="- ", subsequent_indent="  ", **how)
        for line in reading(result, command)
    ]
    return "\n".join(["\n\n".join(table.text() for table in tables(result)), "", *lines])
