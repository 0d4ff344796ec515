"""The live tail: one reader for all open pages.

A thread reads `claw.steps` and `claw.candidates` from a little before their ends, and folds them
into `Recent`. Without a broker it looks at the lake instead. Every open page waits for the same
event, so another page costs one rendered text sent once more, and nothing elsewhere.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from clawstream.inspector.live.changes import Changes
from clawstream.inspector.live.recent import Recent, newest, with_rewards
from clawstream.inspector.queries.lake import Lake
from clawstream.inspector.queries.listing import open_rows, rewards_of, weights_of
from clawstream.runtime.kafka import Cluster, KafkaError, Reader
from clawstream.runtime.logs import logger
from clawstream.runtime.process.lifecycle import die
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.errors import ForeseenError, Undecodable, UnknownSchema
from clawstream.schemas.settings import Settings

LOOK_BACK = 100
"""Records of each partition that are read at the start."""
RETRY_S = 2.0
TICK_S = 1.0
"""An open trajectory is looked at once in this time for each page that shows it."""


class Live:
    """The newest trajectories and the pages that wait for more.

    Args:
        follow: reads records until the event is set, and calls the function with each decoded
            record and its log time in milliseconds; None: there is no broker.
    """

    def __init__(
        self,
        lake: Lake,
        follow: Callable[[Callable[[Any, int], None], threading.Event], None] | None = None,
    ) -> None:
        self._lake, self._follow = lake, follow
        self._recent, self._from_lake = Recent(), list[dict[str, Any]]()
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._changes = Changes()
        self._taken = 0
        self._shown: dict[str | None, tuple[int, list[dict[str, Any]]]] = {}
        self.source = "lake"

    def start(self) -> None:
        """Start the reader. Call it on the serving event loop."""
        self._changes.start()
        threading.Thread(target=self._run, name="live", daemon=True).start()

    def stop(self) -> None:
        """End the reader and all waiting pages."""
        self._stop.set()
        self._changes.stop()

    def rows(self, run_id: str | None = None, limit: int = 12) -> list[dict[str, Any]]:
        """Return the newest trajectories, of all runs or of one, newest first."""
        with self._lock:
            if self.source == "lake":
                return list(newest(self._from_lake, limit, run_id))
            number, rows = self._taken, self._recent.rows(limit, run_id)
            before = self._shown.get(run_id)
        if before is not None and before[0] == number:  # all open pages ask after each change
            return before[1]
        closed = [(row["run_id"], row["trajectory_id"]) for row in rows if row["outcome"]]
        try:
            found = with_rewards(rows, rewards_of(self._lake, closed), weights_of(self._lake))
        except ForeseenError:
            found = [row | {"reward": None} for row in rows]
        with self._lock:
            self._shown = {k: v for k, v in self._shown.items() if v[0] == number}
            self._shown[run_id] = number, found
        return found

    @property
    def watching(self) -> int:
        """The number of pages that wait for a change."""
        return self._changes.watching

    def changes(self) -> AsyncIterator[None]:
        """Yield at once, and after each change; ends with the process."""
        return self._changes.each()

    async def ticks(self) -> AsyncIterator[None]:
        """Yield each `TICK_S`; ends with the process."""
        while not self._stop.is_set():
            yield
            await asyncio.sleep(TICK_S)

    def take(self, event: Any, timestamp_ms: int) -> None:
        """Fold a record; called in the reader's thread."""
        with self._lock:
            if self.source == "lake":  # a reader begins before the end: what it told comes again
                self.source, self._recent = "Kafka", Recent()
            changed = self._recent.fold(event, timestamp_ms)
            self._taken += changed
        if changed:
            self._changes.tell()

    def _run(self) -> None:
        try:
            self._read()
        except Exception as error:  # noqa: BLE001 - no page would be live again
            die(error)

    def _read(self) -> None:
        while not self._stop.is_set():
            if self._follow is not None:
                try:
                    self._follow(self.take, self._stop)
                except KafkaError as error:
                    if self.source != "lake" or not self._from_lake:  # once
                        logger().info("live_without_kafka", error=str(error))
            self._look_at_lake()
            self._stop.wait(RETRY_S)

    def _look_at_lake(self) -> None:
        if self._from_lake and not self._changes.watching:
            return
        try:
            changed = self._lake.refresh()
            rows = open_rows(self._lake, 50) if changed or not self._from_lake else None
        except ForeseenError as error:
            logger().warning("lake_not_readable", error=str(error))
            return
        with self._lock:
            self.source = "lake"
            if rows is not None:
                self._from_lake = rows
        if rows:
            self._changes.tell()


class Follower:
    """Reads the topics for `Live`, and knows whether a broker answers."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster, self._topics = cluster, settings.kafka.topics
        self._connected = False

    def is_connected(self) -> bool:
        """Return whether a broker answered the last request."""
        return self._connected

    def __call__(self, take: Callable[[Any, int], None], stop: threading.Event) -> None:
        """Read until the event is set.

        Raises:
            KafkaError: no broker answers, or the topics do not exist.
        """
        topics = self._topics
        try:
            self._cluster.ask(RETRY_S)
            self._connected = True
            start: dict[tuple[str, int], int] = {}
            for topic in (topics.steps, topics.candidates):
                found = self._cluster.watermarks(topic)
                if not found:  # a reader without partitions would wait for ever
                    raise KafkaError(f"no topic {topic} yet: run `clawstream topics create`")
                start |= {(topic, p): max(low, end - LOOK_BACK) for p, (low, end) in found.items()}
            self._follow(self._cluster.reader(f"{topics.prefix}-inspector", start), take, stop)
        finally:
            self._connected = False

    def _follow(
        self, reader: Reader, take: Callable[[Any, int], None], stop: threading.Event
    ) -> None:
        decoder = Decoder(self._cluster, self._topics.schemas)
        try:
            while not stop.is_set():
                for record in reader.poll():
                    try:
                        take(decoder.decode(record.value), record.timestamp_ms)
                    except (Undecodable, UnknownSchema):
                        continue  # the topic's owner writes the dead letter
        finally:
            reader.close()
