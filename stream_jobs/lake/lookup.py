"""Look up records in the lake by id, so that a late sender does not send a second copy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from clawstream.runtime.kafka import Cluster
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.lake.delta.log import read_committed_offsets
from clawstream.stream_jobs.lake.delta.table import LakeError, LakeMissing, dataset, open_table
from clawstream.stream_jobs.lake.keys import existing_keys
from clawstream.stream_jobs.lake.tables.catalog import catalog, tables_of
from clawstream.stream_jobs.lake.tables.table import Table

TABLES = ("steps", "session_events", "rewards", "curation", "dead_letters")
"""Tables of the records that gateways write and whose key identifies the record."""


class LakeBehind(LakeError):
    """The lake lags too far behind to tell which records it will have. Wait, then try again."""


def check_not_behind(settings: Settings, cluster: Cluster, topic: str) -> None:
    """Check that the unread part of a topic fits into half of the dedupe window.

    Only then does the lake drop the second copy of a record that it has not read yet. Uses the
    committed offsets of the tables: another lake on this Kafka may commit to the same group.

    Raises:
        LakeBehind: it does not fit.
    """
    topic_id = cluster.topic_id(topic)
    ends = cluster.watermarks(topic)
    behind = 0
    for table in tables_of(settings.kafka.topics, topic):
        stored = read_committed_offsets(settings.lake_uri, table, settings.lake.storage_options)
        committed = {p: offset for (t, p), offset in stored.items() if t == topic_id}
        behind = max(
            behind, sum(end - max(low, committed.get(p, 0)) for p, (low, end) in ends.items())
        )
    if behind > settings.lake.dedupe_window // 2:
        raise LakeBehind(
            f"the lake at {settings.lake_uri} is {behind} records behind on {topic}, "
            f"more than half of lake.dedupe_window={settings.lake.dedupe_window}: "
            "start `clawstream lake`, wait, try again"
        )


def in_lake(settings: Settings, events: Sequence[Any]) -> list[bool]:
    """Return for each record whether the lake has it; False for records without an id."""
    wanted: dict[str, dict[tuple[Any, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, event in enumerate(events):
        for name in TABLES:
            table = catalog()[name]
            if type(event).__name__ in table.records:
                wanted[name][tuple(getattr(event, c) for c in table.key)].append(index)
    found = [False] * len(events)
    for name, keys in wanted.items():
        for key in _present(settings, catalog()[name], list(keys)):
            for index in keys.get(key, ()):
                found[index] = True
    return found


def _present(
    settings: Settings, table: Table, keys: Sequence[tuple[Any, ...]]
) -> list[tuple[Any, ...]]:
    try:
        delta = open_table(settings.lake_uri, table.name, settings.lake.storage_options)
    except LakeMissing:
        return []
    return list(existing_keys(dataset(delta, settings.lake.storage_options), table.key, keys))
