"""Training sequences as Parquet, with the provenance in the file's metadata."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from clawstream.export.formats.columns import PROVENANCE, SEQUENCE, BatchBuffer, sequence_values
from clawstream.export.row import ExportRow

FILE = "data.parquet"


class ParquetFile:
    """One Parquet file that grows by rows.

    Args:
        path: of the file.
        schema: of the rows.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")
        self.rows = BatchBuffer(schema, self._writer.write_batch)

    def close(self, provenance: str) -> None:
        """Write the remaining rows and the provenance."""
        self.rows.flush()
        self._writer.add_key_value_metadata({PROVENANCE: provenance})
        self._writer.close()


class ParquetRowWriter:
    """Writes `data.parquet` with the columns of SEQUENCE."""

    def __init__(self, directory: Path) -> None:
        self._file = ParquetFile(directory / FILE, SEQUENCE)

    def write(self, row: ExportRow) -> str | None:
        """Write one sequence."""
        self._file.rows.add(sequence_values(row))
        return None

    def close(self, provenance: str) -> None:
        """Complete the file."""
        self._file.close(provenance)
