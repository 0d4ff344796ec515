"""Define the Delta tables: their records, columns, keys and rows. Pure.

The columns of a table follow the Avro schema of its record, so a new field of an event becomes a
column without further code; the doc of the field becomes the Delta comment. Every row ends with its
position on Kafka: `kafka_topic_id`, `kafka_partition`, `kafka_offset`, `kafka_timestamp`. All
columns are nullable: a row written before a column existed has null there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from operator import itemgetter
from statistics import fmean
from typing import Any, NamedTuple

import orjson
import pyarrow as pa

from schemas import records
from schemas.codec.avro_schema import Schema, expanded, not_null
from schemas.codec.compiled_reader import Read
from schemas.codec.single_object import as_dict, shipped
from schemas.reward_matching import training_reward
from schemas.topics import Topics
from stream_jobs.lake.tables.arrow_columns import (
    TIME,
    Column,
    avro_columns,
    column,
    evolved,
    named,
    pruned,
    text,
    time,
    tupled,
)
from stream_jobs.lake.tables.avro_values import reader_of

Row = tuple[Any, ...]
"""One row before Arrow, in the order of the table's columns.

Packed and JSON columns are bytes, times integers in the unit of the record, nested records tuples.
The last four values are the position on Kafka.
"""
Headers = Mapping[str, bytes]
Derive = Callable[[Any], Iterable[Mapping[str, Any]]]
"""Derives rows, as dicts, from a record."""


class ConsumedRecord(NamedTuple):
    """A decoded record with its position on Kafka. timestamp_ms: log time."""

    topic_id: str
    partition: int
    offset: int
    timestamp_ms: int
    headers: Headers
    event: Any


@dataclass(frozen=True)
class Table:
    """A Delta table.

    record: `expanded` schema of the record whose fields are the first columns, if any.
    more: columns after them.
    derived: functions that make rows from records, by record type; None: a row is a record.
    finish: adds the values of `more`, given those of `record` and the record's headers.
    key: columns that identify a record; a second row with the same values is a duplicate. Empty:
        the position on Kafka identifies it.
    stats: columns with file statistics, for pruning.
    omit: paths of fields of the record that have no column.
    """

    name: str
    record: Schema | None
    more: tuple[Column, ...] = ()
    derived: Mapping[type, Derive] | None = None
    finish: Callable[[Table, Row, Headers], Row] | None = None
    key: tuple[str, ...] = ()
    stats: tuple[str, ...] = ()
    omit: tuple[str, ...] = ()

    @cached_property
    def records(self) -> frozenset[str]:
        """Names of the records that the table takes."""
        if self.derived is not None:
            return frozenset(c.__name__ for c in self.derived)
        return frozenset((self._record["name"],))

    @property
    def _record(self) -> Schema:
        assert self.record is not None, f"table {self.name} is not made of the fields of one record"
        return self.record

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        return (
            *(avro_columns(self.record) if self.record is not None else ()),
            *self.more,
            *KAFKA_COLUMNS,
        )

    @cached_property
    def schema(self) -> pa.Schema:
        return pa.schema([c.field for c in self.columns])

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Column name to index in a row."""
        return {c.field.name: i for i, c in enumerate(self.columns)}

    @cached_property
    def key_of(self) -> Callable[[Row], tuple[Any, ...]]:
        """Return the values of a row's key columns."""
        at = [self.index[c] for c in self.key]
        return itemgetter(*at) if len(at) > 1 else lambda row: tuple(row[i] for i in at)

    def reads(self, writer: Schema) -> Read:
        """Return a function from the bytes of a value to the fields for `row`.

        Args:
            writer: `expanded` schema of the bytes.

        Raises:
            ValueError: it cannot be compiled.
        """
        return reader_of(writer, self._record)

    def row(self, fields: Row, headers: Headers, place: Row) -> Row:
        """Return a complete row, given the values of the fields of `record`."""
        return (self.finish(self, fields, headers) if self.finish is not None else fields) + place

    def rows_of(self, placed: ConsumedRecord) -> list[Row]:
        """Return the rows of a record, with its position."""
        place = (placed.topic_id, placed.partition, placed.offset, placed.timestamp_ms)
        if self.derived is None:
            return [self.row(tupled(self._record, as_dict(placed.event)), placed.headers, place)]
        return [
            self._tupled(made) + place for made in self.derived[type(placed.event)](placed.event)
        ]

    def _tupled(self, made: Mapping[str, Any]) -> Row:
        first: Row = tupled(self.record, made) if self.record is not None else ()
        return first + tuple(made.get(c.field.name) for c in self.more)

    def evolved(self, writer: Schema) -> Table:
        """Return the table with columns for new fields of its record; itself if there are none."""
        if self.derived is not None:
            return self
        record = evolved(self._record, pruned(writer, self.omit))
        return self if record == self.record else replace(self, record=record)

    def upgraded(self, row: Row, former: Table) -> Row:
        """Convert a row of the former table, before `evolved`."""
        count = len(former._record["fields"])
        fields: Row = tupled(self._record, named(former._record, row[:count]))
        return fields + row[count:]

    def arrow(self, rows: Sequence[Row]) -> pa.Table:
        """Convert rows to an Arrow table.

        Raises:
            pa.ArrowException, ValueError, TypeError, OverflowError: a value is out of range.
        """
        columns = list(zip(*rows, strict=True)) or [()] * len(self.columns)
        arrays = [c.convert(values) for c, values in zip(self.columns, columns, strict=True)]
        return pa.Table.from_arrays(arrays, schema=self.schema)


def tables_of(topics: Topics, topic: str) -> tuple[str, ...]:
    """Return the tables that a topic feeds; () for a topic that the lake does not keep."""
    fed = {
        topics.steps: ("steps", "session_events", "failed_calls"),
        topics.rewards: ("rewards", "curation", "assessments"),
        topics.trajectories: ("trajectories", "step_marks"),
        topics.candidates: ("candidates", "run_events"),
        topics.weights: ("weights",),
        topics.schemas: ("schemas",),
        topics.dead_letters: ("dead_letters", "dead_letters_resolved"),
    }.get(topic)
    if fed is None and topics.parse_ready_batches(topic):
        return ("batches", "groups", "late_revisions", "run_events")
    return fed or ()


KAFKA_COLUMNS = (
    column(
        "kafka_topic_id",
        pa.string(),
        "Id of the topic the record was read from; a recreated topic has another id.",
    ),
    column("kafka_partition", pa.int32(), "Partition the record was read from."),
    column("kafka_offset", pa.int64(), "Offset of the record in its partition."),
    column("kafka_timestamp", TIME, "Time of the record by Kafka's log.", partial(time, "ms")),
)


# -- rows


def _drop_truncated_tokens(table: Table, fields: Row, headers: Headers) -> Row:
    """Keep a step whose packed fields are truncated, without tokens but with the reason."""
    for name in ("prompt_token_ids", "response_token_ids", "response_logprobs"):
        packed = fields[table.index[name]]
        if packed is not None and len(packed) % 4:
            repaired = list(fields)
            repaired[table.index[name]] = None
            repaired[table.index["tokens_absent_reason"]] = (
                f"{name} has {len(packed)} bytes, not a multiple of 4"
            )
            fields = tuple(repaired)
    return fields


def _add_payload_position(table: Table, fields: Row, headers: Headers) -> Row:
    """Add the payload's position from the headers; null if a header is missing or invalid."""
    topic_id, *numbers = (
        headers.get(name, b"").decode("ascii", "replace") for name in _PAYLOAD_HEADERS
    )
    return (*fields, topic_id or None, *(int(n) if n.isdecimal() else None for n in numbers))


_PAYLOAD_HEADERS = ("topic_id", "partition", "first_offset", "last_offset")


def _batch_row(batch: records.ReadyBatch) -> Iterable[Mapping[str, Any]]:
    rewards = [
        r
        for g in batch.groups
        for m in g.members
        if (r := training_reward(batch.reward_weights, m.rewards)) is not None
    ]
    more = {
        "group_ids": [g.group_id for g in batch.groups],
        "trajectories": sum(len(g.members) for g in batch.groups),
        "reward_mean": fmean(rewards) if rewards else None,
        "admission_policy_version": batch.policy_version,
    }
    return (dict(as_dict(batch)) | more,)


def _admitted_rows(batch: records.ReadyBatch) -> Iterable[Mapping[str, Any]]:
    for index, (group, plain) in enumerate(
        zip(batch.groups, as_dict(batch)["groups"], strict=True)
    ):
        rewards = [training_reward(batch.reward_weights, m.rewards) for m in group.members]
        known = [r for r in rewards if r is not None]
        syncs = [m.oldest_sync_index for m in group.members if m.oldest_sync_index is not None]
        yield {
            "run_id": batch.run_id,
            "channel": batch.channel,
            "group_id": group.group_id,
            "round": group.round,
            "n": group.n,
            "admitted": True,
            "batch_seq": batch.batch_seq,
            "index": index,
            "whole_group": True,
            "trajectory_ids": [m.trajectory_id for m in group.members],
            "revisions": [m.revision for m in group.members],
            "rewards": rewards,
            "reward_mean": fmean(known) if known else None,
            "trainable_tokens": sum(m.trainable_tokens for m in group.members),
            "oldest_sync_index": min(syncs, default=None),
            "staleness": [_staleness(batch, m) for m in group.members],
            "admission_policy_version": batch.policy_version,
            "members": tupled(_members(), plain["members"]),
        }


def _staleness(batch: records.ReadyBatch, member: records.BatchMember) -> int | None:
    """Return the versions between a member's oldest token and the one that its batch trains.

    This is the staleness that admission checks. None: a validation batch, which trains nothing, or
    a member whose tokens have no sync index.
    """
    if batch.channel == "val" or member.oldest_sync_index is None:
        return None
    return batch.batch_seq // batch.sync_every - member.oldest_sync_index


def _refused_rows(refused: records.Refused) -> Iterable[Mapping[str, Any]]:
    yield {
        "run_id": refused.run_id,
        "channel": refused.channel,
        "group_id": refused.group_id,
        "round": refused.round,
        "n": refused.n,
        "admitted": False,
        "whole_group": refused.whole_group,
        "reason": refused.reason,
        "detail": refused.detail,
        "trajectory_ids": list(refused.trajectory_ids),
        "revisions": list(refused.revisions),
    }


def _policy_rows(event: Any) -> Iterable[Mapping[str, Any]]:
    match event:
        case records.AdmissionPolicy():
            yield {
                "run_id": event.run_id,
                "kind": "policy",
                "admission_policy_version": event.policy_version,
                "policy_json": _json(event),
                "created_at": event.created_at,
            }
        case records.PolicyApplied():
            yield {
                "run_id": event.run_id,
                "kind": "policy_applied",
                "channel": event.channel,
                "admission_policy_version": event.policy.policy_version,
                "policy_json": _json(event.policy),
                "from_offset": event.from_offset,
                "created_at": event.policy.created_at,
            }
        case records.RunEnded():
            yield {
                "run_id": event.run_id,
                "kind": "ended",
                "reason": event.reason,
                "created_at": event.created_at,
            }


def _json(event: Any) -> bytes:
    return orjson.dumps(as_dict(event))


# -- the tables


@cache
def catalog() -> Mapping[str, Table]:
    """Return every table by name. `steps` comes first: a writer leases it first."""
    tables = (*_session_tables(), *_trajectory_tables(), *_admission_tables(), *_other_tables())
    return {t.name: t for t in tables}


def _table(
    name: str, record: type, key: tuple[str, ...] = (), omit: tuple[str, ...] = (), **more: Any
) -> Table:
    return Table(name, _schema_of(record, omit), key=key, omit=omit, **more)


@cache
def _schema_of(record: type, omit: tuple[str, ...] = ()) -> Schema:
    return pruned(expanded(shipped(record.__name__)), omit)


def _members() -> Schema:
    """Return the schema of the members of a batch's group."""
    groups = next(f for f in _schema_of(records.ReadyBatch)["fields"] if f["name"] == "groups")
    return next(f for f in not_null(groups["type"])["items"]["fields"] if f["name"] == "members")[
        "type"
    ]


def _session_tables() -> Iterable[Table]:
    """Tables of gateways and people: ids are globally unique, so a copied topic adds no rows."""
    key, stats = ("run_id", "event_id"), ("run_id", "trajectory_key")
    yield _table(
        "steps",
        records.Step,
        ("run_id", "step_id"),
        finish=_drop_truncated_tokens,
        stats=("step_id", "group_id", *stats),
    )
    yield _table("session_events", records.SessionEvent, key, stats=stats)
    yield _table("failed_calls", records.FailedCall, key, stats=("status", *stats))
    yield _table("rewards", records.Reward, key, stats=("step_id", *stats))
    yield _table("curation", records.Curation, key, stats=stats)
    yield _table("assessments", records.Assessment, key, stats=("trajectory_id", *stats))


def _trajectory_tables() -> Iterable[Table]:
    """Tables of assemble: ids repeat in a recreated topic, so its id is part of the key."""
    stats = ("run_id", "trajectory_id", "group_id", "closed_at")
    yield _table(
        "trajectories",
        records.Trajectory,
        ("kafka_topic_id", "run_id", "trajectory_id", "part"),
        omit=("segments", "steps.response_json"),
        stats=stats,
    )
    yield _table(
        "step_marks", records.StepMark, ("kafka_topic_id", "event_id"), stats=("run_id", "step_id")
    )
    yield _table(
        "candidates",
        records.Candidate,
        ("kafka_topic_id", "run_id", "trajectory_id", "revision"),
        finish=_add_payload_position,
        more=(
            column("payload_topic_id", pa.string(), "Id of the topic that holds the trajectory."),
            column("payload_partition", pa.int32(), "Partition of the trajectory in that topic."),
            column("payload_first_offset", pa.int64(), "Offset of its first part."),
            column("payload_last_offset", pa.int64(), "Offset of its last part, inclusive."),
        ),
        stats=(*stats, "oldest_sync_index"),
    )


def _admission_tables() -> Iterable[Table]:
    """Tables of admission, written in transactions: offsets alone identify rows."""
    yield _table(
        "batches",
        records.ReadyBatch,
        derived={records.ReadyBatch: _batch_row},
        omit=("groups", "policy_version"),
        more=(
            column("admission_policy_version", pa.int64(), _ADMITTED_BY),
            column(
                "group_ids",
                pa.list_(pa.string()),
                "Its groups, in order; one row each in `groups`.",
            ),
            column("trajectories", pa.int32(), "Trajectories in all groups."),
            column(
                "reward_mean",
                pa.float64(),
                "Mean training reward of the trajectories that have one.",
            ),
        ),
        stats=("run_id", "channel", "batch_seq"),
    )
    makers: Mapping[type, Derive] = {
        records.ReadyBatch: _admitted_rows,
        records.Refused: _refused_rows,
    }
    yield Table(
        "groups",
        None,
        _group_columns(),
        makers,
        stats=("run_id", "channel", "group_id", "batch_seq"),
    )
    yield _table("late_revisions", records.Late, stats=("run_id", "trajectory_id"))


def _group_columns() -> tuple[Column, ...]:
    (members,) = avro_columns(
        {"fields": [{"name": "members", "type": _members(), "doc": _MEMBERS}]}
    )
    return (
        column("run_id", pa.string(), "Run the row belongs to."),
        column("channel", pa.string(), "Channel: train or val."),
        column("group_id", pa.string(), "Group."),
        column("round", pa.int32(), "Round; null: refused before it had one."),
        column(
            "n",
            pa.int32(),
            "Admitted: requested size of the group. Refused: requested replacements.",
        ),
        column("admitted", pa.bool_(), "True: in a batch. False: refused."),
        column("batch_seq", pa.int64(), "Batch it is in; null: refused."),
        column("index", pa.int32(), "Index in the batch; null: refused."),
        column(
            "whole_group",
            pa.bool_(),
            "False: only these members are refused and the round goes on, or the record is one "
            "part of a large group.",
        ),
        column("reason", pa.string(), "Why refused; null: admitted."),
        column("detail", pa.string(), "The reason with numbers."),
        column("trajectory_ids", pa.list_(pa.string()), "Members, or the refused trajectories."),
        column("revisions", pa.list_(pa.int64()), "Candidate revision of each member, same order."),
        column(
            "rewards",
            pa.list_(pa.float64()),
            "Training reward of each member, same order; null: none.",
        ),
        column("reward_mean", pa.float64(), "Mean of the training rewards that exist."),
        column("trainable_tokens", pa.int64(), "Trainable tokens of all members."),
        column("oldest_sync_index", pa.int64(), "Lowest sync index among the members' tokens."),
        column(
            "staleness",
            pa.list_(pa.int64()),
            "Of each member, same order: versions between its oldest trainable token and the "
            "version that this batch trains; null: validation, or unknown.",
        ),
        column("admission_policy_version", pa.int64(), _ADMITTED_BY),
        members,
    )


_ADMITTED_BY = "Version of the admission policy in force; the policy is in `run_events`."
_MEMBERS = "Members in full: revision, position of the payload, rewards."


def _other_tables() -> Iterable[Table]:
    columns = (
        column("run_id", pa.string(), "Run the row belongs to."),
        column(
            "kind", pa.string(), "policy: published; policy_applied: in force for a channel; ended."
        ),
        column("channel", pa.string(), "Channel, of policy_applied."),
        column(
            "admission_policy_version",
            pa.int64(),
            "Version of the admission policy, of policy and policy_applied.",
        ),
        column("policy_json", pa.string(), "The policy in full.", text),
        column(
            "from_offset",
            pa.int64(),
            "Candidate offset from which the policy applies, of policy_applied.",
        ),
        column("reason", pa.string(), "Why the run ended."),
        column("created_at", TIME, "Writer's wall clock.", partial(time, "us")),
    )
    makers = dict.fromkeys(
        (records.AdmissionPolicy, records.PolicyApplied, records.RunEnded), _policy_rows
    )
    yield Table("run_events", None, columns, makers, stats=("run_id",))
    yield _table(
        "weights",
        records.WeightVersion,
        ("kafka_topic_id", "version_id"),
        stats=("run_id", "version_id"),
    )
    yield _table("schemas", records.SchemaPublished, ("fingerprint",))
    yield _table("dead_letters", records.DeadLetter, ("topic_id", "partition", "offset", "process"))
    yield _table("dead_letters_resolved", records.DeadLetterResolved)
