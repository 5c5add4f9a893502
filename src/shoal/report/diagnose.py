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
"""Below so many examples in a domain, only large differences can be seen."""
LARGE = 0.02
"""A generalization gap below this is small."""
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
    "held-out": "held-out domains harder than held-out examples",
    "gradients at the start": "conflicting gradients at the start",
    "gradients after training": "conflicting gradients after training",
}


def tables(result: Result) -> list[Table]:
    """Domains, tests, columns (where some differ) and gaps."""
    every = (domains_table(result), questions_table(result), columns_table(result), gaps_table(result))
    return [table for table in every if table]


def domains_table(result: Result) -> Table:
    """Sizes and labels."""
    shares = result["task"] == "classification"
    shown = list(result["domains"][0]["labels"])[:SHOWN]
    found = Table(["domain", "examples", "sampled", *([f"label {n} %" for n in shown] if shares else shown)])
    for domain in result["domains"]:
        values = [domain["labels"][n] for n in shown]
        cells = [f"{100 * v:.1f}" if shares else f"{v:.4g}" for v in values]
        found.add(domain["name"], f"{domain['size']:,}", f"{domain['taken']:,}", *cells)
    return found


def questions_table(result: Result) -> Table:
    """Every test, with the mean and deviation of its statistic under the null hypothesis."""
    found = Table(["test for", "statistic", "under the null", "p", "p, corrected", "result"])
    for q in result["questions"]:
        untested = q["name"] == "relation" and not result["settings"]["relation_tested"]
        answer = "inconclusive" if untested else "significant" if q["alarm"] else "not significant"
        null = f"{q['chance']:.3f} ± {q['deviation']:.3f}"
        p = (f"{q['p']:.3f}", f"{q['adjusted']:.3f}")
        found.add(ASKED[q["name"]], f"{q['found']:.3f}", null, *p, answer)
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
    """The columns of which ``what`` (``changes`` or ``differs``) was found, strongest first."""
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
        gap, low, high = (f"{scale * row[part]:+.{digits}f}" for part in ("gap", "low", "high"))
        found.add(row["name"], *scores, gap, f"{low} to {high}")
    return found


def _scale(result: Result) -> tuple[int, str, int]:
    """What scores are multiplied by, what they are, and their decimals."""
    return (100, "accuracy %", 1) if result["task"] == "classification" else (1, "error", 2)


def gap_seen(result: Result) -> bool:
    """Whether the interval of the average gap, as it is shown, lies above 0."""
    scale, _, digits = _scale(result)
    return bool(round(scale * result["average"]["low"], digits) > 0)


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


def _q(result: Result, name: str) -> tuple[Mapping[str, Any], str]:
    """A test, and its p in words."""
    q = next(q for q in result["questions"] if q["name"] == name)
    return q, f"p = {q['p']:.3f}, corrected {q['adjusted']:.3f}"


def _alarm(result: Result, name: str) -> bool:
    return any(q["alarm"] for q in result["questions"] if q["name"] == name)


def kinds(result: Result) -> list[str]:
    """In what the domains were seen to differ.

    Other shares of labels alone change the inputs as a whole, every column, and P(y | x) as well. So where
    the shares differ, these count only if inputs of the same label differ too.
    """
    alarms = {q["name"] for q in result["questions"] if q["alarm"]}
    labels, within, relation = "labels" in alarms, "inputs within labels" in alarms, "relation" in alarms
    beyond = within or not labels
    inputs = bool(alarms & {"inputs", "columns"}) or (within and labels and not relation)
    seen = {"labels": labels, "inputs": beyond and inputs, "relation": beyond and relation}
    return [kind for kind in seen if seen[kind]]


KINDS = {
    "labels": "label shift",
    "inputs": "input shift",
    "relation": "a change in the relation between inputs and labels",
}


def _verdict(result: Result) -> list[str]:
    least = min(d["taken"] for d in result["domains"])
    if found := kinds(result):
        return [f"Detected: {', '.join(KINDS[kind] for kind in found)}."]
    if result["alarms"]:
        return [f"A shift was detected, but its kind is unclear ({', '.join(result['alarms'])})."]
    if least < FEW:
        few = f"the smallest domain has {least} examples, so only large shifts could be"
        return [f"Inconclusive: no shift was detected, but {few}."]
    return ["No shift was detected. A small one cannot be excluded."]


def _of_labels(result: Result) -> list[str]:
    q, how = _q(result, "labels")
    if not q["alarm"]:
        return [f"Labels: no significant difference in label proportions ({how})."]
    effects = result["effects"]
    kind = "label deciles" if result["task"] == "regression" else "labels"
    return [
        f"Labels: the proportions of {kind} differ between domains ({how}). The total variation distance "
        f"between one domain and all domains is up to {effects['total_variation']:.0%}; Cramér's V is "
        f"{effects['cramers_v']:.2f}."
    ]


def _of_inputs(result: Result) -> list[str]:
    q, how = _q(result, "inputs")
    chance = f"by chance {q['chance']:.0%} ± {q['deviation']:.0%} ({how})"
    right = f"balanced accuracy {q['found']:.0%}, {chance}"
    lines = [f"Inputs: a classifier can predict the domain from the inputs: {right}."]
    if not q["alarm"]:
        lines = [f"Inputs: a classifier cannot predict the domain from the inputs: {right}."]
    within, how = _q(result, "inputs within labels")
    if within["alarm"]:
        lines.append(
            f"Given the label, the inputs differ as well ({how}): label shift does not explain all of it."
        )
    elif _alarm(result, "labels"):
        lines.append(
            f"Given the label, no difference was detected ({how}): label shift may explain all of it."
        )
    return lines


def _of_columns(result: Result) -> list[str]:
    if not result["columns"]:
        return []
    how, count = _q(result, "columns")[1], len(result["columns"])
    if not (found := named(result, "differs")):
        return [f"Columns: no significant difference between domains in any of {count} columns ({how})."]
    some = "; ".join(f"{c['name']!r} ({_how(c)})" for c in found[:3])
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    verb = "differs" if len(found) == 1 else "differ"
    return [
        f"Columns: {len(found)} of {count} {verb} between domains ({how}), strongest first: {some}{more}."
    ]


def _of_relation(result: Result) -> list[str]:
    overlap, (q, how) = result["effects"]["overlap"], _q(result, "relation")
    if not result["settings"]["relation_tested"]:
        return [
            "Relation: inconclusive whether P(label | inputs) changes. The domains hardly overlap: the "
            "domain "
            f"of all but about {overlap:.0%} of the examples can be predicted from the inputs."
        ]
    little = f" The domains hardly overlap (about {overlap:.0%} of the examples), so the test has low power."
    little *= overlap < OVERLAP
    if not q["alarm"]:
        return [f"Relation: no significant change in P(label | inputs) between domains ({how}).{little}"]
    if "relation" not in kinds(result):
        return [f"Relation: P(label | inputs) differs ({how}), which label shift alone can explain."]
    beyond = ", by more than label shift explains" if _alarm(result, "labels") else ""
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
    scale, _, digits = _scale(result)
    size, low, high = (f"{round(scale * gap[k], digits) + 0.0:.{digits}f}" for k in ("gap", "low", "high"))
    return f"{size}{' points' * (scale == 100)} (95 % interval {low} to {high})"


def _of_gap(result: Result) -> list[str]:
    q, how = _q(result, "held-out")
    worst = max(result["gaps"], key=lambda g: g["gap"])
    seen = "" if gap_seen(result) else "not significantly different from 0, "
    average = f"{seen}{_span(result, result['average'])} on average over held-out domains"
    line = f"Generalization gap of ERM: {average}; largest in {worst['name']!r}, {_span(result, worst)}."
    if not q["alarm"]:
        same = "For kernel ridge regression, held-out domains are not significantly harder"
        return [line, f"{same} ({how})."]
    times = q["found"] / q["chance"] if q["chance"] > 0 else 1.0
    return [
        line,
        f"The error of kernel ridge regression on held-out domains is {times:.3g} times its error on the "
        "same "
        f"number of held-out examples from all domains ({how}).",
    ]


def _of_gradients(result: Result) -> list[str]:
    lines = []
    for when in WHEN:
        found, (q, how) = result["gradients"][when], _q(result, f"gradients {when}")
        numbers = (
            f"mean cosine {found['mean']:.2f} between domains, {found['by_chance']:.2f} between random "
            f"groups; lowest pair {found['pair'][0]!r} and {found['pair'][1]!r} at {found['pair_cosine']:.2f}"
        )
        if not q["alarm"]:
            answer = "agreement is not significantly lower than between random groups"
        elif found["conflicting"]:
            domains = _listed([repr(d) for d in found["conflicting"]])
            answer = f"domains with less agreement than expected by chance: {domains}"
        else:
            answer = "less agreement than expected by chance, in no particular domain"
        lines.append(f"Gradients {when}: {numbers}; {answer} ({how}).")
    return lines


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _advice(result: Result, command: str) -> str:
    found, average, span = kinds(result), result["average"], _span(result, result["average"])
    gap = gap_seen(result) and average["gap"] > (LARGE if result["task"] == "classification" else 0)
    if not result["alarms"] and not gap:
        check = f"{command} --algorithms erm vrex fish"
        return f"Suggestion: use ERM. If a new domain may differ from these, compare: {check}"
    if found == ["labels"]:
        known = "recalibrate the predictions on the new domain"
        if result["task"] == "classification":
            known = (
                "rescale the predicted probabilities to the class proportions of the new domain, or weight "
            )
            known += "classes in the loss"
        return (
            f"Suggestion: only label shift was detected, so {known}. Domain generalization does not "
            f"address label shift. To check ERM: {command} --algorithms erm"
        )
    unclear = not gap and _alarm(result, "held-out") and average["high"] > LARGE
    if not gap and not unclear:
        size = "a generalization gap not significantly different from 0, but a large gap is not excluded"
        size = "a negligible generalization gap" if average["high"] <= LARGE else size
        check = f"{command} --algorithms erm coral vrex"
        return f"Suggestion: use ERM, which has {size}: {span}. To check: {check}"
    conflicts = [when for when in WHEN if _alarm(result, f"gradients {when}")]
    how, chosen = "no gradient conflict was detected", "erm coral vrex groupdro"
    if conflicts:
        how, chosen = f"gradients conflict {' and '.join(conflicts)}", "erm fish fish:regrouped vrex coral"
    relation = (
        " If P(label | inputs) itself changes, no method can predict what it will be in a new domain; "
        "look for "
        "the cause, such as a different instrument or label definition."
    )
    harder = "but held-out domains are harder for kernel ridge regression,"
    uncertain = f"the generalization gap of ERM is uncertain, {span}, {harder}"
    size = uncertain if unclear else f"the generalization gap is {span}"
    return (
        f"Suggestion: {size} and {how}, so compare: {command} --algorithms {chosen}. On most shifts no "
        f"algorithm is reliably better than ERM (docs/evidence/comparisons.md)."
        f"{relation * ('relation' in found)}"
    )


def to_drop(result: Result) -> list[str]:
    """Columns to try without: those whose relation changes; else, with a gap, the one that differs most."""
    if "relation" in kinds(result) and (found := named(result, "changes")):
        flipping = [c for c in found if c["flips"]] or found
        return [str(c["name"]) for c in flipping[:3]]
    if gap_seen(result) and "inputs" in kinds(result):
        return [str(c["name"]) for c in named(result, "differs")[:1]]
    return []


def _limits(result: Result) -> list[str]:
    """What was looked at, and what it cannot show."""
    settings, small = result["settings"], result["too_small"]
    model = "a small network on fixed embeddings" if settings["embedded"] else "the model"
    lines = [
        f"Sampled: {result['examples']:,} of {result['examples_in_all']:,} examples in "
        f"{len(result['domains'])} domains, from all splits. Tests: {settings['tested']:,} examples, "
        f"{settings['regroupings']} permutations of the domains per test, one seed. ERM: "
        f"{settings['steps']:,} "
        f"steps per training run of {model}. p-values are corrected for {len(result['questions'])} tests "
        f"(Holm), so that without any shift, at most {settings['level']:.0%} of diagnoses report one."
    ]
    if result["reduced"]:
        lines.append(f"To meet the time budget: {'; '.join(result['reduced'])}.")
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


def figure(result: Result, title: str = "") -> Any:
    """Label shares, the probe's confusion, the generalization gap, and cosines of gradients."""
    names = [_short(d["name"]) for d in result["domains"]]
    below = math.ceil(len(result["domains"][0]["labels"]) / LEGEND) if _classes(result) else 0
    made: Any = _figure(12.5, max(6.8, 3.2 + 0.5 * len(names)) + 0.2 * below)
    if title:
        made.suptitle(_plain(clean(title)), fontsize=12)
    (labels, probe), (gap, cosines) = made.subplots(2, 2)
    _label_axes(labels, result, names)
    guessed = f"domain predicted from the inputs (chance {1 / len(names):.0%})"
    _matrix(probe, result["confusion"], names, guessed, "Blues", "{:.0%}")
    probe.set(xlabel="predicted", ylabel="domain")
    _gap_axes(gap, result)
    agreement = result["gradients"]["after training"]
    agree = f"gradient cosine similarity after training (mean {agreement['mean']:.2f})"
    _matrix(cosines, agreement["matrix"], names, agree, "RdBu", "{:.2f}")
    return made


LEGEND = 4
"""Classes per line of the legend."""
MOST = 12
"""Classes with a colour and a name each; the rest share one."""


def _classes(result: Result) -> list[str]:
    """The most frequent classes, which get colours of their own; none in regression."""
    if result["task"] == "regression":
        return []
    domains = result["domains"]
    classes = list(domains[0]["labels"])
    if len(classes) <= MOST:
        return classes
    often = sorted(classes, key=lambda c: -sum(d["labels"][c] for d in domains))[: MOST - 1]
    return [c for c in classes if c in often]


def _short(name: str) -> str:
    """Cut in the middle: names of one kind mostly differ at an end."""
    shown = clean(name)
    return _plain(shown if len(shown) <= 18 else f"{shown[:8]}…{shown[-9:]}")


def _label_axes(axes: Any, result: Result, names: Sequence[str]) -> None:
    places = np.arange(len(names))
    if result["task"] == "regression":
        means = [d["labels"]["mean"] for d in result["domains"]]
        spread = [d["labels"]["sd"] for d in result["domains"]]
        axes.errorbar(means, places, xerr=spread, fmt="o", color=COLOURS["Fish"], capsize=3)
        axes.set_title("labels: mean ± standard deviation", fontsize=10)
        axes.set(xlabel="label")
    else:
        colours = [*COLOURS.values(), *SPARE, "#b15928", "#a6cee3"]
        start, shown = np.zeros(len(names)), _classes(result)
        rows = [(_short(c), [100 * d["labels"][c] for d in result["domains"]]) for c in shown]
        if others := len(result["domains"][0]["labels"]) - len(shown):
            rest = [100 - sum(own) for own in zip(*(share for _, share in rows), strict=True)]
            rows.append((f"{others} others", rest))
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
        low, high = (scale * abs(row["gap"] - row[end]) for end in ("low", "high"))
        colour = "#444444" if place == len(rows) - 1 else COLOURS["Fish"]
        axes.errorbar(scale * row["gap"], place, xerr=[[low], [high]], fmt="o", color=colour, capsize=3)
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
