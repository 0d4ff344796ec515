"""How many groups processes start within the capacity."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agent_flow.gateway.budget import GroupBudget


def answer(capacity: int | None, decided: int = 0, **changes: Any) -> dict[str, Any]:
    plain = {"journal_id": "j", "groups_refused": 0, "ended": False}
    return {**plain, "groups_admitted": decided, "free_staleness_capacity": capacity, **changes}


def test_nothing_starts_before_the_first_answer_or_after_the_end() -> None:
    budget = GroupBudget()
    assert not budget.free
    budget.update(answer(None))
    assert budget.free
    budget.update(answer(None, ended=True))
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
            budget.update(answer(capacity, before + decided))
            while budget.free:
                budget.started()
                started += 1
        assert started - decided <= max(capacity, processes if capacity else 0)
    if capacity >= processes:
        assert started > 0


def test_another_journal_counts_from_its_own_totals() -> None:
    budget = GroupBudget()
    budget.update(answer(1, 100))
    budget.started()
    assert not budget.free
    budget.update(answer(1, 0, journal_id="k"))
    assert budget.free
