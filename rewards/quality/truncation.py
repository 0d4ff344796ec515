"""Detect truncated replies."""

from __future__ import annotations

from collections.abc import Iterator

from clawstream.rewards.quality.score import Score
from clawstream.schemas.records import Trajectory

CUT = frozenset({"length", "abort", "error", "content_filter"})
"""Finish reasons, in OpenAI's terms for every protocol."""


def truncation(trajectory: Trajectory) -> Iterator[Score]:
    """Score a truncated, aborted or failed step with 0.0."""
    for step in trajectory.steps:
        if step.status != "ok":
            yield Score(0.0, f"status {step.status}", step.step_id)
        elif step.finish_reason in CUT:
            yield Score(0.0, f"finish reason {step.finish_reason}", step.step_id)
