"""Read and write the weights log of a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from clawstream.runtime.kafka import Cluster, Producer, Record
from clawstream.runtime.logs import logger
from clawstream.runtime.topics.records import Decoder, dead_letter
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.ids import Version, parse_version
from clawstream.schemas.records import TrainedTokens, TrainedTrajectory, WeightVersion
from clawstream.schemas.topics import Topics
from clawstream.trainer.versions.history import version_of

FLUSH_BYTES = 8 << 20
"""Tokens in flight at once: the queue of the client is bounded, by records and by bytes."""
TOKENS_TIMEOUT_S = 25.0
"""Of the tokens of a version: with the commit it is less than the time-out of a transaction."""


Trained = TrainedTokens | TrainedTrajectory
"""What is recorded of the training of a version."""


class WeightLog(Protocol):
    """Where versions are published. topic_id: Kafka's id of the weights topic."""

    topic_id: str

    def publish(self, version: WeightVersion, trained: Sequence[Trained]) -> None:
        """Publish the manifest: from now on the version and its checkpoint count.

        Args:
            version: the manifest.
            trained: what the trainer did with the steps of its batches, and saw of their tokens.

        Raises:
            Fenced: A newer trainer has started.
        """

    def dead_letter(self, record: Record, topic_id: str, reason: str, detail: str) -> None:
        """Dead-letter a record. A restart may repeat it under the same id.

        Raises:
            Fenced: A newer trainer has started.
        """

    def raise_if_fenced(self) -> None:
        """Raise Fenced when a newer trainer took over. Costs a round trip."""


class NoWeightLog:
    """The weights log of a process that does not lead: the leader publishes."""

    topic_id = ""

    def publish(self, version: WeightVersion, trained: Sequence[Trained]) -> None:
        """Do nothing."""

    def dead_letter(self, record: Record, topic_id: str, reason: str, detail: str) -> None:
        """Do nothing."""

    def raise_if_fenced(self) -> None:
        """Do nothing."""


class KafkaWeightLog:
    """The weights log on Kafka. Creating one fences every older trainer of the run.

    All writes use one transactional producer, so a fenced trainer cannot write, not even dead
    letters.
    """

    def __init__(self, cluster: Cluster, topics: Topics, run_id: str) -> None:
        self._producer: Producer = cluster.producer(f"{topics.prefix}-trainer.{run_id}.train")
        self._topics, self._run_id, self._codec = topics, run_id, Codec()
        self.topic_id = cluster.topic_id(topics.weights)

    def publish(self, version: WeightVersion, trained: Sequence[Trained]) -> None:
        """Publish the manifest and what was trained in one transaction.

        The manifest comes last: while a transaction is open on the weights log, its readers wait.

        Raises:
            Fenced: A newer trainer has started.
            Unavailable: Kafka does not take the tokens in time.
        """
        with self._producer.transaction():
            deadline, in_flight = time.monotonic() + TOKENS_TIMEOUT_S, 0
            for record in trained:
                key, value = record.trajectory_key.encode(), self._codec.encode(record)
                self._producer.put(self._topics.trained_tokens, key, value)
                in_flight += len(value)
                if in_flight >= FLUSH_BYTES:
                    self._producer.flush(max(0.0, deadline - time.monotonic()))
                    in_flight = 0
            self._producer.flush(max(0.0, deadline - time.monotonic()))
            self._producer.put(
                self._topics.weights, version.version_id.encode(), self._codec.encode(version)
            )

    def dead_letter(self, record: Record, topic_id: str, reason: str, detail: str) -> None:
        """Dead-letter a record. A restart may repeat it under the same id."""
        letter = dead_letter(record, topic_id, "trainer", reason, detail)
        with self._producer.transaction():
            self._producer.put(self._topics.dead_letters, letter.key, self._codec.encode(letter))
        logger().warning(
            "dead_letter", topic=record.topic, offset=record.offset, reason=reason, detail=detail
        )

    def raise_if_fenced(self) -> None:
        """Raise Fenced when a newer trainer took over: starts and aborts a transaction."""
        try:
            with self._producer.transaction():
                self._producer.put(self._topics.weights, self._run_id.encode(), None)
                self._producer.flush()
                raise _Aborted
        except _Aborted:
            return

    def close(self) -> None:
        self._producer.close()


class _Aborted(Exception):
    """Ends the transaction of `raise_if_fenced`."""


def read_versions(
    cluster: Cluster, decoder: Decoder, topic: str, run_id: str
) -> tuple[list[WeightVersion], set[Version]]:
    """Return the run's versions in log order, and all its ids, including unreadable records.

    All runs share the log, so a version may be behind another trainer's open transaction. Missing
    it would train its batches again under its id and delete its files; therefore this waits.
    """
    versions: list[WeightVersion] = []
    taken: set[Version] = set()
    for record in cluster.read_all(topic, await_open=True):
        key = parse_version((record.key or b"").decode(errors="replace"))
        if key is not None and key.run_id == run_id:
            taken.add(key)
        try:
            version = decoder.decode(record.value)
        except (Undecodable, UnknownSchema) as e:
            # the lake writes the dead letter
            logger().warning("weight_version_unreadable", offset=record.offset, error=str(e))
            continue
        if isinstance(version, WeightVersion) and version.run_id == run_id:
            versions.append(version)
            taken.add(version_of(version))
    return versions, taken
