"""A diagnosis in tables, in words and as a picture."""

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
ASKED = {
    "labels": "label shift",
    "inputs": "shift of the inputs",
    "inputs within labels": "shift of the inputs given the label",
    "columns": "shift of a single column",
    "relation": "change of P(label | inputs)",
    "held-out": "held-out domains harder than held-out examples",
    "gradients at the start": "conflicting gradients at the start",
    "gradients after training": "conflicting gradients after training",
}


def domains_table(result: Result) -> Table:
    """Sizes and labels."""
    labels = list(result["domains"][0]["labels"])
    shown = labels[:SHOWN]
    shares = result["task"] == "classification"
    found = Table(["domain", "examples", "sampled", *([f"label {n} %" for n in shown] if shares else labels)])
    for domain in result["domains"]:
        values = [domain["labels"][n] for n in shown]
        cells = [f"{100 * v:.1f}" for v in values] if shares else [f"{v:.4g}" for v in values]
        found.add(domain["name"], f"{domain['size']:,}", f"{domain['taken']:,}", *cells)
    return found


def questions_table(result: Result) -> Table:
    """Every test, with the mean and deviation of its statistic under the null hypothesis."""
    found = Table(["test for", "statistic", "under the null", "p", "p, corrected", "result"])
    for q in result["questions"]:
        untested = q["name"] == "relation" and not result["settings"]["relation_tested"]
        answer = "cannot tell" if untested else "significant" if q["alarm"] else "not significant"
        found.add(
            ASKED[q["name"]],
            f"{q['found']:.3f}",
            f"{q['chance']:.3f} ± {q['deviation']:.3f}",
            f"{q['p']:.3f}",
            f"{q['adjusted']:.3f}",
            answer,
        )
    return found


def columns_table(result: Result) -> Table | None:
    """The columns that differ between domains or whose relation to the label does, strongest first."""
    columns = named(result, "changes") + [c for c in named(result, "differs") if not c["changes"]]
    if not columns:
        return None
    found = Table(
        ["column", "variance between domains %", "p", "most different", "relation to the label", "p "]
    )
    for c in columns[:SHOWN]:
        relation = _relation_of(c) if c["changes"] else "no change seen"
        found.add(
            c["name"], f"{100 * c['share']:.1f}", f"{c['p']:.3f}", _how(c), relation, f"{c['relation_p']:.3f}"
        )
    return found


def named(result: Result, what: str) -> list[Mapping[str, Any]]:
    """The columns of which ``what`` (``changes`` or ``differs``) was found, strongest first."""
    strength = "relation_p" if what == "changes" else "p"
    return sorted((c for c in result["columns"] if c[what]), key=lambda c: (c[strength], -c["share"]))


def _how(column: Mapping[str, Any]) -> str:
    how = column["how"]
    part = f"{how['part']} " if how["part"] else "high value " if how["measure"] == "share" else ""
    if how["measure"] == "share":
        return f"{how['domain']}: {part}{how['there']:.0%}, elsewhere {how['elsewhere']:.0%}"
    if how["measure"] == "sd":
        return f"{how['domain']}: {part}spread {how['there']:.2f} SD, elsewhere {how['elsewhere']:.2f}"
    return f"{how['domain']}: {part}mean {how['there']:+.2f} SD, elsewhere {how['elsewhere']:+.2f}"


def _relation_of(column: Mapping[str, Any]) -> str:
    """Its correlation with the label in the two domains where it is lowest and highest."""
    each = column["correlations"]
    low, high = min(each, key=lambda d: each[d]), max(each, key=lambda d: each[d])
    label = f" with label {column['label']}" if column["label"] else ""
    what = "flips" if column["flips"] else "changes"
    return f"{what}: correlation{label} {each[low]:+.2f} in {low}, {each[high]:+.2f} in {high}"


def gaps_table(result: Result) -> Table:
    """ERM with each domain in training, and held out."""
    scale, what = _scale(result)
    digits = 1 if scale == 100 else 2
    found = Table(["domain", f"ERM {what}, in training", "held out", "gap", "95 % interval"])
    for row in [*result["gaps"], result["average"]]:
        inside, outside, gap, low, high = (scale * row[part] for part in _PARTS)
        found.add(
            row["name"],
            f"{inside:.{digits}f}",
            f"{outside:.{digits}f}",
            f"{gap:+.{digits}f}",
            f"{low:+.{digits}f} to {high:+.{digits}f}",
        )
    return found


_PARTS = ("in_domain", "held_out", "gap", "low", "high")


def _scale(result: Result) -> tuple[int, str]:
    return (100, "accuracy %") if result["task"] == "classification" else (1, "error")


def gap_seen(result: Result) -> bool:
    """Whether the interval of the average gap, as it is shown, lies above 0."""
    scale, _ = _scale(result)
    return bool(round(scale * result["average"]["low"], 1 if scale == 100 else 2) > 0)


def reading(result: Result, command: str = "shoal compare DATASET", without: str = "") -> list[str]:
    """What the numbers say, with p, and what to try.

    ``command`` compares algorithms on these data, ``without`` does so without the columns :func:`to_drop`.
    """
    lines = [_verdict(result), *_of_labels(result), *_of_inputs(result), *_of_columns(result)]
    lines += [*_of_relation(result), *_of_gap(result), *_of_gradients(result)]
    lines += [_advice(result, command), *_dropping(result, without), *_limits(result)]
    return [clean(line) for line in lines]


def _q(result: Result, name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(q for q in result["questions"] if q["name"] == name)
    return found


def _alarm(result: Result, name: str) -> bool:
    return any(q["alarm"] for q in result["questions"] if q["name"] == name)


def _sure(result: Result, name: str) -> str:
    q = _q(result, name)
    return f"p = {q['p']:.3f}, corrected {q['adjusted']:.3f}"


def kinds(result: Result) -> list[str]:
    """In what the domains were seen to differ.

    Other shares of labels alone change the inputs as a whole, every column, and P(y | x) as well. So where
    the shares differ, these count only if inputs of the same label differ too.
    """
    alarms = {q["name"] for q in result["questions"] if q["alarm"]}
    labels, within, relation = "labels" in alarms, "inputs within labels" in alarms, "relation" in alarms
    beyond = within or not labels
    inputs = bool(alarms & {"inputs", "columns"}) or (within and labels and not relation)
    found = ["labels"] * labels
    found += ["inputs"] * (beyond and inputs)
    found += ["relation"] * (beyond and relation)
    return found


KINDS = {
    "labels": "of labels",
    "inputs": "of inputs",
    "relation": "of the relation between inputs and labels",
}


def _verdict(result: Result) -> str:
    if found := kinds(result):
        return f"There is a shift: {', '.join(KINDS[kind] for kind in found)}."
    if result["alarms"]:
        return f"There is a shift, but of what kind cannot be told ({', '.join(result['alarms'])})."
    least = min(d["taken"] for d in result["domains"])
    if least < FEW:
        return (
            f"Cannot tell: no shift was seen, but the smallest domain has {least} examples, "
            "with which only large ones could be."
        )
    return "No shift was seen. A small one may still be there."


def _of_labels(result: Result) -> list[str]:
    how = _sure(result, "labels")
    if not _alarm(result, "labels"):
        return [f"Labels: no significant difference of their shares ({how})."]
    effects = result["effects"]
    kind = "tenths of the labels" if result["task"] == "regression" else "labels"
    return [
        f"Labels: the shares differ ({how}). The shares of {kind} in one domain are up to "
        f"{effects['total_variation']:.0%} (total variation) from those of all; Cramér's V is "
        f"{effects['cramers_v']:.2f}."
    ]


def _of_inputs(result: Result) -> list[str]:
    inputs, within = _q(result, "inputs"), _alarm(result, "inputs within labels")
    right = (
        f"balanced accuracy {inputs['found']:.0%}, by chance {inputs['chance']:.0%} ± "
        f"{inputs['deviation']:.0%} ({_sure(result, 'inputs')})"
    )
    if inputs["alarm"]:
        lines = [f"Inputs: a probe predicts the domain of held-out examples: {right}."]
    else:
        lines = [f"Inputs: a probe does not tell the domains apart: {right}. What it cannot see may differ."]
    how = _sure(result, "inputs within labels")
    if within:
        lines.append(f"Given the label, the inputs differ too ({how}): it is not label shift alone.")
    elif _alarm(result, "labels"):
        lines.append(f"Given the label, no difference was seen ({how}): label shift may be all there is.")
    return lines


def _of_columns(result: Result) -> list[str]:
    if not result["columns"]:
        return []
    how, count = _sure(result, "columns"), len(result["columns"])
    if not (found := named(result, "differs")):
        return [f"Columns: none of {count} was seen to differ between domains by itself ({how})."]
    some = "; ".join(f"{c['name']!r} ({_how(c)})" for c in found[:3])
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    verb = "differs" if len(found) == 1 else "differ"
    return [f"Columns: {len(found)} of {count} {verb} between domains ({how}), most of all {some}{more}."]


def _of_relation(result: Result) -> list[str]:
    overlap = result["effects"]["overlap"]
    if not result["settings"]["relation_tested"]:
        return [
            f"Relation: cannot tell whether P(label | inputs) changes. The domains hardly overlap: the "
            f"inputs reveal the domain of all but about {overlap:.0%} of the examples."
        ]
    how = _sure(result, "relation")
    little = (
        f" The domains hardly overlap (about {overlap:.0%} of the examples), so little could show it."
        if overlap < OVERLAP
        else ""
    )
    if not _alarm(result, "relation"):
        return [f"Relation: no significant change of P(label | inputs) between domains ({how}).{little}"]
    if "relation" not in kinds(result):
        return [f"Relation: P(label | inputs) differs ({how}), as it does under label shift alone."]
    beyond = ", by more than other shares of labels explain" if _alarm(result, "labels") else ""
    lines = [f"Relation: P(label | inputs) differs between domains{beyond} ({how}).{little}"]
    if found := named(result, "changes"):
        some = "; ".join(f"{c['name']!r} {_relation_of(c)} (p = {c['relation_p']:.3f})" for c in found[:3])
        more = f" And {len(found) - 3} more." if len(found) > 3 else ""
        lines.append(
            f"Columns whose relation to the label changes (p corrected for all columns): {some}.{more}"
        )
    elif result["columns"]:
        lines.append("No single column accounts for it.")
    return lines


def _span(result: Result, gap: Mapping[str, Any]) -> str:
    scale, _ = _scale(result)
    unit, digits = (" points", ".1f") if scale == 100 else ("", ".2f")
    size, low, high = (f"{round(scale * gap[k], 2) + 0.0:{digits}}" for k in ("gap", "low", "high"))
    return f"{size}{unit} (95 % interval {low} to {high})"


def _of_gap(result: Result) -> list[str]:
    average, q = result["average"], _q(result, "held-out")
    worst = max(result["gaps"], key=lambda g: g["gap"])
    seen = "" if gap_seen(result) else "not distinguishable from 0, "
    lines = [
        f"Generalization gap of ERM: {seen}{_span(result, average)} on average over held-out domains; "
        f"largest in {worst['name']!r}, {_span(result, worst)}."
    ]
    times = q["found"] / q["chance"] if q["chance"] > 0 else 1.0
    how = _sure(result, "held-out")
    if q["alarm"]:
        lines.append(
            f"The error of kernel ridge regression is {times:.3g} times as large on whole held-out domains "
            f"as on as many held-out examples from all domains ({how})."
        )
    else:
        lines.append(f"For kernel ridge regression, held-out domains are not significantly harder ({how}).")
    return lines


def _of_gradients(result: Result) -> list[str]:
    lines = []
    for when in ("at the start", "after training"):
        name, found = f"gradients {when}", result["gradients"][when]
        how = _sure(result, name)
        numbers = (
            f"mean cosine {found['mean']:.2f} between domains, {found['by_chance']:.2f} between random "
            f"groups; lowest pair {found['pair'][0]!r} and {found['pair'][1]!r} at {found['pair_cosine']:.2f}"
        )
        if not _alarm(result, name):
            says = f"not significantly less agreement than between random groups ({how})"
        elif found["conflicting"]:
            who = _listed([repr(d) for d in found["conflicting"]])
            says = f"less agreement with the others than by chance: {who} ({how})"
        else:
            says = f"less agreement than by chance, of no domain in particular ({how})"
        lines.append(f"Gradients {when}: {numbers}; {says}.")
    return lines


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _advice(result: Result, command: str) -> str:
    found, average = kinds(result), result["average"]
    scale, _ = _scale(result)
    gap = gap_seen(result) and average["gap"] > (LARGE if scale == 100 else 0)
    span = _span(result, average)
    if not result["alarms"] and not gap:
        return f"Try: plain ERM. If a new domain may be unlike these: {command} --algorithms erm vrex fish"
    if found == ["labels"]:
        known = (
            "rescale the predicted probabilities to the class shares of the new domain, or weight classes in "
            "the loss"
            if result["task"] == "classification"
            else "recalibrate the predictions to the level of the new domain"
        )
        return (
            f"Try: only the shares of labels were seen to differ, so {known}. Domain generalization does not "
            f"address this. To check plain ERM: {command} --algorithms erm"
        )
    unclear = not gap and _alarm(result, "held-out") and average["high"] > LARGE
    if not gap and not unclear:
        size = (
            "shows a generalization gap too small to matter"
            if average["high"] <= LARGE
            else "shows no generalization gap that could be told from 0, though a large one is not excluded"
        )
        return f"Try: plain ERM, which {size}: {span}. To check: {command} --algorithms erm coral vrex"
    conflicts = [w for w in ("at the start", "after training") if _alarm(result, f"gradients {w}")]
    how = (
        f"gradients conflict {' and '.join(conflicts)}" if conflicts else "no conflict of gradients was seen"
    )
    chosen = "erm fish fish:regrouped vrex coral" if conflicts else "erm coral vrex groupdro"
    relation = (
        " Where P(label | inputs) itself changes, no method knows what it will be in the next domain: find "
        "out why (another instrument, another definition of the label)."
        if "relation" in found
        else ""
    )
    size = (
        f"the generalization gap of ERM is uncertain, {span}, but held-out domains are harder for kernel "
        "ridge regression,"
        if unclear
        else f"the generalization gap is {span}"
    )
    return (
        f"Try: {size} and {how}: {command} --algorithms {chosen}. On ordinary "
        f"shifts nothing beats ERM reliably (docs/comparison.md), so compare first.{relation}"
    )


def to_drop(result: Result) -> list[str]:
    """Columns to try without: those whose relation changes; else, with a gap, the one that differs most."""
    if "relation" in kinds(result) and (found := named(result, "changes")):
        flipping = [c for c in found if c["flips"]] or found
        return [str(c["name"]) for c in flipping[:3]]
    if gap_seen(result) and "inputs" in kinds(result):
        return [str(c["name"]) for c in named(result, "differs")[:1]]
    return []


def _dropping(result: Result, without: str) -> list[str]:
    names = to_drop(result)
    if not names or len(names) == len(result["columns"]):
        return []
    listed = _listed([repr(n) for n in names])
    how = f": {without}" if without and result["table"] else ""
    return [f"Try also without {listed}{how}"]


def _limits(result: Result) -> list[str]:
    """What was looked at, and what it cannot show."""
    settings, small = result["settings"], result["too_small"]
    model = "a small network on a fixed embedding" if settings["embedded"] else "the model"
    lines = [
        f"Sampled: {result['examples']:,} of {result['examples_in_all']:,} examples in "
        f"{len(result['domains'])} domains, all splits together; tests on {settings['tested']:,} of them "
        f"with {settings['regroupings']} regroupings each, one seed; {settings['steps']:,} steps of ERM per "
        f"training of {model}. p is corrected for {len(result['questions'])} tests (Holm): without any "
        f"shift, at most {settings['level']:.0%} of diagnoses see one."
    ]
    if result["reduced"]:
        lines.append(f"To keep to the time budget: {'; '.join(result['reduced'])}.")
    if result["not_drawn"]:
        lines.append(f"{result['not_drawn']:,} more domains were not drawn; another seed draws others.")
    if small:
        names = ", ".join(f"{name} ({size})" for name, size in list(small.items())[:SHOWN])
        more = f" and {len(small) - SHOWN:,} more" if len(small) > SHOWN else ""
        lines.append(f"Too small to test (fewer than {settings['least']} examples): {names}{more}.")
    if result["overlapping"]:
        lines.append("Examples in several domains count in the smallest of them.")
    return lines


def text(result: Result, command: str = "shoal compare DATASET", without: str = "", width: int = 100) -> str:
    """Tables and reading for a terminal."""
    lines = [
        line
        for said in reading(result, command, without)
        for line in textwrap.wrap(said, width, initial_indent="- ", subsequent_indent="  ", **_WRAP)
    ]
    tables = [domains_table(result), questions_table(result), columns_table(result), gaps_table(result)]
    return "\n".join(["\n\n".join(t.text() for t in tables if t), "", *lines])


_WRAP: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def figure(result: Result, title: str = "") -> Any:
    """Label shares, the probe's confusion, the generalization gap, and cosines of gradients."""
    names = [_short(d["name"]) for d in result["domains"]]
    below = math.ceil(len(result["domains"][0]["labels"]) / LEGEND) if _classes(result) else 0
    made: Any = _figure(12.5, max(6.8, 3.2 + 0.5 * len(names)) + 0.2 * below)
    if title:
        made.suptitle(_plain(clean(title)), fontsize=12)
    (labels, probe), (gap, cosines) = made.subplots(2, 2)
    _label_axes(labels, result, names)
    chance = 1 / len(names)
    guessed = f"domain predicted by the probe (chance {chance:.0%})"
    _matrix(probe, result["confusion"], names, guessed, "Blues", (0, 1), "{:.0%}", ("predicted", "domain"))
    _gap_axes(gap, result)
    agreement = result["gradients"]["after training"]
    agree = f"cosines of gradients after training (mean {agreement['mean']:.2f})"
    _matrix(cosines, agreement["matrix"], names, agree, "RdBu", (-1, 1), "{:.2f}", ("", ""))
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
        axes.set_title("share of labels (%)", fontsize=10)
    sizes = [f"{name} ({d['size']:,})" for name, d in zip(names, result["domains"], strict=True)]
    axes.set_yticks(places, sizes)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def _gap_axes(axes: Any, result: Result) -> None:
    scale, what = _scale(result)
    rows = [*result["gaps"], result["average"]]
    for place, row in enumerate(rows):
        low, high = (scale * abs(row["gap"] - row[end]) for end in ("low", "high"))
        colour = "#444444" if place == len(rows) - 1 else COLOURS["Fish"]
        axes.errorbar(scale * row["gap"], place, xerr=[[low], [high]], fmt="o", color=colour, capsize=3)
    axes.axvline(0, color="#888888", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(rows)), [_short(row["name"]) for row in rows])
    unit = "points of accuracy" if scale == 100 else what
    axes.set_title("generalization gap of ERM (95 % intervals)", fontsize=10)
    axes.set(xlabel=f"{unit} lost in a held-out domain", ylim=(len(rows) - 0.5, -0.5))
    _tidy(axes)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)


def _matrix(
    axes: Any,
    values: Sequence[Sequence[float]],
    names: Sequence[str],
    title: str,
    colours: str,
    limits: tuple[float, float],
    form: str,
    sides: tuple[str, str],
) -> None:
    axes.imshow(np.array(values), cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto")
    turned = sum(map(len, names)) > 48
    axes.set_xticks(range(len(names)), names, rotation=30 * turned, ha="right" if turned else "center")
    axes.set_yticks(range(len(names)), names)
    axes.set_title(title, fontsize=10)
    axes.set(xlabel=sides[0], ylabel=sides[1])
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            dark = abs(value) > 0.5
            colour = "white" if dark else "#333333"
            axes.text(column, row, form.format(value), ha="center", va="center", fontsize=8, color=colour)
