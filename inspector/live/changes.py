"""Wake all open pages after a change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from clawstream.runtime.process.lifecycle import on_loop

PAUSE_S = 0.25
"""Shortest time between two updates of a page."""


class Changes:
    """The pages that wait for a change. watching: their number."""

    def __init__(self) -> None:
        self._changed, self._stopped = asyncio.Event(), False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.watching = 0

    def start(self) -> None:
        """Take the serving event loop: call it there."""
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """End all waiting pages. Call it on the event loop."""
        self._stopped = True
        self._changed.set()

    def tell(self) -> None:
        """Wake the pages, from any thread."""
        if self._loop is not None:
            on_loop(self._loop, self._wake)

    async def each(self) -> AsyncIterator[None]:
        """Yield at once, and after each change; ends with the process."""
        self.watching += 1
        try:
            while not self._stopped:
                changed = self._changed
                yield
                await changed.wait()
                await asyncio.sleep(PAUSE_S)
        finally:
            self.watching -= 1

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
