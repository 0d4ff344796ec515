"""The Kafka client on a real broker."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from support.ports import free_port

import clawstream.runtime.kafka.reader as reader_module
from clawstream.runtime.broker.embedded import EmbeddedBroker
from clawstream.runtime.kafka import Cluster, Fenced, SourceTruncated, Unavailable
from clawstream.runtime.topics.records import Decoder, create_topics, dead_letter
from clawstream.schemas.codec.single_object import MAGIC, TOP_LEVEL, Codec
from clawstream.schemas.errors import UnknownSchema
from clawstream.schemas.records import Tick
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import partition_of


def test_topics_are_made_once_and_have_ids(cluster: Cluster, settings: Settings) -> None:
    made = create_topics(cluster, settings)
    assert made == [spec.name for spec in settings.kafka.topics.specs(4, -1)]
    assert create_topics(cluster, settings) == []
    ids = cluster.topic_ids(made)
    assert len(set(ids.values())) == len(made)
    steps = settings.kafka.topics.steps
    assert cluster.topics(steps) == {steps: 4}
    decoder = Decoder(cluster, settings.kafka.topics.schemas)
    names = {decoder.decode(r.value).name for r in cluster.read_all(settings.kafka.topics.schemas)}
    assert "clawstream.Step" in names and len(names) == len(TOP_LEVEL)


def test_schemas_that_are_missing_are_announced(cluster: Cluster, settings: Settings) -> None:
    """The topic's creator was killed before its announcement, or was an older release."""
    topic = settings.kafka.topics.schemas
    (spec,) = (s for s in settings.kafka.topics.specs(4, -1) if s.name == topic)
    cluster.create_topic(topic, 1, spec.config)
    create_topics(cluster, settings)
    first, codec = list(cluster.read_all(topic)), Codec()
    assert len({r.key for r in first}) == len(first) == len(TOP_LEVEL)
    create_topics(cluster, settings)
    assert len(list(cluster.read_all(topic))) == len(TOP_LEVEL), "nothing is said twice"
    producer = cluster.producer()
    producer.put(topic, first[0].key, None)
    producer.put(topic, first[1].key, b"garbage")
    producer.flush()
    producer.close()
    create_topics(cluster, settings)
    again = list(cluster.read_all(topic))[len(first) + 2 :]
    assert [(r.key, codec.decode(r.value).schema_json) for r in again] == [
        (r.key, codec.decode(r.value).schema_json) for r in first[:2]
    ]


def test_a_dead_letter_fits_into_a_record_whatever_is_in_it(
    cluster: Cluster, settings: Settings
) -> None:
    topics, codec, producer = settings.kafka.topics, Codec(), cluster.producer()
    create_topics(cluster, settings)
    most = 10 * 1024 * 1024 - 100
    poison = [
        (b"k", b"x" * most),
        (b"k" * most, b"x"),
        (b"k" * 4_000_000, b"x" * 4_000_000),
        (b"k", b"x"),
    ]
    for key, value in poison:
        producer.put(topics.steps, key, value, partition=0)
    producer.flush()
    found = list(cluster.read_range(topics.steps, 0, 0, len(poison) - 1))
    letters = [dead_letter(r, "id", "test", "undecodable", "why " * 5000) for r in found]
    for letter in letters:
        producer.put(topics.dead_letters, letter.key, codec.encode(letter))
    producer.flush()
    producer.close()
    assert [(len(d.key or b""), len(d.value or b"")) for d in letters] == [
        (1, 0),
        (0, 1),
        (4_000_000, 0),
        (1, 1),
    ]
    assert [
        d.detail.endswith("at their place)") or d.detail.endswith("at its place)") for d in letters
    ] == [True] * 3 + [False]
    assert all(len(d.detail) < 8100 and d.offset == i for i, d in enumerate(letters))


def test_send_is_acknowledged_in_order_and_read_back(cluster: Cluster, settings: Settings) -> None:
    topic = settings.kafka.topics.steps
    create_topics(cluster, settings)

    async def produce() -> list[tuple[int, int]]:
        producer = cluster.producer()
        acks = await asyncio.gather(
            *(producer.send_soon(topic, b"k", b"%d" % i, {"n": b"%d" % i}) for i in range(100))
        )
        producer.close()
        return [(a.partition, a.offset) for a in acks]

    acks = asyncio.run(produce())
    p = partition_of(b"k", 4)
    assert acks == [(p, i) for i in range(100)]
    assert [r.value for r in cluster.read_range(topic, p, 10, 20)] == [
        b"%d" % i for i in range(10, 21)
    ]
    assert [r.headers["n"] for r in cluster.read_all(topic, p)] == [b"%d" % i for i in range(100)]


def test_ranges_are_read_by_one_client_whatever_lies_between_them(
    cluster: Cluster, settings: Settings
) -> None:
    """Read large records, control records, and ranges that an earlier fetch already contains.

    The large records exceed the size of one fetch.
    """
    topic = settings.kafka.topics.weights
    create_topics(cluster, settings)
    producer = cluster.producer(f"{topic}-trainer")
    values = [
        bytes([i]) * (9_000_000 if i in (20, 40) else 100_000 if i > 50 else 10) for i in range(60)
    ]
    for i in range(0, 60, 20):
        with producer.transaction():  # leaves a control record after each 20
            for value in values[i : i + 20]:
                producer.put(topic, b"k", value)
    producer.close()
    at = {i + i // 20: value for i, value in enumerate(values)}  # by offset; none at 20, 41 and 62

    def read(*ranges: tuple[int, int]) -> None:
        found = [(r.offset, r.value) for r in cluster.read_ranges(topic, 0, ranges)]
        assert found == [
            (o, at[o]) for first, last in ranges for o in range(first, last + 1) if o in at
        ]

    read(*((o, o) for o in range(63)))
    for _ in range(20):
        read(*((o, o) for o in (0, 3, 7, 19, 22, 30, 39, 45, 61)))
    read((0, 5), (10, 9), (11, 11), (13, 20), (41, 41), (42, 45), (62, 62))
    read((20, 20), (62, 62))
    read()


def test_newer_transactional_producer_fences_the_older(
    cluster: Cluster, settings: Settings
) -> None:
    topic = settings.kafka.topics.weights
    create_topics(cluster, settings)
    old = cluster.producer(f"{topic}-trainer")
    with old.transaction():
        old.put(topic, b"a", b"1")
    new = cluster.producer(f"{topic}-trainer")
    with pytest.raises(Fenced), old.transaction():
        old.put(topic, b"a", b"2")
        old.flush()
    with new.transaction():
        new.put(topic, b"a", b"3")
    assert [r.value for r in cluster.read_all(topic)] == [b"1", b"3"]


def test_what_lies_behind_anothers_open_transaction_is_waited_for(
    cluster: Cluster, settings: Settings
) -> None:
    """All runs share the weights log.

    One run's dead trainer must not hide another run's newest version.
    """
    topic = settings.kafka.topics.weights
    create_topics(cluster, settings)
    other, mine = cluster.producer(f"{topic}-other"), cluster.producer(f"{topic}-mine")
    with ThreadPoolExecutor(1) as pool:
        with other.transaction():
            other.put(topic, b"other", b"1")
            other.flush()
            with mine.transaction():
                mine.put(topic, b"mine", b"2")
            assert list(cluster.read_all(topic)) == []
            found = pool.submit(lambda: [r.value for r in cluster.read_all(topic, await_open=True)])
            with pytest.raises(TimeoutError):
                found.result(1.0)
        assert found.result(90.0) == [b"1", b"2"]


def test_a_producer_whose_id_the_broker_knows_from_another_one_goes_on_under_a_new_one(
    tmp_path: Path,
) -> None:
    """A wiped broker assigns the same producer ids again.

    The older producer's next record then stays out of order permanently.
    """
    port = free_port()

    def fresh_broker(name: str) -> EmbeddedBroker:
        broker = EmbeddedBroker(tmp_path / name, port)
        broker.start()
        Cluster(broker.bootstrap_servers).create_topic("t", 1, {})
        return broker

    async def body() -> None:
        first = fresh_broker("first")
        old = Cluster(first.bootstrap_servers).producer(message_timeout_ms=20_000)
        await old.send("t", b"k", b"before")
        first.stop()
        second = fresh_broker("second")
        try:
            cluster = Cluster(second.bootstrap_servers)
            new = cluster.producer()
            for i in range(8):
                await new.send("t", b"k", b"%d" % i)
            with pytest.raises(Unavailable):
                async with asyncio.timeout(120):
                    await asyncio.gather(
                        old.send("t", b"k", b"lost"), old.send("t", b"k", b"lost, too")
                    )
            async with asyncio.timeout(120):
                await old.send("t", b"k", b"after")
            assert [r.value for r in cluster.read_all("t")][8:] == [b"after"]
            old.close()
            new.close()
        finally:
            second.stop()

    asyncio.run(body())


def test_reader_position_gets_past_control_records(cluster: Cluster, settings: Settings) -> None:
    topic = settings.kafka.topics.weights
    create_topics(cluster, settings)
    producer = cluster.producer(f"{topic}-x")
    with producer.transaction():
        producer.put(topic, b"a", b"1")
    end = cluster.watermarks(topic)[0][1]
    reader = cluster.reader("g", {(topic, 0): 0})
    got = []
    while not reader.at_end:
        got += reader.poll(10, 1.0)
    assert [r.value for r in got] == [b"1"]
    assert reader.positions[topic, 0] == end == 2
    reader.close()


def test_a_reader_whose_client_has_stopped_goes_on_with_a_new_one(
    cluster: Cluster, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "SILENT_S", 0.5)
    monkeypatch.setattr(reader_module, "DOUBT_S", 0.1)
    topic = settings.kafka.topics.dead_letters
    create_topics(cluster, settings)
    producer = cluster.producer(f"{topic}-stopped")
    reader = cluster.reader("g-stopped", {(topic, 0): cluster.end(topic, 0)})
    while not reader.at_end:
        reader.poll(10, 1.0)
    stopped = reader._consumer
    stopped.pause([TopicPartition(topic, 0)])  # nothing else makes librdkafka stop at will
    with producer.transaction():
        producer.put(topic, b"a", b"1")
    deadline, got = time.monotonic() + 30, []
    while not got and time.monotonic() < deadline:
        got = reader.poll(10, 0.1)
    assert [r.value for r in got] == [b"1"]
    assert reader._consumer is not stopped
    reader.close()


def test_position_of_another_topic_id_or_past_the_end(cluster: Cluster, settings: Settings) -> None:
    topic = settings.kafka.topics.weights
    create_topics(cluster, settings)
    topic_id = cluster.topic_id(topic)
    assert cluster.check_position(topic, topic_id, 0, 0)
    assert not cluster.check_position(topic, "another", 0, 5)
    with pytest.raises(
        SourceTruncated, match=r"ends at 0, position 5; run clawstream status --positions"
    ):
        cluster.check_position(topic, topic_id, 0, 5)


def test_a_reader_behind_the_end_of_its_topic_says_where_it_was(
    cluster: Cluster, settings: Settings
) -> None:
    topic = settings.kafka.topics.weights
    create_topics(cluster, settings)
    reader = cluster.reader("group", {(topic, 0): 7})
    with pytest.raises(
        SourceTruncated,
        match=rf"source truncated: {topic}-0, position 7, end 0: .*clawstream status --positions",
    ):
        while True:
            reader.poll()
    reader.close()


def test_rolled_back_transaction_is_not_seen(cluster: Cluster, settings: Settings) -> None:
    topic = settings.kafka.topics.weights
    create_topics(cluster, settings)
    producer = cluster.producer(f"{topic}-y")
    with pytest.raises(ZeroDivisionError), producer.transaction():
        producer.put(topic, b"a", b"1")
        raise ZeroDivisionError
    assert list(cluster.read_all(topic)) == []


def test_a_schema_announced_right_after_an_unknown_one_is_found(
    cluster: Cluster, settings: Settings
) -> None:
    """A newer release announces its schema, then writes records.

    No record may end as unknown, whatever lookups came before.
    """
    create_topics(cluster, settings)
    topic = settings.kafka.topics.schemas
    decoder, producer, codec = Decoder(cluster, topic), cluster.producer(), Codec()
    for _ in range(20):
        with pytest.raises(UnknownSchema):
            decoder.decode(MAGIC + b"12345678")
    (published,) = (p for p in codec.published(0) if p.name == "clawstream.Tick")
    schema = json.loads(published.schema_json)
    schema["fields"].append({"name": "colour", "type": "string", "default": ""})
    fingerprint = codec.announce(json.dumps(schema))
    producer.put(topic, b"broken", b"garbage")
    producer.put(
        topic,
        fingerprint.encode(),
        codec.encode(replace(published, schema_json=json.dumps(schema))),
    )
    producer.flush()
    body = b"\x06\x00\x06red"  # partition 3, no event time, "red"
    assert decoder.decode(MAGIC + bytes.fromhex(fingerprint) + body).partition == 3
    producer.close()


def test_a_flood_of_unknown_fingerprints_makes_no_client_each(
    cluster: Cluster, settings: Settings
) -> None:
    """A client takes 20 ms on the event loop that all partitions share."""
    create_topics(cluster, settings)
    made = []

    class Counted(Cluster):
        def watermarks(self, topic: str, *args: Any, **more: Any) -> dict[int, tuple[int, int]]:
            made.append(topic)
            return super().watermarks(topic, *args, **more)

    decoder = Decoder(Counted(settings.bootstrap_servers), settings.kafka.topics.schemas)
    for i in range(200):
        with pytest.raises(UnknownSchema):
            decoder.decode(MAGIC + i.to_bytes(8, "big"))
    assert 1 <= len(made) < 100


def test_confluent_framing_is_read_once_its_id_is_announced(
    cluster: Cluster, settings: Settings
) -> None:
    topic = settings.kafka.topics.schemas
    create_topics(cluster, settings)
    decoder = Decoder(cluster, topic)
    tick = Tick(partition=3, event_time=7)
    framed = b"\x00" + (41).to_bytes(4, "big") + decoder.codec.encode(tick)[10:]
    (schema,) = [s for s in decoder.codec.published(0) if s.name == "clawstream.Tick"]
    producer = cluster.producer()
    producer.put(
        topic, schema.fingerprint.encode(), decoder.codec.encode(replace(schema, confluent_id=41))
    )
    producer.flush()
    assert decoder.decode(framed) == tick


def test_whoever_starts_while_the_broker_is_away_waits_for_it(tmp_path: Path) -> None:
    """A process that ends instead is restarted, and takes CPU time from the starting broker."""
    with EmbeddedBroker(tmp_path, free_port()) as broker, ThreadPoolExecutor() as pool:
        cluster = Cluster(broker.bootstrap_servers)
        cluster.create_topic("t", 1, {})
        producer = cluster.producer()
        producer.put("t", b"k", b"v")
        producer.flush()
        producer.close()
        broker.kill()
        first = pool.submit(Cluster(broker.bootstrap_servers).watermarks, "t", [0])
        broker.restart()
        assert first.result(120) == {0: (0, 1)}
