"""Convert a batch and its trajectories to training sequences with pure functions.

A trajectory is a tree of segments, and each token is stored once. A sequence is a path from the
root to a leaf. Where paths share sampled tokens, only the first sequence trains them; the others
have them as context. So each sampled token of a trainable step is trained exactly once, and a
linear conversation is one sequence.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from schemas.records import BatchGroup, ReadyBatch, Segment, Trajectory, TrajectoryStep, VersionSpan
from schemas.reward_matching import training_reward
from schemas.tokens import count, unpack_ids, unpack_logprobs
from trainer.errors import PayloadUnreadable

Advantages = Callable[[Sequence[float]], list[float]]


class TemperatureSpan(NamedTuple):
    """The temperature of the log-probabilities of tokens [start, end) of a sequence."""

    temperature: float
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSequence:
    """One sequence to train on. All per-token fields have the length of token_ids.

    Attributes:
        mask: whether the token was sampled by the policy, is not redacted, and is trained in this
            sequence.
        logprobs: at sampling time; 0.0 where the mask is off.
        versions: weight versions that sampled the trained tokens, as index ranges of this sequence;
            a gap means unknown.
        temperatures: temperatures at which the trained tokens are scored; a gap means that their
            steps have no temperature.
        advantage: the same for all tokens of the sequence.
        sampled_at_zero: number of tokens that are not trained because their recorded
            log-probability is infinite. A token of probability zero is never sampled, so the
            recorded value is invalid.
    """

    trajectory_id: str
    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    advantage: float
    temperatures: tuple[TemperatureSpan, ...] = ()
    sampled_at_zero: int = 0

    @property
    def trained_tokens(self) -> int:
        return sum(self.mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSequences:
    """A batch that is ready for the model.

    Attributes:
        rewards: training reward of each trained member.
        unrewarded: members without a training reward.
        sampled_at_zero: number of tokens without a usable log-probability (see
            `TrainingSequence`), by trajectory; includes sequences without a trained token, which
            are not in `sequences`.
    """

    sequences: tuple[TrainingSequence, ...]
    rewards: tuple[float, ...]
    groups: int
    unrewarded: tuple[str, ...]
    sampled_at_zero: Mapping[str, int]

    @property
    def trained_tokens(self) -> int:
        return sum(sequence.trained_tokens for sequence in self.sequences)


def sequences_of_batch(
    batch: ReadyBatch, trajectories: Mapping[str, Trajectory], advantages: Advantages
) -> BatchSequences:
    """Return all sequences of a batch.

    A member without a training reward is left out of its group; its reward is never taken as 0.0. A
    group with fewer than two rewards has nothing to compare and is left out too. Both are named in
    `unrewarded`.

    Args:
        batch: the batch.
        trajectories: trajectory id to trajectory, for every member.
        advantages: computes the advantages of a group from its rewards.
    """
    sequences: list[TrainingSequence] = []
    rewards: list[float] = []
    unrewarded: list[str] = []
    sampled_at_zero: Counter[str] = Counter()
    groups = 0
    for group in batch.groups:
        rewarded = _rewarded(group, batch.reward_weights)
        unrewarded += [m.trajectory_id for m in group.members if m.trajectory_id not in rewarded]
        if len(rewarded) < 2 <= group.n:
            unrewarded += rewarded
            continue
        by_member = dict(zip(rewarded, advantages(list(rewarded.values())), strict=True))
        for member in group.members:
            if member.trajectory_id in by_member:
                found = _paths(
                    trajectories[member.trajectory_id],
                    member.untrainable_steps,
                    by_member[member.trajectory_id],
                )
                sampled_at_zero[member.trajectory_id] += sum(
                    sequence.sampled_at_zero for sequence in found
                )
                sequences += _with_trained_tokens(found)
        rewards += rewarded.values()
        groups += 1
    return BatchSequences(
        sequences=tuple(sequences),
        rewards=tuple(rewards),
        groups=groups,
        unrewarded=tuple(unrewarded),
        sampled_at_zero=+sampled_at_zero,
    )


def within_vocabulary(
    sequences: Sequence[TrainingSequence], vocabulary: int
) -> tuple[tuple[TrainingSequence, ...], tuple[str, ...]]:
    """Return the sequences whose token ids the model has, and the trajectories of the others.

    An agent can submit any id, and an engine can serve another model than the trained one. Neither
    may crash the model's embedding.

    Args:
        sequences: the sequences of a batch.
        vocabulary: valid ids are 0 to vocabulary - 1.

    Returns:
        The valid sequences, and the ids of the other sequences' trajectories, each once.
    """
    known = [
        min(sequence.token_ids) >= 0 and max(sequence.token_ids) < vocabulary
        for sequence in sequences
    ]
    others = dict.fromkeys(
        sequence.trajectory_id for sequence, fits in zip(sequences, known, strict=True) if not fits
    )
    return tuple(sequence for sequence, fits in zip(sequences, known, strict=True) if fits), tuple(
        others
    )


def _rewarded(group: BatchGroup, weights: Mapping[str, float]) -> dict[str, float]:
    values = {m.trajectory_id: training_reward(weights, m.rewards) for m in group.members}
    return {trajectory_id: value for trajectory_id, value in values.items() if value is not None}


def sequences_of(
    trajectory: Trajectory, untrainable_steps: Collection[str], advantage: float
) -> list[TrainingSequence]:
    """Return the sequences of one trajectory, leaves in order.

    Paths are cut after their last token to train; a path without such a token is left out.

    Args:
        trajectory: the trajectory.
        untrainable_steps: step ids from the batch, in addition to the steps that the trajectory
            itself marks as untrainable.
        advantage: of all tokens.

    Raises:
        PayloadUnreadable: the tree or a trainable segment is broken.
    """
    return _with_trained_tokens(_paths(trajectory, untrainable_steps, advantage))


def _with_trained_tokens(sequences: Sequence[TrainingSequence]) -> list[TrainingSequence]:
    return [sequence for sequence in sequences if any(sequence.mask)]


def _paths(
    trajectory: Trajectory, untrainable_steps: Collection[str], advantage: float
) -> list[TrainingSequence]:
    """Return a sequence for each path with a trainable segment.

    The sequence is returned even if none of its tokens can be trained.
    """
    steps = {step.index: step for step in trajectory.steps}
    segments, left_out = trajectory.segments, frozenset(untrainable_steps)
    _check_order(trajectory)
    trainable = [_trainable(trajectory, i, steps, left_out) for i in range(len(segments))]
    inner = {segment.parent for segment in segments}
    sequences: list[TrainingSequence] = []
    done: set[int] = set()
    for leaf in range(len(segments)):
        if leaf in inner:
            continue
        path = _path(trajectory, leaf)
        while path and (not trainable[path[-1]] or path[-1] in done):
            path.pop()
        if path:
            sequences.append(
                _sequence(
                    trajectory,
                    path,
                    {i for i in path if trainable[i] and i not in done},
                    steps,
                    advantage,
                )
            )
            done.update(path)
    return sequences


def _trainable(
    trajectory: Trajectory,
    index: int,
    steps: Mapping[int, TrajectoryStep],
    untrainable_steps: Collection[str],
) -> bool:
    segment = trajectory.segments[index]
    if segment.step_index is None or not segment.token_ids:
        return False
    step = steps.get(segment.step_index)
    if step is None:
        raise PayloadUnreadable(
            f"trajectory {trajectory.trajectory_id}: segment {index} names step "
            f"{segment.step_index}, which is not there"
        )
    if not step.trainable or step.step_id in untrainable_steps:
        return False
    if count(segment.logprobs) != count(segment.token_ids):
        raise PayloadUnreadable(
            f"step {step.step_id} is trainable but has {count(segment.logprobs)} log-probabilities "
            f"for {count(segment.token_ids)} sampled tokens"
        )
    return True


def _check_order(trajectory: Trajectory) -> None:
    for index, segment in enumerate(trajectory.segments):
        if segment.parent is not None and not 0 <= segment.parent < index:
            raise PayloadUnreadable(
                f"trajectory {trajectory.trajectory_id}: segment {index} has parent "
                f"{segment.parent}, parents come first"
            )


def _path(trajectory: Trajectory, leaf: int) -> list[int]:
    """Return the segment indexes from the root to `leaf`."""
    path, at = [leaf], trajectory.segments[leaf].parent
    while at is not None:
        path.append(at)
        at = trajectory.segments[at].parent
    return path[::-1]


def _sequence(
    trajectory: Trajectory,
    path: Sequence[int],
    trained: Collection[int],
    steps: Mapping[int, TrajectoryStep],
    advantage: float,
) -> TrainingSequence:
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[VersionSpan] = []
    temperatures: list[TemperatureSpan] = []
    of_step: dict[int, int] = {}
    sampled_at_zero = 0
    for index in path:
        segment = trajectory.segments[index]
        tokens = unpack_ids(segment.token_ids)
        start = len(ids)
        ids += tokens
        if index in trained and segment.step_index is not None and segment.logprobs is not None:
            sampled = unpack_logprobs(segment.logprobs)
            # NaN marks a redacted token, which was not sampled. An infinite log-probability would
            # get the largest weight that the bound allows.
            mask += [math.isfinite(p) for p in sampled]
            logprobs += [p if math.isfinite(p) else 0.0 for p in sampled]
            sampled_at_zero += sum(map(math.isinf, sampled))
            step = steps[segment.step_index]
            versions += _versions(
                segment, start, len(tokens), of_step.get(segment.step_index, 0), step
            )
            if step.logprobs_temperature is not None:
                temperatures.append(TemperatureSpan(step.logprobs_temperature, start, len(ids)))
        else:
            mask += [False] * len(tokens)
            logprobs += [0.0] * len(tokens)
        if segment.step_index is not None:
            of_step[segment.step_index] = of_step.get(segment.step_index, 0) + len(tokens)
    if mask[0]:  # the first token has no log-probability under the model
        mask[0], logprobs[0] = False, 0.0
    return TrainingSequence(
        trajectory_id=trajectory.trajectory_id,
        token_ids=tuple(ids),
        mask=tuple(mask),
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        advantage=advantage,
        temperatures=tuple(temperatures),
        sampled_at_zero=sampled_at_zero,
    )


def _versions(
    segment: Segment, start: int, length: int, skipped: int, step: TrajectoryStep
) -> list[VersionSpan]:
    """Return the segment's version spans as index ranges of the sequence.

    skipped: number of tokens of the step before this segment.
    """
    if not segment.versions:
        if step.oldest_version is None or step.oldest_version != step.newest_version:
            return []
        return [VersionSpan(version=step.oldest_version, start=start, end=start + length)]
    moved = (
        (span.version, max(span.start - skipped, 0), min(span.end - skipped, length))
        for span in segment.versions
    )
    return [VersionSpan(version=v, start=start + a, end=start + b) for v, a, b in moved if a < b]
