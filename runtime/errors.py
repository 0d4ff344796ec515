"""What the plumbing raises: one root, so that a process can tell its own trouble from a bug."""

from __future__ import annotations

from clawstream.schemas.errors import ForeseenError


class PlumbingError(ForeseenError):
    """The runtime (broker, jars, Kafka client, settings) cannot work.

    The message says what to do.
    """


class InUse(PlumbingError):
    """Another process has an exclusive resource: a port or a data directory.

    Stop it, or choose another.
    """


class StoreAway(PlumbingError):
    """An object store does not answer, or refuses this process.

    It may be back later; else correct its address or credentials.
    """


class KafkaError(PlumbingError):
    """Root of what Kafka does not do for us."""


class Unavailable(KafkaError):
    """The cluster did not answer or acknowledge in time.

    Whether the records were written is unknown; retry with the same ids.
    """


class Denied(Unavailable):
    """The brokers refuse this process: its login, a certificate or a missing ACL.

    Correct `kafka.security`, or grant what the message names.
    """


class Fenced(KafkaError):
    """A newer producer with the same transactional id took over.

    This process must end and must not be restarted.
    """


class SourceTruncated(KafkaError):
    """A stored position is outside the topic's offsets.

    Run `clawstream status --positions`; never skip silently.
    """


class TooLarge(KafkaError):
    """The record is larger than the topic takes."""


class WeightsUnreadable(PlumbingError):
    """A file of a weight version is missing, can't be read, or isn't what its manifest says.

    Try again later: a file system may be away, or an operator may restore the file.
    """
