"""Figures from records, with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.terminal import clean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# One colour per method wherever it appears; chosen to differ also in grey and for colour-blind readers.
COLOURS = {"ERM": "#e69f00", "Fish": "#0072b2", "Fish, random grouping": "#56b4e9"}
COLOURS |= {"Reptile": "#009e73", "IDGM": "#d55e00"}
SPARE = ("#cc79a7", "#7f7f7f", "#5d3a9b", "#999933", "#882255")
SHAPES = ("o", "s", "^", "D", "v", "P", "X", "*")


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def save(figure: Figure, path: Path) -> list[Path]:
    """As PNG and as SVG, beside each other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = [path.with_suffix(".png"), path.with_suffix(".svg")]
    for file in found:
        figure.savefig(file, dpi=150)
    return found


def compare_figure(
    rows: Sequence[Mapping[str, Any]], metric: str, baseline: str | None, title: str, lower: bool
) -> Figure:
    """A row per algorithm, best on top: the average with its deviation, and every held-out domain in grey.

    The worst domain has a ring around it.

    ``lower`` says that the lower values of the metric are the better ones.
    """
    scale, unit = (100, " (%)") if metric == "accuracy" else (1, ", lower is better" if lower else "")
    domains = list(rows[0]["domains"]) if rows else []
    figure = _figure(7.5, 1.5 + 0.27 * max(3, len(rows)))
    axes = figure.subplots()
    if len(domains) > 1:
        axes.plot([], [], "o", color=COLOURS["Fish"], label="average")
    for number, name in enumerate(domains if len(domains) > 1 else []):
        means = [row["domains"][name]["mean"] for row in rows]
        x = [np.nan if mean is None else scale * mean for mean in means]
        few = len(domains) <= len(SHAPES)  # a shape for each; where there are many, the same tick for all
        mark, label = (
            (SHAPES[number], _plain(clean(name))) if few else ("|", None if number else "each domain")
        )
        axes.plot(x, range(len(rows)), mark, color="#a0a0a0", markersize=4, label=label)
    worst = {n: row["worst"]["mean"] for n, row in enumerate(rows) if len(domains) > 1 and row.get("worst")}
    if worst:
        x = [scale * mean for mean in worst.values()]
        axes.plot(x, list(worst), "o", color="#505050", mfc="none", markersize=8, label="worst domain")
    for place, row in enumerate(rows):
        mean = scale * row["average"]["mean"]
        spread = scale * row["average"]["sd"] if row["average"]["sd"] else None  # none where seeds agree
        colour = COLOURS["ERM" if row["algorithm"] == baseline else "Fish"]
        inside = "white" if row["rank"] is None else colour  # hollow: some of its trials have no score
        axes.errorbar(mean, place, xerr=spread, fmt="o", color=colour, mfc=inside, capsize=3, zorder=3)
        if row["algorithm"] == baseline:
            axes.axvline(mean, color=colour, linewidth=0.9, linestyle="--", zorder=1)
    if any(row["rank"] is None for row in rows):
        axes.plot([], [], "o", color=COLOURS["Fish"], mfc="white", label="not in all cases")
    axes.set_yticks(range(len(rows)), [_plain(row["algorithm"]) for row in rows])
    axes.set(title=_plain(title), xlabel=f"{metric} on a held-out domain{unit}", ylim=(len(rows) - 0.4, -0.6))
    _tidy(axes)
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, frameon=False, fontsize=8, loc="outside lower center", ncols=5)
    return figure


def _plain(text: str) -> str:
    """Text as it is: a dollar sign in a domain's name must not start mathematics."""
    return text.replace("$", r"\$")
