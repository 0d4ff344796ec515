"""Records of `claw.rewards`: rewards, curation and assessments."""

from __future__ import annotations

from dataclasses import dataclass

from clawstream.schemas.records.parts import RewardSource

COMPLETION_SOURCE: RewardSource = "env"
COMPLETION_VERSION = "1"
"""Source and function version of the rewards with which a trajectory is completed. Their revision
is 0, and their target the whole trajectory.
"""
COMPLETION_NAME = "complete_trajectory"
"""Name of such a reward that is only a number."""
LARGEST_REWARD = 1e6
"""Largest absolute value of a reward, of a weight, and of a training reward: one rule for every way
in. Sums, means and squares of many of them are finite.
"""
COMPLETION_MAX = 100
"""Most rewards of one completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward of a step or a trajectory. Key: trajectory key.

    State: the highest reward_revision per (target, source, name); of equal ones the first on the
    log.
    """

    event_id: str
    run_id: str
    trajectory_key: str
    trajectory_id: str | None = None
    step_id: str | None = None
    source: RewardSource
    name: str
    function_version: str
    value: float | None = None
    reason: str | None = None
    reward_revision: int
    by: str | None = None
    detail_json: bytes | None = None
    created_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Curation:
    """A mark by a person or rule.

    Key: trajectory key. State: the last value per target and field of the marks that were not taken
    back. takes_back: event id of an earlier mark of the same target; then there are no values.
    """

    event_id: str
    run_id: str
    trajectory_key: str
    trajectory_id: str | None = None
    step_id: str | None = None
    quality: float | None = None
    trainable: bool | None = None
    tags: tuple[str, ...] | None = None
    note: str | None = None
    takes_back: str | None = None
    by: str
    created_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A score below 1.0, or a rule that failed."""

    rule: str
    step_id: str | None = None
    score: float | None = None
    evidence: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """The result of the quality rules for one closed trajectory. Key: trajectory key.

    State: the highest assessment_revision; of equal ones the first on the log.
    """

    event_id: str
    run_id: str
    trajectory_key: str
    trajectory_id: str
    rules: tuple[str, ...]
    quality: float | None = None
    step_quality: tuple[float, ...]
    findings: tuple[Finding, ...]
    assessment_revision: int
    by: str | None = None
    created_at: int


def out_of_bounds(value: float) -> str | None:
    """Return why a number is no reward or weight; None if it is within the bounds."""
    if -LARGEST_REWARD <= value <= LARGEST_REWARD:  # False for NaN
        return None
    try:
        shown = f"{value:g}"
    except OverflowError:  # an integer beyond every float
        shown = "the number"
    return f"{shown} is not in [{-LARGEST_REWARD:g}, {LARGEST_REWARD:g}]"
