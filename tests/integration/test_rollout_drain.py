"""A stopping worker lets the calls in flight finish.

A real vLLM, a gateway and a Kafka run as separate processes.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from support.ports import free_port
from support.up import ENVIRON, ROOT, command

from clawstream.demo import model
from clawstream.runtime.kafka import Cluster
from clawstream.runtime.process.child import die_with_parent
from clawstream.runtime.process.config import overrides_of
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Step, WorkerStatus
from clawstream.schemas.settings import Settings

TOKENS = 230
STREAMS = 24


@contextmanager
def process(settings: Settings, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run one process; kill it at the end if it still runs."""
    log = settings.data_dir / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        child = subprocess.Popen(
            die_with_parent(command(name, *overrides_of(settings))),
            cwd=ROOT,
            env=ENVIRON,
            stdout=out,
            stderr=out,
        )
    try:
        yield child
    except BaseException:
        print(log.read_text(errors="replace")[-4000:])
        raise
    finally:
        child.kill()
        child.wait()


def asked(stream: bool = True, tokens: int = TOKENS) -> dict[str, Any]:
    return {
        "model": "policy", "messages": [{"role": "user", "content": "price of k374 plus 2?"}],
        "stream": stream, "max_tokens": tokens, "ignore_eos": True,
    }  # fmt: skip


async def until_answers(http: aiohttp.ClientSession, url: str) -> None:
    """Wait until a whole call through the gateway succeeds: the worker is ready and registered."""
    async with asyncio.timeout(600):
        while True:
            try:
                async with http.post(url, json=asked(stream=False, tokens=1)) as reply:
                    if reply.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)


async def events_of(reply: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async for line in reply.content:
        if line.startswith(b"data: "):
            yield line[6:].strip()


def test_streams_in_flight_survive_the_end_of_their_worker(
    cluster: Cluster, settings: Settings, tmp_path: Path
) -> None:
    engine, port = free_port(), free_port()
    settings = Settings.model_validate(
        settings.model_dump(exclude_unset=True)
        | {
            "gateway": {"port": port, "worker_wait_s": 0.2},
            "up": {"stop_timeout_s": 300},  # the streams of a slow engine take their time to end
            "rollout": {
                "host": "0.0.0.0", "port": engine, "public_url": f"http://127.0.0.1:{engine}/v1",
                "serve_base": True, "model_path": model.make_random_model(tmp_path / "model"),
                "dtype": "float32", "heartbeat_s": 5.0, "max_model_len": model.MAX_TOKENS,
                "max_num_seqs": STREAMS, "kv_cache_mb": 64,
            },
        }
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}/v1/chat/completions"

    async def scenario(worker: subprocess.Popen[bytes]) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            await until_answers(http, url)
            begun = asyncio.Barrier(STREAMS + 1)

            async def stream() -> list[bytes]:
                async with http.post(url, json=asked()) as reply:
                    assert reply.status == 200
                    events = events_of(reply)
                    first = await anext(events)
                    await begun.wait()
                    return [first, *[event async for event in events]]

            streams = [asyncio.create_task(stream()) for _ in range(STREAMS)]
            await begun.wait()
            worker.send_signal(signal.SIGTERM)
            for told in await asyncio.gather(*streams):
                assert told[-1] == b"[DONE]"
                assert json.loads(told[-2])["choices"][0]["finish_reason"] == "length"
            assert await asyncio.to_thread(worker.wait, 300) == 0
            async with http.post(url, json=asked(stream=False)) as late:
                assert late.status == 503

    with process(settings, "gateway"), process(settings, "rollout") as worker:
        asyncio.run(scenario(worker))
    codec, topics = Codec(), settings.kafka.topics
    found = [r for p in range(settings.kafka.partitions) for r in cluster.read_all(topics.steps, p)]
    steps = [s for r in found if isinstance(s := codec.decode(r.value or b""), Step) and s.streamed]
    assert [(s.status, s.finish_reason, len(s.response_token_ids or b"")) for s in steps] == [
        ("ok", "length", 4 * TOKENS)
    ] * STREAMS
    said = [
        None if r.value is None else codec.decode(r.value) for r in cluster.read_all(topics.workers)
    ]
    assert said[-1] is None
    statuses = [s for s in said if isinstance(s, WorkerStatus)]
    assert statuses[-1].state == "draining"
    assert {s.base_url for s in statuses} == {f"http://127.0.0.1:{engine}"}
