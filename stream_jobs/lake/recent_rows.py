"""Read the newest rows of a writer's share, whose keys fill its dedupe window."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from clawstream.stream_jobs.lake.dedupe import DedupeWindow, digest
from clawstream.stream_jobs.lake.delta.table import Delta, dataset, reading
from clawstream.stream_jobs.lake.fencing import PartitionShare
from clawstream.stream_jobs.lake.tables.table import Table


def read_window(
    snapshot: Delta,
    table: Table,
    share: PartitionShare,
    size: int,
    storage_options: Mapping[str, str],
) -> DedupeWindow:
    """Return a window with the keys of the share's newest rows by log timestamp.

    Reads only files that can hold some of them. Rows of other shares lie between them, so each
    round looks further back.

    Raises:
        LakeDamaged: a file cannot be read.
    """
    files = pa.table(snapshot.get_add_actions(flatten=True))
    columns = list(dict.fromkeys((*table.key, "kafka_timestamp")))
    found: list[pa.Table] = []
    count, before = size, None
    with reading(snapshot, table.name, storage_options):
        source = dataset(snapshot, storage_options)
        while True:
            since = oldest_of_newest(files, count)
            found.append(source.to_table(columns=columns, filter=_filter(share, since, before)))
            if since is None or sum(t.num_rows for t in found) >= size:
                break
            count, before = 4 * count, since
        rows = pa.concat_tables(found).sort_by("kafka_timestamp")
    rows = rows.slice(max(0, rows.num_rows - size))
    window = DedupeWindow(size)
    keys = zip(*(rows.column(c).to_pylist() for c in table.key), strict=True)
    window.add(digest(key) for key in keys)
    return window


def _filter(share: PartitionShare, since: Any, before: Any) -> pc.Expression | None:
    """Return the filter of a share's rows with since <= log timestamp < before; None: all."""
    stamp, partition = pc.field("kafka_timestamp"), pc.field("kafka_partition")
    wanted = [] if since is None else [stamp >= since]
    if before is not None:
        wanted.append(stamp < before)
    if share.writers > 1:
        wanted.append(
            partition - pc.divide(partition, share.writers) * share.writers == share.writer
        )
    return functools.reduce(operator.and_, wanted) if wanted else None


def oldest_of_newest(files: pa.Table, rows: int) -> Any:
    """Return a log timestamp that none of the newest `rows` rows is older than.

    Uses the statistics of the files. None: any row could be among them.
    """
    if "min.kafka_timestamp" not in files.column_names:  # created without its statistics
        return None
    newest = files.select(["num_records", "min.kafka_timestamp", "max.kafka_timestamp"]).sort_by(
        [("max.kafka_timestamp", "descending")]
    )
    if newest.column("max.kafka_timestamp").null_count or newest.column("num_records").null_count:
        return None
    total, oldest = 0, None
    for count, low in zip(newest.column(0), newest.column(1), strict=True):
        oldest = low if oldest is None or low.as_py() < oldest.as_py() else oldest
        total += count.as_py()
        if total >= rows:
            return oldest
    return None
