"""Records to Arrow and back: a table keeps every field that it does not omit on purpose."""

from __future__ import annotations

import struct
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.runtime.kafka import SourceTruncated
from clawstream.schemas import records as events
from clawstream.schemas.codec.single_object import AVRO_DIR, as_dict
from clawstream.schemas.tokens import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from clawstream.schemas.topics import Topics
from clawstream.stream_jobs.lake.consumer import first_offset
from clawstream.stream_jobs.lake.dedupe import DedupeWindow, digest, drop_duplicates
from clawstream.stream_jobs.lake.tables.catalog import catalog, tables_of
from clawstream.stream_jobs.lake.tables.table import ConsumedRecord, Row, Table

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
words = st.text(st.characters(codec="utf-8"), max_size=12)
ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)
floats32 = st.lists(st.floats(width=32, allow_nan=False), max_size=20)
micros = st.integers(0, 2**51)


@st.composite
def steps(draw: st.DrawFn) -> events.Step:
    """Draw steps with any tokens, text and versions.

    One drawn value sets several plain fields, for speed.
    """
    a, b, number = draw(words), draw(words), draw(micros)
    maybe = draw(st.booleans())
    spans = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=2))
    return events.Step(
        step_id=a, run_id=b, trajectory_key=a, call_id=b, choice_index=number % 7,
        group_id=a if maybe else None, channel="val" if maybe else None, protocol=b, model=a,
        status=draw(st.sampled_from(["ok", "aborted", "error"])),
        finish_reason=None if maybe else b, streamed=maybe, request_json=a.encode(),
        response_json=b.encode(), prompt_token_ids=draw(st.none() | ids.map(pack_ids)),
        response_token_ids=draw(st.none() | ids.map(pack_ids)),
        response_logprobs=draw(st.none() | floats32.map(pack_logprobs)),
        tokens_absent_reason=b if maybe else None,
        versions=tuple(events.VersionSpan(version=a, start=x, end=y) for x, y in spans),
        tags=(events.Tag(name=a, evidence=b),) if maybe else (),
        retry_count=None if maybe else number % 5, gateway_id=b, received_at=number,
        finished_at=number + 1, sampling=draw(st.none() | samplings()),
        usage=events.Usage(prompt_tokens=number % 99) if maybe else None,
    )  # fmt: skip


def samplings() -> st.SearchStrategy[events.Sampling]:
    """Return a strategy for full and partial sampling settings."""
    return st.builds(
        events.Sampling,
        source=st.sampled_from(["engine", "request"]),
        temperature=st.none() | st.floats(0, 2),
        top_k=st.none() | st.integers(0, 50),
        constraints=st.sampled_from([(), ("json",), ("json", "logit_bias")]),
        logprobs_mode=st.none() | st.just("processed_logprobs"),
    )


def placed(event: Any, offset: int = 0, **headers: str) -> ConsumedRecord:
    return ConsumedRecord(
        "T", 3, offset, 1_700_000_000_123, {k: v.encode() for k, v in headers.items()}, event
    )


def round_trip(name: str, *records: Any, **headers: str) -> list[dict[str, Any]]:
    table = catalog()[name]
    rows = [row for i, r in enumerate(records) for row in table.rows_of(placed(r, i, **headers))]
    arrow = table.arrow(rows)
    arrow.validate(full=True)
    return arrow.to_pylist()  # type: ignore[no-any-return]


@pytest.mark.slow
@given(st.lists(steps(), max_size=4))
def test_steps_come_back_as_they_were(written: list[events.Step]) -> None:
    rows = round_trip("steps", *written)
    assert [r["kafka_offset"] for r in rows] == list(range(len(written)))
    for step, row in zip(written, rows, strict=True):
        plain = dict(as_dict(step))
        for name in ("prompt_token_ids", "response_token_ids"):
            plain[name] = None if plain[name] is None else unpack_ids(plain[name])
        if step.response_logprobs is not None:
            plain["response_logprobs"] = unpack_logprobs(step.response_logprobs)
        for name in ("request_json", "response_json"):
            plain[name] = plain[name].decode()
        for name in ("received_at", "finished_at"):
            plain[name] = EPOCH + timedelta(microseconds=plain[name])
        for name in ("redacted_prompt", "redacted_response", "blobs", "versions", "tags"):
            plain[name] = list(plain[name])
        if step.sampling is not None:
            plain["sampling"] = {
                **plain["sampling"],
                "constraints": list(step.sampling.constraints),
            }
        assert {n: row[n] for n in plain} == plain
        assert (row["kafka_topic_id"], row["kafka_partition"]) == ("T", 3)
        assert row["kafka_timestamp"] == EPOCH + timedelta(milliseconds=1_700_000_000_123)


@given(st.lists(st.none() | floats32, max_size=8))
def test_packed_lists_equal_what_python_would_build(values: list[list[float] | None]) -> None:
    column = next(c for c in catalog()["steps"].columns if c.field.name == "response_logprobs")
    array = column.convert([None if v is None else pack_logprobs(v) for v in values])
    assert array.equals(pa.array(values, pa.list_(pa.float32())))
    assert array.type == column.field.type


def step(**changes: Any) -> events.Step:
    values: dict[str, Any] = {
        "step_id": "k~1.0", "run_id": "r", "trajectory_key": "k", "call_id": "k~1",
        "choice_index": 0, "protocol": "openai.chat", "model": "policy", "status": "ok",
        "streamed": False, "request_json": b"{}", "response_json": b"{}", "gateway_id": "g",
        "received_at": 1, "finished_at": 2,
    }  # fmt: skip
    return events.Step(**values | changes)


def test_a_broken_packed_field_costs_its_tokens_only() -> None:
    (row,) = round_trip("steps", step(prompt_token_ids=b"\0" * 5, response_token_ids=pack_ids([7])))
    assert row["prompt_token_ids"] is None
    assert row["response_token_ids"] == [7]
    assert row["tokens_absent_reason"] == "prompt_token_ids has 5 bytes, not a multiple of 4"


def test_text_that_is_no_utf8_does_not_stop_the_lake() -> None:
    (row,) = round_trip("steps", step(request_json=b'{"a": "\xff"}'))
    assert row["request_json"] == '{"a": "�"}'


def test_a_value_out_of_range_is_an_error_of_its_row() -> None:
    table = catalog()["steps"]
    with pytest.raises((pa.ArrowException, OverflowError)):
        table.arrow(table.rows_of(placed(step(retry_count=2**40))))


MEMBER = events.BatchMember(
    trajectory_id="t0", trajectory_key="t0", revision=2,
    place=events.Place(topic_id="P", partition=1, first_offset=5, last_offset=6),
    rewards=(events.RewardValue(source="rule", name="f", function_version="1", value=1.0,
        reward_revision=0),),
    untrainable_steps=("s",), trainable_tokens=7, oldest_sync_index=3,
)  # fmt: skip
BATCH = events.ReadyBatch(
    run_id="r", channel="train", batch_seq=4,
    groups=(
        events.BatchGroup(group_id="g0", round=0, n=2, members=(MEMBER,)),
        events.BatchGroup(group_id="g1", round=1, n=2, members=()),
    ),
    policy_version=1, sync_every=1, algorithm="grpo", reward_weights={"rule/f": 2.0},
    input_topic_id="C", input_partition=0, input_from=1, input_to=9, content_hash="h",
    trainable_tokens=7, created_at_event_time=1000,
)  # fmt: skip


def test_a_batch_is_one_row_and_a_row_for_each_group() -> None:
    (batch,) = round_trip("batches", BATCH)
    assert batch["group_ids"] == ["g0", "g1"]
    assert batch["reward_weights"] == [("rule/f", 2.0)]
    assert (batch["batch_seq"], batch["trajectories"], batch["reward_mean"]) == (4, 1, 2.0)
    assert batch["created_at_event_time"] == EPOCH + timedelta(seconds=1)
    refused = events.Refused(
        run_id="r", channel="train", group_id="g2", trajectory_ids=("t5",), revisions=(0,),
        whole_group=True, reason="stale", n=2, input_topic_id="C", input_from=1, input_to=9,
    )  # fmt: skip
    first, second, third = round_trip("groups", BATCH, refused)
    assert (first["group_id"], first["batch_seq"], first["admitted"], first["rewards"]) == (
        "g0",
        4,
        True,
        [2.0],
    )
    assert first["members"][0]["place"]["first_offset"] == 5
    assert first["members"][0]["rewards"][0]["value"] == 1.0
    assert (second["trajectory_ids"], second["reward_mean"]) == ([], None)
    assert (
        first["staleness"],
        first["admission_policy_version"],
        batch["admission_policy_version"],
    ) == ([1], 1, 1)
    assert "policy_version" not in batch, (
        "the record's field names the admission policy; a column says which version it is of"
    )
    assert (third["admitted"], third["batch_seq"], third["reason"], third["n"]) == (
        False,
        None,
        "stale",
        2,
    )


def test_trajectories_leave_tokens_out_and_keep_what_each_step_is() -> None:
    taken = events.TrajectoryStep(
        step_id="s", index=0, status="ok", drift="root", prompt_tokens=3, response_tokens=2,
        response_json=b"{}", trainable=True, marks=("retried",), offset=9,
    )  # fmt: skip
    (row,) = round_trip(
        "trajectories",
        events.Trajectory(
            run_id="r", trajectory_key="k", trajectory_id="k", group_id="g", channel="val",
            outcome="completed", opened_at=1, closed_at=2, part=0, parts=1,
            segments=(events.Segment(token_ids=pack_ids([1])),), steps=(taken,),
        ),
    )  # fmt: skip
    assert "segments" not in row
    assert "response_json" not in row["steps"][0]
    assert (row["steps"][0]["marks"], row["steps"][0]["offset"]) == (["retried"], 9)
    assert row["closed_at"] == EPOCH + timedelta(milliseconds=2)


CANDIDATE = events.Candidate(
    run_id="r", channel="train", trajectory_key="k", trajectory_id="k", group_id="g", revision=1,
    outcome="completed", opened_at=1, closed_at=2, rewards=(), steps=(), prompt_tokens=1,
    trainable_tokens=1, trainable=True,
)  # fmt: skip


def test_a_candidate_knows_where_its_payload_lies() -> None:
    (row,) = round_trip(
        "candidates", CANDIDATE, topic_id="P", partition="2", first_offset="10", last_offset="11"
    )
    assert [
        row[f"payload_{n}"] for n in ("topic_id", "partition", "first_offset", "last_offset")
    ] == ["P", 2, 10, 11]
    (row,) = round_trip("candidates", CANDIDATE, partition="two")
    assert [row[f"payload_{n}"] for n in ("topic_id", "partition")] == [None, None]


def test_policies_and_ends_of_runs_are_kept() -> None:
    policy = events.AdmissionPolicy(
        run_id="r", policy_version=3, group_size=2, min_members=2, required_rewards=(),
        reward_weights={}, reward_deadline_ms=1, group_deadline_ms=1, drop_zero_variance=True,
        min_trainable_tokens=1, train_outcomes=("completed",), batch_groups=1, sync_every=1,
        val_groups=1, val_deadline_ms=1, algorithm="grpo", created_at=5,
    )  # fmt: skip
    applied = events.PolicyApplied(
        run_id="r", channel="val", policy=policy, input_topic_id="C", from_offset=8
    )
    ended = events.RunEnded(run_id="r", reason="done", created_at=6)
    rows = round_trip("run_events", policy, applied, ended)
    assert [(r["kind"], r["channel"], r["admission_policy_version"]) for r in rows] == [
        ("policy", None, 3), ("policy_applied", "val", 3), ("ended", None, None),
    ]  # fmt: skip
    assert '"group_size":2' in rows[1]["policy_json"]


def test_every_column_has_a_doc_and_every_record_a_table() -> None:
    for table in catalog().values():
        assert all(c.field.nullable and c.field.metadata[b"comment"] for c in table.columns), (
            table.name
        )
        assert {*table.key, *table.stats} <= set(table.schema.names), table.name
    kept = {name for table in catalog().values() for name in table.records}
    left_out = {"Tick", "AssemblyMarker", "AssemblyDelta", "AssemblySnapshot", "WorkerStatus"}
    assert kept | left_out | {"RolloutBudget", "RunIndex"} == {
        p.stem for p in AVRO_DIR.glob("*.avsc")
    }


def test_each_topic_feeds_the_tables_of_its_records() -> None:
    topics = Topics("claw")
    for spec in (*topics.specs(4, -1), topics.ready_batches_spec("run-1", "train")):
        tables = [catalog()[name] for name in tables_of(topics, spec.name)]
        if tables:
            taken = {name for t in tables for name in t.records}
            assert taken >= {r.__name__ for r in spec.records} - {"Tick"}, spec.name
    assert tables_of(topics, "claw.assembly") == tables_of(topics, "claw.ready-batches.x") == ()


IDS = Table(
    "t",
    {"type": "record", "name": "R", "fields": [{"name": "id", "type": "int", "doc": ""}]},
    key=("id",),
)
KEYLESS = replace(IDS, key=())


def rows_with(*ids_and_places: tuple[int, int, int]) -> list[Row]:
    """Return rows of (id, partition, offset)."""
    return [(i, "T", p, o, 0) for i, p, o in ids_and_places]


def seen_before(*ids: int, size: int = 100) -> DedupeWindow:
    window = DedupeWindow(size)
    window.add(digest((i,)) for i in ids)
    return window


row_lists = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 30), st.integers(0, 8)), max_size=40
)


@given(row_lists, st.integers(0, 30), st.lists(st.integers(0, 8)))
def test_fresh_drops_what_is_below_the_mark_or_was_seen(
    drawn: list[tuple[int, int, int]], mark: int, seen: list[int]
) -> None:
    rows = rows_with(*((i, p, o) for p, o, i in drawn))
    out, digests = drop_duplicates(IDS, rows, {("T", 0): mark}, seen_before(*seen))
    expected: list[Row] = []
    had = set(seen)
    above = [row for row in rows if row[2] != 0 or row[3] >= mark]
    for row in above:
        if row[0] not in had:
            had.add(row[0])
            expected.append(row)
    assert (out, digests) == (expected, [digest((row[0],)) for row in expected])
    assert drop_duplicates(KEYLESS, rows, {("T", 0): mark}, DedupeWindow(9)) == (above, [])


@given(st.lists(st.integers(0, 20)), st.integers(1, 10))
def test_window_remembers_the_newest(numbers: list[int], size: int) -> None:
    window = seen_before(*numbers, size=size)
    newest = list(dict.fromkeys(reversed(numbers)))[:size]
    assert len(window) == len(newest)
    assert all(digest((n,)) in window for n in newest)


def cpu_of_adding(window: DedupeWindow, keys: range) -> float:
    digests = [digest((n,)) for n in keys]
    began = time.thread_time()
    window.add(digests)
    return time.thread_time() - began


def test_an_id_costs_the_same_before_and_after_the_window_is_full() -> None:
    size = 50_000
    window = DedupeWindow(size)
    filling = cpu_of_adding(window, range(size))
    evicting = cpu_of_adding(window, range(size, 2 * size))
    assert len(window) == size
    assert evicting < 5 * filling  # a search for the oldest id takes 20 to 100 times as long


fates = st.lists(
    st.tuples(
        st.integers(0, 10), st.sampled_from(["flush", "crash", "crash after"]), st.integers(0, 10)
    ),
    max_size=10,
)


@given(st.lists(st.integers(0, 30), max_size=30), fates)
def test_a_crash_at_any_flush_loses_and_doubles_nothing(
    sent: list[int], fates: list[tuple[int, str, int]]
) -> None:
    """Test the commit protocol on values.

    Flushes have any length; a crash comes before or after a commit; a restart reads from the
    committed offset or below it.
    """
    log = rows_with(*((i, 0, o) for o, i in enumerate(sent)))
    table: list[Row] = []
    mark, position, window = 0, 0, DedupeWindow(1000)
    for length, fate, back in [*fates, (len(log), "flush", 0)]:
        batch, position = log[position : position + length], min(position + length, len(log))
        if fate != "crash":
            new, digests = drop_duplicates(IDS, batch, {("T", 0): mark}, window)
            table, mark = table + new, max(mark, position)
            window.add(digests)
        if fate != "flush":
            position, window = max(0, mark - back), seen_before(*(r[0] for r in table), size=1000)
    assert [r[0] for r in table] == list(dict.fromkeys(sent))


def test_first_offset() -> None:
    assert first_offset("t", 0, [None, None], 5, 9) == 5
    assert first_offset("t", 0, [8, None], 5, 9) == 5
    assert first_offset("t", 0, [8, 7], 5, 9) == 7
    assert first_offset("t", 0, [9], 9, 9) == 9
    with pytest.raises(
        SourceTruncated,
        match=r"t-0 ends at 9, position 10 \(lake\); run clawstream status --positions",
    ):
        first_offset("t", 0, [6, 10], 5, 9)
    with pytest.raises(SourceTruncated, match="t-0 starts at 5, position 4"):
        first_offset("t", 0, [None, 4], 5, 9)


def test_packed_bytes_are_little_endian() -> None:
    (row,) = round_trip(
        "steps",
        step(prompt_token_ids=struct.pack("<2i", 1, -2), response_logprobs=struct.pack("<f", -0.5)),
    )
    assert (row["prompt_token_ids"], row["response_logprobs"]) == ([1, -2], [-0.5])
