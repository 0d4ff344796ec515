"""The only package that imports the Kafka client: cluster, topics, producers and readers.

Positions are (topic id, partition, offset): a recreated topic has another id and is another topic.
Readers see committed records only. This package does not know what a record means.
"""

from clawstream.runtime.kafka.cluster import Cluster, ClusterView
from clawstream.runtime.kafka.commit import NO_METADATA, Commit, CommitMetadata, heartbeat
from clawstream.runtime.kafka.errors import (
    Denied,
    Fenced,
    KafkaError,
    SourceTruncated,
    TooLarge,
    Unavailable,
)
from clawstream.runtime.kafka.loop_producer import LoopProducer
from clawstream.runtime.kafka.producer import Producer
from clawstream.runtime.kafka.reader import BEGINNING, READ_TIMEOUT_S, Reader, Silence
from clawstream.runtime.kafka.record import Ack, Record

__all__ = [
    "BEGINNING",
    "NO_METADATA",
    "READ_TIMEOUT_S",
    "Ack",
    "Cluster",
    "ClusterView",
    "Commit",
    "CommitMetadata",
    "Denied",
    "Fenced",
    "KafkaError",
    "LoopProducer",
    "Producer",
    "Reader",
    "Record",
    "Silence",
    "SourceTruncated",
    "TooLarge",
    "Unavailable",
    "heartbeat",
]
