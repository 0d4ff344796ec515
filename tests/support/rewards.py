"""Reward functions of the tests."""

from __future__ import annotations

from clawstream.schemas.records import Trajectory


def contrary(trajectory: Trajectory) -> float:
    """Return the opposite of the correctness of the first reply."""
    return 2.0 if b'"y"' in trajectory.steps[0].response_json else 1.0
