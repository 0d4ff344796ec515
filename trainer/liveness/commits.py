"""The position of training on Kafka, for lag displays only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

from clawstream.runtime.kafka import NO_METADATA, Cluster, heartbeat
from clawstream.schemas.settings import Settings

HEARTBEAT_S = 5.0


class PositionCommits:
    """Commits the position of training in a thread of its own, so that the others may be busy.

    A changed position is committed at once. Every 5 s it is committed again, because a commit may
    be lost; with a heartbeat, while the work in hand goes on.
    """

    def __init__(self, cluster: Cluster, settings: Settings, goes_on: Callable[[], bool]) -> None:
        """Begin with the committed position.

        Args:
            goes_on: Whether there is work in hand, and within its time limits.
        """
        topics = settings.kafka.topics
        group = f"{topics.prefix}-trainer.{settings.run_id}.train"
        self._at = topics.ready_batches(settings.run_id, "train"), 0
        self._position = cluster.committed(group).get(self._at, 0)
        self._goes_on = goes_on
        self._reader = cluster.reader(group, {})
        self._wake, self._stopped = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="position-commits", daemon=True)
        self._thread.start()

    def move(self, position: int) -> None:
        """Commit another position soon: the next offset to train."""
        if position != self._position:
            self._position = position
            self._wake.set()

    def _run(self) -> None:
        while not self._stopped:
            metadata = heartbeat() if self._goes_on() else NO_METADATA
            self._reader.commit({self._at: self._position}, metadata)
            self._wake.wait(HEARTBEAT_S)
            self._wake.clear()
            self._reader.poll(1, 0)  # learns what became of the commits

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """End the thread and commit the last position; a trainer that failed may be fenced."""
        self._stopped = True
        self._wake.set()
        self._thread.join()
        if error is None:
            self._reader.commit({self._at: self._position})
        self._reader.close()
