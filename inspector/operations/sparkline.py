"""A line of values as the path of an SVG, `WIDTH` wide and `HEIGHT` high. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

WIDTH, HEIGHT = 120, 20


def path_of(values: Sequence[float | None], least: float = 1.0) -> str:
    """Return the path: zero is at the bottom, the highest value at the top, None is a gap.

    Args:
        least: Smallest value at the top: lower ones stay low.
    """
    return " ".join(_words(values, least))


def _words(values: Sequence[float | None], least: float) -> Iterator[str]:
    top = max(least, *(v for v in values if v is not None), 0.0)
    is_open = False
    for index, value in enumerate(values):
        if value is None:
            is_open = False
            continue
        x = round(index * WIDTH / max(1, len(values) - 1), 1)
        y = round(1 + (HEIGHT - 2) * (1 - value / top), 1)
        yield f"{'L' if is_open else 'M'}{x:g},{y:g}"
        if not is_open and (index + 1 == len(values) or values[index + 1] is None):
            yield "h0.1"  # one value between gaps is a point
        is_open = True
