"""Calls of the client that are made again: for how long, by the code of the error."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError as Code
from confluent_kafka import KafkaException

from clawstream.runtime.kafka.cluster import group_names
from clawstream.runtime.kafka.errors import Unavailable
from clawstream.runtime.kafka.retries import COORDINATOR_STARTS, LEADER_MOVES, retried


def failing(times: int, code: int) -> tuple[count[int], Callable[[], int]]:
    calls = count(1)

    def call() -> int:
        if (made := next(calls)) <= times:
            raise KafkaException(Code(code))
        return made

    return calls, call


def test_an_error_that_passes_is_waited_for() -> None:
    _, call = failing(2, Code._UNKNOWN_PARTITION)
    assert retried(call, LEADER_MOVES) == 3


@pytest.mark.parametrize("patience", [{}, {Code._UNKNOWN_PARTITION: -1.0}])
def test_another_error_ends_the_call_at_once(patience: dict[int, float]) -> None:
    calls, call = failing(2, Code._UNKNOWN_PARTITION)
    with pytest.raises(Unavailable):
        retried(call, patience)
    assert next(calls) == 2


def test_a_broker_that_starts_is_asked_for_its_groups_again() -> None:
    lists = iter([
        SimpleNamespace(valid=[], errors=[Code(Code.COORDINATOR_LOAD_IN_PROGRESS)]),
        SimpleNamespace(valid=[SimpleNamespace(group_id=name) for name in "ba"], errors=[]),
    ])  # fmt: skip
    assert retried(lambda: group_names(next(lists)), COORDINATOR_STARTS) == ["a", "b"]
