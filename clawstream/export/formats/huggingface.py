"""A Hugging Face dataset as `Dataset.save_to_disk` writes it, for `datasets.load_from_disk`.

The directory has Arrow stream files, `state.json` with their names, and `dataset_info.json`. The
features are not stated: `datasets` derives them from the Arrow schema, whose names for list types
differ between its releases.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa

from clawstream.export.formats.columns import SEQUENCE, BatchBuffer, sequence_values
from clawstream.export.row import ExportRow

MAX_FILE_BYTES = 500 << 20
"""Size after which a new file begins; `datasets` uses the same limit by default."""


class DatasetWriter:
    """Writes a dataset with the columns of SEQUENCE."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: list[str] = []
        self._rows = BatchBuffer(SEQUENCE, self._write_batch)
        self._sink: pa.NativeFile | None = None
        self._stream: pa.RecordBatchStreamWriter | None = None

    def write(self, row: ExportRow) -> str | None:
        """Write one sequence."""
        self._rows.add(sequence_values(row))
        return None

    def close(self, provenance: str) -> None:
        """Complete the files. The description of the dataset has the provenance."""
        self._rows.flush()
        self._end_file()
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in self._files],
            "_fingerprint": sha256(provenance.encode()).hexdigest()[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        info = {"citation": "", "description": provenance, "homepage": "", "license": ""}
        for name, content in (("state.json", state), ("dataset_info.json", info)):
            (self._directory / name).write_text(json.dumps(content, indent=2))

    def _write_batch(self, batch: pa.RecordBatch) -> None:
        if self._sink is None or self._stream is None:
            self._files.append(f"data-{len(self._files):05}.arrow")
            self._sink = pa.OSFile(str(self._directory / self._files[-1]), "wb")
            self._stream = pa.ipc.new_stream(self._sink, SEQUENCE)
        self._stream.write_batch(batch)
        if self._sink.tell() > MAX_FILE_BYTES:
            self._end_file()

    def _end_file(self) -> None:
        if self._stream is not None and self._sink is not None:
            self._stream.close()
            self._sink.close()
        self._stream = self._sink = None
