"""Select trajectories of the lake by an SQL condition, at pinned versions of all tables.

1. The versions of the tables are resolved once. Everything is read at these versions, so the lake
   may be written meanwhile.
2. One query applies the condition and keeps the columns of `Origin` for each trajectory, ordered by
   the time of closing: about 300 bytes of memory for each.
3. Steps and tokens are read for one chunk of trajectories at a time. Only files of the chunk's time
   are opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from operator import and_
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from clawstream.export.row import Origin
from clawstream.query.connection import connect, rows_of
from clawstream.schemas.records import Step, Tag, TrajectoryStep
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.lake.delta.table import dataset, open_table
from clawstream.stream_jobs.lake.tables.catalog import catalog
from clawstream.stream_jobs.lake.tables.row_events import events_of

CHUNK_TOKENS = 2_000_000
"""Prompt and response tokens of the steps in memory at once; a larger trajectory is alone."""
CHUNK_TRAJECTORIES = 256
_SKEW = timedelta(minutes=1)
"""Maximum difference of log times within one partition and of a trajectory's bounds."""
_ORIGIN = (
    "run_id", "trajectory_id", "group_id", "round", "channel", "outcome", "reward",
    "group_reward_mean", "group_reward_std", "group_rewards", "trainable", "quality", "tags",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedTrajectory:
    """A trajectory and its steps.

    Attributes:
        steps: without replies, which are in `recorded`.
        untrainable_steps: ids of steps that a curation excludes from training.
        recorded: step id to the recorded step; one that the lake lacks is absent.
    """

    origin: Origin
    steps: tuple[TrajectoryStep, ...]
    untrainable_steps: tuple[str, ...]
    recorded: Mapping[str, Step]


class Selection:
    """The trajectories that a condition selects. Use as a context manager.

    Args:
        settings: of the lake.
        versions: Delta version of each table; None or absent: the table is empty.
        where: SQL condition over the view `trajectories` with `group_reward_mean`,
            `group_reward_std`, `group_rewards` and `training_reward`; empty: all.

    Raises:
        SqlError: the condition is invalid.
        LakeMissing: there is no lake, or a version can't be read any more.
    """

    def __init__(
        self, settings: Settings, versions: Mapping[str, int | None], where: str = ""
    ) -> None:
        self._settings, self._versions = settings, versions
        self._connection = connect(settings, {name: versions.get(name) for name in catalog()})
        try:
            weighted = _WEIGHTED if "training_reward" in where.lower() else ""
            rows_of(self._connection, _CHOOSE.format(where=where or "true", weighted=weighted), {})
            ((self.count,),) = rows_of(self._connection, "SELECT count(*) FROM chosen", {})
        except BaseException:  # interrupted too: else the connection would stay open
            self._connection.close()
            raise

    def __enter__(self) -> Selection:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def keys(self) -> set[str]:
        """Return the trajectory keys."""
        return {k for (k,) in rows_of(self._connection, "SELECT trajectory_key FROM chosen", {})}

    def trajectories(self) -> Iterator[SelectedTrajectory]:
        """Yield the trajectories by the time of closing, then by run and id."""
        sizes = rows_of(self._connection, "SELECT ordinal, tokens FROM chosen ORDER BY ordinal", {})
        for first, last in chunks(sizes, CHUNK_TOKENS, CHUNK_TRAJECTORIES):
            yield from self._chunk(first, last)

    def _chunk(self, first: int, last: int) -> Iterator[SelectedTrajectory]:
        span = {"first": first, "last": last}
        ((begin, end),) = rows_of(self._connection, _BOUNDS, span)
        rows = rows_of(self._connection, _DETAILS, {**span, "begin": begin, "end": end})
        chosen = []
        for *scalars, metadata, steps, untrainable in rows:
            values = dict(zip(_ORIGIN, scalars, strict=True))
            values["tags"] = tuple(values["tags"] or ())
            origin = Origin(**values, metadata_json=metadata)
            chosen.append((origin, tuple(map(_step, steps or ())), tuple(untrainable or ())))
        wanted = {(origin.run_id, s.step_id) for origin, steps, _ in chosen for s in steps}
        recorded = self._recorded(wanted, begin, end)
        for origin, steps, untrainable in chosen:
            own = {
                s.step_id: found
                for s in steps
                if (found := recorded.get((origin.run_id, s.step_id))) is not None
            }
            yield SelectedTrajectory(
                origin=origin, steps=steps, untrainable_steps=untrainable, recorded=own
            )

    def _recorded(
        self, wanted: set[tuple[str, str]], begin: Any, end: Any
    ) -> dict[tuple[str, str], Step]:
        """Return steps by (run, step id). begin, end: log times of the trajectories, UTC."""
        version = self._versions.get("steps")
        if not wanted or version is None:
            return {}
        options = self._settings.lake.storage_options
        steps = dataset(open_table(self._settings.lake_uri, "steps", options, version), options)
        at = pc.field("kafka_timestamp")
        where = reduce(
            and_,
            (
                pc.field("run_id").isin(sorted({run for run, _ in wanted})),
                pc.field("step_id").isin(sorted(step for _, step in wanted)),
                at >= pa.scalar(begin - _SKEW, pa.timestamp("us", "UTC")),
                at <= pa.scalar(end + _SKEW, pa.timestamp("us", "UTC")),
            ),
        )
        found: dict[tuple[str, str], Step] = {}
        for step in events_of(Step, _read(steps, where)):
            found.setdefault((step.run_id, step.step_id), step)
        return found


def _read(rows: Any, where: Any) -> pa.Table:
    """Read rows with little read-ahead: a file may have many more rows than a chunk needs."""
    scanner = rows.scanner(filter=where, batch_size=256, batch_readahead=2, fragment_readahead=1)
    return scanner.to_table()


def chunks(
    sizes: Iterable[tuple[int, int]], tokens: int, trajectories: int
) -> Iterator[tuple[int, int]]:
    """Yield the first and last number of runs of trajectories within both limits.

    Args:
        sizes: (number, tokens) of each trajectory, in order.
        tokens: limit of a run in tokens; a larger trajectory is alone.
        trajectories: limit of a run in trajectories.
    """
    first = last = None
    held = used = 0
    for number, size in sizes:
        if (
            first is not None
            and last is not None
            and (used + size > tokens or held == trajectories)
        ):
            yield first, last
            first, held, used = None, 0, 0
        first = number if first is None else first
        last, held, used = number, held + 1, used + size
    if first is not None and last is not None:
        yield first, last


def trajectory_keys(settings: Settings, versions: Mapping[str, int | None], where: str) -> set[str]:
    """Return the keys of the trajectories that a condition selects. Raises as `Selection`."""
    with Selection(settings, versions, where) as selection:
        return selection.keys()


def _step(row: Mapping[str, Any]) -> TrajectoryStep:
    """Return a step of the table `trajectories`, which has no replies."""
    tags = tuple(Tag(name=t["name"], evidence=t["evidence"]) for t in row["tags"] or ())
    names = (
        "step_id", "index", "parent", "status", "finish_reason", "drift", "prompt_tokens",
        "response_tokens", "oldest_version", "newest_version", "trainable", "untrainable_reason",
        "offset", "logprobs_temperature", "tokenizer_fingerprint",
    )  # fmt: skip
    return TrajectoryStep(
        **{name: row[name] for name in names},
        tags=tags,
        marks=tuple(row["marks"] or ()),
        response_json=b"",
    )


_CHOOSE = """
    CREATE TEMP TABLE chosen AS
    WITH newest AS (
        SELECT * FROM trajectories
        QUALIFY row_number() OVER (
            PARTITION BY run_id, trajectory_id ORDER BY kafka_timestamp DESC) = 1
    ), grouped AS (
        SELECT *, avg(member_reward) OVER members AS group_reward_mean,
            stddev_pop(member_reward) OVER members AS group_reward_std,
            count(member_reward) OVER members AS group_rewards
        FROM (SELECT *, CASE WHEN outcome <> 'replaced' THEN reward END AS member_reward
            FROM newest)
        WINDOW members AS (PARTITION BY run_id, channel, group_id, round)
    )
    SELECT row_number() OVER (ORDER BY closed_at, run_id, trajectory_id) AS ordinal,
        run_id, trajectory_id, trajectory_key, group_id, round, channel, outcome, reward,
        group_reward_mean, group_reward_std, group_rewards, trainable, quality, tags, revision,
        kafka_topic_id, opened_at, closed_at,
        coalesce(list_sum([s.prompt_tokens + s.response_tokens FOR s IN step_details]), 0)::BIGINT
            AS tokens
    FROM grouped {weighted} WHERE ({where}
    )"""
"""Group statistics come before the condition, so that it does not change a group's baseline.

A replaced trajectory is no member of its group, although reward functions give it a reward.
"""
_WEIGHTED = """LEFT JOIN (
        SELECT run_id, trajectory_id, revision, kafka_topic_id, training_reward FROM readiness
    ) USING (run_id, trajectory_id, revision, kafka_topic_id)"""
"""Only for a condition that reads it: readiness is computed for all trajectories."""
_BOUNDS = """
    SELECT min(opened_at) AT TIME ZONE 'UTC', max(closed_at) AT TIME ZONE 'UTC' FROM chosen
    WHERE ordinal BETWEEN $first AND $last"""
_DETAILS = f"""
    WITH chunk AS (SELECT * FROM chosen WHERE ordinal BETWEEN $first AND $last),
    decided AS (
        SELECT c.kafka_topic_id, c.run_id, c.trajectory_id, c.payload_topic_id,
            [s.step_id FOR s IN c.steps IF NOT s.trainable] AS untrainable
        FROM candidates_raw c SEMI JOIN chunk k ON c.kafka_topic_id = k.kafka_topic_id
            AND c.run_id = k.run_id AND c.trajectory_id = k.trajectory_id
            AND c.revision = k.revision
        WHERE c.closed_at BETWEEN $begin AND $end
    ), payload AS (
        SELECT t.kafka_topic_id, t.run_id, t.trajectory_id,
            any_value(t.metadata_json) AS metadata_json,
            flatten(list(t.steps ORDER BY part)) AS steps
        FROM trajectories_raw t SEMI JOIN decided d ON t.kafka_topic_id = d.payload_topic_id
            AND t.run_id = d.run_id AND t.trajectory_id = d.trajectory_id
        WHERE t.closed_at BETWEEN $begin AND $end GROUP BY ALL
    )
    SELECT {", ".join(f"k.{name}" for name in _ORIGIN)}, p.metadata_json, p.steps, d.untrainable
    FROM chunk k JOIN decided d USING (kafka_topic_id, run_id, trajectory_id)
        LEFT JOIN payload p ON p.kafka_topic_id = d.payload_topic_id AND p.run_id = d.run_id
            AND p.trajectory_id = d.trajectory_id
    ORDER BY k.ordinal"""
