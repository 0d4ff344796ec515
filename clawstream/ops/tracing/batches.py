"""The batches that a weight version names, read again from their topic."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator

from clawstream.runtime.kafka import Cluster
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.records import ReadyBatch, WeightVersion
from clawstream.schemas.topics import Topics

KNOWN_MAX = 20_000
"""Batches of a topic whose offset is remembered."""
TOPICS_MAX = 32
"""Largest number of topics with remembered batches, the last ones read; each has one run."""


class BatchFinder:
    """Finds batches by their number.

    Attributes:
        known: Topic id to number and offset of batches that were read, in order.
    """

    def __init__(self, cluster: Cluster, decoder: Decoder, topics: Topics) -> None:
        self._cluster, self._decoder, self._topics = cluster, decoder, topics
        self.known: dict[str, list[tuple[int, int]]] = {}

    def note(self, topic_id: str, batch_seq: int, offset: int) -> None:
        """Remember where a batch is."""
        known = self.known[topic_id] = self.known.pop(topic_id, [])  # now the last one
        if len(self.known) > TOPICS_MAX:
            del self.known[next(iter(self.known))]
        at = bisect_right(known, (batch_seq, offset))
        if at == 0 or known[at - 1] != (batch_seq, offset):
            insort(known, (batch_seq, offset))
        if len(known) > KNOWN_MAX:
            del known[: KNOWN_MAX // 2]

    def batches_of(self, version: WeightVersion) -> Iterator[ReadyBatch]:
        """Yield the batches that a version was trained on, if their topic still has them.

        Reads from the nearest known batch before them. After a restart the first version of a run
        reads its topic from the start.

        Raises:
            Unavailable: Kafka does not answer.
        """
        first, last = version.first_batch_seq, version.last_batch_seq
        topic_id = version.batches_topic_id
        topic = self._topics.ready_batches(version.run_id, version.channel)
        if first is None or last is None or topic_id is None:
            return
        if self._cluster.topic_ids([topic]).get(topic) != topic_id:
            return  # recreated since
        low, high = self._cluster.watermarks(topic, [0])[0]
        known = self.known.get(topic_id, [])
        at = bisect_right(known, (first, high))
        start = max(low, known[at - 1][1] if at else low)
        if start >= high:
            return
        for record in self._cluster.read_range(topic, 0, start, high - 1):
            try:
                event = self._decoder.decode(record.value)
            except (Undecodable, UnknownSchema):
                continue
            if isinstance(event, ReadyBatch):
                self.note(topic_id, event.batch_seq, record.offset)
                if event.batch_seq > last:
                    return
                if event.batch_seq >= first:
                    yield event
                if event.batch_seq == last:
                    return
