"""Rewards of validation trajectories for each version that sampled them. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from clawstream.schemas.records import BatchGroup, BatchMember, ReadyBatch
from clawstream.schemas.reward_matching import training_reward

GroupKey = tuple[str, int]
"""Group id and round."""
NORMAL_QUANTILE = 1.96
"""Of a two-sided 95% interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """The rewards of all validation trajectories that one version sampled.

    Attributes:
        sync_index: of the version. Versions of one sync index that differ in their attempt were
            trained from the same batches and count together.
        trajectories: that have a reward.
        mean: of their training rewards.
        interval: half the width of the 95% interval of the mean; None for a single group.
    """

    sync_index: int
    trajectories: int
    mean: float
    interval: float | None

    @property
    def metrics(self) -> dict[str, float]:
        """The values by the names of their definitions; an unknown interval is absent."""
        found = {"val/reward_mean": self.mean, "val/trajectories": float(self.trajectories)}
        if self.interval is not None:
            found["val/reward_interval"] = self.interval
        return found


class Validations:
    """Fold the batches of channel val.

    Admission writes a trajectory into one batch at most, with the rewards that it waited for. A
    batch that is added again changes nothing.
    """

    def __init__(self) -> None:
        # By version, group and trajectory.
        self._rewards: defaultdict[int, dict[GroupKey, dict[str, float]]] = defaultdict(dict)

    def add(self, batches: Iterable[ReadyBatch]) -> list[Validation]:
        """Add batches; return the new state of the versions that they are about, ascending.

        A trajectory without a reward, or without a token of a version of this run, is left out. One
        that several versions sampled counts for the oldest.
        """
        changed = set[int]()
        for batch, group, member in _members(batches):
            reward = training_reward(batch.reward_weights, member.rewards)
            version = member.oldest_sync_index
            if reward is None or version is None:
                continue
            members = self._rewards[version].setdefault((group.group_id, group.round), {})
            members[member.trajectory_id] = reward
            changed.add(version)
        return [self._of(version) for version in sorted(changed)]

    def _of(self, sync_index: int) -> Validation:
        return summary(sync_index, [[*g.values()] for g in self._rewards[sync_index].values()])


def summary(sync_index: int, groups: Sequence[Sequence[float]]) -> Validation:
    """Return mean and interval.

    Members of a group have the same task, so their rewards depend on each other: the standard error
    is that of groups as clusters, with the factor G / (G - 1) for G groups.
    Source: Miller, "Adding Error Bars to Evals", arXiv 2411.00640, section 2.2.

    Args:
        sync_index: of the version.
        groups: rewards of the members of each; at least one group, and none is empty.
    """
    count = sum(map(len, groups))
    mean = math.fsum(r for group in groups for r in group) / count
    interval = None
    if len(groups) > 1:
        squares = math.fsum(math.fsum(r - mean for r in group) ** 2 for group in groups)
        clusters = len(groups) / (len(groups) - 1)
        interval = NORMAL_QUANTILE * math.sqrt(clusters * squares) / count
    return Validation(sync_index=sync_index, trajectories=count, mean=mean, interval=interval)


def _members(
    batches: Iterable[ReadyBatch],
) -> Iterator[tuple[ReadyBatch, BatchGroup, BatchMember]]:
    for batch in batches:
        for group in batch.groups:
            for member in group.members:
                yield batch, group, member
