"""The lake's tables as Delta tables: making, opening, committing. The only file that imports deltalake."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
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
    DeltaError,
    SchemaMismatchError,
    TableNotFoundError,
)

from stream_jobs.errors import LakeDamaged, TooManyFields
from stream_jobs.errors import LakeError as LakeError
from stream_jobs.lake.delta.damage import damaged_files, damaged_log_files
from stream_jobs.lake.delta.log import committed_at, filesystem, first_line, table_uri
from stream_jobs.lake.tables.arrow_columns import commented, fields_of, merged

CommitCollided = CommitFailedError
"""Another commit came between this one's snapshot and itself, and both can't be. Open again and look."""
Delta = DeltaTable
MORE_FIELDS = 100
"""Fields of other releases that a table may have, structs' own included. They stay for good, and each costs statistics in every file and
a place in each checkpoint of the log. Our largest table has 67 fields: no release doubles it."""
FILE_BYTES = 128 << 20
"""Files are merged up to this size."""


class LakeMissing(LakeError):
    """There is no such lake, table or version. The message says where it was looked for."""


class SchemaRefused(LakeError):
    """Columns that do not fit those that the table has."""


class LakeFull(LakeError):
    """There is no room to write. Perhaps the commit landed and only what follows it did not; make room and write it again: it is taken once."""


_NO_ROOM = ("os error 28", "os error 122")
"""How the Delta library says ENOSPC and EDQUOT, in errors of several types."""

_LOG_REFUSED = "Kernel error"
"""How the message begins when the log is not what the protocol says."""

_NO_SUCH_SCHEMA = "Schema error"
"""How it says that a table can't have such columns (two names that differ in case only, a type of Arrow's), in a plain Exception."""


@contextmanager
def _room(where: str) -> Iterator[None]:
    try:
        yield
    except (DeltaError, OSError) as e:
        if not any(sign in str(e) for sign in _NO_ROOM):
            raise
        raise LakeFull(f"no room to write to {where}: {' '.join(str(e).split())[:300]}") from e


def exists(where: str, storage_options: Mapping[str, str]) -> bool:
    """Whether there is a table at this place."""
    return bool(DeltaTable.is_deltatable(where, dict(storage_options) or None))


def open_table(
    uri: str, name: str, storage_options: Mapping[str, str], version: int | None = None
) -> DeltaTable:
    """The table at its newest or a given version. Raises LakeMissing."""
    where = table_uri(uri, name)
    try:
        return DeltaTable(where, version=version, storage_options=dict(storage_options) or None)
    except TableNotFoundError as e:
        raise LakeMissing(
            f"no table {name} at {where}: run `clawstream lake` or `clawstream up` first"
        ) from e
    except DeltaError as e:
        _raise_damaged(uri, name, storage_options, e, newest=version is None)
        if version is None:
            raise
        raise LakeMissing(f"table {name} at {where} has no version {version}: {e}") from e


def refresh(table: DeltaTable, uri: str, name: str, storage_options: Mapping[str, str]) -> None:
    """Go on to the newest version from the one that the table is at. Raises LakeDamaged."""
    try:
        table.update_incremental()
    except DeltaError as e:
        _raise_damaged(uri, name, storage_options, e)
        raise


def _raise_damaged(
    uri: str, name: str, storage_options: Mapping[str, str], error: DeltaError, newest: bool = True
) -> None:
    """Raise LakeDamaged when a file of the log is at fault, which the library does not name."""
    flaws = damaged_log_files(filesystem(table_uri(uri, name), storage_options))
    if flaws:
        raise LakeDamaged(name, str(flaws[-1])) from error
    if newest and str(error).startswith(_LOG_REFUSED):
        raise LakeDamaged(name, f"its log is refused: {first_line(error)}") from error


@contextmanager
def reading(table: DeltaTable, name: str, storage_options: Mapping[str, str]) -> Iterator[None]:
    """Around a scan: raises LakeDamaged, which names the file, when one of the table's files is the cause of an error."""
    try:
        yield
    except (pa.ArrowException, OSError) as e:
        flaw = table_damage(table, storage_options)
        if flaw is None:
            raise
        raise LakeDamaged(name, flaw) from e


def table_damage(
    table: DeltaTable, storage_options: Mapping[str, str], whole: bool = True
) -> str | None:
    """What is wrong with the first data file of this version that can't be read; None: all can. whole: decode all of each file."""
    flaws = damaged_files(filesystem(table.table_uri, storage_options), sizes(table), whole)
    return next((str(flaw) for flaw in flaws), None)


def sizes(table: DeltaTable) -> dict[str, int]:
    """The data files of this version with their sizes in bytes."""
    files = pa.table(table.get_add_actions(flatten=True))
    return dict(
        zip(files.column("path").to_pylist(), files.column("size_bytes").to_pylist(), strict=True)
    )


def restore(table: DeltaTable, version: int, versions: Mapping[str, int]) -> None:
    """Commit that the table is as it was at a former version. versions: app id to version, in the same commit, lower ones too.

    Raises CommitCollided, LakeFull.
    """
    with _room(table.table_uri):
        table.restore(
            version,
            commit_properties=CommitProperties(
                app_transactions=[Transaction(a, v) for a, v in versions.items()]
            ),
        )


def dataset(table: DeltaTable, storage_options: Mapping[str, str]) -> Any:
    """The table as a pyarrow dataset, by a native file system.

    Never otherwise: deltalake's own is Python code, which read-ahead threads call while the interpreter ends; a scan that stops
    early then crashes at exit.
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
    """Make a table unless it is there. stats: columns with file statistics."""
    where = table_uri(uri, name)
    if exists(where, storage_options):
        return
    try:
        with _room(where):
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
                    **_properties(history),
                },
            )
    except DeltaError:
        if not exists(where, storage_options):  # else: another writer has just made it
            raise


def _structs_last(schema: pa.Schema) -> pa.Schema:
    """The same columns, structs behind all others: the client tells no statistics of what is behind a struct."""
    return pa.schema(
        sorted(schema, key=lambda field: pa.types.is_struct(field.type)), schema.metadata
    )


def commit(table: DeltaTable, rows: pa.Table, versions: Mapping[str, int]) -> None:
    """Append on exactly this snapshot; columns that the table lacks are added. versions: app id to version, in the same commit.

    Columns keep the comments that the table has: the client takes no others, and another release may have written them.

    Raises CommitCollided when another commit has raised one of the versions since, or has changed the columns; LakeFull.
    """
    schema = commented(rows.schema, pa.schema(table.schema()))
    if not schema.equals(rows.schema, check_metadata=True):
        rows = rows.cast(schema)
    with _room(table.table_uri):
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


def add_columns(
    table: DeltaTable, name: str, rows: pa.Table, versions: Mapping[str, int], own: pa.Schema
) -> None:
    """As `commit`, of no rows, for the sake of columns. Raises SchemaRefused when they are not as those that are there.

    own: columns by this release; beside them the table gets at most MORE_FIELDS, whoever added them. Raises TooManyFields.
    What else goes wrong is no fault of the columns and is raised as it is.
    """
    there = pa.schema(table.schema())
    more = fields_of(merged(there, merged(own, rows.schema)))
    if more > max(fields_of(there), fields_of(own) + MORE_FIELDS):
        raise TooManyFields(name, more - fields_of(own), MORE_FIELDS)
    wrong = [
        f.name
        for f in rows.schema
        if f.name in there.names and not _agree(f.type, there.field(f.name).type)
    ]
    if wrong:
        raise SchemaRefused(f"columns {', '.join(wrong)} have other types in {table.table_uri}")
    try:
        commit(table, rows, versions)
    except MemoryError:
        raise  # Arrow's is an ArrowException too
    except (
        Exception
    ) as e:  # the library says what a schema lacks by many kinds, some only by their text
        if not (
            isinstance(e, SchemaMismatchError | pa.ArrowException | TypeError)
            or _NO_SUCH_SCHEMA in str(e)
        ):
            raise
        raise SchemaRefused(f"{type(e).__name__}: {e}") from e


def _agree(ours: pa.DataType, theirs: pa.DataType) -> bool:
    """Whether both types are one, but for fields of structs that only one of them has."""
    if pa.types.is_struct(ours) and pa.types.is_struct(theirs):
        return all(
            _agree(f.type, theirs.field(f.name).type)
            for f in ours
            if theirs.get_field_index(f.name) >= 0
        )
    if pa.types.is_list(ours) and pa.types.is_list(theirs):
        return _agree(ours.value_type, theirs.value_type)
    if pa.types.is_map(ours) and pa.types.is_map(theirs):
        return _agree(ours.item_type, theirs.item_type)
    return bool(ours == theirs)


def writer_properties(schema: pa.Schema) -> WriterProperties:
    """ZSTD. Dictionaries for short text only: on token ids and log-probabilities they take as long as the compression, for nothing."""
    short = [f.name for f in schema if f.type == pa.string() and not f.name.endswith("_json")]
    return WriterProperties(
        compression="ZSTD",
        default_column_properties=ColumnProperties(dictionary_enabled=False),
        column_properties={name: ColumnProperties(dictionary_enabled=True) for name in short},
    )


# -- care, beside the writer


def compact(table: DeltaTable, name: str, storage_options: Mapping[str, str]) -> tuple[int, int]:
    """Make large files of small ones, never of those that are large already. Returns (files gone, files made).

    Beside a writer's commits; raises CommitCollided when rows were deleted meanwhile, LakeDamaged. Killed: the table is as it was.
    """
    try:
        with _room(table.table_uri):
            done = table.optimize.compact(
                target_size=FILE_BYTES,
                max_concurrent_tasks=1,
                writer_properties=writer_properties(pa.schema(table.schema())),
            )
    except CommitFailedError:
        raise
    except DeltaError as e:
        flaw = table_damage(table, storage_options)
        if flaw is None:
            raise
        raise LakeDamaged(name, flaw) from e
    return done["numFilesRemoved"], done["numFilesAdded"]


def delete_before(table: DeltaTable, column: str, moment: datetime) -> int:
    """Delete the rows whose time is before `moment`. Returns how many. A commit on an older snapshot collides with it, and is repeated."""
    stamp = moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    with _room(table.table_uri):
        done = table.delete(
            f"{column} < '{stamp}'", writer_properties=writer_properties(pa.schema(table.schema()))
        )
    return int(done["num_deleted_rows"] or 0)


def clean(
    table: DeltaTable, history: timedelta, keep: Sequence[int], storage_options: Mapping[str, str]
) -> int:
    """Delete files that no version younger than `history` needs, nor one of `keep`, and the log behind it unless something is kept.

    Returns how many data files.
    """
    _set_history(table, history)
    there = _files(table, storage_options)
    hours = int(history.total_seconds() // 3600)
    gone = table.vacuum(
        retention_hours=hours,
        dry_run=False,
        enforce_retention_duration=False,
        full=hours > 0,  # files of no version too, but never one that is being written now
        keep_versions=list(keep) or None,
    )
    if not keep:
        table.cleanup_metadata()
    return len(there & set(gone))  # it names files that are long deleted, too


def _files(table: DeltaTable, storage_options: Mapping[str, str]) -> set[str]:
    """Data files that lie with the table, of any version or none."""
    root = filesystem(table.table_uri, storage_options)
    return {f.path for f in root.get_file_info(pafs.FileSelector("")) if f.is_file}


def _set_history(table: DeltaTable, history: timedelta) -> None:
    wanted = _properties(history)
    now = table.metadata().configuration
    if any(now.get(name) != value for name, value in wanted.items()):
        table.alter.set_table_properties(wanted)


def _properties(history: timedelta) -> dict[str, str]:
    """Table properties that say how long versions can be read."""
    interval = f"interval {int(history.total_seconds())} seconds"
    return {"delta.logRetentionDuration": interval, "delta.deletedFileRetentionDuration": interval}


# -- what there was


def version_at(uri: str, name: str, storage_options: Mapping[str, str], moment: datetime) -> int:
    """The newest version of a table that was there at a moment; 0, which is empty, when the table is younger.

    Raises LakeMissing when there is no table, or its log does not go back so far.
    """
    table = open_table(uri, name, storage_options)
    try:
        table.load_as_version(moment)
    except DeltaError as e:
        raise LakeMissing(f"table {name} can't be read as of {moment.isoformat()}: {e}") from e
    version = int(table.version())
    made = committed_at(
        uri, name, version, storage_options
    )  # the library's history names a wrong time for an old version
    if version and (made is None or made > moment):
        raise LakeMissing(
            f"table {name} can't be read as of {moment.isoformat()}: its log begins later; it is kept for lake.history_days"
        )
    return version


def check_files(table: DeltaTable, name: str, storage_options: Mapping[str, str]) -> None:
    """Raises LakeMissing when files of this old version are deleted."""
    there = _files(table, storage_options)
    gone = [
        p
        for p in pa.table(table.get_add_actions(flatten=True)).column("path").to_pylist()
        if p not in there
    ]
    if gone:
        raise LakeMissing(
            f"version {table.version()} of table {name} can't be read any more: {len(gone)} of its files are deleted. Versions stay for "
            "lake.history_days; `clawstream tables snapshot --name NAME` keeps today's until `clawstream tables delete-snapshot NAME`"
        )
