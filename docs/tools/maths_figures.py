"""Draws the figures of docs/guides/gradients.md: ``python docs/tools/maths_figures.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import Tensor

from shoal.gradients import gip, gradient
from shoal.optim import Fish
from shoal.paper.theorem import check_theorem

IMAGES = Path(__file__).parents[1] / "images"
INK, FAINT = "#222222", "#dddddd"
BLUE, ORANGE, GREEN = PALETTE = ("#0072b2", "#d55e00", "#009e73")
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.edgecolor": FAINT,
    "axes.titlesize": 10,
    "svg.hashsalt": "shoal",
}

# Two quadratic losses with minima at (3, ±1.5): they agree on the first coordinate and not on the second.
MINIMA = torch.tensor([[3.0, 1.5], [3.0, -1.5]])
STEEPNESS = torch.tensor([[1.0, 0.8], [1.0, 2.0]])
START = (0.0, 0.9)
RATE, META_LR = 0.3, 0.5


def loss(domain: int, theta: Tensor) -> Tensor:
    return 0.5 * (STEEPNESS[domain] * (theta - MINIMA[domain]) ** 2).sum()


def inner_loop(order: tuple[int, int]) -> list[Tensor]:
    """The weights before, during and after one inner loop of Fish, and after the interpolation."""
    theta = torch.tensor(START, requires_grad=True)
    fish = Fish(torch.optim.SGD([theta], RATE), inner_steps=2, meta_lr=META_LR)
    places = [theta.detach().clone()]
    for domain in order:
        fish.zero_grad()
        loss(domain, theta).backward()
        assert theta.grad is not None
        before = theta.detach() - RATE * theta.grad  # fish.step() ends with the interpolation
        fish.step()
        places.append(before)
    return [*places, theta.detach().clone()]


def contours(ax: Any) -> None:
    x, y = np.meshgrid(np.linspace(-1, 4, 120), np.linspace(-2.5, 2.5, 120))
    grid = torch.tensor(np.stack([x, y], -1), dtype=torch.float32)
    for domain, colour in enumerate((BLUE, ORANGE)):
        height = 0.5 * (STEEPNESS[domain] * (grid - MINIMA[domain]) ** 2).sum(-1)
        ax.contour(x, y, height, levels=[0.1, 0.6, 1.6, 3.2], colors=colour, linewidths=0.8, alpha=0.5)
        ax.plot(*MINIMA[domain], "x", color=colour)
        where = MINIMA[domain] + torch.tensor([0.12, 0.3 if domain == 0 else -0.45])
        ax.annotate(f"domain {domain + 1}", where.tolist(), color=colour, ha="center")
    ax.set(xlim=(-0.7, 4), ylim=(-2.4, 2.4), xticks=[], yticks=[])
    ax.set_aspect("equal")


def arrow(ax: Any, start: Tensor, end: Tensor, colour: str, **more: Any) -> None:
    style = {"arrowstyle": "-|>", "color": colour, "lw": 1.8, "shrinkA": 0, "shrinkB": 0, **more}
    ax.annotate("", end.tolist(), start.tolist(), arrowprops=style)


def draw_gradients(ax: Any, start: tuple[float, float], title: str) -> None:
    """The negative gradients of the two domains at ``start``, and their inner product."""
    contours(ax)
    theta = torch.tensor(start, requires_grad=True)
    found = [gradient(loss(domain, theta), [theta]) for domain in range(2)]
    for (g,), colour in zip(found, (BLUE, ORANGE), strict=True):
        arrow(ax, theta.detach(), theta.detach() - 0.45 * g, colour)
    ax.plot(*start, "o", color=INK, ms=5, zorder=5)
    ax.set_title(
        f"{title}: g₁·g₂ = {float(gip(found)):+.1f}, cosine {float(gip(found, normalize=True)):+.2f}"
    )


def draw_inner_loop(ax: Any) -> None:
    contours(ax)
    start, middle, end, blended = inner_loop((0, 1))
    arrow(ax, start, middle, BLUE)
    arrow(ax, middle, end, ORANGE)
    ax.plot(*torch.stack([start, end]).T, color=INK, lw=0.8, ls="dotted")
    arrow(ax, start, blended, GREEN, lw=2.4)
    for place, name, shift in ((start, "θ", (-0.3, 0.0)), (end, "θ̃", (0.15, -0.3))):
        ax.plot(*place, "o", color=INK, ms=5, zorder=5)
        ax.annotate(name, (place + torch.tensor(shift)).tolist(), fontsize=12)
    ax.annotate("ε(θ̃ − θ)", (blended + torch.tensor([-0.95, -0.55])).tolist(), color=GREEN)
    ax.set_title("one inner loop of Fish, then an interpolation")


def gradients_figure() -> Figure:
    figure = Figure(figsize=(10.4, 3.9), layout="constrained")
    axes = figure.subplots(1, 3)
    draw_gradients(axes[0], (-0.2, 0.2), "agreement")
    draw_gradients(axes[1], (2.7, 0.1), "conflict")
    draw_inner_loop(axes[2])
    return figure


def theorem_figure() -> Figure:
    figure = Figure(figsize=(5.2, 3.4), layout="constrained")
    ax = figure.subplots()
    for domains, colour in zip((2, 3, 4), PALETTE, strict=False):
        found = check_theorem(domains)
        label = f"S = {domains}, slope {found.slope:.3f}"
        ax.loglog(found.alphas, found.one_minus_cos, "o-", color=colour, ms=3, lw=1, label=label)
    ax.set(xlabel="α, the inner learning rate", ylabel=r"$1 - \cos(G_f, G_g)$")
    ax.grid(color=FAINT, lw=0.6)
    ax.legend(frameon=False)
    return figure


def main() -> None:
    for name, make in {"maths-gradients": gradients_figure, "maths-theorem": theorem_figure}.items():
        with rc_context(STYLE):
            make().savefig(IMAGES / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
