"""Records of `claw.rewards`: rewards, curation and assessments."""

from __future__ import annotations

from dataclasses import dataclass

from clawstream.schemas.records.parts import CreatedAt, EventId, RewardSource, RunId, TrajectoryKey

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

    event_id: EventId
    run_id: RunId
    trajectory_key: TrajectoryKey
    trajectory_id: str | None = None
    """Needed for an anonymous session; else null: the key."""
    step_id: str | None = None
    """Step it is about; null: the whole trajectory."""
    source: RewardSource
    name: str
    """Name of the function."""
    function_version: str
    """Version of the function."""
    value: float | None = None
    """The reward; null: explicit no_reward."""
    reason: str | None = None
    """Why there is no value; null: there is one."""
    reward_revision: int
    """Set by the writer, from 0."""
    by: str | None = None
    """Who wrote it: a person, a rule or a process."""
    detail_json: bytes | None = None
    """Anything the function wants kept, JSON."""
    created_at: CreatedAt


@dataclass(frozen=True, slots=True, kw_only=True)
class Curation:
    """A mark by a person or rule.

    Key: trajectory key. State: fold per target and field, the last one that was not taken back
    counts.
    """

    event_id: EventId
    run_id: RunId
    trajectory_key: TrajectoryKey
    trajectory_id: str | None = None
    """Needed for an anonymous session; else null."""
    step_id: str | None = None
    """Step; null: the whole trajectory."""
    quality: float | None = None
    """Quality in [0, 1]."""
    trainable: bool | None = None
    """May be trained."""
    tags: tuple[str, ...] | None = None
    """Labels."""
    note: str | None = None
    """Free text."""
    takes_back: str | None = None
    """Event id of an earlier mark of the same target, which no longer counts; quality, trainable
    and tags are then null.
    """
    by: str
    """Who wrote it: a person, a rule or a process."""
    created_at: CreatedAt


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A score below 1.0, or a rule that failed."""

    rule: str
    """`name@version`."""
    step_id: str | None = None
    """Step it is about; null: the whole trajectory."""
    score: float | None = None
    """In [0, 1]; null: the rule failed, and counts for nothing."""
    evidence: str | None = None
    """What was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """The result of the quality rules for one closed trajectory. Key: trajectory key.

    State: the highest assessment_revision; of equal ones the first on the log.
    """

    event_id: EventId
    run_id: RunId
    trajectory_key: TrajectoryKey
    trajectory_id: str
    """The trajectory: equal to the key, or `<key>~<ulid>` where the gateway made the key."""
    rules: tuple[str, ...]
    """`name@version` of every rule that was asked, in order."""
    quality: float | None = None
    """Quality of the whole in [0, 1]: the lowest of its rules; null: no rule could say anything."""
    step_quality: tuple[float, ...]
    """Quality of each step in [0, 1], by index in the trajectory: the lowest of the rules. Empty:
    as for quality.
    """
    findings: tuple[Finding, ...]
    """What lowered a score, by rule and step; at most 200. A rule without a finding gave 1.0."""
    assessment_revision: int
    """Sum of the versions of its rules that are whole numbers; the highest counts."""
    by: str | None = None
    """Who wrote it: a person, a rule or a process."""
    created_at: CreatedAt


def out_of_bounds(value: float) -> str | None:
    """Return why a number is no reward or weight; None if it is within the bounds."""
    if -LARGEST_REWARD <= value <= LARGEST_REWARD:  # False for NaN
        return None
    try:
        shown = f"{value:g}"
    except OverflowError:  # an integer beyond every float
        shown = "the number"
    return f"{shown} is not in [{-LARGEST_REWARD:g}, {LARGEST_REWARD:g}]"
