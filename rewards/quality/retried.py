"""Detect steps that a retry replaced, and steps that the client sent twice."""

from __future__ import annotations

from collections.abc import Iterator

from clawstream.rewards.quality.score import Score
from clawstream.schemas.records import Trajectory


def retried(trajectory: Trajectory) -> Iterator[Score]:
    """Score a marked step with 0.0. Such steps do not count in the trajectory's quality."""
    for step in trajectory.steps:
        if step.marks:
            yield Score(0.0, step.untrainable_reason or ", ".join(step.marks), step.step_id)
