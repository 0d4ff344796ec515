"""The demo's report: independent counts on Kafka, in the lake and at the gateway."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clawstream.ops.lag import lag
from clawstream.query.sandbox import run_sql
from clawstream.runtime.chart import Line, Panel, draw
from clawstream.runtime.kafka import Cluster
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.records import ReadyBatch, Step, WeightVersion
from clawstream.schemas.settings import Settings

# (question, SQL)
QUESTIONS = (
    (
        "Reward by the version that sampled it",
        "select oldest_sync_index as sync_index, count(*) as trajectories, round(avg(reward), 3) "
        "as reward from trajectories "
        "where channel = 'train' and oldest_sync_index is not null group by 1 order by 1",
    ),
    (
        "Streamed and plain calls",
        "select streamed, finish_reason, count(*) as steps, round(avg(len(response_token_ids)), "
        "1) as tokens "
        "from steps group by all order by 1, 2",
    ),
    (
        "From weights back to the steps that made them",
        "select w.version_id, count(distinct g.group_id) as groups, "
        "round(w.metrics['reward_mean'], 3) as reward "
        "from weights w join groups g on g.batch_seq between w.first_batch_seq and "
        "w.last_batch_seq and g.channel = w.channel "
        "group by all order by max(w.sync_index) desc limit 5",
    ),
)


def count_topics(
    cluster: Cluster, settings: Settings, answered: Mapping[str, int]
) -> dict[str, Any]:
    """Count distinct ids on Kafka: steps by status, batches, and the batches of published versions.

    answered: trajectory key to the number of calls that the agent has an answer to.
    """
    topics = settings.kafka.topics
    decoder = Decoder(cluster, topics.schemas)
    status: dict[str, str] = {}
    recorded: Counter[str] = Counter()
    seen: set[str] = set()
    for partition in range(cluster.topics(topics.steps)[topics.steps]):
        for record in cluster.read_all(topics.steps, partition):
            if decoder.codec.type_name(record.value or b"") == "Step":
                step: Step = decoder.decode(record.value)
                if status.setdefault(step.step_id, step.status) == "ok":
                    recorded[step.trajectory_key] += step.step_id not in seen
                seen.add(step.step_id)
    emitted: dict[int, list[tuple[str, int]]] = {}
    for record in cluster.read_all(topics.ready_batches(settings.run_id, "train")):
        event = decoder.decode(record.value)
        if isinstance(event, ReadyBatch):
            emitted[event.batch_seq] = [(g.group_id, g.round) for g in event.groups]
    versions: list[WeightVersion] = [
        decoder.decode(r.value) for r in cluster.read_all(topics.weights)
    ]
    trained = surviving_batches(versions)
    name = "logp_max_abs_diff_same_version"
    differences = [v.metrics[name] for v in versions if name in v.metrics]
    counts = Counter(status.values())
    groups = [g for seq in trained for g in emitted.get(seq, [])]
    return {
        "steps_on_kafka": counts["ok"],
        "steps_aborted": counts["aborted"] + counts["error"],
        "batches_emitted": len(emitted),
        "batches_trained": len(trained),
        "groups_trained": len(groups),
        "groups_trained_twice": len(groups) - len(set(groups)),
        "answered_but_missing": sum(max(0, n - recorded[key]) for key, n in answered.items()),
        "versions_published": len(versions),
        "logp_max_abs_diff": max(differences, default=None),
    }


def surviving_batches(versions: Sequence[WeightVersion]) -> list[int]:
    """Return the batch_seq of each batch along the chain of parents of the newest version.

    versions: In log order; the last one is the newest, for any sync index.
    """
    by_id = {v.version_id: v for v in versions}
    at = versions[-1] if versions else None
    out: list[int] = []
    while at is not None:
        if at.first_batch_seq is not None and at.last_batch_seq is not None:
            out.extend(range(at.first_batch_seq, at.last_batch_seq + 1))
        at = by_id.get(at.parent_version) if at.parent_version else None
    return out


def final_lag(cluster: Cluster, settings: Settings) -> dict[str, int]:
    """Return the number of unread records of each consumer group."""
    total: Counter[str] = Counter()
    for row in lag(cluster, settings):
        total[row.group] += row.records or 0
    return dict(total)


def ask_lake(
    settings: Settings,
) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (counts, reward curve, answers to QUESTIONS) from the Delta tables."""

    def rows(query: str) -> list[dict[str, Any]]:
        return json.loads(run_sql(settings, query, "json"))  # type: ignore[no-any-return]

    counts: dict[str, Any] = {
        f"steps_{r['status']}": r["n"]
        for r in rows("select status, count(*) as n from steps group by 1")
    }
    counts["duplicates"] = rows("select count(*) - count(distinct step_id) as n from steps")[0]["n"]
    drift = rows(
        "select drift, cut, count(*) as n from (select s.drift, p.finish_reason = 'length' as "
        "cut from "
        "(select trajectory_id, unnest(steps) as s from trajectories_raw) join "
        "(select trajectory_id as tid, unnest(steps) as p from trajectories_raw) on tid = "
        "trajectory_id and p.index = s.index - 1) "
        "group by all"
    )
    drifted = [r for r in drift if r["drift"] != "clean"]
    counts["second_turns"] = sum(r["n"] for r in drift)
    counts["drift_after_stop"] = sum(r["n"] for r in drifted if not r["cut"])
    counts["drift_after_length"] = sum(r["n"] for r in drifted if r["cut"])
    asked = [(question, query, rows(query)) for question, query in QUESTIONS]
    return counts, asked[0][2], [{"question": q, "sql": s, "rows": r} for q, s, r in asked]


def draw_curve(
    path: Path, curve: Sequence[Mapping[str, Any]], before: float, after: float, last_version: int
) -> None:
    """Draw the reward curve as a PNG: mean reward of training trajectories by sampling version."""
    trained = [(row["sync_index"], row["reward"]) for row in curve if row["reward"] is not None]
    held_out = [(0, before), (last_version, after)]
    lines = (
        Line("training tasks, mean reward", trained),
        Line("held-out tasks, share correct (T = 1)", held_out, dots=True),
    )
    panel = Panel("reward", lines, limits=(0, 1.02))
    draw(path, [panel], "weight version that sampled the trajectory")


def install_seconds() -> int | None:
    """Return the duration of `make install`, if it was recorded."""
    path = Path(".venv/install-seconds")
    return int(path.read_text()) if path.exists() else None
