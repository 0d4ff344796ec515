"""What the publication of a version asks of its producer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from support.traced_records import version

from clawstream.runtime.kafka.producer import FLUSH_TIMEOUT_S, TRANSACTION_TIMEOUT_MS
from clawstream.schemas.records import TrainedTokens
from clawstream.schemas.topics import Topics
from clawstream.trainer.versions.weight_log import FLUSH_BYTES, KafkaWeightLog


class BusyKafka:
    """A cluster and its producer: keeps what waits between two flushes, each of which takes 1 ms.

    Attributes:
        waited: Most bytes in flight.
        limits: Seconds that each flush may take.
    """

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.limits: list[float] = []
        self.waited = self._in_flight = 0

    def producer(self, _: str) -> BusyKafka:
        return self

    def topic_id(self, topic: str) -> str:
        return topic

    @contextmanager
    def transaction(self) -> Iterator[None]:
        yield

    def put(self, topic: str, key: bytes, value: bytes) -> None:
        self.sent.append(topic)
        self._in_flight += len(value)
        self.waited = max(self.waited, self._in_flight)

    def flush(self, timeout_s: float) -> None:
        self._in_flight = 0
        self.limits.append(timeout_s)
        time.sleep(0.001)


def test_the_tokens_of_a_version_are_bounded_in_the_client_and_in_time() -> None:
    """A transaction that the broker ends is fenced, and a fenced trainer stays down."""
    size = FLUSH_BYTES // 4
    tokens = TrainedTokens(
        run_id="run", trajectory_key="k", trajectory_id="k", step_id="k~0.0", version_id="run/1.0",
        batch_seq=0, advantages=bytes(size),
    )  # fmt: skip
    kafka = BusyKafka()
    log = KafkaWeightLog(cast(Any, kafka), Topics("claw"), "run")
    log.publish(version(1, None, None, None), [tokens] * 10)
    assert kafka.sent == ["claw.trained-tokens"] * 10 + ["claw.weights"]
    assert kafka.waited < FLUSH_BYTES + 2 * size
    assert len(kafka.limits) == 3 and kafka.limits == sorted(kafka.limits, reverse=True)
    assert len(set(kafka.limits)) == 3, "the time of all flushes is limited, not that of each"
    assert kafka.limits[0] + FLUSH_TIMEOUT_S < TRANSACTION_TIMEOUT_MS / 1000
