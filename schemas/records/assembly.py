"""Records of `claw.assembly`: the changelog of assemble."""

from __future__ import annotations

from dataclasses import dataclass

from clawstream.schemas.records.parts import CreatedAt, Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblyMarker:
    """A new owner of the partition. Its own offset is the owner's epoch."""

    worker: str
    """Who."""
    steps_topic_id: str
    """Id of `claw.steps` that applied offsets refer to."""
    rewards_topic_id: str
    """Id of `claw.rewards`."""
    created_at: CreatedAt


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblyDelta:
    """State change and decisions of one micro-batch."""

    epoch: int
    """Offset of the owner's marker."""
    seq: int
    """Rises by one a delta."""
    applied_steps: int
    """Last offset of `claw.steps` folded."""
    applied_rewards: int
    """Last offset of `claw.rewards` folded."""
    entries: bytes
    """Entries in fold order: zstd of JSON."""
    format: Int32 = 0
    """How the entries are to be read: rises when a release writes what one before it can't read."""
    hashes: bytes = b""
    """Of the steps in the entries, in their order there: packed little-endian int64. Format 1: in
    the entries themselves.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblySnapshot:
    """A piece of the whole state of the partition."""

    epoch: int
    """Offset of the owner's marker."""
    seq: int
    """seq of the last delta it contains."""
    snapshot_id: str
    """Same for all pieces."""
    index: Int32
    """Piece, from 0."""
    count: Int32
    """Number of pieces."""
    data: bytes
    """Piece of the zstd of JSON."""
    format: Int32 = 0
    """As in AssemblyDelta."""
