"""Records of `claw.assembly`: the changelog of assemble."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblyMarker:
    """A new owner of the partition. Its own offset is the owner's epoch."""

    worker: str
    steps_topic_id: str
    rewards_topic_id: str
    created_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblyDelta:
    """State change and decisions of one micro-batch."""

    epoch: int
    seq: int
    applied_steps: int
    applied_rewards: int
    entries: bytes
    format: int = 0
    hashes: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblySnapshot:
    """A piece of the whole state of the partition."""

    epoch: int
    seq: int
    snapshot_id: str
    index: int
    count: int
    data: bytes
    format: int = 0
