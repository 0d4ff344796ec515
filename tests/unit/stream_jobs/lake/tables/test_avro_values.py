"""The lake's Avro reader returns the same values as other readers, whichever release wrote them.

Newer schemas add columns; malformed bytes are an error.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import types
import typing
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from clawstream.runtime.kafka import Record
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.codec.avro_schema import expanded
from clawstream.schemas.codec.compiled_reader import MALFORMED
from clawstream.schemas.codec.single_object import (
    MAGIC,
    TOP_LEVEL,
    Codec,
    as_dict,
    shipped,
)
from clawstream.schemas.errors import Undecodable
from clawstream.schemas.records import Reward, Trajectory, TrajectoryStep
from clawstream.stream_jobs.errors import TooManyFields
from clawstream.stream_jobs.lake.tables.arrow_columns import (
    avro_columns,
    evolved,
    merged,
    named,
    pruned,
    tupled,
)
from clawstream.stream_jobs.lake.tables.avro_values import reader_of
from clawstream.stream_jobs.lake.tables.catalog import catalog
from clawstream.stream_jobs.lake.tables.row_decoder import RowDecoder, WriterSchemas
from clawstream.stream_jobs.lake.tables.table import Table

CODEC = Codec()
PLAIN = {
    str: st.text(max_size=9),
    bytes: st.binary(max_size=200),
    int: st.integers(0, 2**31 - 1),
    bool: st.booleans(),
    float: st.floats(width=32, allow_nan=False),
}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for any value of a record's field."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return st.sampled_from(inside)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(st.none() if t is type(None) else values_of(t) for t in inside))
    if origin is tuple:
        return st.lists(values_of(inside[0]), max_size=3).map(tuple)
    if isinstance(origin, type) and issubclass(origin, typing.Mapping):
        return st.dictionaries(PLAIN[str], values_of(inside[1]), max_size=3)
    if dataclasses.is_dataclass(hint):
        return records_of(typing.cast(type, hint))
    return PLAIN[hint]


def records_of(cls: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    return st.fixed_dictionaries(
        {f.name: values_of(hints[f.name]) for f in dataclasses.fields(cls)}
    ).map(lambda values: cls(**values))


@pytest.mark.parametrize("cls", TOP_LEVEL, ids=lambda c: c.__name__)
def test_what_is_read_is_what_was_written(cls: type) -> None:
    schema = expanded(shipped(cls.__name__))
    read = reader_of(schema, schema)

    @settings(max_examples=examples(25))
    @given(records_of(cls), st.data())
    def holds(record: Any, data: st.DataObject) -> None:
        value = CODEC.encode(record)
        assert read(value, 10) == tupled(schema, as_dict(record))
        assert named(schema, read(value, 10)) == named(
            schema, tupled(schema, as_dict(CODEC.decode(value)))
        )
        cut = data.draw(st.integers(10, len(value)))
        for broken in (value[:cut], value + b"\x00") if cut < len(value) else (value + b"\x00",):
            with pytest.raises(MALFORMED):
                read(broken, 10)

    holds()


@given(st.binary(max_size=60))
def test_rubbish_is_malformed_or_read_whole(rubbish: bytes) -> None:
    schema = expanded(shipped("Candidate"))
    read = reader_of(schema, schema)
    for data in (rubbish, rubbish + b"\xff" * 12):
        with contextlib.suppress(*MALFORMED):
            read(data, 0)


def test_fields_that_are_left_out_are_stepped_over() -> None:
    table = catalog()["trajectories"]
    read = table.reads(expanded(shipped("Trajectory")))

    @settings(max_examples=examples(50))
    @given(records_of(next(c for c in TOP_LEVEL if c.__name__ == "Trajectory")))
    def holds(record: Any) -> None:
        assert table.record is not None
        assert read(CODEC.encode(record), 10) == tupled(table.record, as_dict(record))

    holds()


def newer_trajectory() -> dict[str, Any]:
    """Return the trajectory schema of a future release.

    It adds fields of every kind at the end, and fields inside a list of records; it adds none in
    the middle.
    """
    schema = copy.deepcopy(shipped("Trajectory"))
    steps = next(f for f in schema["fields"] if f["name"] == "steps")
    steps["type"]["items"]["fields"].append(
        {
            "name": "latency_s",
            "type": ["null", "double"],
            "default": None,
            "doc": "How long the engine took.",
        }
    )
    schema["fields"] += [
        {"name": "team", "type": ["null", "string"], "default": None, "doc": "Who asked."},
        {"name": "seen_at", "type": {"type": "long", "logicalType": "timestamp-micros"},
         "default": 0, "doc": "When."},
        {"name": "extra_ids", "type": ["null", "bytes"], "packing": "i32le", "default": None,
         "doc": "Ids."},
        {"name": "facts", "type": {"type": "array", "items": {"type": "record", "name": "Fact",
         "fields": [{"name": "key", "type": "string", "doc": "Which."},
                    {"name": "weight", "type": "float", "doc": "How sure."}]}},
         "default": [], "doc": "What is known."},
        {"name": "odd", "type": ["null", "string", "int"], "default": None,
         "doc": "No column has two types."},
    ]  # fmt: skip
    return schema


def test_a_newer_schema_brings_columns_and_the_rows_that_wait_get_them() -> None:
    former, theirs = catalog()["trajectories"], expanded(newer_trajectory())
    wider = former.evolved(theirs)
    names = [n for n in wider.schema.names if n not in former.schema.names]
    assert names == ["team", "seen_at", "extra_ids", "facts"]
    assert wider.evolved(theirs) == wider
    assert wider.schema.field("seen_at").type == pa.timestamp("us", "UTC")
    assert wider.schema.field("extra_ids").type == pa.list_(pa.int32())
    assert wider.schema.field("team").metadata[b"comment"] == b"Who asked."
    inner = wider.schema.field("steps").type.value_type
    assert inner.field("latency_s").metadata[b"comment"] == b"How long the engine took."
    assert "segments" not in wider.schema.names
    assert inner.get_field_index("response_json") == -1
    step = TrajectoryStep(
        step_id="s", index=0, status="ok", drift="root", prompt_tokens=3, response_tokens=2,
        response_json=b"{}", trainable=True, offset=9
    )  # fmt: skip
    assert former.record is not None
    old = (*tupled(former.record, {"run_id": "r", "steps": [as_dict(step)]}), "T", 0, 1, 2)
    (row,) = wider.arrow([wider.upgraded(old, former)]).to_pylist()
    assert (row["run_id"], row["team"], row["steps"][0]["latency_s"], row["kafka_offset"]) == (
        "r",
        None,
        None,
        1,
    )
    assert {n: row[n] for n in former.schema.names if n != "steps"} == {
        n: v for n, v in former.arrow([old]).to_pylist()[0].items() if n != "steps"
    }


def test_what_a_newer_writer_wrote_is_read_with_its_fields() -> None:
    schema = newer_trajectory()
    wider = catalog()["trajectories"].evolved(expanded(schema))
    record = {"run_id": "r", "trajectory_key": "k", "trajectory_id": "k", "group_id": "g",
              "channel": "train", "outcome": "completed", "opened_at": 1, "closed_at": 2,
              "part": 0, "parts": 1, "segments": [], "steps": [],
              "team": "red", "seen_at": 5, "extra_ids": b"\1\0\0\0",
              "facts": [{"key": "a", "weight": 0.5}],
              "odd": 7}  # fmt: skip
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(copy.deepcopy(schema), {}), record)
    fields = wider.reads(expanded(schema))(out.getvalue(), 0)
    (row,) = wider.arrow([wider.row(fields, {}, ("T", 0, 0, 0))]).to_pylist()
    assert (row["team"], row["seen_at"].microsecond, row["extra_ids"]) == ("red", 5, [1])
    assert row["facts"] == [{"key": "a", "weight": 0.5}]
    # The wider table also reads values of our own schema.
    ours = wider.reads(expanded(shipped("Trajectory")))
    plain: dict[str, Any] = {
        k: v for k, v in record.items() if k not in ("team", "seen_at", "extra_ids", "facts", "odd")
    }
    value = CODEC.encode(Trajectory(**plain | {"segments": (), "steps": ()}))
    assert named(wider.record, ours(value, 10))["team"] is None


def test_schemas_that_differ_in_kind_keep_ours() -> None:
    ours = {
        "type": "record",
        "name": "Tick",
        "fields": [{"name": "a", "type": "string", "doc": ""}],
    }
    theirs = {
        "type": "record",
        "name": "Tick",
        "fields": [{"name": "a", "type": {"type": "array", "items": "int"}}],
    }
    assert evolved(ours, theirs) == ours
    with pytest.raises(ValueError, match="SchemaResolutionError"):
        reader_of(theirs, ours)(b"\0", 0)
    itself = {"type": "record", "name": "N", "fields": [{"name": "next", "type": ["null", "N"]}]}
    with pytest.raises(ValueError, match="contains itself"):
        expanded(itself)
    with pytest.raises(ValueError, match="No default value"):
        reader_of({**ours, "fields": []}, ours)(b"", 0)


class _Alone:
    """A decoder that does not read unknown schemas from Kafka."""

    def __init__(self, codec: Codec) -> None:
        self.decode = codec.decode


def never(record: Record, why: str) -> None:
    raise AssertionError(why)


def deep(kind: str, depth: int) -> dict[str, Any]:
    """Return the schema of a reward with a field of `depth` nested types."""
    inner: Any = "string"
    for n in range(depth):
        inner = {
            "array": {"type": "array", "items": inner},
            "map": {"type": "map", "values": inner},
            "record": {
                "type": "record",
                "name": f"D{n}",
                "fields": [{"name": "x", "type": inner, "doc": "In."}],
            },
        }[kind]
    schema = copy.deepcopy(dict(shipped("Reward")))
    deep = {"name": "deep", "type": ["null", inner], "default": None, "doc": "Deep."}
    return {**schema, "fields": [*schema["fields"], deep]}


@pytest.mark.parametrize(
    ("kind", "depth", "column"),
    [("array", 5, True), ("map", 9, True), ("array", 15, True), ("array", 17, False),
     ("map", 60, False),
     ("record", 15, True), ("record", 60, False), ("array", 100, False), ("array", 400, False),
     ("record", 300, False)],
)  # fmt: skip
def test_a_type_nested_too_deeply_for_a_column_leaves_the_rest_of_the_record(
    kind: str, depth: int, column: bool
) -> None:
    schemas, schema = WriterSchemas(), deep(kind, depth)
    asked: list[Table] = []

    def add_columns(wider: Table) -> bool:
        asked.append(wider)
        return True

    try:
        fingerprint = schemas.announce(json.dumps(schema))
    except Undecodable:
        # fastavro rejects deeper types: neither the schema nor its records exist then.
        assert depth >= 300
        return
    rows_of = RowDecoder(
        schemas, typing.cast(Decoder, _Alone(schemas)), catalog(), add_columns, never
    )
    reward = Reward(
        event_id="e", run_id="r", trajectory_key="k", source="rule", name="f", function_version="1",
        reward_revision=0, created_at=1
    )  # fmt: skip
    body = CODEC.encode(reward)[10:]
    value = MAGIC + bytes.fromhex(fingerprint) + body + b"\0"
    record = Record("rewards", 0, 7, 1_000, None, value, {})
    name, [(table, [row])] = rows_of(record, "T", ["rewards", "curation"])
    assert (name, table, row[catalog()["rewards"].index["event_id"]], row[-2]) == (
        "Reward",
        "rewards",
        "e",
        7,
    )
    assert bool(asked) is column


def test_a_record_with_too_many_new_fields_is_refused_whole_and_its_table_is_asked_once() -> None:
    schemas, asked = WriterSchemas(), list[Table]()
    schema = copy.deepcopy(dict(shipped("Reward")))
    schema["fields"] = [
        *schema["fields"],
        {"name": "team", "type": "string", "default": "", "doc": "Who."},
    ]
    fingerprint = schemas.announce(json.dumps(schema))

    def add_columns(wider: Table) -> bool:
        asked.append(wider)
        raise TooManyFields(wider.name, 101, 100)

    rows_of = RowDecoder(
        schemas, typing.cast(Decoder, _Alone(schemas)), catalog(), add_columns, never
    )
    reward = Reward(
        event_id="e", run_id="r", trajectory_key="k", source="rule", name="f", function_version="1",
        reward_revision=0, created_at=1
    )  # fmt: skip
    value = MAGIC + bytes.fromhex(fingerprint) + CODEC.encode(reward)[10:] + b"\6red"
    for offset in (7, 8):
        with pytest.raises(TooManyFields, match="at most 100"):
            rows_of(Record("rewards", 0, offset, 1_000, None, value, {}), "T", ["rewards"])
    assert len(asked) == 1
    own = Record("rewards", 0, 9, 1_000, None, CODEC.encode(reward), {})
    assert rows_of(own, "T", ["rewards"])[0] == "Reward"


def test_a_column_of_another_type_leaves_the_rest_of_the_record() -> None:
    """Two releases add a field of one name: the first one gives the column."""
    schemas, tables, plain = WriterSchemas(), dict(catalog()), shipped("Reward")

    def add_columns(wider: Table) -> bool:
        tables[wider.name] = wider
        return True

    rows_of = RowDecoder(schemas, typing.cast(Decoder, _Alone(schemas)), tables, add_columns, never)
    reward = Reward(
        event_id="e", run_id="r", trajectory_key="k", source="rule", name="f", function_version="1",
        reward_revision=0, created_at=1
    )  # fmt: skip
    found = []
    for kind, more in (("string", b"\6red"), ({"type": "array", "items": "int"}, b"\2\2\0")):
        field = {"name": "team", "type": kind, "doc": "Who."}
        fingerprint = schemas.announce(json.dumps({**plain, "fields": [*plain["fields"], field]}))
        value = MAGIC + bytes.fromhex(fingerprint) + CODEC.encode(reward)[10:] + more
        _, [(_, rows)] = rows_of(Record("rewards", 0, 7, 1_000, None, value, {}), "T", ["rewards"])
        index = tables["rewards"].index
        found += [(row[index["event_id"]], row[index["team"]]) for row in rows]
    assert found == [("e", "red"), ("e", None)]


def test_a_schema_nested_beyond_all_reading_is_no_schema() -> None:
    inner = '{"type": "array", "items": ' * 20_000 + '"string"' + "}" * 20_000
    with pytest.raises(Undecodable, match="not an Avro record schema"):
        WriterSchemas().announce(
            '{"type": "record", "name": "Reward", "fields": [{"name": "x", "type": ' + inner + "}]}"
        )


def test_types_merge_down_to_fields_of_structs_in_lists() -> None:
    def of(*names: str) -> pa.Schema:
        return pa.schema(
            [
                ("x", pa.list_(pa.struct([(n, pa.string()) for n in names]))),
                *((n, pa.int32()) for n in names),
            ]
        )

    assert merged(of("a", "b"), of("b", "c")) == of("a", "b", "c")


def test_columns_have_the_docs_of_their_fields() -> None:
    assert json.dumps(pruned(shipped("Reward"), ())) == json.dumps(shipped("Reward"))
    assert all(
        c.field.metadata for t in catalog().values() if t.record for c in avro_columns(t.record)
    )
