"""One call of `DeliveryManager.record` until its records are durable."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Literal

from clawstream.gateway.durability.log import Message
from clawstream.gateway.errors import NotRecorded

DeliveryStatus = Literal["acknowledged", "spooled", "unconfirmed"]


class PendingWrite:
    """Messages that are not durable yet.

    maybe_sent: Some of the messages may be in Kafka.
    waiter: The future of the caller; None: the caller does not wait.
    ended: Called once, with the seconds that the write took and its error, if any.
    """

    __slots__ = ("_began", "_ended", "maybe_sent", "messages", "waiter")

    def __init__(
        self,
        messages: Sequence[Message],
        waiter: asyncio.Future[DeliveryStatus] | None,
        ended: Callable[[float, NotRecorded | None], None],
    ) -> None:
        self.messages, self.waiter, self._ended = messages, waiter, ended
        self._began = time.perf_counter()
        self.maybe_sent = False

    def complete(self, status: DeliveryStatus) -> None:
        """End the write: the messages are durable."""
        self._ended(time.perf_counter() - self._began, None)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(status)

    def fail(self, error: NotRecorded) -> None:
        """End the write: neither Kafka nor the spool has the messages."""
        self._ended(time.perf_counter() - self._began, error)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_exception(error)
