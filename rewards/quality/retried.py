"""Steps whose place another one took: the client asked again, or sent the same twice."""

from __future__ import annotations

from collections.abc import Iterator

from rewards.quality.score import Score
from schemas.records import Trajectory


def retried(trajectory: Trajectory) -> Iterator[Score]:
    """0.0 for a step with a mark. Such steps do not count for the quality of the whole."""
    for step in trajectory.steps:
        if step.marks:
            yield Score(0.0, step.untrainable_reason or ", ".join(step.marks), step.step_id)
