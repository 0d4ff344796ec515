"""The fold of the comparison job: records in, groups out; a crash is a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.admit import cand, tick

from clawstream.schemas.records import Candidate, Place, RewardValue, Tick
from clawstream.stream_jobs.compare.fold import ClosedGroup, GroupFold

WAIT_MS = 1000
NAMES = frozenset({("judge", "best", "1")})
BEST = RewardValue(
    source="judge", name="best", function_version="1", value=1.0, reward_revision=1
)  # fmt: skip


class Crash:
    """The worker ends; another one reads again from its position."""


def place(at: int) -> Place:
    return Place(topic_id="t", partition=0, first_offset=at, last_offset=at)


def new_fold(tickers: int = 1) -> GroupFold:
    return GroupFold(tickers, 2, WAIT_MS, lambda run: NAMES if run == "r" else frozenset())


def fold(*events: Any, tickers: int = 1) -> list[ClosedGroup]:
    """Return the groups that are closed."""
    state, groups, log = new_fold(tickers), list[ClosedGroup](), list[Any]()
    for event in events:
        if not isinstance(event, Crash):
            groups += folded(state, [event], len(log))
            log.append(event)
            continue
        first = state.position(len(log) - 1) + 1
        state = new_fold(tickers)
        for before in log[:first]:  # as the job does: event time at the position
            if isinstance(before, Tick):
                state.fold(0, before)
        groups += folded(state, log[first:], first)
    return groups


def folded(state: GroupFold, events: Sequence[Any], first: int) -> list[ClosedGroup]:
    return [
        group
        for at, event in enumerate(events, first)
        for group in state.fold(at, event, place(at))
    ]


def ids(groups: list[ClosedGroup]) -> list[list[str]]:
    return [[m.candidate.trajectory_id for m in group.members] for group in groups]


def test_a_group_closes_with_its_last_member_whatever_the_order() -> None:
    groups = fold(cand("b"), cand("x", "other"), cand("a"))
    assert ids(groups) == [["a", "b"]] and groups[0].size == 2
    assert [m.offset for m in groups[0].members] == [2, 0]
    assert [m.place for m in groups[0].members] == [place(at) for at in (2, 0)]


def test_the_size_that_an_agent_names_counts() -> None:
    members = [cand(name, group_size=3) for name in "abc"]
    assert ids(fold(*members)) == [["a", "b", "c"]]
    assert ids(fold(cand("a", group_size=1))) == [["a"]]


def test_rounds_channels_and_runs_are_apart() -> None:
    apart = [cand("a"), cand("b", round=0), cand("c", channel="val"), cand("d", run_id="x")]
    assert fold(*apart) == []
    assert ids(fold(*apart, cand("e", round=0), cand("f", run_id="x"))) == [["b", "e"]]


def test_missing_members_are_awaited_in_event_time() -> None:
    one = cand("a", closed_at=10)
    assert fold(one, tick(9 + WAIT_MS)) == []
    (group,) = fold(one, tick(10 + WAIT_MS), cand("b"))
    assert ids([group]) == [["a"]] and group.size == 2
    slow = tick(9 + WAIT_MS, partition=1)
    assert fold(one, tick(5000), slow, tickers=2) == []  # the slowest partition counts
    assert fold(one, tick(5000, partition=7)) == []


def test_the_first_closing_sets_the_deadline() -> None:
    later, first = (cand(n, closed_at=at, group_size=3) for n, at in (("a", 900), ("b", 0)))
    assert ids(fold(later, first, tick(WAIT_MS))) == [["a", "b"]]


def test_a_member_that_is_replaced_leaves_its_place_free() -> None:
    gone = cand("a", outcome="replaced")
    assert ids(fold(gone, cand("b"), cand("c"))) == [["a"], ["b", "c"]]


def test_revisions_join_no_group() -> None:
    rated = cand("a", revision=1, rewards=(BEST,))
    assert fold(cand("a"), cand("a"), cand("c", revision=1)) == []  # sent again, and revised
    assert ids(fold(cand("a"), cand("b"), rated, cand("b", revision=2))) == [["a", "b"]]


def test_members_that_were_compared_before_leave() -> None:
    rated = cand("a", revision=1, rewards=(BEST,))
    assert fold(cand("a"), rated, cand("b"), tick(0)) == []
    state = new_fold()
    state.fold(0, cand("a"))
    assert state.position(5) == -1
    state.fold(1, rated)
    assert state.position(5) == 5
    state.fold(2, cand("a"))
    state.fold(3, replace(rated, rewards=(replace(BEST, function_version="0"),)))
    assert state.position(5) == 1


MEMBERS = st.builds(
    lambda group, name, at: cand(f"{group}{name}", group, closed_at=at, group_size=3),
    st.sampled_from("gh"),
    st.sampled_from("abc"),
    st.integers(0, 3000),
)
EVENTS = st.lists(
    MEMBERS | st.integers(0, 6000).map(tick) | st.builds(Crash),
    unique_by=lambda e: e.trajectory_id if isinstance(e, Candidate) else id(e),
)


@given(EVENTS)
def test_a_crash_loses_no_group(events: list[Any]) -> None:
    calm = ids(fold(*(e for e in events if not isinstance(e, Crash))))
    crashed = ids(fold(*events))
    assert {name for group in calm for name in group} <= {n for group in crashed for n in group}
    assert all(group in crashed for group in calm if len(group) == 3)


@given(EVENTS)
def test_the_position_is_before_the_oldest_open_member(events: list[Any]) -> None:
    state, waiting = new_fold(), dict[str, int]()
    for at, event in enumerate(e for e in events if not isinstance(e, Crash)):
        if isinstance(event, Candidate):
            waiting[event.trajectory_id] = at
        for group in ids(state.fold(at, event)):
            for name in group:
                del waiting[name]
        assert state.position(at) == min(waiting.values(), default=at + 1) - 1
