"""Convert a batch and its trajectories to training sequences with pure functions.

A trajectory is a tree of segments, and each token is stored once. A sequence is a path from the
root to the last segment to train. Where paths share sampled tokens, only the first sequence trains
them; the others have them as context. So each sampled token of a trainable step is trained exactly
once, a linear conversation is one sequence, and branches without a token to train change nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clawstream.schemas.algorithms import RewardUse
from clawstream.schemas.records import BatchMember, ReadyBatch, Segment, Trajectory, TrajectoryStep
from clawstream.schemas.reward_matching import step_rewards, training_reward
from clawstream.schemas.tokens import count
from clawstream.trainer.data.untrained import (
    NO_MEDIA,
    NO_REWARD,
    LeftOut,
    Unreadable,
    too_few_rewards,
    untrained_steps,
)
from clawstream.trainer.errors import PayloadUnreadable

Reason = Literal["at zero"] | Unreadable


class ReadableIds(NamedTuple):
    """The token ids that the trainer can pass to its model.

    Attributes:
        vocabulary: valid ids are 0 to vocabulary - 1.
        media: ids that stand for a part of an image, a video or a sound that the trainer cannot
            pass. The model would not see what the engine saw.
        images: ids that stand for a part of an image that it can pass.
    """

    vocabulary: int
    media: Collection[int] = ()
    images: Collection[int] = ()

    def without_images(self) -> ReadableIds:
        """Return the ids that can be passed without images."""
        return ReadableIds(self.vocabulary, {*self.media, *self.images})


class BatchImages(NamedTuple):
    """The images of a batch.

    Attributes:
        of_step: id of a trajectory and index of a step to the files of the images in its prompt.
        unusable: id of a trajectory to why the trainer cannot pass an image of it.
    """

    of_step: Mapping[tuple[str, int], tuple[bytes, ...]]
    unusable: Mapping[str, str]

    def of(self, sequence: TrainingSequence) -> tuple[bytes, ...]:
        """Return the images of a sequence."""
        return self.of_step.get((sequence.trajectory_id, sequence.last_step), ())


NO_IMAGES = BatchImages({}, {})


class Tokens(NamedTuple):
    """Arrays of shape (tokens,). Only `ids` has a meaning where `mask` is off.

    Attributes:
        ids: int32.
        mask: loss mask: whether the policy sampled the token and it is to be trained.
        logprobs: float32, at sampling time.
        temperatures: float32, of the distribution of `logprobs`; NaN where the step states none.
        versions: id of the weight version that sampled the token; None where unknown.
        steps: int32, index of the step in its trajectory; -1 for a token of no step.
    """

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    temperatures: NDArray[np.float32]
    versions: NDArray[np.object_]
    steps: NDArray[np.int32]

    def trained(self) -> Tokens:
        """Return the tokens to train, alone."""
        return Tokens._make(column[self.mask] for column in self)


def concatenated(parts: Iterable[Tokens]) -> Tokens:
    """Return the tokens of all parts, in order."""
    return Tokens._make(np.concatenate(columns) for columns in zip(*parts, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSequence:
    """One sequence to train on.

    Attributes:
        advantages: float32, (trained tokens,); None until they are estimated.
        old_logprobs: float32, (trained tokens,), of the policy before the first optimiser step on
            the batch; None: the sampled ones stand for them.
        ref_logprobs, teacher_logprobs: float32, (trained tokens,); None without that model.
        values, returns: float32, (trained tokens,), of a critic before the first optimiser step on
            the batch, and what it is to predict; None without a critic.
        group: index of its group, among those of its environment in the batch.
        environment: a name in `trainer.environments`; None: another one, or none.
        images: files of the images whose placeholders are among the tokens, in their order.
    """

    trajectory_id: str
    tokens: Tokens
    advantages: NDArray[np.float32] | None = None
    old_logprobs: NDArray[np.float32] | None = None
    ref_logprobs: NDArray[np.float32] | None = None
    teacher_logprobs: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None
    group: int = 0
    environment: str | None = None
    images: tuple[bytes, ...] = ()

    @property
    def trained_tokens(self) -> int:
        return int(np.count_nonzero(self.tokens.mask))

    @property
    def last_step(self) -> int:
        """Index of the step that sampled its end: its prompt and response are the tokens."""
        return int(self.tokens.steps[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedMember:
    """One trajectory of the batch that is trained.

    Attributes:
        group: index of its group in the batch.
        reward: training reward; None if it has none.
        steps: indexes of all its steps, ascending.
        step_rewards: index of a step to its reward.
        cut_steps: indexes of the steps whose reply ended at its limit of tokens.
    """

    trajectory_id: str
    group: int
    reward: float | None
    steps: tuple[int, ...]
    step_rewards: Mapping[int, float]
    cut_steps: frozenset[int] = frozenset()

    def has(self, use: RewardUse) -> bool:
        """Return whether it has a reward that an algorithm of this use reads."""
        return (
            use == "none" or self.reward is not None or (use == "step" and bool(self.step_rewards))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSequences:
    """A batch that is ready for the advantage estimator.

    Attributes:
        unrewarded: members left out because they, or too many of their group, have no training
            reward.
        sampled_at_zero: number of tokens that are not trained because their recorded
            log-probability is infinite, by trajectory. A token of probability zero is never
            sampled, so the recorded value is invalid.
        outside_vocabulary, with_media: number of tokens that are not trained because an id of their
            segment, or of one before it, is not readable, by trajectory.
        left_out: why a step has no token to train, for every such step.
    """

    sequences: tuple[TrainingSequence, ...]
    members: tuple[TrainedMember, ...]
    groups: int
    unrewarded: tuple[str, ...]
    sampled_at_zero: Mapping[str, int]
    outside_vocabulary: Mapping[str, int]
    with_media: Mapping[str, int]
    left_out: LeftOut

    @property
    def rewards(self) -> tuple[float, ...]:
        """Training rewards of the members that have one."""
        return tuple(m.reward for m in self.members if m.reward is not None)


def sequences_of_batch(
    batch: ReadyBatch,
    trajectories: Mapping[str, Trajectory],
    smallest_group: int,
    rewards_used: RewardUse,
    readable: ReadableIds,
    environment: str | None = None,
    images: BatchImages = NO_IMAGES,
) -> BatchSequences:
    """Return all sequences of a batch.

    A member without a reward that the algorithm uses is left out of its group; its reward is never
    taken as 0.0. A group with too few members left is left out, too. Both are named in
    `unrewarded`.

    Args:
        batch: the batch.
        trajectories: trajectory id to trajectory, for every member.
        smallest_group: members that the algorithm needs to compare.
        rewards_used: rewards that the algorithm uses.
        readable: ids that the model can compute.
        environment: of the batch; the sequences name it.
        images: of the batch.
    """
    sequences: list[TrainingSequence] = []
    members: list[TrainedMember] = []
    unrewarded: list[str] = []
    lost: dict[Reason, dict[str, int]] = {"at zero": {}, "vocabulary": {}, "media": {}}
    left_out: dict[str, dict[int, str]] = {}
    groups = 0
    for group in batch.groups:
        candidates = [
            _member(m, groups, batch.reward_weights, trajectories[m.trajectory_id])
            for m in group.members
        ]
        usable = _usable(candidates, smallest_group, rewards_used)
        members += usable
        names = {m.trajectory_id for m in usable}
        for member, found in zip(group.members, candidates, strict=True):
            name = member.trajectory_id
            if name not in names:
                unrewarded.append(name)
                rewarded = found.has(rewards_used)
                why = too_few_rewards(smallest_group) if rewarded else NO_REWARD
                left_out[name] = dict.fromkeys(found.steps, why)
                continue
            known = readable.without_images() if name in images.unusable else readable
            trajectory = trajectories[name]
            tree = _segment_tokens(trajectory, member.untrainable_steps)
            unreadable = _unreadable_segments(trajectory, tree, known)
            for reason, tokens in _lost_tokens(tree, unreadable).items():
                lost[reason][name] = tokens
            paths = list(_paths(trajectory, tree))
            left_out[name] = untrained_steps(
                trajectory,
                member,
                batch.policy_version,
                trained_indexes(paths),
                unreadable,
                images.unusable.get(name, NO_MEDIA),
            )
            sequences += (
                replace(path, group=groups, environment=environment, images=images.of(path))
                for path in paths
            )
        groups += bool(usable)
    return BatchSequences(
        sequences=tuple(sequences),
        members=tuple(members),
        groups=groups,
        unrewarded=tuple(unrewarded),
        sampled_at_zero=lost["at zero"],
        outside_vocabulary=lost["vocabulary"],
        with_media=lost["media"],
        left_out=left_out,
    )


def trained_indexes(paths: Iterable[TrainingSequence]) -> set[int]:
    """Return the indexes of the steps with a token to train, of the sequences of a trajectory."""
    return {index for path in paths for index in np.unique(path.tokens.trained().steps).tolist()}


def _usable(
    members: list[TrainedMember], smallest: int, rewards_used: RewardUse
) -> list[TrainedMember]:
    """Return the members with a reward that the algorithm uses; none if they are too few."""
    usable = [member for member in members if member.has(rewards_used)]
    return usable if len(usable) >= smallest else []


def _member(
    member: BatchMember, group: int, weights: Mapping[str, float], trajectory: Trajectory
) -> TrainedMember:
    rewards = step_rewards(weights, member.rewards)
    steps = sorted(trajectory.steps, key=lambda step: step.index)
    return TrainedMember(
        trajectory_id=member.trajectory_id,
        group=group,
        reward=training_reward(weights, member.rewards),
        steps=tuple(step.index for step in steps),
        step_rewards={s.index: rewards[s.step_id] for s in steps if s.step_id in rewards},
        cut_steps=frozenset(step.index for step in steps if step.finish_reason == "length"),
    )


def at_temperature(sequence: TrainingSequence, temperature: float) -> TrainingSequence:
    """Return a sequence whose tokens are trained in the distributions at a temperature."""
    tokens = sequence.tokens
    same = np.full_like(tokens.temperatures, temperature)
    return replace(sequence, tokens=tokens._replace(temperatures=same))


def tokens_by_version(sequences: Sequence[TrainingSequence]) -> Counter[str]:
    """Return the number of trained tokens of each known weight version."""
    found: Counter[Any] = Counter()
    for sequence in sequences:
        found.update(sequence.tokens.versions[sequence.tokens.mask].tolist())
    del found[None]
    return found


def trained_lengths(sequences: Sequence[TrainingSequence]) -> tuple[int, ...]:
    """Return the number of trained tokens of each trajectory."""
    found: Counter[str] = Counter()
    for sequence in sequences:
        found[sequence.trajectory_id] += sequence.trained_tokens
    return tuple(found.values())


def sequences_of(
    trajectory: Trajectory, untrainable_steps: Collection[str], readable: ReadableIds | None = None
) -> list[TrainingSequence]:
    """Return the sequences of one trajectory. They end at the last segment to train.

    Args:
        trajectory: the trajectory.
        untrainable_steps: step ids from the batch, in addition to the steps that the trajectory
            itself marks as untrainable.
        readable: ids that the model can compute; None: all.

    Raises:
        PayloadUnreadable: the tree or a trainable segment is broken.
    """
    tree = _segment_tokens(trajectory, untrainable_steps)
    if readable is not None:
        _lost_tokens(tree, _unreadable_segments(trajectory, tree, readable))
    return list(_paths(trajectory, tree))


def _segment_tokens(trajectory: Trajectory, untrainable_steps: Collection[str]) -> list[Tokens]:
    """Return the tokens of each segment.

    This is where it is decided which tokens are trained.
    """
    steps = {step.index: step for step in trajectory.steps}
    segments = trajectory.segments
    found: list[Tokens] = []
    starts: list[int] = []  # where a segment starts in its step, in tokens
    for index, segment in enumerate(segments):
        parent, start = segment.parent, 0
        if parent is not None:
            if not 0 <= parent < index:
                raise PayloadUnreadable(
                    f"trajectory {trajectory.trajectory_id}: segment {index} has parent {parent}, "
                    "parents come first"
                )
            if segments[parent].step_index == segment.step_index:
                start = starts[parent] + len(found[parent].ids)
        starts.append(start)
        ids = np.frombuffer(segment.token_ids, "<i4")
        step = None
        if segment.step_index is not None and len(ids):
            step = steps.get(segment.step_index)
            if step is None:
                raise PayloadUnreadable(
                    f"trajectory {trajectory.trajectory_id}: segment {index} names step "
                    f"{segment.step_index}, which is not there"
                )
        if step is None or not step.trainable or step.step_id in untrainable_steps:
            found.append(_context(ids))
        else:
            found.append(_sampled(ids, segment, step, start))
    return found


def _unreadable_segments(
    trajectory: Trajectory, tree: Sequence[Tokens], readable: ReadableIds
) -> list[Unreadable | None]:
    """Return for each segment why the model cannot compute it, or one before it; None: it can.

    An agent can submit any id, and an engine can serve another model than the trained one. Paths
    end before such a segment; the other paths of the trajectory are whole.
    """
    found: list[Unreadable | None] = []
    media = np.array(sorted(readable.media), np.int32)
    for segment, tokens in zip(trajectory.segments, tree, strict=True):
        reason = None if segment.parent is None else found[segment.parent]
        if reason is None and ((tokens.ids < 0) | (tokens.ids >= readable.vocabulary)).any():
            reason = "vocabulary"
        elif reason is None and np.isin(tokens.ids, media).any():
            reason = "media"
        found.append(reason)
    return found


def _lost_tokens(tree: list[Tokens], unreadable: Sequence[Unreadable | None]) -> Counter[Reason]:
    """Train nothing of unreadable segments.

    Args:
        tree: tokens of the segments; changed.
        unreadable: of each segment, why the model cannot compute it.

    Returns:
        The number of sampled tokens that are not trained, for each reason that there is.
    """
    lost: Counter[Reason] = Counter()
    for index, (reason, tokens) in enumerate(zip(unreadable, tree, strict=True)):
        lost["at zero"] += int(np.isinf(tokens.logprobs).sum())
        if reason is not None:
            lost[reason] += int(np.count_nonzero(tokens.mask))
            tree[index] = tokens._replace(mask=np.zeros_like(tokens.mask))
    return +lost


def _context(ids: NDArray[np.int32]) -> Tokens:
    n = len(ids)
    unknown: NDArray[np.object_] = np.full(n, None, object)
    return Tokens(
        ids,
        np.zeros(n, bool),
        np.zeros(n, np.float32),
        np.full(n, np.nan, np.float32),
        unknown,
        np.full(n, -1, np.int32),
    )


def _sampled(ids: NDArray[np.int32], segment: Segment, step: TrajectoryStep, start: int) -> Tokens:
    """Return the tokens of a trainable segment, which begins at token `start` of its step."""
    if count(segment.logprobs) != len(ids):
        raise PayloadUnreadable(
            f"step {step.step_id} is trainable but has {count(segment.logprobs)} log-probabilities "
            f"for {len(ids)} sampled tokens"
        )
    logprobs = np.frombuffer(segment.logprobs or b"", "<f4")
    tokens = _context(ids)
    # NaN marks a redacted token, which was not sampled. An infinite log-probability would
    # get the largest weight that the bound allows.
    tokens = tokens._replace(mask=np.isfinite(logprobs), logprobs=logprobs)
    tokens.steps[:] = step.index
    if step.logprobs_temperature is not None:
        tokens.temperatures[:] = step.logprobs_temperature
    for span in segment.versions:
        tokens.versions[max(span.start - start, 0) : max(span.end - start, 0)] = span.version
    if not segment.versions and step.oldest_version == step.newest_version:
        tokens.versions[:] = step.oldest_version
    return tokens


def _paths(trajectory: Trajectory, tree: list[Tokens]) -> Iterator[TrainingSequence]:
    """Yield the sequence of each path to train; a token that was trained is context from then on.

    A path ends at a segment to train behind which there is none. At a fork, the branch with the
    earlier step to train comes first. So paths and their order depend on what is trained alone.
    """
    segments, trained = trajectory.segments, [bool(tokens.mask.any()) for tokens in tree]
    behind = [False] * len(segments)  # whether a segment to train is behind it
    for index in reversed(range(len(segments))):
        parent = segments[index].parent
        if parent is not None and (trained[index] or behind[index]):
            behind[parent] = True
    ends = (index for index in range(len(segments)) if trained[index] and not behind[index])
    paths = [_path(segments, end) for end in ends]
    paths.sort(key=lambda path: [segments[index].step_index for index in path if trained[index]])
    for path in paths:
        tokens = concatenated(tree[index] for index in path)
        tokens.mask[0] = False  # the first token has no log-probability under the model
        if tokens.mask.any():
            yield TrainingSequence(trajectory.trajectory_id, tokens)
        for index in path:
            tree[index] = tree[index]._replace(mask=np.zeros_like(tree[index].mask))


def _path(segments: Sequence[Segment], end: int) -> list[int]:
    """Return the indexes of the segments from the root to `end`."""
    path: list[int] = []
    at: int | None = end
    while at is not None:
        path.append(at)
        at = segments[at].parent
    return path[::-1]
