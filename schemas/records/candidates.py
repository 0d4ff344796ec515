"""Records of `claw.candidates`: the input of admission."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clawstream.schemas.records.parts import (
    Channel,
    CreatedAt,
    Int32,
    Millis,
    Outcome,
    RewardValue,
    RunId,
    TrajectoryKey,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateStep:
    """One step of a candidate, without its tokens."""

    step_id: str
    """Step."""
    index: Int32
    """Position in the trajectory."""
    response_tokens: Int32
    """Sampled tokens."""
    trainable: bool
    """May be trained."""
    reason: str | None = None
    """Why it can't be trained; null: it can."""
    quality: float | None = None
    """Quality score in [0, 1]: a curation's if there is one, else the assessment's; null: not
    scored.
    """
    tags: tuple[str, ...] = ()
    """Names of the step's tags, such as sub_agent or title, and those of curations; a policy may
    leave them out of training.
    """
    assessed_quality: float | None = None
    """The assessment's quality, also where a curation has another; null: not assessed."""
    oldest_sync_index: int | None = None
    """Lowest sync index of this run among its tokens; null: no version of this run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A closed trajectory at one revision, as input of admission; at most 4 MiB. Key: run.

    The headers topic_id, partition, first_offset and last_offset locate the payload.
    """

    run_id: RunId
    channel: Channel
    trajectory_key: TrajectoryKey
    trajectory_id: str
    """The trajectory: equal to the key, or `<key>~<ulid>` in an anonymous session."""
    group_id: str
    """Group."""
    group_size: Int32 | None = None
    """Number of members that the group is to have; null: not given."""
    round: Int32 | None = None
    """Round of the group; null: not given."""
    revision: int
    """From 0; the highest counts."""
    outcome: Outcome
    opened_at: Millis
    """Log timestamp of the first record."""
    closed_at: Millis
    """Log timestamp at which it closed."""
    rewards: tuple[RewardValue, ...]
    """By source, name and target, sorted."""
    steps: tuple[CandidateStep, ...]
    """Steps by index in the trajectory."""
    prompt_tokens: int
    """Tokens of the environment's segments, each counted once."""
    trainable_tokens: int
    """Sampled tokens of the trainable steps."""
    oldest_sync_index: int | None = None
    """Lowest sync index of this run among the trainable tokens; null: no version of this run."""
    newest_sync_index: int | None = None
    """Highest sync index of this run among the trainable tokens; null: no version of this run."""
    trainable: bool
    """False: must not be trained at all."""
    reason: str | None = None
    """Why it can't be trained; null: it can."""
    quality: float | None = None
    """Quality of the trajectory in [0, 1]: a curation's if there is one, else the assessment's;
    null: not scored.
    """
    tags: tuple[str, ...] = ()
    """Curation labels."""
    assessed_quality: float | None = None
    """The assessment's quality of the whole, also where a curation has another; null: none."""
    assessment_revision: int | None = None
    """Revision of the assessment that counts; null: not assessed yet."""
    traceparent: str | None = None
    """Trace context of the span of the trajectory's client (W3C): that of its first call that has
    one; null: no call has one.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionPolicy:
    """How a run's trajectories become batches. Key: run.

    A policy is in force from its own offset on; the first opens the run.
    """

    run_id: RunId
    policy_version: int
    """Rises with each change."""
    group_size: Int32
    """Members of a group, when the opened event gives none."""
    min_members: Int32
    """Usable members a short group must have to be admitted; below: refused."""
    required_rewards: tuple[str, ...]
    """Each `source` or `source/name` that a member must have a value of."""
    reward_weights: Mapping[str, float]
    """`source/name` to weight; the training reward is the weighted sum. Empty: every
    trajectory-level reward counts 1.
    """
    reward_deadline_ms: int
    """After closing; then a member without its rewards is dropped. Milliseconds of event time."""
    group_deadline_ms: int
    """After the first member closed; then the group is admitted short or refused. Milliseconds of
    event time.
    """
    max_staleness: int | None = None
    """Versions between the one to be trained and the oldest token; null: no limit. Channel val has
    none.
    """
    drop_zero_variance: bool
    """Refuse groups whose rewards are all equal: they carry no gradient."""
    min_trainable_tokens: int
    """Members with fewer are unusable."""
    max_trajectory_tokens: int | None = None
    """Members with more tokens are unusable."""
    train_outcomes: tuple[Outcome, ...]
    """Outcomes that are usable."""
    batch_groups: Int32
    """Groups a batch."""
    batch_tokens: int | None = None
    """Or close a batch at this many trainable tokens, whichever comes first."""
    sync_every: Int32
    """Batches a weight version; fixed for the run."""
    val_groups: Int32
    """Groups a batch of channel val."""
    val_deadline_ms: int
    """A batch of channel val closes this long after its first group, milliseconds of event time."""
    algorithm: str
    """What the trainer will do with it, e.g. grpo."""
    min_quality: float | None = None
    """Members below are unusable."""
    untrained_tags: tuple[str, ...] = ()
    """Steps with one of these tags are not trained."""
    min_step_quality: float | None = None
    """Steps below are not trained; null: all are. One without a score passes."""
    require_assessment: bool = False
    """A member waits for its assessment as for a required reward."""
    published_by: str | None = None
    """`settings`, or the person who set it; null: settings."""
    created_at: CreatedAt


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The run takes no more trajectories. Key: run."""

    run_id: RunId
    reason: str | None = None
    """Why."""
    created_at: CreatedAt
