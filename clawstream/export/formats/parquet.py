"""Training sequences as Parquet, with the provenance in the file's metadata."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from clawstream.export.formats.columns import SEQUENCE, Values, sequence_values
from clawstream.export.row import ExportRow

FILE = "data.parquet"
BATCH_ROWS = 64
"""Rows of a record batch. A batch is in memory; sequences are long."""
PROVENANCE = "clawstream.provenance"
"""Name of the metadata that has the provenance as JSON."""


class ParquetFile:
    """One Parquet file that grows by rows.

    Args:
        path: of the file.
        schema: of the rows.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema, self._rows = schema, list[Values]()
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")

    def add(self, row: Values) -> None:
        """Add a row; a full record batch is written."""
        self._rows.append(row)
        if len(self._rows) >= BATCH_ROWS:
            self._write()

    def close(self, provenance: str) -> None:
        """Write the remaining rows and the provenance."""
        if self._rows:
            self._write()
        self._writer.add_key_value_metadata({PROVENANCE: provenance})
        self._writer.close()

    def _write(self) -> None:
        self._writer.write_batch(_batch(self._schema, self._rows))
        self._rows = []


class ParquetRowWriter:
    """Writes `data.parquet` with the columns of SEQUENCE."""

    def __init__(self, directory: Path) -> None:
        self._file = ParquetFile(directory / FILE, SEQUENCE)

    def write(self, row: ExportRow) -> str | None:
        """Write one sequence."""
        self._file.add(sequence_values(row))
        return None

    def close(self, provenance: str) -> None:
        """Complete the file."""
        self._file.close(provenance)


def _batch(schema: pa.Schema, rows: Sequence[Values]) -> pa.RecordBatch:
    columns = [_column([row[field.name] for row in rows], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Return a column; lists of numbers may be numpy or Arrow arrays."""
    if not any(isinstance(value, np.ndarray | pa.Array) for value in values):
        return pa.array(values, kind)
    items = [pa.array(value, kind.value_type) for value in values]
    offsets = np.cumsum([0, *map(len, items)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.concat_arrays(items), type=kind)
