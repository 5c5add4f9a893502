"""Tables, conclusions and the figure of a diagnosis."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.report.plots import COLOURS, SPARE, _figure, _plain, _tidy
from shoal.report.tables import Table, clean

Result = Mapping[str, Any]
FEW = 50
"""With fewer entities in a domain, only large differences can be seen."""
LARGE = {"classification": 0.02, "regression": 0.05}
"""A smaller generalization gap is negligible: of the accuracy, or of R²."""
SHOWN = 10
"""Classes, columns, and domains too small, that are named."""
OVERLAP = 0.1
"""Below this share of overlapping examples, little can be said of the relation."""
WHEN = ("at the start", "after training")
ASKED = {
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


def tables(result: Result) -> list[Table]:
    """Domains, tests, columns (where some differ) and gaps."""
    every = (domains_table(result), tests_table(result), columns_table(result), gaps_table(result))
    return [table for table in every if table]


def domains_table(result: Result) -> Table:
    """Sizes and labels."""
    shares, grouped = result["task"] == "classification", result["entities"] is not None
    shown = list(result["domains"][0]["labels"])[:SHOWN]
    titles = ["domain", "examples", "sampled", *["entities"] * grouped]
    found = Table([*titles, *([f"label {n} %" for n in shown] if shares else shown)])
    for domain in result["domains"]:
        values = [domain["labels"][n] for n in shown]
        cells = [f"{100 * v:.1f}" if shares else f"{v:.4g}" for v in values]
        sizes = [f"{domain[n]:,}" for n in ("size", "taken", *["entities"] * grouped)]
        found.add(domain["name"], *sizes, *cells)
    return found


def tests_table(result: Result) -> Table:
    """Every test, with the mean and deviation of its statistic under the null hypothesis."""
    found = Table(["test for", "statistic", "under the null", "p", "p, corrected", "result"])
    for test in result["tests"]:
        untested = test["name"] == "relation" and not result["effects"]["relation_tested"]
        answer = "inconclusive" if untested else "significant" if test["significant"] else "not significant"
        null = f"{test['null']:.3f} ± {test['deviation']:.3f}"
        p = (f"{test['p']:.3f}", f"{test['adjusted']:.3f}")
        found.add(ASKED[test["name"]], f"{test['statistic']:.3f}", null, *p, answer)
    return found


def columns_table(result: Result) -> Table | None:
    """The columns that differ between domains or whose relation to the label does, strongest first."""
    columns = named(result, "changes") + [c for c in named(result, "differs") if not c["changes"]]
    titles = ["column", "variance between domains %", "p", "most different", "relation to the label", "p "]
    found = Table(titles)
    for c in columns[:SHOWN]:
        relation = _relation_of(c) if c["changes"] else "no change detected"
        share = f"{100 * c['share']:.1f}"
        found.add(c["name"], share, f"{c['p']:.3f}", _how(c), relation, f"{c['relation_p']:.3f}")
    return found if columns else None


def named(result: Result, what: str) -> list[Mapping[str, Any]]:
    """The columns of which ``what`` (``changes`` or ``differs``) is significant, strongest first."""
    strength = "relation_p" if what == "changes" else "p"
    return sorted((c for c in result["columns"] if c[what]), key=lambda c: (c[strength], -c["share"]))


def _how(column: Mapping[str, Any]) -> str:
    how = column["how"]
    part = f"{how['part']} " if how["part"] else "high value " if how["measure"] == "share" else ""
    there, elsewhere = how["there"], how["elsewhere"]
    values = {
        "share": f"{there:.0%}, elsewhere {elsewhere:.0%}",
        "sd": f"spread {there:.2f} SD, elsewhere {elsewhere:.2f}",
        "mean": f"mean {there:+.2f} SD, elsewhere {elsewhere:+.2f}",
    }
    return f"{how['domain']}: {part}{values[how['measure']]}"


def _relation_of(column: Mapping[str, Any]) -> str:
    """Its correlation with the label in the two domains where it is lowest and highest."""
    each = column["correlations"]
    low, high = min(each, key=lambda d: each[d]), max(each, key=lambda d: each[d])
    label = f" with label {column['label']}" if column["label"] else ""
    what = "flips" if column["flips"] else "changes"
    return f"{what}: correlation{label} {each[low]:+.2f} in {low}, {each[high]:+.2f} in {high}"


def gaps_table(result: Result) -> Table:
    """ERM with each domain in training, and held out."""
    scale, what, digits = _scale(result)
    found = Table(["domain", f"ERM {what}, in training", "held out", "gap", "95 % interval"])
    for row in [*result["gaps"], result["average"]]:
        scores = (f"{scale * row[part]:.{digits}f}" for part in ("in_domain", "held_out"))
        ends = (
            "–" if row["low"] is None else f"{_signed(result, row['low'])} to {_signed(result, row['high'])}"
        )
        found.add(row["name"], *scores, _signed(result, row["gap"]), ends)
    return found


def _scale(result: Result) -> tuple[int, str, int]:
    """What scores are multiplied by, what they are, and their decimals."""
    return (100, "accuracy %", 1) if result["task"] == "classification" else (1, "R²", 2)


def _signed(result: Result, value: float) -> str:
    scale, _, digits = _scale(result)
    return f"{round(scale * value, digits) + 0.0:+.{digits}f}"


# Conclusions


def reading(result: Result, command: str = "shoal compare DATA", without: str = "") -> list[str]:
    """What the numbers say, with p, and what to try.

    ``command`` compares algorithms on these data, ``without`` does so without the columns :func:`to_drop`.
    """
    parts = (_verdict, _of_labels, _of_inputs, _of_columns, _of_relation, _of_gap, _of_gradients)
    lines = [line for part in parts for line in part(result)]
    lines.append(_advice(result, command))
    if (names := to_drop(result)) and len(names) < len(result["columns"]):
        how = f": {without}" if without and result["table"] else ""
        lines.append(f"Also compare without {_listed([repr(n) for n in names])}{how}")
    return [clean(line) for line in (*lines, *_limits(result))]


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


def to_drop(result: Result) -> list[str]:
    """Columns to try without: those whose relation changes; else, with a gap, the one that differs most."""
    if "relation" in kinds(result) and (found := named(result, "changes")):
        flipping = [c for c in found if c["flips"]] or found
        return [str(c["name"]) for c in flipping[:3]]
    if gap_seen(result) and "inputs" in kinds(result):
        return [str(c["name"]) for c in named(result, "differs")[:1]]
    return []


def gap_seen(result: Result) -> bool:
    """Whether the interval of the average gap, as it is shown, lies above 0."""
    scale, _, digits = _scale(result)
    low = result["average"]["low"]
    return low is not None and bool(round(scale * low, digits) > 0)


def _test(result: Result, name: str) -> tuple[Mapping[str, Any], str]:
    """A test, and its p in words."""
    test = next(test for test in result["tests"] if test["name"] == name)
    return test, f"p = {test['p']:.3f}, corrected {test['adjusted']:.3f}"


def _verdict(result: Result) -> list[str]:
    if found := kinds(result):
        return [f"Detected: {', '.join(KINDS[kind] for kind in found)}."]
    if result["significant"]:
        return [f"A shift was detected, but its kind is unclear ({', '.join(result['significant'])})."]
    least, what = (
        min(d["entities"] for d in result["domains"]),
        "entities" if result["entities"] else "examples",
    )
    if least < FEW:
        few = f"the smallest domain has {least} {what}, so only large shifts could be"
        return [f"Inconclusive: no shift was detected, but {few}."]
    return ["No shift was detected. A small one cannot be excluded."]


def _of_labels(result: Result) -> list[str]:
    test, how = _test(result, "labels")
    if not test["significant"]:
        return [f"Labels: no significant difference in label proportions ({how})."]
    kind, distance = "label deciles" if result["task"] == "regression" else "labels", result["effects"]
    return [
        f"Labels: the proportions of {kind} differ between domains ({how}). The total variation distance "
        f"between one domain and all domains is up to {distance['total_variation']:.0%}."
    ]


def _of_inputs(result: Result) -> list[str]:
    test, how = _test(result, "inputs")
    chance = f"by chance {test['null']:.0%} ± {test['deviation']:.0%} ({how})"
    can = "can" if test["significant"] else "cannot"
    right = f"balanced accuracy {test['statistic']:.0%}, {chance}"
    lines = [f"Inputs: a classifier {can} predict the domain from the inputs: {right}."]
    within, how = _test(result, "inputs within labels")
    if within["significant"]:
        lines.append(
            f"Given the label, the inputs differ as well ({how}): label shift does not explain it all."
        )
    elif "labels" in result["significant"]:
        lines.append(f"Given the label, no difference was detected ({how}): label shift may explain it all.")
    return lines


def _of_columns(result: Result) -> list[str]:
    if not result["columns"]:
        return []
    how, count = _test(result, "columns")[1], len(result["columns"])
    if not (found := named(result, "differs")):
        return [f"Columns: no significant difference between domains in any of {count} columns ({how})."]
    some = "; ".join(f"{c['name']!r} ({_how(c)})" for c in found[:3])
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    verb = "differs" if len(found) == 1 else "differ"
    return [
        f"Columns: {len(found)} of {count} {verb} between domains ({how}), strongest first: {some}{more}."
    ]


def _of_relation(result: Result) -> list[str]:
    overlap, (test, how) = result["effects"]["overlap"], _test(result, "relation")
    if not result["effects"]["relation_tested"]:
        return [
            "Relation: inconclusive whether P(label | inputs) changes. Too few entities lie where several "
            f"domains do (about {overlap:.0%})."
        ]
    little = f" The domains hardly overlap (about {overlap:.0%} of the examples), so the test has low power."
    little *= overlap < OVERLAP
    if not test["significant"]:
        return [f"Relation: no significant change in P(label | inputs) between domains ({how}).{little}"]
    if "relation" not in kinds(result):
        return [f"Relation: P(label | inputs) differs ({how}), which label shift alone can explain."]
    beyond = ", by more than label shift explains" if "labels" in result["significant"] else ""
    lines = [f"Relation: P(label | inputs) differs between domains{beyond} ({how}).{little}"]
    if found := named(result, "changes"):
        some = "; ".join(f"{c['name']!r} {_relation_of(c)} (p = {c['relation_p']:.3f})" for c in found[:3])
        more = f" {len(found) - 3} more columns change." if len(found) > 3 else ""
        changes = "Columns whose relation to the label changes (p corrected for all columns)"
        lines.append(f"{changes}: {some}.{more}")
    elif result["columns"]:
        lines.append("No single column accounts for it.")
    return lines


def _span(result: Result, gap: Mapping[str, Any]) -> str:
    points = " points" if result["task"] == "classification" else " of R²"
    size = f"{_signed(result, gap['gap']).removeprefix('+')}{points}"
    if gap["low"] is None:
        return size
    low, high = (_signed(result, gap[end]).removeprefix("+") for end in ("low", "high"))
    return f"{size} (95 % interval {low} to {high})"


def _of_gap(result: Result) -> list[str]:
    worst = max(result["gaps"], key=lambda g: g["gap"])
    seen = "" if gap_seen(result) else "not significantly different from 0, "
    average = f"{seen}{_span(result, result['average'])} on average over held-out domains"
    return [f"Generalization gap of ERM: {average}; largest in {worst['name']!r}, {_span(result, worst)}."]


def _of_gradients(result: Result) -> list[str]:
    lines = []
    for when in WHEN:
        found, (test, how) = result["gradients"][when], _test(result, f"gradients {when}")
        numbers = (
            f"mean cosine {found['mean']:.2f} between domains; lowest pair {found['pair'][0]!r} and "
            f"{found['pair'][1]!r} at {found['pair_cosine']:.2f}"
        )
        answer = "agreement is not significantly lower than between random groups"
        if test["significant"] and found["conflicting"]:
            domains = _listed([repr(d) for d in found["conflicting"]])
            answer = f"domains with less agreement than expected by chance: {domains}"
        elif test["significant"]:
            answer = "less agreement than expected by chance, in no particular domain"
        lines.append(f"Gradients {when}: {numbers}; {answer} ({how}).")
    return lines


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _advice(result: Result, command: str) -> str:
    found, average, span = kinds(result), result["average"], _span(result, result["average"])
    large = LARGE[result["task"]]
    gap = gap_seen(result) and average["gap"] > large
    if not result["significant"] and not gap:
        check = f"{command} --algorithms erm vrex fish"
        return f"Suggestion: use ERM. If a new domain may differ from these, compare: {check}"
    if found == ["labels"]:
        known = "recalibrate the predictions on the new domain"
        if result["task"] == "classification":
            known = (
                "rescale the predicted probabilities to the class proportions of the new domain, or weight "
                "classes in the loss"
            )
        return (
            f"Suggestion: only label shift was detected, so {known}. Domain generalization does not "
            f"address label shift. To check ERM: {command} --algorithms erm"
        )
    if not gap:
        size = "a generalization gap not significantly different from 0, but a large gap is not excluded"
        if average["high"] is not None and average["high"] <= large:
            size = "a negligible generalization gap"
        return (
            f"Suggestion: use ERM, which has {size}: {span}. To check: {command} --algorithms erm coral vrex"
        )
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
        f"Suggestion: the generalization gap is {span} and {how}, so compare: {command} --algorithms "
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
        "domains per test. ERM: a linear model on smooth features of the inputs. p-values are corrected for "
        f"{len(result['tests'])} tests (Holm), so that without any shift, at most {settings['level']:.0%} of "
        "diagnoses report one."
    ]
    if result["not_drawn"]:
        lines.append(f"{result['not_drawn']:,} more domains were not sampled; another seed samples others.")
    if small:
        names = _listed([f"{name} ({size})" for name, size in small.items()])
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


LEGEND, MOST = 4, 12
"""Classes per line of the legend; classes with a colour and a name each, the rest share one."""


def figure(result: Result, title: str = "") -> Any:
    """Label shares, the classifier's confusion, the generalization gap, and cosines of gradients."""
    names = [_short(d["name"]) for d in result["domains"]]
    below = math.ceil(len(result["domains"][0]["labels"]) / LEGEND) if result["task"] != "regression" else 0
    made: Any = _figure(12.5, max(6.8, 3.2 + 0.5 * len(names)) + 0.2 * min(below, 3))
    if title:
        made.suptitle(_plain(clean(title)), fontsize=12)
    (labels, classifier), (gap, cosines) = made.subplots(2, 2)
    _label_axes(labels, result, names)
    guessed = f"domain predicted from the inputs (chance {1 / len(names):.0%})"
    _matrix(classifier, result["confusion"], names, guessed, "Blues", "{:.0%}")
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
    places, labels = np.arange(len(names)), [d["labels"] for d in result["domains"]]
    if result["task"] == "regression":
        means, spread = ([own[part] for own in labels] for part in ("mean", "sd"))
        axes.errorbar(means, places, xerr=spread, fmt="o", color=COLOURS["Fish"], capsize=3)
        axes.set_title("labels: mean ± standard deviation", fontsize=10)
        axes.set(xlabel="label")
    else:
        often = sorted(labels[0], key=lambda c: -sum(own[c] for own in labels))
        often = often if len(often) <= MOST else often[: MOST - 1]
        rows = [(_short(c), [100 * own[c] for own in labels]) for c in labels[0] if c in often]
        if others := len(labels[0]) - len(rows):
            rest = [100 - sum(own) for own in zip(*(share for _, share in rows), strict=True)]
            rows.append((f"{others} others", rest))
        start, colours = np.zeros(len(names)), [*COLOURS.values(), *SPARE, "#b15928", "#a6cee3"]
        for colour, (label, share) in zip(colours, rows, strict=False):
            axes.barh(places, share, left=start, color=colour, edgecolor="white", linewidth=0.5, label=label)
            start = start + np.array(share)
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14)}
        axes.legend(frameon=False, fontsize=8, ncols=min(LEGEND, len(rows)), handlelength=1, **place)
        axes.set(xlim=(0, 100))
        axes.set_title("label proportions (%)", fontsize=10)
    sizes = [f"{name} ({d['size']:,})" for name, d in zip(names, result["domains"], strict=True)]
    axes.set_yticks(places, sizes)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def _gap_axes(axes: Any, result: Result) -> None:
    scale, what, _ = _scale(result)
    rows = [*result["gaps"], result["average"]]
    for place, row in enumerate(rows):
        ends = [
            [scale * abs(row["gap"] - (row["gap"] if row[e] is None else row[e]))] for e in ("low", "high")
        ]
        colour = "#444444" if place == len(rows) - 1 else COLOURS["Fish"]
        axes.errorbar(scale * row["gap"], place, xerr=ends, fmt="o", color=colour, capsize=3)
    axes.axvline(0, color="#888888", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(rows)), [_short(row["name"]) for row in rows])
    unit = "points of accuracy" if scale == 100 else what
    axes.set_title("generalization gap of ERM (95 % intervals)", fontsize=10)
    axes.set(xlabel=f"{unit} lost on a held-out domain", ylim=(len(rows) - 0.5, -0.5))
    _tidy(axes)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)


def _matrix(
    axes: Any, values: Sequence[Sequence[float]], names: Sequence[str], title: str, colours: str, form: str
) -> None:
    low = -1 if colours == "RdBu" else 0
    axes.imshow(np.array(values), cmap=colours, vmin=low, vmax=1, aspect="auto")
    turned = sum(map(len, names)) > 48
    axes.set_xticks(range(len(names)), names, rotation=30 * turned, ha="right" if turned else "center")
    axes.set_yticks(range(len(names)), names)
    axes.set_title(title, fontsize=10)
    for (row, column), value in np.ndenumerate(np.array(values)):
        colour = "white" if abs(value) > 0.5 else "#333333"
        axes.text(column, row, form.format(value), ha="center", va="center", fontsize=8, color=colour)
