"""The export formats. A format is a file of this package and a line in FORMATS."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from clawstream.export.row import ExportRow


class RowWriter(Protocol):
    """Writes rows into a directory. Its memory does not grow with the number of rows."""

    def write(self, row: ExportRow) -> str | None:
        """Write a row, or return the reason why the format cannot have it."""

    def close(self, provenance: str) -> None:
        """Complete the files. provenance: JSON, for the metadata of formats that have some."""


@dataclass(frozen=True, slots=True)
class Format:
    """One format.

    Attributes:
        writer: `module:class`, called with the directory.
        with_tokens: whether a row is a training sequence; else a conversation.
        help: one line for the command line.
    """

    writer: str
    with_tokens: bool
    help: str


_HERE = "clawstream.export.formats"
FORMATS: Mapping[str, Format] = {
    "jsonl": Format(f"{_HERE}.jsonl:JsonlWriter", False, "chat messages, one JSON line each"),
    "parquet": Format(f"{_HERE}.parquet:ParquetRowWriter", True, "training sequences"),
    "trl": Format(
        f"{_HERE}.trl:TrlWriter", True, "Parquet with TRL's columns of tokens and of chat"
    ),
}


def open_writer(name: str, directory: Path) -> RowWriter:
    """Return the writer of a format; imports its module only now."""
    module, _, attribute = FORMATS[name].writer.partition(":")
    made = getattr(importlib.import_module(module), attribute)(directory)
    return cast(RowWriter, made)
