"""The rewards that a completion carries are in revision 0, however the two topics interleave."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.assemble import ANONYMOUS_KEY, InMemoryPartition, reward, session, step

from clawstream.schemas.records import Tick
from clawstream.schemas.records.rewards import COMPLETION_MAX, COMPLETION_NAME
from clawstream.stream_jobs.assemble.state.annotations import REWARDS_MAX
from clawstream.stream_jobs.assemble.state.trajectories import REWARDS, STEPS

OWN = reward("k", 1.0, name="complete_trajectory")
END = session("k", "completed", rewards={COMPLETION_NAME: 1.0})
STEP = step("k", 0)


def revisions(worker: InMemoryPartition, key: str = "k") -> list[list[tuple[str, float | None]]]:
    """Return the rewards (name, value) of each revision of the candidate."""
    made = [c for (k, _), c in sorted(worker.candidates.items()) if k == key]
    return [[(r.name, r.value) for r in c.rewards] for c in made]


def test_an_end_that_is_read_before_its_reward_has_it_in_revision_0() -> None:
    worker = InMemoryPartition().feed((STEPS, 1, STEP), (STEPS, 2, END))
    assert revisions(worker) == [[("complete_trajectory", 1.0)]]


def test_an_end_brings_several_rewards_by_name() -> None:
    end = replace(END, rewards={"style": 0.5, "exact": 1.0})
    worker = InMemoryPartition().feed((STEPS, 1, STEP), (STEPS, 2, end))
    worker.feed((REWARDS, 3, reward("k", 1.0, name="exact")))
    worker.feed((REWARDS, 3, reward("k", 0.5, name="style")))
    assert revisions(worker) == [[("exact", 1.0), ("style", 0.5)]]


@pytest.mark.parametrize("end_at", range(4))
def test_the_same_reward_on_its_own_topic_adds_no_revision(end_at: int) -> None:
    """The reward comes three times: a client repeats its request until it has a reply."""
    records = [(REWARDS, 3, OWN)] * 3
    records.insert(end_at, (STEPS, 3, END))  # type: ignore[arg-type]
    worker = InMemoryPartition().feed((STEPS, 1, STEP))
    for record in [*records, (STEPS, 4, replace(END, event_id="repeated"))]:
        worker.feed(record)
        worker.crash()
    assert revisions(worker) == [[("complete_trajectory", 1.0)]] and not worker.dead_letters


def test_it_is_the_reward_of_the_whole_trajectory_like_one_on_claw_rewards() -> None:
    by_end = InMemoryPartition().feed((STEPS, 1, STEP), (STEPS, 2, END))
    by_reward = InMemoryPartition().feed((STEPS, 1, STEP), (REWARDS, 1, OWN))
    by_reward.feed((STEPS, 2, replace(END, rewards=None)))
    assert by_end.last("k") == by_reward.last("k")


@pytest.mark.parametrize("steps_first", [True, False])
def test_a_correction_replaces_it_in_any_order(steps_first: bool) -> None:
    ends = [(STEPS, 1, STEP), (STEPS, 2, END)]
    rewards = [(REWARDS, 1, OWN), (REWARDS, 2, replace(OWN, value=0.2, reward_revision=1))]
    worker = InMemoryPartition()
    for record in [*ends, *rewards] if steps_first else [ends[0], *rewards, ends[1]]:
        worker.feed(record)  # type: ignore[arg-type]
    assert [r.value for r in worker.last("k").rewards] == [0.2]


@pytest.mark.parametrize("steps_first", [True, False])
def test_of_equal_revisions_the_first_on_claw_rewards_counts_in_any_order(
    steps_first: bool,
) -> None:
    """As the view `rewards` of the lake has it, which does not read session events."""
    ends = [(STEPS, 1, STEP), (STEPS, 2, END)]
    rewards = [(REWARDS, 1, replace(OWN, value=0.2, event_id="other")), (REWARDS, 2, OWN)]
    worker = InMemoryPartition()
    for record in [*ends, *rewards] if steps_first else [ends[0], *rewards, ends[1]]:
        worker.feed(record)  # type: ignore[arg-type]
        worker.crash()
    assert [r.value for r in worker.last("k").rewards] == [0.2]
    worker.feed((REWARDS, 3, replace(OWN, value=0.9, event_id="third")))
    assert [r.value for r in worker.last("k").rewards] == [0.2]


def test_an_end_that_waits_for_its_steps_brings_its_reward() -> None:
    worker = InMemoryPartition().feed((STEPS, 1, END), (STEPS, 2, STEP))
    worker.snapshot()
    worker.crash()
    worker.feed((STEPS, 600, Tick(partition=0)))
    assert revisions(worker) == [[("complete_trajectory", 1.0)]]


def test_an_end_of_an_anonymous_session_brings_the_reward_of_its_trajectory() -> None:
    end = session(
        ANONYMOUS_KEY, "completed", step_id=f"{ANONYMOUS_KEY}~C0.0", rewards={COMPLETION_NAME: 0.5}
    )
    worker = InMemoryPartition().feed((STEPS, 1, step(ANONYMOUS_KEY, 0)), (STEPS, 2, end))
    (found,) = worker.last(f"{ANONYMOUS_KEY}~C0").rewards
    assert (found.step_id, found.value) == (None, 0.5)


def test_an_end_after_the_end_changes_nothing() -> None:
    worker = InMemoryPartition().feed((STEPS, 1, STEP), (STEPS, 2, replace(END, rewards=None)))
    worker.feed((STEPS, 3, replace(END, event_id="again")))
    assert revisions(worker) == [[]] and not worker.dead_letters


def test_it_is_kept_beyond_the_limit_of_rewards() -> None:
    many = [reward("k", 0.0, name=str(n)) for n in range(REWARDS_MAX)]
    worker = InMemoryPartition().feed((STEPS, 1, STEP), *((REWARDS, 1, one) for one in many))
    worker.feed((STEPS, 2, END), (REWARDS, 2, OWN))
    assert ("complete_trajectory", 1.0) in revisions(worker)[0]
    assert not worker.dead_letters and len(worker.last("k").rewards) == REWARDS_MAX + 1


@pytest.mark.parametrize(
    ("rewards", "detail"),
    [
        ({"a": float("nan")}, "nan is not in"),
        ({"a": 1.0, "b": 2e6}, "2e+06 is not in"),
        ({"a" * 201: 1.0}, "200"),
        ({str(n): 1.0 for n in range(COMPLETION_MAX + 1)}, "at most 100"),
    ],
)
def test_rewards_that_no_gateway_writes_are_a_dead_letter(
    rewards: dict[str, float], detail: str
) -> None:
    worker = InMemoryPartition().feed((STEPS, 1, STEP), (STEPS, 2, replace(END, rewards=rewards)))
    (letter,) = worker.dead_letters
    assert letter.reason == "invalid" and detail in letter.detail and not worker.candidates
