"""Tables, conclusions and the figure of a diagnosis, from its plain data."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.report.plots import COLOURS, _figure, _plain, _tidy
from shoal.report.tables import Table, clean, listed

Result = Mapping[str, Any]
FEW = 50
"""With fewer entities in a domain, only large differences can be seen."""
LARGE = {"classification": 0.02, "regression": 0.05}
"""A smaller generalization gap is negligible: of the accuracy, or of R²."""
SHOWN = 10
"""Classes and columns in a table."""
OVERLAP = 0.1
"""Below this share of overlapping examples, little can be said of the relation."""
WHEN = ("at the start", "after training")
TESTS = {
    "labels": "label shift",
    "inputs": "input shift",
    "inputs within labels": "input shift given the label",
    "columns": "shift in a single column",
    "relation": "change in P(label | inputs)",
    "gradients at the start": "conflicting gradients at the start",
    "gradients after training": "conflicting gradients after training",
}
KINDS = {
    "labels": "label shift",
    "inputs": "input shift",
    "relation": "a change in the relation between inputs and labels",
}


# What was found


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


# Tables


def tables(result: Result) -> list[Table]:
    """Domains, tests, columns (where some differ) and gaps (where a model has learned)."""
    made = [_domains(result), _tests(result), _columns(result), _gaps(result)]
    return [table for table in made if table.rows]


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
    forms = {"share": "{:.0%}", "sd": "spread {:.2f} SD", "mean": "mean {:+.2f} SD"}
    found = Table(["column", *titles])
    for c in columns[:SHOWN]:
        how, relation = c["how"], "no change detected"
        here, elsewhere = (forms[how["measure"]].format(how[side]) for side in ("here", "elsewhere"))
        part = f"{how['part']} " if how["part"] else "high value " if how["measure"] == "share" else ""
        most = f"{how['domain']}: {part}{here}, elsewhere {elsewhere.split(' ', 1)[-1]}"
        if c["changes"]:  # in the two domains where the correlation is lowest and highest
            each, label = c["correlations"], f" with label {c['label']}" if c["label"] else ""
            ends = [f"{each[d]:+.2f} in {d}" for d in (min(each, key=each.get), max(each, key=each.get))]
            relation = f"{'flips' if c['flips'] else 'changes'}: correlation{label} {', '.join(ends)}"
        numbers = (f"{100 * c['share']:.1f}", f"{c['p']:.3f}")
        found.add(c["name"], *numbers, most, relation, f"{c['relation_p']:.3f}")
    return found


def _gaps(result: Result) -> Table:
    what = "accuracy %" if result["task"] == "classification" else "R²"
    found = Table(["domain", f"{what}, in training", "held out", "gap", "95 % interval"])
    for row in [*result["gaps"], *([result["average"]] if result["average"] else [])]:
        ends = [_score(result, row[end], "+") for end in ("low", "high") if row[end] is not None]
        scores = (_score(result, row[part]) for part in ("in_domain", "held_out"))
        found.add(row["name"], *scores, _score(result, row["gap"], "+"), " to ".join(ends) or "–")
    return found


# Conclusions


def reading(result: Result, command: str = "shoal compare DATA", without: str = "") -> list[str]:
    """What the numbers say, and what to try.

    ``command`` compares algorithms on these data, ``without`` does so without the columns :func:`to_drop`.
    """
    lines = [*_of_shifts(result), _of_gap(result), *_of_gradients(result)]
    lines.append(f"Suggestion: {_advice(result, command)}")
    if (names := to_drop(result)) and len(names) < len(result["columns"]):
        how = f": {without}" if without and result["table"] else ""
        lines.append(f"Also compare without {listed([repr(n) for n in names])}{how}")
    return [clean(line) for line in (*lines, *_limits(result))]


def _of_shifts(result: Result) -> list[str]:
    significant, overlap = set(result["significant"]), f"about {result['effects']['overlap']:.0%}"
    least = min(d["entities"] for d in result["domains"])
    if found := kinds(result):
        lines = [f"Detected: {', '.join(KINDS[kind] for kind in found)}."]
    elif significant:
        lines = [f"A shift was detected, but its kind is unclear ({', '.join(result['significant'])})."]
    elif least < FEW:
        few = f"the smallest domain has {least} {'entities' if result['entities'] else 'examples'}"
        lines = [f"Inconclusive: no shift was detected, but {few}, so only large shifts could be."]
    else:
        lines = ["No shift was detected. A small one cannot be excluded."]
    if "labels" in significant:
        within = "inputs within labels" in significant
        differ = "differ as well" if within else "do not differ significantly"
        explains = "does not explain it all" if within else "may explain it all"
        lines.append(f"Among examples of one label, inputs {differ}: label shift {explains}.")
    if not result["effects"]["relation_tested"]:
        few = f"too few entities lie where several domains do ({overlap})"
        lines.append(f"It is inconclusive whether P(label | inputs) changes: {few}.")
    elif result["effects"]["overlap"] < OVERLAP:
        lines.append(f"A change in P(label | inputs) is hard to detect: domains hardly overlap ({overlap}).")
    columns = {"differs": "Columns that differ most between domains"}
    columns |= {"changes": "Columns whose relation to the label changes"} if "relation" in found else {}
    for what, title in columns.items():
        if names := [repr(c["name"]) for c in named(result, what)]:
            lines.append(f"{title}: {listed(names)}.")
    return lines


def _span(result: Result, gap: Mapping[str, Any]) -> str:
    points = "points" if result["task"] == "classification" else "of R²"
    ends = [_score(result, gap[end]) for end in ("low", "high") if gap[end] is not None]
    text = f"{_score(result, gap['gap'])} {points}"
    return f"{text} (95 % interval {' to '.join(ends)})" if ends else text


def _of_gap(result: Result) -> str:
    model, average = result["model"], result["average"]
    if average is None:
        what = "accuracy %" if result["task"] == "classification" else "R²"
        numbers = f"{what} {_score(result, model['score'])} against {_score(result, model['constant'])}"
        neither = "neither a linear model nor gradient boosting is better than a constant prediction"
        return f"No generalization gap is reported: {neither} ({numbers})."
    worst = max(result["gaps"], key=lambda g: g["gap"])
    zero = "" if gap_seen(result) else "not significantly different from 0, "
    return (
        f"Generalization gap of {model['name']}: {zero}{_span(result, average)} on average over held-out "
        f"domains; largest in {worst['name']!r}, {_span(result, worst)}."
    )


def _conflicts(result: Result) -> list[str]:
    return [when for when in WHEN if f"gradients {when}" in result["significant"]]


def _of_gradients(result: Result) -> list[str]:
    lines = []
    for when in _conflicts(result):
        found = result["gradients"][when]
        domains = listed([repr(d) for d in found["conflicting"]]) or "no particular domain"
        mean = f"mean cosine {found['mean']:.2f}"
        lines.append(f"Gradients {when} agree less than by chance ({mean}), in: {domains}.")
    return lines or ["Gradients of the domains agree no less than those of random groups."]


def _advice(result: Result, command: str) -> str:
    found, average, large = kinds(result), result["average"], LARGE[result["task"]]
    if found == ["labels"]:
        known = "recalibrate the predictions on the new domain"
        if result["task"] == "classification":
            known = "rescale the probabilities to the class proportions of the new domain"
        return (
            f"only label shift was detected, so {known}. Domain generalization does not address label shift. "
            f"To check ERM: {command} --algorithms erm"
        )
    if average is None:
        return (
            f"whether a model would be worse in a new domain is not known before one has learned: {command}"
        )
    if not gap_seen(result) or average["gap"] <= large:
        if not result["significant"]:
            return f"use ERM. If a new domain may differ from these, compare: {command}"
        size = "a generalization gap not significantly different from 0, but a large gap is not excluded"
        if average["high"] is not None and average["high"] <= large:
            size = "a negligible generalization gap"
        return f"use ERM, with {size}: {_span(result, average)}. To check: {command}"
    how, algorithms = "no gradient conflict was detected", "erm coral vrex groupdro"
    if conflicts := _conflicts(result):
        how = f"gradients conflict {' and '.join(conflicts)}"
        algorithms = "erm fish fish:regrouped vrex coral"
    relation = (
        " If P(label | inputs) itself changes, no method can predict what it will be in a new domain; look "
        "for the cause, such as a different instrument or label definition."
    )
    return (
        f"the generalization gap is {_span(result, average)} and {how}, so compare: {command} --algorithms "
        f"{algorithms}. On most shifts no algorithm is reliably better than ERM "
        f"(docs/evidence/comparisons.md).{relation * ('relation' in found)}"
    )


def _limits(result: Result) -> list[str]:
    """What was tested, and what it cannot show."""
    settings, small = result["settings"], result["too_small"]
    whole = f" of {result['entities']:,} entities" if result["entities"] is not None else ""
    lines = [
        f"Sampled: {result['examples']:,} of {result['examples_in_all']:,} examples{whole} in "
        f"{len(result['domains'])} domains, from all splits; {settings['permutations']} permutations of the "
        f"domains per test. p-values are corrected for {len(result['tests'])} tests (Holm), so that without "
        f"any shift, at most {settings['level']:.0%} of diagnoses report one."
    ]
    if result["not_drawn"]:
        lines.append(f"{result['not_drawn']:,} more domains were not sampled; another seed samples others.")
    if small:
        names = listed([f"{name} ({size})" for name, size in small.items()])
        lines.append(f"Too small to test (fewer than {settings['least']} examples): {names}.")
    if result["overlapping"]:
        lines.append("Examples that belong to several domains are counted in the smallest.")
    return lines


def text(result: Result, command: str = "shoal compare DATA", without: str = "", width: int = 100) -> str:
    """Tables and reading for a terminal."""
    wrap = textwrap.TextWrapper(
        width, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    lines = [wrap.fill(line) for line in reading(result, command, without)]
    return "\n".join(["\n\n".join(table.text() for table in tables(result)), "", *lines])


# The figure


def figure(result: Result, title: str = "") -> Any:
    """The classifier's confusion of domains, the generalization gap, and cosines of gradients."""
    names = [_short(d["name"]) for d in result["domains"]]
    made: Any = _figure(15, max(3.8, 2 + 0.3 * len(names)))
    if title:
        made.suptitle(_plain(clean(title)), fontsize=12)
    classifier, gap, cosines = made.subplots(1, 3)
    chance = f"domain predicted from the inputs (chance {1 / len(names):.0%})"
    _draw_matrix(classifier, result["confusion"], names, chance, "Blues", "{:.0%}")
    classifier.set(xlabel="predicted", ylabel="domain")
    _draw_gaps(gap, result)
    agreement = result["gradients"]["after training"]
    agree = f"gradient cosine similarity after training (mean {agreement['mean']:.2f})"
    _draw_matrix(cosines, agreement["matrix"], names, agree, "RdBu", "{:.2f}")
    return made


def _short(name: str) -> str:
    """Cut in the middle: names of one kind mostly differ at an end."""
    shown = clean(name)
    return _plain(shown if len(shown) <= 18 else f"{shown[:8]}…{shown[-9:]}")


def _draw_gaps(axes: Any, result: Result) -> None:
    axes.set_title(f"generalization gap of {result['model']['name']} (95 % intervals)", fontsize=10)
    if not result["average"]:
        axes.axis("off")
        axes.text(0.5, 0.5, "no model predicts better than a constant", ha="center", color="#555555")
        return
    classes = result["task"] == "classification"
    scale, unit = (100, "points of accuracy") if classes else (1, "R²")
    rows = [*result["gaps"], result["average"]]
    ends = [[scale * abs(r["gap"] - (r[e] or r["gap"])) for r in rows] for e in ("low", "high")]
    gaps, places = [scale * r["gap"] for r in rows], range(len(rows))
    axes.errorbar(gaps, places, xerr=ends, fmt="o", color=COLOURS["Fish"], capsize=3)
    axes.axvline(0, color="#888888", linewidth=0.8, linestyle=":")
    axes.set_yticks(places, [_short(row["name"]) for row in rows])
    axes.set(xlabel=f"{unit} lost on a held-out domain", ylim=(len(rows) - 0.5, -0.5))
    _tidy(axes)


def _draw_matrix(
    axes: Any, values: Sequence[Sequence[float]], names: Sequence[str], title: str, colours: str, form: str
) -> None:
    axes.imshow(np.array(values), cmap=colours, vmin=-1 if colours == "RdBu" else 0, vmax=1, aspect="auto")
    turned = sum(map(len, names)) > 48
    axes.set_xticks(range(len(names)), names, rotation=30 * turned, ha="right" if turned else "center")
    axes.set_yticks(range(len(names)), names)
    axes.set_title(title, fontsize=10)
    for (row, column), value in np.ndenumerate(np.array(values)):
        colour = "white" if abs(value) > 0.5 else "#333333"
        axes.text(column, row, form.format(value), ha="center", va="center", fontsize=8, color=colour)
