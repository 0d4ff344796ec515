"""Admission and its policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, model_validator

from clawstream.schemas.algorithms import smallest_group
from clawstream.schemas.records import Channel, Outcome
from clawstream.schemas.settings.base import Count, Positive, RewardNumber, Section


class PolicySettings(Section):
    """The admission policy of the run, published when it differs from the one in force."""

    group_size: Count = Field(
        8, description="members of a group; more give a better baseline, fewer a faster one"
    )
    min_members: Count = Field(
        2, description="a short group with at least as many usable members is trained"
    )
    required_rewards: tuple[str, ...] | None = Field(
        None,
        description="rewards each member needs, `source` or `source/name`; default: every "
        "function that counts",
    )
    reward_weights: Mapping[str, RewardNumber] = Field(
        {},
        description="`source/name` to weight in the training reward; others have no part in it. "
        "Empty: each weighs 1",
    )
    reward_deadline_s: Positive = Field(
        600.0,
        description="a closed trajectory waits so long for required rewards; raise it for slow "
        "reward models or people",
    )
    group_deadline_s: Positive = Field(
        1800.0,
        description="a group waits so long for its other members; raise it for slow ones",
    )
    max_staleness: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="tokens of at most so many versions before are trained; lower it to train "
        "less off-policy, null: any",
    )
    drop_zero_variance: bool = Field(
        True,
        description="true refuses groups whose rewards are all equal; false if an algorithm learns "
        "from them",
    )
    min_trainable_tokens: Annotated[int, Field(ge=0)] = Field(
        1, description="trajectories with fewer are refused; raise it to drop near-empty replies"
    )
    max_trajectory_tokens: Count | None = Field(
        None,
        description="trajectories with more tokens are refused; set it to what fits the trainer's "
        "memory",
    )
    train_outcomes: tuple[Outcome, ...] = Field(
        ("completed", "failed"),
        description="others are refused; add timed_out to train on time-outs too",
    )
    batch_groups: Count = Field(16, description="groups a batch")
    batch_tokens: Count | None = Field(
        None, description="closes a batch early at so many trainable tokens"
    )
    sync_every: Count = Field(1, description="batches a weight version; fixed for the run")
    val_groups: Count = Field(64, description="groups a validation batch")
    val_deadline_s: Positive = Field(60.0, description="closes a validation batch that stays short")
    algorithm: str = Field("cispo", description="what the trainer does; algorithms.md lists them")
    min_quality: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="trajectories of a lower quality are refused; null: none is"
    )
    min_step_quality: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="steps of a lower quality are left out; null: none is"
    )
    require_assessment: bool | None = Field(
        None,
        description="groups wait for the quality rules; default: if a quality threshold is set",
    )
    untrained_tags: tuple[str, ...] = Field(
        ("title", "summary"), description="tags of calls that are not trained, e.g. add sub_agent"
    )

    @model_validator(mode="after")
    def _consistent(self) -> PolicySettings:
        if self.min_members > self.group_size:
            raise ValueError(
                f"min_members {self.min_members} is above group_size {self.group_size}"
            )
        if "replaced" in self.train_outcomes:
            raise ValueError(
                "train_outcomes has replaced: another trajectory takes the place of such a one in "
                "its group, so it is never trained"
            )
        smallest = smallest_group(self.algorithm)
        if self.group_size < smallest:
            raise ValueError(
                f"{self.algorithm} needs groups of at least {smallest}: a smaller one has no "
                "advantage"
            )
        return self


class AdmitSettings(Section):
    """The admission process: one active for each run and channel."""

    channels: tuple[Channel, ...] = Field(
        ("train", "val"), description="one process for each channel instead"
    )
    val_every: Count | None = Field(
        None, description="versions between two validation rounds that rollouts are asked for"
    )
    policy: PolicySettings = PolicySettings()
