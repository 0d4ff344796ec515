"""The only package that imports the Kafka client: cluster, topics, producers and readers.

Positions are (topic id, partition, offset): a recreated topic has another id and is another topic.
Readers see committed records only. This package does not know what a record means.
"""

from runtime.kafka.cluster import Cluster
from runtime.kafka.commit import NO_METADATA, Commit, CommitMetadata, heartbeat
from runtime.kafka.errors import Denied, Fenced, KafkaError, SourceTruncated, TooLarge, Unavailable
from runtime.kafka.loop_producer import LoopProducer
from runtime.kafka.producer import Producer
from runtime.kafka.reader import BEGINNING, READ_TIMEOUT_S, Reader, Silence
from runtime.kafka.record import Ack, Record

__all__ = [
    "BEGINNING",
    "NO_METADATA",
    "READ_TIMEOUT_S",
    "Ack",
    "Cluster",
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
