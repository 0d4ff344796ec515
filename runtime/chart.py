"""Draw line charts as a PNG. The only module that imports matplotlib, and only when it draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COLORS = ("#2a6fbb", "#d1495b", "#3a9d6e", "#8a5fbf")
COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a panel.

    Attributes:
        label: in the legend.
        points: x and y.
        errors: half the width of an interval around each y, or None for no bars.
        dots: draw points without a line.
    """

    label: str
    points: Sequence[tuple[float, float]]
    errors: Sequence[float] | None = None
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes. limits: lowest and highest y; None: those of the lines."""

    title: str
    lines: Sequence[Line]
    limits: tuple[float, float] | None = None


def draw(path: Path, panels: Sequence[Panel], xlabel: str) -> None:
    """Draw the panels in rows of three.

    Args:
        path: of the PNG.
        panels: at least one.
        xlabel: of every panel.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    size = (7, 4) if len(panels) == 1 else (4.2 * columns, 2.8 * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, dpi=120, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, panel in zip(axes.flat, panels, strict=False):
        for line, color in zip(panel.lines, COLORS, strict=False):
            x, y = zip(*line.points, strict=True) if line.points else ((), ())
            fmt = "o" if line.dots or len(x) == 1 else "-"
            axis.errorbar(x, y, yerr=line.errors, fmt=fmt, color=color, label=line.label, capsize=2)
        axis.set(title=panel.title, xlabel=xlabel)
        if panel.limits is not None:
            axis.set_ylim(panel.limits)
        axis.grid(alpha=0.3)
        if len(panel.lines) > 1:
            axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
