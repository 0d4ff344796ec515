"""Create topics, announce schemas, decode records and build dead letters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from clawstream.runtime.kafka import Cluster, Record
from clawstream.runtime.kafka.security import client_options
from clawstream.runtime.logs import logger
from clawstream.runtime.topics.check import check_topics, partitions_of
from clawstream.schemas.codec.single_object import Codec, Event
from clawstream.schemas.codec.text import encodable
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.records import DeadLetter, SchemaPublished
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import MAX_MESSAGE_BYTES, TopicSpec

REFRESH_INTERVAL_S = 5.0
DETAIL_CHARS = 8000
LETTER_BYTES = MAX_MESSAGE_BYTES - 65536
"""Room for the original value and, twice, its key."""


def now_micros() -> int:
    """Wall clock in microseconds. For information in records; nothing is decided by it."""
    return time.time_ns() // 1000


def cluster_of(settings: Settings) -> Cluster:
    """Return the cluster that the settings name.

    Raises:
        SettingsError: `kafka.security` lacks a password or a file.
    """
    return Cluster(settings.bootstrap_servers, client_options(settings.kafka))


def create_topics(
    cluster: Cluster, settings: Settings, extra: Iterable[TopicSpec] = ()
) -> list[str]:
    """Create missing topics and announce the schemas; idempotent and safe to run concurrently.

    Returns:
        The names of the created topics.

    Raises:
        SettingsError: Existing topics are unusable; nothing was created.
    """
    kafka, topics = settings.kafka, settings.kafka.topics
    specs = (*topics.specs(kafka.partitions, int(kafka.steps_retention_s * 1000)), *extra)
    there = cluster.topics()
    check_topics(cluster, settings, specs, there)
    made = []
    for spec in specs:
        if spec.name not in there and cluster.create_topic(
            spec.name, partitions_of(topics, spec, there), spec.config, *settings.replication
        ):
            made.append(spec.name)
    publish_schemas(cluster, topics.schemas)
    return made


def publish_schemas(cluster: Cluster, topic: str) -> None:
    """Announce the current schemas that the schemas topic lacks.

    Every process does this before it writes: the process that created the topic may have been
    killed, or be an older release.
    """
    codec, there = Codec(), set[bytes | None]()
    for record in cluster.read_all(topic):
        try:
            codec.decode(record.value)
            there.add(record.key)
        except (Undecodable, UnknownSchema):
            there.discard(record.key)  # taken back, or no schema at all
    missing = [s for s in codec.published(now_micros()) if s.fingerprint.encode() not in there]
    if missing:
        producer = cluster.producer()
        for schema in missing:
            producer.put(topic, schema.fingerprint.encode(), codec.encode(schema))
        producer.flush()
        producer.close()


class Decoder:
    """Decodes values; looks up unknown fingerprints on the schemas topic.

    One per process. Thread-safe; at worst each thread looks up the same schema. A look-up reads the
    schemas announced since the last one, and the whole topic (compacted, a few records) at most
    every 5 s, because it may have been recreated. A flood of unknown fingerprints thus costs one
    end-offset request each, and a schema that is announced before its first record is always found.
    """

    def __init__(self, cluster: Cluster, schemas_topic: str, codec: Codec | None = None) -> None:
        self.codec = codec or Codec()
        self._cluster, self._topic = cluster, schemas_topic
        self._read_at: float | None = None
        self._read_to = 0

    def decode(self, value: bytes | None) -> Event:
        """Decode a value. Blocks for up to 30 s while Kafka is unavailable.

        Raises:
            Undecodable: The bytes are no record.
            UnknownSchema: The fingerprint is unknown after a look-up.
        """
        try:
            return self.codec.decode(value)
        except UnknownSchema:
            if not self.look_up():
                raise
            return self.codec.decode(value)

    def knows(self, value: bytes | None) -> bool:
        """Whether `codec` alone decodes the value, or tells why nothing does."""
        return self.codec.knows(value)

    def look_up(self) -> bool:
        """Read newly announced schemas (blocking); return False when there are none.

        Raises:
            Unavailable: Kafka does not answer.
        """
        now = time.monotonic()
        if self._read_at is None or now - self._read_at >= REFRESH_INTERVAL_S:
            self._read_at, self._read_to = now, 0
        if self._cluster.end(self._topic, 0) == self._read_to:
            return False
        low, end = self._cluster.watermarks(self._topic, [0])[0]
        first = max(low, self._read_to) if self._read_to <= end else low
        for record in self._cluster.read_all(self._topic, first=first):
            try:
                announced = self.codec.decode(record.value)
                if isinstance(announced, SchemaPublished):
                    self.codec.announce(announced.schema_json, announced.confluent_id)
            except (Undecodable, UnknownSchema) as e:
                # the lake writes the dead letter
                logger().warning("schema_unreadable", offset=record.offset, error=str(e))
        self._read_to = end
        return True


def dead_letter(
    record: Record, topic_id: str, process: str, reason: str, detail: str
) -> DeadLetter:
    """Build the dead letter of a record with everything needed to repair and replay it.

    Send it under its own key. A key or value that does not fit stays at the original offset; the
    detail says so.
    """
    key, value, detail = record.key, record.value, encodable(detail, DETAIL_CHARS)
    if key is not None and 2 * len(key) > LETTER_BYTES:
        detail = f"{detail} (a key of {len(key)} bytes is left at its place)"
        key = None
    if value is not None and len(value) + 2 * len(key or b"") > LETTER_BYTES:
        detail = f"{detail} ({len(value)} bytes are left at their place)"
        value = None
    return DeadLetter(
        topic=record.topic,
        topic_id=topic_id,
        partition=record.partition,
        offset=record.offset,
        key=key,
        value=value,
        timestamp_ms=record.timestamp_ms,
        process=process,
        reason=reason,
        detail=detail,
        created_at=now_micros(),
    )


def reason_of(error: Exception) -> str:
    """Dead-letter reason of a decoding error."""
    return "unknown_schema" if isinstance(error, UnknownSchema) else "undecodable"


def decode_all(
    decoder: Decoder | Codec, records: Iterable[Record], reject: Callable[[Record, str, str], None]
) -> list[tuple[Record, Event]]:
    """Decode records; pass unreadable ones to `reject(record, reason, detail)`."""
    out = []
    for record in records:
        try:
            out.append((record, decoder.decode(record.value)))
        except (Undecodable, UnknownSchema) as e:
            reject(record, reason_of(e), str(e))
    return out
