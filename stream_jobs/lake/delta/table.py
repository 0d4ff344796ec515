"""Create, open, read and commit to the Delta tables. The only module that imports deltalake."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake import (
    ColumnProperties,
    CommitProperties,
    DeltaTable,
    PostCommitHookProperties,
    Transaction,
    WriterProperties,
    write_deltalake,
)
from deltalake.exceptions import (
    CommitFailedError,
    SchemaMismatchError,
    TableNotFoundError,
)
from deltalake.exceptions import (
    DeltaError as DeltaError,
)

from clawstream.stream_jobs.errors import LakeAway, LakeDamaged, TooManyFields
from clawstream.stream_jobs.errors import LakeError as LakeError
from clawstream.stream_jobs.lake.delta.damage import damaged_files, damaged_log_files
from clawstream.stream_jobs.lake.delta.log import (
    filesystem,
    first_line,
    is_store_away,
    plain,
    table_uri,
)
from clawstream.stream_jobs.lake.tables.arrow_columns import commented, fields_of, merged

CommitCollided = CommitFailedError
"""Another commit since this one's snapshot conflicts with it. Reopen and check again."""
Delta = DeltaTable
ROW_GROUP_ROWS = 4096
"""Rows of a row group, the least that a reader of one row decompresses of a merged file.

Rows are in log order, so readers skip row groups by their `kafka_timestamp`.
"""
MORE_FIELDS = 100
"""Fields of other releases that a table may have, fields of structs included.

They stay for good, and each costs statistics in every file and space in every checkpoint of the
log. Our largest table has 67 fields: no release doubles it.
"""


class LakeMissing(LakeError):
    """There is no such lake, table or version. The message names the location."""


class SchemaRefused(LakeError):
    """Columns conflict with those of the table."""


class LakeFull(LakeError):
    """The storage is full. Free space and write again.

    The commit may have landed and a later step failed: a repeated write drops its rows.
    """


_STORAGE_FULL = ("os error 28", "os error 122")
"""Text of ENOSPC and EDQUOT in the library's errors, which have several types."""

_LOG_REFUSED = "Kernel error"
"""Prefix of the library's message for a log that violates the protocol."""

_SCHEMA_ERROR = "Schema error"
"""Text of the library's plain Exception for columns that a table cannot have.

For example two names that differ in case only, or an unsupported type of Arrow.
"""


@contextmanager
def storage_errors(where: str) -> Iterator[None]:
    """Raise LakeFull for errors of a full storage, LakeAway for those of a store that is away."""
    try:
        yield
    except (DeltaError, OSError, pa.ArrowException) as e:
        if any(text in str(e) for text in _STORAGE_FULL):
            raise LakeFull(f"no room to write to {where}: {plain(e)}") from e
        if is_store_away(e):
            raise LakeAway(f"the store of {where} is away: {plain(e)}") from e
        raise


def exists(where: str, storage_options: Mapping[str, str]) -> bool:
    """Return whether there is a table at this location. Raises LakeAway."""
    with storage_errors(where):
        return bool(DeltaTable.is_deltatable(where, dict(storage_options) or None))


def open_table(
    uri: str, name: str, storage_options: Mapping[str, str], version: int | None = None
) -> DeltaTable:
    """Open a table at its newest or a given version.

    Raises:
        LakeMissing: there is no such table or version.
        LakeDamaged: its log cannot be read.
        LakeAway: its store does not answer.
    """
    where, options = table_uri(uri, name), dict(storage_options) or None
    try:
        with storage_errors(where):
            return DeltaTable(where, version=version, storage_options=options)
    except TableNotFoundError as e:
        raise LakeMissing(
            f"no table {name} at {where}: run `clawstream lake` or `clawstream up` first"
        ) from e
    except DeltaError as e:
        _raise_damaged(uri, name, storage_options, e, newest=version is None)
        if version is None:
            raise
        raise LakeMissing(f"table {name} at {where} has no version {version}: {plain(e)}") from e


def refresh(table: DeltaTable, uri: str, name: str, storage_options: Mapping[str, str]) -> None:
    """Update an open table to its newest version. Raises LakeDamaged, LakeAway."""
    try:
        with storage_errors(table.table_uri):
            table.update_incremental()
    except DeltaError as e:
        _raise_damaged(uri, name, storage_options, e)
        raise


def _raise_damaged(
    uri: str, name: str, storage_options: Mapping[str, str], error: DeltaError, newest: bool = True
) -> None:
    """Raise LakeDamaged with the file of the log at fault, which the library does not name."""
    with storage_errors(table_uri(uri, name)):
        found = damaged_log_files(filesystem(table_uri(uri, name), storage_options))
    if found:
        raise LakeDamaged(name, str(found[-1])) from error
    if newest and str(error).startswith(_LOG_REFUSED):
        raise LakeDamaged(name, f"its log is refused: {first_line(error)}") from error


@contextmanager
def reading(table: DeltaTable, name: str, storage_options: Mapping[str, str]) -> Iterator[None]:
    """Translate errors of a scan into LakeDamaged if a file of the table causes them, and into
    LakeAway if its store does not answer.
    """
    try:
        with storage_errors(table.table_uri):
            yield
    except (pa.ArrowException, OSError) as e:
        damage = table_damage(table, storage_options)
        if damage is None:
            raise
        raise LakeDamaged(name, damage) from e


def table_damage(
    table: DeltaTable, storage_options: Mapping[str, str], whole: bool = True
) -> str | None:
    """Return the damage of the first unreadable data file of this version, or None.

    Args:
        whole: decode each file to its end; else compare sizes only.
    """
    with storage_errors(table.table_uri):
        found = damaged_files(filesystem(table.table_uri, storage_options), sizes(table), whole)
        return next((str(damage) for damage in found), None)


def sizes(table: DeltaTable) -> dict[str, int]:
    """Return the data files of this version with their sizes in bytes."""
    files = pa.table(table.get_add_actions(flatten=True))
    return dict(
        zip(files.column("path").to_pylist(), files.column("size_bytes").to_pylist(), strict=True)
    )


def restore(table: DeltaTable, version: int, versions: Mapping[str, int]) -> None:
    """Commit the files of a former version as the newest version.

    Args:
        versions: app id to version in the same commit; they may go down.

    Raises:
        CommitCollided: another commit came first.
        LakeFull, LakeAway: the storage is full, or does not answer.
    """
    with storage_errors(table.table_uri):
        table.restore(
            version,
            commit_properties=CommitProperties(
                app_transactions=[Transaction(a, v) for a, v in versions.items()]
            ),
        )


def dataset(table: DeltaTable, storage_options: Mapping[str, str]) -> Any:
    """Return the table as a pyarrow dataset on a native file system.

    The file system of deltalake is Python code, which read-ahead threads call while the interpreter
    ends: a scan that stops early then crashes at exit.
    """
    return table.to_pyarrow_dataset(filesystem=filesystem(table.table_uri, storage_options))


def create(
    uri: str,
    name: str,
    schema: pa.Schema,
    stats: tuple[str, ...],
    history: timedelta,
    storage_options: Mapping[str, str],
) -> None:
    """Create a table if it does not exist.

    Args:
        stats: columns with file statistics.
    """
    where = table_uri(uri, name)
    if exists(where, storage_options):
        return
    try:
        with storage_errors(where):
            if "://" not in where:
                Path(where).mkdir(parents=True, exist_ok=True)
            DeltaTable.create(
                where,
                _structs_last(schema),
                mode="ignore",
                name=name,
                storage_options=dict(storage_options) or None,
                configuration={
                    "delta.checkpointInterval": "20",
                    "delta.dataSkippingStatsColumns": ",".join(stats),
                    **history_properties(history),
                },
            )
    except DeltaError:
        if not exists(where, storage_options):  # else another writer has just created it
            raise


def _structs_last(schema: pa.Schema) -> pa.Schema:
    """Move structs behind all other columns: the client reads no statistics behind a struct."""
    return pa.schema(
        sorted(schema, key=lambda field: pa.types.is_struct(field.type)), schema.metadata
    )


def commit(table: DeltaTable, rows: pa.Table, versions: Mapping[str, int]) -> None:
    """Append rows and add missing columns, on exactly this snapshot.

    Columns keep the comments of the table, possibly written by another release: the client accepts
    no others.

    Args:
        versions: app id to version in the same commit.

    Raises:
        CommitCollided: another commit has raised one of the versions or changed the columns since.
        LakeFull, LakeAway: the storage is full, or does not answer.
    """
    schema = commented(rows.schema, pa.schema(table.schema()))
    if not schema.equals(rows.schema, check_metadata=True):
        rows = rows.cast(schema)
    with storage_errors(table.table_uri):
        write_deltalake(
            table,
            rows,
            mode="append",
            schema_mode="merge",
            writer_properties=writer_properties(rows.schema),
            commit_properties=CommitProperties(
                app_transactions=[Transaction(a, v) for a, v in versions.items()]
            ),
            post_commithook_properties=PostCommitHookProperties(
                create_checkpoint=True, cleanup_expired_logs=False
            ),
        )


def delete_rows(table: DeltaTable, condition: str) -> None:
    """Delete the rows for which a condition holds, in one commit; a null keeps its row.

    It replaces them by no rows. `DeltaTable.delete` would write the rows that stay as views of
    strings, which no filter of Arrow can compare with strings (delta-rs issue 4579).

    Args:
        condition: in the SQL of DataFusion.

    Raises:
        CommitCollided: another commit has added or removed such rows since this snapshot.
        LakeFull, LakeAway: the storage is full, or does not answer.
    """
    schema = pa.schema(table.schema())
    with storage_errors(table.table_uri):
        write_deltalake(
            table,
            schema.empty_table(),
            mode="overwrite",
            predicate=condition,
            writer_properties=writer_properties(schema),
        )


def add_columns(
    table: DeltaTable, name: str, rows: pa.Table, versions: Mapping[str, int], own: pa.Schema
) -> None:
    """Commit columns without rows.

    Args:
        own: columns of this release; the table gets at most MORE_FIELDS others.

    Raises:
        SchemaRefused: they conflict with columns of the table.
        TooManyFields: there are too many.
    """
    present = pa.schema(table.schema())
    total = fields_of(merged(present, merged(own, rows.schema)))
    if total > max(fields_of(present), fields_of(own) + MORE_FIELDS):
        raise TooManyFields(name, total - fields_of(own), MORE_FIELDS)
    conflicting = [
        f.name
        for f in rows.schema
        if f.name in present.names and not _compatible(f.type, present.field(f.name).type)
    ]
    if conflicting:
        raise SchemaRefused(
            f"columns {', '.join(conflicting)} have other types in {table.table_uri}"
        )
    try:
        commit(table, rows, versions)
    except MemoryError:
        raise  # Arrow's MemoryError is an ArrowException too
    except Exception as e:  # the library uses many types, some identified only by text
        if not (
            isinstance(e, SchemaMismatchError | pa.ArrowException | TypeError)
            or _SCHEMA_ERROR in str(e)
        ):
            raise
        raise SchemaRefused(f"{type(e).__name__}: {e}") from e


def _compatible(ours: pa.DataType, theirs: pa.DataType) -> bool:
    """Whether two types are equal, except for fields of structs that only one of them has."""
    if pa.types.is_struct(ours) and pa.types.is_struct(theirs):
        return all(
            _compatible(f.type, theirs.field(f.name).type)
            for f in ours
            if theirs.get_field_index(f.name) >= 0
        )
    if pa.types.is_list(ours) and pa.types.is_list(theirs):
        return _compatible(ours.value_type, theirs.value_type)
    if pa.types.is_map(ours) and pa.types.is_map(theirs):
        return _compatible(ours.item_type, theirs.item_type)
    return bool(ours == theirs)


def writer_properties(schema: pa.Schema) -> WriterProperties:
    """Return properties for ZSTD, small row groups, and dictionaries on short text only.

    On token ids and log-probabilities dictionaries cost as much CPU as compression, for no gain.
    """
    short = [f.name for f in schema if f.type == pa.string() and not f.name.endswith("_json")]
    return WriterProperties(
        compression="ZSTD",
        max_row_group_size=ROW_GROUP_ROWS,
        default_column_properties=ColumnProperties(dictionary_enabled=False),
        column_properties={name: ColumnProperties(dictionary_enabled=True) for name in short},
    )


def files_of(table: DeltaTable, storage_options: Mapping[str, str]) -> set[str]:
    """Return all files in the directory of the table, of any version or none."""
    with storage_errors(table.table_uri):
        root = filesystem(table.table_uri, storage_options)
        return {f.path for f in root.get_file_info(pafs.FileSelector("")) if f.is_file}


def history_properties(history: timedelta) -> dict[str, str]:
    """Return the table properties for the time that versions stay readable."""
    interval = f"interval {int(history.total_seconds())} seconds"
    return {"delta.logRetentionDuration": interval, "delta.deletedFileRetentionDuration": interval}


def check_files(table: DeltaTable, name: str, storage_options: Mapping[str, str]) -> None:
    """Check that the files of an old version exist. Raises LakeMissing."""
    present = files_of(table, storage_options)
    gone = [
        p
        for p in pa.table(table.get_add_actions(flatten=True)).column("path").to_pylist()
        if p not in present
    ]
    if gone:
        raise LakeMissing(
            f"version {table.version()} of table {name} can't be read any more: {len(gone)} of its "
            "files are deleted. Versions stay for lake.history_days; `clawstream tables snapshot "
            "NAME` keeps the current ones until `clawstream tables snapshot NAME --delete`"
        )
