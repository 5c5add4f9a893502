"""The pictures of a report, each a small matplotlib figure; :func:`svg` makes one ready for a page.

They show themselves in a notebook:

>>> from shoal.report import figures
>>> figures.curves({"oslo": [([100, 200], [0.5, 0.7])]}, "accuracy").axes[0].get_ylabel()
'accuracy (%)'
"""

from __future__ import annotations

import io
import math
import re
import statistics
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np

from shoal.report.plots import _figure, _plain
from shoal.terminal import clean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT = "#222222", "#dddddd"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5d3a9b", "#7f7f7f")
"""They differ also in grey and for colour-blind readers; a page has others of its own for the dark."""
ON_PAGE = {INK: "currentColor", FAINT: "var(--line)"} | {c: f"var(--c{n})" for n, c in enumerate(PALETTE)}
WIDTH = 4.4
LONGEST = 24
"""Characters of a name in a picture."""
MOST = 8
"""Curves in a panel; beyond, the legend counts them."""
THIN = 5
"""Runs shown behind a mean."""
LINES = ("solid", "dashed")
STYLE: dict[Any, Any] = dict.fromkeys(
    ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK
) | {"axes.titlesize": 9.5, "axes.labelsize": 9, "font.size": 9, "legend.fontsize": 8}
STYLE |= {"svg.fonttype": "none", "svg.hashsalt": "shoal"}

Runs = Sequence[tuple[Sequence[float], Sequence[float | None]]]
"""One (steps, values) per run."""


def unit(metric: str | None) -> tuple[float, str]:
    """What to multiply values by, and what to call them: accuracies are shown in percent."""
    return (100.0, "accuracy (%)") if metric == "accuracy" else (1.0, metric or "score")


def short(name: object, longest: int = LONGEST) -> str:
    text = clean(str(name))
    return _plain(text if len(text) <= longest else text[: longest - 1] + "…")


def _style() -> Any:
    from matplotlib import rc_context

    return rc_context(STYLE)


def _panel(height: float) -> tuple[Figure, Any]:
    figure = _figure(WIDTH, height)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    return figure, axes


def curves(
    lines: Mapping[str, Runs],
    metric: str | None,
    title: str = "",
    dashed: Sequence[str] = (),
    limits: tuple[float, float] | None = None,
) -> Figure:
    """Plot one curve per name: the mean over its runs, and a few of the runs as thin lines.

    The mean extends as far as all runs do.

    Args:
        lines: runs of each name, as steps and values.
        metric: name of the metric.
        title: title of the figure.
        dashed: names of training domains, whose curves are dashed.
        limits: lowest and highest value to show.
    """
    scale, label = unit(metric)
    with _style():
        figure, axes = _panel(2.05 + 0.17 * -(-min(len(lines), MOST + 1) // 2))
        for number, name in enumerate(list(lines)[:MOST]):
            colour, style = PALETTE[number % len(PALETTE)], LINES[name in dashed]
            runs = [_finite(*run) for run in lines[name]]
            for steps, values in runs[:THIN] if len(runs) > 1 else []:
                axes.plot(steps, np.multiply(scale, values), color=colour, alpha=0.3, linewidth=0.7)
            steps, values = _mean(runs)
            look: dict[str, Any] = {"marker": "o" if len(steps) == 1 else None, "markersize": 4}
            look |= {"color": colour, "linestyle": style, "linewidth": 1.7, "label": short(name)}
            axes.plot(steps, np.multiply(scale, values), **look)
        if len(lines) > MOST:
            axes.plot([], [], color="none", label=f"… {len(lines) - MOST:,} more")
        axes.set(xlabel="step", ylabel=label)
        if limits is not None:
            axes.set_ylim(scale * limits[0], scale * limits[1])
        axes.set_title(short(title, 2 * LONGEST))
        axes.grid(axis="y", color=FAINT, linewidth=0.6)
        axes.locator_params(axis="x", nbins=5)
        if lines:
            figure.legend(frameon=False, loc="outside lower center", ncols=2)
    return figure


def _finite(steps: Sequence[float], values: Sequence[float | None]) -> tuple[list[float], list[float]]:
    known = [(s, v) for s, v in zip(steps, values, strict=True) if v is not None and math.isfinite(v)]
    return [s for s, _ in known], [v for _, v in known]


def _mean(runs: Sequence[tuple[list[float], list[float]]]) -> tuple[list[float], list[float]]:
    found = [dict(zip(*run, strict=True)) for run in runs]
    steps = [s for s in (found[0] if found else ()) if all(s in run for run in found)]
    return steps, [statistics.fmean(run[s] for run in found) for s in steps]


def matrix(names: Sequence[str], values: Sequence[Sequence[float | None]], title: str = "") -> Figure:
    """Plot a matrix of values between domains, from −1 (blue) over 0 (white) to 1 (red).

    With more than 10 domains, numbers are omitted; with more than 25, also names.

    Args:
        names: names of the domains.
        values: matrix of values; ``None`` if unknown.
        title: title of the figure.
    """
    with _style():
        size = len(names)
        figure, axes = _panel(WIDTH if size > 4 else 3.3)
        grid = np.array([[math.nan if v is None else v for v in row] for row in values], dtype=float)
        if size:
            axes.pcolormesh(grid, cmap="RdBu_r", vmin=-1, vmax=1, edgecolors="none", rasterized=size > 12)
        for (i, j), value in np.ndenumerate(grid) if size <= 10 else ():
            if math.isfinite(value):
                ink = "#ffffff" if abs(value) > 0.6 else "#111111"  # black would be left to the page
                look = {"ha": "center", "va": "center", "color": ink, "fontsize": 7.5}
                axes.text(j + 0.5, i + 0.5, f"{value:.2f}", **look)
        places = [n + 0.5 for n in range(size)]
        shown = [short(n) for n in names] if size <= 25 else [""] * size
        axes.set_xticks(places, shown, rotation=90 if size > 4 else 0)
        axes.set_yticks(places, shown)
        axes.set_ylim(size or 1, 0)
        figure.suptitle(title, fontsize=9.5)
        axes.tick_params(length=0)
    return figure


_LINKS = re.compile(r"url\(#([^)]+)\)")
_FONT = re.compile(r"font: ([^;]*?)(\d[\d.]*px) [^;]*")
_LONG = re.compile(r"-?\d+\.\d{2,}")
_DROPPED = ("metadata", "style")
_PLACES = ("d", "transform", "x", "y", "width", "height")


def svg(figure: Figure, title: str, name: str) -> str:
    """Convert a figure to an SVG element of a page: text remains text, and colours are those of the page.

    The SVG is parsed and written again, so that its content cannot be interpreted as markup.

    Args:
        figure: matplotlib figure.
        title: accessible title.
        name: prefix of the ids.
    """
    file = io.StringIO()
    with _style(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # signs that matplotlib's font lacks; a browser has others
        figure.savefig(file, format="svg", transparent=True)
    root = ElementTree.fromstring(file.getvalue())
    _bare(root)
    values = [value for e in root.iter() for value in e.attrib.values()]
    used = {link for value in values for link in _LINKS.findall(value)}
    used |= {value[1:] for value in values if value.startswith("#")}
    for element in root.iter():
        _adapt(element, used, name)
    for size in ("width", "height", "version"):
        root.attrib.pop(size, None)
    root.attrib |= {"role": "img", "aria-labelledby": f"{name}-title", "class": "plot"}
    heading = ElementTree.Element("title", {"id": f"{name}-title"})
    heading.text = clean(title)
    root.insert(0, heading)
    return ElementTree.tostring(root, encoding="unicode")


def _bare(element: ElementTree.Element) -> None:
    """Names without namespaces, as HTML takes them; without what only other programs read."""
    element.tag = element.tag.rpartition("}")[2]
    element.attrib = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
    if element.tag != "text":
        element.text = None
    element.tail = None
    for child in list(element):
        _bare(child)
        if child.tag in _DROPPED:
            element.remove(child)


def _adapt(element: ElementTree.Element, used: set[str], name: str) -> None:
    """Ids that are used, and begin with ``name``; the page's colours and font; short numbers."""
    own = element.attrib
    if own.get("id") not in used:
        own.pop("id", None)
    for key, value in own.items():
        if key == "id":
            value = f"{name}-{value}"
        elif key == "href" and value.startswith("#"):
            value = f"#{name}-{value[1:]}"
        elif key == "style":
            for colour, ours in ON_PAGE.items():
                value = value.replace(colour, ours)
            value = _FONT.sub(r"font-size: \2", value)
        elif key in _PLACES and "scale" not in value:
            value = " ".join(_LONG.sub(lambda m: f"{float(m[0]):.1f}", value).split())
        own[key] = _LINKS.sub(rf"url(#{name}-\1)", value)
    if element.tag == "text" and "fill" not in own.get("style", ""):
        own["style"] = "fill: currentColor; " + own.get("style", "")
