"""Follow weights, reports of workers and dead letters: old versions, silence, open letters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from clawstream.ops.dead_letters.entries import RecordId
from clawstream.runtime.kafka import Cluster, KafkaError, Reader, SourceTruncated
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.codec.single_object import Event
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.records import DeadLetter, DeadLetterResolved, WeightVersion, WorkerStatus
from clawstream.schemas.settings import Settings

REPORTS = 500
"""Newest reports of workers that are read at the start."""
POLL_RECORDS = 500
FORGOTTEN_S = 3600.0
"""A worker that has been silent for longer is gone: its machine did not let it say so."""


class FollowedState:
    """What the events of the topics say. Pure."""

    def __init__(self, run_id: str) -> None:
        self._run = run_id
        self._indexes: dict[str, int] = {}
        self.newest: WeightVersion | None = None
        """The newest weight version of the run."""
        self._reports: dict[str, WorkerStatus] = {}
        self._letters: set[RecordId] = set()
        self._resolved: set[RecordId] = set()

    def fold(self, event: Event) -> None:
        """Apply an event. A letter stays resolved if it is written again."""
        match event:
            case WeightVersion() if event.run_id == self._run:
                self._indexes[event.version_id], self.newest = event.sync_index, event
            case WorkerStatus() if event.run_id == self._run:
                self._reports[event.worker_id] = event
            case DeadLetter() | DeadLetterResolved():
                letter = RecordId(event.topic, event.topic_id, event.partition, event.offset)
                (self._letters if isinstance(event, DeadLetter) else self._resolved).add(letter)

    def forget_worker(self, worker: str) -> None:
        """Remove a worker that has ended."""
        self._reports.pop(worker, None)

    def values(self, now_s: float) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """Yield the metrics.

        Args:
            now_s: Seconds since the epoch.
        """
        yield "clawstream_dead_letters_open", (), self.open_letters
        if self.newest is not None:
            yield "clawstream_newest_version", (), self.newest.sync_index
        for report, behind, age_s in self.workers(now_s):
            at, interval_s = (report.worker_id,), report.heartbeat_interval_ms / 1000
            yield "clawstream_worker_lag_versions", at, behind
            yield "clawstream_worker_heartbeat_age_seconds", at, age_s
            yield "clawstream_worker_heartbeat_interval_seconds", at, interval_s

    @property
    def open_letters(self) -> int:
        """Number of records with a dead letter that nobody has resolved."""
        return len(self._letters - self._resolved)

    def workers(self, now_s: float) -> Iterator[tuple[WorkerStatus, int, float]]:
        """Yield the last report of each worker, versions that it is behind, and its age in seconds.

        Args:
            now_s: Seconds since the epoch.
        """
        for report in self._reports.values():
            age_s = max(0.0, now_s - report.heartbeat_at / 1e6)
            if age_s <= FORGOTTEN_S:
                served = self._indexes.get(report.weight_version or "", 0)
                newest = served if self.newest is None else self.newest.sync_index
                yield report, max(0, newest - served), age_s


class TopicFollower:
    """Reads the topics from where the last poll ended."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster, self._run, self._topics = cluster, settings.run_id, settings.kafka.topics
        self._decoder = Decoder(cluster, self._topics.schemas)
        self._reader: Reader | None = None
        self._state = FollowedState(self._run)

    def poll(self) -> FollowedState:
        """Read what is new, and return the state. Raises KafkaError.

        After an error all is read again at the next poll: the rest of what was polled is lost.
        """
        try:
            self._read()
        except SourceTruncated:  # a topic was recreated
            self.close()
        except KafkaError:
            self.close()
            raise
        return self._state

    def close(self) -> None:
        """Release the client, and forget what was read."""
        if self._reader is not None:
            self._reader.close()
        self._reader, self._state = None, FollowedState(self._run)

    def _read(self) -> None:
        if self._reader is None:
            self._reader = self._open()
        while self._reader is not None and (records := self._reader.poll(POLL_RECORDS, 0.1)):
            for record in records:
                if record.value is None:
                    self._state.forget_worker((record.key or b"").decode(errors="replace"))
                    continue
                with suppress(Undecodable, UnknownSchema):
                    self._state.fold(self._decoder.decode(record.value))

    def _open(self) -> Reader | None:
        """Return a reader of the topics, or None while one does not exist."""
        weights, workers, letters = (
            self._topics.weights,
            self._topics.workers,
            self._topics.dead_letters,
        )
        if not {weights, workers, letters} <= self._cluster.topics().keys():
            return None
        low, end = self._cluster.watermarks(workers, [0])[0]
        start = {(t, 0): self._cluster.watermarks(t, [0])[0][0] for t in (weights, letters)}
        start[workers, 0] = max(low, end - REPORTS)
        return self._cluster.reader("clawstream-monitor", start)
