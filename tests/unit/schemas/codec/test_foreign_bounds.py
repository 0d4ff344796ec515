"""Test that a small record that announces many items becomes a dead letter quickly.

It costs no memory, for any writer schema.
"""

from __future__ import annotations

import copy
import io
import json
import tracemalloc
from functools import partial
from typing import Any, cast

import fastavro
import pytest
from fastavro.utils import generate_one
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from clawstream.runtime.kafka import Record
from clawstream.runtime.topics.records import Decoder, decode_all
from clawstream.schemas.codec import foreign
from clawstream.schemas.codec.foreign import fingerprint_of
from clawstream.schemas.codec.single_object import (
    MAGIC,
    TOP_LEVEL,
    Codec,
    record_from,
    shipped,
)
from clawstream.schemas.errors import Undecodable
from clawstream.schemas.records import (
    BatchGroup,
    BatchMember,
    Place,
    ReadyBatch,
    Reward,
    RewardValue,
    Tag,
    Tick,
    Trajectory,
    TrajectoryStep,
)
from clawstream.stream_jobs.lake.tables.catalog import catalog
from clawstream.stream_jobs.lake.tables.row_decoder import RowDecoder, WriterSchemas

EMPTY = {"type": "record", "name": "Empty", "fields": [{"name": "nothing", "type": "null"}]}
ITSELF = {
    "type": "record",
    "name": "Own",
    "fields": [{"name": "inner", "type": {"type": "array", "items": "Own"}}],
}
ITEMS: dict[str, Any] = {
    "null": "null",
    "record": EMPTY,
    "fixed": {"type": "fixed", "name": "None", "size": 0},
    "boolean": "boolean",
    "float": "float",
    "arrays": {"type": "array", "items": "null"},
    "maps": {"type": "map", "values": "null"},
    "itself": ITSELF,
    "string": "string",
    "wide": ["null", "string", EMPTY],
}
NO_BYTES = {"null", "record", "fixed", "arrays"}
"""Items that take no bytes, directly or inside: their schema is refused."""
READABLE = sorted(ITEMS.keys() - NO_BYTES)


def number(n: int) -> bytes:
    """Encode a long: zig-zag, seven bits per byte."""
    n, out = n << 1 if n >= 0 else ~(n << 1), b""
    while n > 127:
        out, n = out + bytes([n & 127 | 128]), n >> 7
    return out + bytes([n])


def tick_with(kind: str, items: Any, place: int) -> dict[str, Any]:
    """Return the schema of a tick with an extra array or map, before or after its fields."""
    schema = copy.deepcopy(dict(shipped("Tick")))
    many = {"type": kind, "items" if kind == "array" else "values": items}
    schema["fields"].insert(place * len(schema["fields"]), {"name": "many", "type": many})
    return schema


CODEC = Codec()
TICK = CODEC.encode(Tick(partition=1))[10:]


def announced(schema: dict[str, Any]) -> tuple[Codec, bytes]:
    return CODEC, MAGIC + bytes.fromhex(CODEC.announce(json.dumps(schema)))


@pytest.mark.parametrize(
    ("items", "kind", "place"),
    [
        *((items, "array", 1) for items in READABLE),
        ("null", "map", 1),
        ("itself", "map", 0),
        ("boolean", "array", 0),
    ],
)
def test_thirty_bytes_that_announce_a_million_million_items_are_a_dead_letter(
    items: str, kind: str, place: int
) -> None:
    schema = tick_with(kind, ITEMS[items], place)
    codec, header = announced(schema)
    for count in (number(1 << 40), number(-(1 << 40)) + number(4)):
        for body in (count + TICK, TICK + count):
            record, dead_lettered = (
                Record("t", 0, 0, 0, None, header + body, {}),
                list[tuple[Any, ...]](),
            )
            assert record.value is not None and len(record.value) <= 30
            tracemalloc.start()
            assert decode_all(cast(Decoder, codec), [record], partial(_keep, dead_lettered)) == []
            assert tracemalloc.get_traced_memory()[1] < 20 << 20
            tracemalloc.stop()
            assert [(r, reason) for r, reason, _ in dead_lettered] == [(record, "undecodable")]


def _keep(dead_lettered: list[tuple[Any, ...]], *one: Any) -> None:
    dead_lettered.append(one)


def never(record: Record, why: str) -> None:
    raise AssertionError(why)


@pytest.mark.parametrize("items", READABLE)
def test_the_lake_dead_letters_it_as_well(items: str) -> None:
    """The lake decodes the first record of a schema and reads the following ones as columns."""
    schema = copy.deepcopy(dict(shipped("Reward")))
    schema["fields"].append({"name": "many", "type": {"type": "array", "items": ITEMS[items]}})
    schemas = WriterSchemas()
    header = MAGIC + bytes.fromhex(schemas.announce(json.dumps(schema)))
    rows_of = RowDecoder(schemas, cast(Decoder, schemas), catalog(), lambda wider: False, never)
    reward = Reward(
        event_id="e",
        run_id="r",
        trajectory_key="k",
        source="rule",
        name="f",
        function_version="1",
        reward_revision=0,
        created_at=1,
    )
    body = header + CODEC.encode(reward)[10:]
    rows_of(Record("rewards", 0, 0, 0, None, body + b"\0", {}), "T", ["rewards"])
    for more in (number(1 << 40), number(1 << 40) + b"\0" * 9, number(-(1 << 40)) + number(0)):
        with pytest.raises(Undecodable):
            rows_of(Record("rewards", 0, 1, 0, None, body + more, {}), "T", ["rewards"])


@pytest.mark.parametrize("items", sorted(NO_BYTES))
def test_a_schema_with_items_that_take_no_bytes_is_refused(items: str) -> None:
    """Nothing bounds their number."""
    with pytest.raises(Undecodable, match="more than 8 values for each of their bytes"):
        announced(tick_with("array", ITEMS[items], 1))


def test_a_type_that_contains_itself_has_a_bound_of_values_for_each_byte() -> None:
    nulls = [{"name": f"n{i}", "type": "null"} for i in range(10)]
    again = {"name": "next", "type": ["null", "Own"]}
    announced(tick_with("array", {"type": "record", "name": "Own", "fields": [again]}, 1))
    with pytest.raises(Undecodable, match="more than 8 values for each of their bytes"):
        many = {"type": "record", "name": "Own", "fields": [*nulls, again]}
        announced(tick_with("array", {"type": "map", "values": many}, 1))


def test_records_of_an_older_release_have_a_bound_of_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fields that such a record lacks have a default today: one byte would become a hundred."""
    schema = copy.deepcopy(dict(shipped("Trajectory")))
    steps = next(f for f in schema["fields"] if f["name"] == "steps")
    steps["type"]["items"]["fields"].append({"name": "later", "type": "boolean", "default": False})
    codec, header = announced(schema)
    whole = Trajectory(
        run_id="r",
        trajectory_key="k",
        trajectory_id="k",
        group_id="g",
        channel="train",
        outcome="completed",
        opened_at=1,
        closed_at=2,
        part=0,
        parts=1,
        segments=(),
        steps=(),
    )
    body = CODEC.encode(whole)[10:]
    assert codec.decode(header + body) == whole
    monkeypatch.setattr(foreign, "READS_MAX", 10_000)
    for many in (number(10_000), number(-10_000) + number(1 << 30)):
        with pytest.raises(Undecodable, match="more than 10000 reads"):
            codec.decode(header + body[:-2] + many + b"\0" * (1 << 22))


@pytest.mark.slow
def test_the_longest_trajectory_of_another_release_is_within_the_bounds() -> None:
    step = TrajectoryStep(
        step_id="k" * 40, index=5000, parent=4999, segment=5000, status="ok", finish_reason="stop",
        drift="clean", prompt_tokens=2**20, response_tokens=2**20, response_json=b"{}" * 200,
        oldest_version="r/100.0", newest_version="r/100.0", trainable=True, offset=2**40,
        tags=(Tag(name="a", evidence="b" * 80),), marks=("late",), logprobs_temperature=1.0,
    )  # fmt: skip
    whole = Trajectory(
        run_id="r", trajectory_key="k", trajectory_id="k", group_id="g", channel="train",
        outcome="completed", opened_at=1, closed_at=2, part=0, parts=1, segments=(),
        steps=(step,) * 5000,
    )  # fmt: skip
    schema = copy.deepcopy(dict(shipped("Trajectory")))
    schema["fields"].append({"name": "later", "type": ["null", "string"], "default": None})
    codec, header = announced(schema)
    assert codec.decode(header + CODEC.encode(whole)[10:] + b"\0") == whole


@pytest.mark.slow
@pytest.mark.parametrize(("members", "rewards"), [(55_000, 1), (514, 300)])
def test_the_largest_batch_of_another_release_is_within_the_bounds(
    members: int, rewards: int
) -> None:
    """A batch has at most 4 MiB, with a single group 9 MiB."""
    reward = RewardValue(
        source="rule", name="right", function_version="1", value=1.0, reward_revision=1,
        step_id="task-00001~01HZX3K4M5N6P7Q8R9S0T1V2W3.0" if rewards > 1 else None,
    )  # fmt: skip
    member = BatchMember(
        trajectory_id="task-00001", trajectory_key="task-00001", revision=1,
        place=Place(topic_id="AbCdEfGhIjKlMnOpQrStUv", partition=3, first_offset=1, last_offset=2),
        rewards=(reward,) * rewards, untrainable_steps=(), trainable_tokens=256,
    )  # fmt: skip
    batch = ReadyBatch(
        run_id="r", channel="train", batch_seq=0, policy_version=1, sync_every=1, algorithm="grpo",
        groups=(BatchGroup(group_id="g", round=0, n=members, members=(member,) * members),),
        reward_weights={"rule/right": 1.0}, input_topic_id="t", input_partition=0, input_from=0,
        input_to=1, content_hash="0" * 64, trainable_tokens=1, created_at_event_time=1,
    )  # fmt: skip
    encoded = CODEC.encode(batch)
    assert len(encoded) > (4 << 20 if rewards == 1 else 9 << 20) * 0.95
    schema = copy.deepcopy(dict(shipped("ReadyBatch")))
    schema["fields"].append({"name": "later", "type": ["null", "string"], "default": None})
    codec, header = announced(schema)
    assert codec.decode(header + encoded[10:] + b"\0") == batch


def changed(schema: dict[str, Any], data: st.DataObject) -> dict[str, Any]:
    """Return a schema that another release could have.

    It lacks some fields and has others, in another order; some types are narrower or nullable.
    """
    schema = copy.deepcopy(schema)
    fields = [f for f in schema["fields"] if data.draw(st.integers(0, 5))]
    for field in fields:
        narrow = data.draw(st.integers(0, 5))
        if narrow == 0 and field["type"] == "long":
            field["type"] = "int"
        elif narrow == 1 and not isinstance(field["type"], list):
            field["type"] = ["null", field["type"]]
        elif narrow == 2 and isinstance(field["type"], list):
            field["type"] = field["type"][1]
            field.pop("default", None)
        elif narrow == 3 and field["type"] == "string":
            field["type"] = "bytes"
    for n, more in enumerate(
        data.draw(
            st.lists(
                st.sampled_from([i for i in READABLE if i != "itself"]), max_size=2, unique=True
            )
        )
    ):
        fields.insert(
            data.draw(st.integers(0, len(fields))),
            {"name": f"more{n}", "type": {"type": "array", "items": ITEMS[more]}},
        )
    return {**schema, "fields": fields}


@settings(max_examples=examples(40))
@given(st.data())
def test_what_others_wrote_is_read_as_fastavro_reads_it(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(TOP_LEVEL)).__name__
    schema = changed(dict(shipped(name)), data)
    try:
        codec, header = announced(schema)
    except Undecodable:
        return  # two fields define a type of the same name
    writer, current = foreign.parse(schema), foreign.parse(shipped(name))
    cls = next(c for c in TOP_LEVEL if c.__name__ == name)
    out = io.BytesIO()
    fastavro.schemaless_writer(out, writer, generate_one(writer))
    out.seek(0)
    try:
        plain = fastavro.schemaless_reader(out, writer, current)
        expected = record_from(cls.__name__, cast("dict[str, Any]", plain))
    # The schemas do not match, or a field without a default is missing.
    except (fastavro.read.SchemaResolutionError, TypeError, ValueError):
        with pytest.raises(Undecodable):
            codec.decode(header + out.getvalue())
        return
    assert fingerprint_of(schema) == header[2:].hex()
    assert repr(codec.decode(header + out.getvalue())) == repr(expected)
