"""Every client in use assigns a key to the same partition: murmur2 over the key's raw bytes."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path

import aiokafka
import pytest

from clawstream.runtime.kafka import Cluster
from clawstream.runtime.topics.records import create_topics
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import partition_of

PARTITIONS = 12


def keys() -> list[bytes]:
    """Return 1,000 keys: ids like ours, UTF-8, and arbitrary bytes."""
    rng = random.Random(0)
    plain = [f"task-{rng.randrange(10**9)}".encode() for _ in range(500)]
    utf8 = [
        "".join(rng.choice("aé漢字-._:0") for _ in range(rng.randrange(1, 40))).encode()
        for _ in range(250)
    ]
    return plain + utf8 + [rng.randbytes(rng.randrange(1, 60)) for _ in range(250)]


@pytest.fixture
def topic(cluster: Cluster, settings: Settings) -> str:
    name = f"{settings.kafka.topic_prefix}.keys"
    cluster.create_topic(name, PARTITIONS, {})
    return name


def expected() -> list[int]:
    return [partition_of(k, PARTITIONS) for k in keys()]


def test_confluent_producer(cluster: Cluster, topic: str) -> None:
    async def produce() -> list[int]:
        producer = cluster.producer()
        acks = await asyncio.gather(*(producer.send_soon(topic, k, b"") for k in keys()))
        producer.close()
        return [a.partition for a in acks]

    assert asyncio.run(produce()) == expected()


def test_aiokafka_producer(kafka: str, topic: str) -> None:
    async def produce() -> list[int]:
        async with aiokafka.AIOKafkaProducer(bootstrap_servers=kafka, linger_ms=20) as producer:
            futures = [await producer.send(topic, b"", key=k) for k in keys()]
            return [(await f).partition for f in futures]

    assert asyncio.run(produce()) == expected()


FAUST = """
import asyncio, json, sys
import faust

async def produce(kafka, topic, keys):
    app = faust.App(topic + "-faust", broker="kafka://" + kafka, store="memory://", \
topic_allow_declare=False, datadir=sys.argv[3])
    app.producer_only = True
    await app.start()
    channel = app.topic(topic, key_type=bytes, value_type=bytes, \
key_serializer="raw", value_serializer="raw")
    sent = [await channel.send(key=bytes.fromhex(k), value=b"") for k in keys]
    partitions = [(await s).partition for s in sent]
    await app.stop()
    return partitions

print(json.dumps(asyncio.run(produce(sys.argv[1], sys.argv[2], json.load(sys.stdin)))))
"""


def test_faust_producer(kafka: str, topic: str, tmp_path: Path) -> None:
    # A separate process, as in production, because Faust takes over the event loop.
    done = subprocess.run(
        [sys.executable, "-c", FAUST, kafka, topic, str(tmp_path)],
        input=json.dumps([k.hex() for k in keys()]),
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == expected()


def test_topics_of_one_key_are_joined_without_a_shuffle(
    cluster: Cluster, settings: Settings
) -> None:
    create_topics(cluster, settings)
    topics = settings.kafka.topics
    counts = cluster.topics()
    assert (
        counts[topics.steps]
        == counts[topics.rewards]
        == counts[topics.assembly]
        == counts[topics.trajectories]
    )
