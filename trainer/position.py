"""The trainer's position in a ready-batches topic. It is stored in the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where training goes on: the next offset of one ready-batches topic, and the batch_seq that
    must come next.
    """

    topic_id: str
    partition: int
    next_offset: int
    next_batch_seq: int
