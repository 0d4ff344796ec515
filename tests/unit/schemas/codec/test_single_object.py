"""Values survive encoding, and values of newer schemas are read."""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
import struct
import time
import typing

import fastavro
import pytest
from fastavro.utils import generate_one
from hypothesis import given
from hypothesis import strategies as st
from ulid import ULID

from clawstream.schemas import ids, records, tokens
from clawstream.schemas.codec import foreign
from clawstream.schemas.codec.compiled_reader import Records, reader_of
from clawstream.schemas.codec.compiled_writer import writer_of
from clawstream.schemas.codec.foreign import fingerprint_of
from clawstream.schemas.codec.single_object import (
    AVRO_DIR,
    MAGIC,
    TOP_LEVEL,
    Codec,
    as_dict,
    record_from,
    shipped,
)
from clawstream.schemas.errors import InvalidId, Undecodable, UnknownSchema

CODEC = Codec()


def lists(value: typing.Any) -> typing.Any:
    """Replace tuples by lists: fastavro takes a tuple inside a union for (branch, value)."""
    if isinstance(value, dict):
        return {k: lists(v) for k, v in value.items()}
    return [lists(v) for v in value] if isinstance(value, tuple) else value


def random_record(cls: type) -> typing.Any:
    """Return a record of random content that the schema of the class allows."""
    plain = generate_one(foreign.parse(shipped(cls.__name__)))
    return record_from(cls.__name__, typing.cast("dict[str, typing.Any]", plain))


@pytest.mark.slow
@pytest.mark.parametrize("cls", TOP_LEVEL)
def test_record_survives_the_wire(cls: type) -> None:
    for _ in range(20):
        record = random_record(cls)
        value = CODEC.encode(record)
        assert value[:10] == MAGIC + bytes.fromhex(fingerprint_of(shipped(cls.__name__)))
        assert CODEC.type_name(value) == cls.__name__
        assert CODEC.encode(CODEC.decode(value)) == value


@pytest.mark.slow
@pytest.mark.parametrize("cls", TOP_LEVEL)
def test_the_compiled_writer_writes_what_fastavro_writes(cls: type) -> None:
    for _ in range(50):
        record = random_record(cls)
        reference = io.BytesIO()
        fastavro.schemaless_writer(
            reference,
            foreign.parse(shipped(cls.__name__)),
            lists(as_dict(record)),
        )
        assert CODEC.encode(record)[10:] == reference.getvalue()


def with_fastavro(cls: type, body: bytes) -> typing.Any:
    """Return what fastavro decodes. Raises for a wrong value."""
    stream = io.BytesIO(body)
    plain = fastavro.schemaless_reader(stream, foreign.parse(shipped(cls.__name__)), None)
    if stream.read(1):
        raise ValueError("bytes after the end")
    return record_from(cls.__name__, typing.cast("dict[str, typing.Any]", plain))


@pytest.mark.slow
@pytest.mark.parametrize("cls", TOP_LEVEL)
def test_the_compiled_reader_reads_what_fastavro_reads(cls: type) -> None:
    for _ in range(50):
        value = CODEC.encode(random_record(cls))
        read = CODEC.decode(value)
        assert type(read) is cls and read == with_fastavro(cls, value[10:])
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(read, dataclasses.fields(cls)[0].name, 1)
        assert pickle.loads(pickle.dumps(read)) == read and dataclasses.replace(read) == read


@given(st.data())
def test_what_the_compiled_reader_makes_of_broken_bytes_fastavro_makes_of_them(
    data: st.DataObject,
) -> None:
    cls = data.draw(st.sampled_from(TOP_LEVEL))
    value = bytearray(CODEC.encode(random_record(cls)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(10, len(value) - 1))
        value[at] = data.draw(
            st.one_of(st.sampled_from([0, 1, 2, 3, 127, 128, 255]), st.integers(0, 255))
        )
    try:
        read = CODEC.decode(bytes(value))
    except Undecodable:
        return  # fastavro also refuses it, or accepts a value that no Avro writer writes
    assert repr(read) == repr(with_fastavro(cls, bytes(value[10:])))  # NaN is not equal to itself


def test_what_no_avro_writer_writes_is_undecodable() -> None:
    header = CODEC.encode(records.Tick(partition=1))[:10]
    assert CODEC.decode(header + b"\x02\x00") == records.Tick(partition=1)
    for body in (
        b"\x02\x04\x00",
        b"\x02\x01\x00",
        b"\xff" * 10 + b"\x01\x00",
        b"\xff" * 9 + b"\x03\x00",
    ):
        with pytest.raises(Undecodable):
            CODEC.decode(header + body)


@pytest.mark.parametrize(
    "value", [-(2**63), -(2**31), -8193, -1, 0, 1, 63, 64, 8191, 8192, 2**31, 2**63 - 1]
)
def test_whole_numbers_of_any_size(value: int) -> None:
    tick = records.Tick(partition=0, event_time=value)
    assert CODEC.decode(CODEC.encode(tick)) == tick


@pytest.mark.parametrize(
    "wrong",
    [
        {"partition": "1"}, {"partition": 2**31}, {"partition": True}, {"partition": None},
        {"partition": 1.5},
        {"partition": 1, "event_time": 2**63},
    ],
)  # fmt: skip
def test_wrong_field_types_are_refused(wrong: dict[str, typing.Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        CODEC.encode(records.Tick(**wrong))


@pytest.mark.parametrize("schema", [["null", "string", "int"], "fixed", {"type": "fixed"}])
def test_types_that_no_schema_of_ours_has_are_neither_written_nor_read(schema: typing.Any) -> None:
    record = {"type": "record", "name": "x", "fields": [{"name": "a", "type": schema}]}
    with pytest.raises(ValueError):
        writer_of(record)
    with pytest.raises(ValueError):
        reader_of(
            record,
            record,
            Records(lambda name: dataclasses.make_dataclass(name, ["a"], slots=True)),
        )


@pytest.mark.parametrize("cls", TOP_LEVEL)
def test_truncated_or_extended_values_are_undecodable(cls: type) -> None:
    value = CODEC.encode(random_record(cls))
    for end in {
        *range(min(len(value), 40)),
        *(len(value) * i // 40 for i in range(40)),
        len(value) - 1,
    }:
        with pytest.raises(Undecodable):
            CODEC.decode(value[:end])
    with pytest.raises(Undecodable):
        CODEC.decode(value + b"\0")


@pytest.mark.slow
def test_more_records_in_an_array_than_anyone_writes_are_undecodable() -> None:
    """The bound holds for one block or many: a record of two bytes would expand to sixty bytes."""
    tags = tuple(records.Tag(name="QQ", evidence="ZZ") for _ in range(2))
    value = CODEC.encode(dataclasses.replace(random_record(records.Step), tags=tags))
    at = value.index(b"\x04" + b"\x04QQ\x04ZZ" * 2 + b"\0")
    head, tail = value[:at], value[at + 14 :]

    def decoded(block: int, blocks: int) -> records.Step:
        zigzag, count = block << 1, b""
        while zigzag > 127:
            zigzag, count = zigzag >> 7, count + bytes([zigzag & 127 | 128])
        found = CODEC.decode(
            head + (count + bytes([zigzag]) + b"\0\0" * block) * blocks + b"\0" + tail
        )
        assert isinstance(found, records.Step)
        return found

    assert len(decoded(50_000, 2).tags) == 100_000
    for block, blocks in ((100_001, 1), (50_001, 2)):
        with pytest.raises(Undecodable, match="more than 100000 records in an array"):
            decoded(block, blocks)


def test_header_is_the_single_object_header_of_the_specification() -> None:
    # Avro specification: CRC-64-AVRO of "int" is 0x7275d51a3f395c8f; little-endian in the header.
    assert fingerprint_of("int") == (0x7275D51A3F395C8F).to_bytes(8, "little").hex()


@pytest.mark.parametrize("value", [None, b"", b"{}", b"\xc3\x01", b"\xc3\x01short", b"\x00\x00"])
def test_foreign_bytes_are_undecodable(value: bytes | None) -> None:
    with pytest.raises(Undecodable):
        CODEC.decode(value)


def test_unknown_fingerprint_is_named() -> None:
    with pytest.raises(UnknownSchema, match="0102030405060708"):
        CODEC.decode(b"\xc3\x01" + bytes(range(1, 9)) + b"x")


def newer_step_schema() -> dict[str, typing.Any]:
    schema = json.loads((AVRO_DIR / "Step.avsc").read_text())
    schema["fields"].append(
        {"name": "from_the_future", "type": ["null", "string"], "default": None, "doc": "New."}
    )
    return typing.cast("dict[str, typing.Any]", schema)


def test_newer_writer_is_read_once_announced() -> None:
    old, schema = Codec(), newer_step_schema()
    step = random_record(records.Step)
    plain = {**lists(as_dict(step)), "from_the_future": "hello"}
    import io

    out = io.BytesIO()
    fastavro.schemaless_writer(out, foreign.parse(schema), plain)
    value = MAGIC + bytes.fromhex(fingerprint_of(schema)) + out.getvalue()
    with pytest.raises(UnknownSchema):
        old.decode(value)
    old.announce(json.dumps(schema))
    assert old.encode(old.decode(value)) == old.encode(step)


def test_confluent_framing_is_read() -> None:
    codec = Codec()
    step = random_record(records.Step)
    value = codec.encode(step)
    framed = b"\x00" + struct.pack(">i", 7) + value[10:]
    with pytest.raises(UnknownSchema, match="confluent id 7"):
        codec.decode(framed)
    codec.announce(json.dumps(shipped("Step")), confluent_id=7)
    assert codec.encode(codec.decode(framed)) == value


def test_tokens_and_logprobs_are_packed_little_endian() -> None:
    assert tokens.pack_ids([1, 256]) == b"\x01\0\0\0\0\1\0\0"
    assert tokens.unpack_ids(tokens.pack_ids([0, 5, 2**31 - 1])) == [0, 5, 2**31 - 1]
    assert tokens.unpack_logprobs(tokens.pack_logprobs([-0.5, -2.0])) == [-0.5, -2.0]
    with pytest.raises(ValueError, match="multiple of 4"):
        tokens.unpack_ids(b"\0" * 5)


def test_ids_parse_back() -> None:
    call = ids.new_call_id("task-7")
    step = ids.step_id(call, 3)
    assert ids.key_of_step(step) == ids.key_of_step(call) == "task-7"
    assert ids.parse_version(ids.version_id("demo", 12, 1)) == ids.Version("demo", 12, 1)
    assert ids.parse_version("default") is None
    assert ids.stable_id("a", "b") != ids.stable_id("ab", "")
    for bad in ("", "a/b", "a~b", "ä", "x" * 201, "a,b", "a b"):
        with pytest.raises(InvalidId):
            ids.check_trajectory_key(bad)
    for bad in ("", "A", "a.b", "x" * 65):
        with pytest.raises(InvalidId):
            ids.check_run_id(bad)
    for bad in ("key", "~x", "key~"):
        with pytest.raises(InvalidId):
            ids.key_of_step(bad)


def test_ulids_are_those_of_the_specification() -> None:
    made = [ids.new_ulid() for _ in range(1000)]
    assert len(set(made)) == 1000
    for text in made[:100]:
        assert str(ULID.from_str(text)) == text
        assert abs(ULID.from_str(text).timestamp - time.time()) < 3600
