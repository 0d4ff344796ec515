"""Fingerprint and parse schemas, and read records of schemas that this release does not ship.

fastavro does all three. A newer or older release announced such a schema, or anyone else did.
Thirty bytes can announce a billion items, so three bounds hold: items have a minimum size
(`avro_schema.check_extent`), a record takes at most READS_MAX reads, and no read goes past the end.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, cast

import fastavro
from fastavro.schema import fingerprint, to_parsing_canonical_form

from clawstream.schemas.codec.avro_schema import Schema

READS_MAX = 2_000_000
"""Maximum reads of one record. A trajectory of 5,000 steps takes 400,000, a batch of 4 MiB up to
1.6 million, and one of 9 MiB with rewards of steps 1.9 million.
"""
_ERRORS = (
    *(EOFError, ValueError, TypeError, IndexError, KeyError, OverflowError, struct.error),
    *(RecursionError, fastavro.read.SchemaResolutionError),
)
MALFORMED_SCHEMA = (
    *(ValueError, TypeError, KeyError, OverflowError, RecursionError),
    fastavro.schema.SchemaParseException,
)
"""Errors of `fingerprint_of` and `parse` for what is no schema."""
_PARSED = frozenset(("__fastavro_parsed", "__named_schemas"))
"""Marks of a schema that fastavro has checked; it accepts them from anyone."""


def fingerprint_of(schema: Any) -> str:
    """Return the CRC-64-AVRO of the parsing canonical form: 16 hex digits, in header byte order."""
    return _fingerprint(to_parsing_canonical_form(schema))


@lru_cache(maxsize=256)  # a CRC in Python takes about 1 ms, and every codec asks for the same ones
def _fingerprint(canonical: str) -> str:
    return fingerprint(canonical, "CRC-64-AVRO")  # type: ignore[no-any-return]


def parse(schema: Schema) -> Schema:
    """Parse a schema for fastavro, without logical types: times stay integers.

    Fingerprints ignore logical types.

    Raises:
        ValueError: The schema pretends to be parsed already.
        fastavro.schema.SchemaParseException: It is no Avro schema.
    """
    if isinstance(schema, dict) and schema.keys() & _PARSED:
        raise ValueError("a schema that says that it is parsed")

    def strip(node: Any) -> Any:
        if isinstance(node, dict):
            return {k: strip(v) for k, v in node.items() if k != "logicalType"}
        return [strip(v) for v in node] if isinstance(node, list) else node

    return fastavro.parse_schema(strip(schema), {})


def reader_of(writer: Schema, wanted: Schema) -> Callable[[bytes, int], Mapping[str, Any]]:
    """Return a function that decodes the record at a position to the fields of `wanted`.

    It raises ValueError when the bytes are no such record, or the schemas do not match.

    Args:
        writer: The record schema of the bytes, parsed.
        wanted: The record schema of the result, parsed.
    """

    def read(data: bytes, at: int) -> Mapping[str, Any]:
        stream = _BoundedBytes(data)
        stream.seek(at)
        try:
            record = fastavro.schemaless_reader(stream, writer, wanted)
        except _ERRORS as e:
            raise ValueError(f"{type(e).__name__}: {e}") from e
        if stream.tell() != len(data):
            raise ValueError(f"the record ends at byte {stream.tell()} of {len(data)}")
        return cast("Mapping[str, Any]", record)

    return read


class _BoundedBytes(io.BytesIO):
    """Bytes with a limit on the number of reads; a read returns as many bytes as it asks for."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads += 1
        if self._reads > READS_MAX:
            raise ValueError(f"more than {READS_MAX} reads")
        if size is None or size < 0:
            raise ValueError(f"a length of {size}")
        data = super().read(size)
        if len(data) < size:
            raise EOFError(f"{size} bytes, of which {len(data)} are there")
        return data
