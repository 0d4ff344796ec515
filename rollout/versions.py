"""Select the version that an engine should serve, from a thread that follows `claw.weights`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from clawstream.runtime.kafka import BEGINNING, Cluster, KafkaError, Record, SourceTruncated
from clawstream.runtime.logs import logger
from clawstream.runtime.process.lifecycle import on_loop
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.records import WeightVersion
from clawstream.schemas.topics import Topics

RETRY_S = 0.5
DEFER_S, DEFER_MAX_S = 10.0, 320.0
"""Seconds until a failed version is tried again: doubled at each failure, up to the maximum."""
KEPT_VERSIONS = 8
"""Versions kept in memory. If all of them are rejected, the log is read again for older ones."""


class Versions:
    """The run's newest versions in log order, without rejected ones; deferred ones are retried
    later.

    Log order counts: after a resume of the trainer a sync index repeats under a higher attempt.

    Attributes:
        complete: whether the log has been read to its end; before that the newest version may be
            old.
    """

    def __init__(self, run_id: str, now: Callable[[], float] = time.monotonic) -> None:
        """now: monotonic clock in seconds."""
        self._run_id, self._now = run_id, now
        self.reset()

    def reset(self) -> None:
        """Forget everything: the log is read again after an error, or is another log."""
        self._rejected: set[str] = set()
        self._failures: dict[str, int] = {}
        self._deferred_until: dict[str, float] = {}
        self.restart()

    def restart(self) -> None:
        """Prepare to read the same log from its start; rejected versions stay rejected."""
        self._newest: list[WeightVersion] = []
        self._dropped = self.complete = False

    def add(self, version: WeightVersion) -> None:
        """Add a published version. Versions of other runs are ignored."""
        if version.run_id == self._run_id and version.version_id not in self._rejected:
            self._dropped |= len(self._newest) == KEPT_VERSIONS
            self._newest = [*self._newest, version][-KEPT_VERSIONS:]

    def reached_end(self) -> None:
        """Record that the log was read to its end."""
        self.complete = True

    def reject(self, version_id: str) -> None:
        """Do not try this version again."""
        self._rejected.add(version_id)
        self._newest = [version for version in self._newest if version.version_id != version_id]

    @property
    def exhausted(self) -> bool:
        """Whether all kept versions were rejected and the log has older ones."""
        return self.complete and self._dropped and not self._newest

    def defer(self, version_id: str) -> None:
        """Retry this version later; an older one may serve until then."""
        failures = self._failures[version_id] = self._failures.get(version_id, 0) + 1
        self._deferred_until[version_id] = self._now() + min(
            DEFER_S * 2 ** (failures - 1), DEFER_MAX_S
        )

    def _wait_s(self, version: WeightVersion) -> float:
        """Return the seconds until a version is due; at most 0 if it is."""
        return self._deferred_until.get(version.version_id, 0.0) - self._now()

    def next_retry_s(self) -> float | None:
        """Return the seconds until a deferred version is due, or None."""
        return min((s for v in self._newest if (s := self._wait_s(v)) > 0), default=None)

    def wanted(self, loaded: str | None) -> WeightVersion | None:
        """Return the newest usable version unless it is loaded; None before the log was read."""
        if not self.complete:
            return None
        newest = next((v for v in reversed(self._newest) if self._wait_s(v) <= 0), None)
        return None if newest is None or newest.version_id == loaded else newest


class WeightsFeed:
    """Follow `claw.weights` from its start and add its versions to `versions`; set `updated` on
    change.

    Runs in a daemon thread, because the Kafka client blocks and may outlast a shutdown while Kafka
    is unavailable. It retries then; the engine keeps serving.
    """

    def __init__(
        self, cluster: Cluster, topics: Topics, versions: Versions, updated: asyncio.Event
    ) -> None:
        self._cluster, self._topics = cluster, topics
        self._versions, self._updated = versions, updated
        self._stop = threading.Event()

    def start(self) -> asyncio.Future[None]:
        """Start, on the running event loop. The future fails with the thread's error."""
        self._loop = asyncio.get_running_loop()
        failed: asyncio.Future[None] = self._loop.create_future()

        def body() -> None:
            try:
                self._keep_following()
            except Exception as error:  # noqa: BLE001 - passed to the event loop, which raises it
                if not self._stop.is_set():
                    on_loop(self._loop, failed.set_exception, error)

        threading.Thread(target=body, name="weights", daemon=True).start()
        return failed

    def stop(self) -> None:
        """Ask the thread to end."""
        self._stop.set()

    def _keep_following(self) -> None:
        while not self._stop.is_set():
            again = Versions.reset
            try:
                self._follow()
                again = Versions.restart
            except SourceTruncated as error:
                logger().warning("weights_topic_recreated", error=str(error))
            except KafkaError as error:
                logger().warning("weights_unreadable", error=str(error))
            # The log is read from its start again: until its end the newest known version is old.
            self._update(again)
            self._stop.wait(RETRY_S)

    def _follow(self) -> None:
        """Read until stopped, or until a version older than the kept ones is needed."""
        decoder = Decoder(self._cluster, self._topics.schemas)
        self._cluster.topic_id(self._topics.weights)  # raises while it does not exist
        reader = self._cluster.reader(
            f"{self._topics.prefix}-rollout", {(self._topics.weights, 0): BEGINNING}
        )
        reached_end = False
        try:
            while not self._stop.is_set() and not (reached_end and self._versions.exhausted):
                for record in reader.poll():
                    self._apply(decoder, record)
                if reader.at_end and not reached_end:
                    reached_end = True
                    self._update(Versions.reached_end)
        finally:
            reader.close()

    def _apply(self, decoder: Decoder, record: Record) -> None:
        try:
            version = decoder.decode(record.value)
        except (Undecodable, UnknownSchema) as error:
            # the lake writes the dead letter
            logger().warning("weight_version_unreadable", offset=record.offset, error=str(error))
            return
        if isinstance(version, WeightVersion):
            self._update(lambda versions: versions.add(version))

    def _update(self, change: Callable[[Versions], None]) -> None:
        def update() -> None:
            change(self._versions)
            self._updated.set()

        if not self._stop.is_set():
            on_loop(self._loop, update)
