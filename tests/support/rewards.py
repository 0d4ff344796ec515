"""Reward functions of the tests."""

from __future__ import annotations

from schemas.records import Trajectory


def contrary(trajectory: Trajectory) -> float:
    """The opposite of whether the first reply is what was asked for."""
    return 2.0 if b'"y"' in trajectory.steps[0].response_json else 1.0
