"""Format rows as a table of text: the one table printer of the command line.

It is not rich's, which fits a table to the terminal (80 columns in a pipe), cuts cells to do so,
and keeps all rows in memory. Commands are read by `grep` and `awk`, and `clawstream sql` streams.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice

WIDTH_ROWS = 1000
"""Rows that determine the column widths; later, wider cells break alignment."""


def text_table(
    head: Sequence[str], rows: Iterable[Sequence[object]], right: Collection[int] = ()
) -> str:
    """Return a table: a line with the names of the columns, then a line a row.

    right: Indexes of the columns to align right.
    """
    return "\n".join(table_lines(head, ([str(cell) for cell in row] for row in rows), right))


def table_lines(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Collection[int] = (),
    ruled: bool = False,
) -> Iterator[str]:
    """Yield the lines of a table as the rows arrive. ruled: With a line below the names."""
    remaining = iter(rows)
    first = list(islice(remaining, WIDTH_ROWS))
    widths = [max(map(len, column)) for column in zip(head, *first, strict=True)]
    aligned = [str.rjust if i in right else str.ljust for i in range(len(head))]
    rule = [["-" * width for width in widths]] if ruled else []
    for row in chain([head], rule, first, remaining):
        cells = (fit(cell, w) for fit, cell, w in zip(aligned, row, widths, strict=True))
        yield "  ".join(cells).rstrip()
