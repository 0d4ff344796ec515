"""Detect replies that were cut off."""

from __future__ import annotations

from collections.abc import Iterator

from rewards.quality.score import Score
from schemas.records import Trajectory

CUT = frozenset({"length", "abort", "error", "content_filter"})
"""Finish reasons, in OpenAI's words whatever the protocol."""


def truncation(trajectory: Trajectory) -> Iterator[Score]:
    """0.0 for a step that was cut off, aborted or failed."""
    for step in trajectory.steps:
        if step.status != "ok":
            yield Score(0.0, f"status {step.status}", step.step_id)
        elif step.finish_reason in CUT:
            yield Score(0.0, f"finish reason {step.finish_reason}", step.step_id)
