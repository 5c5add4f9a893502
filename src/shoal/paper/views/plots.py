"""The paper's figures, with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.report.plots import COLOURS, SPARE, _figure, _plain, _tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curves = Mapping[str, Sequence[tuple[Sequence[float], Sequence[float]]]]
"""Method → one (x, y) curve a seed."""


def _colour(method: str, number: int) -> str:
    return COLOURS.get(method, SPARE[number % len(SPARE)])


def accuracy_axes(axes: Any, curves: Curves, title: str) -> None:
    """Accuracy against passes: the mean over seeds, and every seed thin behind it."""
    for number, (method, runs) in enumerate(curves.items()):
        colour = _colour(method, number)
        for x, y in runs if len(runs) > 1 else []:
            axes.plot(x, [100 * v for v in y], color=colour, alpha=0.3, linewidth=0.8)
        length = min(len(y) for _, y in runs)
        mean = np.mean([y[:length] for _, y in runs], axis=0)
        axes.plot(runs[0][0][:length], 100 * mean, color=colour, linewidth=2, label=method)
    axes.axhline(50, color="#888888", linewidth=0.8, linestyle=":")
    axes.set(title=title, xlabel="forward–backward passes", ylabel="accuracy (%)", ylim=(40, 102))
    _tidy(axes)


def demo_figure(samples: Mapping[str, np.ndarray], train: Curves, test: Curves) -> Figure:
    """Images of every domain above; accuracy on the training domains and on the unseen one below."""
    figure: Any = _figure(9.5, 6.6)
    above, below = figure.subfigures(2, 1, height_ratios=(1.15, 1.3))
    samples_panel(above, samples)
    left, right = below.subplots(1, 2)
    accuracy_axes(left, train, "domains it was trained on")
    accuracy_axes(right, test, "a domain it has never seen")
    handles, labels = right.get_legend_handles_labels()
    below.legend(handles, labels, frameon=False, loc="outside lower center", ncols=len(labels))
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
    rows = -(-len(samples) // 6)
    figure = _figure(9.5, 1.75 * rows)
    samples_panel(figure, samples)
    return figure


Said = tuple[str, int, float]
"""The method, N and accuracy in percent of a number the paper gives."""


def against_domains(
    results: Mapping[str, Mapping[int, Sequence[float]]], claims: Sequence[Said], title: str, axes: Any
) -> None:
    """Accuracy against N: mean over seeds with its standard deviation; crosses for the paper's numbers."""
    for number, (method, by_count) in enumerate(results.items()):
        beside = 0.4 * (number - (len(results) - 1) / 2)  # methods that agree would hide each other
        counts = sorted(by_count)
        means = [100 * np.mean(by_count[n]) for n in counts]
        spread = [100 * np.std(by_count[n], ddof=1) if len(by_count[n]) > 1 else 0 for n in counts]
        colour = _colour(method, number)
        places = [n + beside for n in counts]
        axes.errorbar(places, means, spread, color=colour, marker="o", markersize=5, capsize=3, label=method)
        said = [(n + beside, value) for name, n, value in claims if name == method]
        if said:
            axes.plot(
                *zip(*said, strict=True), "x", markersize=8, markeredgewidth=2, color=colour, clip_on=False
            )
    axes.axhline(50, color="#888888", linewidth=0.8, linestyle=":")
    axes.set(title=title, xlabel="number of training domains N", ylabel="accuracy (%)", ylim=(40, 103))
    _tidy(axes)


def cdsprites_figure(
    train: Mapping[str, Mapping[int, Sequence[float]]],
    test: Mapping[str, Mapping[int, Sequence[float]]],
    claims: Mapping[str, Sequence[Said]],
) -> Figure:
    """The paper's figure: train and test accuracy against N, with the paper's own numbers as crosses."""
    figure = _figure(9.5, 4.0)
    left, right = figure.subplots(1, 2)
    against_domains(train, claims["train"], "training domains", left)
    against_domains(test, claims["test"], "unseen domain", right)
    right.plot([], [], marker="x", linestyle="none", color="#444444", label="the paper")
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=len(labels))
    return figure


def linear_figure(paths: Mapping[str, Any], decay: float) -> Figure:
    """Paths through weight space in three dimensions, and test accuracy and w₁ + b along them."""
    figure = _figure(11, 4.4)
    grid = figure.add_gridspec(2, 2, width_ratios=(1.15, 1))
    space = figure.add_subplot(grid[:, 0], projection="3d")
    accuracy = figure.add_subplot(grid[0, 1])
    margin = figure.add_subplot(grid[1, 1], sharex=accuracy)
    for number, (method, path) in enumerate(paths.items()):
        colour = _colour(method, number)
        w = np.vstack([np.zeros(5), np.array(path["weights"])])
        beside = 0.5 * (number - (len(paths) - 1) / 2)  # equal accuracies would hide each other
        space.plot(w[:, 1], w[:, 2], w[:, 0], color=colour, linewidth=1.8, label=method)
        space.scatter(*w[-1, [1, 2, 0]], color=colour, s=18)
        accuracy.plot(path["steps"], [100 * t + beside for t in path["test"]], color=colour, linewidth=1.4)
        margin.plot(path["steps"], w[1:, 0] + w[1:, 4], color=colour, linewidth=1.6)
    space.set(xlabel="$w_2$ (domain 1 only)", ylabel="$w_3$ (domain 2 only)", zlabel="$w_1$ (invariant)")
    space.view_init(elev=25, azim=-60)
    space.set_title(f"weights, from zero (weight decay {decay:g})")
    handles, labels = space.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, loc="outside lower center", ncols=4)
    accuracy.set(title="accuracy on the unseen domain", ylabel="%", ylim=(40, 100), xscale="log")
    accuracy.tick_params(labelbottom=False)
    margin.axhline(0, color="#888888", linewidth=0.8)
    margin.set(title="above 0 the prediction is invariant", ylabel="$w_1 + b$", xlabel="step", xscale="log")
    for axes in (accuracy, margin):
        _tidy(axes)
    return figure


def theorem_figure(results: Sequence[Mapping[str, Any]]) -> Figure:
    """1 − cos against α on logarithmic axes, with the slope of 2 that the theorem implies."""
    figure = _figure(5.2, 4.0)
    axes = figure.subplots()
    for number, result in enumerate(results):
        label = f"S = {result['domains']}, slope {result['slope']:.2f}"
        colour = list(COLOURS.values())[number % len(COLOURS)]
        axes.loglog(result["alphas"], result["one_minus_cos"], "o-", color=colour, label=label)
    reference = np.array(results[0]["alphas"])
    start = results[0]["one_minus_cos"][-1] / 3
    axes.loglog(reference, start * (reference / reference[-1]) ** 2, "k:", linewidth=1, label="slope 2")
    axes.set(xlabel="inner learning rate α", ylabel="1 − cos(G$_f$, G$_g$)")
    axes.legend(frameon=False)
    _tidy(axes)
    return figure


def tracking_figure(results: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Fish beside ERM, mean and standard deviation over seeds: how well gradients agree, and scores.

    Values before an update are dotted and those after it solid; a point is the mean over a fortieth of the
    training (of raw inner products the median, a few of which are huge). Dashed: a constant classifier.
    """
    figure = _figure(12, 4.0)
    left, middle, right = figure.subplots(1, 3)
    for method, name in (("Fish", "fish"), ("ERM", "erm")):
        colour = COLOURS[method]
        for axes, kind, middle_of in ((left, "normalised", np.nanmean), (middle, "raw", np.nanmedian)):
            for when, line in (("before", ":"), ("after", "-")):
                curves = [_smooth(r["iterations"], r[name][when][kind], middle_of) for r in results]
                _band(axes, curves, colour, line, f"{method}, {when} the update")
        scores = [(r["scores"]["iterations"], _floats(r["scores"][name])) for r in results]
        metric = results[0]["scores"]["metric"]
        _band(right, [(x, y * _scale(metric)) for x, y in scores], colour, "-", None)
    for axes, key in ((left, "normalised"), (middle, "raw"), (right, "score")):
        known = [r["constant"][key] for r in results if r["constant"] and r["constant"][key] is not None]
        if known:
            level = float(np.mean(known)) * (_scale(metric) if axes is right else 1)
            label = "constant classifier" if axes is left else None
            axes.axhline(level, color="#555555", linewidth=1.2, linestyle="--", label=label)
        wrong = [r["constant"]["wrong"]["normalised"] for r in results if r["constant"]]
        if axes is left and wrong and None not in wrong:
            label = "constant and wrong"
            axes.axhline(float(np.mean(wrong)), color="#555555", linewidth=1.2, linestyle="-.", label=label)
        axes.set(xlabel="iteration")
        _tidy(axes)
    left.set(title="cosine between domains' gradients", ylabel="normalised GIP")
    middle.set(title="inner product between them", ylabel="GIP")
    middle.set_yscale("symlog", linthresh=_threshold(results))
    middle.yaxis.get_major_locator().set_params(numticks=7)
    unit = " (%)" if _scale(metric) == 100 else ""
    right.set(title="unseen domain", ylabel=f"{metric}{unit}")
    figure.suptitle(_plain(title))
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=9, loc="outside lower center", ncols=6)
    return figure


def _scale(metric: str) -> float:
    return 100.0 if "accuracy" in metric else 1.0


def _floats(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if v is None else v for v in values], dtype=float)


def _smooth(x: Sequence[int], y: Sequence[float | None], middle: Any) -> tuple[np.ndarray, np.ndarray]:
    """The middle of at least five values each, at the mean of their iterations; forty points at most."""
    parts = max(min(2, len(x)), min(40, len(x) // 5))
    values = np.array_split(_floats(y), parts)
    places = np.array([np.mean(part) for part in np.array_split(np.array(x, dtype=float), parts)])
    return places, np.array([middle(v) if np.isfinite(v).any() else np.nan for v in values])


def _band(axes: Any, curves: Sequence[tuple[Any, Any]], colour: str, line: str, label: str | None) -> None:
    """The mean over seeds, and within a standard deviation of it."""
    length = min(len(y) for _, y in curves)
    x, every = curves[0][0][:length], np.array([y[:length] for _, y in curves], dtype=float)
    mean = every.mean(0)
    axes.plot(x, mean, color=colour, linestyle=line, linewidth=1.8, label=label)
    if len(curves) > 1:
        spread = every.std(0, ddof=1)
        axes.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.13, linewidth=0)


def _threshold(results: Sequence[Mapping[str, Any]]) -> float:
    """Where the axis of raw inner products turns from linear to logarithmic: near the smaller of them."""
    sizes = [
        abs(v) for r in results for m in ("fish", "erm") for v in r[m]["after"]["raw"] if v not in (None, 0.0)
    ]
    return float(10 ** np.ceil(np.log10(np.quantile(sizes, 0.3)))) if sizes else 1.0
