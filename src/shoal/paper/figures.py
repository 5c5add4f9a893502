"""The paper's figures, with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.paper import read
from shoal.paper.columns import is_share, unit
from shoal.report.plots import COLOURS, SPARE, _figure, _plain, _tidy

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

GREY = "#888888"
SPLITS = {"train": "training domains", "test": "held-out domain"}


def _colour(method: str, number: int) -> str:
    return COLOURS.get(method, SPARE[number % len(SPARE)])


def _legend_below(figure: Any, axes: Any, ncols: int = 5) -> None:
    style: Any = {"frameon": False, "loc": "outside lower center", "ncols": ncols, "fontsize": 8}
    figure.legend(*axes.get_legend_handles_labels(), **style)


def _band(axes: Any, x: Any, y: np.ndarray, colour: str, label: str, line: str = "-") -> None:
    """The mean over seeds (columns), and within a standard deviation of it."""
    mean, spread = y.mean(1), y.std(1, ddof=1) if y.shape[1] > 1 else 0
    axes.plot(x, mean, color=colour, linestyle=line, linewidth=1.8, label=label)
    axes.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.13, linewidth=0)


def _accuracy_axes(axes: Any, title: str, xlabel: str) -> None:
    axes.axhline(50, color=GREY, linewidth=0.8, linestyle=":")
    axes.set(title=title, xlabel=xlabel, ylabel="accuracy (%)", ylim=(40, 103))
    _tidy(axes)


def demo_figure(samples: Mapping[str, np.ndarray], curves: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Images of every domain above; accuracy in training below: by panel and method one (x, y) per seed."""
    figure: Any = _figure(9.5, 6.6)
    above, below = figure.subfigures(2, 1, height_ratios=(1.15, 1.3))
    samples_panel(above, samples)
    for axes, (title, by_method) in zip(below.subplots(1, 2), curves.items(), strict=True):
        for number, (method, runs) in enumerate(by_method.items()):
            length = min(len(y) for _, y in runs)  # shorter where a run diverged
            accuracies = 100 * np.array([y[:length] for _, y in runs]).T
            _band(axes, runs[0][0][:length], accuracies, _colour(method, number), method)
        _accuracy_axes(axes, title, "forward–backward passes")
    _legend_below(below, axes)
    return figure


def samples_panel(figure: Any, samples: Mapping[str, np.ndarray]) -> None:
    """Nine images, (9, h, w, 3) in [0, 1], for each domain."""
    grid = figure.subplots(-(-len(samples) // 6), 6, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, (name, images) in zip(grid.flat, samples.items(), strict=False):
        framed = np.pad(images, ((0, 0), (0, 1), (0, 1), (0, 0)), constant_values=1)
        axes.imshow(np.vstack([np.hstack([*framed[i : i + 3]]) for i in (0, 3, 6)]), interpolation="nearest")
        axes.set_title(_plain(name), fontsize=8, pad=3)


def samples_figure(samples: Mapping[str, np.ndarray]) -> Figure:
    figure = _figure(9.5, 1.75 * -(-len(samples) // 6))
    samples_panel(figure, samples)
    return figure


def cdsprites_figure(panels: Mapping[str, Sequence[Mapping[str, Any]]], setting: str) -> Figure:
    """Accuracy against N: mean and standard deviation over seeds; crosses for the paper's numbers.

    ``panels`` are the columns of tables by split.
    """
    figure = _figure(9.5, 4.4)
    figure.suptitle(setting, fontsize=9)
    for axes, (split, title) in zip(figure.subplots(1, 2), SPLITS.items(), strict=True):
        methods = list(dict.fromkeys(row for entry in panels[split] for row in entry["ours"]))
        for number, method in enumerate(methods):
            offset = 0.4 * (number - (len(methods) - 1) / 2)  # methods that agree would hide each other
            own = {e["domains"]: e["ours"][method] for e in panels[split] if method in e["ours"]}
            counts = sorted(n for n, values in own.items() if values["mean"] is not None)
            means, spread = ([100 * (own[n][what] or 0) for n in counts] for what in ("mean", "sd"))
            colour, places = _colour(method, number), [n + offset for n in counts]
            axes.errorbar(places, means, spread, marker="o", capsize=3, label=method, color=colour)
            for claim in read("published/cdsprites.yaml"):
                if (claim["method"], claim["split"]) == (method, split) and claim["relation"] != "below":
                    place = claim["domains"] + offset
                    axes.plot(place, claim["value"], "x", color=colour, markersize=9, clip_on=False)
        _accuracy_axes(axes, title, "number of training domains N")
    axes.plot([], [], "x", color="#444444", label="the paper")
    _legend_below(figure, axes, 4)
    return figure


def linear_figure(paths: Mapping[str, Any], decay: float) -> Figure:
    """Accuracy on the held-out domain, and w₁ + b, step by step."""
    figure = _figure(9.5, 4.0)
    figure.suptitle(f"weight decay {decay:g}", fontsize=10)
    accuracy, margin = figure.subplots(1, 2)
    for number, (method, path) in enumerate(paths.items()):
        style: Any = {"color": _colour(method, number), "linewidth": 1.5, "label": method}
        offset = 0.5 * (number - (len(paths) - 1) / 2)  # equal accuracies would hide each other
        accuracy.plot(path["steps"], [100 * t + offset for t in path["test"]], **style)
        w = np.array(path["weights"])
        margin.plot(path["steps"], w[:, 0] + w[:, 4], **style)
    margin.axhline(0, color="black", linewidth=0.8)
    accuracy.set(title="accuracy on the held-out domain", ylabel="%", ylim=(40, 100))
    margin.set(title="above 0 the prediction is invariant", ylabel="w₁ + b")
    for axes in (accuracy, margin):
        axes.set(xlabel="step", xscale="log")
        _tidy(axes)
    _legend_below(figure, margin)
    return figure


def isometric_figure(panels: Mapping[float, Mapping[str, Any]]) -> Figure:
    """The paper's first figure: paths of ERM and IDGM through weight space in isometric projection.

    ``panels`` are paths by method, by weight decay. Dotted: shadows on the plane of the two spurious weights.
    """
    figure = _figure(9.5, 4.8)
    for place, (decay, paths) in enumerate(panels.items(), 1):
        space = figure.add_subplot(1, len(panels), place, projection="3d", proj_type="ortho")
        top = 1.1 * max(np.max(path["weights"]) for path in paths.values())
        for (method, path), lift in zip(paths.items(), (-0.12, 0.04), strict=True):
            x, y, z = np.vstack([np.zeros(5), np.array(path["weights"])])[:, [1, 2, 0]].T
            colour = COLOURS[method]
            space.plot(x, y, 0 * z, color=colour, linewidth=1.2, linestyle=":")
            space.plot(x, y, z, color=colour, linewidth=2.2, label=method)
            space.plot(2 * [x[-1]], 2 * [y[-1]], [0, z[-1]], color=GREY, linewidth=0.6)
            space.scatter(x[-1], y[-1], z[-1], color=colour, s=24)
            space.text(x[-1], y[-1], z[-1] + lift * top, f" {path['state']}", color=colour, fontsize=9)
        space.set(xlabel="$w_2$ (domain 1)", ylabel="$w_3$ (domain 2)", zlabel="$w_1$ (invariant)")
        space.set(xlim=(0, top), ylim=(0, top), zlim=(0, 0.8 * top))
        space.locator_params(nbins=5)
        space.view_init(elev=35.264, azim=-45)
        space.set_box_aspect((1, 1, 0.8), zoom=0.85)
        space.set_title(f"weight decay {decay:g}; train/test accuracy at the end", fontsize=10)
    _legend_below(figure, space)
    return figure


def theorem_figure(results: Sequence[Mapping[str, Any]]) -> Figure:
    """1 − cos against α on logarithmic axes; its slope by the theorem is 2."""
    figure = _figure(5.2, 4.0)
    axes = figure.subplots()
    for r in results:
        label = f"S = {r['domains']}, slope {r['slope']:.3f}"
        axes.loglog(r["alphas"], r["one_minus_cos"], "o-", markersize=3, label=label)
    axes.set(title="both axes logarithmic", xlabel="inner learning rate α", ylabel="1 − cos")
    _tidy(axes)
    axes.legend(frameon=False)
    return figure


def tracking_figure(
    measured: pandas.DataFrame,
    scores: pandas.DataFrame,
    constants: Mapping[str, Mapping[str, Any]],
    title: str,
    metric: str,
) -> Figure:
    """Fish beside ERM, mean and standard deviation over seeds: agreement of gradients, and scores.

    Values before an update are dotted and those after it solid, each the median over a fortieth of the
    training. Dashed: constant classifiers.
    """
    figure = _figure(12, 4.0)
    left, middle, right = figure.subplots(1, 3)
    for kind, axes in {"mean_cosine": left, "mean_inner_product": middle}.items():
        for (model, when), own in measured.groupby(["model", "when"], sort=False):
            values = own.pivot(index="iteration", columns="seed", values=kind)
            groups = values.groupby(np.arange(len(values)) * min(40, len(values)) // len(values))
            x = [values.index[rows].to_numpy().mean() for rows in groups.indices.values()]
            line = {"before": ":", "after": "-"}[when]
            _band(axes, x, groups.median().to_numpy(), COLOURS[model], f"{model}, {when} the update", line)
    scale = 100 if is_share(metric) else 1
    for model, own in scores.groupby("model", sort=False):
        values = scale * own.pivot(index="iteration", columns="seed", values="score")
        _band(right, values.index, values.to_numpy(), COLOURS[model], model)
    for (name, known), line in zip(constants.items(), ("--", "-."), strict=True):
        levels = [known["mean_cosine"], known["mean_inner_product"], scale * known["score"]]
        for axes, level in zip((left, middle, right) if line == "--" else (left,), levels, strict=False):
            axes.axhline(level, color=GREY, linewidth=1.2, linestyle=line, label=name)
    left.set(title="cosine between domains' gradients", ylabel="normalised GIP")
    middle.set(title="inner product between them", ylabel="GIP")
    right.set(title="held-out domain", ylabel=unit(metric))
    sizes = measured["mean_inner_product"].abs().replace(0, np.nan)
    middle.set_yscale("symlog", linthresh=10 ** np.ceil(np.log10(sizes.quantile(0.3))))
    middle.yaxis.get_major_locator().set_params(numticks=7)
    for axes in (left, middle, right):
        axes.set(xlabel="iteration")
        _tidy(axes)
    figure.suptitle(_plain(title))
    _legend_below(figure, left, 6)
    return figure
