"""Collect the members of groups: a pure fold over one partition of the candidates.

A trajectory joins its group by revision 0, its state at the closing. A group is closed when all
members are there, or at its deadline in event time. Its members are then forgotten: a later
revision joins no group. The offset from which a restart has to read is that of the oldest member of
an open group.

After a restart some members of a group may lie before that offset, when the group was closed while
an older one was open. The others wait again until their revision with the rewards follows on the
log, and then leave; past the deadline they would be compared again, for rewards that change
nothing, because the first ones count.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from clawstream.schemas.records import Candidate, Channel, Place, RewardSource, Tick
from clawstream.stream_jobs.worker.event_time import EventTime

GroupKey = tuple[str, Channel, str, int]
"""Run, channel, group id and round; -1: the agent named none."""
RewardName = tuple[RewardSource, str, str]
"""Source, name and function version."""


@dataclass(frozen=True, slots=True)
class Member:
    """A closed trajectory. place: Of its payload. offset: Of its candidate."""

    candidate: Candidate
    place: Place | None
    offset: int


@dataclass(frozen=True, slots=True)
class ClosedGroup:
    """Members to compare, by trajectory id. size: Expected number, including missing members."""

    members: tuple[Member, ...]
    size: int


@dataclass(slots=True)
class _OpenGroup:
    """deadline: Event time, ms."""

    size: int
    deadline: int
    members: dict[str, Member] = field(default_factory=dict)


class GroupFold:
    """The open groups of one partition. Performs no I/O and reads no clock."""

    def __init__(
        self, tickers: int, size: int, wait_ms: int, names: Callable[[str], frozenset[RewardName]]
    ) -> None:
        """Begin without groups.

        Args:
            tickers: Source partitions that send ticks.
            size: Members of a group whose candidates name no size.
            wait_ms: Event time from the first closing to the deadline of a group.
            names: Run to the rewards that its comparisons give; without any its candidates are
                ignored.
        """
        self._event_time = EventTime(tickers)
        self._size, self._wait_ms, self._names = size, wait_ms, names
        self._groups: dict[GroupKey, _OpenGroup] = {}
        self._deadlines: list[tuple[int, GroupKey]] = []

    def fold(self, offset: int, event: object, place: Place | None = None) -> list[ClosedGroup]:
        """Apply the next record of the partition; return the groups that it closes.

        Args:
            offset: Of the record.
            event: What it holds; only candidates and ticks count.
            place: Of a candidate's payload.
        """
        if isinstance(event, Tick):
            with suppress(ValueError):  # admission makes it a dead letter
                return self._overdue(self._event_time.after(event))
        elif isinstance(event, Candidate) and (names := self._names(event.run_id)):
            return self._candidate(Member(event, place, offset), names)
        return []

    def position(self, last: int) -> int:
        """Return the highest offset, up to `last`, below which no open group has a member."""
        members = (m for group in self._groups.values() for m in group.members.values())
        return min((m.offset - 1 for m in members), default=last)

    def _candidate(self, member: Member, names: frozenset[RewardName]) -> list[ClosedGroup]:
        c = member.candidate
        key = (c.run_id, c.channel, c.group_id, -1 if c.round is None else c.round)
        if c.revision > 0:
            if names <= {(r.source, r.name, r.function_version) for r in c.rewards}:
                self._leave(key, c.trajectory_id)
            return []
        if c.outcome == "replaced":  # another one takes its place
            return [ClosedGroup((member,), 1)]
        group = self._groups.get(key)
        deadline = c.closed_at + self._wait_ms
        if group is None:
            size = c.group_size if c.group_size is not None else self._size
            group = self._groups[key] = _OpenGroup(size, deadline)
            heapq.heappush(self._deadlines, (deadline, key))
        elif deadline < group.deadline:
            group.deadline = deadline
            heapq.heappush(self._deadlines, (deadline, key))
        group.members.setdefault(c.trajectory_id, member)
        return [self._close(key)] if len(group.members) >= group.size else []

    def _leave(self, key: GroupKey, trajectory_id: str) -> None:
        """Remove a member that has been compared before."""
        group = self._groups.get(key)
        if group is not None and trajectory_id in group.members:
            del group.members[trajectory_id]
            if not group.members:
                del self._groups[key]

    def _overdue(self, now: int | None) -> list[ClosedGroup]:
        closed = []
        while now is not None and self._deadlines and self._deadlines[0][0] <= now:
            deadline, key = heapq.heappop(self._deadlines)
            group = self._groups.get(key)
            if group is not None and group.deadline == deadline:
                closed.append(self._close(key))
        return closed

    def _close(self, key: GroupKey) -> ClosedGroup:
        group = self._groups.pop(key)
        members = sorted(group.members.values(), key=lambda m: m.candidate.trajectory_id)
        return ClosedGroup(tuple(members), group.size)
