"""A record from which no row of a table can be derived: it goes aside, the tables go on."""

from __future__ import annotations

import sys
from typing import cast

from support.admit import cand

from clawstream.runtime.kafka import Record
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.records import BatchGroup, BatchMember, Place, ReadyBatch, RewardValue
from clawstream.stream_jobs.lake.tables.catalog import catalog
from clawstream.stream_jobs.lake.tables.row_decoder import RowDecoder, WriterSchemas
from clawstream.stream_jobs.lake.tables.table import Row

BATCH_TABLES = ("batches", "groups")


def batch(*values: float, sync_every: int = 1) -> ReadyBatch:
    members = tuple(
        BatchMember(
            trajectory_id=f"t{i}", trajectory_key=f"t{i}", revision=0,
            place=Place(topic_id="T", partition=0, first_offset=i, last_offset=i),
            rewards=(
                RewardValue(
                    source="rule", name="f", function_version="1", value=value, reward_revision=0
                ),
            ),
            trainable_tokens=3, oldest_sync_index=0, untrainable_steps=(),
        )
        for i, value in enumerate(values)
    )  # fmt: skip
    return ReadyBatch(
        run_id="r", channel="train", batch_seq=0, groups=(
            BatchGroup(group_id="g", round=0, n=len(members), members=members),
        ),
        reward_weights={}, algorithm="grpo", trainable_tokens=9, policy_version=1,
        sync_every=sync_every, input_topic_id="C", input_partition=0, input_from=0, input_to=1,
        content_hash="0", created_at_event_time=1,
    )  # fmt: skip


def rows_of(
    event: object, tables: tuple[str, ...], headers: dict[str, bytes] | None = None
) -> tuple[dict[str, list[Row]], list[str]]:
    """Return the rows of each table that has some, and why others have none."""
    schemas, why = WriterSchemas(), list[str]()
    decode = RowDecoder(
        schemas,
        cast(Decoder, schemas),
        catalog(),
        lambda wider: False,
        lambda record, reason: why.append(reason),
    )
    value = schemas.encode(event)
    _, found = decode(Record("t", 0, 0, 0, b"k", value, headers or {}), "T", tables)
    return dict(found), why


def test_a_table_that_has_no_row_of_a_record_leaves_the_other_tables_theirs() -> None:
    found, why = rows_of(batch(1.0, 0.0, sync_every=0), BATCH_TABLES)
    assert list(found) == ["batches"]
    (reason,) = why
    assert reason.startswith("table groups: no row can be derived: ZeroDivisionError")


def test_headers_of_any_size() -> None:
    digits = {"topic_id": b"T"} | dict.fromkeys(
        ("partition", "first_offset", "last_offset"), b"9" * 5000
    )
    found, why = rows_of(cand("a"), ("candidates",), digits)
    assert (found, len(why)) == ({}, 1) and why[0].startswith("table candidates: ")


def test_a_mean_of_rewards_that_admission_would_refuse() -> None:
    """Batches of an older release have such rewards."""
    found, why = rows_of(batch(-sys.float_info.max, -sys.float_info.max, 0.5), BATCH_TABLES)
    assert not why
    for table in BATCH_TABLES:
        (row,) = found[table]
        assert row[catalog()[table].index["reward_mean"]] == 0.5
