"""What a report says of the rewards that are trained on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.admit import cand, fold, policy, reward

from clawstream.ops.replay.report import Outcome
from clawstream.schemas.records import ReadyBatch
from clawstream.schemas.reward_matching import groups_without_reward

PLAIN: dict[str, Any] = {"batch_groups": 1, "drop_zero_variance": False, "required_rewards": ()}


def batches(weights: dict[str, float], **more: Any) -> list[ReadyBatch]:
    """Return the batches of two groups: of rewards 1.0 and 0.0, and of an explicit no_reward."""
    decisions = fold(
        policy(reward_weights=weights, **PLAIN, **more),
        *(cand(f"a{i}", "a", float(i)) for i in range(2)),
        *(cand(f"b{i}", "b", None) for i in range(2)),
    )
    return [decision for decision in decisions if isinstance(decision, ReadyBatch)]


@pytest.mark.parametrize(
    ("weights", "mean", "bare"),
    [
        ({}, 0.5, ["b"]),
        ({"rule/exact": 2.0}, 1.0, ["b"]),
        ({"judge/never": 1.0}, None, ["a", "b"]),
    ],
)
def test_the_mean_and_the_groups_without_a_training_reward(
    weights: dict[str, float], mean: float | None, bare: list[str]
) -> None:
    made = batches(weights)
    assert [group for batch in made for group in groups_without_reward(batch)] == bare
    report = Outcome().add(made).as_dict()
    assert (report["reward_mean"], report["groups_without_reward"]) == (mean, len(bare))
    assert [batch["reward_mean"] for batch in report["batches"]] == [mean, None]


def test_rewards_of_steps_count_and_some_algorithms_need_none() -> None:
    of_step = replace(reward(1.0), step_id="s~0.0")
    (made,) = fold(
        policy(reward_weights={}, algorithm="reinforce_pp", **PLAIN),
        *(cand(f"a{i}", "a", rewards=(of_step,)) for i in range(2)),
    )[-1:]
    assert isinstance(made, ReadyBatch) and groups_without_reward(made) == ()
    assert [groups_without_reward(batch) for batch in batches({}, algorithm="sft")] == [(), ()]
