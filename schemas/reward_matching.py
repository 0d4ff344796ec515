"""Match rewards against a policy and combine them into one training reward.

Shared by admission and trainer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from clawstream.schemas.algorithms import reads_rewards
from clawstream.schemas.records import ReadyBatch, RewardValue
from clawstream.schemas.records.rewards import out_of_bounds


def matches(requirement: str, source: str, name: str) -> bool:
    """Whether a reward satisfies a requirement `source` or `source/name`."""
    wanted_source, sep, wanted_name = requirement.partition("/")
    return wanted_source == source and (not sep or wanted_name == name)


def missing(required: Iterable[str], rewards: Iterable[RewardValue]) -> tuple[str, ...]:
    """Requirements with no reward at all yet, valued or explicitly absent."""
    rewards = tuple(rewards)
    return tuple(r for r in required if not any(matches(r, v.source, v.name) for v in rewards))


def valueless(required: Iterable[str], rewards: Iterable[RewardValue]) -> tuple[str, ...]:
    """Requirements for which there is an explicit `no_reward` and no value: they will not come."""
    rewards = tuple(rewards)
    return tuple(
        r
        for r in required
        if (hits := [v for v in rewards if matches(r, v.source, v.name)])
        and all(v.value is None for v in hits)
    )


def training_reward(weights: Mapping[str, float], rewards: Iterable[RewardValue]) -> float | None:
    """Return the weighted sum of trajectory-level values; None without any value, and for a sum
    that is out of bounds, which admission refuses.

    A missing reward never counts as 0.0.

    Args:
        weights, rewards: See `weighted_sum`.
    """
    total = weighted_sum(weights, rewards)
    return None if total is None or out_of_bounds(total) is not None else total


def weighted_sum(weights: Mapping[str, float], rewards: Iterable[RewardValue]) -> float | None:
    """Return the weighted sum of trajectory-level values, of any size; None without any value.

    Args:
        weights: `source/name` to weight; empty: weight 1 for every trajectory-level reward.
        rewards: All rewards of the candidate.
    """
    terms = [
        v.value * (weights.get(f"{v.source}/{v.name}", 0.0) if weights else 1.0)
        for v in rewards
        if v.step_id is None
        and v.value is not None
        and (not weights or f"{v.source}/{v.name}" in weights)
    ]
    return sum(terms) if terms else None


def step_rewards(weights: Mapping[str, float], rewards: Iterable[RewardValue]) -> dict[str, float]:
    """Return step id to the weighted sum of the step's values; steps without a value are absent.

    Args:
        weights, rewards: See `weighted_sum`.
    """
    found: dict[str, float] = {}
    for v in rewards:
        weight = weights.get(f"{v.source}/{v.name}") if weights else 1.0
        if v.step_id is not None and v.value is not None and weight is not None:
            found[v.step_id] = found.get(v.step_id, 0.0) + v.value * weight
    return found


def groups_without_reward(batch: ReadyBatch) -> tuple[str, ...]:
    """Return the ids of a batch's groups in which no member has a reward that is trained on.

    Rewards of steps count. An algorithm that reads no rewards has no such group.
    """
    if not reads_rewards(batch.algorithm):
        return ()
    weights = batch.reward_weights
    return tuple(
        group.group_id
        for group in batch.groups
        if not any(
            value.value is not None and (not weights or f"{value.source}/{value.name}" in weights)
            for member in group.members
            for value in member.rewards
        )
    )
