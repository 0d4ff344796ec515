"""What the lake remembers of an installation over time: calls, trajectories, groups, versions.

Counts are by log time, in buckets; they survive a restart of every process.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from threading import Lock
from typing import Any, NamedTuple

from clawstream.inspector.queries.lake import Lake, Row

CHARTS = ("calls", "trajectories", "groups", "versions", "dead_letters")


FRESH_S = 10.0
"""Pages that look within this time share an answer."""
KEPT = 32

Counts = dict[str, tuple[list[int], dict[str, list[int]]]]
"""Name of a chart to the starts of its buckets in seconds, and name to the count in each."""


class Newest(NamedTuple):
    """The newest weight version of all runs. created_s: Seconds since the epoch."""

    version_id: str
    created_s: float


class Activity:
    """The counts of a lake. Thread-safe: all pages together ask the lake once in `FRESH_S`."""

    def __init__(self, lake: Lake) -> None:
        self._lake, self._lock = lake, Lock()
        self._kept: OrderedDict[tuple[int, int, int], tuple[float, Counts]] = OrderedDict()

    def __call__(self, from_s: int, to_s: int, bucket_s: int) -> Counts:
        """Return what `activity` does; at most `FRESH_S` old."""
        key = from_s, to_s, bucket_s
        with self._lock:
            made_s, counts = self._kept.pop(key, (float("-inf"), {}))
            if time.monotonic() - made_s >= FRESH_S:
                made_s, counts = time.monotonic(), activity(self._lake, *key)
            self._kept[key] = made_s, counts
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return counts


def activity(lake: Lake, from_s: int, to_s: int, bucket_s: int) -> Counts:
    """Return the counts of all charts.

    Args:
        lake: Of all runs.
        from_s: First second, since the epoch; its bucket is counted as a whole.
        to_s: The second after the last one.
        bucket_s: Length of a bucket; buckets begin at its multiples.
    """
    first_s = from_s // bucket_s * bucket_s
    x = list(range(first_s, to_s, bucket_s))
    found = lake.rows(_COUNTS, {"first": first_s, "to": to_s, "bucket": bucket_s})
    charts: dict[str, dict[str, list[int]]] = {name: {} for name in CHARTS}
    for row in found:
        counts = charts[row["chart"]].setdefault(row["name"], [0] * len(x))
        counts[row["place"]] = row["n"]
    return {name: (x, series) for name, series in charts.items()}


def open_dead_letters(lake: Lake) -> int:
    """Return the number of records with a dead letter that nobody has resolved."""
    found = lake.rows(
        """SELECT count(*) AS n FROM (SELECT DISTINCT topic_id, "partition", "offset" FROM letters)
        ANTI JOIN dead_letters_resolved USING (topic_id, "partition", "offset")"""
    )
    return int(found[0]["n"])


def newest_letters(lake: Lake, limit: int) -> list[Row]:
    """Return the newest open dead letters, each with the processes that wrote it."""
    return lake.rows(
        f"""SELECT topic, "partition", "offset", list_sort(list(DISTINCT process)) AS processes,
            any_value(reason) AS reason, any_value(detail) AS detail, max(kafka_timestamp) AS "at"
        FROM letters ANTI JOIN dead_letters_resolved USING (topic_id, "partition", "offset")
        GROUP BY topic, topic_id, "partition", "offset" ORDER BY "at" DESC LIMIT {limit}"""
    )


def newest_version(lake: Lake) -> Newest | None:
    """Return the newest weight version."""
    found: list[dict[str, Any]] = lake.rows(
        """SELECT version_id, epoch(created_at) AS created_s FROM published
        ORDER BY kafka_timestamp DESC LIMIT 1"""
    )
    return Newest(**found[0]) if found else None


def _counted(chart: str, name: str, count: str, source: str, at: str = "kafka_timestamp") -> str:
    """Return SQL that counts rows of a source in buckets.

    name: SQL of the name of a series. source: Relation, with its condition.
    """
    return f"""SELECT '{chart}' AS chart, {name} AS name, {count} AS n,
            floor((epoch({at}) - $first) / $bucket)::INTEGER AS place
        FROM {source} {"AND" if " WHERE " in source else "WHERE"}
            epoch({at}) >= $first AND epoch({at}) < $to
        GROUP BY ALL"""


_COUNTS = "\nUNION ALL\n".join(
    (
        # A step's id is the id of its call, a point and the number of the choice.
        _counted("calls", "'calls'", "count(DISTINCT rtrim(step_id, '0123456789'))", "calls"),
        _counted("calls", "'steps'", "count(*)", "calls"),
        _counted("calls", "'failed calls'", "count(*)", "errors"),
        _counted("trajectories", "outcome", "count(*)", "closed", "closed_at"),
        _counted(
            "groups",
            "coalesce('refused: ' || reason, 'admitted')",
            "count(DISTINCT (run_id, channel, group_id, round))",
            "members WHERE (admitted OR whole_group)",
        ),
        _counted("versions", "'versions'", "count(*)", "published"),
        _counted(
            "dead_letters", "reason", 'count(DISTINCT (topic_id, "partition", "offset"))', "letters"
        ),
    )
)
