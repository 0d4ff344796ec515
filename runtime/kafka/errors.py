"""Translate the Kafka client's errors to those of `clawstream.runtime.errors`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import KafkaError as Code
from confluent_kafka import KafkaException

from clawstream.runtime.errors import (
    Denied,
    Fenced,
    KafkaError,
    SourceTruncated,
    TooLarge,
    Unavailable,
)

__all__ = [
    "Denied",
    "Fenced",
    "KafkaError",
    "SourceTruncated",
    "TooLarge",
    "Unavailable",
    "translated",
    "translating",
]

_DENIED = (
    *(Code._AUTHENTICATION, Code.SASL_AUTHENTICATION_FAILED, Code.TOPIC_AUTHORIZATION_FAILED),
    *(Code.GROUP_AUTHORIZATION_FAILED, Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED),
    Code.CLUSTER_AUTHORIZATION_FAILED,
)


def translated(e: BaseException, place: str | None = None) -> KafkaError:
    """Return our error for one of the client's. place: What was read, as far as it is known."""
    code = e.args[0] if isinstance(e, KafkaException) and e.args else None
    where = f"{place}: " if place else ""
    if isinstance(code, Code):
        if code.code() in (Code._FENCED, Code.INVALID_PRODUCER_EPOCH, Code.PRODUCER_FENCED):
            return Fenced(str(code))
        if code.code() == Code.MSG_SIZE_TOO_LARGE:
            return TooLarge(str(code))
        if code.code() in (Code._AUTO_OFFSET_RESET, Code.OFFSET_OUT_OF_RANGE):
            return SourceTruncated(
                f"source truncated: {where}{code.str()}; run clawstream status --positions"
            )
        if code.code() in _DENIED:
            return Denied(
                f"{code.str()}: correct kafka.security.user, or grant what "
                "`clawstream topics acls` prints"
            )
        return Unavailable(f"{where}{code}")
    return KafkaError(str(e))


@contextmanager
def translating() -> Iterator[None]:
    """Raise our error in place of one of the client's."""
    try:
        yield
    except KafkaException as e:
        raise translated(e) from e
