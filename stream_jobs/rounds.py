"""Rounds of one group id: which are closed, and which trajectories still belong to one that closed without them. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Owed:
    """A round closed `left` members short. Whoever was opened before `closed_at` (log time) and comes now was one of them."""

    round: int
    closed_at: int
    left: int


@dataclass(slots=True)
class Rounds:
    """All rounds below `floor` are closed, and those in `above`. No round below `current` takes a counted trajectory.

    One lives for each group id of a run: the empty parts are shared values.
    """

    current: int = 0
    floor: int = 0
    above: frozenset[int] = frozenset()
    owed: tuple[Owed, ...] = ()

    def closed(self, number: int) -> bool:
        """Whether the round was admitted or refused."""
        return number < self.floor or number in self.above

    def seal(self, number: int, closed_at: int, left: int) -> None:
        """A round takes no more members although `left` of them have not come."""
        if left > 0:
            self.owed += (Owed(number, closed_at, left),)

    def close(self, number: int, closed_at: int) -> None:
        """A round is admitted or refused: from now on this is when it closed."""
        for owed in self.owed:
            if owed.round == number:
                owed.closed_at = closed_at
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
        for owed in self.owed:
            if owed.round == number:
                owed.left -= 1
        self.owed = tuple(o for o in self.owed if o.left > 0)
