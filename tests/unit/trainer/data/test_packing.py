"""Packed rows against the sequences that they were made of."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from clawstream.trainer.data.packing import PackedRow, cut, pack, packed_length

Ids = NDArray[np.int32]


@st.composite
def forests(draw: st.DrawFn) -> list[Ids]:
    """Sequences of which many continue a prefix of another one, or equal it."""
    found: list[list[int]] = []
    for _ in range(draw(st.integers(1, 12))):
        base = draw(st.sampled_from([[], *found]))
        kept = base[: draw(st.integers(0, len(base)))]
        new = draw(st.lists(st.integers(0, 300), min_size=not kept, max_size=6))
        found.append([*kept, *new])
    return [np.array(ids, np.int32) for ids in found]


def visible(row: PackedRow) -> NDArray[np.bool_]:
    """Which token attends to which, from the places alone."""
    seen = np.zeros((len(row.ids), len(row.ids)), bool)
    for places in row.places:
        for i, place in enumerate(places):
            seen[place, places[: i + 1]] = True
    return seen


@given(forests())
def test_a_packed_row_has_each_prefix_once_and_no_token_sees_another_branch(
    sequences: list[Ids],
) -> None:
    row = pack(sequences)
    for ids, places in zip(sequences, row.places, strict=True):
        assert row.ids[places].tolist() == ids.tolist()
        assert row.positions[places].tolist() == list(range(len(ids)))
    prefixes = {tuple(ids[:n]) for ids in sequences for n in range(1, len(ids) + 1)}
    assert len(row.ids) == len(prefixes), "one token for each distinct prefix"
    assert packed_length(sequences) == len(row.ids)
    seen = visible(row)
    counted = np.zeros(seen.shape, int)
    for (first, last), (start, end), causal in row.blocks:
        area = np.ones((last - first, end - start), int)
        counted[first:last, start:end] += np.tril(area) if causal else area
    assert (counted == seen).all(), "the blocks have each pair once"
    query, key = np.ogrid[: len(row.ids), : len(row.ids)]
    assert ((key <= query) & (query < row.ends[key]) == seen).all()
    causal = [block.causal for block in row.blocks]
    assert causal == sorted(causal, reverse=True)


@given(forests(), st.integers(1, 40))
def test_rows_are_cut_at_branches_within_the_budget(sequences: list[Ids], budget: int) -> None:
    rows = cut(sequences, budget)
    assert sorted(i for row in rows for i in row) == list(range(len(sequences)))
    for row in rows:
        assert len(row) == 1 or len(pack([sequences[i] for i in row]).ids) <= budget
    (whole,) = cut(sequences, sum(map(len, sequences)))
    assert len(whole) == len(sequences)
    assert rows == cut([ids.copy() for ids in sequences], budget)


def test_adjacent_branches_attend_to_their_common_prefix_in_one_block() -> None:
    prompt, *replies = [1, 2, 3, 4], [5, 6], [7], [8, 9]
    row = pack([np.array([*prompt, *reply], np.int32) for reply in replies])
    assert [(b.queries, b.keys) for b in row.blocks if not b.causal] == [((6, 9), (0, 4))]
    assert row.ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
