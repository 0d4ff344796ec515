"""Producing: idempotent, acknowledged by all in-sync replicas, placed by murmur2."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from confluent_kafka import KafkaError as Code
from confluent_kafka import KafkaException, Message, TopicPartition
from confluent_kafka import Producer as _Producer

from clawstream.runtime.kafka.errors import Unavailable, translated, translating
from clawstream.runtime.kafka.reader import Reader
from clawstream.runtime.kafka.record import Ack

FLUSH_TIMEOUT_S = 30.0
TRANSACTION_TIMEOUT_MS = 60_000
"""Transaction time-out in ms, longer than any wait of this code.

A broker that aborts a transaction reports "fenced" to its owner, which would then stay down.
"""


def producer_options(options: Mapping[str, Any], **overrides: Any) -> dict[str, Any]:
    """librdkafka options of every producer, below the cluster's own."""
    return {
        "acks": "all",
        "enable.idempotence": True,
        "partitioner": "murmur2_random",
        "compression.type": "lz4",
        "linger.ms": 2,
        "message.max.bytes": 10 * 1024 * 1024,
        "retry.backoff.ms": 20,
        **options,
        **overrides,
    }


class Producer:
    """An idempotent producer: acks=all, partitioned by murmur2.

    `send` waits for the acknowledgement on an asyncio loop; `put` + `flush` work without one. With
    a transactional id, the newest instance of the id fences all older ones when it starts. A fatal
    client error (the broker lost its state of this producer) fails everything in flight as
    Unavailable; `send` then continues with a new client and producer id.
    """

    def __init__(
        self, options: Mapping[str, Any], transactional_id: str | None = None, **overrides: Any
    ) -> None:
        config = producer_options(options, **overrides)
        if transactional_id is not None:
            config |= {
                "transactional.id": transactional_id,
                "transaction.timeout.ms": overrides.get(
                    "transaction.timeout.ms", TRANSACTION_TIMEOUT_MS
                ),
                "retry.backoff.ms": 5,
            }
        self._config, self._transactional = config, transactional_id is not None
        self._producer = _Producer(config)
        self._done: deque[tuple[asyncio.Future[Ack], Any, Any]] = deque()
        self._wake_pending = False
        self._poller: threading.Thread | None = None
        self._closing = False
        self._failed: BaseException | None = None
        if transactional_id is not None:
            with translating():
                self._producer.init_transactions(FLUSH_TIMEOUT_S)

    # -- with an event loop

    async def send(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Mapping[str, bytes] | None = None,
        partition: int | None = None,
    ) -> Ack:
        """Produce and wait for the acknowledgement of all in-sync replicas.

        Raises Unavailable, TooLarge or Fenced.
        """
        return await self.send_soon(topic, key, value, headers, partition)

    def send_soon(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Mapping[str, bytes] | None = None,
        partition: int | None = None,
    ) -> asyncio.Future[Ack]:
        """Produce and return a future of the acknowledgement.

        Records of one partition keep the order of the calls.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Ack] = loop.create_future()
        if self._poller is None:
            self._poller = threading.Thread(target=self._poll, name="kafka-acks", daemon=True)
            self._poller.start()

        def delivered(err: Code | None, msg: Message) -> None:  # on the poll thread
            self._done.append((future, err, msg))
            if not self._wake_pending:
                self._wake_pending = True
                loop.call_soon_threadsafe(self._resolve)

        self._produce(topic, key, value, headers, partition, delivered)
        return future

    def _poll(self) -> None:
        while not self._closing:
            try:
                self._producer.poll(0.2)
            except KafkaException:  # a fatal error: said once, here
                self._renew()

    def _renew(self) -> None:
        """Handle a delivery on the poll thread.

        Must not raise, or all later deliveries are lost.
        """
        if self._transactional:
            return  # fenced, perhaps: every further call says so
        old, self._producer = self._producer, _Producer(self._config)
        old.purge()
        with suppress(KafkaException):
            old.flush(FLUSH_TIMEOUT_S)  # serves the failures

    def _resolve(self) -> None:
        self._wake_pending = False
        while self._done:
            future, err, msg = self._done.popleft()
            if future.done():
                continue
            if err is not None:
                future.set_exception(translated(KafkaException(err)))
            else:
                future.set_result(Ack(msg.partition(), msg.offset()))

    # -- without one

    def put(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Mapping[str, bytes] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        on_ack: Callable[[Ack], None] | None = None,
    ) -> None:
        """Produce; `flush` or the end of the transaction waits for acknowledgements and raises
        errors.

        Args:
            timestamp_ms: For topics with CreateTime only; None: now.
            on_ack: Called with the record's position before that returns.
        """

        def delivered(err: Code | None, msg: Message) -> None:
            if err is None:
                if on_ack is not None:
                    on_ack(Ack(msg.partition(), msg.offset()))
            elif self._failed is None:
                self._failed = KafkaException(err)

        self._produce(topic, key, value, headers, partition, delivered, timestamp_ms)
        self._producer.poll(0)  # else deliveries pile up until the queue is full

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        """Wait until everything put so far is acknowledged.

        Raises Unavailable, TooLarge or Fenced.
        """
        left = self._producer.flush(timeout_s)
        self._raise_failed()
        if left:
            raise Unavailable(f"{left} records were not acknowledged within {timeout_s:g} s")

    def _raise_failed(self) -> None:
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise translated(failed) from failed

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make everything put inside visible atomically.

        Raises Fenced when a newer instance took over.
        """
        with translating():
            self._producer.begin_transaction()
            try:
                yield
            except BaseException:  # any error: else the transaction would stay open
                self._producer.abort_transaction(FLUSH_TIMEOUT_S)
                raise
            self._producer.commit_transaction(FLUSH_TIMEOUT_S)
            self._raise_failed()

    def commit_positions(self, reader: Reader, positions: Mapping[tuple[str, int], int]) -> None:
        """Commit a reader group's positions with the transaction.

        positions: As `Reader.positions`.
        """
        offsets = [TopicPartition(t, p, o) for (t, p), o in positions.items()]
        self._producer.send_offsets_to_transaction(offsets, reader.group_metadata, FLUSH_TIMEOUT_S)

    def _produce(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Mapping[str, bytes] | None,
        partition: int | None,
        delivered: Any,
        timestamp_ms: int | None = None,
    ) -> None:
        more: dict[str, Any] = {"partition": partition} if partition is not None else {}
        if timestamp_ms is not None:
            more["timestamp"] = timestamp_ms
        try:
            self._producer.produce(
                topic,
                value,
                key,
                on_delivery=delivered,
                headers=dict(headers) if headers else None,
                **more,
            )
        except BufferError as e:
            raise Unavailable(f"the producer's queue is full: {e}") from e
        except KafkaException as e:
            raise translated(e) from e

    def close(self, timeout_s: float = 10.0) -> None:
        """Wait for records in flight, then stop the poll thread."""
        self._producer.flush(timeout_s)
        self._closing = True
        if self._poller is not None:
            self._poller.join(1.0)
