"""Read the committed offsets of all tables, for `status --positions` and the writer's start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from clawstream.runtime.kafka import Cluster
from clawstream.runtime.topics.positions import StoredPosition
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import Topics
from clawstream.stream_jobs.errors import LakeDamaged
from clawstream.stream_jobs.lake.dedupe import TopicIdPartition
from clawstream.stream_jobs.lake.delta.log import read_committed_offsets
from clawstream.stream_jobs.lake.delta.table import LakeMissing, open_table, table_damage
from clawstream.stream_jobs.lake.tables.catalog import catalog, tables_of


def positions(settings: Settings, cluster: Cluster) -> list[StoredPosition]:
    """Return the committed offset of each table and partition; for a damaged table, its damage."""
    topics = settings.kafka.topics
    there = [t for t in cluster.topics() if tables_of(topics, t)]
    names = {topic_id: topic for topic, topic_id in cluster.topic_ids(there).items()}
    found = []
    for table in catalog():
        damage = _damage(settings, table)
        if damage is not None:
            found.append(
                StoredPosition("lake", f"table {table}", _former(topics, table), None, 0, 0, damage)
            )
            continue
        for (topic_id, partition), offset in sorted(
            read_committed_offsets(settings.lake_uri, table, settings.lake.storage_options).items()
        ):
            topic = names.get(topic_id) or _former(topics, table)
            found.append(
                StoredPosition("lake", f"table {table}", topic, topic_id, partition, offset)
            )
    return found


def offsets_in_lake(settings: Settings, cluster: Cluster) -> dict[tuple[str, int], int]:
    """Return for each (topic, partition) the offset below which all its tables have every record.

    Omits partitions for which any table has no committed offset.
    """
    partitions = {t: n for t, n in cluster.topics().items() if tables_of(settings.kafka.topics, t)}
    committed = {name: _committed_offsets(settings, name) for name in catalog()}
    found = {}
    for topic, topic_id in cluster.topic_ids(sorted(partitions)).items():
        tables = tables_of(settings.kafka.topics, topic)
        for partition in range(partitions[topic]):
            known = [
                offset
                for table in tables
                if (offset := committed[table].get((topic_id, partition))) is not None
            ]
            if len(known) == len(tables):
                found[topic, partition] = min(known)
    return found


def _committed_offsets(settings: Settings, table: str) -> dict[TopicIdPartition, int]:
    """Return the offsets of a table; none for a damaged one, which may reread records."""
    try:
        return read_committed_offsets(settings.lake_uri, table, settings.lake.storage_options)
    except LakeDamaged:
        return {}


def _damage(settings: Settings, table: str) -> str | None:
    """Return why a table cannot be read, judged by its log and the sizes of its files."""
    options = settings.lake.storage_options
    try:
        damage = table_damage(open_table(settings.lake_uri, table, options), options, whole=False)
    except LakeDamaged as e:
        return str(e)
    except LakeMissing:
        return None
    return None if damage is None else str(LakeDamaged(table, damage))


def _former(topics: Topics, table: str) -> str:
    """Return the name, or a pattern with `*`, of the topics that feed a table.

    For positions of a deleted topic, of which the lake has only the id.
    """
    fixed = [spec.name for spec in topics.specs(1, -1) if table in tables_of(topics, spec.name)]
    batches = table in tables_of(topics, topics.ready_batches("any", "train"))
    if len(fixed) == 1 and not batches:
        return fixed[0]
    return f"{topics.prefix}.*" if fixed else f"{topics.ready_batches_prefix}*"


def recreated_topics(
    stored: Iterable[StoredPosition], topic_ids: Mapping[str, str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield topics with stored positions of former topic ids only, and those ids."""
    known: dict[str, set[str]] = {}
    for p in stored:
        known.setdefault(p.topic, set()).add(p.topic_id or "")
    return (
        (t, sorted(ids))
        for t, ids in sorted(known.items())
        if t in topic_ids and topic_ids[t] not in ids
    )
