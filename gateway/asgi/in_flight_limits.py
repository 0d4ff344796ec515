"""Limits the calls in flight and the bytes of their requests and replies, over all protocols."""

from __future__ import annotations

import asyncio

from clawstream.gateway.errors import Overloaded


class InFlightLimits:
    """Counts calls and their bytes.

    Args:
        limit: Maximum bytes of requests, gateway.max_in_flight_bytes.
        max_calls: gateway.max_in_flight.
        reply_limit: Maximum bytes of replies, gateway.max_in_flight_reply_bytes.
    """

    def __init__(self, limit: int, max_calls: int, reply_limit: int) -> None:
        self.limit, self._max_calls = limit, max_calls
        self.held = self.calls = 0
        self.replies = ReplyLimit(reply_limit)

    def begin(self) -> None:
        """Count a new call. Raises Overloaded, and then counts nothing."""
        if self.calls >= self._max_calls:
            raise Overloaded(
                f"{self.calls} calls are in flight, see gateway.max_in_flight and the limit of "
                "open files (ulimit -n)"
            )
        if self.replies.held >= self.replies.limit:
            raise Overloaded(
                f"the replies in flight hold {self.replies.held} bytes, see "
                f"gateway.max_in_flight_reply_bytes={self.replies.limit}"
            )
        self.calls += 1

    def end(self) -> None:
        """Stop counting a call."""
        self.calls -= 1

    async def ended(self) -> None:
        """Wait until no call is in flight."""
        while self.calls:  # noqa: ASYNC110 - once, at a shutdown
            await asyncio.sleep(0.005)

    def reserve(self, size: int) -> None:
        """Count `size` bytes of a request. Raises Overloaded, and then counts nothing."""
        if self.held + size > self.limit:
            raise Overloaded(
                f"the calls in flight hold {self.held} bytes, {size} more exceed "
                f"gateway.max_in_flight_bytes={self.limit}"
            )
        self.held += size

    def release(self, size: int) -> None:
        """Stop counting `size` bytes."""
        self.held -= size


class ReplyLimit:
    """Limits the bytes of replies that are held until they are recorded and sent, over all calls.

    A sampled reply is never refused. At the limit, new calls are refused before an engine gets the
    request, and all replies but one wait: the gateway does not read from their engines. One reply
    may exceed the limit, which guarantees progress.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0
        self._exceeding: ReplyReservation | None = None
        self._waiting: dict[
            asyncio.Future[None], None
        ] = {}  # insertion order: first come, first served

    def reserve(self) -> ReplyReservation:
        """Return an empty reservation, which the call releases at its end."""
        return ReplyReservation(self)

    def may_exceed(self, reservation: ReplyReservation) -> bool:
        """Tell whether this reservation is the one that may exceed the limit."""
        if self._exceeding is None:
            self._exceeding = reservation
        return self._exceeding is reservation

    async def room(self) -> None:
        """Wait until a reply has ended."""
        woken = asyncio.get_running_loop().create_future()
        self._waiting[woken] = None
        try:
            await woken
        finally:
            del self._waiting[woken]

    def release(self, reservation: ReplyReservation) -> None:
        """Release a reservation and wake all waiting ones."""
        self.held -= reservation.size
        if self._exceeding is reservation:
            self._exceeding = None
        for woken in self._waiting:
            if not woken.done():
                woken.set_result(None)


class ReplyReservation:
    """Reserved reply bytes of one call."""

    __slots__ = ("_replies", "size")

    def __init__(self, replies: ReplyLimit) -> None:
        self._replies, self.size = replies, 0

    async def extend(self, size: int) -> None:
        """Reserve `size` more bytes; waits until the limit permits it."""
        replies = self._replies
        while replies.held + size > replies.limit and not replies.may_exceed(self):
            await replies.room()
        replies.held += size
        self.size += size

    def release(self) -> None:
        """Release all bytes."""
        self._replies.release(self)
        self.size = 0
