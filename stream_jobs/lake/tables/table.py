"""Define what a Delta table of the lake is: columns, keys, and how records become rows. Pure.

The columns of a table follow the Avro schema of its record, so a new field of an event becomes a
column without further code; the doc of the field becomes the Delta comment. Every row ends with its
position on Kafka: `kafka_topic_id`, `kafka_partition`, `kafka_offset`, `kafka_timestamp`. All
columns are nullable: a row written before a column existed has null there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, NamedTuple

import pyarrow as pa

from clawstream.schemas.codec.avro_schema import Schema
from clawstream.schemas.codec.compiled_reader import Read
from clawstream.schemas.codec.single_object import as_dict
from clawstream.stream_jobs.lake.tables.arrow_columns import (
    TIME,
    Column,
    avro_columns,
    column,
    evolved,
    named,
    pruned,
    time,
    tupled,
)
from clawstream.stream_jobs.lake.tables.avro_values import reader_of

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
