"""What the plumbing raises: one root, so that a process can tell its own trouble from a bug."""

from __future__ import annotations

from schemas.errors import ForeseenError


class PlumbingError(ForeseenError):
    """Something under the processes (broker, jars, Kafka client, settings) cannot do its work; the message says what to do."""


class InUse(PlumbingError):
    """Another process has what only one can have: a port, a data directory. Stop that process, or choose another."""


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
