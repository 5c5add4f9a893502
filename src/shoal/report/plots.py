"""Figures with matplotlib: what they share, and the figure of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.terminal import clean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# One colour per method wherever it appears; they differ also in grey and for colour-blind readers.
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


def _plain(text: str) -> str:
    """A dollar sign in a domain's name must not start mathematics."""
    return text.replace("$", r"\$")


def save(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as PNG and as SVG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_suffix(".png"), path.with_suffix(".svg")]
    for file in files:
        figure.savefig(file, dpi=150)
    return files


def compare_figure(
    rows: Sequence[Mapping[str, Any]], metric: str, baseline: str | None, title: str, lower: bool
) -> Figure:
    """A row per algorithm, best on top: the average with its deviation, and every held-out domain in grey.

    A ring marks the worst domain; a hollow dot is an average without some of the cases.
    """
    scale, unit = (100, " (%)") if metric == "accuracy" else (1, ", lower is better" if lower else "")
    domains = list(rows[0]["domains"]) if len(rows[0]["domains"]) > 1 else []
    figure = _figure(7.5, 1.5 + 0.27 * max(3, len(rows)))
    axes = figure.subplots()
    for number, name in enumerate(domains):
        means = [row["domains"][name]["mean"] for row in rows]
        x = [np.nan if mean is None else scale * mean for mean in means]
        mark, label = "|", "" if number else "each domain"
        if len(domains) <= len(SHAPES):
            mark, label = SHAPES[number], _plain(clean(name))
        axes.plot(x, range(len(rows)), mark, color="#a0a0a0", markersize=4, label=label or None)
    if domains and (worst := {n: row["worst"]["mean"] for n, row in enumerate(rows) if row.get("worst")}):
        ring: dict[str, Any] = {"color": "#505050", "mfc": "none", "markersize": 8, "label": "worst domain"}
        axes.plot([scale * mean for mean in worst.values()], list(worst), "o", **ring)
    for place, row in enumerate(rows):
        mean, deviation = scale * row["average"]["mean"], scale * (row["average"]["sd"] or 0.0)
        colour = COLOURS["ERM" if row["algorithm"] == baseline else "Fish"]
        dot: dict[str, Any] = {
            "color": colour,
            "mfc": "white" if row["rank"] is None else colour,
            "zorder": 3,
        }
        axes.errorbar(mean, place, xerr=deviation or None, fmt="o", capsize=3, **dot)
        if row["algorithm"] == baseline:
            axes.axvline(mean, color=colour, linewidth=0.9, linestyle="--", zorder=1)
    axes.set_yticks(range(len(rows)), [_plain(row["algorithm"]) for row in rows])
    axes.set(title=_plain(title), xlabel=f"{metric} on a held-out domain{unit}", ylim=(len(rows) - 0.4, -0.6))
    _tidy(axes)
    if domains:
        axes.plot([], [], "o", color=COLOURS["Fish"], label="average")
        figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=5)
    return figure
