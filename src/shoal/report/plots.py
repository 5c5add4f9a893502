"""What figures with matplotlib share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# One colour per method wherever it appears; they differ also in grey and for colour-blind readers.
COLOURS = {"ERM": "#e69f00", "Fish": "#0072b2", "Fish, random grouping": "#56b4e9"}
COLOURS |= {"Reptile": "#009e73", "IDGM": "#d55e00"}
SPARE = ("#cc79a7", "#7f7f7f", "#5d3a9b", "#999933", "#882255")


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
