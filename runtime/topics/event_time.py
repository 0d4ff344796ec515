"""How far before a record of the candidates one has to read to know event time there. Reads only."""

from __future__ import annotations

from runtime.kafka import Cluster
from runtime.topics.records import Decoder
from schemas.errors import Undecodable, UnknownSchema

TICK_WINDOW = 64
"""Offsets for each source partition that are looked through first for its last Tick; each time twice as many."""


def first_tick_needed(
    cluster: Cluster, decoder: Decoder, at: tuple[str, int], low: int, to: int, tickers: int
) -> int:
    """Lowest offset of the last Ticks of all source partitions before `to`, of those that have ever ticked; `to` without any.

    at: topic and partition; low: its first offset. Admission begins to read here, and trimming removes what is below: both must agree.
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
                    continue  # buried when it was folded
                if 0 <= tick.partition < tickers and tick.event_time is not None:
                    found[tick.partition] = record.offset
        last = found | last
    return min(last.values(), default=to)
