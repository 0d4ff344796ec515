"""A producer of records in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from clawstream.gateway.durability.log import LogPosition, Message, Passed, Sent
from clawstream.gateway.errors import KafkaUnavailable, RecordTooLarge


class InMemoryLogProducer:
    """A producer in memory. `messages` has all acknowledged messages, in order.

    reachable: False: known to be unreachable.
    acknowledges: False: appears reachable but does not acknowledge.
    too_slow: A message with more bytes is not acknowledged; None: no limit.
    refused: Keys whose messages are not acknowledged.
    sent: All messages of all sends, acknowledged or not.
    gate: While cleared, sends wait. held: the messages that waited.
    passed: Result of `passed_since` for every position.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.reachable = True
        self.acknowledges = True
        self.refused: set[bytes] = set()
        self.too_slow: int | None = None
        self.sent: list[Message] = []
        self.uptime_s = 0.0
        self.max_bytes = 10 * 1024 * 1024
        self.position: LogPosition | None = LogPosition("memory", (0,))
        self.passed = Passed(0, 0.0)
        self.gate = asyncio.Event()
        self.gate.set()
        self.held: list[Message] = []
        self._waiting: set[asyncio.Task[None]] = set()

    def send(self, messages: Sequence[Message], sent: Sent) -> None:
        if self.gate.is_set() or not messages:
            sent(self._take(messages))
            return
        self.held += messages
        task = asyncio.create_task(self._send_later(messages, sent))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _send_later(self, messages: Sequence[Message], sent: Sent) -> None:
        await self.gate.wait()
        sent(self._take(messages))

    def _take(self, messages: Sequence[Message]) -> KafkaUnavailable | RecordTooLarge | None:
        self.sent.extend(messages)
        refused = any(
            m.key in self.refused or (self.too_slow is not None and len(m.value) > self.too_slow)
            for m in messages
        )
        if messages and not (self.reachable and self.acknowledges and not refused):
            return KafkaUnavailable("this producer does not acknowledge")
        if any(len(m.value) > self.max_bytes for m in messages):
            return RecordTooLarge(f"a record is larger than {self.max_bytes} bytes")
        self.messages.extend(messages)
        return None

    async def passed_since(self, position: LogPosition) -> Passed:
        return self.passed
