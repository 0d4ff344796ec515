"""The time that `clawstream up` waits for its broker.

It waits as long as the broker lives, and stops waiting when it is asked to stop.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from support.patience import until_async
from support.ports import free_port

from clawstream.ops.up import Installation, main
from clawstream.runtime.broker.embedded import BrokerError
from clawstream.runtime.process.ports import PortTaken
from clawstream.runtime.process.supervisor import ProcessSpec, ask_to_stop
from clawstream.runtime.process.table import read_table
from clawstream.schemas.settings import Settings

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def settings(directory: Path, port: int, **broker: str) -> Settings:
    return Settings.model_validate(
        {
            "data_dir": str(directory),
            "broker": {"port": port, **broker},
            "up": {"processes": ["broker"], "restart_delay_s": 0.05},
        }
    )


def test_a_broker_that_lives_but_does_not_serve_is_waited_for_past_the_time_out(
    tmp_path: Path,
) -> None:
    """A broker that recovers its logs lives but does not serve.

    When the broker has ended for good, the error reports its end.
    """

    async def body() -> None:
        async with Installation(settings(tmp_path, free_port())) as installation:
            supervisor = installation.supervisor
            supervisor.start(ProcessSpec("broker", SLEEP))
            await until_async(lambda: supervisor.state("broker") == "running")
            with capture_logs() as lines:
                waiting = asyncio.create_task(
                    installation.wait_for_kafka(timeout_s=0.0, report_every_s=0.0)
                )
                await until_async(lambda: len(lines) >= 3 or waiting.done())
            assert not waiting.done()
            assert {line["event"] for line in lines} == {"waiting_for_broker"}
            await supervisor.stop("broker")
            with pytest.raises(BrokerError, match=r"stopped.*broker\.log"):
                await asyncio.wait_for(waiting, 60)

    asyncio.run(body())


def test_up_can_be_stopped_while_it_waits_for_its_broker(tmp_path: Path) -> None:
    java = tmp_path / "java"  # one that starts and never serves
    java.write_text(
        '#!/bin/sh\n[ "$1" = -version ] && echo \'openjdk version "21.0.1"\' >&2 && exit 0\n'
        "exec sleep 600\n"
    )
    java.chmod(0o755)

    async def body() -> None:
        stop = asyncio.Event()
        up = asyncio.create_task(main(settings(tmp_path, free_port(), java=str(java)), stop))
        await until_async(
            lambda: (
                up.done() or read_table(tmp_path).get("processes", {}).get("broker", {}).get("pid")
            )
        )
        assert not up.done()
        stop.set()
        await asyncio.wait_for(up, 60)

    asyncio.run(body())
    assert ask_to_stop(tmp_path) is None


def test_nothing_is_waited_for_when_the_broker_cannot_run(tmp_path: Path) -> None:
    """On a full disk, for example, Kafka ends, and lag cannot be read."""

    async def body() -> None:
        async with Installation(settings(tmp_path, free_port())) as installation:
            supervisor = installation.supervisor
            supervisor.start(
                ProcessSpec(
                    "broker", [sys.executable, "-c", "raise SystemExit('the disk is full')"]
                )
            )
            supervisor.start(ProcessSpec("assemble", SLEEP))
            await until_async(
                lambda: (
                    supervisor.state("broker") == "restarting"
                    and supervisor.state("assemble") == "running"
                )
            )
            with capture_logs() as lines:
                assert not await installation.stop_in_order()
            assert [line["what"] for line in lines if line["event"] == "drain_skipped"] == ["jobs"]
            assert supervisor.state("assemble") == "stopped"

    asyncio.run(body())


def test_a_port_that_is_taken_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            PortTaken, match=rf"broker cannot listen on 127\.0\.0\.1:{port}: .* set broker\.port"
        ):
            asyncio.run(main(settings(tmp_path, port), asyncio.Event()))
    assert read_table(tmp_path)["processes"] == {}
