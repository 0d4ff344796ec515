"""The lake's stored positions, for `clawstream doctor` and for the writer's start: the marks in the tables' Delta logs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from runtime.kafka import Cluster
from runtime.topics.positions import StoredPosition
from schemas.settings import Settings
from schemas.topics import Topics
from stream_jobs.errors import LakeDamaged
from stream_jobs.lake.dedupe import TopicIdPartition
from stream_jobs.lake.delta.log import read_committed_offsets
from stream_jobs.lake.delta.table import LakeMissing, open_table, table_damage
from stream_jobs.lake.tables.catalog import catalog, tables_of


def positions(settings: Settings, cluster: Cluster) -> list[StoredPosition]:
    """How far each table is in each partition it was ever fed from; of a damaged table, why that can't be read."""
    topics = settings.kafka.topics
    there = [t for t in cluster.topics() if tables_of(topics, t)]
    names = {topic_id: topic for topic, topic_id in cluster.topic_ids(there).items()}
    found = []
    for table in catalog():
        flaw = _flaw(settings, table)
        if flaw is not None:
            found.append(
                StoredPosition("lake", f"table {table}", _former(topics, table), None, 0, 0, flaw)
            )
            continue
        for (topic_id, partition), mark in sorted(
            read_committed_offsets(settings.lake_uri, table, settings.lake.storage_options).items()
        ):
            topic = names.get(topic_id) or _former(topics, table)
            found.append(StoredPosition("lake", f"table {table}", topic, topic_id, partition, mark))
    return found


def offsets_in_lake(settings: Settings, cluster: Cluster) -> dict[tuple[str, int], int]:
    """Of each partition the offset below which every table that it feeds has all; those that some table knows nothing of are left out."""
    there = {t: n for t, n in cluster.topics().items() if tables_of(settings.kafka.topics, t)}
    marks = {name: _committed_offsets(settings, name) for name in catalog()}
    found = {}
    for topic, topic_id in cluster.topic_ids(sorted(there)).items():
        tables = tables_of(settings.kafka.topics, topic)
        for partition in range(there[topic]):
            known = [
                m for table in tables if (m := marks[table].get((topic_id, partition))) is not None
            ]
            if len(known) == len(tables):
                found[topic, partition] = min(known)
    return found


def _committed_offsets(settings: Settings, table: str) -> dict[TopicIdPartition, int]:
    """The marks of a table; none of a damaged one, so that no record is given up that it may have to read again."""
    try:
        return read_committed_offsets(settings.lake_uri, table, settings.lake.storage_options)
    except LakeDamaged:
        return {}


def _flaw(settings: Settings, table: str) -> str | None:
    """Why a table can't be read, as far as its log and the sizes of its files tell."""
    options = settings.lake.storage_options
    try:
        wrong = table_damage(open_table(settings.lake_uri, table, options), options, whole=False)
    except LakeDamaged as e:
        return str(e)
    except LakeMissing:
        return None
    return None if wrong is None else str(LakeDamaged(table, wrong))


def _former(topics: Topics, table: str) -> str:
    """Name of a topic of which the lake knows only the id: what feeds the table, with `*` when that is not one topic."""
    fixed = [spec.name for spec in topics.specs(1, -1) if table in tables_of(topics, spec.name)]
    batches = table in tables_of(topics, topics.ready_batches("any", "train"))
    if len(fixed) == 1 and not batches:
        return fixed[0]
    return f"{topics.prefix}.*" if fixed else f"{topics.ready_batches_prefix}*"


def recreated_topics(
    stored: Iterable[StoredPosition], topic_ids: Mapping[str, str]
) -> Iterator[tuple[str, list[str]]]:
    """Topics of which the lake has positions, but none of today's topic of that name; with the ids it knows."""
    known: dict[str, set[str]] = {}
    for p in stored:
        known.setdefault(p.topic, set()).add(p.topic_id or "")
    return (
        (t, sorted(ids))
        for t, ids in sorted(known.items())
        if t in topic_ids and topic_ids[t] not in ids
    )
