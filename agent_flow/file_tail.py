"""Read the end of a file that a child process wrote."""

from __future__ import annotations

from pathlib import Path


def tail(path: Path, size: int) -> str:
    """Return the last `size` bytes of a file as text; what is no UTF-8 is replaced."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace")
