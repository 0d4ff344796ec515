"""Track which rounds of a group id are closed, and which members they still miss. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from clawstream.stream_jobs.admit.decisions.compact_map import LARGEST_THIRD, CompactMap

Span = tuple[int, int]
"""A round, and the one behind the last that is closed with it."""
_FIRST = itemgetter(0)
_END_BITS = 32
"""A span in one number of 64 bits: its first round above these, its end in them."""
_LARGEST_END = 1 << 31
"""A round is an Avro int."""


class MissingMembers(NamedTuple):
    """A round closed with `left` members missing.

    A trajectory opened before `closed_at` (log time, ms) that arrives now is one of them.
    """

    round: int
    closed_at: int
    left: int


@dataclass(slots=True)
class Rounds:
    """Closed rounds of one group id.

    spans: half-open ranges of closed rounds, ascending, disjoint.
    """

    spans: tuple[Span, ...] = ()
    missing_members: tuple[MissingMembers, ...] = ()

    @property
    def floor(self) -> int:
        """The first round that is not closed."""
        return self.spans[0][1] if self.spans and self.spans[0][0] == 0 else 0

    def closed(self, number: int) -> bool:
        """Return whether the round was admitted or refused. Negative rounds count as closed."""
        at = bisect_right(self.spans, number, key=_FIRST)
        return number < 0 or (at > 0 and number < self.spans[at - 1][1])

    def close(self, number: int, closed_at: int, left: int) -> None:
        """Close a round of which `left` members have not arrived."""
        if left > 0:
            self.missing_members += (MissingMembers(number, closed_at, left),)
        if self.closed(number):
            return
        spans, first, end = self.spans, number, number + 1
        below = above = bisect_right(spans, number, key=_FIRST)
        if below and spans[below - 1][1] == first:
            below -= 1
            first = spans[below][0]
        if above < len(spans) and spans[above][0] == end:
            end = spans[above][1]
            above += 1
        self.spans = (*spans[:below], (first, end), *spans[above:])

    def missed_by(self, opened_at: int) -> int | None:
        """Return the first round that a trajectory opened at this time missed, or None."""
        return min((o.round for o in self.missing_members if opened_at < o.closed_at), default=None)

    def turned_away(self, number: int) -> None:
        """Count one missing member of this round as arrived and refused."""
        fewer = (
            o._replace(left=o.left - 1) if o.round == number else o for o in self.missing_members
        )
        self.missing_members = tuple(o for o in fewer if o.left > 0)


class ClosedRounds:
    """The closed rounds of all group ids of a run.

    A group id takes 34 bytes if its closed rounds are contiguous and only the last misses members.
    """

    def __init__(
        self, compact: CompactMap | None = None, others: Iterable[tuple[str, Rounds]] = ()
    ) -> None:
        self.compact = CompactMap() if compact is None else compact
        self.others = dict(others)
        """Group ids with a gap in the closed rounds, or where an earlier round misses members."""

    def of(self, group_id: str) -> Rounds:
        """Return a copy of the rounds of a group id; `put` stores changes."""
        found = self.others.get(group_id) if self.others else None
        if found is not None:
            return found
        values = self.compact.get(group_id)
        if values is None:
            return Rounds()
        closed_at, span, left = values
        first, end = span >> _END_BITS, span % (1 << _END_BITS)
        return Rounds(((first, end),), (MissingMembers(end - 1, closed_at, left),) if left else ())

    def put(self, group_id: str, rounds: Rounds) -> None:
        """Store the rounds of a group id."""
        if len(rounds.spans) == 1 and len(rounds.missing_members) < 2:
            ((first, end),) = rounds.spans
            missing = next(iter(rounds.missing_members), MissingMembers(end - 1, 0, 0))
            if missing.round == end - 1 and end <= _LARGEST_END and missing.left <= LARGEST_THIRD:
                self.others.pop(group_id, None)
                span = first << _END_BITS | end
                self.compact.put(group_id, (missing.closed_at, span, missing.left))
                return
        if group_id not in self.others:
            self.compact.discard(group_id)
        self.others[group_id] = rounds
