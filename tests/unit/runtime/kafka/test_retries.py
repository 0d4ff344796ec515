"""Calls of the client that are made again: for how long, by the code of the error."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
from confluent_kafka import KafkaError as Code
from confluent_kafka import KafkaException

from clawstream.runtime.kafka.errors import Unavailable
from clawstream.runtime.kafka.retries import LEADER_MOVES, retried


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
