"""How many groups processes start within the capacity."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.agent_flow.gateway.budget import LEAST_IDLE_S, GroupBudget


def answer(capacity: int | None, decided: int = 0, **changes: Any) -> dict[str, Any]:
    plain = {"journal_id": "j", "groups_refused": 0, "ended": False}
    return {**plain, "groups_admitted": decided, "free_staleness_capacity": capacity, **changes}


def test_nothing_starts_before_the_first_answer_or_after_the_end() -> None:
    budget = GroupBudget()
    assert not budget.free
    budget.update(answer(None), 0.0)
    assert budget.free
    budget.update(answer(None, ended=True), 0.0)
    assert not budget.free


@given(
    capacity=st.integers(0, 20),
    processes=st.integers(1, 3),
    before=st.integers(0, 5),
    decisions=st.lists(st.integers(0, 20), max_size=6),
)
def test_groups_in_progress_stay_within_the_capacity(
    capacity: int, processes: int, before: int, decisions: list[int]
) -> None:
    """Groups that others decided before this process began do not count."""
    budgets = [GroupBudget(processes) for _ in range(processes)]
    started, decided = 0, 0
    for more in [0, *decisions]:
        decided += min(more, started - decided)
        for budget in budgets:
            budget.update(answer(capacity, before + decided), 0.0)
            while budget.free:
                budget.group_started()
                started += 1
        assert started - decided <= max(capacity, processes if capacity else 0)
    if capacity >= processes:
        assert started > 0


def test_another_journal_counts_from_its_own_totals() -> None:
    budget = GroupBudget()
    budget.update(answer(1, 100), 0.0)
    budget.group_started()
    assert not budget.free
    budget.update(answer(1, 0, journal_id="k"), 0.0)
    assert budget.free


def play_all(budget: GroupBudget) -> int:
    """Start and end as many groups as are free; return their number."""
    started = 0
    while budget.free:
        budget.group_started()
        budget.group_ended()
        started += 1
    return started


@given(batch=st.integers(2, 8), processes=st.integers(2, 4))
def test_one_process_goes_on_when_all_others_have_died(batch: int, processes: int) -> None:
    """Each batch needs as many groups as the capacity; only this process plays any."""
    budget, now, waiting, decided = GroupBudget(processes), 0.0, 0, 0
    while decided < 5 * batch and now < 100 * LEAST_IDLE_S:
        budget.update(answer(batch, decided), now)
        waiting += play_all(budget)
        if waiting >= batch:
            decided, waiting = decided + waiting, 0
        now += LEAST_IDLE_S / 4
    assert decided >= 5 * batch


def test_a_process_whose_rollouts_take_minutes_is_not_counted_out() -> None:
    """The other process ends its group after a rollout's whole time."""
    budget, rollout_s = GroupBudget(2, 10 * LEAST_IDLE_S), 10 * LEAST_IDLE_S
    budget.update(answer(4), 0.0)
    assert play_all(budget) == 2
    for tenth in range(1, 10):
        budget.update(answer(4), tenth / 10 * rollout_s)
        assert not budget.free
    budget.update(answer(4), 0.1 * rollout_s + rollout_s)
    assert budget.free


@pytest.mark.parametrize(
    ("processes", "capacity", "playing"),
    [(1, 4, False), (2, 0, False), (2, 4, True)],
    ids=["alone", "training has no capacity", "a group is in progress"],
)
def test_waiting_is_no_sign_of_a_death(processes: int, capacity: int, playing: bool) -> None:
    budget = GroupBudget(processes)
    budget.update(answer(4), 0.0)
    play_all(budget)
    if playing:
        budget.group_started()
    for now in range(1, 20):
        budget.update(answer(capacity), now * LEAST_IDLE_S)
        assert not budget.free
