"""The log file of one process: opened at each start, rotated when large, searched for errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO

LOG_BYTES = 64 << 20
_TAIL_BYTES = 32 << 10
_ERROR_CHARS = 500


class ProcessLog:
    """`path`, and `path.1` for what was there before it became too large."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._from = 0

    def open(self) -> IO[bytes]:
        """Open the file for a new start of the process. Raises OSError."""
        if self.path.exists() and self.path.stat().st_size > LOG_BYTES:
            self.path.replace(self.path.with_name(self.path.name + ".1"))
        file = self.path.open("ab")
        self._from = file.tell()
        return file

    def last_error(self) -> str | None:
        """Return the last error that the process logged or printed since its start, or None."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(self._from, size - _TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return None
        for line in reversed(lines):
            if text := _error_of(line.strip()):
                return text[:_ERROR_CHARS]
        return None


def _error_of(line: str) -> str | None:
    try:
        record = json.loads(line)
    except ValueError:
        return line or None  # printed, not logged: a message for people, or the end of a traceback
    if not isinstance(record, dict):
        return line
    if record.get("level") not in ("error", "critical"):
        return None
    event, error = str(record.get("event", "")), record.get("error")
    return (
        str(error) if error and event == "process_died" else f"{event}: {error}" if error else event
    )
