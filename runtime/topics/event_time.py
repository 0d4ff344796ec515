"""Find where to start reading the candidates to know event time at an offset. Reads only."""

from __future__ import annotations

from clawstream.runtime.kafka import Cluster
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.errors import Undecodable, UnknownSchema

TICK_WINDOW = 64
"""Offsets per source partition that are searched first for its last Tick; doubled each time."""


def first_tick_needed(
    cluster: Cluster, decoder: Decoder, at: tuple[str, int], low: int, to: int, tickers: int
) -> int:
    """Return the lowest offset of the last Ticks before `to`, one per source partition.

    Source partitions without a Tick are ignored; without any Tick the result is `to`. Admission
    starts to read here and trimming removes the records below, so both must agree.

    Args:
        at: Topic and partition.
        low: The first offset of the partition.
        tickers: Number of source partitions.
    """
    last: dict[int, int] = {}
    start, window = to, TICK_WINDOW * max(1, tickers)
    while start > low and len(last) < tickers:
        stop, start = start, max(low, start - window)
        window *= 2
        found: dict[int, int] = {}
        for record in cluster.read_range(*at, start, stop - 1):
            if decoder.codec.is_tick(record.value):
                try:
                    tick = decoder.decode(record.value)
                except (Undecodable, UnknownSchema):
                    continue  # dead-lettered when it was folded
                if 0 <= tick.partition < tickers and tick.event_time is not None:
                    found[tick.partition] = record.offset
        last = found | last
    return min(last.values(), default=to)
