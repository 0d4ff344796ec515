"""Produce from an event loop at the lowest cost per record.

Idempotent, acknowledged by all in-sync replicas, partitioned by murmur2. There is no thread, task
or timer per record: while acknowledgements are pending, the loop polls every few milliseconds,
takes all that have arrived, and compares the others with their deadline.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError as Code
from confluent_kafka import KafkaException, Message
from confluent_kafka import Producer as _Producer

from clawstream.runtime.kafka.errors import KafkaError, Unavailable, translated
from clawstream.runtime.kafka.producer import producer_options

FIRST_S = 0.003
"""Seconds before the first poll: linger.ms and a round trip."""
POLL_S = 0.002
"""Seconds between two polls.

1 ms costs a third more CPU per record and gains 0.2 ms (docs/durability.md).
"""
SLOW_POLL_S = 0.02
SLOW_AFTER_S = 0.1
"""Seconds without an acknowledgement after which the poll interval grows."""
Done = Callable[[KafkaError | None], None]


class _SendBatch:
    """Records that are acknowledged together. done: None once called."""

    __slots__ = ("began", "done", "left", "loop_producer")

    def __init__(self, loop_producer: LoopProducer, left: int, done: Done, began: float) -> None:
        self.loop_producer, self.left, self.began = loop_producer, left, began
        self.done: Done | None = done

    def delivered(self, error: Code | None, message: Message) -> None:
        """Called by the client for each record, inside of `poll`."""
        if self.done is None:
            return
        if error is not None:
            self.finish(translated(KafkaException(error)))
        elif (why := self.loop_producer.flaw_of(message)) is not None:
            self.finish(Unavailable(f"the producer is renewed: {why}"))
        else:
            self.left -= 1
            if not self.left:
                self.finish(None)

    def finish(self, error: KafkaError | None) -> None:
        """Call `done` once. A bug in it ends the process: the caller would wait for ever."""
        done, self.done = self.done, None
        if done is not None:
            try:
                done(error)
            except Exception as bug:  # noqa: BLE001 - the end of the process
                self.loop_producer.on_bug(bug)


class LoopProducer:
    """Sends records; all methods run on one event loop, except `renew_soon` and `close`.

    A broker that lost its data may assign our producer id again and take new records for
    duplicates: it would acknowledge and drop them. So offsets that do not grow, a call of
    `renew_soon`, or a fatal error end the producer id: all pending records fail as Unavailable, and
    a client with a new id continues.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        timeout_s: float,
        on_bug: Callable[[Exception], object],
        **overrides: Any,
    ) -> None:
        self.on_bug = on_bug
        self._options = producer_options(
            options, **{"message.timeout.ms": max(1, int(timeout_s * 1000)), **overrides}
        )
        self._timeout_s = timeout_s
        self._client = _Producer(self._options)
        self._pending: deque[_SendBatch] = deque()
        self._ends: dict[tuple[str, int], int] = {}
        self._lost: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticking = False

    def post(self, records: Sequence[tuple[str, bytes, bytes]], done: Done) -> None:
        """Send (topic, key, value) records. Records of one key keep the order of the calls.

        `done` is called exactly once and must not raise: with None when all are acknowledged, else
        with TooLarge, or with Unavailable when the outcome is unknown. It is called on the loop, or
        at once when there are no records or the client rejects one.
        """
        if not records:
            done(None)
            return
        if self._lost is not None:
            self._renew()
        post = _SendBatch(self, len(records), done, time.monotonic())
        produce, delivered = self._client.produce, post.delivered
        try:
            for topic, key, value in records:
                produce(topic, value, key, on_delivery=delivered)
        except BufferError as e:
            post.finish(Unavailable(f"the producer's queue is full: {e}"))
        except KafkaException as e:
            post.finish(translated(e))
        self._pending.append(post)
        if not self._ticking:
            self._ticking = True
            self._loop = self._loop or asyncio.get_running_loop()
            self._loop.call_later(FIRST_S, self._tick)

    def _tick(self) -> None:
        try:
            self._look()
        finally:  # whatever failed, what is posted is told in time
            self._go_on()

    def _look(self) -> None:
        try:
            self._client.poll(0)
        except KafkaException as e:  # a fatal error: said once, here
            self._lost = str(e)
        if self._lost is not None:
            self._renew()
        pending, now = self._pending, time.monotonic()
        while pending and (pending[0].done is None or now - pending[0].began >= self._timeout_s):
            pending.popleft().finish(Unavailable(f"not acknowledged within {self._timeout_s:g} s"))

    def _go_on(self) -> None:
        pending, now = self._pending, time.monotonic()
        if pending or len(self._client):
            slow = not pending or now - pending[0].began > SLOW_AFTER_S
            assert self._loop is not None
            self._loop.call_later(SLOW_POLL_S if slow else POLL_S, self._tick)
        else:
            self._ticking = False

    def flaw_of(self, message: Message) -> str | None:
        """Record the offset of a message; return why its acknowledgement is not valid, or None.

        It is not valid when the offset does not grow or the topic's log is another one.
        """
        place, offset = (message.topic(), message.partition()), message.offset()
        if self._lost is None and offset <= self._ends.get(place, -1):
            self._lost = (
                f"{place[0]}-{place[1]} acknowledged offset {offset} after {self._ends[place]}: "
                "its broker has lost what it had"
            )
        if self._lost is None:
            self._ends[place] = offset
        return self._lost

    def renew_soon(self, why: str) -> None:
        """Invalidate all later acknowledgements; the next call on the loop gets a new producer id.

        Thread-safe.
        """
        self._lost = why

    def _renew(self) -> None:
        why, self._lost = self._lost, None
        old, self._client = self._client, _Producer(self._options)
        self._ends.clear()
        pending, self._pending = self._pending, deque()
        for post in pending:
            post.finish(Unavailable(f"the producer was renewed: {why}"))
        threading.Thread(
            target=_retire, args=(old,), name="kafka-producer-ends", daemon=True
        ).start()

    async def drain(self, timeout_s: float) -> None:
        """Wait for the records in flight; call it after the last post, before `close`.

        Their `done` is called on the loop, as always.
        """
        end = time.monotonic() + timeout_s
        while self._ticking and time.monotonic() < end:  # noqa: ASYNC110 - the loop polls
            await asyncio.sleep(POLL_S)

    def close(self, timeout_s: float = 10.0) -> None:
        """Wait for records in flight. Thread-safe; call it after the last post."""
        self._client.flush(timeout_s)


def _retire(client: _Producer) -> None:
    """Discard the client's queue and close the client, which takes a moment."""
    client.purge()
    client.flush(1.0)
