"""The admission process on a real Kafka: starts, kills, a second instance, invalid records."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.admit import replay

from clawstream.runtime.exit_codes import EXIT_FAILED, EXIT_FENCED, EXIT_SETTINGS, EXIT_SOURCE
from clawstream.runtime.kafka import Cluster, Record
from clawstream.runtime.process.child import die_with_parent
from clawstream.runtime.process.config import overrides_of
from clawstream.runtime.topics.records import create_topics
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import (
    AdmissionPolicy,
    Candidate,
    CandidateStep,
    DeadLetter,
    Late,
    PolicyApplied,
    ReadyBatch,
    Refused,
    RewardValue,
    Tick,
)
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import CANDIDATE_PARTITIONS, partition_of
from clawstream.stream_jobs.admit.decisions.journal import InputRecord
from clawstream.stream_jobs.worker.payload import payload_place

ROOT = Path(__file__).parents[2]
START = (
    "import sys; from clawstream.runtime.process.config import load; "
    "from clawstream.stream_jobs.admit.main import main; "
    "main(load(overrides=sys.argv[1:]))"
)
CODEC = Codec()
LIVES = 6
PLACE = {"topic_id": b"payload", "partition": b"3", "first_offset": b"7", "last_offset": b"8"}


@pytest.fixture
def mine(settings: Settings, cluster: Cluster) -> Settings:
    """Return settings with a small policy, after creating the topics."""
    changed = settings.model_copy(
        update={
            "run_id": "demo",
            "admit": settings.admit.model_copy(
                update={
                    "policy": settings.admit.policy.model_copy(
                        update={"group_size": 2, "batch_groups": 3, "required_rewards": ("rule",)}
                    )
                }
            ),
        }
    )
    create_topics(cluster, changed)
    return changed


Start = Callable[[Settings], "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start admission as a separate process that ends with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(settings: Settings) -> subprocess.Popen[bytes]:
        with (tmp_path / f"admit-{len(started)}.log").open("wb") as log:
            command = [sys.executable, "-c", START, *overrides_of(settings)]
            started.append(subprocess.Popen(die_with_parent(command), cwd=ROOT, stderr=log))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


class Log:
    """Write candidates and read the journal."""

    def __init__(self, settings: Settings, cluster: Cluster) -> None:
        self.settings, self.cluster, self.topics = settings, cluster, settings.kafka.topics
        self.producer = cluster.producer()
        self.partition = partition_of(b"demo", CANDIDATE_PARTITIONS)

    def put(self, *events: Any) -> None:
        for event in events:
            value = event if isinstance(event, bytes) else CODEC.encode(event)
            if isinstance(event, Tick):
                self.producer.put(self.topics.candidates, None, value, partition=self.partition)
            else:
                headers = PLACE if isinstance(event, Candidate) else None
                self.producer.put(self.topics.candidates, b"demo", value, headers)
        self.producer.flush()

    def group(self, number: int, sync: int = 0) -> None:
        self.put(*(cand(f"t{number}-{i}", f"g{number}", float(i), sync) for i in (0, 1)))

    def journal(self, channel: str = "train") -> list[Any]:
        topic = self.topics.ready_batches("demo", channel)
        return (
            [CODEC.decode(r.value) for r in self.cluster.read_all(topic)]
            if self.cluster.topics(topic)
            else []
        )

    def batches(self, channel: str = "train") -> list[ReadyBatch]:
        return [d for d in self.journal(channel) if isinstance(d, ReadyBatch)]

    def policies(self) -> list[AdmissionPolicy]:
        found = (
            CODEC.decode(r.value)
            for r in self.records()
            if r.key == b"demo" and (r.value or b"")[:1] == b"\xc3"
        )
        return [e for e in found if isinstance(e, AdmissionPolicy)]

    def records(self) -> list[Record]:
        return list(self.cluster.read_all(self.topics.candidates, self.partition))

    def dead(self) -> list[DeadLetter]:
        """Return the dead letters, including those of a transaction whose batch is already visible.

        Each partition receives the end of a transaction separately.
        """
        return [
            CODEC.decode(r.value)
            for r in self.cluster.read_all(self.topics.dead_letters, await_open=True)
        ]

    def lag(self, channel: str) -> int | None:
        committed = self.cluster.committed(
            f"{self.settings.kafka.topic_prefix}-admit.demo.{channel}"
        )
        end = self.cluster.watermarks(self.topics.candidates, [self.partition])[self.partition][1]
        position = committed.get((self.topics.candidates, self.partition))
        return None if position is None else end - position


@pytest.fixture
def log(mine: Settings, cluster: Cluster) -> Log:
    return Log(mine, cluster)


def cand(tid: str, group: str, value: float | None, sync: int = 0, **changes: Any) -> Candidate:
    rewards = (
        RewardValue(source="rule", name="x", function_version="1", value=value, reward_revision=0),
    )
    plain: dict[str, Any] = {
        "run_id": "demo", "channel": "train", "trajectory_key": tid, "trajectory_id": tid,
        "group_id": group, "revision": 0, "outcome": "completed", "opened_at": 0, "closed_at": 1000,
        "rewards": rewards,
        "steps": (CandidateStep(step_id=f"{tid}~1.0", index=0, response_tokens=5, trainable=True),),
        "prompt_tokens": 7, "trainable_tokens": 5, "oldest_sync_index": sync,
        "newest_sync_index": sync, "trainable": True,
    }  # fmt: skip
    return Candidate(**{**plain, **changes})


def check(batches: list[ReadyBatch]) -> list[str]:
    """Return the group ids of all batches; check that none is missing or repeated."""
    assert [b.batch_seq for b in batches] == list(range(len(batches)))
    groups = [g.group_id for b in batches for g in b.groups]
    assert max(Counter(groups).values(), default=1) == 1
    return groups


def test_groups_become_batches_of_both_channels(
    log: Log, start: Start, mine: Settings, eventually: Any
) -> None:
    process = start(mine)
    for number in range(7):
        log.group(number)
    log.put(*(cand(f"v{i}", "val", 1.0, channel="val") for i in (0, 1)))
    batches = eventually(lambda: found if len(found := log.batches()) == 2 else None)
    assert check(batches) == [f"g{i}" for i in range(6)]
    member = batches[0].groups[0].members[0]
    assert (member.place.topic_id, member.place.partition, member.place.last_offset) == (
        "payload",
        3,
        8,
    )
    assert batches[0].input_topic_id == log.cluster.topic_id(log.topics.candidates)
    assert log.batches("val") == [], "it waits for more, or for its deadline"
    log.put(*(Tick(partition=p, event_time=1000 + 61_000) for p in range(4)))
    (validation,) = eventually(lambda: log.batches("val"))
    assert [g.group_id for g in validation.groups] == ["val"]
    for channel in ("train", "val"):
        eventually(lambda c=channel: log.lag(c) == 0)
    process.terminate()
    assert process.wait(180) == 0
    assert log.dead() == []


def test_kill_at_any_time_neither_loses_nor_doubles_a_group(
    log: Log, start: Start, mine: Settings, eventually: Any, tmp_path: Path
) -> None:
    """Kill admission at random times; a straggler and an incomplete batch wait throughout."""
    rng = random.Random(0)
    log.put(cand("straggler", "slow", 0.0))
    for life in range(LIVES):
        process = start(mine)
        eventually(lambda n=life: b"admission_starts" in (tmp_path / f"admit-{n}.log").read_bytes())
        for number in range(25 * life, 25 * life + 25):
            log.group(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(rng.uniform(0, 0.3))
        process.kill()
        process.wait()
    process = start(mine)
    groups, full = 25 * LIVES, 25 * LIVES // 3
    eventually(lambda: len(log.batches()) == full)
    assert set(check(log.batches())) <= {f"g{i}" for i in range(groups)}
    log.put(cand("straggler-2", "slow", 1.0))
    for number in range(groups, groups + -(groups + 1) % 3):
        log.group(number)
    (*_, end) = eventually(lambda: found if len(found := log.batches()) > full else None)
    eventually(lambda: log.lag("train") == 0)
    assert {"slow", *(f"g{i}" for i in range(groups))} <= set(check(log.batches()))
    assert end.input_from == end.input_to
    assert [d for d in log.journal() if not isinstance(d, ReadyBatch | PolicyApplied)] == []
    (policy,) = log.policies()
    entries = [
        InputRecord(r.offset, CODEC.decode(r.value), payload_place(r.headers))
        for r in log.records()
    ]
    hashes = [b.content_hash for b in log.batches()]
    assert hashes == replay(entries, policy, tickers=4), "as if no one had ever been killed"
    process.terminate()
    assert process.wait(180) == 0


def test_second_admission_fences_the_first(
    log: Log, start: Start, mine: Settings, eventually: Any
) -> None:
    first = start(mine)
    eventually(lambda: len(log.journal()) == 1)
    second = start(mine)
    eventually(lambda: log.lag("val") == 0)
    eventually(lambda: b"admission_starts" in (log.settings.data_dir / "admit-1.log").read_bytes())
    for number in range(6):
        log.group(number)
    assert first.wait(180) == EXIT_FENCED
    assert check(eventually(lambda: found if len(found := log.batches()) == 2 else None)) == [
        f"g{i}" for i in range(6)
    ]
    assert second.poll() is None


def test_poison_is_dead_lettered_once_and_stops_nothing(
    log: Log, start: Start, mine: Settings, eventually: Any
) -> None:
    process = start(mine)
    eventually(lambda: len(log.journal()) == 1)
    (policy,) = log.policies()
    twisted = {**PLACE, "partition": b"three"}
    log.put(
        b"garbage",
        b"\xc3\x01unknown-fingerprint",
        Late(run_id="demo", channel="train", trajectory_id="x", revision=0, input_to=0),
    )
    log.producer.put(
        log.topics.candidates, b"demo", CODEC.encode(cand("twisted", "g", 1.0)), twisted
    )
    log.put(
        AdmissionPolicy(
            **{f: getattr(policy, f) for f in policy.__dataclass_fields__}
            | {"sync_every": 9, "policy_version": 2}
        )
    )
    log.put(cand("x", "g", 1.0, run_id="other"))
    for number in range(3):
        log.group(number)
    assert len(check(eventually(log.batches))) == 3
    dead = log.dead()
    assert [d.reason for d in dead] == [
        "undecodable",
        "unknown_schema",
        "invalid",
        "invalid",
        "invalid",
        "invalid",
    ]
    assert {(d.process, d.key, d.partition, d.topic) for d in dead} == {
        ("admit", b"demo", log.partition, log.topics.candidates)
    }
    assert dead[0].value == b"garbage" and dead[0].topic_id == log.cluster.topic_id(
        log.topics.candidates
    )
    assert "sync_every is 1 for the whole run" in dead[4].detail
    eventually(lambda: log.lag("train") == 0)
    process.kill()
    process.wait()
    process = start(mine)
    log.group(3)
    log.group(4)
    log.group(5)
    eventually(lambda: len(log.batches()) == 2)
    assert len(log.dead()) == len(dead)


def test_changed_settings_become_a_new_policy(
    log: Log, start: Start, mine: Settings, eventually: Any
) -> None:
    process = start(mine)
    log.group(0)
    eventually(lambda: len(log.journal()) == 1 and log.lag("train") == 0)
    process.terminate()
    assert process.wait(180) == 0
    changed = load_with(mine, batch_groups=1)
    process = start(changed)
    (batch,) = eventually(log.batches)
    assert batch.policy_version == 2 and [p.policy_version for p in log.policies()] == [1, 2]
    assert [d.policy.batch_groups for d in log.journal() if isinstance(d, PolicyApplied)] == [3, 1]
    process.kill()
    process.wait()
    other = load_with(mine, sync_every=2)
    refused = start(
        other.model_copy(update={"trainer": other.trainer.model_copy(update={"sync_every": 2})})
    )
    assert refused.wait(180) == EXIT_SETTINGS


def load_with(settings: Settings, **policy: Any) -> Settings:
    changed = settings.admit.policy.model_copy(update=policy)
    return settings.model_copy(
        update={"admit": settings.admit.model_copy(update={"policy": changed})}
    )


def test_candidates_made_anew_and_candidates_truncated(
    log: Log, start: Start, mine: Settings, cluster: Cluster, eventually: Any
) -> None:
    process = start(mine)
    for number in range(3):
        log.group(number)
    eventually(lambda: len(log.batches()) == 1)
    process.kill()
    process.wait()
    cluster.delete_topic(log.topics.candidates)
    eventually(lambda: log.topics.candidates not in cluster.topics())
    create_topics(cluster, mine)
    log.producer = cluster.producer()
    for number in (2, 1, 3, 4, 5):
        log.group(number)
    process = start(mine)
    batches = eventually(lambda: found if len(found := log.batches()) == 2 else None)
    assert check(batches) == [f"g{i}" for i in range(6)], "what was trained stays trained"
    assert (
        batches[0].input_topic_id
        != batches[1].input_topic_id
        == cluster.topic_id(log.topics.candidates)
    )
    assert [d.policy.policy_version for d in log.journal() if isinstance(d, PolicyApplied)] == [
        1,
        1,
        2,
    ]
    process.kill()
    process.wait()
    log.put(cand("pending", "p", 0.0))
    cluster.delete_records(log.topics.candidates, log.partition, batches[1].input_to + 1)
    assert start(mine).wait(180) == EXIT_SOURCE


def test_candidates_made_anew_under_a_running_admission(
    log: Log, start: Start, mine: Settings, cluster: Cluster, eventually: Any
) -> None:
    process = start(mine)
    for number in range(3):
        log.group(number)
    eventually(lambda: len(log.batches()) == 1)
    cluster.delete_topic(log.topics.candidates)
    eventually(lambda: log.topics.candidates not in cluster.topics())
    create_topics(cluster, mine)
    log.producer = cluster.producer()
    assert process.wait(180) == EXIT_FAILED, "its supervisor starts it again"
    start(mine)
    for number in (3, 4, 5):
        log.group(number)
    assert check(eventually(lambda: found if len(found := log.batches()) == 2 else None)) == [
        f"g{i}" for i in range(6)
    ]


def test_refusals_are_on_the_journal(
    log: Log, start: Start, mine: Settings, eventually: Any
) -> None:
    start(mine)
    log.put(cand("a", "same", 1.0), cand("b", "same", 1.0))
    (refused,) = eventually(lambda: [d for d in log.journal() if isinstance(d, Refused)])
    assert (refused.reason, refused.trajectory_ids, refused.n, refused.whole_group) == (
        "zero_variance",
        ("a", "b"),
        2,
        True,
    )
