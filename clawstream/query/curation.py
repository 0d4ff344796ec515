"""Curation by query: trajectories or steps that SQL over the lake finds get a mark of a person's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from clawstream.query.connection import rows_of
from runtime.kafka import Cluster
from runtime.topics.records import now_micros, publish_schemas
from schemas.codec.single_object import Codec
from schemas.ids import is_unnamed, key_of_trajectory, new_event_id
from schemas.records import Curation
from schemas.settings import Settings
from stream_jobs.errors import StreamJobError

Of = Literal["trajectories", "steps"]
AT_ONCE = 10_000
TAGS_MAX = 32
NAME_CHARS = 200

_FROM = {
    "trajectories": "SELECT *, NULL::VARCHAR AS step_id FROM trajectories",
    "steps": """SELECT s.*, q.quality, q.assessed_quality FROM steps s
                LEFT JOIN step_quality q ON q.run_id = s.run_id AND q.step_id = s.step_id
                WHERE s.trajectory_id IS NOT NULL""",
}


class InvalidCurationMark(StreamJobError):
    """A mark that says nothing, or what it must not say. The message names the field."""


class Target(NamedTuple):
    """What is marked. step_id None: the whole trajectory. admitted: in a batch already, so a mark on it is late."""

    run_id: str
    trajectory_id: str
    step_id: str | None
    admitted: bool


@dataclass(frozen=True, slots=True)
class CurationMark:
    """What is said of each; None stays as it was. Raises InvalidCurationMark."""

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
            raise InvalidCurationMark("nothing to say: give a quality, trainable, a tag or a note")
        if self.quality is not None and not 0 <= self.quality <= 1:
            raise InvalidCurationMark(f"quality: {self.quality:g} is not in [0, 1]")
        if len(self.tags or ()) > TAGS_MAX or any(
            not 0 < len(tag) <= NAME_CHARS for tag in self.tags or ()
        ):
            raise InvalidCurationMark(
                f"tags: at most {TAGS_MAX}, each of 1 to {NAME_CHARS} characters"
            )

    def of(self, target: Target) -> Curation:
        """The record. Said again it counts again: the last mark holds."""
        key = key_of_trajectory(target.trajectory_id)
        return Curation(
            event_id=new_event_id(),
            run_id=target.run_id,
            trajectory_key=key,
            trajectory_id=target.trajectory_id if is_unnamed(key) else None,
            step_id=target.step_id,
            quality=self.quality,
            trainable=self.trainable,
            tags=self.tags,
            note=self.note,
            by=self.by,
            created_at=now_micros(),
        )


def targets(sql: Any, of: Of, where: str, run_id: str | None = None) -> list[Target]:
    """What the condition holds for, in order of their ids. sql: of `clawstream.query.connection.connect`. Raises SqlError.

    where: over the columns of the view `trajectories`, or of `steps` with `quality` and `assessed_quality`.
    """
    query = f"""
        WITH found AS (SELECT DISTINCT run_id, trajectory_id, step_id FROM ({_FROM[of]}) WHERE ({where}\n)),
        done AS (SELECT DISTINCT run_id, unnest(trajectory_ids) AS trajectory_id FROM groups WHERE admitted)
        SELECT f.run_id, f.trajectory_id, f.step_id, d.trajectory_id IS NOT NULL
        FROM found f LEFT JOIN done d ON d.run_id = f.run_id AND d.trajectory_id = f.trajectory_id
        WHERE $run IS NULL OR f.run_id = $run ORDER BY ALL"""
    return [Target(*row) for row in rows_of(sql, query, {"run": run_id})]


def send(settings: Settings, cluster: Cluster, mark: CurationMark, found: Iterable[Target]) -> int:
    """Put the mark on each; all are acknowledged when it returns. Returns how many. Raises Unavailable: then some may be there."""
    topics, codec, sent = settings.kafka.topics, Codec(), 0
    publish_schemas(cluster, topics.schemas)
    producer = cluster.producer()
    for some in _runs(list(found)):
        for target in some:
            record = mark.of(target)
            producer.put(topics.rewards, record.trajectory_key.encode(), codec.encode(record))
        producer.flush()
        sent += len(some)
    producer.close()
    return sent


def _runs(found: Sequence[Target]) -> Iterator[Sequence[Target]]:
    for at in range(0, len(found), AT_ONCE):
        yield found[at : at + AT_ONCE]
