"""The file `up.json` with the running processes: written at each change, retried on a full disk."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clawstream.runtime.atomic_file import is_full, write_durably
from clawstream.runtime.logs import logger

RETRY_S = 1.0


class ProcessTable:
    """Writes what `content` returns to `path` whenever it has changed.

    A full disk is logged once and waited out: processes are supervised without the file meanwhile.
    """

    def __init__(self, path: Path, content: Callable[[], Mapping[str, Any]]) -> None:
        self._path, self._content = path, content
        self._changed = asyncio.Event()
        self._full = False

    def changed(self) -> None:
        """Have it written by `keep`."""
        self._changed.set()

    async def keep(self) -> None:
        """Write each change, until cancelled. Raises OSError for anything but a full disk."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if not self.write():
                await asyncio.sleep(RETRY_S)
                self._changed.set()

    def write(self) -> bool:
        """Write the file now; False when the disk is full. Raises OSError for anything else."""
        try:
            write_durably(self._path, json.dumps(self._content(), indent=1).encode())
        except OSError as error:
            if not is_full(error):
                raise
            if not self._full:
                logger().error(
                    "disk_full",
                    path=str(self._path),
                    error=error.strerror,
                    action="make room; all goes on by itself",
                )
            self._full = True
        else:
            if self._full:
                logger().info("disk_has_room", path=str(self._path))
            self._full = False
        return not self._full


def read_table(directory: Path) -> Mapping[str, Any]:
    """Return what the directory's supervisor wrote last; empty when nothing is readable."""
    try:
        found = json.loads((directory / "up.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
