"""Which members of a group a judge compares, and what a member gets for its wins. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

from clawstream.schemas.ids import stable_id
from clawstream.schemas.rule_spec import reason_text

ALONE = "no other member of the group can be compared with it"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a judge said about two members, asked in both orders.

    first, second: Positions of the members. wins: Of the first: 1.0, 0.0, or 0.5 where the two
    orders disagree. tokens: That it cost.
    """

    first: int
    second: int
    wins: float
    tokens: int = 0
    explanation: str = ""

    def wins_of(self, member: int) -> float:
        """Return the wins of one of the two."""
        return self.wins if member == self.first else 1 - self.wins


@dataclass(frozen=True, slots=True)
class Undecided:
    """A comparison without a verdict, and the error that it had instead."""

    first: int
    second: int
    error: Exception


def pairs(ids: Sequence[str], opponents: int | None) -> list[tuple[int, int]]:
    """Return the pairs of members to compare, as positions in `ids`.

    With fewer opponents than others, the members stand on a ring in the order of their hashes, and
    each is compared with its neighbours: a choice without regard to the members' content, which a
    repetition makes again.

    Args:
        ids: Of the members, all different. The pairs do not depend on their order.
        opponents: Of each member; None: all others. One member has one more if `opponents` and the
            number of members are odd.
    """
    ring, n = sorted(range(len(ids)), key=lambda i: stable_id(ids[i])), len(ids)
    if opponents is None or opponents >= n - 1:
        return list(combinations(ring, 2))
    steps = [(i, i + d) for d in range(1, opponents // 2 + 1) for i in range(n)]
    if opponents % 2:
        steps += [(i, i + n // 2) for i in range((n + 1) // 2)]  # across the ring
    return [(ring[i], ring[j % n]) for i, j in steps]


def share_of_wins(
    member: int, comparisons: Sequence[Comparison | Undecided]
) -> tuple[float, dict[str, Any]] | str:
    """Return the mean of a member's wins with details, or why there is none.

    More than half of its comparisons must be decided.

    Args:
        member: Its position.
        comparisons: Of the whole group.
    """
    own = [c for c in comparisons if member in (c.first, c.second)]
    decided = [c for c in own if isinstance(c, Comparison)]
    if not own:
        return ALONE
    if 2 * len(decided) <= len(own):
        return reason_text(next(c.error for c in own if isinstance(c, Undecided)))
    wins = [c.wins_of(member) for c in decided]
    return fmean(wins), {
        "wins": wins,
        "undecided": len(own) - len(decided),
        "tokens": sum(c.tokens for c in decided),
        "explanation": decided[0].explanation,
    }
