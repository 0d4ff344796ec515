"""Write every topic into append-only Delta tables, each record exactly once.

The protocol, which holds whichever process is killed at whichever moment:

1. A writer acquires its lease: it raises the version of app id `writer` in every table, `steps`
   first. Each later commit repeats that version, so the newer of two writers goes on and the older
   one ends as fenced (exit code 78) at its next commit. Each of several writers (`lake.writers`)
   leases its share, the partitions p of every topic with p % writers == writer, under an app id of
   its own, so their commits never collide. A writer with another number of writers fences all
   writers of the former layout (`clawstream.stream_jobs.lake.fencing`).
2. A table stores the committed offset of each partition as a Delta `txn` action: app id
   `<table>:<topic id>:<partition>`, version = one past the last offset handled. A recreated topic
   has another id, so its offsets start from zero.
3. Reading starts at the lowest committed offset of the tables that a topic feeds, or at the start
   of the log if a table has none. The writer that committed it does not matter.
4. A flush appends to each table that has rows. On the snapshot that the commit builds on, it drops
   rows below the committed offset of their partition (batch boundaries differ after a crash) and
   rows whose id is among the newest `lake.dedupe_window` (a re-sent record has a new offset on the
   same partition, so a window holds the share of its writer). Rows and offsets are one commit. On
   a conflict the writer reopens the table, checks again and writes again.
5. Then the positions are committed to Kafka, only so that tools can show the lag. Nothing resumes
   from them.

A damaged table (one of its files cannot be read) takes no rows and keeps its committed offsets; the
others go on. Once `clawstream.stream_jobs.lake.delta.repair` has restored a readable version, its
topics are read again from the offsets of that version. The other tables drop rows below their own
offsets.

A table without new rows is not committed at every flush. An empty commit stores its offsets when it
has none yet, when they are COMMIT_AFTER_OFFSETS behind or COMMIT_AFTER_S old, and at an orderly
stop. This bounds how much a restart reads again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

from clawstream.runtime.kafka import Cluster, SourceTruncated, Unavailable
from clawstream.runtime.logs import logger
from clawstream.runtime.process.lifecycle import run_sync
from clawstream.runtime.process.metrics import serving_metrics
from clawstream.runtime.process.readiness import not_ready, ready
from clawstream.runtime.topics.access import check_access
from clawstream.runtime.topics.records import Decoder, cluster_of, create_topics
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.errors import LakeAway
from clawstream.stream_jobs.lake.consumer import LakeConsumer
from clawstream.stream_jobs.lake.delta.maintenance import MaintenanceRunner
from clawstream.stream_jobs.lake.delta.table import (
    LakeError,
    LakeFull,
    LakeMissing,
    dataset,
    open_table,
)
from clawstream.stream_jobs.lake.fencing import LakeFenced, PartitionShare
from clawstream.stream_jobs.lake.metrics import LakeMetrics
from clawstream.stream_jobs.lake.positions import positions, recreated_topics
from clawstream.stream_jobs.lake.tables.row_decoder import WriterSchemas
from clawstream.stream_jobs.lake.writer import Lake

RECOVER_S = 5.0
"""Interval at which a damaged table is tried again."""
REPAIR_CHECK_S = 30.0
"""Interval of the check for repaired tables; a commit to a table notices a repair at once."""
MAX_RETRY_WAIT_S = 30.0
"""Longest wait before a write that found no disk space, or no store, is tried again."""

__all__ = [
    "Lake",
    "LakeError",
    "LakeFenced",
    "LakeMissing",
    "dataset",
    "main",
    "open_table",
    "write",
]


def main(settings: Settings) -> None:
    """Write the lake until SIGTERM. Never returns.

    Exits with 0, 69 (Kafka or, at the start, the object store away), 78 (fenced by a newer writer)
    or 79 (truncated source).
    """
    run_sync("lake", settings, write)


def write(settings: Settings, stop: threading.Event) -> None:
    """Follow all topics until `stop`; start over with new positions when a topic is recreated."""
    cluster = cluster_of(settings)
    create_topics(cluster, settings)
    check_access(cluster, settings, "lake")
    _warn_of_recreated_topics(cluster, settings)
    history = timedelta(days=settings.lake.history_days)
    share = PartitionShare(settings.lake.writer, settings.lake.writers)
    lake = Lake(
        settings.lake_uri,
        settings.lake.storage_options,
        settings.lake.dedupe_window,
        history,
        share,
    )
    if not _when_writable(lake, lake.acquire, stop, started=False):
        return
    metrics = LakeMetrics()
    with serving_metrics(settings, "lake", metrics.registry):
        _write_topics(settings, cluster, lake, metrics, stop)


def _write_topics(
    settings: Settings, cluster: Cluster, lake: Lake, metrics: LakeMetrics, stop: threading.Event
) -> None:
    schemas = WriterSchemas()
    decoder = Decoder(cluster, settings.kafka.topics.schemas, schemas)
    maintenance = MaintenanceRunner(settings)
    while not stop.is_set():
        consumer = LakeConsumer(cluster, settings, schemas, decoder, lake)
        ready(lake.uri)
        try:
            _follow(lake, consumer, metrics, maintenance, settings.lake.flush_interval_s, stop)
        finally:
            consumer.close()
            maintenance.stop()


def _warn_of_recreated_topics(cluster: Cluster, settings: Settings) -> None:
    """Log topics whose id changed: a wiped broker must not look like an idle one."""
    stored = [p for p in positions(settings, cluster) if p.error is None]
    ids = cluster.topic_ids(sorted({p.topic for p in stored if not p.topic.endswith("*")}))
    for topic, former in recreated_topics(stored, ids):
        logger().warning(
            "topic_recreated", topic=topic, topic_id=ids[topic], stored_topic_ids=former,
            action="read from its start; the rows of the former topic stay",
        )  # fmt: skip


def _follow(
    lake: Lake,
    consumer: LakeConsumer,
    metrics: LakeMetrics,
    maintenance: MaintenanceRunner,
    interval_s: float,
    stop: threading.Event,
) -> None:
    """Read and flush until `stop`, or until a followed topic was deleted or recreated."""
    flushed_at, recover_at = float("-inf"), time.monotonic() + RECOVER_S
    check_at = time.monotonic() + REPAIR_CHECK_S
    while not stop.is_set():
        if time.monotonic() >= check_at:
            if not _when_writable(lake, lake.check_repairs, stop):
                return
            check_at = time.monotonic() + REPAIR_CHECK_S
        if lake.damaged and time.monotonic() >= recover_at:
            damaged = len(lake.damaged)
            if not _when_writable(lake, lake.recover, stop) or len(lake.damaged) < damaged:
                return  # the topics of these tables are read again from their committed offsets
            recover_at = time.monotonic() + RECOVER_S
        if consumer.full or time.monotonic() - flushed_at >= interval_s:
            unchanged = _topics_unchanged(consumer)
            if unchanged is False:
                logger().warning(
                    "lake_topics_changed",
                    dropped={n: len(r) for n, r in consumer.rows.items() if r},
                )
                return
            if unchanged is None:
                stop.wait(1.0)
                continue
            if not _when_writable(lake, lambda: _flush(lake, consumer, metrics), stop):
                return
            flushed_at = time.monotonic()
            maintenance.poll()
        try:
            consumer.poll()
            consumer.commit_heartbeat()
        except (LakeFull, LakeAway) as e:
            # While columns were added: records read since the flush are read again.
            _log_waiting(e)
            not_ready(f"waits: {e}")
            stop.wait(MAX_RETRY_WAIT_S)
            return
        except SourceTruncated as e:
            if consumer.is_recreated(e):
                return
    if _topics_unchanged(consumer):
        _when_writable(lake, lambda: _flush(lake, consumer, metrics, commit_offsets=True), stop)


def _when_writable(
    lake: Lake, write: Callable[[], object], stop: threading.Event, started: bool = True
) -> bool:
    """Write as soon as the storage has space and answers; rows stay in memory and on Kafka.

    The process is not ready meanwhile.

    Args:
        started: False at the start, when a store that is away ends the process.

    Returns:
        False if `stop` was set first.
    """
    wait_s, waits = 1.0, False
    while True:
        try:
            write()
        except (LakeFull, LakeAway) as e:
            if isinstance(e, LakeAway) and not started:
                raise
            if not waits:
                _log_waiting(e)
            not_ready(f"waits: {e}")
            waits = True
            if stop.wait(wait_s):
                return False
            wait_s = min(2 * wait_s, MAX_RETRY_WAIT_S)
        else:
            if waits:
                logger().info("lake_writes_again")
                if started:
                    ready(lake.uri)
            return True


def _log_waiting(error: LakeError) -> None:
    is_full = isinstance(error, LakeFull)
    cure = "free disk space" if is_full else "look at the store, its address and credentials"
    logger().error(
        "lake_full" if is_full else "lake_store_away",
        error=str(error),
        action=f"{cure}; the writer then continues by itself, nothing is lost",
    )


def _topics_unchanged(consumer: LakeConsumer) -> bool | None:
    """Return None while Kafka or the store is away: rows may not be written before the check."""
    try:
        return consumer.refresh_topics()
    except Unavailable as e:
        logger().warning("lake_waits_for_kafka", error=str(e))
    except LakeAway as e:
        _log_waiting(e)
    return None


def _flush(
    lake: Lake, consumer: LakeConsumer, metrics: LakeMetrics, commit_offsets: bool = False
) -> None:
    added = {}
    with metrics.flush.time():
        for name, rows in consumer.rows.items():
            positions = consumer.positions(name)
            due = commit_offsets or lake.commit_due(name, positions)
            if rows or due:
                added[name] = lake.append(name, rows, positions, consumer.reject, due)
                metrics.rows.labels(name).inc(added[name])
                consumer.commit_heartbeat()
    metrics.damaged.set(len(lake.damaged))
    metrics.flushed_at.set_to_current_time()
    consumer.commit()
    if any(added.values()):
        logger().debug("lake_flushed", rows={n: c for n, c in added.items() if c})
