"""Curate the trajectories or steps that a SQL condition selects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from clawstream.inspector.marks.mark import Mark, Target
from clawstream.query.connection import rows_of
from clawstream.runtime.kafka import Cluster
from clawstream.runtime.topics.records import now_micros, publish_schemas
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.settings import Settings

TargetKind = Literal["trajectories", "steps"]
FLUSH_RECORDS = 10_000

_FROM = {
    "trajectories": "SELECT *, NULL::VARCHAR AS step_id FROM trajectories",
    "steps": """SELECT s.*, q.quality, q.assessed_quality FROM steps s
                LEFT JOIN step_quality q ON q.run_id = s.run_id AND q.step_id = s.step_id
                WHERE s.trajectory_id IS NOT NULL""",
}


def targets(sql: Any, of: TargetKind, where: str, run_id: str | None = None) -> list[Target]:
    """Return the targets that a condition selects, ordered by their ids.

    Args:
        sql: connection of `clawstream.query.connection.connect`.
        where: condition over the view `trajectories`, or over `steps` with `quality` and
            `assessed_quality`.

    Raises:
        SqlError: the condition is invalid.
    """
    query = f"""
        WITH found AS (
            SELECT DISTINCT run_id, trajectory_id, step_id FROM ({_FROM[of]}) WHERE ({where}\n)),
        done AS (
            SELECT DISTINCT run_id, unnest(trajectory_ids) AS trajectory_id
            FROM groups WHERE admitted)
        SELECT f.run_id, f.trajectory_id, f.step_id, d.trajectory_id IS NOT NULL
        FROM found f LEFT JOIN done d ON d.run_id = f.run_id AND d.trajectory_id = f.trajectory_id
        WHERE $run IS NULL OR f.run_id = $run ORDER BY ALL"""
    return [Target(*row) for row in rows_of(sql, query, {"run": run_id})]


def send(settings: Settings, cluster: Cluster, mark: Mark, found: Iterable[Target]) -> int:
    """Publish a mark for each target and return their number, once all are acknowledged.

    Raises:
        Unavailable: Kafka does not answer; some marks may be published.
    """
    topics, codec, sent, at = settings.kafka.topics, Codec(), 0, now_micros()
    publish_schemas(cluster, topics.schemas)
    producer = cluster.producer()
    for chunk in _chunks(list(found)):
        for target in chunk:
            for event in mark.events(target, at):
                producer.put(topics.rewards, event.trajectory_key.encode(), codec.encode(event))
        producer.flush()
        sent += len(chunk)
    producer.close()
    return sent


def _chunks(found: Sequence[Target]) -> Iterator[Sequence[Target]]:
    for at in range(0, len(found), FLUSH_RECORDS):
        yield found[at : at + FLUSH_RECORDS]
