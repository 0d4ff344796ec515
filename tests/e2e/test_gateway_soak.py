"""Send 200,000 calls to one gateway process: its memory must not grow with the served calls.

Consecutive calls differ: four protocols, plain and streamed replies, trajectories named by path,
header or session key, anonymous sessions, new model names, rewards and completions, clients that
disconnect. The gateway must bound its memory of each of these; 200,000 calls exceed every bound.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
import uvloop
from support.ports import free_port
from support.soak_engine import SLOW
from support.up import ENVIRON, ROOT, command

from benchmarks.gateway.http_load import load
from clawstream.gateway.auth.session_keys import Session, SessionKeys
from clawstream.runtime.process.child import die_with_parent
from clawstream.runtime.process.config import overrides_of
from clawstream.schemas.settings import Settings

CALLS = 200_000
FROM = 50_000
"""Number of calls after which memory is measured first: the caches are full then."""
ROUND = 5_000
CONCURRENCY = 48
LEAVERS = 2
GROWTH = 0.05
SECRET = "the secret of the soak"
SESSIONS = SessionKeys(SECRET.encode())
PATHS = ("/chat/completions", "/completions", "/responses", "/messages")
AGENTS = (
    "OpenAI/Python 3.54.0",
    "claude-cli/2.1.0 (external, cli)",
    "codex_cli_rs/0.50.0",
    "python-requests/2.32",
)
pytestmark = pytest.mark.long


def body_of(i: int, path: str, said: str) -> dict[str, Any]:
    """Return a request of a few kilobytes.

    The calls use more model names than the gateway remembers.
    """
    model = f"policy-{i % 7000}" if i % 10 == 0 else "policy"
    system, turn = "You are a careful agent. " * 60, {"role": "user", "content": said}
    stream = {"stream": True} if (i // 4) % 2 else {}
    match path:
        case "/completions":
            return {"model": model, "prompt": system + said, **stream}
        case "/responses":
            return {"model": model, "instructions": system, "input": [turn], **stream}
        case "/messages":
            return {
                "model": model,
                "max_tokens": 64,
                "system": system,
                "messages": [turn],
                **stream,
            }
    return {"model": model, "messages": [{"role": "system", "content": system}, turn], **stream}


def place_of(i: int, path: str) -> tuple[str, dict[str, str]]:
    """Return path and headers of the i-th call.

    Consecutive calls share a trajectory, which they name in one of three ways or not at all.
    """
    key = f"soak-{i // 8}"
    match (i // 8) % 4:
        case 0:
            return f"/{key}/group-{i // 64}/v1{path}", {}
        case 1:
            return f"/v1{path}", {
                "x-clawstream-trajectory": key,
                "x-clawstream-group": f"group-{i // 64}",
            }
        case 2:
            # Short trajectories, so that the cache of keys is full at the first measurement.
            token = SESSIONS.mint(Session("default", f"soak-{i // 2}", channel="train"))
            return f"/v1{path}", {"authorization": f"Bearer {token}"}
    # An anonymous session, identified by caller and first turn.
    return f"/v1{path}", {"authorization": f"Bearer someone-{i // 80}"}


def request(i: int) -> bytes:
    """Return the i-th call: a model call, except for one reward and one completion in 50 calls."""
    path = PATHS[i % 4]
    if i % 50 == 48:
        said: dict[str, Any] = {
            "trajectory_id": f"soak-{i // 8}",
            "source": "env",
            "name": "soak",
            "function_version": "1",
            "value": 0.5,
        }
        return _http("/rewards", {}, orjson.dumps(said))
    if i % 50 == 49:
        return _http(f"/complete_trajectory/soak-{i // 8}", {}, orjson.dumps({"reward": 1.0}))
    where, headers = place_of(i, path)
    body = orjson.dumps(body_of(i, path, f"price of k{i // 8} plus 2?"))
    return _http(where, headers | {"user-agent": AGENTS[i % 4], "x-request-id": f"r{i}"}, body)


def _http(path: str, headers: dict[str, str], body: bytes) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{lines}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def leave(port: int, numbers: Iterator[int]) -> int:
    """Start streams and disconnect until cancelled; return the number of disconnects."""
    left = 0
    try:
        while True:
            path = PATHS[left % 4]
            body = orjson.dumps(body_of(4, path, SLOW.decode()))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with closing(writer):
                writer.write(_http(f"/left-{next(numbers)}/g/v1{path}", {}, body))
                await reader.read(1000)
                await asyncio.sleep(random.random() * 0.2)
            left += 1
    except asyncio.CancelledError:
        return left


async def rounds(port: int, first: int, calls: int) -> int:
    """Make calls while other clients disconnect; return the number of disconnects."""
    numbers = itertools.count(first)
    leaving = [asyncio.create_task(leave(port, numbers)) for _ in range(LEAVERS)]
    outcome = await load(port, lambda i: request(first + i), calls, CONCURRENCY)
    for task in leaving:
        task.cancel()
    assert not outcome.failed, outcome.first_failure
    return sum(await asyncio.gather(*leaving))


@contextmanager
def running(name: str, argv: list[str], log: Path) -> Iterator[psutil.Process]:
    """Start a process and kill it at the end."""
    environ = ENVIRON | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    with log.open("ab") as out:
        child = subprocess.Popen(
            die_with_parent(argv), cwd=ROOT, env=environ, stdout=out, stderr=out
        )
    try:
        yield psutil.Process(child.pid)
    except BaseException:
        print(name, log.read_text(errors="replace")[-4000:])
        raise
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()


def scraped(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as reply:
        return str(reply.read().decode())


def counted(text: str, name: str) -> float:
    """Return the sum of the samples whose names start with `name`."""
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


def until_ready(port: int) -> Callable[[], bool]:
    def ready() -> bool:
        try:
            return bool(scraped(port, "/ready"))
        except OSError:
            return False

    return ready


def test_memory_does_not_grow_with_the_calls_served(
    settings: Settings, tmp_path: Path, eventually: Callable[..., object]
) -> None:
    engine, port = free_port(), free_port()
    given = {
        "port": port,
        "session_secret": SECRET,
        "upstreams": [f"http://127.0.0.1:{engine}"],
        "auth": "open",
    }
    settings = Settings.model_validate(settings.model_dump(exclude_unset=True) | {"gateway": given})
    with ExitStack() as stack:
        stack.enter_context(
            running(
                "engine",
                [sys.executable, "-m", "support.soak_engine", str(engine)],
                tmp_path / "engine.log",
            )
        )
        ours = stack.enter_context(
            running(
                "gateway", command("gateway", *overrides_of(settings)), tmp_path / "gateway.log"
            )
        )
        eventually(until_ready(port))
        began, sizes, left, samples = time.monotonic(), list[tuple[int, int]](), 0, 0
        for first in range(0, CALLS, ROUND):
            left += uvloop.run(rounds(port, first, ROUND))
            sizes.append((first + ROUND, ours.memory_info().rss))
            if first + ROUND == FROM:
                samples = len(scraped(port).splitlines())
            print(
                f"{sizes[-1][0]} calls: {sizes[-1][1] / 2**20:.1f} MiB, "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )
        # The gateway finishes the calls of the clients that disconnected.
        eventually(lambda: counted(scraped(port), "clawstream_gateway_in_flight") == 0)
        told = scraped(port)
    answered = counted(told, "clawstream_gateway_steps_answered_total")
    # A reply may have ended before its client disconnected.
    assert 0 <= answered - (CALLS - 2 * (CALLS // 50)) <= left
    assert counted(told, 'clawstream_gateway_steps_recorded_total{status="aborted"}') > left / 2 > 0
    assert counted(told, "clawstream_gateway_steps_spooled_total") == 0
    assert len(told.splitlines()) <= samples + 4
    sizes_after = dict(sizes)
    growth = sizes_after[CALLS] / sizes_after[FROM] - 1
    assert growth < GROWTH, f"{growth:.1%} from {FROM} to {CALLS} calls: {sizes}"
