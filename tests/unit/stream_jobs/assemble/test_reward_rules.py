"""Which reward counts when several come: the table in docs/reward-functions.md, a test a row."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.assemble import InMemoryPartition, reward, session, step

from clawstream.schemas.records import Reward
from clawstream.stream_jobs.assemble.state.trajectories import REWARDS, STEPS

CLOSED = ((STEPS, 1, step("k", 0)), (STEPS, 2, session("k", "completed")))


def counted(*rewards: Reward) -> list[tuple[str, str | None, float | None]]:
    """Return (source, step, value) of the rewards of a closed trajectory."""
    worker = InMemoryPartition().feed(*CLOSED)
    worker.feed(*((REWARDS, 3 + i, one) for i, one in enumerate(rewards)))
    found = [(r.source, r.step_id, r.value) for r in worker.last("k").rewards]
    return sorted(found, key=lambda each: (each[0], each[1] or ""))


def test_a_reward_that_comes_again_changes_nothing() -> None:
    worker = InMemoryPartition().feed(*CLOSED)
    worker.feed((REWARDS, 3, reward("k", 0.1)))
    before = worker.last("k")
    worker.feed((REWARDS, 4, reward("k", 0.1)))
    assert worker.last("k") == before


@pytest.mark.parametrize("order", [1, -1])
def test_a_higher_revision_replaces_a_lower_one_in_any_order(order: int) -> None:
    both = [reward("k", 0.1, revision=1), reward("k", 0.7, revision=2)]
    assert counted(*both[::order]) == [("env", None, 0.7)]


def test_of_different_values_with_one_revision_the_first_counts() -> None:
    assert counted(reward("k", 0.1), reward("k", 0.9)) == [("env", None, 0.1)]


def test_a_revision_without_a_value_takes_the_value_back() -> None:
    assert counted(reward("k", 0.1), reward("k", None, revision=1)) == [("env", None, None)]


def test_a_revision_with_a_value_replaces_no_reward() -> None:
    assert counted(reward("k", None), reward("k", 0.4, revision=1)) == [("env", None, 0.4)]


def test_rewards_of_different_sources_or_targets_all_count() -> None:
    human = replace(reward("k", 0.2), source="human", event_id="h")
    assert counted(reward("k", 0.1), reward("k", 0.9, n=0), human) == [
        ("env", None, 0.1), ("env", "k~C0.0", 0.9), ("human", None, 0.2),
    ]  # fmt: skip
