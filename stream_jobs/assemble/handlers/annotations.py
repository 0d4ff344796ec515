"""Rewards, curation marks and assessments. Pure."""

from __future__ import annotations

from clawstream.schemas.ids import is_gateway_assigned, key_of_trajectory
from clawstream.schemas.records import Assessment, Curation, Reward
from clawstream.schemas.records.parts import NAME_CHARS, TAGS_MAX
from clawstream.schemas.records.rewards import out_of_bounds
from clawstream.stream_jobs.assemble.handlers.rejected import InvalidRecord
from clawstream.stream_jobs.assemble.handlers.targets import annotate_or_wait
from clawstream.stream_jobs.assemble.limits import Limits
from clawstream.stream_jobs.assemble.matching.token_prefix import hash_of
from clawstream.stream_jobs.assemble.payload.trainability import REASON_CHARS
from clawstream.stream_jobs.assemble.state.annotations import (
    AssessmentState,
    CurationMark,
    CurrentReward,
)
from clawstream.stream_jobs.assemble.state.changes import Change
from clawstream.stream_jobs.assemble.state.partition_state import PartitionState
from clawstream.stream_jobs.assemble.state.trajectories import RunTrajectory


def on_reward(
    state: PartitionState, limits: Limits, offset: int, name: RunTrajectory, reward: Reward
) -> list[Change]:
    """Return the changes of a reward. Raises RejectedRecord."""
    if len(reward.name) > NAME_CHARS or len(reward.function_version) > NAME_CHARS:
        raise InvalidRecord(f"name and function_version have at most {NAME_CHARS} characters")
    if reward.value is not None and (why := out_of_bounds(reward.value)) is not None:
        raise InvalidRecord(f"value: {why}; no reward is null, with a reason")
    current = CurrentReward(
        source=reward.source,
        name=reward.name,
        version=reward.function_version,
        step_suffix=_target_step(name, reward),
        value=reward.value,
        reason=reward.reason[:REASON_CHARS] if reward.reason else None,
        revision=reward.reward_revision,
        offset=offset,
    )
    return annotate_or_wait(state, limits, offset, *_target_trajectory(name, reward), current)


def on_curation(
    state: PartitionState, limits: Limits, offset: int, name: RunTrajectory, curation: Curation
) -> list[Change]:
    """Return the changes of a curation. Raises RejectedRecord."""
    quality, tags = curation.quality, curation.tags
    if quality is not None and not 0 <= quality <= 1:
        raise InvalidRecord(f"quality {quality} is not in [0, 1]")
    if len(tags or ()) > TAGS_MAX or any(len(tag) > NAME_CHARS for tag in tags or ()):
        raise InvalidRecord(f"there are at most {TAGS_MAX} tags of at most {NAME_CHARS} characters")
    says_nothing = quality is None and curation.trainable is None and tags is None
    if curation.takes_back is not None and not says_nothing:
        raise InvalidRecord("a record with takes_back has no quality, trainable or tags")
    if curation.takes_back is None and says_nothing:
        return []
    mark = CurationMark(
        event=hash_of(curation.event_id.encode()),
        step_suffix=_target_step(name, curation) or "",
        quality=quality,
        trainable=curation.trainable,
        tags=list(tags) if tags is not None else None,
        offset=offset,
        takes_back=hash_of(curation.takes_back.encode()) if curation.takes_back else None,
    )
    return annotate_or_wait(state, limits, offset, *_target_trajectory(name, curation), mark)


def on_assessment(
    state: PartitionState, limits: Limits, offset: int, name: RunTrajectory, made: Assessment
) -> list[Change]:
    """Return the changes of an assessment. Raises RejectedRecord."""
    scores = [*made.step_quality, *([made.quality] if made.quality is not None else [])]
    if not all(0 <= score <= 1 for score in scores):
        raise InvalidRecord("a quality is not in [0, 1]")
    if key_of_trajectory(made.trajectory_id) != name[1] or is_gateway_assigned(made.trajectory_id):
        raise InvalidRecord(
            f"{made.trajectory_id!r:.250} is not the id of a trajectory "
            f"of trajectory key {name[1]!r}"
        )
    assessed = AssessmentState(made.assessment_revision, made.quality, list(made.step_quality))
    key = (name[0], made.trajectory_id)
    return annotate_or_wait(state, limits, offset, key, None, assessed)


def _target_step(name: RunTrajectory, event: Reward | Curation) -> str | None:
    """Return the step suffix of a reward's or mark's target; None if the step only selects the
    trajectory.
    """
    if event.step_id is None or (is_gateway_assigned(name[1]) and event.trajectory_id == name[1]):
        return None
    return event.step_id[len(name[1]) + 1 :]


def _target_trajectory(
    name: RunTrajectory, event: Reward | Curation
) -> tuple[RunTrajectory, str | None]:
    """Return the trajectory that a record names, and its step suffix. Raises InvalidRecord.

    In a gateway-assigned session the trajectory is identified by its id, or by the key and a
    step.
    """
    given = event.trajectory_id
    step_suffix = event.step_id[len(name[1]) + 1 :] if event.step_id is not None else None
    if given is None or given == name[1]:
        if is_gateway_assigned(name[1]) and event.step_id is None:
            raise InvalidRecord(
                f"{name[1]} was made by the gateway: the trajectory must be named, or a step of it"
            )
        return name, step_suffix
    if not (is_gateway_assigned(name[1]) and given.startswith(f"{name[1]}~")):
        raise InvalidRecord(f"trajectory id {given!r:.250} is not of trajectory key {name[1]!r}")
    return (name[0], given), step_suffix
