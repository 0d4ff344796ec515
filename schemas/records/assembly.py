"""Records of `claw.assembly`: the changelog of assemble."""

from __future__ import annotations

from dataclasses import dataclass

from clawstream.schemas.records.parts import CreatedAt, Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblyMarker:
    """A new owner of the partition. Its own offset is the owner's epoch."""

    worker: str
    """Worker that owns the partition from now on."""
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
    """Number of the delta, one more than that of the last one."""
    applied_steps: int
    """Last offset of `claw.steps` folded."""
    applied_rewards: int
    """Last offset of `claw.rewards` folded."""
    entries: bytes
    """Entries in fold order: zstd of JSON."""
    format: Int32
    """Format of the entries. It rises when a release writes entries that older ones can't read."""
    hashes: bytes
    """Hashes of the steps in the entries, in their order there: packed little-endian int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblySnapshot:
    """A piece of the whole state of the partition."""

    epoch: int
    """Offset of the owner's marker."""
    seq: int
    """`seq` of the last delta that it contains."""
    snapshot_id: str
    """Id of the snapshot, the same for all its pieces."""
    index: Int32
    """Number of the piece, from 0."""
    count: Int32
    """Number of pieces."""
    data: bytes
    """Piece of the zstd of JSON."""
    format: Int32
    """Format of the data, as in AssemblyDelta."""
