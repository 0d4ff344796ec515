"""The watcher: one thread observes for all open pages and keeps the history of lag.

It observes all the time, because a consumer is judged by how its position moves, and a history that
begins with the first look would be empty when it is needed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator

from clawstream.inspector.live.changes import Changes
from clawstream.inspector.operations.history import History
from clawstream.inspector.operations.observation import Observation, Observe, samples_of
from clawstream.runtime.process.lifecycle import die

INTERVAL_S = 5.0


class Watcher:
    """The newest observation, the history, and the pages that wait for more.

    latest: None before the first observation.
    """

    def __init__(self, observe: Observe) -> None:
        self._observe = observe
        self._changes, self._stop = Changes(), threading.Event()
        self.latest: Observation | None = None
        self.history = History()

    def start(self) -> None:
        """Start the thread. Call it on the serving event loop."""
        self._changes.start()
        threading.Thread(target=self._run, name="operations", daemon=True).start()

    def stop(self) -> None:
        """End the thread and all waiting pages."""
        self._stop.set()
        self._changes.stop()

    @property
    def watching(self) -> int:
        """The number of pages that wait for an observation."""
        return self._changes.watching

    def changes(self) -> AsyncIterator[None]:
        """Yield at once, and after each observation; ends with the process."""
        return self._changes.each()

    def take(self, observation: Observation) -> None:
        """Show an observation, and keep its samples."""
        self.history.add(observation.at_s, samples_of(observation))
        self.latest = observation
        self._changes.tell()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                began_s = time.monotonic()
                self.take(self._observe())
                self._stop.wait(max(0.1, began_s + INTERVAL_S - time.monotonic()))
        except Exception as error:  # noqa: BLE001 - no page would be live again
            die(error)
        finally:
            self._observe.close()
