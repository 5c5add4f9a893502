"""Tables, conclusions and the figure of a diagnosis, from its plain data."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.report.plots import COLOURS, SPARE, _figure, _plain, _tidy
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
    scale, _, digits = _scale(result)
    low = (result["average"] or {}).get("low")
    return low is not None and bool(round(scale * low, digits) > 0)


def to_drop(result: Result) -> list[str]:
    """Columns to try without: those whose relation changes; else, with a gap, the one that differs most."""
    if "relation" in kinds(result) and (found := named(result, "changes")):
        flipping = [c for c in found if c["flips"]] or found
        return [str(c["name"]) for c in flipping[:3]]
    if gap_seen(result) and "inputs" in kinds(result):
        return [str(c["name"]) for c in named(result, "differs")[:1]]
    return []


def _scale(result: Result) -> tuple[int, str, int]:
    """What scores are multiplied by, what they are, and their decimals."""
    return (100, "accuracy %", 1) if result["task"] == "classification" else (1, "R²", 2)


def _signed(result: Result, value: float, sign: str = "+") -> str:
    scale, _, digits = _scale(result)
    return f"{round(scale * value, digits) + 0.0:{sign}.{digits}f}"


def _how(column: Mapping[str, Any]) -> str:
    """The domain in which a column differs most, and how."""
    how = column["how"]
    part = f"{how['part']} " if how["part"] else "high value " if how["measure"] == "share" else ""
    forms = {"share": "{:.0%}", "sd": "spread {:.2f} SD", "mean": "mean {:+.2f} SD"}
    there, elsewhere = (forms[how["measure"]].format(how[side]) for side in ("there", "elsewhere"))
    return f"{how['domain']}: {part}{there}, elsewhere {elsewhere.split(' ', 1)[-1]}"


def _relation_of(column: Mapping[str, Any]) -> str:
    """Its correlation with the label in the two domains where it is lowest and highest."""
    each = column["correlations"]
    low, high = min(each, key=lambda d: each[d]), max(each, key=lambda d: each[d])
    label = f" with label {column['label']}" if column["label"] else ""
    what = "flips" if column["flips"] else "changes"
    return f"{what}: correlation{label} {each[low]:+.2f} in {low}, {each[high]:+.2f} in {high}"


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
        values = [domain["labels"][n] for n in labels]
        cells = [f"{100 * v:.1f}" if shares else f"{v:.4g}" for v in values]
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
        relation = _relation_of(c) if c["changes"] else "no change detected"
        numbers = (f"{100 * c['share']:.1f}", f"{c['p']:.3f}")
        found.add(c["name"], *numbers, _how(c), relation, f"{c['relation_p']:.3f}")
    return found


def _gaps(result: Result) -> Table:
    scale, what, digits = _scale(result)
    found = Table(["domain", f"{what}, in training", "held out", "gap", "95 % interval"])
    for row in [*result["gaps"], *([result["average"]] if result["average"] else [])]:
        scores = (f"{scale * row[part]:.{digits}f}" for part in ("in_domain", "held_out"))
        ends = [_signed(result, row[end]) for end in ("low", "high") if row[end] is not None]
        found.add(row["name"], *scores, _signed(result, row["gap"]), " to ".join(ends) or "–")
    return found


# Conclusions


def reading(result: Result, command: str = "shoal compare DATA", without: str = "") -> list[str]:
    """What the numbers say, and what to try.

    ``command`` compares algorithms on these data, ``without`` does so without the columns :func:`to_drop`.
    """
    parts = (_of_shifts, _of_gap, _of_gradients)
    lines = [line for part in parts for line in part(result)]
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
    size, *ends = (gap[part] and _signed(result, gap[part], "-") for part in ("gap", "low", "high"))
    return f"{size} {points}" + (f" (95 % interval {' to '.join(ends)})" if None not in ends else "")


def _of_gap(result: Result) -> list[str]:
    model, average = result["model"], result["average"]
    if average is None:
        scale, what, digits = _scale(result)
        score, constant = (f"{scale * model[part]:.{digits}f}" for part in ("score", "constant"))
        neither = "neither a linear model nor gradient boosting is better than a constant prediction"
        return [f"No generalization gap is reported: {neither} ({what} {score} against {constant})."]
    worst = max(result["gaps"], key=lambda g: g["gap"])
    zero = "" if gap_seen(result) else "not significantly different from 0, "
    return [
        f"Generalization gap of {model['name']}: {zero}{_span(result, average)} on average over held-out "
        f"domains; largest in {worst['name']!r}, {_span(result, worst)}."
    ]


def _of_gradients(result: Result) -> list[str]:
    lines = []
    for when in WHEN:
        found = result["gradients"][when]
        if f"gradients {when}" in result["significant"]:
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
    conflicts = [when for when in WHEN if f"gradients {when}" in result["significant"]]
    how, algorithms = "no gradient conflict was detected", "erm coral vrex groupdro"
    if conflicts:
        how, algorithms = (
            f"gradients conflict {' and '.join(conflicts)}",
            "erm fish fish:regrouped vrex coral",
        )
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
    names = listed([f"{name} ({size})" for name, size in small.items()])
    few = f"Too small to test (fewer than {settings['least']} examples): {names}."
    others = f"{result['not_drawn']:,} more domains were not sampled; another seed samples others."
    lines = {
        f"Sampled: {result['examples']:,} of {result['examples_in_all']:,} examples{whole} in "
        f"{len(result['domains'])} domains, from all splits; {settings['permutations']} permutations of the "
        f"domains per test. p-values are corrected for {len(result['tests'])} tests (Holm), so that without "
        f"any shift, at most {settings['level']:.0%} of diagnoses report one.": True,
        others: result["not_drawn"],
        few: small,
        "Examples that belong to several domains are counted in the smallest.": result["overlapping"],
    }
    return [line for line, applies in lines.items() if applies]


def text(result: Result, command: str = "shoal compare DATA", without: str = "", width: int = 100) -> str:
    """Tables and reading for a terminal."""
    wrap = textwrap.TextWrapper(
        width, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    lines = [wrap.fill(line) for line in reading(result, command, without)]
    return "\n".join(["\n\n".join(table.text() for table in tables(result)), "", *lines])


# The figure


def figure(result: Result, title: str = "") -> Any:
    """Label shares, the classifier's confusion, the generalization gap, and cosines of gradients."""
    names = [_short(d["name"]) for d in result["domains"]]
    made: Any = _figure(12.5, max(6.8, 3.2 + 0.5 * len(names)))
    if title:
        made.suptitle(_plain(clean(title)), fontsize=12)
    (labels, classifier), (gap, cosines) = made.subplots(2, 2)
    _label_axes(labels, result, names)
    chance = f"domain predicted from the inputs (chance {1 / len(names):.0%})"
    _matrix(classifier, result["confusion"], names, chance, "Blues", "{:.0%}")
    classifier.set(xlabel="predicted", ylabel="domain")
    _gap_axes(gap, result)
    agreement = result["gradients"]["after training"]
    agree = f"gradient cosine similarity after training (mean {agreement['mean']:.2f})"
    _matrix(cosines, agreement["matrix"], names, agree, "RdBu", "{:.2f}")
    return made


def _short(name: str) -> str:
    """Cut in the middle: names of one kind mostly differ at an end."""
    shown = clean(name)
    return _plain(shown if len(shown) <= 18 else f"{shown[:8]}…{shown[-9:]}")


def _label_axes(axes: Any, result: Result, names: Sequence[str]) -> None:
    import pandas

    labels = pandas.DataFrame([d["labels"] for d in result["domains"]])
    if result["task"] == "regression":
        axes.errorbar(labels["mean"], labels.index, xerr=labels["sd"], fmt="o", color=COLOURS["Fish"])
        title = "labels: mean ± standard deviation"
    else:
        colours, title = [*COLOURS.values(), *SPARE], "label proportions (%)"
        rare = labels.sum().sort_values(ascending=False).index[len(colours) - 1 :]
        if len(rare) > 1:
            labels = labels.drop(columns=rare).assign(others=labels[rare].sum(axis=1))
        labels = (100 * labels).rename(columns=_short)
        labels.plot.barh(stacked=True, ax=axes, color=colours, width=0.8, edgecolor="white")
        axes.legend(frameon=False, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.1))
        axes.set(xlim=(0, 100))
    sizes = [f"{name} ({d['size']:,})" for name, d in zip(names, result["domains"], strict=True)]
    axes.set_yticks(range(len(names)), sizes)
    axes.set_title(title, fontsize=10)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def _gap_axes(axes: Any, result: Result) -> None:
    axes.set_title(f"generalization gap of {result['model']['name']} (95 % intervals)", fontsize=10)
    if not result["average"]:
        axes.axis("off")
        axes.text(0.5, 0.5, "no model predicts better than a constant", ha="center", color="#555555")
        return
    scale, what, _ = _scale(result)
    rows = [*result["gaps"], result["average"]]
    ends = [[scale * abs(r["gap"] - (r[e] or r["gap"])) for r in rows] for e in ("low", "high")]
    gaps, places = [scale * r["gap"] for r in rows], range(len(rows))
    axes.errorbar(gaps, places, xerr=ends, fmt="o", color=COLOURS["Fish"], capsize=3)
    axes.axvline(0, color="#888888", linewidth=0.8, linestyle=":")
    axes.set_yticks(places, [_short(row["name"]) for row in rows])
    unit = "points of accuracy" if scale == 100 else what
    axes.set(xlabel=f"{unit} lost on a held-out domain", ylim=(len(rows) - 0.5, -0.5))
    _tidy(axes)


def _matrix(
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
