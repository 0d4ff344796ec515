"""The truth table of `RoundAssigner`."""

from __future__ import annotations

import pytest

from clawstream.stream_jobs.admit.decisions.rounds import Rounds
from clawstream.stream_jobs.admit.decisions.state import DecisionState
from clawstream.stream_jobs.admit.open_groups import OpenGroups

DECIDED, FULL, EXPIRED, OPEN, UNSEEN = range(5)
"""Rounds of the group id. FULL and EXPIRED are open, but closed to new members."""
BEFORE, BETWEEN, AFTER = 5, 15, 25
"""Opening times: DECIDED closed at 10, EXPIRED at 20, each with one member missing."""


def groups(missing: bool = True) -> OpenGroups:
    state = DecisionState()
    rounds = Rounds()
    rounds.close(DECIDED, 10, int(missing))
    state.rounds.put("g", rounds)
    if not missing:
        state.turned_away["g", EXPIRED] = 1
    open_groups = OpenGroups(state)
    state.refused_members["g", FULL] = 2
    for number in (FULL, EXPIRED, OPEN):
        open_groups.begin(("g", number), 2 if number == FULL else 1)
    expired = open_groups.get(("g", EXPIRED))
    assert expired is not None
    open_groups.close_to_new(expired, 20)
    return open_groups


@pytest.mark.parametrize("opened_at", [None, BEFORE, BETWEEN, AFTER])
@pytest.mark.parametrize(
    ("named", "takes"),
    [(-1, False), (DECIDED, False), (FULL, False), (EXPIRED, False), (OPEN, True), (UNSEEN, True)],
)
def test_a_named_round_counts_whenever_the_trajectory_was_opened(
    named: int, takes: bool, opened_at: int | None
) -> None:
    assert groups().rounds.assign("g", named, opened_at) == (named, takes)


@pytest.mark.parametrize(
    ("opened_at", "expected"),
    [
        (BEFORE, (DECIDED, False)),
        (BETWEEN, (EXPIRED, False)),
        (AFTER, (OPEN, True)),
        (None, (OPEN, True)),
    ],
)
def test_without_a_name_it_counts_in_the_round_that_closed_without_it(
    opened_at: int | None, expected: tuple[int, bool]
) -> None:
    assert groups().rounds.assign("g", None, opened_at) == expected


def test_a_round_that_misses_no_member_refuses_nobody() -> None:
    assert groups(missing=False).rounds.assign("g", None, BEFORE) == (OPEN, True)


def test_a_new_group_id_begins_with_round_0() -> None:
    assert groups().rounds.assign("other", None, BEFORE) == (0, True)
    assert groups().rounds.assign("other", 7, BEFORE) == (7, True)
