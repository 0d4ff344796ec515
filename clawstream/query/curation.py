"""Curate the trajectories or steps that a SQL condition selects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from clawstream.query.connection import rows_of
from runtime.kafka import Cluster
from runtime.topics.records import now_micros, publish_schemas
from schemas.codec.single_object import Codec
from schemas.ids import is_gateway_assigned, key_of_trajectory, new_event_id
from schemas.records import Curation
from schemas.settings import Settings
from stream_jobs.errors import StreamJobError

TargetKind = Literal["trajectories", "steps"]
FLUSH_RECORDS = 10_000
TAGS_MAX = 32
NAME_CHARS = 200

_FROM = {
    "trajectories": "SELECT *, NULL::VARCHAR AS step_id FROM trajectories",
    "steps": """SELECT s.*, q.quality, q.assessed_quality FROM steps s
                LEFT JOIN step_quality q ON q.run_id = s.run_id AND q.step_id = s.step_id
                WHERE s.trajectory_id IS NOT NULL""",
}


class InvalidCurationMark(StreamJobError):
    """A curation mark is empty or invalid. The message names the field."""


class Target(NamedTuple):
    """The target of a mark. step_id: None for the whole trajectory.

    admitted: the trajectory is in a batch already, so a mark comes too late for training.
    """

    run_id: str
    trajectory_id: str
    step_id: str | None
    admitted: bool


@dataclass(frozen=True, slots=True)
class CurationMark:
    """Values to set; None keeps a value. Raises InvalidCurationMark."""

    by: str
    quality: float | None = None
    trainable: bool | None = None
    tags: tuple[str, ...] | None = None
    note: str | None = None

    def __post_init__(self) -> None:
        if (
            self.quality is None
            and self.trainable is None
            and self.tags is None
            and self.note is None
        ):
            raise InvalidCurationMark(
                "the mark is empty: give a quality, trainable, a tag or a note"
            )
        if self.quality is not None and not 0 <= self.quality <= 1:
            raise InvalidCurationMark(f"quality: {self.quality:g} is not in [0, 1]")
        if len(self.tags or ()) > TAGS_MAX or any(
            not 0 < len(tag) <= NAME_CHARS for tag in self.tags or ()
        ):
            raise InvalidCurationMark(
                f"tags: at most {TAGS_MAX}, each of 1 to {NAME_CHARS} characters"
            )

    def of(self, target: Target) -> Curation:
        """Return the record for a target. Each record counts: the last mark holds."""
        key = key_of_trajectory(target.trajectory_id)
        return Curation(
            event_id=new_event_id(),
            run_id=target.run_id,
            trajectory_key=key,
            trajectory_id=target.trajectory_id if is_gateway_assigned(key) else None,
            step_id=target.step_id,
            quality=self.quality,
            trainable=self.trainable,
            tags=self.tags,
            note=self.note,
            by=self.by,
            created_at=now_micros(),
        )


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


def send(settings: Settings, cluster: Cluster, mark: CurationMark, found: Iterable[Target]) -> int:
    """Publish a mark for each target and return their number, once all are acknowledged.

    Raises:
        Unavailable: Kafka does not answer; some marks may be published.
    """
    topics, codec, sent = settings.kafka.topics, Codec(), 0
    publish_schemas(cluster, topics.schemas)
    producer = cluster.producer()
    for chunk in _chunks(list(found)):
        for target in chunk:
            record = mark.of(target)
            producer.put(topics.rewards, record.trajectory_key.encode(), codec.encode(record))
        producer.flush()
        sent += len(chunk)
    producer.close()
    return sent


def _chunks(found: Sequence[Target]) -> Iterator[Sequence[Target]]:
    for at in range(0, len(found), FLUSH_RECORDS):
        yield found[at : at + FLUSH_RECORDS]
