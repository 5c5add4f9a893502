"""The paper's figures and those of the page of claims, with matplotlib.

A function that ends in ``_axes`` draws one panel. Figures for files are composed of these; on the page each
panel is a figure of its own (:data:`PICTURES`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.paper.cdsprites import marks
from shoal.paper.tables import unit
from shoal.paper.tracking import SIDES, constants_of
from shoal.report import figures
from shoal.report.plots import COLOURS, SPARE, _figure, _plain, _tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shoal.paper.evidence.records import Sprites
    from shoal.paper.evidence.rules import Cell

Curves = Mapping[str, Sequence[tuple[Sequence[float], Sequence[float]]]]
"""Method → one (x, y) curve per seed."""
Accuracies = Mapping[str, Mapping[int, Sequence[float]]]
"""Method → N → one accuracy per seed."""
Marks = Sequence[tuple[str, int, float]]
"""The method, N and accuracy in percent of numbers the paper gives."""
Results = Sequence[Mapping[str, Any]]
GREY = "#888888"


def _colour(method: str, number: int) -> str:
    return COLOURS.get(method, SPARE[number % len(SPARE)])


def _legend_below(figure: Any, axes: Any, **options: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    options = {"ncols": len(labels), **options}
    figure.legend(handles, labels, frameon=False, loc="outside lower center", **options)


def accuracy_axes(axes: Any, curves: Curves, title: str) -> None:
    """Accuracy against passes: the mean over seeds, and every seed thin behind it."""
    for number, (method, runs) in enumerate(curves.items()):
        colour = _colour(method, number)
        for x, y in runs if len(runs) > 1 else []:
            axes.plot(x, [100 * v for v in y], color=colour, alpha=0.3, linewidth=0.8)
        length = min(len(y) for _, y in runs)
        mean = np.mean([y[:length] for _, y in runs], axis=0)
        axes.plot(runs[0][0][:length], 100 * mean, color=colour, linewidth=2, label=method)
    axes.axhline(50, color=GREY, linewidth=0.8, linestyle=":")
    axes.set(title=title, xlabel="forward–backward passes", ylabel="accuracy (%)", ylim=(40, 102))
    _tidy(axes)


def demo_figure(samples: Mapping[str, np.ndarray], train: Curves, test: Curves) -> Figure:
    """Images of every domain above; accuracy on the training domains and on the held-out one below."""
    figure: Any = _figure(9.5, 6.6)
    above, below = figure.subfigures(2, 1, height_ratios=(1.15, 1.3))
    samples_panel(above, samples)
    left, right = below.subplots(1, 2)
    accuracy_axes(left, train, "training domains")
    accuracy_axes(right, test, "held-out domain")
    _legend_below(below, right)
    return figure


def samples_panel(figure: Any, samples: Mapping[str, np.ndarray], columns: int = 6) -> None:
    """A strip of images, (n, h, w, 3) in [0, 1], for each domain."""
    rows = -(-len(samples) // columns)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, (name, images) in zip(grid.flat, samples.items(), strict=False):
        side = int(np.ceil(np.sqrt(len(images))))
        n, h, w, _ = images.shape
        tile = np.ones((side * (h + 1) - 1, side * (w + 1) - 1, 3))
        for i in range(n):
            r, c = divmod(i, side)
            tile[r * (h + 1) : r * (h + 1) + h, c * (w + 1) : c * (w + 1) + w] = images[i]
        axes.imshow(tile, interpolation="nearest")
        axes.set_title(_plain(name), fontsize=8, pad=3)


def samples_figure(samples: Mapping[str, np.ndarray]) -> Figure:
    figure = _figure(9.5, 1.75 * -(-len(samples) // 6))
    samples_panel(figure, samples)
    return figure


def domains_axes(axes: Any, results: Accuracies, printed: Marks, title: str) -> None:
    """Accuracy against N: mean over seeds with its standard deviation; crosses for the paper's numbers."""
    for number, (method, by_count) in enumerate(results.items()):
        offset = 0.4 * (number - (len(results) - 1) / 2)  # methods that agree would hide each other
        counts = sorted(by_count)
        means = [100 * np.mean(by_count[n]) for n in counts]
        spread = [100 * np.std(by_count[n], ddof=1) if len(by_count[n]) > 1 else 0 for n in counts]
        style: Any = {"color": _colour(method, number)}
        places = [n + offset for n in counts]
        axes.errorbar(places, means, spread, marker="o", markersize=5, capsize=3, label=method, **style)
        style |= {"markersize": 8, "markeredgewidth": 2, "clip_on": False}
        for name, n, value in printed:
            if name == method:
                axes.plot(n + offset, value, "x", **style)
    axes.axhline(50, color=GREY, linewidth=0.8, linestyle=":")
    axes.set(title=title, xlabel="number of training domains N", ylabel="accuracy (%)", ylim=(40, 103))
    _tidy(axes)


def cdsprites_figure(train: Accuracies, test: Accuracies, setting: str = "") -> Figure:
    """The paper's figure: train and test accuracy against N, with the paper's own numbers as crosses."""
    figure = _figure(9.5, 4.4)
    figure.suptitle(setting, fontsize=9)
    left, right = figure.subplots(1, 2)
    domains_axes(left, train, marks("train"), "training domains")
    domains_axes(right, test, marks("test"), "held-out domain")
    right.plot([], [], marker="x", linestyle="none", color="#444444", label="the paper")
    _legend_below(figure, right, ncols=4)
    return figure


def margin_axes(axes: Any, paths: Mapping[str, Any]) -> None:
    """Where w₁ + b falls below 0 the prediction leaves the invariant feature."""
    for number, (method, path) in enumerate(paths.items()):
        w = np.array(path["weights"])
        colour, label = _colour(method, number), figures.short(method, 32)
        axes.plot(path["steps"], w[:, 0] + w[:, 4], color=colour, linewidth=1.6, label=label)
    axes.axhline(0, color=figures.INK, linewidth=0.8)
    axes.set(title="above 0 the prediction is invariant", xlabel="step", ylabel="w₁ + b", xscale="log")
    _tidy(axes)


def linear_figure(paths: Mapping[str, Any], decay: float) -> Figure:
    """Paths through weight space in three dimensions, and test accuracy and w₁ + b along them."""
    figure = _figure(11, 4.4)
    grid = figure.add_gridspec(2, 2, width_ratios=(1.15, 1))
    space = figure.add_subplot(grid[:, 0], projection="3d")
    accuracy = figure.add_subplot(grid[0, 1])
    for number, (method, path) in enumerate(paths.items()):
        colour = _colour(method, number)
        w = np.vstack([np.zeros(5), np.array(path["weights"])])
        offset = 0.5 * (number - (len(paths) - 1) / 2)  # equal accuracies would hide each other
        space.plot(w[:, 1], w[:, 2], w[:, 0], color=colour, linewidth=1.8, label=method)
        space.scatter(*w[-1, [1, 2, 0]], color=colour, s=18)
        accuracy.plot(path["steps"], [100 * t + offset for t in path["test"]], color=colour, linewidth=1.4)
    space.set(xlabel="$w_2$ (domain 1 only)", ylabel="$w_3$ (domain 2 only)", zlabel="$w_1$ (invariant)")
    space.view_init(elev=25, azim=-60)
    space.set_title(f"weights, from zero (weight decay {decay:g})")
    _legend_below(figure, space, fontsize=8, ncols=4)
    accuracy.set(title="accuracy on the held-out domain", ylabel="%", ylim=(40, 100), xscale="log")
    accuracy.tick_params(labelbottom=False)
    _tidy(accuracy)
    margin_axes(figure.add_subplot(grid[1, 1], sharex=accuracy), paths)
    return figure


def theorem_axes(axes: Any, results: Results) -> None:
    """1 − cos against α on logarithmic axes, with the slope of 2 that the theorem implies."""
    for number, r in enumerate(results):
        label = f"S = {r['domains']}, slope {r['slope']:.3f}"
        style: Any = {"color": figures.PALETTE[number], "markersize": 3, "label": label}
        axes.loglog(r["alphas"], r["one_minus_cos"], "o-", **style)
    x = np.array(results[0]["alphas"])
    line = results[0]["one_minus_cos"][-1] / 3 * (x / x[-1]) ** 2
    axes.loglog(x, line, ":", color=figures.INK, linewidth=1, label="slope 2")
    axes.set(title="both axes logarithmic", xlabel="inner learning rate α", ylabel="1 − cos")
    _tidy(axes)


def theorem_figure(results: Results) -> Figure:
    figure = _figure(5.2, 4.0)
    axes = figure.subplots()
    theorem_axes(axes, results)
    axes.legend(frameon=False)
    return figure


def tracking_figure(results: Results, title: str) -> Figure:
    """Fish beside ERM, mean and standard deviation over seeds: how well gradients agree, and scores.

    Values before an update are dotted and those after it solid; a point is the mean over a fortieth of the
    training (of raw inner products the median, a few of which are huge). Dashed: a constant classifier.
    """
    figure = _figure(12, 4.0)
    left, middle, right = figure.subplots(1, 3)
    agreement_axes(left, results, "normalised")
    agreement_axes(middle, results, "raw")
    score_axes(right, results)
    left.set(title="cosine between domains' gradients", ylabel="normalised GIP")
    middle.set(title="inner product between them", ylabel="GIP")
    sizes = [abs(v) for r in results for side in SIDES for v in r[side]["after"]["raw"] if v]
    middle.set_yscale("symlog", linthresh=10 ** np.ceil(np.log10(np.quantile(sizes, 0.3))) if sizes else 1.0)
    middle.yaxis.get_major_locator().set_params(numticks=7)
    figure.suptitle(_plain(title))
    _legend_below(figure, left, fontsize=9, ncols=6)
    return figure


def agreement_axes(axes: Any, results: Results, kind: str) -> None:
    middle = np.nanmean if kind == "normalised" else np.nanmedian
    for side, method in SIDES.items():
        for when, line in (("before", ":"), ("after", "-")):
            curves = [_smooth(r["iterations"], r[side][when][kind], middle) for r in results]
            _band(axes, curves, COLOURS[method], line, f"{method}, {when} the update")
    _constant_lines(axes, results, kind, 1.0)
    axes.set(xlabel="iteration")
    _tidy(axes)


def score_axes(axes: Any, results: Results) -> None:
    metric = results[0]["scores"]["metric"]
    scale = 100.0 if "accuracy" in metric else 1.0
    for side, method in SIDES.items():
        curves = [(r["scores"]["iterations"], scale * _floats(r["scores"][side])) for r in results]
        _band(axes, curves, COLOURS[method], "-", method)
    _constant_lines(axes, results, "score", scale)
    label = f"{metric} (%)" if scale == 100 else metric
    axes.set(title="held-out domain", xlabel="iteration", ylabel=label)
    _tidy(axes)


def _constant_lines(axes: Any, results: Results, kind: str, scale: float) -> None:
    """What constant classifiers reach; the one that is wrong on purpose where cosines are drawn."""
    for (label, each), line in zip(constants_of(results).items(), ("--", "-."), strict=False):
        known = [c[kind] for c in each if c[kind] is not None]
        if known and (line == "--" or kind == "normalised"):
            level = scale * float(np.mean(known))
            axes.axhline(level, color=figures.PALETTE[7], linewidth=1.2, linestyle=line, label=label)


def _floats(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if v is None else v for v in values], dtype=float)


def _smooth(x: Sequence[int], y: Sequence[float | None], middle: Any) -> tuple[np.ndarray, np.ndarray]:
    """The middle of at least five values each, at the mean of their iterations; forty points at most."""
    parts = max(min(2, len(x)), min(40, len(x) // 5))
    values = np.array_split(_floats(y), parts)
    places = np.array([np.mean(part) for part in np.array_split(np.array(x, dtype=float), parts)])
    return places, np.array([middle(v) if np.isfinite(v).any() else np.nan for v in values])


def _band(axes: Any, curves: Sequence[tuple[Any, Any]], colour: str, line: str, label: str) -> None:
    """The mean over seeds, and within a standard deviation of it."""
    length = min(len(y) for _, y in curves)
    x, every = curves[0][0][:length], np.array([y[:length] for _, y in curves], dtype=float)
    mean = every.mean(0)
    axes.plot(x, mean, color=colour, linestyle=line, linewidth=1.8, label=label)
    if len(curves) > 1:
        spread = every.std(0, ddof=1)
        axes.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.13, linewidth=0)


# The page of claims

Pictures = list[tuple[Any, str]]
"""Figures with their titles."""


def _picture(draw: Callable[..., None], height: float, *content: Any, **axes_options: Any) -> Figure:
    """One panel in the page's style, its legend below."""
    with figures._style():
        figure, axes = figures._panel(height)
        draw(axes, *content)
        axes.set(**axes_options)
        for axis, scale in ((axes.xaxis, axes.get_xscale()), (axes.yaxis, axes.get_yscale())):
            if scale == "log":
                _plain_ticks(axis)
        if axes.get_legend_handles_labels()[1]:
            _legend_below(figure, axes, ncols=2)
    return figure


def _plain_ticks(axis: Any) -> None:
    """Powers of ten as text: mathematics does not survive on a page."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _linear(paths: Mapping[str, Any]) -> Pictures:
    some = dict(list(paths.items())[: figures.MOST])
    title = "the sum of the invariant weight and the bias, by step and method"
    return [(_picture(margin_axes, 3.4, some, ylim=(-1.2, 1.6)), title)]  # some begin far above


def _theorem(results: Results) -> Pictures:
    return [(_picture(theorem_axes, 3.0, results), "one minus the cosine, by the inner learning rate")]


def _sprites(sprites: Sprites, split: str) -> Pictures:
    series = {method: own for method in sprites.methods if (own := sprites.accuracies(method, split))}
    where = "training domains" if split == "train" else "the held-out domain"
    figure = _picture(domains_axes, 3.4, series, marks(split), f"{where}; ×: the paper") if series else None
    return [(figure, f"{split} accuracy by the number of domains and method")] if figure else []


def _cost(rows: Results) -> Pictures:
    """One for each network and way of running it."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        name = ", ".join(str(row[key]) for key in ("network", "how", "device") if row.get(key))
        groups.setdefault(name, []).append(row)

    def draw(axes: Any, name: str, own: Results) -> None:
        for place, row in enumerate(own):
            ratio = float(row["ratio_to_fish"])
            axes.barh(place, ratio, 0.7, color=figures.PALETTE[1 if "IDGM" in row["method"] else 0])
            axes.text(ratio, place, f" {ratio:.1f} ×", va="center", fontsize=8)
        axes.axvline(10, color=figures.INK, linestyle=":", linewidth=1)
        axes.set_yticks(range(len(own)), [figures.short(r["method"]) for r in own])
        axes.set(xlabel="steps of Fish; dotted: IDGM in the paper", ylim=(len(own) - 0.4, -0.6))
        axes.set_title(figures.short(name, 48))
        axes.margins(x=0.15)

    return [
        (_picture(draw, 1.1 + 0.25 * len(own), name, own), f"time of a step in Fish's, {name}")
        for name, own in groups.items()
    ]


def _tracking(by_dataset: Mapping[str, Results]) -> Pictures:
    result: Pictures = []
    for dataset, results in by_dataset.items():
        labels = {"title": figures.short(dataset), "ylabel": "normalised GIP (mean cosine)"}
        cosines = _picture(agreement_axes, 3.2, results, "normalised", **labels)
        result.append((cosines, f"mean cosine between domains' gradients on {dataset}"))
        scores = _picture(score_axes, 3.2, results, title=f"{figures.short(dataset)}, held-out domain")
        result.append((scores, f"score in the held-out domain of {dataset}, by iteration"))
    return result


def _dots(cells: Sequence[Cell]) -> Pictures:
    """One per dataset: ours as dots with a deviation, the paper's as crosses."""

    def draw(axes: Any, own: Sequence[Cell]) -> None:
        for place, cell in enumerate(own):
            if cell.values:
                spread = np.std(cell.values, ddof=1) if len(cell.values) > 1 else 0
                axes.errorbar(cell.mean, place, xerr=spread, fmt="o", color=figures.PALETTE[0], capsize=3)
            if cell.paper:
                axes.plot(cell.paper[0], place, "x", color=figures.PALETTE[1], markersize=7)
        axes.plot([], [], "o", color=figures.PALETTE[0], label="ours")
        axes.plot([], [], "x", color=figures.PALETTE[1], label="the paper")
        axes.set_yticks(range(len(own)), [figures.short(c.row) for c in own])
        axes.set(title=figures.short(own[0].dataset), xlabel=unit(own[0].metric))
        axes.set_ylim(len(own) - 0.4, -0.6)
        axes.grid(axis="x", color=figures.FAINT, linewidth=0.6)

    result: Pictures = []
    for dataset in dict.fromkeys(c.dataset for c in cells):
        if own := [c for c in cells if c.dataset == dataset and (c.values or c.paper)]:
            figure = _picture(draw, 1.2 + 0.24 * len(own), own)
            result.append((figure, f"{own[0].metric} on {dataset}, ours and the paper's"))
    return result


PICTURES: Mapping[str, Callable[[Any], Pictures]] = {
    "linear": _linear,
    "theorem": _theorem,
    "sprites_train": lambda sprites: _sprites(sprites, "train"),
    "sprites_test": lambda sprites: _sprites(sprites, "test"),
    "cost": _cost,
    "tracking": _tracking,
    "dots": _dots,
}
"""By the name that ``claims.yaml`` calls them."""
