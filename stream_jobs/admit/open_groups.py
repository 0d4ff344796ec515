"""Hold the undecided groups, in order of creation and by group id. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from schemas.records import Candidate
from stream_jobs.admit.decisions.rounds import Rounds
from stream_jobs.admit.decisions.state import DecisionState
from stream_jobs.admit.group import Group, GroupKey


@dataclass(slots=True)
class _RoundsOfGroup:
    """The open rounds of one group id.

    current: No lower round takes a trajectory without a round. closed_to_new: Rounds that no longer
    wait
    for missing members.
    """

    current: int
    open: dict[int, Group] = field(default_factory=dict)
    closed_to_new: dict[int, Group] = field(default_factory=dict)


class OpenGroups:
    """The undecided groups. Also assigns a round to trajectories that name none."""

    def __init__(self, state: DecisionState) -> None:
        self._state = state
        self._groups: dict[GroupKey, Group] = {}
        self._ids: dict[str, _RoundsOfGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def get(self, key: GroupKey) -> Group | None:
        """Return the open group of a group id and round, or None."""
        return self._groups.get(key)

    def assign_round(self, c: Candidate, opened_at: int | None) -> tuple[int, bool]:
        """Return the round of a trajectory, and whether that round accepts it.

        Args:
            opened_at: When the trajectory was opened; None: skip the check for missed rounds.
        """
        ids = self._ids.get(c.group_id)
        if c.round is not None and ids is not None and (group := ids.open.get(c.round)) is not None:
            return c.round, not group.closed_to_new
        rounds = self._state.rounds.of(c.group_id)
        if c.round is not None:
            return c.round, not rounds.closed(c.round)
        if (
            opened_at is not None
            and (missed := self._missed_by(opened_at, rounds, ids)) is not None
        ):
            return missed, False
        if ids is None:
            return self._first_open(rounds, rounds.floor, {}), True
        ids.current = self._first_open(rounds, ids.current, ids.open)
        return ids.current, True

    def _missed_by(self, opened_at: int, rounds: Rounds, ids: _RoundsOfGroup | None) -> int | None:
        """Return the first round closed to new members that a trajectory of this time missed."""
        missed = rounds.missed_by(opened_at)
        for number, group in ids.closed_to_new.items() if ids is not None else ():
            owed = group.n - group.arrived - self._state.turned_away.get(group.key, 0)
            if (
                owed > 0
                and opened_at < (group.closed_to_new_at or 0)
                and (missed is None or number < missed)
            ):
                missed = number
        return missed

    @staticmethod
    def _first_open(rounds: Rounds, number: int, open_groups: dict[int, Group]) -> int:
        """Return the first round from `number` on that accepts members."""
        while rounds.closed(number) or (
            (group := open_groups.get(number)) is not None and group.closed_to_new
        ):
            number += 1
        return number

    def begin(self, key: GroupKey, n: int) -> Group:
        """Add a group without members."""
        group = self._groups[key] = Group(
            key, n, refused_members=self._state.refused_members.get(key, 0)
        )
        ids = self._ids.get(key[0])
        if ids is None:
            ids = self._ids[key[0]] = _RoundsOfGroup(self._state.rounds.of(key[0]).floor)
        ids.open[key[1]] = group
        return group

    def close_to_new(self, group: Group, at: int) -> None:
        """Close the group to new members before all have arrived. at: log time, ms."""
        group.closed_to_new_at = at
        self._ids[group.key[0]].closed_to_new[group.key[1]] = group

    def remove(self, group: Group) -> None:
        """Remove a decided group."""
        del self._groups[group.key]
        group_id, number = group.key
        ids = self._ids[group_id]
        del ids.open[number]
        ids.closed_to_new.pop(number, None)
        if not ids.open:
            del self._ids[group_id]
