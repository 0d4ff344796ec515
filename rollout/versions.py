"""Select the version that an engine should serve, from a thread that follows `claw.weights`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from runtime.kafka import BEGINNING, Cluster, KafkaError, Record, SourceTruncated
from runtime.logs import logger
from runtime.process.lifecycle import on_loop
from runtime.topics.records import Decoder
from schemas.errors import Undecodable, UnknownSchema
from schemas.records import WeightVersion
from schemas.topics import Topics

RETRY_S = 0.5
DEFER_S = 10.0
KEPT_VERSIONS = 8
"""Versions kept in memory. When all of them are refused, the log is read again for older ones."""


class Versions:
    """The run's newest versions, in log order, those an engine refused, and those to be tried again
    later.

    Log order counts: after a resume of the trainer an index comes again under a higher attempt.
    now: seconds, of any clock that does not go back.
    """

    def __init__(self, run_id: str, now: Callable[[], float] = time.monotonic) -> None:
        self._run_id, self._now = run_id, now
        self._newest: list[WeightVersion] = []
        self._rejected: set[str] = set()
        self._later: dict[str, float] = {}
        self._dropped = False
        self.complete = False
        """Whether the log has been read to its end once: before that the newest version may be an
        old one.
        """

    def add(self, version: WeightVersion) -> None:
        """A version was published; one of another run is none of ours."""
        if version.run_id == self._run_id and version.version_id not in self._rejected:
            self._dropped |= len(self._newest) == KEPT_VERSIONS
            self._newest = [*self._newest, version][-KEPT_VERSIONS:]

    def reached_end(self) -> None:
        """The log has been read to its end."""
        self.complete = True

    def reset(self) -> None:
        """The log is read from its start again, or is another one: nothing that was heard holds."""
        self.restart()
        self._rejected, self._later = set(), {}

    def restart(self) -> None:
        """The same log is read from its start again: refused versions stay refused."""
        self._newest, self._dropped, self.complete = [], False, False

    def reject(self, version_id: str) -> None:
        """Do not try this version again."""
        self._rejected.add(version_id)
        self._newest = [version for version in self._newest if version.version_id != version_id]

    @property
    def exhausted(self) -> bool:
        """Whether every remembered version was refused and the log has older ones."""
        return self.complete and self._dropped and not self._newest

    def defer(self, version_id: str) -> None:
        """Try this version again in a while; an older one may do until then."""
        self._later[version_id] = self._now() + DEFER_S

    def next_retry_s(self) -> float | None:
        """Seconds until a version that was put off is wanted again; None: there is none."""
        known = {v.version_id for v in self._newest}
        self._later = {
            name: at for name, at in self._later.items() if name in known and at > self._now()
        }
        return min(self._later.values()) - self._now() if self._later else None

    def wanted(self, loaded: str | None) -> WeightVersion | None:
        """The newest version that is neither refused nor put off, unless it is loaded; None before
        the log has been read.
        """
        if not self.complete:
            return None
        bad = {name for name, at in self._later.items() if at > self._now()}
        good = next((v for v in reversed(self._newest) if v.version_id not in bad), None)
        return None if good is None or good.version_id == loaded else good


class WeightsFeed:
    """Follows `claw.weights` from its start and puts what it hears into `versions`; `updated` is
    set at each change.

    A thread, for the Kafka client blocks; a daemon, for while Kafka is away a call may last longer
    than a stop should. It keeps trying then: the engine serves on.
    """

    def __init__(
        self, cluster: Cluster, topics: Topics, versions: Versions, updated: asyncio.Event
    ) -> None:
        self._cluster, self._topics = cluster, topics
        self._versions, self._updated = versions, updated
        self._stop = threading.Event()

    def start(self) -> asyncio.Future[None]:
        """Begin, on the running event loop. The future ends only with what made the thread fail."""
        self._loop = asyncio.get_running_loop()
        failed: asyncio.Future[None] = self._loop.create_future()

        def body() -> None:
            try:
                self._keep_following()
            except Exception as error:  # noqa: BLE001 - handed to the event loop, which raises it
                self._on_loop(failed.set_exception, error)

        threading.Thread(target=body, name="weights", daemon=True).start()
        return failed

    def stop(self) -> None:
        """End, soon."""
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
            # It is read from its start again: until its end is reached the last version heard is an
            # old one.
            self._update(again)
            self._stop.wait(RETRY_S)

    def _follow(self) -> None:
        """Read until the end of the process, or until an older version than the remembered ones is
        needed.
        """
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
            logger().warning(
                "weight_version_unreadable", offset=record.offset, error=str(error)
            )  # the lake buries it
            return
        if isinstance(version, WeightVersion):
            self._update(lambda versions: versions.add(version))

    def _update(self, change: Callable[[Versions], None]) -> None:
        def update() -> None:
            change(self._versions)
            self._updated.set()

        self._on_loop(update)

    def _on_loop(self, call: Callable[..., object], *args: object) -> None:
        if not self._stop.is_set():
            on_loop(self._loop, call, *args)
