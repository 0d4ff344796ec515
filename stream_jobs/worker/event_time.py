"""Event time of a partition of the candidates, from its ticks. Pure."""

from __future__ import annotations

from clawstream.schemas.records import Tick


class EventTime:
    """The lowest time of the source partitions' last ticks. tickers: Number of partitions."""

    def __init__(self, tickers: int) -> None:
        self._tickers = tickers
        self._last: dict[int, int] = {}

    def after(self, tick: Tick) -> int | None:
        """Return the event time after a tick, ms; None before every partition has ticked.

        Raises:
            ValueError: The tick names no source partition, or no time.
        """
        if not 0 <= tick.partition < self._tickers or tick.event_time is None:
            raise ValueError(
                f"tick of partition {tick.partition} of {self._tickers} with event time "
                f"{tick.event_time}: must name a source partition and its event time"
            )
        if tick.event_time > self._last.get(tick.partition, -1):
            self._last[tick.partition] = tick.event_time
        return min(self._last.values()) if len(self._last) == self._tickers else None
