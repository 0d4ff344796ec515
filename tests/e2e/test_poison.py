"""Invalid records on every topic while all processes run.

The owner of the topic writes a dead letter for each record, and the partition continues. For the
owners of the topics see docs/dead-letters.md, "Who buries".
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from support.feed import POLICY, Feed, reward, session, step
from support.up import Up, call, up

from clawstream.gateway.durability.log import Message
from clawstream.gateway.engines.discovery import EngineDiscovery
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.rollout.versions import Versions, WeightsFeed
from clawstream.runtime.exit_codes import EXIT_SOURCE
from clawstream.runtime.process.config import overrides_of
from clawstream.runtime.topics.records import now_micros
from clawstream.schemas.codec.single_object import MAGIC, Codec, shipped
from clawstream.schemas.records import (
    Candidate,
    CandidateStep,
    DeadLetter,
    Refused,
    Reward,
    RewardValue,
    RunEnded,
    SchemaPublished,
    Segment,
    Trajectory,
    TrajectoryStep,
    WeightVersion,
    WorkerStatus,
)
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import pack_ids, pack_logprobs

RUN = "poisoned"
UNKNOWN = MAGIC + b"unknown!" + b"body"
WRONG_TYPE = RunEnded(run_id="nobody", created_at=0)  # belongs to the candidates topic
REASONS = ["invalid", "undecodable", "undecodable", "unknown_schema"]
COMPACTED = ["invalid", "undecodable", "unknown_schema"]
"""Expected reasons for a compacted topic.

A tombstone is valid there: it is a worker's clean exit or a withdrawn schema.
"""


class Poisoned(Feed):
    """A feed that can also write invalid records and records of a newer release."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._announced: set[str] = set()

    def poison(self, topic: str, key: bytes, wrong: Any = WRONG_TYPE) -> None:
        """Write garbage, a tombstone, an unannounced fingerprint and a record of another type."""
        for value in (b"garbage", None, UNKNOWN, self.codec.encode(wrong)):
            self.producer.put(topic, key, value)
        self.producer.flush()

    def newer(self, event: Any) -> bytes:
        """Return the record as a newer release writes it: with one more field.

        Announces the schema first.
        """
        name = type(event).__name__
        schema = shipped(name) | {
            "fields": [*shipped(name)["fields"], {"name": "added_later", "type": "string"}]
        }
        schema["fields"][-1]["default"] = ""
        text = json.dumps(schema)
        fingerprint = Codec().announce(text)
        if name not in self._announced:
            self._announced.add(name)
            record = SchemaPublished(
                fingerprint=fingerprint, name=f"clawstream.{name}", schema_json=text, created_at=0
            )
            self.producer.put(self.topics.schemas, fingerprint.encode(), self.codec.encode(record))
            self.producer.flush()
        return MAGIC + bytes.fromhex(fingerprint) + self.codec.encode(event)[10:] + b"\x06new"

    def put_newer(
        self, topic: str, key: bytes, event: Any, headers: dict[str, bytes] | None = None
    ) -> None:
        self.producer.put(topic, key, self.newer(event), headers)
        self.producer.flush()

    def letters(self, topic: str) -> list[DeadLetter]:
        return [d for d in self.dead() if d.topic == topic]


class Installation:
    """The installation of all tests of this file, because a trainer takes 10 s to start.

    Each test writes invalid records to another topic.
    """

    def __init__(self, running: Up, feed: Poisoned) -> None:
        self.up, self.feed, self.topics, self.codec = running, feed, feed.topics, feed.codec

    def dead_lettered(self, topic: str, owner: str, reasons: list[str] = REASONS) -> None:
        """Assert that the owner wrote one complete dead letter for each invalid record."""
        self.up.until(
            lambda: len(self.feed.letters(topic)) >= len(reasons),
            f"dead letters of {topic} by {owner}",
        )
        found = self.feed.letters(topic)
        assert sorted(d.reason for d in found) == reasons
        assert {(d.process, d.topic_id) for d in found} == {
            (owner, self.feed.cluster.topic_id(topic))
        }
        for letter in found:
            (record,) = self.feed.cluster.read_range(
                topic, letter.partition, letter.offset, letter.offset
            )
            assert (letter.key, letter.value) == (record.key, record.value)

    def trains(self, group: str) -> None:
        """Assert that the loop still works: a group's trajectories become a batch and a version."""
        before = len(self.feed.versions())
        self.feed.group(group)
        self.up.until(lambda: group in self.feed.groups(), f"{group} is admitted")
        self.up.until(lambda: len(self.feed.versions()) > before, f"{group} is trained")


@pytest.fixture(scope="module")
def there(
    kafka: str, tmp_path_factory: pytest.TempPathFactory, model_dir: Path
) -> Iterator[Installation]:
    settings = Settings.model_validate(
        {
            "run_id": RUN,
            "data_dir": tmp_path_factory.mktemp("poison") / "data",
            "kafka": {
                "bootstrap_servers": kafka,
                "topic_prefix": f"t{uuid4().hex[:10]}",
                "partitions": 2,
            },
            "jobs": {"reward_functions": {"*": ["exact_match@1"]}, "tick_interval_s": 0.3},
            "admit": {"policy": POLICY | {"val_groups": 1}},
            "trainer": {"model_path": model_dir, "device": "cpu"},
            "lake": {"flush_interval_s": 0.2},
            "up": {"processes": ["assemble", "reward", "admit", "lake", "trainer"]},
        }
    )
    feed = Poisoned(settings)
    with up(settings) as running:
        installation = Installation(running, feed)
        installation.trains("first")
        yield installation
        assert {row["restarts"] for row in running.table.values()} == {0}, "nobody died of it"
        running.stop()
    feed.close()


def test_steps(there: Installation) -> None:
    key, topic = "on-steps", there.topics.steps
    there.feed.poison(topic, key.encode())
    there.feed.put(session(RUN, key, "opened"))
    there.feed.put_newer(topic, key.encode(), step(RUN, key))
    there.feed.put(session(RUN, key, "completed"))
    there.up.until(
        lambda: key in there.feed.column("candidates", "trajectory_id"), "the trajectory closes"
    )
    *_, candidate = (
        c for c in there.feed.events(there.topics.candidates, Candidate) if c.trajectory_id == key
    )
    assert (len(candidate.steps), candidate.trainable) == (1, True)
    there.dead_lettered(topic, "assemble")


def test_rewards(there: Installation) -> None:
    key, topic = "on-rewards", there.topics.rewards
    there.feed.poison(topic, key.encode())
    there.feed.put_newer(topic, key.encode(), reward(RUN, key, 0.25))
    there.feed.put(session(RUN, key, "opened"), step(RUN, key), session(RUN, key, "completed"))

    def rewarded() -> bool:
        found = [
            c
            for c in there.feed.events(there.topics.candidates, Candidate)
            if c.trajectory_id == key
        ]
        return any(r.value == 0.25 for c in found for r in c.rewards)

    there.up.until(rewarded, "the reward is joined")
    there.dead_lettered(topic, "assemble")


def test_trajectories(there: Installation) -> None:
    key, topic = "on-trajectories", there.topics.trajectories
    said = TrajectoryStep(
        step_id=f"{key}~1.0", index=0, segment=1, status="ok", drift="root", prompt_tokens=1,
        response_tokens=1, response_json=b'{"content":"42"}', trainable=True, offset=0,
    )  # fmt: skip
    whole = Trajectory(
        run_id=RUN, trajectory_key=key, trajectory_id=key, group_id=key, channel="train",
        outcome="completed", opened_at=0, closed_at=1, metadata_json=b'{"gold":"42"}', part=0,
        parts=1, steps=(said,), segments=(
            Segment(token_ids=pack_ids([1])),
            Segment(parent=0, step_index=0, token_ids=pack_ids([3]),
                logprobs=pack_logprobs([-0.1])),
        ),
    )  # fmt: skip
    there.feed.poison(topic, key.encode())
    there.feed.put_newer(topic, key.encode(), whole)
    there.up.until(
        lambda: (
            [
                r.value
                for r in there.feed.events(there.topics.rewards, Reward)
                if r.trajectory_key == key
            ]
            == [1.0]
        ),
        "the trajectory is rewarded",
    )
    there.up.until(
        lambda: key in there.feed.column("trajectories", "trajectory_id"), "it is in the lake"
    )
    there.dead_lettered(topic, "reward")


def test_candidates(there: Installation) -> None:
    topic = there.topics.candidates
    there.feed.poison(topic, RUN.encode(), step(RUN, "on-candidates"))
    place = {"topic_id": b"t", "partition": b"0", "first_offset": b"0", "last_offset": b"0"}
    for member in range(2):
        value = RewardValue(
            source="env", name="score", function_version="1", value=float(member), reward_revision=0
        )
        key = f"on-candidates-{member}"
        there.feed.put_newer(
            topic,
            RUN.encode(),
            Candidate(
                run_id=RUN, channel="val", trajectory_key=key, trajectory_id=key,
                group_id="on-candidates", revision=0, outcome="completed", opened_at=0,
                closed_at=now_micros() // 1000, rewards=(value,), prompt_tokens=1,
                trainable_tokens=1,
                steps=(
                    CandidateStep(
                        step_id=f"{key}~1.0", index=0, response_tokens=1, trainable=True
                    ),
                ),
                oldest_sync_index=0, newest_sync_index=0, trainable=True,
            ),
            place,
        )  # fmt: skip
    there.up.until(
        lambda: "val" in there.feed.column("batches", "channel"), "the validation group is admitted"
    )
    there.dead_lettered(topic, "admit")
    there.trains("after-candidates")


def refused(settings: Settings, channel: Any) -> Refused:
    return Refused(
        run_id=RUN, channel=channel, group_id=f"refused-{channel}", trajectory_ids=(), revisions=(),
        whole_group=True, reason="stale", n=1, input_topic_id="c", input_from=0, input_to=0,
    )  # fmt: skip


@pytest.mark.parametrize(("channel", "owner"), [("train", "trainer"), ("val", "lake")])
def test_ready_batches(there: Installation, channel: str, owner: str) -> None:
    topic = there.topics.ready_batches(RUN, channel)
    there.feed.poison(topic, RUN.encode())
    there.feed.put_newer(topic, RUN.encode(), refused(there.feed.settings, channel))
    there.up.until(
        lambda: f"refused-{channel}" in there.feed.column("groups", "group_id"), "it is in the lake"
    )
    there.dead_lettered(topic, owner)
    if channel == "train":
        there.trains("after-batches")


def test_weights(there: Installation) -> None:
    topic = there.topics.weights
    version = WeightVersion(
        version_id="other/0.0", run_id="other", sync_index=0, attempt=0, format="full", files=(),
        channel="train", metrics={}, created_at=0,
    )  # fmt: skip
    there.feed.poison(topic, b"other/0.0")
    there.feed.put_newer(topic, b"other/0.0", version)
    there.up.until(
        lambda: "other/0.0" in there.feed.column("weights", "version_id"), "it is in the lake"
    )
    there.dead_lettered(topic, "lake")

    async def heard() -> WeightVersion | None:
        """Return the version that a rollout worker would load."""
        versions, changed = Versions("other"), asyncio.Event()
        feed = WeightsFeed(there.feed.cluster, there.topics, versions, changed)
        failed = feed.start()
        while versions.wanted(None) is None:
            changed.clear()
            await asyncio.wait_for(changed.wait(), 90)
        feed.stop()
        assert not failed.done()
        return versions.wanted(None)

    assert asyncio.run(heard()) == version


def test_workers(there: Installation) -> None:
    topic = there.topics.workers
    status = WorkerStatus(
        worker_id="w0", base_url="http://w0", models=("policy",), state="ready", heartbeat_at=0,
        heartbeat_interval_ms=600_000, started_at=0, loads=0,
    )  # fmt: skip
    there.feed.poison(topic, b"w0")
    there.feed.put_newer(topic, b"w0", status)

    async def dead_lettered() -> list[Message]:
        """Return the dead letters of a gateway until it has discovered the worker."""
        registry, out = EngineRegistry(), list[Message]()
        feed = EngineDiscovery(
            there.feed.cluster, there.feed.settings, registry, Codec(), lambda: 0.0, out.append
        )
        feed.start()
        async with asyncio.timeout(90):
            while not registry.ready(0.0):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        feed.stop()
        return out

    for message in asyncio.run(dead_lettered()):
        there.feed.producer.put(message.topic, message.key, message.value)
    there.feed.producer.flush()
    there.dead_lettered(topic, "gateway", COMPACTED)


def test_schemas(there: Installation) -> None:
    """A schema that is announced after invalid records is known."""
    topic = there.topics.schemas
    there.feed.poison(topic, b"poison")
    there.dead_lettered(topic, "lake", COMPACTED)
    there.feed.put_newer(there.topics.steps, b"on-schemas", session(RUN, "on-schemas", "opened"))
    there.up.until(
        lambda: "on-schemas" in there.feed.column("session_events", "trajectory_key"), "it is known"
    )
    assert "clawstream.SessionEvent" in there.feed.column("schemas", "name")


def test_dead_letters(there: Installation) -> None:
    topic = there.topics.dead_letters
    there.feed.poison(topic, b"poison")
    letter = DeadLetter(
        topic="elsewhere", topic_id="e", partition=0, offset=0, timestamp_ms=0, process="test",
        reason="invalid", detail="", created_at=0,
    )  # fmt: skip
    there.feed.put_newer(topic, b"k", letter)
    there.up.until(
        lambda: "elsewhere" in there.feed.column("dead_letters", "topic"), "it is in the lake"
    )
    there.dead_lettered(topic, "lake")


def test_the_state_log_is_no_place_for_others(kafka: str, tmp_path: Path) -> None:
    """Only assemble writes to the changelog.

    After a foreign record the decisions are unknown, so assemble stops and says how to recover.
    """
    settings = Settings.model_validate(
        {
            "data_dir": tmp_path / "data",
            "kafka": {
                "bootstrap_servers": kafka,
                "topic_prefix": f"t{uuid4().hex[:10]}",
                "partitions": 1,
            },
            "up": {"processes": ["assemble"], "restart_delay_s": 0.2},
        }
    )
    feed = Feed(settings)
    with up(settings) as running:
        running.until_says("assemble", "partition_taken_over")
        feed.producer.put(feed.topics.assembly, None, b"garbage")
        feed.producer.flush()
        feed.group("a")
        running.until_state("assemble", "source truncated")
        assert running.table["assemble"]["exit_code"] == EXIT_SOURCE
        assert re.search(
            rf"changelog {feed.topics.assembly}-0, offset \d+: 7 bytes that begin",
            running.log("assemble"),
        )
        told = call("status", "--positions", *overrides_of(settings))
        assert told.returncode == 1 and "unreadable: assemble" in told.stdout, (
            told.stdout + told.stderr
        )
        running.stop()
    # The recovery: without its changelog, assemble folds all records again.
    feed.cluster.delete_topic(feed.topics.assembly)
    with up(settings) as running:
        running.until(
            lambda: len(feed.events(feed.topics.candidates, Candidate)) >= 2,
            "what waited is closed",
        )
        running.stop()
    feed.close()
