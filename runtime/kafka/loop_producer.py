"""Producing from an event loop at the lowest cost a record: idempotent, acknowledged by all in-sync
replicas, placed by murmur2.

No thread, no task and no timer a record. The loop itself looks for acknowledgements every few
milliseconds while some are awaited, takes all that came at once, and holds those that did not
against their deadline.
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

from runtime.kafka.errors import KafkaError, Unavailable, translated
from runtime.kafka.producer import producer_options

FIRST_S = 0.003
"""No acknowledgement comes sooner: linger.ms and a round trip."""
POLL_S = 0.002
"""Between two looks for acknowledgements.

One of 1 ms costs a third more CPU a record and gains 0.2 ms (docs/durability.md).
"""
SLOW_POLL_S = 0.02
SLOW_AFTER_S = 0.1
"""A log that has not acknowledged for so long is asked less often."""
Done = Callable[[KafkaError | None], None]


class _SendBatch:
    """Records that count together. done: None once it was told."""

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
        """Tell it, once. A bug in `done` ends the process: nobody would tell that record's caller
        any more.
        """
        done, self.done = self.done, None
        if done is not None:
            try:
                done(error)
            except Exception as bug:  # noqa: BLE001 - the end of the process
                self.loop_producer.on_bug(bug)


class LoopProducer:
    """Posts records; everything of it is called on one event loop, but for `renew_soon` and
    `close`.

    A broker that has lost its data may hand out our producer id a second time and then take our
    records for another's, sent again: it would acknowledge and drop them. So a partition whose
    offsets do not grow, or the word of the owner (`renew_soon`), ends this producer id: all that is
    awaited fails as Unavailable, and a client of a new id goes on. So does a fatal error.
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
        """Send (topic, key, value).

        Done(None): all are acknowledged; done(error): TooLarge, or Unavailable when that is not
        known.

        done is called once, and must not raise: from the loop, or at once when there are no records
        or the client takes none. Records of one key keep the order of the calls.
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
        """Note where a record lies.

        Why its acknowledgement does not count: another one came there or behind, or the log is
        another one.
        """
        place, offset = (message.topic(), message.partition()), message.offset()
        if self._lost is None and offset <= self._ends.get(place, -1):
            self._lost = f"{place[0]}-{place[1]} acknowledged offset {offset} after {self._ends[place]}: its broker has lost what it had"
        if self._lost is None:
            self._ends[place] = offset
        return self._lost

    def renew_soon(self, why: str) -> None:
        """From any thread: no acknowledgement that comes from now on counts.

        The next call of the loop takes a new producer id.
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

    def close(self, timeout_s: float = 10.0) -> None:
        """Wait for what is in flight. From any thread, when nothing is posted any more."""
        self._client.flush(timeout_s)


def _retire(client: _Producer) -> None:
    """Forget what it still has, and end it: that takes a moment."""
    client.purge()
    client.flush(1.0)
