"""Read the batches of channel val: their rewards are validation, their payload is not needed."""

from __future__ import annotations

import time

from clawstream.runtime.kafka import (
    BEGINNING,
    READ_TIMEOUT_S,
    Cluster,
    Reader,
    Record,
    SourceTruncated,
    Unavailable,
)
from clawstream.runtime.logs import logger
from clawstream.runtime.topics.records import Decoder, decode_all
from clawstream.schemas.records import ReadyBatch
from clawstream.schemas.settings import Settings

POLL_S = 0.1
RECORDS = 500


class ValidationReader:
    """Reads the topic from its start, so nothing has to be stored: a restart reads it again."""

    def __init__(self, cluster: Cluster, settings: Settings, decoder: Decoder) -> None:
        self._decoder, self._run_id = decoder, settings.run_id
        topics = settings.kafka.topics
        self._topic = topics.ready_batches(settings.run_id, "val")
        self._group = f"{topics.prefix}-trainer.{settings.run_id}.val"
        self._cluster, self._reader = cluster, self._open(cluster)

    def _open(self, cluster: Cluster) -> Reader:
        return cluster.reader(self._group, {(self._topic, 0): BEGINNING})

    def read(self) -> list[ReadyBatch]:
        """Return the new batches up to the end of the topic; without new ones return at once.

        Of a topic that was recreated, all batches are new.

        Raises:
            Unavailable: no record arrives for 30 s before the end.
        """
        try:
            records = self._to_end()
        except SourceTruncated as e:
            logger().warning("validation_read_again", topic=self._topic, error=str(e))
            self._reader.close()
            self._reader = self._open(self._cluster)
            records = self._to_end()
        return [
            event
            for _, event in decode_all(self._decoder, records, self._unreadable)
            if isinstance(event, ReadyBatch) and event.run_id == self._run_id
        ]

    def _to_end(self) -> list[Record]:
        records, read_at = self._reader.poll(RECORDS, 0), time.monotonic()
        while not self._reader.at_end:
            more = self._reader.poll(RECORDS, POLL_S)
            records += more
            if more:
                read_at = time.monotonic()
            elif time.monotonic() - read_at > READ_TIMEOUT_S:
                raise Unavailable(f"{self._topic}: could not be read within {READ_TIMEOUT_S:g} s")
        return records

    def _unreadable(self, record: Record, reason: str, detail: str) -> None:
        # The lake writes the dead letter.
        logger().warning(
            "validation_batch_unreadable", offset=record.offset, reason=reason, detail=detail
        )

    def close(self) -> None:
        self._reader.close()
