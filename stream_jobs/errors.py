"""Errors of the stream jobs. The docstring says what happened and what to do."""

from __future__ import annotations

from clawstream.runtime.errors import SourceTruncated, StoreAway
from clawstream.schemas.errors import ForeseenError


class StreamJobError(ForeseenError):
    """Root of all errors of `stream_jobs`."""


class FencedOut(StreamJobError):
    """Another worker wrote to this partition's changelog and owns the partition now.

    The process ends before it writes any output, and restarts.
    """


class InputDisorder(StreamJobError):
    """An input was not delivered in log order. Nothing of it was folded; the restart reads it
    again.
    """


class UnreadableChangelog(StreamJobError, SourceTruncated):
    """The changelog holds a foreign record, or lacks a record.

    The decisions cannot be recovered, and a restart would find the same: an operator must act.
    Run clawstream status --positions.
    """


class UnreadableJournal(StreamJobError, SourceTruncated):
    """The journal of admission holds a record that cannot be read.

    The decisions cannot be recovered and would be made again. An unknown schema means that a
    newer release wrote the record: run that release. The process does not restart, because it
    would find the same record.
    """


class PolicyRefused(StreamJobError):
    """An invalid policy was not published. The message names the field."""


class TopicReplaced(StreamJobError):
    """A topic was deleted and recreated while it was read. The restart begins at its start."""


class NotCoPartitioned(StreamJobError):
    """The partitions of the inputs were not assigned together: their numbers differ, or the group
    has a foreign member.
    """


class ConsumerStopped(StreamJobError):
    """The consumer has stopped although Kafka answers. The restart joins the group again."""


class LakeError(StreamJobError):
    """Root of all errors of the lake."""


class LakeAway(LakeError, StoreAway):
    """The object store of the lake does not answer, or refuses this process. Nothing is lost: the
    writer keeps its rows and writes again.

    A commit may have landed: a repeated write drops its rows.
    """


class LakeDamaged(LakeError):
    """A table has an unreadable file. The message names both, and the command that repairs the
    table.

    Other tables are not affected: the writer continues with them, and reads the missing records
    again after the repair.
    """

    def __init__(self, table: str, damage: str) -> None:
        super().__init__(
            f"table {table} of the lake is damaged: {damage}; "
            f"run `clawstream tables repair {table}`"
        )
        self.table, self.damage = table, damage


class LakeRepaired(LakeDamaged):
    """A repair has removed rows of a table; their records must be read again."""


class TooManyFields(LakeError):
    """A record has more unknown fields than its table accepts. Dead-letter the whole record; it can
    be replayed later.
    """

    def __init__(self, table: str, more: int, most: int) -> None:
        super().__init__(
            f"table {table} of the lake would have {more} fields that this release does not know; "
            f"at most {most} are added (MORE_FIELDS): "
            "replay this dead letter under a release that knows them"
        )


class SqlError(LakeError):
    """A query failed: it is invalid, not allowed or too expensive, or the lake cannot be read.

    The message says which, with DuckDB's text for an invalid query.
    """
