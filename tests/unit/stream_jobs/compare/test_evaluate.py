"""Which members of a group are not compared."""

from __future__ import annotations

import pytest
from support.admit import cand

from clawstream.schemas.records import Candidate, Place
from clawstream.stream_jobs.compare.evaluate import exclusion
from clawstream.stream_jobs.compare.fold import ClosedGroup, Member

PLACE = Place(topic_id="t", partition=0, first_offset=0, last_offset=0)


@pytest.mark.parametrize(
    ("candidate", "place", "others", "reason"),
    [
        (cand("a"), PLACE, 1, None),
        (cand("a", outcome="failed"), PLACE, 1, None),
        (cand("a", outcome="lost", reason="gone"), PLACE, 1, "trajectory lost: gone"),
        (cand("a"), None, 1, "trajectory lost: no payload"),
        (cand("a"), PLACE, 0, "no opponent: 1 of 3 members of its group came in time"),
        (cand("a", outcome="replaced"), PLACE, 0, "replaced: another trajectory takes its place"),
    ],
)
def test_each_member_that_is_not_compared_has_a_reason(
    candidate: Candidate, place: Place | None, others: int, reason: str | None
) -> None:
    member = Member(candidate, place, 0)
    group = ClosedGroup((member, *(Member(cand(f"b{i}"), PLACE, 1) for i in range(others))), 3)
    found = exclusion(member, group)
    assert found is None if reason is None else str(found).startswith(reason)
