"""The row that all formats write: one training sequence or one conversation of a trajectory."""

from __future__ import annotations

from dataclasses import dataclass

from clawstream.schemas.conversation import Chat
from clawstream.trainer.data.sequences import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The trajectory of a row, from the view `trajectories` at the pinned Delta versions.

    Attributes:
        reward: sum of the trajectory-level rewards; None without any, never 0.0 then.
        group_reward_mean: mean of `reward` over all members of the group and round, filtered-out
            members included, replaced trajectories excluded; None without any reward.
        group_reward_std: population standard deviation of the same.
        group_rewards: number of members with a reward.
        trainable: False: no token of the trajectory may be trained.
        metadata_json: of the `opened` event.
    """

    run_id: str
    trajectory_id: str
    group_id: str
    round: int | None
    channel: str
    outcome: str
    reward: float | None
    group_reward_mean: float | None
    group_reward_std: float | None
    group_rewards: int
    trainable: bool
    quality: float | None
    tags: tuple[str, ...]
    metadata_json: str | None

    @property
    def advantage(self) -> float | None:
        """Return the reward minus the mean of its group; None without a reward."""
        if self.reward is None or self.group_reward_mean is None:
            return None
        return self.reward - self.group_reward_mean


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExportRow:
    """One row.

    Attributes:
        step_id: last step of the sequence or conversation.
        step_tags: names of the tags of that step, such as `sub_agent`.
        model: as the client named it.
        chat: the request and reply of that step; None where they are no chat or a blob is missing.
        tokens: prompt and response of that step, with the loss mask; None in formats without
            tokens.
    """

    origin: Origin
    step_id: str
    step_tags: tuple[str, ...]
    model: str
    chat: Chat | None
    tokens: Tokens | None
