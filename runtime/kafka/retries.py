"""Repeat a call of the client while its error is one that passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from confluent_kafka import KafkaError as Code
from confluent_kafka import KafkaException

from clawstream.runtime.kafka.errors import translated
from clawstream.runtime.kafka.reader import READ_TIMEOUT_S

_T = TypeVar("_T")
PAUSE_S = 0.1
ASK_S = 5.0
"""Longest wait for one answer of a broker."""
LEADER_MOVES: Mapping[int, float] = {
    **dict.fromkeys(
        (
            *(Code._TIMED_OUT, Code._TRANSPORT, Code._DESTROY_BROKER, Code.OFFSET_NOT_AVAILABLE),
            *(Code.LEADER_NOT_AVAILABLE, Code.NOT_LEADER_FOR_PARTITION, Code._ALL_BROKERS_DOWN),
        ),
        READ_TIMEOUT_S,
    ),
    Code._UNKNOWN_PARTITION: ASK_S,  # a broker may not yet know a topic that is new
}
COORDINATOR_STARTS: Mapping[int, float] = dict.fromkeys(
    (
        Code.COORDINATOR_LOAD_IN_PROGRESS,
        Code.COORDINATOR_NOT_AVAILABLE,
        Code.NOT_COORDINATOR,
    ),
    READ_TIMEOUT_S,
)


def retried(call: Callable[[], _T], patience: Mapping[int, float]) -> _T:
    """Return what a call returns.

    Args:
        call: A call of the client.
        patience: Error code to the seconds since the first call for which it is made again.

    Raises:
        KafkaError: Another error, or one that lasts.
    """
    begun = time.monotonic()
    while True:
        try:
            return call()
        except KafkaException as e:
            if time.monotonic() - begun > patience.get(e.args[0].code(), -1.0):
                raise translated(e) from e
        time.sleep(PAUSE_S)
