"""The delivery on a real Kafka that stops, dies or loses its data.

Every answered call is on the log in order, and no call hangs.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.lake import column, running
from support.ports import free_port
from support.processes import freeze
from support.up import call

from clawstream.gateway.durability.blobs import Blobs
from clawstream.gateway.durability.delivery import DeliveryManager
from clawstream.gateway.durability.log import KafkaLogProducer, LogPosition, Message, Passed
from clawstream.gateway.durability.spool import Spool
from clawstream.gateway.durability.spool_frames import SYNC_BYTES, frame
from clawstream.gateway.metrics import Metrics
from clawstream.runtime.blob_store import BlobStore
from clawstream.runtime.broker.embedded import EmbeddedBroker
from clawstream.runtime.kafka import Cluster, KafkaError, LoopProducer, Unavailable
from clawstream.runtime.process.config import overrides_of
from clawstream.runtime.process.lifecycle import die
from clawstream.runtime.topics.records import create_topics
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Step
from clawstream.schemas.settings import Settings

TOPIC = "steps"
CODEC = Codec()
PRODUCE_TIMEOUT_S = 3.0
STOPS_S = 3 * PRODUCE_TIMEOUT_S
SYNC = bytes(range(SYNC_BYTES))
Eventually = Callable[..., Any]


@asynccontextmanager
async def delivery(
    broker: EmbeddedBroker, directory: Path, topic: str = TOPIC
) -> AsyncIterator[DeliveryManager]:
    """Run a started delivery on a reachable Kafka."""
    producer = KafkaLogProducer(Cluster(broker.bootstrap_servers), topic, PRODUCE_TIMEOUT_S)
    producer.start()
    blobs = Blobs(BlobStore(str(directory / "blobs")), CODEC, 30.0)
    it = DeliveryManager(producer, Spool(directory / "spool", 1 << 30), Metrics(), blobs=blobs)
    await it.start()
    async with asyncio.timeout(120):
        while not producer.reachable:  # noqa: ASYNC110 - a thread sets it
            await asyncio.sleep(0.01)
    yield it
    await it.close(drain_timeout_s=60)
    await producer.close()


def on_the_log(broker: EmbeddedBroker, topic: str = TOPIC) -> dict[bytes, list[bytes]]:
    """Return the values of each key in order, the first copy of each."""
    cluster, found = Cluster(broker.bootstrap_servers), defaultdict[bytes, dict[bytes, None]](dict)
    for partition in range(cluster.topics(topic)[topic]):
        for record in cluster.read_all(topic, partition):
            found[record.key or b""].setdefault(record.value or b"")
    return {key: list(values) for key, values in found.items()}


async def wait(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(90):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def pause(broker: EmbeddedBroker) -> Callable[[], None]:
    pid = broker.pid
    assert pid is not None
    freeze(pid)
    return lambda: os.kill(pid, signal.SIGCONT)


def kill(broker: EmbeddedBroker) -> Callable[[], None]:
    broker.kill()
    return broker.restart


@pytest.mark.parametrize("stop", [pause, kill])
def test_a_kafka_that_stops_under_load_loses_nothing_and_nothing_hangs(
    tmp_path: Path, stop: Callable[[EmbeddedBroker], Callable[[], None]]
) -> None:
    answered: dict[bytes, list[bytes]] = defaultdict(list)

    async def agent(it: DeliveryManager, key: bytes, until: asyncio.Event) -> None:
        number = 0
        while not until.is_set():
            value = b"%s-%d-" % (key, number) + b"x" * 2000
            await it.record([Message(TOPIC, key, value)])
            answered[key].append(value)
            number += 1
            await asyncio.sleep(0.02)

    async def body(broker: EmbeddedBroker) -> None:
        async with delivery(broker, tmp_path) as it:
            until = asyncio.Event()
            agents = [asyncio.create_task(agent(it, b"k%d" % i, until)) for i in range(32)]
            await wait(lambda: all(len(answered[b"k%d" % i]) > 5 for i in range(32)))
            go_on = await asyncio.to_thread(stop, broker)
            told = {key: len(values) for key, values in answered.items()}
            await asyncio.sleep(STOPS_S)
            await wait(lambda: it.spooled_keys == 32)
            # No call waits for the broker's return: the second answer from now on belongs to a call
            # that began without Kafka.
            await wait(lambda: all(len(answered[key]) > count + 1 for key, count in told.items()))
            await asyncio.to_thread(go_on)
            await wait(lambda: not it.spooled_bytes)
            before = sum(map(len, answered.values()))
            await wait(lambda: sum(map(len, answered.values())) > before + 100)
            until.set()
            await asyncio.gather(*agents)
        assert not list((tmp_path / "spool").rglob("*.spool"))

    with EmbeddedBroker(tmp_path / "kafka", free_port()) as broker:
        Cluster(broker.bootstrap_servers).create_topic(TOPIC, 4, {})
        asyncio.run(body(broker))
        assert on_the_log(broker) == answered


@pytest.mark.parametrize("meanwhile", [0, 3])
def test_a_wiped_broker_under_a_living_gateway_swallows_nothing(
    tmp_path: Path, meanwhile: int
) -> None:
    """A new broker may assign the producer id of the gateway's producer to another producer.

    The broker would then accept the gateway's records as the other producer's.

    meanwhile: number of records while no broker is there; with 0, the client itself has no reason
    to start a new producer session.
    """
    port = free_port()

    def fresh(name: str) -> EmbeddedBroker:
        broker = EmbeddedBroker(tmp_path / name, port)
        broker.start()
        Cluster(broker.bootstrap_servers).create_topic(TOPIC, 1, {})
        return broker

    def say(text: str) -> Message:
        return Message(TOPIC, b"k", text.encode())

    async def body() -> None:
        broker = await asyncio.to_thread(fresh, "first")
        async with delivery(broker, tmp_path) as it:
            for i in range(3):
                await it.record([say(f"before {i}")])
            await wait(lambda: not it.spooled_bytes)  # a slow record is acknowledged from the spool
            await asyncio.to_thread(broker.kill)
            within = [
                asyncio.create_task(it.record([say(f"within {i}")])) for i in range(meanwhile)
            ]
            assert [await task for task in within] == ["spooled"] * meanwhile
            broker.stop()
            broker = await asyncio.to_thread(fresh, "second")
            try:
                others = Cluster(broker.bootstrap_servers).producer()
                for i in range(5):  # as many batches as a broker remembers for a producer id
                    await others.send(TOPIC, b"o", b"other %d" % i)
                receipts = [await it.record([say(f"after {i}")]) for i in range(5)]
                while receipts[-1] != "acknowledged" or it.spooled_bytes:
                    await wait(lambda: not it.spooled_bytes)
                    receipts.append(await it.record([say(f"after {len(receipts)}")]))
                others.close()
                wanted = [
                    *(f"within {i}" for i in range(meanwhile)),
                    *(f"after {i}" for i in range(len(receipts))),
                ]
                assert on_the_log(broker)[b"k"] == [text.encode() for text in wanted]
            finally:
                await it.close()
                broker.stop()

    asyncio.run(body())


# ---------------------------------------------------------------- loop_producer


def post(
    loop_producer: LoopProducer, topic: str, *values: bytes
) -> asyncio.Future[KafkaError | None]:
    done: asyncio.Future[KafkaError | None] = asyncio.get_running_loop().create_future()
    loop_producer.post([(topic, b"k", value) for value in values], done.set_result)
    return done


def test_loop_producer_says_it_once_for_all_of_a_post(cluster: Cluster, settings: Settings) -> None:
    topic = settings.kafka.topics.steps
    cluster.create_topic(topic, 4, {})

    async def body() -> None:
        loop_producer = cluster.loop_producer(30.0, die)
        posts = [post(loop_producer, topic, b"%d" % i, b"%d too" % i) for i in range(200)]
        assert await asyncio.gather(*posts) == [None] * 200
        assert isinstance(await post(loop_producer, topic, b"small", bytes(11 << 20)), KafkaError)
        assert await post(loop_producer, topic, b"after") is None
        loop_producer.close()

    asyncio.run(body())
    values = [r.value for p in range(4) for r in cluster.read_all(topic, p)]
    assert (
        values[:400] == [v for i in range(200) for v in (b"%d" % i, b"%d too" % i)]
        and values[-1] == b"after"
    )


def test_loop_producer_takes_a_new_producer_id_and_fails_what_it_waited_for(
    cluster: Cluster, settings: Settings
) -> None:
    topic = settings.kafka.topics.steps
    cluster.create_topic(topic, 1, {})

    async def body() -> None:
        loop_producer = cluster.loop_producer(30.0, die)
        assert await post(loop_producer, topic, b"1") is None
        waiting = post(loop_producer, topic, b"2")
        loop_producer.renew_soon("the test says so")
        error = await waiting
        assert isinstance(error, Unavailable) and "the test says so" in str(error)
        assert await post(loop_producer, topic, b"3") is None
        loop_producer.close()

    asyncio.run(body())


def test_loop_producer_without_kafka_gives_up_in_time_and_takes_only_so_much() -> None:
    async def body() -> None:
        loop_producer = Cluster(f"127.0.0.1:{free_port()}").loop_producer(
            2.0, die, queue_buffering_max_kbytes=100
        )
        posts = [post(loop_producer, "t", bytes(10_000)) for _ in range(30)]
        full = [p for p in posts if p.done()]
        assert len(full) > 15 and all("queue is full" in str(p.result()) for p in full)
        assert all(isinstance(error, Unavailable) for error in await asyncio.gather(*posts))
        loop_producer.close(0.1)

    asyncio.run(body())


# ---------------------------------------------------------------- blobs


def a_step(number: int, request: bytes = b"{}") -> Step:
    return Step(
        step_id=f"k~{number:08d}.0", run_id="r", trajectory_key="k", call_id=f"k~{number:08d}",
        choice_index=0, protocol="openai.chat", model="policy", status="ok", streamed=False,
        request_json=request, response_json=b"{}", gateway_id="g", received_at=number,
        finished_at=number,
    )  # fmt: skip


def encoded(settings: Settings, step: Step) -> Message:
    return Message(settings.kafka.topics.steps, step.trajectory_key.encode(), CODEC.encode(step))


def test_a_body_larger_than_kafka_takes_is_recorded(
    cluster: Cluster, settings: Settings, tmp_path: Path
) -> None:
    create_topics(cluster, settings)
    topic, request = settings.kafka.topics.steps, b"q" * (20 << 20)

    async def body() -> None:
        producer = KafkaLogProducer(cluster, topic, 30.0)
        producer.start()
        store = BlobStore(settings.blob_uri)
        it = DeliveryManager(
            producer, Spool(tmp_path / "spool", 1 << 30), Metrics(), blobs=Blobs(store, CODEC, 30.0)
        )
        await it.start()
        await wait(lambda: producer.reachable)
        assert await it.record([encoded(settings, a_step(1, request))]) == "acknowledged"
        await it.close()
        await producer.close()
        (step,) = [CODEC.decode(r.value) for p in range(4) for r in cluster.read_all(topic, p)]
        assert isinstance(step, Step) and store.get(step.blobs[0].sha256) == request

    asyncio.run(body())


# ---------------------------------------------------------------- how old a spool is


def test_the_log_says_what_has_come_to_it_since_a_position(
    settings: Settings, cluster: Cluster
) -> None:
    topic = f"{settings.kafka.topic_prefix}.aged"
    cluster.create_topic(topic, 2, {"message.timestamp.type": "LogAppendTime"})
    producer = cluster.producer()

    def put(partition: int, count: int) -> None:
        for n in range(count):
            producer.put(topic, None, b"%d" % n, partition=partition)
        producer.flush()

    async def body() -> tuple[LogPosition, Passed, Passed, Passed]:
        put(0, 4)
        producer = KafkaLogProducer(cluster, topic, PRODUCE_TIMEOUT_S)
        producer.start()
        await wait(lambda: producer.position)
        position = producer.position
        assert position is not None
        nothing = await producer.passed_since(position)
        await asyncio.to_thread(put, 0, 2)
        await asyncio.to_thread(put, 1, 3)
        await asyncio.to_thread(put, 0, 1)
        some = await producer.passed_since(position._replace(ends=(5, 0)))
        made_anew = await producer.passed_since(position._replace(topic_id="another"))
        await producer.close()
        return position, nothing, some, made_anew

    position, nothing, some, made_anew = asyncio.run(body())
    producer.close()
    assert (position, nothing) == (LogPosition(cluster.topic_id(topic), (4, 0)), Passed(0, 0.0))
    times = [[r.timestamp_ms for r in cluster.read_all(topic, p)] for p in (0, 1)]
    assert some == Passed(5, max(times[0][-1] - times[0][5], times[1][-1] - times[1][0]) / 1000)
    assert made_anew == Passed(10, max(t[-1] - t[0] for t in times) / 1000)


# ---------------------------------------------------------------- clawstream spool drain


def in_lake(settings: Settings) -> list[str]:
    return sorted(column(settings, "steps", "step_id"))


def test_a_spool_that_is_too_old_is_drained_by_command_and_no_row_is_double(
    settings: Settings, cluster: Cluster, eventually: Eventually
) -> None:
    small = Settings.model_validate(
        settings.model_dump(exclude_unset=True)
        | {"lake": {"dedupe_window": 4, "flush_interval_s": 0.1}}
    )
    create_topics(cluster, small)
    steps = [a_step(n) for n in range(14)]
    producer = cluster.producer()
    for step in steps[:10]:  # the first ones have left the lake's window of ids by the end
        producer.put(*encoded(small, step))
    producer.flush()

    directory = small.spool_dir / "gateway-0"
    for name, first, last in (
        ("quarantined", 0, 2),
        (".", 2, 3),
        ("quarantined", 10, 12),
        (".", 12, 14),
    ):
        (directory / name).mkdir(parents=True, exist_ok=True)
        path = directory / name / f"{first + 1:012d}-{SYNC.hex()}-sent.spool"
        path.write_bytes(b"".join(frame(encoded(small, s), SYNC) for s in steps[first:last]))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # the disk has damaged the last record

    told = call("spool", "drain", *overrides_of(small))
    assert told.returncode == 1 and "records behind" in told.stderr, told.stdout + told.stderr
    with running(small) as lake:
        lake.write()
        eventually(lambda: len(in_lake(small)) == 10)
        gateway = Spool(directory, 1 << 20)
        gateway.open()
        beside = call("spool", "drain", *overrides_of(small))
        assert "gateway-0: 2 sent, 2 in the lake already, runs" in beside.stdout, (
            beside.stdout + beside.stderr
        )
        gateway.close()
        assert (
            call("spool", "drain", "--gateway-id", "nobody", *overrides_of(small)).returncode == 1
        )
        eventually(lambda: len(in_lake(small)) == 12)
        rest = call("spool", "drain", "--gateway-id", "gateway-0", *overrides_of(small))
        assert "gateway-0: 1 sent, 1 in the lake already\n" in rest.stdout, (
            rest.stdout + rest.stderr
        )
        eventually(lambda: len(in_lake(small)) == 13)
        (left,) = directory.rglob("*.spool")
        ill = call("status", *overrides_of(small))
        assert ill.returncode == 1 and f"{left}: " in ill.stdout, ill.stdout + ill.stderr
        left.write_bytes(whole)  # repaired, for example from a copy
        salvaged = call("spool", "drain", *overrides_of(small))
        assert "gateway-0: 1 sent, 1 in the lake already\n" in salvaged.stdout, (
            salvaged.stdout + salvaged.stderr
        )
        eventually(lambda: len(in_lake(small)) >= 14)
    assert in_lake(small) == [s.step_id for s in steps]
    assert not list(directory.rglob("*.spool"))
