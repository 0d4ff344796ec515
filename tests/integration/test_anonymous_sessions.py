"""Anonymous sessions and retries on a real Kafka with workers that are killed.

One test has an owner that must read all records again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.assemble import LIMITS, chat_step, reward, session, step
from support.jobs import Eventually, Jobs, running

from clawstream.runtime.kafka import Cluster
from clawstream.runtime.topics.records import Decoder, create_topics
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.ids import anonymous_session_key
from clawstream.schemas.records import (
    Candidate,
    DeadLetter,
    SessionEvent,
    Step,
    StepMark,
    Trajectory,
)
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import partition_of
from clawstream.stream_jobs.assemble.context import PartitionContext, TopicSnapshot
from clawstream.stream_jobs.assemble.partition import PartitionProcessor
from clawstream.stream_jobs.assemble.recovery import take_over
from clawstream.stream_jobs.assemble.state.trajectories import STEPS

TASK = [
    {"role": "system", "content": "You are an agent."},
    {"role": "user", "content": "Fix the bug."},
]
ANONYMOUS = anonymous_session_key(b"api key", b"Fix the bug.")


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def rollout(number: int, turns: int = 3) -> list[Any]:
    """Return the calls of an agent that names no trajectory; the first is aborted and retried."""
    history: list[dict[str, Any]] = list(TASK)
    steps: list[Any] = [chat_step(100 * number + 99, TASK, said("Hm"), ANONYMOUS, status="aborted")]
    for turn in range(turns):
        reply = said(f"rollout {number}, turn {turn}")
        steps.append(chat_step(100 * number + turn, history, reply, ANONYMOUS))
        history += [reply, {"role": "user", "content": "go on"}]
    return steps


def test_rollouts_in_an_anonymous_session_come_out_apart_whatever_dies(
    settings: Settings, cluster: Cluster, tmp_path: Path, eventually: Eventually
) -> None:
    with running(
        settings, cluster, tmp_path, anonymous_inactivity_s=600.0, snapshot_min_bytes=2000
    ) as jobs:
        rows = [rollout(i) for i in range(1, 7)]
        for at in range(4):
            before = written(jobs)
            jobs.start()
            # An aborted first call and its retry are adjacent, so that the retry's target is
            # certain.
            jobs.put(*[s for row in rows for s in (row[:2] if at == 0 else row[at + 1 : at + 2])])
            jobs.put(rows[0][1])  # a duplicate
            if at == 3:
                jobs.put(
                    replace(
                        reward(ANONYMOUS, 0.25), trajectory_id=ANONYMOUS, step_id=rows[0][3].step_id
                    )
                )
                jobs.put(replace(reward(ANONYMOUS, 0.5), step_id=rows[1][2].step_id))
                jobs.put(session(ANONYMOUS, "failed", step_id=rows[2][1].step_id))
            jobs.producer.flush()
            eventually(lambda n=before: written(jobs) > n + 4, 180)
            jobs.workers[-1].kill()
            jobs.workers[-1].wait()
        # Killed workers may have left the last calls unread. With a timeout of seconds, these calls
        # would come too late for their trajectories.
        worker = jobs.start()
        eventually(lambda: all_read(jobs), 180)
        worker.kill()
        worker.wait()
        jobs.start(anonymous_inactivity_s=3.0)
        ids = {f"{ANONYMOUS}~{row[0].call_id.rpartition('~')[2]}": row for row in rows}
        eventually(lambda: jobs.candidates().keys() == ids.keys(), 180)
        eventually(lambda: sum(len(c.rewards) for c in jobs.candidates().values()) == 2, 180)

        whole = {t.trajectory_id: t for _, t in jobs.records(jobs.topics.trajectories, Trajectory)}
        for trajectory_id, row in ids.items():
            t, c = whole[trajectory_id], jobs.candidates()[trajectory_id]
            assert [s.step_id for s in t.steps] == [s.step_id for s in row]
            assert [s.marks for s in t.steps] == [("retried",), (), (), ()]
            assert [s.parent for s in t.steps] == [None, None, 1, 2]
            assert (t.trajectory_key, t.group_id) == (ANONYMOUS, trajectory_id)
            assert (c.trajectory_key, [s.trainable for s in c.steps]) == (
                ANONYMOUS,
                [False, True, True, True],
            )
        outcomes = [jobs.candidates()[t].outcome for t in ids]
        assert outcomes == [
            "completed",
            "completed",
            "failed",
            "completed",
            "completed",
            "completed",
        ]
        rewards = [jobs.candidates()[t].rewards for t in ids]
        assert [(r.value, r.step_id) for r in rewards[0]] == [(0.25, None)]
        assert [(r.value, r.step_id) for r in rewards[1]] == [(0.5, rows[1][2].step_id)]
        for record, _ in jobs.records(jobs.topics.trajectories, Trajectory, StepMark):
            assert record.key == ANONYMOUS.encode()
        assert not jobs.records(jobs.topics.dead_letters, DeadLetter)


def all_read(jobs: Jobs) -> bool:
    """Return whether the workers have read everything except the last ticks on `claw.steps`."""
    committed = jobs.cluster.committed(f"{jobs.topics.prefix}-assemble")
    calls = [r for r, _ in jobs.records(jobs.topics.steps, Step, SessionEvent)]
    return all(committed.get((r.topic, r.partition), 0) > r.offset for r in calls)


def written(jobs: Jobs) -> int:
    return sum(end for _, end in jobs.cluster.watermarks(jobs.topics.assembly).values())


class Hurried(Cluster):
    """A cluster whose retention deletes records right after a request for a partition's start."""

    strikes_at: tuple[str, int, int] | None = None

    def watermarks(
        self, topic: str, partitions: Iterable[int] | None = None, isolation: str = "read_committed"
    ) -> dict[int, tuple[int, int]]:
        found = super().watermarks(topic, partitions, isolation)
        if self.strikes_at is not None and self.strikes_at[0] == topic:
            (_, partition, offset), self.strikes_at = self.strikes_at, None
            self.delete_records(topic, partition, offset)
        return found


@pytest.fixture
def hurried(settings: Settings) -> Hurried:
    return Hurried(settings.bootstrap_servers)


async def owner_of(settings: Settings, cluster: Cluster, partition: int) -> PartitionProcessor:
    """Return an owner in this process that keeps no payload and sends one trajectory at a time."""
    topics = settings.kafka.topics
    shared = PartitionContext(
        cluster, cluster.producer(), Decoder(cluster, topics.schemas), topics,
        replace(LIMITS, trajectory_timeout=10**9), "0", cache_bytes=0, snapshot_min_bytes=1 << 20,
        slice_bytes=1,
    )  # fmt: skip
    ids = cluster.topic_ids([topics.steps, topics.rewards, topics.assembly, topics.trajectories])
    ends = {
        t: cluster.watermarks(t, [partition])[partition] for t in (topics.steps, topics.rewards)
    }
    return await take_over(partition, shared, TopicSnapshot(ids, ends))


def test_a_wave_of_closings_is_read_slice_by_slice_and_what_retention_took_meanwhile_is_lost(
    settings: Settings, hurried: Hurried
) -> None:
    create_topics(hurried, settings)
    topics, codec, producer = settings.kafka.topics, Codec(), hurried.producer()
    partition = partition_of(b"t0", 4)
    keys = [k for i in range(60) if partition_of((k := f"t{i}").encode(), 4) == partition][:6]
    events = [step(k, n, [1] * (n + 1) + [2] * n, [2]) for k in keys for n in range(2)]
    events += [session(k, "completed") for k in keys]
    for event in events:
        producer.put(topics.steps, event.trajectory_key.encode(), codec.encode(event))
    producer.flush()
    records = list(hurried.read_all(topics.steps, partition))

    async def own() -> None:
        owner = await owner_of(settings, hurried, partition)
        hurried.strikes_at = (topics.steps, partition, 3)  # while the first slice is read
        await owner.process((STEPS, r) for r in records)
        await owner.release()
        again = await owner_of(settings, hurried, partition)
        await again.release()

    asyncio.run(own())
    found = [codec.decode(r.value) for r in hurried.read_all(topics.trajectories, partition)]
    assert [(t.trajectory_id, t.outcome) for t in found] == [
        (k, "lost" if k in keys[:2] else "completed") for k in keys
    ]
    whole = [t for t in found if t.outcome == "completed"]
    assert all([len(t.steps), len(t.segments)] == [2, 4] for t in whole)
    run_partition = partition_of(b"r", 4)
    candidates = [codec.decode(r.value) for r in hurried.read_all(topics.candidates, run_partition)]
    assert [c.trajectory_id for c in candidates if isinstance(c, Candidate)] == keys
