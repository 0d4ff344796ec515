"""Pack sequences that share prefixes into one row that has each token once. Pure numpy.

Sequences in lexicographic order visit the tree of their prefixes depth first: each one adds, behind
the tokens of all before it, only the tokens that it does not share with the one before it. The
added tokens of a sequence are a branch. A branch attends to itself causally, and to its prefix,
which is a few ranges of the row, fully.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Places = NDArray[np.int64]


class Block(NamedTuple):
    """A part of the attention: each query attends to all keys, or to those up to its own place.

    Attributes:
        queries, keys: first place in the row, and one past the last.
        causal: queries and keys are the same branch.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool


@dataclass(frozen=True, slots=True, eq=False)
class PackedRow:
    """Several sequences in one row.

    Attributes:
        ids: (packed tokens,).
        positions: (packed tokens,), index of the token in each sequence that has it.
        ends: (packed tokens,), one past the last token that has this one in its prefix: the token
            at q attends to the token at k if k <= q < ends[k].
        blocks: the same pairs of query and key; the causal blocks come first, and each token is in
            one of them.
        places: of each sequence, in the given order: where its tokens are in the row.
    """

    ids: Ids
    positions: Places
    ends: Places
    blocks: tuple[Block, ...]
    places: tuple[Places, ...]

    @property
    def pairs(self) -> float:
        """Number of pairs of query and key in a layer."""
        sizes = [(q[1] - q[0]) * (k[1] - k[0]) for q, k, _ in self.blocks]
        return sum(
            n / 2 if block.causal else n for n, block in zip(sizes, self.blocks, strict=True)
        )


def pack(sequences: Sequence[Ids]) -> PackedRow:
    """Return the row that has the tokens of each shared prefix once.

    Args:
        sequences: token ids of each, at least one token.
    """
    order = lexicographic(sequences)
    places: list[Places] = [np.zeros(0, np.int64)] * len(sequences)
    ids: list[Ids] = []
    positions: list[Places] = []
    branches: list[tuple[int, int, list[tuple[int, int]]]] = []  # start, end, ranges of the prefix
    ends = np.zeros(sum(map(len, sequences)), np.int64)
    length, before = 0, np.zeros(0, np.int64)  # of the row; places of the sequence before
    for index, shared in _with_shared(sequences, order):
        own = sequences[index]
        ends[before[shared:]] = length
        before = np.concatenate([before[:shared], np.arange(length, length + len(own) - shared)])
        places[index] = before
        if len(own) == shared:
            continue
        ids.append(own[shared:])
        positions.append(np.arange(shared, len(own)))
        end = length + len(own) - shared
        if shared and before[shared - 1] + 1 == length:  # it continues the branch before it
            branches[-1] = (branches[-1][0], end, branches[-1][2])
        else:
            branches.append((length, end, _ranges(before[:shared])))
        length = end
    ends[before] = length
    return PackedRow(
        ids=np.concatenate(ids),
        positions=np.concatenate(positions),
        ends=ends[:length],
        blocks=tuple(_blocks(branches)),
        places=tuple(places),
    )


def cut(sequences: Sequence[Ids], max_tokens: int) -> list[list[int]]:
    """Return the indexes of the sequences of each packed row.

    A row has at most `max_tokens`, or a single longer sequence. A larger tree is cut between
    branches, and each part repeats the prefix that its first branch needs.
    """
    rows: list[list[int]] = []
    length = 0
    for index, shared in _with_shared(sequences, lexicographic(sequences)):
        added = len(sequences[index]) - shared
        if rows and length + added <= max_tokens:
            rows[-1].append(index)
            length += added
        else:
            rows.append([index])
            length = len(sequences[index])
    return rows


def packed_length(sequences: Sequence[Ids]) -> int:
    """Return the number of tokens of the packed row, without making it."""
    visits = _with_shared(sequences, lexicographic(sequences))
    return sum(len(sequences[index]) - shared for index, shared in visits)


def lexicographic(sequences: Sequence[Ids]) -> list[int]:
    """Return the indexes in an order where sequences with a common prefix are adjacent.

    It depends on the ids and, for equal sequences, on the given order.
    """
    return sorted(range(len(sequences)), key=lambda i: sequences[i].tobytes())


def _with_shared(sequences: Sequence[Ids], order: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each index with the number of tokens that it shares with the one before it."""
    before = np.zeros(0, np.int32)
    for index in order:
        own = sequences[index]
        n = min(len(before), len(own))
        differences = np.flatnonzero(before[:n] != own[:n])
        yield index, int(differences[0]) if len(differences) else n
        before = own


def _ranges(places: Places) -> list[tuple[int, int]]:
    """Return ascending places as ranges."""
    if not len(places):
        return []
    gaps = np.flatnonzero(np.diff(places) != 1)
    firsts = places[np.concatenate([[0], gaps + 1])].tolist()
    lasts = places[np.concatenate([gaps, [len(places) - 1]])].tolist()
    return [(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]


def _blocks(branches: Sequence[tuple[int, int, list[tuple[int, int]]]]) -> Iterator[Block]:
    """Yield the blocks; adjacent branches with a common range of their prefix are one block."""
    for start, end, _ in branches:
        yield Block((start, end), (start, end), True)
    for level in range(max(len(ranges) for _, _, ranges in branches)):
        queries, keys = (0, 0), (0, 0)
        for start, end, ranges in branches:
            own = ranges[level] if level < len(ranges) else (0, 0)
            if own == keys and queries[1] == start:
                queries = (queries[0], end)
                continue
            if keys[1]:
                yield Block(queries, keys, False)
            queries, keys = (start, end), own
        if keys[1]:
            yield Block(queries, keys, False)
