"""One batch is read ahead: order, errors at their batch, committed positions, the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.runtime.kafka import Record, Unavailable
from clawstream.trainer.data.batches import DeadLetterSink, FetchedBatch
from clawstream.trainer.data.prefetch import Prefetch
from tests.support.trainer_runs import fetched

LONG_S = 30.0
LETTER = (Record("t", 0, 0, 0, None, b"", {}), "id", "invalid", "no batch")


@dataclass
class ListSource:
    """Batches 0 to `count` - 1; waits for the test before each batch, if `turns` is given.

    unavailable_at: batch that cannot be read until `returns` is set.
    """

    dead_letter: DeadLetterSink
    count: int
    fails_at: int | None = None
    unavailable_at: int | None = None
    failed: threading.Event = field(default_factory=threading.Event)
    returns: threading.Event = field(default_factory=threading.Event)
    turns: threading.Semaphore | None = None
    taken: list[int] = field(default_factory=list)
    commits: list[int | None] = field(default_factory=list)
    closed: bool = False
    idle: threading.Event = field(default_factory=threading.Event)

    def next(self, batch_seq: int, timeout_s: float) -> FetchedBatch | None:
        if self.turns is not None:
            assert self.turns.acquire(timeout=LONG_S)
        if batch_seq == self.fails_at:
            self.dead_letter(*LETTER)
            raise ValueError(f"batch {batch_seq}")
        if batch_seq == self.unavailable_at and not self.returns.is_set():
            self.failed.set()
            raise Unavailable("no broker")
        if batch_seq >= self.count:
            self.idle.set()
            return None
        self.taken.append(batch_seq)
        return fetched(batch_seq)

    def commit(self, before: int | None) -> None:
        self.commits.append(before)

    def close(self) -> None:
        self.closed = True


@contextmanager
def prefetching(**more: object) -> Iterator[tuple[Prefetch, ListSource, list[object]]]:
    made: list[ListSource] = []
    letters: list[object] = []

    def open_source(sink: DeadLetterSink) -> ListSource:
        made.append(ListSource(sink, **more))  # type: ignore[arg-type]
        return made[0]

    with Prefetch(open_source, lambda *letter: letters.append(letter)) as batches:
        yield batches, made[0], letters


def taken(batches: Prefetch, count: int) -> list[int]:
    found = []
    for seq in range(count):
        batch = batches.next(seq, LONG_S)
        assert batch is not None
        found.append(batch.batch.batch_seq)
    return found


@given(st.integers(0, 5))
def test_batches_come_in_order_and_all_that_was_trained_is_committed(count: int) -> None:
    with prefetching(count=count) as (batches, source, _):
        assert taken(batches, count) == list(range(count))
        assert batches.next(count, 0.0) is None
        assert source.idle.wait(LONG_S)
        batches.close()
    assert source.closed and source.commits[-1] is None
    named = [commit for commit in source.commits if commit is not None]
    assert named == [fetched(n).offset for n in range(count)], (
        "while a batch trains, the position is before it"
    )


def test_one_batch_is_read_while_another_trains_and_no_more() -> None:
    turns = threading.Semaphore(1)
    with prefetching(count=5, turns=turns) as (batches, source, _):
        assert taken(batches, 1) == [0]
        turns.release()
        assert batches._ahead is not None
        batches._ahead.result(LONG_S)
        assert source.taken == [0, 1], "the thread has ended with one batch ahead"
        batches.close()
    assert source.commits[-1] == fetched(1).offset, "a batch that was read ahead is not trained"


@pytest.mark.parametrize("fails_at", [0, 2])
def test_an_error_is_raised_where_its_batch_is_asked_for_behind_its_dead_letter(
    fails_at: int,
) -> None:
    with prefetching(count=5, fails_at=fails_at) as (batches, source, letters):
        assert taken(batches, fails_at) == list(range(fails_at))
        for _ in range(2):
            with pytest.raises(ValueError, match=f"batch {fails_at}"):
                batches.next(fails_at, LONG_S)
        assert letters == [LETTER]
        commits = list(source.commits)
        batches.close()
    assert source.commits == commits, "it is unknown what of the topic is trained"


def test_kafka_may_be_unavailable_while_a_batch_trains() -> None:
    with prefetching(count=2, unavailable_at=1) as (batches, source, _):
        assert taken(batches, 1) == [0]
        assert source.failed.wait(LONG_S)
        source.returns.set()
        assert batches._ahead is not None
        read = batches._ahead.result(LONG_S)
        assert read is not None and read.batch.batch_seq == 1
        assert batches.next(1, LONG_S) is read
        batches.close()


def test_kafka_is_unavailable_to_a_trainer_that_waits() -> None:
    with (
        prefetching(count=1, unavailable_at=0) as (batches, _, _),
        pytest.raises(Unavailable),
    ):
        batches.next(0, LONG_S)


def test_the_block_ends_a_thread_that_waits_for_a_batch() -> None:
    with prefetching(count=0) as (batches, source, _):
        assert batches.next(0, 0.0) is None
        assert source.idle.wait(LONG_S)
    batches._thread.shutdown()
    assert batches.next(0, LONG_S) is None
