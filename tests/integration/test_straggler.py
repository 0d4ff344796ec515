"""One group that never completes does not block the other groups.

Claw-R1's data pool stops forever at such a group. This test uses the real admission process on a
real Kafka.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clawstream.runtime.kafka import Cluster
from clawstream.runtime.process.child import die_with_parent
from clawstream.runtime.process.config import overrides_of
from clawstream.runtime.topics.records import create_topics
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import (
    Candidate,
    CandidateStep,
    ReadyBatch,
    Refused,
    RewardValue,
    Tick,
)
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import CANDIDATE_PARTITIONS, partition_of

ROOT = Path(__file__).parents[2]
START = (
    "import sys; from clawstream.runtime.process.config import load; "
    "from clawstream.stream_jobs.admit.main import main; "
    "main(load(overrides=sys.argv[1:]))"
)
GROUPS, MEMBERS, BATCH_GROUPS = 10_000, 2, 100
CODEC = Codec()
PLACE = {"topic_id": b"payload", "partition": b"0", "first_offset": b"0", "last_offset": b"0"}


@pytest.fixture
def mine(settings: Settings, cluster: Cluster) -> Settings:
    """Return settings with groups of two, batches of 100 groups, and no reachable deadline."""
    policy = {"group_size": MEMBERS, "batch_groups": BATCH_GROUPS, "required_rewards": ("rule",)}
    admit = settings.admit.model_copy(
        update={"channels": ("train",), "policy": settings.admit.policy.model_copy(update=policy)}
    )
    changed = settings.model_copy(update={"run_id": "demo", "admit": admit})
    create_topics(cluster, changed)
    return changed


@pytest.fixture
def admission(mine: Settings, tmp_path: Path) -> Iterator[None]:
    """Run the process during the test."""
    with (tmp_path / "admit.log").open("wb") as log:
        process = subprocess.Popen(
            die_with_parent([sys.executable, "-c", START, *overrides_of(mine)]),
            cwd=ROOT,
            stderr=log,
        )
    yield
    process.kill()
    process.wait()


def candidate(tid: str, group: str, value: float | None) -> Candidate:
    rewards = (
        RewardValue(source="rule", name="x", function_version="1", value=value, reward_revision=0),
    )
    return Candidate(
        run_id="demo", channel="train", trajectory_key=tid, trajectory_id=tid, group_id=group,
        revision=0, outcome="completed", opened_at=0, closed_at=1000,
        rewards=rewards if value is not None else (),
        steps=(CandidateStep(step_id=f"{tid}~1.0", index=0, response_tokens=5, trainable=True),),
        prompt_tokens=7, trainable_tokens=5, oldest_sync_index=0, newest_sync_index=0,
        trainable=True,
    )  # fmt: skip


def test_2_2_1_ten_thousand_groups_behind_one_that_never_completes_are_served_at_once(
    mine: Settings, cluster: Cluster, admission: None, eventually: Any
) -> None:
    """Serve 10,000 groups although two stragglers came first.

    One straggler never gets its other member, and one never gets its reward. Event time
    does not advance during the test.
    """
    topics, producer = mine.kafka.topics, cluster.producer()

    def put(*events: Candidate) -> None:
        for event in events:
            producer.put(topics.candidates, b"demo", CODEC.encode(event), PLACE)

    def journal(kind: type) -> list[Any]:
        topic = topics.ready_batches("demo", "train")
        found = (
            (CODEC.decode(r.value) for r in cluster.read_all(topic))
            if cluster.topics(topic)
            else ()
        )
        return [d for d in found if isinstance(d, kind)]

    put(candidate("alone", "slow", 1.0))
    put(candidate("unjudged-0", "unjudged", 0.0), candidate("unjudged-1", "unjudged", None))
    for i in range(GROUPS):
        put(*(candidate(f"t{i}-{m}", f"g{i}", float(m)) for m in range(MEMBERS)))
    producer.flush()
    end = topics.ready_batches("demo", "train")
    eventually(
        lambda: cluster.topics(end) and cluster.watermarks(end)[0][1] > GROUPS // BATCH_GROUPS, 300
    )
    batches = eventually(
        lambda: found if len(found := journal(ReadyBatch)) == GROUPS // BATCH_GROUPS else None, 300
    )
    assert [g.group_id for b in batches for g in b.groups] == [f"g{i}" for i in range(GROUPS)]
    assert [b.batch_seq for b in batches] == list(range(len(batches)))
    (first,) = {b.input_from for b in batches}
    assert first == min(b.input_from for b in batches) < batches[0].input_to, (
        "the stragglers are where a restart reads on"
    )
    assert journal(Refused) == []

    late = 1000 + round(mine.admit.policy.group_deadline_s * 1000)
    partition = partition_of(b"demo", CANDIDATE_PARTITIONS)
    for source in range(mine.kafka.partitions):
        producer.put(
            topics.candidates,
            None,
            CODEC.encode(Tick(partition=source, event_time=late)),
            partition=partition,
        )
    producer.flush()
    refused = eventually(lambda: found if len(found := journal(Refused)) == 2 else None)
    assert {(r.group_id, r.reason) for r in refused} == {
        ("slow", "incomplete"),
        ("unjudged", "reward_missing"),
    }
    assert refused[-1].input_from > batches[-1].input_to, "nothing holds on to them"
    producer.close()
