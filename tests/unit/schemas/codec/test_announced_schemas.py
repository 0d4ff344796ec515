"""Test that a hostile schema runs no code and ends no process: anyone may announce one."""

from __future__ import annotations

import builtins
import contextlib
import copy
import json
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import pytest

from clawstream.runtime.kafka import Record
from clawstream.runtime.topics.records import Decoder, decode_all
from clawstream.schemas.codec import source
from clawstream.schemas.codec.avro_schema import TYPES_MAX, expanded
from clawstream.schemas.codec.foreign import fingerprint_of
from clawstream.schemas.codec.single_object import MAGIC, Codec, shipped
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.records import Tick
from clawstream.stream_jobs.lake.tables.catalog import catalog
from clawstream.stream_jobs.lake.tables.row_decoder import RowDecoder, WriterSchemas

RUN = "__import__('builtins').__dict__.__setitem__('ran', 1)"
HOSTILE = (
    RUN,
    f"x = {RUN} #",
    f"x\n    {RUN}\n    ",
    f"'+{RUN}+'",
    f"{{{RUN}}}",
    f"x'); {RUN}; ('",
    f"a(record, append):\n {RUN}\ndef b",
)
TICK = Codec().encode(Tick(partition=1))[10:]
PERSON = {
    "type": "record",
    "name": "Person",
    "namespace": "a.b",
    "aliases": ["Old", "c.Older"],
    "doc": "Who.",
    "fields": [{"name": "age", "type": "int", "aliases": ["years"], "order": "ignore"}],
}
MORE: list[dict[str, Any]] = [
    {"name": "who", "type": PERSON},
    {"name": "again", "type": ["null", "a.b.Person"], "default": None, "doc": "Again."},
    {
        "name": "hue",
        "type": {"type": "enum", "name": "Hue", "symbols": ["RED", "BLUE"], "default": "RED"},
        "default": "RED",
    },
    {"name": "hash", "type": {"type": "fixed", "name": "Hash", "size": 4, "aliases": ["Sum"]}},
    {
        "name": "cents",
        "type": {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2},
    },
    {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}, "default": 0},
    {"name": "ids", "type": ["null", "bytes"], "packing": "i32le", "default": None},
    {"name": "all", "type": {"type": "array", "items": "Hash"}, "default": []},
    {"name": "by", "type": {"type": "map", "values": "a.b.Person"}, "default": {}},
]
BODY = b"\x0a\x02\x0c\x02\x00\x00\x00\x00\x02\x01\x04\x00\x02\x04\x00\x00\x00\x00\x02\x02k\x0a\x00"


def newer(name: str, more: list[dict[str, Any]]) -> dict[str, Any]:
    schema = copy.deepcopy(dict(shipped(name)))
    schema["fields"] += copy.deepcopy(more)
    return schema


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield every place in a schema, except the schema itself and its name, which identifies it."""
    inner = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    )
    for key, value in inner:
        if path or key not in ("name", "namespace"):
            yield (*path, key)
        yield from places(value, (*path, key))


def replaced(schema: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    out = copy.deepcopy(schema)
    node: Any = out
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return out


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Collect all compiled source and its file names.

    At the end, check that none contains any part of HOSTILE and that no hostile code ran.
    """
    seen: list[str] = []

    def compiled(code: str, name: str, mode: str) -> Any:
        seen.extend((code, name))
        return compile(code, name, mode)

    monkeypatch.setattr(source, "compile", compiled, raising=False)
    yield seen
    assert not [s for s in seen if "import" in s or "ran" in s.split()]
    assert not hasattr(builtins, "ran")


def met(schemas: WriterSchemas, schema: Any, bodies: tuple[bytes, ...]) -> None:
    """Do what every process and the lake do with an announced schema and its records.

    Fails for any unexpected error.
    """
    try:
        header = MAGIC + bytes.fromhex(schemas.announce(json.dumps(schema)))
    except Undecodable:
        return
    rows = RowDecoder(
        schemas,
        cast(Decoder, schemas),
        dict(catalog()),
        lambda table: bool(table.schema),
        lambda record, why: None,
    )
    for body in bodies:
        with contextlib.suppress(Undecodable, UnknownSchema):
            schemas.decode(header + body)
        with contextlib.suppress(Undecodable, UnknownSchema):
            rows(Record("t", 0, 0, 0, b"k", header + body, {}), "T", tuple(catalog()))


def test_the_schema_that_is_made_hostile_is_a_good_one(sources: list[str]) -> None:
    """No announced schema becomes source, not even a good one."""
    schemas, schema = WriterSchemas(), newer("Tick", MORE)
    header = MAGIC + bytes.fromhex(schemas.announce(json.dumps(schema)))
    assert schemas.decode(header + TICK + BODY) == Tick(partition=1)
    assert not sources


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Tick", "Candidate"])
def test_nothing_of_an_announced_schema_is_run(name: str, sources: list[str]) -> None:
    """Every process reads Tick; the lake also reads Candidate as columns."""
    schemas = WriterSchemas()
    schema = newer(name, MORE)
    if name == "Candidate":
        schema["fields"] = schema["fields"][:1] + schema["fields"][-len(MORE) :]
    for path in places(schema):
        for hostile in HOSTILE:
            met(schemas, replaced(schema, path, hostile), (TICK + BODY, bytes(60)))
    for path in places(schema):
        for odd in (None, -1, True, 10**400, 1.5, [], {}, ["null"], "\ud800", {"type": "long"}):
            met(schemas, replaced(schema, path, odd), (TICK + BODY, bytes(60)))


FIXED: list[Any] = [-1, 1 << 31, 10**30, True, 1.0, "1", None]


@pytest.mark.parametrize("size", FIXED)
def test_a_size_that_is_none_is_refused_wherever_it_is_used(size: Any) -> None:
    fixed = {"type": "fixed", "name": "F", "size": size}
    many = {"type": "array", "items": fixed}
    for kind in (fixed, many):
        with pytest.raises(Undecodable, match="number of bytes"):
            Codec().announce(json.dumps(newer("Tick", [{"name": "x", "type": kind}])))
        with pytest.raises(ValueError, match="number of bytes"):
            expanded(kind)


REFUSED: dict[str, Any] = {
    "a default beyond a double": newer(
        "Tick", [{"name": "x", "type": "double", "default": 10**400}]
    ),
    "said to be parsed": {**shipped("Tick"), "__fastavro_parsed": True, "__named_schemas": {}},
    "two fields of a name": newer("Tick", [{"name": "partition", "type": "int"}]),
    "a union in a union": newer("Tick", [{"name": "x", "type": [["null"]]}]),
    "no fields": {"type": "record", "name": "Tick"},
    "doc": {**shipped("Tick"), "doc": 5},
    "a half pair": {**shipped("Tick"), "doc": "\ud800"},
    "name": {**shipped("Tick"), "name": "a b"},
    "a list": [shipped("Tick")],
}


@pytest.mark.parametrize("why", REFUSED)
def test_records_of_a_refused_schema_are_dead_letters(why: str) -> None:
    codec, schema, dead_lettered = WriterSchemas(), REFUSED[why], list[str]()
    with pytest.raises(Undecodable):
        codec.announce(json.dumps(schema))
    value = MAGIC + b"refused!" + TICK
    record = Record("t", 0, 0, 0, None, value, {})
    assert (
        decode_all(
            cast(Decoder, codec), [record], lambda r, reason, detail: dead_lettered.append(reason)
        )
        == []
    )
    assert dead_lettered == ["unknown_schema"]


def test_an_id_of_more_than_32_bits_is_none() -> None:
    with pytest.raises(Undecodable, match="32 bits"):
        WriterSchemas().announce(json.dumps(shipped("Tick")), confluent_id=1 << 31)


def doubled(levels: int, leaf: Any) -> list[dict[str, Any]]:
    first = {"type": "record", "name": "A0", "fields": [{"name": "f", "type": leaf}]}
    return [{"name": "x0", "type": first}] + [
        {"name": f"x{n}", "type": {"type": "record", "name": f"A{n}", "fields": [
            {"name": "a", "type": f"A{n - 1}"}, {"name": "b", "type": f"A{n - 1}"}]}}
        for n in range(1, levels)
    ]  # fmt: skip


@pytest.mark.parametrize("leaf", ["int", "null", {"type": "enum", "name": "E", "symbols": ["A"]}])
def test_a_schema_that_doubles_is_refused(leaf: Any) -> None:
    for levels in (16, 40):
        with pytest.raises(Undecodable, match=f"more than {TYPES_MAX} types"):
            Codec().announce(json.dumps(newer("Tick", doubled(levels, leaf))))
    many = {"type": "enum", "name": "E", "symbols": [f"S{n}" for n in range(TYPES_MAX)]}
    with pytest.raises(Undecodable, match=f"more than {TYPES_MAX} types"):
        Codec().announce(json.dumps(newer("Tick", [{"name": "e", "type": many}])))


def test_a_large_schema_is_read() -> None:
    wide = {
        "type": "record",
        "name": "W",
        "fields": [{"name": f"f{n}", "type": "int"} for n in range(150)],
    }
    schema = newer(
        "Tick", [{"name": "w", "type": wide}, *({"name": f"w{n}", "type": "W"} for n in range(110))]
    )
    codec = Codec()
    header = MAGIC + bytes.fromhex(codec.announce(json.dumps(schema)))
    assert codec.decode(header + TICK + b"\0" * 150 * 111) == Tick(partition=1)
    with pytest.raises(Undecodable):
        codec.decode(header + TICK + b"\0" * 149)


def test_records_inside_records_are_bounded_by_the_bytes() -> None:
    """Refuse a type of which a byte is forty records deep; a few records deep are fine."""

    def nested(depth: int) -> dict[str, Any]:
        deep: Any = {
            "type": "record",
            "name": "D0",
            "fields": [{"name": "f", "type": "int"}, {"name": "n", "type": "null"}],
        }
        for n in range(1, depth):
            deep = {"type": "record", "name": f"D{n}", "fields": [{"name": "f", "type": deep}]}
        many = {"type": "array", "items": ["null", deep]}
        return newer("Tick", [{"name": "many", "type": many}])

    codec = Codec()
    header = MAGIC + bytes.fromhex(codec.announce(json.dumps(nested(10))))
    assert codec.decode(header + TICK + b"\x02\x02\x00\x00") == Tick(partition=1)
    with pytest.raises(Undecodable, match="more than 8 values for each of their bytes"):
        codec.announce(json.dumps(nested(40)))


def test_types_of_one_name_in_two_namespaces_are_told_apart() -> None:
    number = {"name": "f", "type": "long"}
    one = {"type": "record", "name": "X", "namespace": "a", "fields": [number]}
    two = {
        "type": "record",
        "name": "X",
        "namespace": "b",
        "fields": [number, {"name": "g", "type": "long"}],
    }
    schema = newer("Tick", [{"name": "z", "type": "long"}])
    more = [("p", one), ("q", two), ("r", "a.X")]
    schema["fields"] = [{"name": name, "type": kind} for name, kind in more] + schema["fields"]
    with pytest.raises(ValueError, match="name X"):
        expanded(schema)
    codec = Codec()
    header = MAGIC + bytes.fromhex(codec.announce(json.dumps(schema)))
    assert header[2:].hex() == fingerprint_of(schema)
    body = b"\x00" + b"\x00\x00" + b"\x0e" + TICK + b"\x06"
    assert codec.decode(header + body) == Tick(partition=1)
    record, dead_lettered = Record("t", 0, 0, 0, None, header + body, {}), list[tuple[Any, ...]]()
    ((_, tick),) = decode_all(cast(Decoder, codec), [record], partial(_keep, dead_lettered))
    assert (tick, dead_lettered) == (Tick(partition=1), [])


def _keep(dead_lettered: list[tuple[Any, ...]], *one: Any) -> None:
    dead_lettered.append(one)
