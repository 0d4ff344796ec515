"""Sessions of known agents: the gateway names them, and inactivity ends them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.assemble import (
    ANONYMOUS_KEY,
    LIMITS,
    InMemoryPartition,
    content,
    curation,
    reward,
    session,
    step,
)

from clawstream.schemas.ids import agent_key, is_anonymous_session, is_gateway_assigned
from clawstream.schemas.records import Step, Tick
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.assemble.state.trajectories import REWARDS, STEPS

SESSION = agent_key("claude-code", b"api key", "0b9f")
PATIENT = replace(LIMITS, anonymous_inactivity=100, agent_inactivity=300)


def fed(*steps: tuple[int, Step]) -> InMemoryPartition:
    return InMemoryPartition(PATIENT).feed(*[(STEPS, at, s) for at, s in steps])


def test_a_session_is_known_by_its_key() -> None:
    assert SESSION.startswith("agent-claude-code-")
    assert (
        is_gateway_assigned(SESSION)
        and is_gateway_assigned(ANONYMOUS_KEY)
        and not is_anonymous_session(SESSION)
    )
    assert not is_gateway_assigned("claude-code-" + "0" * 32) and not is_gateway_assigned(
        f"{SESSION}~C1"
    )
    assert (
        len(
            {
                SESSION,
                agent_key("codex", b"api key", "0b9f"),
                agent_key("claude-code", b"api key0", "b9f"),
            }
        )
        == 3
    )


def test_a_pause_ends_a_session_as_completed_and_the_next_call_begins_the_next_trajectory() -> None:
    w = fed(
        (0, step(SESSION, 1)), (250, step(SESSION, 2, (9, 9))), (551, step(SESSION, 3, (1, 2, 4)))
    )
    (done,) = w.trajectories.values()
    assert (done.trajectory_id, done.trajectory_key) == (f"{SESSION}~C1", SESSION)
    assert (done.outcome, done.reason, done.closed_at) == ("completed", "inactive", 551)
    assert done.outcome in Settings().admit.policy.train_outcomes
    assert [s.step_id for s in done.steps] == [f"{SESSION}~C1.0", f"{SESSION}~C2.0"]
    w.feed((STEPS, 900, Tick(partition=0)))
    assert [s.step_id for s in w.trajectories[f"{SESSION}~C3"].steps] == [f"{SESSION}~C3.0"]
    assert not w.marks and not w.dead_letters


def test_an_agent_may_pause_longer_than_who_names_nothing() -> None:
    w = fed((0, step(SESSION, 1)), (0, step(ANONYMOUS_KEY, 1)))
    w.feed((STEPS, 101, Tick(partition=0)))
    assert list(w.trajectories) == [f"{ANONYMOUS_KEY}~C1"]
    assert Settings().jobs.agent_inactivity_s > Settings().jobs.anonymous_inactivity_s


def test_nothing_but_time_splits_a_session() -> None:
    """Sub-agents and compactions start new prompts; these are branches of one segment tree."""
    w = fed(*[(0, step(SESSION, n, (n,) * n, (n,))) for n in range(1, 6)], (301, step("t", 9)))
    assert [len(t.steps) for t in w.trajectories.values()] == [5]


def test_a_completion_that_names_a_step_ends_the_session_at_once() -> None:
    w = fed((0, step(SESSION, 1)))
    w.feed(
        (STEPS, 1, session(SESSION, "failed", step_id=f"{SESSION}~C1.0")),
        (STEPS, 2, step(SESSION, 2)),
    )
    assert [(t.trajectory_id, t.outcome) for t in w.trajectories.values()] == [
        (f"{SESSION}~C1", "failed")
    ]
    w.feed(
        (STEPS, 3, step(SESSION, 1)),
        (STEPS, 4, session(SESSION, "failed", "again", step_id=f"{SESSION}~C1.0")),
    )
    assert [key for _, key in w.state.opened] == [f"{SESSION}~C2"] and not w.marks


def test_rewards_and_marks_name_a_step_of_the_session() -> None:
    w = fed((0, step(SESSION, 1))).feed(
        (REWARDS, 0, replace(reward(SESSION, 0.5, 1), trajectory_id=SESSION)),
        (REWARDS, 0, curation(SESSION, "c", 1, quality=0.25)),
        (REWARDS, 0, reward(SESSION)),
        (STEPS, 0, session(SESSION, "completed")),
        (STEPS, 301, Tick(partition=0)),
    )
    found = w.last(f"{SESSION}~C1")
    assert [(r.value, r.step_id) for r in found.rewards] == [(0.5, None)] and found.steps[
        0
    ].quality == 0.25
    assert [(b.source, b.reason) for b in w.dead_letters] == [
        (REWARDS, "invalid"),
        (STEPS, "invalid"),
    ]


@pytest.mark.parametrize("stored", [False, True])
def test_a_new_owner_goes_on_with_the_session(stored: bool) -> None:
    records = [
        (0, step(SESSION, 1)),
        (10, step(SESSION, 2)),
        (400, step(SESSION, 3)),
        (710, step(SESSION, 4)),
    ]
    plain, w = fed(*records), InMemoryPartition(PATIENT)
    for at, one in records:
        w.feed((STEPS, at, one))
        if stored:
            w.snapshot()
        w.crash()
    assert (
        w.state.agent_open.keys() == plain.state.agent_open.keys() and len(w.state.agent_open) == 1
    )
    assert content(w) == content(plain) and len(w.trajectories) == 2
