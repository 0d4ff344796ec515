"""Rounds of group ids: which are closed, and which trajectories still belong to one that closed without them. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from stream_jobs.packed import LARGEST_THIRD, Packed


class Owed(NamedTuple):
    """A round closed `left` members short. Whoever was opened before `closed_at` (log time) and comes now was one of them."""

    round: int
    closed_at: int
    left: int


@dataclass(slots=True)
class Rounds:
    """Closed rounds of one group id: all below `floor`, and those in `above`."""

    floor: int = 0
    above: frozenset[int] = frozenset()
    owed: tuple[Owed, ...] = ()

    def closed(self, number: int) -> bool:
        """Whether the round was admitted or refused."""
        return number < self.floor or number in self.above

    def close(self, number: int, closed_at: int, left: int) -> None:
        """A round is admitted or refused although `left` of its members have not come."""
        if left > 0:
            self.owed += (Owed(number, closed_at, left),)
        if number != self.floor:
            self.above |= {number}
            return
        self.floor += 1
        while self.floor in self.above:
            self.above -= {self.floor}
            self.floor += 1

    def missed_by(self, opened_at: int) -> int | None:
        """The first round that a trajectory opened at this time was meant for and has missed; None: it belongs to a later one."""
        return min((o.round for o in self.owed if opened_at < o.closed_at), default=None)

    def turned_away(self, number: int) -> None:
        """One of those that missed this round has come and was refused."""
        fewer = (o._replace(left=o.left - 1) if o.round == number else o for o in self.owed)
        self.owed = tuple(o for o in fewer if o.left > 0)


class ClosedRounds:
    """The rounds of all group ids of a run. One whose last round alone is owed members, or none, takes 34 bytes."""

    def __init__(self, packed: Packed | None = None, others: Iterable[tuple[str, Rounds]] = ()) -> None:
        self.packed = Packed() if packed is None else packed
        self.others = dict(others)
        """Of group ids whose rounds have closed out of order, or of which several are owed members."""

    def of(self, group_id: str) -> Rounds:
        """Those of a group id, to look at; `put` sets them."""
        found = self.others.get(group_id) if self.others else None
        if found is not None:
            return found
        values = self.packed.get(group_id)
        if values is None:
            return Rounds()
        closed_at, floor, left = values
        return Rounds(floor, owed=(Owed(floor - 1, closed_at, left),) if left else ())

    def put(self, group_id: str, rounds: Rounds) -> None:
        """Set those of a group id."""
        owed = rounds.owed[0] if rounds.owed else Owed(rounds.floor - 1, 0, 0)
        plain = not rounds.above and len(rounds.owed) < 2
        if plain and owed.round == rounds.floor - 1 and owed.left <= LARGEST_THIRD:
            self.others.pop(group_id, None)
            self.packed.put(group_id, (owed.closed_at, rounds.floor, owed.left))
            return
        if group_id not in self.others:
            self.packed.discard(group_id)
        self.others[group_id] = rounds
