"""Detect prompts that do not continue earlier samples: edited history, or other tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from clawstream.rewards.quality.score import Score
from clawstream.schemas.records import Trajectory

VALUE: Mapping[str, float] = {"realigned": 0.8, "forked": 0.5}


def drift(trajectory: Trajectory) -> Iterator[Score]:
    """Score a realigned prompt with 0.8, a forked one with 0.5."""
    for step in trajectory.steps:
        if step.drift in VALUE:
            yield Score(VALUE[step.drift], f"{step.drift} from step {step.parent}", step.step_id)
