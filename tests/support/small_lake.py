"""A small lake on disk, written by the lake's own code: records in, tables out, no Kafka."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.lake.tables.catalog import catalog
from clawstream.stream_jobs.lake.tables.table import ConsumedRecord
from clawstream.stream_jobs.lake.writer import Lake

HEADERS = {"topic_id": b"TT", "partition": b"0", "first_offset": b"0", "last_offset": b"0"}


class SmallLake:
    """Append records as the lake writer does.

    Each topic id is a topic of one partition; the log timestamp of a record is `began_ms` + offset.
    """

    began_ms = 1000

    def __init__(self, settings: Settings, window: int = 1000) -> None:
        self.lake = Lake(settings.lake_uri, {}, window)
        self.lake.acquire()
        self.next: dict[str, int] = {}

    def put(
        self, name: str, topic_id: str, *records: Any, headers: Mapping[str, bytes] = HEADERS
    ) -> int:
        first = self.next.get(topic_id, 0)
        self.next[topic_id] = first + len(records)
        placed = [
            ConsumedRecord(topic_id, 0, first + i, self.began_ms + first + i, headers, r)
            for i, r in enumerate(records)
        ]
        rows = [row for p in placed for row in catalog()[name].rows_of(p)]
        return self.lake.append(
            name, rows, {(topic_id, 0): self.next[topic_id]}, reject=lambda *_: None
        )
