"""The live tail and the operations of the inspector on a real Kafka."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event

import pytest
from support.jobs import session

from clawstream.inspection.operations import Operations
from clawstream.inspector.live.feed import Follower
from clawstream.inspector.operations.observation import Observation, Weights, Worker
from clawstream.runtime.kafka import Cluster, KafkaError
from clawstream.runtime.topics.records import create_topics
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import DeadLetter, WeightVersion, WorkerStatus
from clawstream.schemas.settings import Settings


def test_topics_that_do_not_exist_yet_are_asked_for_again(
    settings: Settings, cluster: Cluster
) -> None:
    follower = Follower(cluster, settings)
    with pytest.raises(KafkaError, match=r"no topic .*steps yet"):
        follower(lambda *_: None, Event())
    assert not follower.is_connected()


def test_versions_workers_and_dead_letters_are_observed(
    settings: Settings, cluster: Cluster, eventually: Callable[..., Observation]
) -> None:
    create_topics(cluster, settings)
    topics, codec, producer = settings.kafka.topics, Codec(), cluster.producer()
    run, now_us = settings.run_id, int(time.time() * 1e6)
    for sync in (1, 3):
        version = WeightVersion(
            version_id=f"{run}/{sync}.0", run_id=run, sync_index=sync, attempt=0, format="full",
            files=(), channel="train", metrics={}, created_at=now_us,
        )  # fmt: skip
        producer.put(topics.weights, version.version_id.encode(), codec.encode(version))
    report = WorkerStatus(
        worker_id="w", base_url="http://w", models=(), state="ready", run_id=run,
        weight_version=f"{run}/1.0", heartbeat_at=now_us, heartbeat_interval_ms=60_000,
        started_at=0, loads=1, failed_loads=2, error="no room",
    )  # fmt: skip
    letter = DeadLetter(
        topic=topics.steps, topic_id="t", partition=0, offset=5, timestamp_ms=0, process="lake",
        reason="invalid", detail="", created_at=0,
    )  # fmt: skip
    producer.put(topics.workers, b"w", codec.encode(report))
    producer.put(topics.dead_letters, None, codec.encode(letter))
    producer.put(topics.steps, b"k", codec.encode(session("k", "opened")))
    producer.flush()
    observe, newest = Operations(settings, cluster), Weights(f"{run}/3.0", now_us / 1e6)

    def complete() -> Observation | None:
        """Return an observation that has all three: one poll may end before the last topic."""
        now = observe()
        return now if now.workers and now.weights == newest and now.dead_letters else None

    found = eventually(complete)
    assert found.kafka_error is None
    (worker,) = found.workers
    assert worker == Worker("w", "ready", f"{run}/1.0", 2, worker.age_s, 60.0, 2, "no room")
    assert found.dead_letters == 1
    waiting = {(c.group, c.topic): c.records for c in found.consumers if c.records}
    assert waiting[f"{settings.kafka.topic_prefix}-assemble", topics.steps] == 1
    assert not worker.is_silent
    observe.close()
    producer.close()
