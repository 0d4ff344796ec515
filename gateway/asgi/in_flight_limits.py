"""How many calls are served at once, and how many bytes of requests and replies they hold: bounds for all protocols together."""

from __future__ import annotations

import asyncio

from gateway.errors import Overloaded


class InFlightLimits:
    """Counts calls and what they hold.

    Args:
        limit: Bytes of requests, see gateway.max_in_flight_bytes.
        max_calls: See gateway.max_in_flight.
        reply_limit: Bytes of replies, see gateway.max_in_flight_reply_bytes.
    """

    def __init__(self, limit: int, max_calls: int, reply_limit: int) -> None:
        self._limit, self._max_calls = limit, max_calls
        self.held = self.calls = 0
        self.replies = ReplyLimit(reply_limit)

    def begin(self) -> None:
        """A call begins. Raises Overloaded; then it does not."""
        if self.calls >= self._max_calls:
            raise Overloaded(f"{self.calls} calls are in flight, see gateway.max_in_flight")
        self.replies.check()
        self.calls += 1

    def end(self) -> None:
        """A call has ended."""
        self.calls -= 1

    def reserve(self, size: int) -> None:
        """Hold `size` bytes more. Raises Overloaded when they would be too many; then nothing is taken."""
        if self.held + size > self._limit:
            raise Overloaded(
                f"the calls in flight hold {self.held} bytes, {size} more exceed gateway.max_in_flight_bytes={self._limit}"
            )
        self.held += size

    def release(self, size: int) -> None:
        """They are held no more."""
        self.held -= size


class ReplyLimit:
    """Bytes of replies that are held until they are recorded and sent, of all calls together.

    A reply that was sampled is never refused. When the limit is reached new calls are refused before an engine is asked,
    and all replies but one wait: their engines are not read from. That one may exceed the limit, so something always ends.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0
        self._exceeding: ReplyReservation | None = None
        self._waiting: dict[asyncio.Future[None], None] = {}  # first come, first served

    def check(self) -> None:
        """Raises Overloaded when the limit is reached."""
        if self.held >= self.limit:
            raise Overloaded(
                f"the replies in flight hold {self.held} bytes, see gateway.max_in_flight_reply_bytes={self.limit}"
            )

    def reserve(self) -> ReplyReservation:
        """For one call, which releases it at its end."""
        return ReplyReservation(self)

    def may_exceed(self, who: ReplyReservation) -> bool:
        """Whether it may go on beyond the limit."""
        if self._exceeding is None:
            self._exceeding = who
        return self._exceeding is who

    async def room(self) -> None:
        """Until some reply has ended."""
        woken = asyncio.get_running_loop().create_future()
        self._waiting[woken] = None
        try:
            await woken
        finally:
            del self._waiting[woken]

    def release(self, who: ReplyReservation) -> None:
        """A call has ended."""
        self.held -= who.size
        if self._exceeding is who:
            self._exceeding = None
        for woken in self._waiting:
            if not woken.done():
                woken.set_result(None)


class ReplyReservation:
    """What one call holds of its reply: `size` bytes."""

    __slots__ = ("_replies", "size")

    def __init__(self, replies: ReplyLimit) -> None:
        self._replies, self.size = replies, 0

    async def extend(self, size: int) -> None:
        """Hold `size` bytes more, as soon as they may be held."""
        replies = self._replies
        while replies.held + size > replies.limit and not replies.may_exceed(self):
            await replies.room()
        replies.held += size
        self.size += size

    def release(self) -> None:
        """Nothing is held any more."""
        self._replies.release(self)
        self.size = 0
