"""Join the parts of a trajectory. Shared by all readers of payload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from clawstream.schemas.records import Trajectory


def joined(parts: Sequence[Trajectory]) -> Trajectory:
    """All parts of one trajectory, in order, as one: steps and segments are concatenated."""
    if len(parts) == 1 and parts[0].parts == 1:
        return parts[0]
    return replace(
        parts[0],
        part=0,
        parts=1,
        segments=tuple(segment for part in parts for segment in part.segments),
        steps=tuple(step for part in parts for step in part.steps),
    )
