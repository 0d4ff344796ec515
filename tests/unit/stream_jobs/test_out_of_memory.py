"""Out of memory is not caused by a record: it ends the process.

It never becomes a dead letter, a missing reward or an emptied record.
"""

from __future__ import annotations

from typing import Any, Never

import pyarrow as pa
import pytest
from support.assemble import InMemoryPartition, session, step

from clawstream.gateway.claw_r1.reward import score_of
from clawstream.rewards.results import rewards_of
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.rule_spec import NamedFunction
from clawstream.stream_jobs.assemble.state.trajectories import STEPS
from clawstream.stream_jobs.lake.table_writer import storable_rows
from clawstream.stream_jobs.reward.assessments import assessment_of


def hungry(*_: Any) -> Never:
    raise MemoryError


class Key(bytes):
    """A Kafka key whose comparison raises `MemoryError`."""

    __hash__ = bytes.__hash__

    def __ne__(self, other: object) -> bool:
        hungry()


class Table:
    """A table whose conversion to Arrow runs out of memory."""

    name = "steps"

    def arrow(self, _: Any) -> Never:
        raise pa.ArrowMemoryError("malloc of size 64 failed")


def test_the_fold_of_assemble_does_not_dead_letter_the_record() -> None:
    worker = InMemoryPartition()
    with pytest.raises(MemoryError):
        worker.fold.record(STEPS, 0, 0, Key(b"k"), step("k", 0))
    assert not worker.fold.finish_batch()


def test_rules_do_not_give_their_answer() -> None:
    trajectory = (
        InMemoryPartition()
        .feed((STEPS, 0, step("k", 0)), (STEPS, 1, session("k", "completed")))
        .trajectories["k"]
    )
    rule: NamedFunction[Any] = NamedFunction("hungry", "1", hungry)
    with pytest.raises(MemoryError):
        list(rewards_of(trajectory, rule, 0))
    with pytest.raises(MemoryError):
        assessment_of(trajectory, [rule], 0)
    with pytest.raises(MemoryError):
        score_of(rule, trajectory)


def test_the_lake_does_not_dead_letter_the_rows() -> None:
    dead_lettered: list[Any] = []
    with pytest.raises(MemoryError):
        storable_rows(Table(), [], lambda *letter: dead_lettered.append(letter))  # type: ignore[arg-type]
    assert dead_lettered == []


def test_a_record_is_not_taken_for_undecodable() -> None:
    class Value(bytes):
        def __getitem__(self, at: Any) -> Any:
            return hungry() if at == slice(None, 2) else bytes.__getitem__(self, at)

    codec = Codec()
    with pytest.raises(MemoryError):
        codec.decode(Value(codec.encode(step("k", 0))))
