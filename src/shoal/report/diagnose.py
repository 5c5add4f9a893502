"""A diagnosis in tables, in words and as a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.report.plots import COLOURS, SPARE, _figure, _plain, _tidy
from shoal.report.tables import Table, _clean

Result = Mapping[str, Any]
FEW = 50
"""Below so many examples in a domain, only large differences can be seen."""
LARGE = 0.02
"""A price below this is small."""
SHOWN = 10
"""Classes, and domains too small, that are named."""
ASKED = {
    "labels": "do the shares of labels differ?",
    "inputs": "do the inputs differ?",
    "inputs within labels": "do the inputs of a label differ?",
    "relation": "does the label say more of the domain?",
    "unseen": "is a domain harder for not being seen?",
    "gradients at the start": "do the gradients disagree?",
    "gradients after training": "do they after a short training?",
}


def domains_table(result: Result) -> Table:
    """Sizes and labels."""
    labels = list(result["domains"][0]["labels"])
    shown = labels[:SHOWN]
    shares = result["task"] == "classification"
    found = Table(
        ["domain", "examples", "looked at", *([f"label {n} %" for n in shown] if shares else labels)]
    )
    for domain in result["domains"]:
        values = [domain["labels"][n] for n in shown]
        cells = [f"{100 * v:.1f}" for v in values] if shares else [f"{v:.4g}" for v in values]
        found.add(domain["name"], f"{domain['size']:,}", f"{domain['taken']:,}", *cells)
    return found


def questions_table(result: Result) -> Table:
    """Every test, with what chance would give."""
    found = Table(["question", "found", "by chance", "p", "p, corrected", "answer"])
    for q in result["questions"]:
        answer = "yes" if q["alarm"] else "not seen"
        found.add(
            ASKED[q["name"]],
            f"{q['found']:.3f}",
            f"{q['chance']:.3f} ± {q['deviation']:.3f}",
            f"{q['p']:.3f}",
            f"{q['adjusted']:.3f}",
            answer,
        )
    return found


def prices_table(result: Result) -> Table:
    """ERM in each domain, seen and unseen."""
    scale, what = _scale(result)
    digits = 1 if scale == 100 else 2
    found = Table(["domain", f"{what} if seen", "if unseen", "price", "95 % interval"])
    for row in [*result["prices"], result["average"]]:
        seen, unseen, price, low, high = (scale * row[part] for part in _PARTS)
        found.add(
            row["name"],
            f"{seen:.{digits}f}",
            f"{unseen:.{digits}f}",
            f"{price:+.{digits}f}",
            f"{low:+.{digits}f} to {high:+.{digits}f}",
        )
    return found


_PARTS = ("seen", "unseen", "price", "low", "high")


def _scale(result: Result) -> tuple[int, str]:
    return (100, "accuracy %") if result["task"] == "classification" else (1, "error")


def reading(result: Result, command: str = "shoal compare DATASET") -> list[str]:
    """What the numbers say, with how sure they are, and what to try; ``command`` compares algorithms here."""
    lines = [_verdict(result), *_of_labels(result), *_of_inputs(result), *_of_price(result)]
    lines += [*_of_gradients(result), _advice(result, command), *_limits(result)]
    return [_clean(line) for line in lines]


def _q(result: Result, name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(q for q in result["questions"] if q["name"] == name)
    return found


def _alarm(result: Result, name: str) -> bool:
    return bool(_q(result, name)["alarm"])


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
        return [f"Labels: no difference in their shares was seen ({how})."]
    effects = result["effects"]
    kind = "tenths of the labels" if result["task"] == "regression" else "labels"
    return [
        f"Labels: the shares differ ({how}). One domain has other {kind} than all together for "
        f"{effects['total_variation']:.0%} of its examples; Cramér's V is {effects['cramers_v']:.2f} of 1."
    ]


def _of_inputs(result: Result) -> list[str]:
    inputs, relation = _q(result, "inputs"), _q(result, "relation")
    within, labels = _alarm(result, "inputs within labels"), _alarm(result, "labels")
    right = (
        f"{inputs['found']:.0%} of cases, where chance gives {inputs['chance']:.0%} ± "
        f"{inputs['deviation']:.0%} "
        f"({_sure(result, 'inputs')})"
    )
    lines = []
    if inputs["alarm"]:
        lines.append(f"Inputs: a small probe names the domain of an example it has not seen in {right}.")
    else:
        lines.append(
            f"Inputs: a small probe does not tell the domains apart: it is right in {right}. What it cannot "
            "see, such as fine texture, may still differ."
        )
    how = _sure(result, "inputs within labels")
    if within:
        lines.append(
            f"Among examples of the same label inputs differ too ({how}): it is not only that some labels "
            "are more frequent."
        )
    elif labels:
        lines.append(
            f"Among examples of the same label no difference was seen ({how}): other shares of labels may be "
            "all there is."
        )
    if "relation" in kinds(result):
        gain = (
            f"knowing the label makes the probe {100 * relation['found']:.0f} points better "
            f"({_sure(result, 'relation')})"
            if relation["alarm"]
            else f"inputs of the same label differ ({how}), though inputs as a whole were not seen to"
        )
        lines.append(f"Relation: {gain}: the same input goes with other labels in other domains.")
    elif inputs["alarm"] and within:
        lines.append(
            f"Relation: that the same input goes with other labels elsewhere was not seen "
            f"({_sure(result, 'relation')}); where inputs hardly overlap, nothing could show it."
        )
    return lines


def _of_price(result: Result) -> list[str]:
    scale, _ = _scale(result)
    unit = " points" if scale == 100 else ""
    digits = ".1f" if scale == 100 else ".2f"
    average, q = result["average"], _q(result, "unseen")
    worst = max(result["prices"], key=lambda p: p["price"])

    def span(price: Mapping[str, Any]) -> str:
        low, high = scale * price["low"], scale * price["high"]
        return f"{scale * price['price']:{digits}}{unit} (95 % interval {low:{digits}} to {high:{digits}})"

    costs = "Being unseen costs ERM" if average["low"] > 0 else "That being unseen costs ERM is not certain:"
    lines = [f"{costs} {span(average)} on average over domains, most in {worst['name']!r}: {span(worst)}."]
    if q["alarm"]:
        more = q["found"] / q["chance"] - 1 if q["chance"] > 0 else 0.0
        lines.append(
            f"A quick learner errs {more:.0%} more without a whole domain than without as many random "
            f"examples ({_sure(result, 'unseen')})."
        )
    else:
        lines.append(
            "For a quick learner whole domains left out were not seen to be harder than random examples "
            f"({_sure(result, 'unseen')})."
        )
    return lines


def _of_gradients(result: Result) -> list[str]:
    lines = []
    for when in ("at the start", "after training"):
        q = _q(result, f"gradients {when}")
        says = "they agree less than chance allows" if q["alarm"] else "no conflict was seen"
        lines.append(
            f"Gradients {when}: mean cosine {q['found']:.2f} between domains, {q['chance']:.2f} ± "
            f"{q['deviation']:.2f} between random groups; {says} ({_sure(result, f'gradients {when}')})."
        )
    return lines


def _advice(result: Result, command: str) -> str:
    alarm = {q["name"]: q["alarm"] for q in result["questions"]}
    scale, _ = _scale(result)
    costs = alarm["unseen"] or result["average"]["low"] > (LARGE if scale == 100 else 0)
    conflict = alarm["gradients at the start"] or alarm["gradients after training"]
    if not result["alarms"] and not costs:
        return (
            f"Try: plain ERM. If a domain to come may be unlike these: {command} --algorithms erm vrex fish"
        )
    if kinds(result) == ["labels"]:
        return (
            "Try: reweighting, since only the shares of labels were seen to differ: "
            f"{command} --algorithms erm reweighted groupdro"
        )
    if not costs:
        return (
            "Try: plain ERM, which was not seen to lose by not having seen a domain. "
            f"To check: {command} --algorithms erm coral vrex"
        )
    when = " at the start" if not alarm["gradients after training"] else ""
    how = (
        f"and the domains' gradients disagree{when}"
        if conflict
        else "though no conflict of gradients was seen"
    )
    chosen = "erm fish fish:regrouped vrex coral" if conflict else "erm coral vrex groupdro"
    relation = (
        " Where the relation itself changes, no method knows what it will be in the next domain: find out "
        "why (another instrument, another definition of the label)."
        if "relation" in kinds(result)
        else ""
    )
    return (
        f"Try: an unseen domain costs something, {how}: {command} --algorithms {chosen}. On ordinary shifts "
        f"nothing beats ERM reliably (docs/comparison.md), so compare before you believe.{relation}"
    )


def _limits(result: Result) -> list[str]:
    """What was looked at, and what it cannot show."""
    settings, small = result["settings"], result["too_small"]
    lines = [
        f"Looked at: {result['examples']:,} of {result['examples_in_all']:,} examples in "
        f"{len(result['domains'])} domains, all splits together; one seed, trainings of "
        f"{settings['steps']:,} steps, {settings['regroupings']} random regroupings a question. p is "
        f"corrected for {len(result['questions'])} questions: without any shift, at most "
        f"{settings['level']:.0%} of diagnoses see one. The smallest p there can be is "
        f"{1 / (settings['regroupings'] + 1):.3f}."
    ]
    if result["left_aside"]:
        lines.append(f"{result['left_aside']:,} more domains were not drawn; another seed draws others.")
    if small:
        names = ", ".join(f"{name} ({size})" for name, size in list(small.items())[:SHOWN])
        more = f" and {len(small) - SHOWN:,} more" if len(small) > SHOWN else ""
        lines.append(f"Too small to judge (fewer than {settings['least']} examples): {names}{more}.")
    if result["overlapping"]:
        lines.append("Examples in several domains count in the smallest of them.")
    return lines


def text(result: Result, command: str = "shoal compare DATASET", width: int = 100) -> str:
    """Tables and reading for a terminal."""
    lines = [
        line
        for said in reading(result, command)
        for line in textwrap.wrap(said, width, initial_indent="- ", subsequent_indent="  ", **_WRAP)
    ]
    tables = [domains_table(result), questions_table(result), prices_table(result)]
    return "\n".join(["\n\n".join(t.text() for t in tables), "", *lines])


_WRAP: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def figure(result: Result, title: str = "") -> Any:
    """Label shares, the probe's confusion, the price of being unseen, and cosines of gradients."""
    names = [_short(d["name"]) for d in result["domains"]]
    made: Any = _figure(11, max(6.4, 3.2 + 0.45 * len(names)))
    if title:
        made.suptitle(_plain(_clean(title)), fontsize=12)
    (labels, probe), (price, cosines) = made.subplots(2, 2)
    _label_axes(labels, result, names)
    chance = 1 / len(names)
    guessed = f"which domain the probe takes it for (chance {chance:.0%})"
    _matrix(probe, result["confusion"], names, guessed, "Blues", (0, 1), "{:.0%}", ("taken for", "domain"))
    _price_axes(price, result, names)
    mean = _q(result, "gradients after training")["found"]
    agree = f"cosines of gradients after training (mean {mean:.2f})"
    _matrix(cosines, result["cosines"]["after training"], names, agree, "RdBu", (-1, 1), "{:.2f}", ("", ""))
    return made


def _short(name: str) -> str:
    clean = _clean(name)
    return _plain(clean if len(clean) <= 16 else clean[:15] + "…")


def _label_axes(axes: Any, result: Result, names: Sequence[str]) -> None:
    places = np.arange(len(names))
    if result["task"] == "regression":
        means = [d["labels"]["mean"] for d in result["domains"]]
        spread = [d["labels"]["sd"] for d in result["domains"]]
        axes.errorbar(means, places, xerr=spread, fmt="o", color=COLOURS["Fish"], capsize=3)
        axes.set_title("labels: mean ± standard deviation", fontsize=10)
        axes.set(xlabel="label")
    else:
        colours = [*COLOURS.values(), *SPARE]
        start, classes = np.zeros(len(names)), list(result["domains"][0]["labels"])
        for number, label in enumerate(classes):
            share = np.array([100 * d["labels"][label] for d in result["domains"]])
            colour = colours[number % len(colours)]
            axes.barh(places, share, left=start, color=colour, edgecolor="white", linewidth=0.5, label=label)
            start = start + share
        if len(classes) <= 10:
            above = {"loc": "lower center", "bbox_to_anchor": (0.5, 0.98)}
            axes.legend(frameon=False, fontsize=8, ncols=10, handlelength=1, columnspacing=1.2, **above)
        axes.set(xlabel="share of labels (%)", xlim=(0, 100))
        axes.set_title("labels", pad=22 if len(classes) <= 10 else 6, fontsize=10)
    sizes = [f"{name} ({d['size']:,})" for name, d in zip(names, result["domains"], strict=True)]
    axes.set_yticks(places, sizes)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def _price_axes(axes: Any, result: Result, names: Sequence[str]) -> None:
    scale, what = _scale(result)
    rows = [*result["prices"], result["average"]]
    for place, row in enumerate(rows):
        low, high = (scale * abs(row["price"] - row[end]) for end in ("low", "high"))
        colour = "#444444" if place == len(rows) - 1 else COLOURS["Fish"]
        axes.errorbar(scale * row["price"], place, xerr=[[low], [high]], fmt="o", color=colour, capsize=3)
    axes.axvline(0, color="#888888", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(rows)), [*names, "average"])
    unit = "points of accuracy" if scale == 100 else what
    axes.set_title("price of being unseen (95 % intervals)", fontsize=10)
    axes.set(xlabel=f"{unit} that ERM loses", ylim=(len(rows) - 0.5, -0.5))
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
