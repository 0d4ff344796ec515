"""Admission and its policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, model_validator

from schemas.records import Channel, Outcome
from schemas.reward_matching import SMALLEST_GROUP
from schemas.settings.base import Count, Positive, RewardNumber, Section


class PolicySettings(Section):
    """The admission policy of the run, published when it differs from the one in force."""

    group_size: Count = Field(8, description="members a group")
    min_members: Count = Field(2, description="usable members of a short group")
    required_rewards: tuple[str, ...] | None = Field(
        None,
        description="rewards each member needs, `source` or `source/name`; default: every "
        "function that counts",
    )
    reward_weights: Mapping[str, RewardNumber] = Field(
        {}, description="`source/name` to weight in the training reward"
    )
    reward_deadline_s: Positive = Field(600.0, description="slow reward models or people")
    group_deadline_s: Positive = Field(1800.0, description="stragglers of a group")
    max_staleness: Annotated[int, Field(ge=0)] | None = Field(
        None, description="versions; how far off-policy"
    )
    drop_zero_variance: bool = Field(True, description="keep groups whose rewards are all equal")
    min_trainable_tokens: Annotated[int, Field(ge=0)] = Field(
        1, description="drop near-empty replies"
    )
    max_trajectory_tokens: Count | None = Field(None, description="memory of the trainer")
    train_outcomes: tuple[Outcome, ...] = Field(
        ("completed", "failed"), description="train on time-outs too"
    )
    batch_groups: Count = Field(16, description="groups a batch")
    batch_tokens: Count | None = Field(
        None, description="close a batch early at this many trainable tokens"
    )
    sync_every: Count = Field(1, description="batches a weight version; fixed for the run")
    val_groups: Count = Field(64, description="groups a validation batch")
    val_deadline_s: Positive = Field(60.0, description="close a validation batch that stays short")
    algorithm: str = Field("cispo", description="what the trainer does; algorithms.md lists them")
    min_quality: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="drop low-quality trajectories"
    )
    min_step_quality: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="leave out low-quality steps"
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
        smallest = SMALLEST_GROUP.get(self.algorithm, 1)
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
