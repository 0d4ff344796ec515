"""Errors of the stream jobs. The docstring says what happened and what to do."""

from __future__ import annotations

from runtime.errors import SourceTruncated
from schemas.errors import ForeseenError


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
    Run clawstream doctor.
    """


class UnreadableJournal(StreamJobError, SourceTruncated):
    """The journal of admission holds a record that can't be read. What was decided can't be known: it would be decided again.

    An unknown schema means that a newer release wrote it: run that one. A restart would find the same, so there is none.
    """


class PolicyRefused(StreamJobError):
    """A policy that can't be obeyed was not published. The message names the field."""


class TopicReplaced(StreamJobError):
    """A topic was deleted and made anew while it was read. The restart begins at its start."""


class NotCoPartitioned(StreamJobError):
    """The partitions of the inputs were not assigned together: their numbers differ, or the group
    has a foreign member.
    """


class LakeError(StreamJobError):
    """Root of what goes wrong with the lake."""


class LakeDamaged(LakeError):
    """A table has a file that can't be read. The message names both, and the command that repairs the table.

    Other tables are not concerned: the writer goes on with them, and reads again what this one lacks once it is repaired.
    """

    def __init__(self, table: str, damage: str) -> None:
        super().__init__(
            f"table {table} of the lake is damaged: {damage}; run `clawstream tables repair {table}`"
        )
        self.table, self.damage = table, damage


class LakeRepaired(LakeDamaged):
    """A repair has taken rows of a table back, which are still to be read again."""


class TooManyFields(LakeError):
    """A record has more fields that its table lacks than the table takes. Dead-letter it, whole: it can be sent again later."""

    def __init__(self, table: str, more: int, most: int) -> None:
        super().__init__(
            f"table {table} of the lake would have {more} fields that this release does not know; at most {most} are added "
            "(MORE_FIELDS): replay this dead letter under a release that knows them"
        )


class SqlError(LakeError):
    """A query got no answer. It is wrong, asks for what a query may not do or for too much, or the lake can't be read.

    The message says which, in DuckDB's words where the query is wrong.
    """
