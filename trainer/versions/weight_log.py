"""The weights log of a run: who may write to it, and what it says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from runtime.kafka import Cluster, Fenced, Producer, Record
from runtime.logs import logger
from runtime.topics.records import Decoder, dead_letter
from schemas.codec.single_object import Codec
from schemas.errors import Undecodable, UnknownSchema
from schemas.ids import Version, parse_version
from schemas.records import WeightVersion
from schemas.topics import Topics


class WeightLog(Protocol):
    """Where versions are published. topic_id: Kafka's id of the weights topic."""

    topic_id: str

    def publish(self, version: WeightVersion) -> None:
        """Put the manifest on the log: from here on version and checkpoint count.

        Raises Fenced after a newer trainer began.
        """

    def raise_if_fenced(self) -> None:
        """Raises Fenced when a newer trainer took over; costs a round trip."""


@dataclass
class MemoryWeightLog:
    """A weight_log without Kafka, for tests and for training off-line."""

    topic_id: str = "memory"
    published: list[WeightVersion] = field(default_factory=list)
    fenced: bool = False

    def publish(self, version: WeightVersion) -> None:
        self.raise_if_fenced()
        self.published.append(version)

    def raise_if_fenced(self) -> None:
        if self.fenced:
            raise Fenced("a newer weight_log was opened")


class KafkaWeightLog:
    """The weights log, as the one trainer that may write to it.

    Making one fences every older trainer of the run.

    Whatever is written goes through one transactional producer, so a fenced trainer can write
    nothing, dead letters included.
    """

    def __init__(self, cluster: Cluster, topics: Topics, run_id: str) -> None:
        self._producer: Producer = cluster.producer(f"{topics.prefix}-trainer.{run_id}.train")
        self._topics, self._run_id, self._codec = topics, run_id, Codec()
        self.topic_id = cluster.topic_id(topics.weights)

    def publish(self, version: WeightVersion) -> None:
        """Put the manifest on the log.

        From here on the version and its checkpoint count. Raises Fenced.
        """
        with self._producer.transaction():
            self._producer.put(
                self._topics.weights, version.version_id.encode(), self._codec.encode(version)
            )

    def dead_letter(self, record: Record, topic_id: str, reason: str, detail: str) -> None:
        """Dead-letter a record.

        It may be buried again after a restart: the same place each time.
        """
        letter = dead_letter(record, topic_id, "trainer", reason, detail)
        with self._producer.transaction():
            self._producer.put(self._topics.dead_letters, letter.key, self._codec.encode(letter))
        logger().warning(
            "dead_letter", topic=record.topic, offset=record.offset, reason=reason, detail=detail
        )

    def raise_if_fenced(self) -> None:
        """Ask the broker by a transaction that is given up: Fenced when a newer trainer took over,
        else nothing.
        """
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
    """The run's versions in log order, and all its ids: an id counts as taken even if its record
    can't be read.

    The log is shared by all runs: a version of this one may lie behind another trainer's open
    transaction. Not to see it would mean to train its batches again, under its id, and to delete
    its files.
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
            logger().warning(
                "weight_version_unreadable", offset=record.offset, error=str(e)
            )  # the lake buries it
            continue
        if isinstance(version, WeightVersion) and version.run_id == run_id:
            versions.append(version)
            taken.add(Version(run_id, version.sync_index, version.attempt))
    return versions, taken
