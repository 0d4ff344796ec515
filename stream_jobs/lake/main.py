"""The lake writer: every topic into append-only Delta tables, each record exactly once, whoever is killed and whenever.

The protocol:

1. A writer claims the lake: it raises the version of app id `writer` in every table, `steps` first. Each later commit repeats its
   number, so that of two writers the newer goes on and the older ends as fenced (exit code 78) at its next commit. Of several
   (`lake.writers`) each claims its share, the partitions p of every topic with p % writers == writer, under an app id of its own, so
   their commits never collide; another number of writers than before fences all of before (`stream_jobs.lake.fencing`).
2. A table knows how far each partition is in it by Delta `txn` actions: app id `<table>:<topic id>:<partition>`, version = one past
   the last offset handled. A topic made anew has another id, so it starts a new position.
3. Reading starts at the lowest mark of the tables that a topic feeds; none: at the log's start. Whose share it was says nothing.
4. A flush appends to each table that has rows. On the very snapshot that the commit builds on, rows below the mark of
   their partition are removed (after a crash the boundaries of batches differ), and rows whose id is in the window of the newest
   `lake.dedupe_window` (a re-sent output has a new offset, on the same partition: a window holds its writer's share). Rows and marks
   land in one commit. A conflict: open again, check again, write again.
5. Then the positions are committed to Kafka, as advice for those who watch the lag. Nothing resumes from them.

A table that is damaged (a file of it can't be read) takes no rows and its marks stay where they are; the others go on. Once
`stream_jobs.lake.delta.repair` has taken it back to a version that can be read, its topics are read again from the marks of that version:
each of the other tables drops what is below its own marks.

A table without new rows is not committed at every flush. Its mark follows by an empty commit when there is none yet, when it is
COMMIT_AFTER_OFFSETS behind or COMMIT_AFTER_S old, and when the writer is told to stop: so that is the most a restart reads again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

from runtime.kafka import Cluster, SourceTruncated, Unavailable
from runtime.logs import logger
from runtime.process.lifecycle import run_sync
from runtime.process.readiness import ready
from runtime.topics.records import Decoder, cluster_of, create_topics
from schemas.settings import Settings
from stream_jobs.lake.consumer import LakeConsumer
from stream_jobs.lake.delta.maintenance import MaintenanceRunner
from stream_jobs.lake.delta.table import LakeError, LakeFull, LakeMissing, dataset, open_table
from stream_jobs.lake.fencing import LakeFenced, PartitionShare
from stream_jobs.lake.positions import positions, recreated_topics
from stream_jobs.lake.tables.row_decoder import WriterSchemas
from stream_jobs.lake.writer import Lake

RECOVER_S = 5.0
"""Between two looks whether a damaged table can be read again."""
REPAIR_LOOK_S = 30.0
"""Between two looks whether a table was repaired; a commit to it notices that at once."""
MAX_WAIT_S = 30.0
"""Between two looks whether there is room again."""

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
    """Write the lake until told to stop. Never returns: exits 0, 78 when a newer writer took over, 79 for a truncated source."""
    run_sync("lake", settings, write)


def write(settings: Settings, stop: threading.Event) -> None:
    """Follow all topics until `stop`; begin again, with new positions, whenever one of them was made anew."""
    cluster = cluster_of(settings)
    create_topics(cluster, settings)
    _tell_of_new_topics(cluster, settings)
    history = timedelta(days=settings.lake.history_days)
    share = PartitionShare(settings.lake.writer, settings.lake.writers)
    lake = Lake(
        settings.lake_uri,
        settings.lake.storage_options,
        settings.lake.dedupe_window,
        history,
        share,
    )
    if not _with_room(lake.acquire, stop):
        return
    schemas = WriterSchemas()
    decoder = Decoder(cluster, settings.kafka.topics.schemas, schemas)
    maintenance = MaintenanceRunner(settings)
    while not stop.is_set():
        consumer = LakeConsumer(cluster, settings, schemas, decoder, lake)
        ready(settings.lake_uri)
        try:
            _follow(lake, consumer, maintenance, settings.lake.flush_interval_s, stop)
        finally:
            consumer.close()
            maintenance.stop()


def _tell_of_new_topics(cluster: Cluster, settings: Settings) -> None:
    """A wiped broker must not look like a quiet one."""
    stored = [p for p in positions(settings, cluster) if p.flaw is None]
    ids = cluster.topic_ids(sorted({p.topic for p in stored if not p.topic.endswith("*")}))
    for topic, former in recreated_topics(stored, ids):
        logger().warning(
            "topic_recreated", topic=topic, topic_id=ids[topic], stored_topic_ids=former,
            action="read from its start; the rows of the old one stay",
        )  # fmt: skip


def _follow(
    lake: Lake,
    consumer: LakeConsumer,
    maintenance: MaintenanceRunner,
    interval_s: float,
    stop: threading.Event,
) -> None:
    """Read and flush until `stop`, or until a followed topic is another one."""
    flushed_at, recover_at = float("-inf"), time.monotonic() + RECOVER_S
    look_at = time.monotonic() + REPAIR_LOOK_S
    while not stop.is_set():
        if time.monotonic() >= look_at:
            lake.check_repairs()
            look_at = time.monotonic() + REPAIR_LOOK_S
        if lake.damaged and time.monotonic() >= recover_at:
            if lake.recover():
                return  # the topics of these tables are read from their marks again
            recover_at = time.monotonic() + RECOVER_S
        if consumer.full or time.monotonic() - flushed_at >= interval_s:
            same = _topics_same(consumer)
            if same is False:
                logger().warning(
                    "lake_topics_changed",
                    dropped={n: len(r) for n, r in consumer.rows.items() if r},
                )
                return
            if same is None:
                stop.wait(1.0)
                continue
            if not _with_room(lambda: _flush(lake, consumer, marks=False), stop):
                return
            flushed_at = time.monotonic()
            maintenance.poll()
        try:
            consumer.poll()
        except (
            LakeFull
        ) as e:  # no room for new columns: what this feed has read since is read again
            _tell_full(e)
            stop.wait(MAX_WAIT_S)
            return
        except SourceTruncated as e:
            if consumer.is_recreated(e):
                return
    if _topics_same(consumer):
        _with_room(lambda: _flush(lake, consumer, marks=True), stop)


def _with_room(write: Callable[[], None], stop: threading.Event) -> bool:
    """Write, as soon as there is room; what is waiting stays in memory and on Kafka. False: told to stop before that."""
    wait_s = 1.0
    while True:
        try:
            write()
        except LakeFull as e:
            _tell_full(e)
            if stop.wait(wait_s):
                return False
            wait_s = min(2 * wait_s, MAX_WAIT_S)
        else:
            return True


def _tell_full(error: LakeFull) -> None:
    logger().error(
        "lake_full",
        error=str(error),
        action="make room: the lake goes on by itself, nothing is lost",
    )


def _topics_same(consumer: LakeConsumer) -> bool | None:
    """None: Kafka can't tell now, so nothing read may be written yet."""
    try:
        return consumer.refresh_topics()
    except Unavailable as e:
        logger().warning("lake_waits_for_kafka", error=str(e))
        return None


def _flush(lake: Lake, consumer: LakeConsumer, marks: bool) -> None:
    added = {}
    for name, rows in consumer.rows.items():
        positions = consumer.positions(name)
        mark = marks or lake.commit_due(name, positions)
        if rows or mark:
            added[name] = lake.append(name, rows, positions, consumer.reject, mark)
    consumer.commit()
    if any(added.values()):
        logger().debug("lake_flushed", rows={n: c for n, c in added.items() if c})
