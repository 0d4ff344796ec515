"""What the trainer does with each step of a batch, and why not: the words of its record. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from clawstream.schemas.records import BatchMember, StepTraining, TrainedTrajectory, Trajectory

Unreadable = Literal["vocabulary", "media"]
"""Why the model cannot compute a segment: an id that it does not have, or a medium."""
LeftOut = Mapping[str, Mapping[int, str]]
"""Id of a trajectory to index of a step to why it has no token to train."""

NO_REWARD = "no training reward"
NO_MEDIA = "the trainer passes no videos and sounds, and images to vision-language models only"
CRITIC_WARMS_UP = "the critic warms up, and the policy does not learn yet"
UPDATE_SKIPPED = "its update was skipped: loss or gradient were not finite"
BATCH_SKIPPED = "its batch was skipped: its dead letter says why"
_OUTSIDE_VOCABULARY = "an id in it or before it is outside the model's vocabulary"
_REDACTED = "all its tokens are redacted"
_NO_LOGPROBS = "no token of it has a log-probability that is finite"


class TrajectoryDecision(NamedTuple):
    """The fields of `TrainedTrajectory` that are known before the version is published."""

    run_id: str
    trajectory_key: str
    trajectory_id: str
    batch_seq: int
    steps: tuple[StepTraining, ...]

    def record(self, version_id: str) -> TrainedTrajectory:
        """Return the record. version_id: the version that was trained on the batch."""
        return TrainedTrajectory(version_id=version_id, **self._asdict())


def too_few_rewards(smallest_group: int) -> str:
    """Return the reason for a member with a reward in a group that cannot be compared."""
    return f"its group has fewer than {smallest_group} training rewards"


def untrained_steps(
    trajectory: Trajectory,
    member: BatchMember,
    policy_version: int,
    trained: Collection[int],
    unreadable: Sequence[Unreadable | None],
    media: str,
) -> dict[int, str]:
    """Return the steps of a trajectory that have no token to train, each with the reason.

    Args:
        trajectory: whose rewards let it be trained.
        member: its decision of admission, by the policy of this version.
        policy_version: of the batch.
        trained: indexes of the steps with a token to train.
        unreadable: of each segment, why the model cannot compute it; None: it can.
        media: why the trainer cannot pass a medium of the trajectory.
    """
    segments: dict[int, int] = {}  # index of a step to the segment of its tokens
    for number, segment in enumerate(trajectory.segments):
        if segment.step_index is not None and segment.token_ids:
            segments[segment.step_index] = number
    found: dict[int, str] = {}
    for step in trajectory.steps:
        if step.index in trained:
            continue
        at = segments.get(step.index)
        if not step.trainable:
            why = step.untrainable_reason or "untrainable"
        elif step.step_id in member.untrainable_steps:
            why = f"left out by curation, or by policy {policy_version}"
        elif at is None:
            why = "no sampled tokens"
        elif unreadable[at] is not None:
            why = media if unreadable[at] == "media" else _OUTSIDE_VOCABULARY
        else:
            logprobs = np.frombuffer(trajectory.segments[at].logprobs or b"", "<f4")
            why = _REDACTED if np.isnan(logprobs).all() else _NO_LOGPROBS
        found[step.index] = why
    return found


def step_decisions(
    trajectories: Iterable[Trajectory], left_out: LeftOut, batch_seq: int
) -> Iterator[TrajectoryDecision]:
    """Yield what was done with the steps of each trajectory of a batch.

    Args:
        trajectories: all of the batch.
        left_out: all steps that were not trained.
        batch_seq: number of the batch.
    """
    for trajectory in trajectories:
        reasons = left_out.get(trajectory.trajectory_id, {})
        yield TrajectoryDecision(
            run_id=trajectory.run_id,
            trajectory_key=trajectory.trajectory_key,
            trajectory_id=trajectory.trajectory_id,
            batch_seq=batch_seq,
            steps=tuple(
                StepTraining(step_id=step.step_id, untrained_reason=reasons.get(step.index))
                for step in trajectory.steps
            ),
        )
