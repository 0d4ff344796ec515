"""Hold the undecided groups, and assign trajectories to rounds of their group id. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from clawstream.stream_jobs.admit.decisions.rounds import Rounds
from clawstream.stream_jobs.admit.decisions.state import DecisionState
from clawstream.stream_jobs.admit.group import Group, GroupKey


@dataclass(slots=True)
class _OpenRounds:
    """The open rounds of one group id.

    current: No lower round takes a trajectory without a round. closed_to_new: Those that no longer
    wait for missing members.
    """

    current: int
    open: dict[int, Group] = field(default_factory=dict)
    closed_to_new: dict[int, Group] = field(default_factory=dict)


class RoundAssigner:
    """Decide in which round of its group id a trajectory counts, and whether the round takes it.

    | it names a round | state of that round | it was opened before a round closed | result |
    | --- | --- | --- | --- |
    | yes | open, or never seen | any | that round takes it |
    | yes | closed to new members, or decided | any | that round refuses it |
    | no | any | yes, and the round misses members | the first such round refuses it |
    | no | any | no | the first round that takes members |

    A round is closed to new members when it is full, or when its deadline has passed. It misses a
    member until the member arrives and is refused.
    """

    def __init__(self, state: DecisionState) -> None:
        self._state = state
        self._open: dict[str, _OpenRounds] = {}

    def assign(self, group_id: str, named: int | None, opened_at: int | None) -> tuple[int, bool]:
        """Return the round, and whether it takes the trajectory.

        Args:
            named: The round that the trajectory names, or None.
            opened_at: When the trajectory was opened, log time, ms; None: skip the check for rounds
                that closed without it.
        """
        ids = self._open.get(group_id)
        if named is not None and ids is not None and (group := ids.open.get(named)) is not None:
            return named, not group.closed_to_new
        closed = self._state.rounds.of(group_id)
        if named is not None:
            return named, not closed.closed(named)
        ids = ids or _OpenRounds(closed.floor)
        if (
            opened_at is not None
            and (missed := self._missed_by(opened_at, closed, ids)) is not None
        ):
            return missed, False
        while closed.closed(ids.current) or (
            (group := ids.open.get(ids.current)) is not None and group.closed_to_new
        ):
            ids.current += 1
        return ids.current, True

    def _missed_by(self, opened_at: int, closed: Rounds, ids: _OpenRounds) -> int | None:
        """Return the first round that closed, with members missing, after this time."""
        missed = [
            number
            for number, group in ids.closed_to_new.items()
            if opened_at < (group.closed_to_new_at or 0)
            and group.n > group.arrived + self._state.turned_away.get(group.key, 0)
        ]
        if (decided := closed.missed_by(opened_at)) is not None:
            missed.append(decided)
        return min(missed, default=None)

    def add(self, group: Group) -> None:
        """Add an open round."""
        group_id, number = group.key
        ids = self._open.get(group_id)
        if ids is None:
            ids = self._open[group_id] = _OpenRounds(self._state.rounds.of(group_id).floor)
        ids.open[number] = group

    def close_to_new(self, group: Group) -> None:
        """Close an open round to new members before all have arrived."""
        self._open[group.key[0]].closed_to_new[group.key[1]] = group

    def remove(self, group: Group) -> None:
        """Remove a decided round."""
        group_id, number = group.key
        ids = self._open[group_id]
        del ids.open[number]
        ids.closed_to_new.pop(number, None)
        if not ids.open:
            del self._open[group_id]


class OpenGroups:
    """The undecided groups, in order of creation."""

    def __init__(self, state: DecisionState) -> None:
        self._state = state
        self._groups: dict[GroupKey, Group] = {}
        self.rounds = RoundAssigner(state)

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def get(self, key: GroupKey) -> Group | None:
        """Return the open group of a group id and round, or None."""
        return self._groups.get(key)

    def begin(self, key: GroupKey, n: int) -> Group:
        """Add a group without members."""
        refused = self._state.refused_members.get(key, 0)
        group = self._groups[key] = Group(key, n, refused_members=refused)
        self.rounds.add(group)
        return group

    def close_to_new(self, group: Group, at: int) -> None:
        """Close the group to new members before all have arrived. at: log time, ms."""
        group.closed_to_new_at = at
        self.rounds.close_to_new(group)

    def remove(self, group: Group) -> None:
        """Remove a decided group."""
        del self._groups[group.key]
        self.rounds.remove(group)
