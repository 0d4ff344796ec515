"""A compact map: behaves like a dict, serializes to bytes, and copies as a snapshot."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from clawstream.stream_jobs.admit.decisions.compact_map import BUCKETS, WIDTH, CompactMap, _place
from clawstream.stream_jobs.admit.decisions.rounds import ClosedRounds, MissingMembers, Rounds

NUMBERS = st.tuples(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-(2**31), 2**31 - 1),
)
NAMES = st.text(max_size=3)


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(NAMES, st.none() | NUMBERS), max_size=60))
def test_as_a_dict(changes: list[tuple[str, tuple[int, int, int] | None]]) -> None:
    packed, plain = CompactMap(), dict[str, tuple[int, int, int]]()
    for name, values in changes:
        if values is None:
            packed.discard(name)
            plain.pop(name, None)
        else:
            packed.put(name, values)
            plain[name] = values
        assert len(packed) == len(plain)
    assert {name: packed.get(name) for name, _ in changes} == {
        name: plain.get(name) for name, _ in changes
    }
    again, rest = CompactMap.of_bytes(memoryview(b"".join(packed.chunks()) + b"more"))
    assert bytes(rest) == b"more" and len(again) == len(plain)
    assert all(again.get(name) == values for name, values in plain.items())


def test_what_looks_like_a_key_but_is_none() -> None:
    """Entries of other names whose values contain the sought key, in the same hash bucket."""
    number, key = _place("sought")
    false = b"\1" * 14 + key + b"\2" * 6
    assert len(false) == WIDTH
    buckets = [b""] * BUCKETS
    buckets[number] = false * 2
    packed = CompactMap(buckets)
    assert packed.get("sought") is None and len(packed) == 2
    packed.put("sought", (1, 2, 3))
    assert packed.get("sought") == (1, 2, 3) and len(packed) == 3
    packed.discard("sought")
    assert packed.get("sought") is None and len(packed) == 2


def test_a_copy_stays_as_it_was_and_cut_bytes_are_none() -> None:
    packed = CompactMap()
    packed.put("a", (1, 2, 3))
    before = packed.copy()
    packed.put("a", (4, 5, 6))
    packed.put("b", (7, 8, 9))
    assert (before.get("a"), before.get("b"), len(before)) == ((1, 2, 3), None, 1)
    whole = b"".join(packed.chunks())
    for cut in (whole[:-1], whole[:100]):
        with pytest.raises((ValueError, struct.error)):
            CompactMap.of_bytes(memoryview(cut))


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 6), st.integers(0, 99), st.integers(-1, 2)),
        max_size=30,
    )
)
def test_closed_rounds_are_what_was_put(closings: list[tuple[str, int, int, int]]) -> None:
    """Packed and unpacked rounds are equal.

    Late members reduce the number of missing members of their round.
    """
    store, plain = ClosedRounds(), {"a": Rounds(), "b": Rounds()}
    for group_id, number, at, left in closings:
        for rounds in (store.of(group_id), plain[group_id]):
            if rounds.closed(number):
                rounds.turned_away(number)
            else:
                rounds.close(number, at, left)
            if rounds is not plain[group_id]:
                store.put(group_id, rounds)
        assert {g: store.of(g) for g in plain} == plain


def test_most_group_ids_are_packed() -> None:
    store = ClosedRounds()
    for group_id, left in (("full", 0), ("short", 1)):
        rounds = store.of(group_id)
        rounds.close(0, 7, left)
        store.put(group_id, rounds)
    assert store.others == {} and store.of("short") == Rounds(((0, 1),), (MissingMembers(0, 7, 1),))
    rounds = store.of("short")
    rounds.close(1, 9, 0)
    store.put("short", rounds)
    assert list(store.others) == ["short"] and len(store.compact) == 1
    rounds.turned_away(0)
    store.put("short", rounds)
    assert store.others == {} and store.of("short") == Rounds(((0, 2),))


@pytest.mark.parametrize("first", [1, 7, 2**31 - 21])
def test_rounds_that_do_not_begin_at_0_are_packed_too(first: int) -> None:
    store = ClosedRounds()
    for number in range(first, first + 20):
        rounds = store.of("g")
        assert not rounds.closed(number)
        rounds.close(number, number, 0)
        store.put("g", rounds)
    assert store.others == {} and len(store.compact) == 1
    rounds = store.of("g")
    assert [rounds.closed(n) for n in (-1, 0, first - 1, first, first + 19)] == [
        True,
        False,
        False,
        True,
        True,
    ]
    assert rounds.floor == 0, (
        "a trajectory that does not say its round takes the first that is free"
    )
    rounds.close(first - 1, 99, 1)
    store.put("g", rounds)
    assert list(store.others) == ["g"], "not the last of them is owed"


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(0, 12), max_size=20))
def test_rounds_are_a_set_of_numbers(numbers: list[int]) -> None:
    rounds, plain = Rounds(), set[int]()
    for number in numbers:
        rounds.close(number, 0, 0)
        plain.add(number)
        assert {n for n in range(14) if rounds.closed(n)} == plain
        assert rounds.floor == min(set(range(14)) - plain)
        assert all(end < first for (_, end), (first, _) in pairwise(rounds.spans)), (
            "joined where they meet"
        )
