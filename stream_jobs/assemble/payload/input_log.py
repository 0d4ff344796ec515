"""Read one partition of an input again: evicted payload, and records of dead letters. Blocking."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clawstream.runtime.kafka import Cluster, Record, SourceTruncated
from clawstream.runtime.topics.records import Decoder, reason_of
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.conversation import RecordedRequest
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.records import SessionEvent, Step
from clawstream.stream_jobs.assemble.handlers.rejected import RejectedRecord
from clawstream.stream_jobs.assemble.payload.cache import CachedPayload, payload_of
from clawstream.stream_jobs.assemble.payload.new_messages import new_messages
from clawstream.stream_jobs.assemble.payload.trainability import trainability


def decode_event(decoder: Decoder | Codec, record: Record) -> Any:
    """Decode a record, or return RejectedRecord. With a Codec no schema is looked up, so it
    never blocks.
    """
    try:
        return decoder.decode(record.value)
    except (Undecodable, UnknownSchema) as e:
        return RejectedRecord(reason_of(e), str(e))


GAP = 64
"""Longer gaps of offsets are skipped with a seek. A seek costs about 3 ms, as much as reading this
many records of 20 kB.
"""


@dataclass(frozen=True, slots=True)
class InputLog:
    """One partition of one input. new_messages_bytes: as in `Limits`."""

    cluster: Cluster
    decoder: Decoder
    topic: str
    partition: int
    new_messages_bytes: int = 0

    def payload(self, starts: Mapping[int, int]) -> Iterator[tuple[int, CachedPayload]]:
        """Yield available payload by offset, one record in memory at a time. starts: `start` of
        `payload_of` by offset.
        """
        for record in self.records(sorted(starts)):
            event = decode_event(self.decoder, record)
            if isinstance(event, Step):
                messages = new_messages(
                    RecordedRequest(event.request_json), self.new_messages_bytes
                )
                start = starts[record.offset]
                yield record.offset, payload_of(event, trainability(event), start, messages)
            elif isinstance(event, SessionEvent):
                yield record.offset, event.metadata_json or b""

    def records(self, wanted: Sequence[int]) -> Iterator[Record]:
        """Yield the records at sorted offsets; skips records that retention has removed or removes
        meanwhile.
        """
        last = -1
        while wanted:
            low, high = self.cluster.watermarks(self.topic, [self.partition])[self.partition]
            wanted = [offset for offset in wanted if low <= offset < high and offset > last]
            try:
                offsets = set(wanted)
                for record in self.cluster.read_ranges(self.topic, self.partition, _runs(wanted)):
                    last = record.offset
                    if last in offsets:
                        yield record
                return
            except SourceTruncated:
                now = self.cluster.watermarks(self.topic, [self.partition])[self.partition][0]
                if now <= low:
                    raise


def _runs(wanted: Sequence[int]) -> list[tuple[int, int]]:
    """Group offsets into (first, last) runs, split at long gaps."""
    runs: list[tuple[int, int]] = []
    for offset in wanted:
        if not runs or offset - runs[-1][1] > GAP:
            runs.append((offset, offset))
        runs[-1] = (runs[-1][0], offset)
    return runs
