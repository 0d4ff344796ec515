"""Detect steps without recorded tokens or log-probabilities, which cannot be trained."""

from __future__ import annotations

from collections.abc import Iterator

from clawstream.rewards.quality.score import Score
from clawstream.schemas.records import Trajectory


def tokens(trajectory: Trajectory) -> Iterator[Score]:
    """Score a step without token ids, or without one log-probability per id, with 0.0."""
    segments = trajectory.segments
    for step in trajectory.steps:
        if step.marks:
            continue  # a retried step has no place in the tree
        if step.segment is None:
            yield Score(0.0, step.untrainable_reason or "no token ids", step.step_id)
            continue
        sampled = segments[step.segment]
        if sampled.logprobs is None or len(sampled.logprobs) != len(sampled.token_ids):
            yield Score(
                0.0, step.untrainable_reason or "no log-probability for each token", step.step_id
            )
