"""Write query results as a table, JSON, CSV or Parquet. Streams rows, keeps few of them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import chain, islice
from typing import Any, BinaryIO, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from clawstream.text_table import WIDTH_ROWS, table_lines

Format = Literal["table", "json", "csv", "parquet"]
MAX_CELL = 80
"""Maximum characters of a cell in a table; the other formats have all of it."""

Row = Sequence[Any]


def as_text(
    names: Sequence[str], rows: Iterable[Row], fmt: Literal["table", "json", "csv"] = "table"
) -> str:
    """Return rows as one text."""
    return "".join(_TEXT[fmt](names, rows))


def write(out: BinaryIO, schema: pa.Schema, batches: Iterable[pa.RecordBatch], fmt: Format) -> None:
    """Write a result as it arrives. Text ends with a newline."""
    if fmt == "parquet":
        _write_parquet(out, schema, batches)
        return
    for chunk in _TEXT[fmt](schema.names, rows_of(batches)):
        out.write(chunk.encode())
    out.write(b"\n")


def rows_of(batches: Iterable[pa.RecordBatch]) -> Iterator[Row]:
    """Yield rows as Python values: a map is a dict, an integer of any size an int."""
    for batch in batches:
        yield from zip(*map(_values, batch.columns), strict=True)


def _values(column: pa.Array) -> list[Any]:
    try:
        values: list[Any] = column.to_pylist(maps_as_pydicts="lossy")
    except (OverflowError, ValueError):
        return [_value(scalar) for scalar in column]
    if pa.types.is_decimal(column.type) and column.type.scale == 0:  # DuckDB's sums of integers
        return [None if v is None else int(v) for v in values]
    return values


def _value(scalar: pa.Scalar) -> Any:
    """Return a value; a time beyond those of Python, such as infinity, is text."""
    try:
        return scalar.as_py(maps_as_pydicts="lossy")
    except (OverflowError, ValueError):
        is_flat = not pa.types.is_nested(scalar.type)
        return scalar.cast(pa.string()).as_py() if is_flat else "<value out of range>"


def _table(names: Sequence[str], rows: Iterable[Row]) -> Iterator[str]:
    remaining, count = iter(rows), -2  # the names and the rule are no rows
    first = list(islice(remaining, WIDTH_ROWS))
    numbers = [
        i
        for i in range(len(names))
        if first and all(isinstance(row[i], int | float | None) for row in first)
    ]
    cells = ([_cell(value) for value in row] for row in chain(first, remaining))
    for line in table_lines(names, cells, numbers, ruled=True):
        count += 1
        yield line + "\n"
    yield f"({count} row{'' if count == 1 else 's'})"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    shown = f"{value:.6g}" if isinstance(value, float) else _nested(value)
    shown = " ".join(str(shown).split())
    return shown if len(shown) <= MAX_CELL else shown[: MAX_CELL - 1] + "…"


def _json(names: Sequence[str], rows: Iterable[Row]) -> Iterator[str]:
    before = "["
    for row in rows:
        yield before + _dumped(dict(zip(names, row, strict=True)))
        before = ", "
    yield "[]" if before == "[" else "]"


def _csv(names: Sequence[str], rows: Iterable[Row]) -> Iterator[str]:
    line_end = ""
    for row in chain([names], rows):
        out = io.StringIO()
        csv.writer(out, lineterminator="").writerow([_nested(v) for v in row])
        yield line_end + out.getvalue()
        line_end = "\n"


def _nested(value: Any) -> Any:
    """Encode lists, structs and maps as JSON, bytes as hexadecimal digits; keep other values."""
    if isinstance(value, list | dict):
        return _dumped(value)
    return value.hex() if isinstance(value, bytes) else value


def _dumped(value: Any) -> str:
    return json.dumps(value, default=_encode_other, ensure_ascii=False)


def _encode_other(value: Any) -> int | str:
    if isinstance(value, Decimal) and value.as_tuple().exponent == 0:
        return int(value)
    return value.hex() if isinstance(value, bytes) else str(value)


_TEXT: Mapping[str, Callable[[Sequence[str], Iterable[Row]], Iterator[str]]] = {
    "table": _table, "json": _json, "csv": _csv,
}  # fmt: skip


class _CountingPipe(io.RawIOBase):
    """A pipe that counts written bytes, the only position that a Parquet writer needs."""

    def __init__(self, out: BinaryIO) -> None:
        self._out, self._at = out, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._out.write(data)
        self._at += len(data)
        return len(data)

    def tell(self) -> int:
        return self._at


def _write_parquet(out: BinaryIO, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    with pq.ParquetWriter(
        pa.PythonFile(_CountingPipe(out), mode="w"), schema, compression="zstd"
    ) as writer:
        for batch in batches:
            writer.write_batch(batch)
