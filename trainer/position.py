"""The trainer's position in a ready-batches topic. `Run` owns it; checkpoints store it."""

from __future__ import annotations

from dataclasses import dataclass

from clawstream.runtime.kafka import Cluster
from clawstream.trainer.errors import BatchesReplaced


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where training goes on: the next offset of one ready-batches topic (it has one partition),
    and the batch_seq that must come next.
    """

    topic_id: str
    next_offset: int
    next_batch_seq: int


def starting_position(cluster: Cluster, topic: str, stored: Position | None) -> Position:
    """Return the stored position, or the start of today's topic when no batch was trained yet.

    Raises:
        SourceTruncated: the position is outside its topic.
        BatchesReplaced: the position belongs to another topic of that name.
    """
    if stored is not None and cluster.check_position(topic, stored.topic_id, 0, stored.next_offset):
        return stored
    return start_of(topic, cluster.topic_id(topic), stored)


def start_of(topic: str, topic_id: str, stored: Position | None) -> Position:
    """Return the start of a topic for a trainer without a position in it.

    The batches of a new topic count from 0 again. Staleness is the batch number minus the index of
    the version that sampled its tokens. With weights that were trained further, every batch would
    pass admission's staleness limit, however stale. The decisions of the lost topic would also be
    repeated, and their batches trained twice.

    Args:
        topic: name of the topic.
        topic_id: its id today.
        stored: position of the checkpoint in another topic of that name, if any.

    Raises:
        BatchesReplaced: batches of the other topic were trained.
    """
    if stored is not None and stored.next_batch_seq > 0:
        raise BatchesReplaced(
            f"source truncated: {topic} was recreated. Weights were trained from batches 0 to "
            f"{stored.next_batch_seq - 1} of topic id {stored.topic_id}; today's id is {topic_id}, "
            "and its batches count from 0 again, so their staleness can't be judged for these "
            "weights. Restore the topic, or train on under another run_id with trainer.model_path "
            "set to the published weights; run clawstream status --positions"
        )
    return Position(topic_id=topic_id, next_offset=0, next_batch_seq=0)
