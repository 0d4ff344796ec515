"""Test the loop producer without a broker: every post is reported once and in time."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import Any

import pytest

from clawstream.gateway.durability.log import KafkaLogProducer
from clawstream.runtime.kafka import Cluster, KafkaError, LoopProducer, Unavailable
from clawstream.runtime.process.lifecycle import die

NOWHERE = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}


def told(
    loop_producer: LoopProducer, *records: tuple[str, bytes, bytes]
) -> asyncio.Future[KafkaError | None]:
    future: asyncio.Future[KafkaError | None] = asyncio.get_running_loop().create_future()
    loop_producer.post(records, future.set_result)
    return future


def test_no_records_are_acknowledged_at_once() -> None:
    async def run() -> None:
        assert told(LoopProducer(NOWHERE, 60.0, die)).result() is None

    asyncio.run(run())


def test_no_records_say_nothing_about_the_log() -> None:
    answers: list[Any] = []
    producer = KafkaLogProducer(Cluster("127.0.0.1:1"), "t", 60.0)
    producer.send([], answers.append)
    assert answers == [None] and not producer.reachable


def test_a_tick_that_fails_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        said: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, what: said.append(what["exception"])
        )
        loop_producer = LoopProducer(NOWHERE, 0.3, die)
        with monkeypatch.context() as patch:

            def no_thread(_: threading.Thread) -> None:
                raise RuntimeError("can't start new thread")

            patch.setattr(threading.Thread, "start", no_thread)
            first = told(loop_producer, ("t", b"k", b"1"))
            loop_producer.renew_soon("to see it fail")
            async with asyncio.timeout(60):
                assert isinstance(await first, Unavailable)
                while not said:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        async with asyncio.timeout(60):
            assert isinstance(await told(loop_producer, ("t", b"k", b"2")), Unavailable)
        assert [str(e) for e in said] == ["can't start new thread"]

    asyncio.run(run())


BUG = """
import asyncio
from clawstream.runtime.kafka import LoopProducer
from clawstream.runtime.process.lifecycle import die
from clawstream.runtime.logs import configure

async def main():
    def done(error):
        raise ValueError("a bug of the caller")
    LoopProducer({"bootstrap.servers": "127.0.0.1:1"}, 0.2, die).post([("t", b"k", b"v")], done)
    await asyncio.sleep(60)

configure("gateway")
asyncio.run(main())
"""


@pytest.mark.slow
def test_whom_nobody_could_tell_is_worth_a_crash() -> None:
    done = subprocess.run([sys.executable, "-c", BUG], capture_output=True, timeout=300)
    assert done.returncode == 70 and b"a bug of the caller" in done.stderr + done.stdout


def test_records_in_flight_are_told_on_the_loop_at_the_end() -> None:
    threads = list[int]()

    async def scenario() -> None:
        loop_producer = LoopProducer(NOWHERE, 0.3, die)
        loop_producer.post([("t", b"k", b"v")], lambda error: threads.append(threading.get_ident()))
        await loop_producer.drain(60)
        assert threads == [threading.get_ident()]

    asyncio.run(scenario())
