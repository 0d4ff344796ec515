"""Decode Kafka values of any writer version into rows.

Fields that only a newer version has become new columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from clawstream.runtime.kafka import Record
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.codec.avro_schema import Schema, expanded
from clawstream.schemas.codec.compiled_reader import MALFORMED, Read
from clawstream.schemas.codec.single_object import MAGIC, Codec
from clawstream.stream_jobs.errors import TooManyFields
from clawstream.stream_jobs.lake.tables.table import ConsumedRecord, Row, Table

_HEADER, _CONFLUENT = 10, 5
_T = TypeVar("_T")


class WriterSchemas(Codec):
    """A codec that keeps announced schemas unchanged, with docs and logical types."""

    def __init__(self) -> None:
        self._announced: dict[bytes, Schema] = {}
        self._of_id: dict[bytes, Schema] = {}
        super().__init__()
        for schema in self.published(0):
            self._announced[bytes.fromhex(schema.fingerprint)] = json.loads(schema.schema_json)

    def announce(self, schema_json: str, confluent_id: int | None = None) -> str:
        fingerprint = super().announce(schema_json, confluent_id)
        schema = json.loads(schema_json)
        self._announced.setdefault(bytes.fromhex(fingerprint), schema)
        if confluent_id is not None:
            self._of_id[confluent_id.to_bytes(4, "big", signed=True)] = schema
        return fingerprint

    def schema_of(self, value: bytes) -> Schema:
        """Return the schema with which a decodable value was written."""
        return (
            self._announced[value[2:_HEADER]]
            if value[:2] == MAGIC
            else self._of_id[value[1:_CONFLUENT]]
        )


class _Route(NamedTuple):
    """How values with one schema become rows.

    plain: (table, reader). by_record: tables whose rows are derived from the decoded record.
    """

    name: str
    plain: tuple[tuple[str, Read], ...]
    by_record: tuple[str, ...]


class RowDecoder:
    """Decode a Kafka record to its name and its rows for each table.

    tables: current tables by name. add_columns: adds columns to one of them; returns False if they
    conflict; raises TooManyFields. reject: takes a record that has no row in one table, and why.
    """

    def __init__(
        self,
        schemas: WriterSchemas,
        decoder: Decoder,
        tables: Mapping[str, Table],
        widen: Callable[[Table], bool],
        reject: Callable[[Record, str], None],
    ) -> None:
        self._schemas, self._decoder, self._tables = schemas, decoder, tables
        self._add_columns, self._reject = widen, reject
        self._routes: dict[bytes, _Route] = {}
        self._refused: dict[bytes, TooManyFields] = {}

    def __call__(
        self, record: Record, topic_id: str, names: Sequence[str]
    ) -> tuple[str, list[tuple[str, list[Row]]]]:
        """Decode a record.

        Args:
            names: tables that the topic of the record feeds.

        Raises:
            Undecodable: the value is invalid.
            UnknownSchema: its schema is not announced.
            TooManyFields: its new columns are too many.
        """
        value = record.value or b""
        body = _HEADER if value[:2] == MAGIC else _CONFLUENT
        route = self._routes.get(value[:body])
        if route is None:
            route = self._routes[value[:body]] = self._new_route(record.value, value[:body])
        place = (topic_id, record.partition, record.offset, record.timestamp_ms)
        out: list[tuple[str, list[Row]]] = []
        by_record = [name for name in route.by_record if name in names]
        for name, read in route.plain:
            if name in names:
                try:
                    fields = read(value, body)
                except MALFORMED:
                    # A column that another release added has another type: the rest is stored.
                    by_record.append(name)
                else:
                    make = partial(self._tables[name].row, fields, record.headers, place)
                    out += [(name, [row]) for row in self._derived(record, name, make)]
        if by_record:
            placed = ConsumedRecord(*place, record.headers, self._decoder.decode(value))
            for name in by_record:
                make_all = partial(self._tables[name].rows_of, placed)
                out += [(name, rows) for rows in self._derived(record, name, make_all)]
        return route.name, out

    def _derived(self, record: Record, table: str, make: Callable[[], _T]) -> list[_T]:
        """Return what `make` derives for a table, or nothing and reject the record."""
        try:
            return [make()]
        except MemoryError:
            raise  # the machine's fault, not the record's
        except Exception as e:  # noqa: BLE001 - a record must not stop the tables
            self._reject(record, f"table {table}: no row can be derived: {type(e).__name__}: {e}")
            return []

    def _new_route(self, value: bytes | None, header: bytes) -> _Route:
        """Make a route; caches a refusal, because each attempt refreshes the table."""
        if header in self._refused:
            raise self._refused[header].with_traceback(None)
        try:
            return self._route(value)
        except TooManyFields as e:
            self._refused[header] = e
            raise

    def _route(self, value: bytes | None) -> _Route:
        event: Any = self._decoder.decode(value)  # looks an unknown schema up
        assert value is not None
        name, plain, by_record = type(event).__name__, [], []
        writer: Schema | None
        try:
            writer = expanded(self._schemas.schema_of(value))
        except (
            ValueError,
            RecursionError,
        ):  # recursive or too deep: only fastavro reads such types
            writer = None
        for table in [t for t in self._tables.values() if name in t.records]:
            read = (
                None if writer is None or table.derived is not None else self._reader(table, writer)
            )
            if read is None:
                by_record.append(table.name)
            else:
                plain.append((table.name, read))
        return _Route(name, tuple(plain), tuple(by_record))

    def _reader(self, table: Table, writer: Schema) -> Read | None:
        """Return a reader of a table's columns, after adding the columns that it lacks.

        None: only fastavro resolves the types.
        """
        try:
            wider = table.evolved(writer)
            read = wider.reads(writer)
            if wider is table:
                return read
            narrow = table.reads(writer)
        except (ValueError, RecursionError):
            return None
        if not self._add_columns(wider):
            return narrow
        self._routes.clear()  # they make rows of the narrower table
        return read
