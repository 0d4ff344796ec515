"""The overview of a run: totals, series and the funnel from call to gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from clawstream.inspector.queries.lake import Lake, Row

BUCKETS = 80
"""Points of a series over time."""
CURVE = 24
"""Points of the curve of a run in the list of runs."""
Axis = Literal["version", "time"]


class Stage(NamedTuple):
    """A stage of the funnel. losses: reason and calls that did not get here, most first."""

    name: str
    calls: int
    losses: list[tuple[str, int]]


def runs(lake: Lake) -> list[Row]:
    """Return all runs with totals and `curve`, the mean reward over time; the newest first."""
    found = lake.rows(
        f"""WITH closing AS (
            SELECT run_id, count(*) AS trajectories, avg(reward) AS reward,
                max(newest_sync_index) AS version, max(closed_at) AS closed_at
            FROM closed GROUP BY ALL
        ), calling AS (
            SELECT run_id, count(*) AS steps, max(kafka_timestamp) AS called_at
            FROM calls GROUP BY ALL
        ), batching AS (
            SELECT run_id, count(DISTINCT (channel, batch_seq)) AS batches
            FROM members WHERE admitted GROUP BY ALL
        ), span AS (
            SELECT run_id, epoch(min(closed_at)) AS first,
                greatest(epoch(max(closed_at)) - epoch(min(closed_at)), 1) AS length
            FROM closed GROUP BY ALL
        ), points AS (
            SELECT run_id, floor((epoch(closed_at) - first) / length * {CURVE - 1}) AS x,
                avg(reward) AS y
            FROM closed JOIN span USING (run_id) WHERE reward IS NOT NULL GROUP BY ALL
        ), curves AS (
            SELECT run_id, list((x, y) ORDER BY x) AS points FROM points GROUP BY ALL
        )
        SELECT * FROM calling FULL JOIN closing USING (run_id) LEFT JOIN batching USING (run_id)
            LEFT JOIN curves USING (run_id)
        ORDER BY coalesce(called_at, closed_at) DESC, run_id"""
    )
    return [run | {"curve": curve_of(run.pop("points") or ())} for run in found]


def curve_of(points: Sequence[tuple[float, float]]) -> list[float | None]:
    """Return `CURVE` values from (place, value), each as the distance from the lowest one."""
    values = {round(place): value for place, value in points}
    low = min(values.values(), default=0.0)
    return [values[place] - low if place in values else None for place in range(CURVE)]


def series(lake: Lake, run_id: str, axis: Axis, channel: str) -> dict[str, list[Any]]:
    """Return the series of a run's charts, by name; `x` is a sync index or a time in seconds."""
    parameters = {"run": run_id, "channel": channel}
    x = "oldest_sync_index" if axis == "version" else _BUCKET
    found = lake.rows(
        f"""WITH mine AS (
            SELECT * FROM closed WHERE run_id = $run AND channel = $channel
        ), span AS (
            SELECT epoch(min(closed_at)) AS first,
                greatest(epoch(max(closed_at)) - epoch(min(closed_at)), 1) AS length FROM mine
        )
        SELECT {x} AS x, avg(reward) AS reward, avg(trainable_tokens) AS tokens,
            avg(steps) AS steps, count(*) AS trajectories,
            count(*) * 60 / greatest(epoch(max(closed_at)) - epoch(min(closed_at)),
                any_value(length) / {BUCKETS}) AS per_minute,
            avg(staleness) AS staleness
        FROM mine CROSS JOIN span LEFT JOIN (
            SELECT run_id, trajectory_id, any_value(staleness) AS staleness FROM members
            WHERE admitted AND run_id = $run GROUP BY ALL
        ) USING (run_id, trajectory_id)
        WHERE {x} IS NOT NULL GROUP BY 1 ORDER BY 1""",
        parameters,
    )
    return {
        name: [row[name] for row in found]
        for name in ("x", "reward", "tokens", "steps", "staleness", "per_minute")
    }


_BUCKET = f"first + floor((epoch(closed_at) - first) / length * {BUCKETS}) * length / {BUCKETS}"


def totals(lake: Lake, run_id: str) -> list[Row]:
    """Return the totals of each channel of a run."""
    return lake.rows(
        """SELECT channel, count(*) AS trajectories, count(DISTINCT group_id) AS groups,
            avg(reward) AS reward, avg(steps) AS steps, avg(trainable_tokens) AS tokens,
            sum(trainable_tokens)::BIGINT AS all_tokens, count(reward) AS rewarded,
            bool_or(policy_version IS NOT NULL OR batch_seq IS NOT NULL) AS has_policy
        FROM closed WHERE run_id = $run GROUP BY 1 ORDER BY 1""",
        {"run": run_id},
    )


def reward_fall(lake: Lake, run_id: str) -> float | None:
    """Return the metric `reward_fall` of the newest version of a run."""
    found = lake.rows(
        """SELECT metrics['reward_fall'] AS fall FROM lineage_versions WHERE run_id = $run
        ORDER BY published_at DESC LIMIT 1""",
        {"run": run_id},
    )
    return found[0]["fall"] if found else None


def funnel(lake: Lake, run_id: str) -> list[Stage]:
    """Return how far the calls of a run have come, with the reason of each loss.

    The unit is the recorded step (a sampled choice); a failed call counts as one.
    """
    parameters = {"run": run_id}
    failed = _reasons(
        lake.rows(
            "SELECT reason, count(*) AS steps FROM errors WHERE run_id = $run GROUP BY 1",
            parameters,
        )
    )
    recorded = lake.rows("SELECT count(*) AS n FROM calls WHERE run_id = $run", parameters)[0]["n"]
    rows = _reasons(lake.rows(_FATES, parameters), ("stage", "reason"))
    inside = sum(n for _, n in rows)
    lost = {
        stage: [(reason, n) for (at, reason), n in rows if at == stage]
        for stage in ("rewarded", "admitted", "trained")
    }
    stages = [
        Stage("called", recorded + sum(n for _, n in failed), []),
        Stage("recorded", recorded, failed),
        Stage(
            "assembled",
            min(inside, recorded),
            [("still open, late or repeated", recorded - inside)] if recorded > inside else [],
        ),
    ]
    left = stages[-1].calls
    for name, losses in lost.items():
        left -= sum(n for _, n in losses)
        stages.append(Stage(name, max(left, 0), losses))
    return stages


def list_of(stage: str, reason: str) -> str | None:
    """Return the list that a reason of a loss selects from; None: no record has it."""
    if stage == "recorded":
        return "/calls"
    is_filter = stage in ("rewarded", "admitted") and reason not in (_UNREWARDED, _WAITS)
    return "/trajectories" if is_filter else None


def _reasons(rows: list[Row], names: tuple[str, ...] = ("reason",)) -> list[tuple[Any, int]]:
    """Return (reason, steps), the most frequent first."""
    found = [
        (r[names[0]] if len(names) == 1 else tuple(r[n] for n in names), int(r["steps"]))
        for r in rows
    ]
    return sorted(found, key=lambda pair: -pair[1])


_UNREWARDED, _WAITS = "no reward yet", "waits for its group"
_FATES = f"""
    WITH decided AS (
        SELECT run_id, trajectory_id, max_by(reason, kafka_timestamp) AS refused
        FROM members WHERE run_id = $run GROUP BY ALL
    ), kept AS (
        SELECT trajectory_id, max_by(trained_steps, v.sync_index) AS trained_steps,
            max_by(untrained, v.sync_index) AS untrained
        FROM trained t JOIN lineage_versions v ON v.version_id = t.version_id AND v.surviving
        WHERE t.run_id = $run GROUP BY trajectory_id
    ), fates AS (
        SELECT c.steps, k.trained_steps, k.untrained, CASE
            WHEN k.trajectory_id IS NOT NULL THEN NULL
            WHEN c.batch_seq IS NOT NULL THEN 'trained'
            WHEN c.reward IS NOT NULL THEN 'admitted'
            ELSE 'rewarded' END AS lost_at,
            CASE lost_at
            WHEN 'rewarded' THEN coalesce(c.unrewarded_reason, '{_UNREWARDED}')
            WHEN 'admitted' THEN CASE WHEN d.trajectory_id IS NULL
                THEN coalesce(c.reason, '{_WAITS}') ELSE coalesce(d.refused, 'refused') END
            ELSE CASE WHEN c.channel <> 'train' THEN 'channel ' || c.channel || ' is not trained'
                ELSE 'batch not trained yet' END
            END AS reason
        FROM closed c LEFT JOIN decided d USING (run_id, trajectory_id)
            LEFT JOIN kept k ON k.trajectory_id = c.trajectory_id
        WHERE c.run_id = $run
    )
    SELECT lost_at AS stage, reason, sum(steps) AS steps FROM fates WHERE lost_at IS NOT NULL
    GROUP BY ALL
    UNION ALL
    SELECT 'trained', reason, count(*)
    FROM (SELECT unnest(untrained).reason AS reason FROM fates WHERE lost_at IS NULL) GROUP BY ALL
    UNION ALL
    SELECT 'kept', '', sum(trained_steps) FROM fates WHERE lost_at IS NULL
    HAVING sum(trained_steps) > 0"""
