"""Follow the weights and the reports of workers: how many versions each worker is behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from runtime.kafka import Cluster, Reader, Record, SourceTruncated
from runtime.topics.records import Decoder
from schemas.errors import Undecodable, UnknownSchema
from schemas.records import WeightVersion, WorkerStatus
from schemas.settings import Settings

REPORTS = 500
"""Newest reports of workers that are read at the start."""
POLL_RECORDS = 500


class TopicFollower:
    """Reads both topics of a run, from where the last look ended."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster, self._run = cluster, settings.run_id
        self._weights, self._workers = settings.kafka.topics.weights, settings.kafka.topics.workers
        self._decoder = Decoder(cluster, settings.kafka.topics.schemas)
        self._reader: Reader | None = None
        self._indexes: dict[str, int] = {}
        self._newest: int | None = None
        self._reports: dict[str, WorkerStatus] = {}

    def look(self, now_s: float) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """Yield the metrics of versions and workers. Raises KafkaError.

        Args:
            now_s: Seconds since the epoch.
        """
        try:
            self._read()
        except SourceTruncated:  # recreated: read again from its start at the next look
            self.close()
        if self._newest is not None:
            yield "clawstream_newest_version", (), self._newest
        for worker, report in self._reports.items():
            served = self._indexes.get(report.weight_version or "", 0)
            behind = 0 if self._newest is None else max(0, self._newest - served)
            yield "clawstream_worker_lag_versions", (worker,), behind
            age_s = max(0.0, now_s - report.heartbeat_at / 1e6)
            yield "clawstream_worker_heartbeat_age_seconds", (worker,), age_s

    def close(self) -> None:
        """Release the client, and forget what was read."""
        if self._reader is not None:
            self._reader.close()
        self._reader, self._newest = None, None
        self._indexes, self._reports = {}, {}

    def _read(self) -> None:
        if self._reader is None:
            self._reader = self._open()
        while self._reader is not None and (records := self._reader.poll(POLL_RECORDS, 0.1)):
            for record in records:
                with suppress(Undecodable, UnknownSchema):
                    self._fold(record)

    def _open(self) -> Reader | None:
        """Return a reader of both topics, or None while one does not exist."""
        if not {self._weights, self._workers} <= self._cluster.topics().keys():
            return None
        low, end = self._cluster.watermarks(self._workers, [0])[0]
        first = self._cluster.watermarks(self._weights, [0])[0][0]
        start = {(self._weights, 0): first, (self._workers, 0): max(low, end - REPORTS)}
        return self._cluster.reader("clawstream-monitor", start)

    def _fold(self, record: Record) -> None:
        if record.value is None:  # of a worker that has ended
            self._reports.pop((record.key or b"").decode(), None)
            return
        event = self._decoder.decode(record.value)
        if isinstance(event, WeightVersion) and event.run_id == self._run:
            self._indexes[event.version_id] = self._newest = event.sync_index
        elif isinstance(event, WorkerStatus) and event.run_id == self._run:
            self._reports[event.worker_id] = event
