"""A run's rollout budget, published by the real admission on a real Kafka."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import aiohttp
import pytest
from support.admit import cand
from support.ports import free_port
from support.processes import freeze

from clawstream.gateway.api.rollout_budget.budget import BudgetReading
from clawstream.gateway.api.rollout_budget.feed import BudgetFeed
from clawstream.gateway.errors import BudgetUnknown
from clawstream.gateway.main import serve as serve_gateway
from clawstream.runtime.broker.embedded import EmbeddedBroker
from clawstream.runtime.kafka import Cluster
from clawstream.runtime.topics.records import create_topics
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import WeightVersion
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.admit.main import serve

CODEC = Codec()
SOON_S = 240.0
PLACE = {"topic_id": b"payload", "partition": b"0", "first_offset": b"0", "last_offset": b"0"}


@contextmanager
def admission(settings: Settings) -> Iterator[None]:
    """Run the real admission in a thread of this process."""
    stop, failed = Event(), list[BaseException]()

    def run() -> None:
        try:
            serve(settings, stop)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failed.append(error)

    thread = Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(180)
    assert not failed and not thread.is_alive()


@contextmanager
def _feeding(feed: BudgetFeed) -> Iterator[BudgetFeed]:
    feed.start()
    try:
        yield feed
    finally:
        feed.stop()


async def when(
    feed: BudgetFeed, run: str, condition: Callable[[BudgetReading], Any]
) -> BudgetReading:
    """Return the first reading that meets the condition."""
    async with asyncio.timeout(SOON_S):
        while True:
            with suppress(BudgetUnknown):
                reading = await feed.get(run, "train")
                if reading is not None and condition(reading):
                    return reading
            await asyncio.sleep(0.02)


async def absent(feed: BudgetFeed, run: str) -> bool:
    """Return whether admission has published no budget; False while that is unknown."""
    with suppress(BudgetUnknown):
        return await feed.get(run, "train") is None
    return False


async def until(condition: Callable[[], Awaitable[Any]]) -> None:
    async with asyncio.timeout(SOON_S):
        while not await condition():  # noqa: ASYNC110 - a thread and Kafka make it true
            await asyncio.sleep(0.05)


def wanting(settings: Settings, run: str) -> Settings:
    rules = {"group_size": 2, "batch_groups": 2, "required_rewards": ("rule",), "max_staleness": 1}
    admit = settings.admit.model_copy(
        update={"policy": settings.admit.policy.model_copy(update=rules)}
    )
    return settings.model_copy(update={"run_id": run, "admit": admit})


class Log:
    """Write records in place of the jobs and the trainer."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._topics, self._producer = settings.kafka.topics, cluster.producer()

    def group(self, run: str, name: str, *values: float, sync: int = 0) -> None:
        for i, value in enumerate(values):
            made = cand(f"{name}-{i}", name, value, run_id=run, oldest_sync_index=sync)
            self._producer.put(self._topics.candidates, run.encode(), CODEC.encode(made), PLACE)
        self._producer.flush()

    def version(self, run: str, sync_index: int) -> None:
        made = WeightVersion(
            version_id=f"{run}/{sync_index}.0", run_id=run, sync_index=sync_index, attempt=0,
            format="full", files=(), channel="train", metrics={}, created_at=0,
        )  # fmt: skip
        self._producer.put(self._topics.weights, made.version_id.encode(), CODEC.encode(made))
        self._producer.flush()

    def budget(self, run: str, value: bytes) -> None:
        self._producer.put(self._topics.budgets, f"{run}.train".encode(), value)
        self._producer.flush()


def test_demand_follows_the_real_admission(cluster: Cluster, settings: Settings) -> None:
    create_topics(cluster, settings)
    log = Log(cluster, settings)

    async def body() -> None:
        with _feeding(BudgetFeed(cluster, settings)) as feed:
            await until(lambda: absent(feed, "one"))  # its admission has not started
            with admission(wanting(settings, "one")):
                opened = await when(feed, "one", lambda s: s.budget.policy_version is not None)
                assert opened.free_capacity() == 0, "no version to begin with"
                log.version("one", 0)
                log.version("another", 7)
                log.group("one", "g0", 0.0, 1.0)
                log.group("one", "g1", 1.0, 1.0)
                log.group("one", "g2", 0.0, 1.0)
                reading = await when(
                    feed,
                    "one",
                    lambda s: s.budget.next_batch_seq == 1 and s.newest_sync_index == 0,
                )
                assert [(r.group_id, r.n, r.reason) for r in reading.budget.refusals] == [
                    ("g1", 2, "zero_variance")
                ]
                assert (reading.budget.groups_admitted, reading.budget.replacements_total) == (
                    2,
                    2,
                )
                assert reading.budget.journal_id == cluster.topic_id(
                    settings.kafka.topics.ready_batches("one", "train")
                )
                assert reading.free_capacity() == 2, "batch 1; batch 2 would be two versions ahead"
                for name in ("g3", "g4", "g5", "g6"):
                    log.group("one", name, 0.0, 1.0)
                full = await when(feed, "one", lambda s: len(s.budget.refusals) == 3)
                assert [
                    r.reason for r in full.refusals_after(reading.budget.refusals[-1].offset)[0]
                ] == ["stale"] * 2
                assert full.free_capacity() == 0
                log.version("one", 1)
                await when(feed, "one", lambda s: s.free_capacity() == 2)
                # A second run joins; the first keeps its totals.
                with admission(wanting(settings, "two")):
                    await when(feed, "two", lambda s: s.budget.policy_version is not None)
                    again = await when(feed, "one", lambda s: True)
                    assert again.budget.replacements_total == 6
                    log.version("two", 0)
                    await when(feed, "two", lambda s: s.newest_sync_index == 0)
        with _feeding(BudgetFeed(cluster, settings)) as fresh:
            assert (await when(fresh, "one", lambda s: True)).budget == again.budget, (
                "as if it had followed all the time"
            )
            with admission(wanting(settings, "one")):
                log.group("one", "g7", 0.0)
                log.group("one", "g8", 1.0, 1.0, sync=1)
                more = await when(fresh, "one", lambda s: s.budget.replacements_total == 8)
            assert more.budget.refusals[:-1] == again.budget.refusals, (
                "a restarted admission continues the totals and the list"
            )

    asyncio.run(body())


def test_a_gateway_serves_it(cluster: Cluster, settings: Settings) -> None:
    mine, port = wanting(settings, "one"), free_port()
    mine = mine.model_copy(update={"gateway": mine.gateway.model_copy(update={"port": port})})
    create_topics(cluster, mine)
    Log(cluster, mine).version("one", 4)

    async def body() -> None:
        stop = asyncio.Event()
        gateway = asyncio.create_task(serve_gateway(mine, stop))
        url = f"http://127.0.0.1:{port}/runs/one/demand"

        async def says(status: int, free: int | None) -> bool:
            with suppress(aiohttp.ClientConnectorError):
                async with aiohttp.ClientSession() as http, http.get(url) as reply:
                    return (
                        reply.status == status
                        and (await reply.json()).get("free_staleness_capacity") == free
                    )
            return False

        await until(lambda: says(404, None))
        with admission(mine):
            await until(lambda: says(200, 12))
        stop.set()
        await gateway

    asyncio.run(body())


def test_a_recreated_journal_and_a_budget_that_cannot_be_read(
    cluster: Cluster, settings: Settings
) -> None:
    create_topics(cluster, settings)
    topics, log = settings.kafka.topics, Log(cluster, settings)
    journal, mine = topics.ready_batches("one", "train"), wanting(settings, "one")

    async def body() -> None:
        with _feeding(BudgetFeed(cluster, settings)) as feed:
            with admission(mine):
                log.group("one", "g0", 1.0, 1.0)
                first = await when(feed, "one", lambda s: s.budget.replacements_total == 2)
            log.budget("one", b"garbage")
            cluster.delete_topic(journal)

            async def gone(topic: str) -> bool:
                return topic not in await asyncio.to_thread(cluster.topics)

            await until(lambda: gone(journal))
            assert (await when(feed, "one", lambda s: True)).budget == first.budget
            with admission(mine):
                recreated = await when(
                    feed,
                    "one",
                    lambda s: (
                        s.budget.journal_id != first.budget.journal_id
                        and s.budget.replacements_total == 2
                    ),
                )
            assert recreated.budget.journal_id == cluster.topic_id(journal)
            cluster.delete_topic(topics.budgets)
            await until(lambda: gone(topics.budgets))
            create_topics(cluster, settings)
            await until(lambda: absent(feed, "one"))

    asyncio.run(body())


def test_kafka_away_leaves_what_was_known_with_its_age(tmp_path: Path, settings: Settings) -> None:
    ahead_s = [0.0]
    with EmbeddedBroker(tmp_path / "kafka", free_port()) as broker:
        cluster = Cluster(broker.bootstrap_servers)
        create_topics(cluster, settings)
        kafka = settings.kafka.model_copy(update={"bootstrap_servers": broker.bootstrap_servers})
        mine = wanting(settings.model_copy(update={"kafka": kafka}), "one")

        async def body() -> None:
            with _feeding(
                BudgetFeed(cluster, settings, lambda: time.monotonic() + ahead_s[0])
            ) as feed:
                with admission(mine):
                    known = await when(feed, "one", lambda s: s.budget.policy_version is not None)
                with paused(broker):
                    ahead_s[0] = 60.0
                    late = await feed.get("one", "train")
                    assert late is not None and late.budget == known.budget and late.age_s >= 59.0
                    with pytest.raises(BudgetUnknown):
                        await feed.get("other", "train")
                await when(feed, "one", lambda s: s.age_s < 30)

        asyncio.run(body())


@contextmanager
def paused(broker: EmbeddedBroker) -> Iterator[None]:
    pid = broker.pid
    assert pid is not None
    freeze(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
