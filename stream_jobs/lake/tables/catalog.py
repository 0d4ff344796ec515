"""List the Delta tables: records, columns, keys, and the topics that feed them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Any

import pyarrow as pa

from clawstream.schemas import records
from clawstream.schemas.codec.avro_schema import Schema, expanded
from clawstream.schemas.codec.single_object import shipped
from clawstream.schemas.topics import Topics
from clawstream.stream_jobs.lake.tables.arrow_columns import (
    TIME,
    Column,
    avro_columns,
    column,
    pruned,
    text,
    time,
)
from clawstream.stream_jobs.lake.tables.derived_rows import (
    add_payload_position,
    admitted_rows,
    batch_rows,
    drop_truncated_tokens,
    member_schema,
    refused_rows,
    run_event_rows,
)
from clawstream.stream_jobs.lake.tables.table import Derive, Table


def tables_of(topics: Topics, topic: str) -> tuple[str, ...]:
    """Return the tables that a topic feeds; () for a topic that the lake does not keep."""
    fed = {
        topics.steps: ("steps", "session_events", "failed_calls"),
        topics.rewards: ("rewards", "curation", "assessments"),
        topics.trajectories: ("trajectories", "step_marks"),
        topics.candidates: ("candidates", "run_events"),
        topics.weights: ("weights",),
        topics.trained_tokens: ("trained_tokens", "trained_trajectories"),
        topics.schemas: ("schemas",),
        topics.dead_letters: ("dead_letters", "dead_letters_resolved"),
    }.get(topic)
    if fed is None and topics.parse_ready_batches(topic):
        return ("batches", "groups", "late_revisions", "run_events")
    return fed or ()


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


def _session_tables() -> Iterable[Table]:
    """Tables of gateways and people: ids are globally unique, so a copied topic adds no rows."""
    key, stats = ("run_id", "event_id"), ("run_id", "trajectory_key")
    yield _table(
        "steps",
        records.Step,
        ("run_id", "step_id"),
        finish=drop_truncated_tokens,
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
        omit=("segments", "steps.response_json", "steps.new_messages_json"),
        stats=stats,
    )
    yield _table(
        "step_marks", records.StepMark, ("kafka_topic_id", "event_id"), stats=("run_id", "step_id")
    )
    yield _table(
        "candidates",
        records.Candidate,
        ("kafka_topic_id", "run_id", "trajectory_id", "revision"),
        finish=add_payload_position,
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
        derived={records.ReadyBatch: batch_rows},
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
        records.ReadyBatch: admitted_rows,
        records.Refused: refused_rows,
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
        {"fields": [{"name": "members", "type": member_schema(), "doc": _MEMBERS}]}
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
        (records.AdmissionPolicy, records.PolicyApplied, records.RunEnded), run_event_rows
    )
    yield Table("run_events", None, columns, makers, stats=("run_id",))
    yield _table(
        "weights",
        records.WeightVersion,
        ("kafka_topic_id", "version_id"),
        stats=("run_id", "version_id"),
    )
    yield _table(
        "trained_tokens",
        records.TrainedTokens,
        stats=("run_id", "step_id", "trajectory_id", "version_id"),
    )
    yield _table(
        "trained_trajectories",
        records.TrainedTrajectory,
        stats=("run_id", "trajectory_id", "version_id"),
    )
    yield _table("schemas", records.SchemaPublished, ("fingerprint",))
    yield _table("dead_letters", records.DeadLetter, ("topic_id", "partition", "offset", "process"))
    yield _table("dead_letters_resolved", records.DeadLetterResolved)
