"""What the Kafka client's errors mean to us."""

from __future__ import annotations

from confluent_kafka import KafkaError as Code
from confluent_kafka import KafkaException

from runtime.errors import PlumbingError


class KafkaError(PlumbingError):
    """Root of what Kafka does not do for us."""


class Unavailable(KafkaError):
    """The cluster did not answer or did not acknowledge in time. Nothing is known of what was sent; retry with the same ids."""


class Fenced(KafkaError):
    """A newer producer with the same transactional id took over. This process must end and must not be restarted."""


class SourceTruncated(KafkaError):
    """A stored position lies outside of what the topic still has. Run `clawstream doctor`; never skipped silently."""


class TooLarge(KafkaError):
    """The record is larger than the topic takes."""


def translated(e: BaseException) -> KafkaError:
    """Our error for one of the client's."""
    code = e.args[0] if isinstance(e, KafkaException) and e.args else None
    if isinstance(code, Code):
        if code.code() in (Code._FENCED, Code.INVALID_PRODUCER_EPOCH, Code.PRODUCER_FENCED):
            return Fenced(str(code))
        if code.code() == Code.MSG_SIZE_TOO_LARGE:
            return TooLarge(str(code))
        if code.code() in (Code._AUTO_OFFSET_RESET, Code.OFFSET_OUT_OF_RANGE):
            return SourceTruncated(str(code))
        return Unavailable(str(code))
    return KafkaError(str(e))
