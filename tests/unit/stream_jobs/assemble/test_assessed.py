"""Assessments in the fold of assemble.

An assessment revises a candidate as a reward does. A user's curation mark overrides it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.assemble import (
    ANONYMOUS_KEY,
    InMemoryPartition,
    assessment,
    curation,
    session,
    step,
)

from clawstream.stream_jobs.assemble.state.annotations import CurationMark, CurationState
from clawstream.stream_jobs.assemble.state.trajectories import REWARDS, STEPS


def closed(*rewards: Any) -> InMemoryPartition:
    """Complete trajectory k of two steps, then feed these rewards, one per batch."""
    w = InMemoryPartition().feed(
        (STEPS, 0, step("k", 0, [1], [2])), (STEPS, 1, step("k", 1, [1, 2, 3], [4])),
        (STEPS, 2, session("k", "completed")),
    )  # fmt: skip
    for i, event in enumerate(rewards):
        w.feed((REWARDS, 3 + i, event))
    return w


def qualities(w: InMemoryPartition, key: str = "k") -> tuple[float | None, list[float | None]]:
    c = w.last(key)
    return c.quality, [s.quality for s in c.steps]


def test_an_assessment_makes_a_revision_with_its_scores() -> None:
    w = closed()
    assert qualities(w) == (None, [None, None]) and w.last("k").assessment_revision is None
    w = closed(assessment("k", 0.5, 1.0, 0.5))
    assert w.last("k").revision == 1
    assert qualities(w) == (0.5, [1.0, 0.5])
    assert (w.last("k").assessed_quality, w.last("k").assessment_revision) == (0.5, 1)


def test_a_higher_revision_supersedes_and_the_same_once_more_changes_nothing() -> None:
    newer = assessment("k", 0.9, 0.9, 0.9, revision=2)
    w = closed(
        assessment("k", 0.5, 1.0, 0.5), newer, newer, assessment("k", 0.1, 0.1, 0.1, revision=1)
    )
    assert qualities(w) == (0.9, [0.9, 0.9]) and w.last("k").revision == 2


def test_what_a_person_says_counts_and_what_the_rules_said_stays_visible() -> None:
    mark = curation("k", "c", n=1, quality=1.0, tags=("good",))
    for order in ([mark, assessment("k", 0.5, 1.0, 0.0)], [assessment("k", 0.5, 1.0, 0.0), mark]):
        w = closed(*order, curation("k", "whole", quality=0.0))
        assert qualities(w) == (0.0, [1.0, 1.0])
        assert w.last("k").assessed_quality == 0.5
        assert [s.assessed_quality for s in w.last("k").steps] == [1.0, 0.0]
        assert [s.tags for s in w.last("k").steps] == [(), ("good",)]


def test_a_mark_that_was_taken_back_counts_no_more() -> None:
    marks = [
        curation("k", "first", quality=0.25, tags=("odd",)),
        curation("k", "second", quality=0.0, trainable=False),
        curation("k", "undo", takes_back="second"),
    ]
    w = closed(assessment("k", 0.5, 1.0, 0.5), *marks)
    assert w.last("k").trainable and w.last("k").tags == ("odd",)
    assert qualities(w)[0] == 0.25
    w = closed(assessment("k", 0.5, 1.0, 0.5), *marks, curation("k", "u2", takes_back="first"))
    assert qualities(w)[0] == 0.5 and w.last("k").tags == ()
    w = closed(*marks[:2], curation("k", "other", n=1, takes_back="second"))
    assert not w.last("k").trainable, "a mark of another target stays"


@given(st.permutations(range(4)))
def test_marks_may_be_applied_in_any_order(order: list[int]) -> None:
    """Marks may wait for different steps of one trajectory."""
    log = [
        CurationMark(1, "", 0.1, None, None, 0),
        CurationMark(2, "", None, False, None, 1),
        CurationMark(3, "", 0.3, None, ["x"], 2),
        CurationMark(4, "", None, None, None, 3, takes_back=2),
    ]
    state = CurationState()
    for at in order:
        state.apply(log[at])
    assert (state.quality, state.trainable, state.tags) == (0.3, None, ["x"])


def test_an_assessment_of_other_steps_says_nothing_of_these() -> None:
    w = closed(assessment("k", 0.5, 1.0))
    assert qualities(w) == (0.5, [None, None])


def test_an_assessment_that_comes_first_waits() -> None:
    w = InMemoryPartition().feed((REWARDS, 0, assessment("k", 0.5, 0.25)))
    w.feed((STEPS, 1, step("k", 0)), (STEPS, 2, session("k", "completed")))
    assert qualities(w) == (0.5, [0.25]) and w.last("k").revision == 0


def test_in_an_anonymous_session_it_names_the_trajectory() -> None:
    w = InMemoryPartition().feed(
        (STEPS, 0, step(ANONYMOUS_KEY, 0)),
        (STEPS, 1, session(ANONYMOUS_KEY, "completed", step_id=f"{ANONYMOUS_KEY}~C0.0")),
    )
    tid = next(iter(w.trajectories))
    w.feed((REWARDS, 2, assessment(tid, 0.5, 0.25)))
    assert qualities(w, tid) == (0.5, [0.25])
    w.feed((REWARDS, 3, assessment(ANONYMOUS_KEY, 0.5, 0.25)))
    assert [b.reason for b in w.dead_letters] == ["invalid"]


@pytest.mark.parametrize(
    "wrong",
    [
        assessment("k", 1.5), assessment("k", float("nan")), assessment("k", 1.0, -0.1),
        replace(assessment("k", 1.0), trajectory_id="other"),
    ],
)  # fmt: skip
def test_what_is_no_quality_is_dead_lettered(wrong: Any) -> None:
    w = closed(wrong)
    assert [b.reason for b in w.dead_letters] == ["invalid"] and w.last("k").revision == 0


def test_each_step_names_its_own_sync_index() -> None:
    w = InMemoryPartition().feed(
        (STEPS, 0, step("k", 0, version_first="r/3.0", version_last="r/3.0")),
        (STEPS, 1, step("k", 1, [1, 2, 3], version_first="r/5.0", version_last="r/5.0")),
        (STEPS, 2, step("k", 2, [1, 2, 3, 2, 1], version_first="default", version_last="default")),
        (STEPS, 3, session("k", "completed")),
    )  # fmt: skip
    assert [s.oldest_sync_index for s in w.last("k").steps] == [3, 5, None]
    assert (w.last("k").oldest_sync_index, w.last("k").newest_sync_index) == (3, 5)
