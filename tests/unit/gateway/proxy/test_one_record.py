"""Every answered call leaves steps or a failed call, whatever the engine sends; no header lies."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import Queue
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.corpus import PATHS, replaying, reply
from support.examples import examples
from support.gateway import running
from support.log_producer import InMemoryLogProducer

from clawstream.gateway.app import create_app
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import FailedCall, Step
from clawstream.schemas.settings import Settings

CODEC = Codec()
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
}


class Gateway:
    """A gateway in a thread before an engine that sends any bytes."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._made: dict[str, bytes] = {}
        self._started: Queue[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Queue()
        self._producer = InMemoryLogProducer()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self._url, self._loop, self._over = self._started.get(timeout=300)

    async def _serve(self) -> None:
        async with replaying(self._made) as engine:
            said = {"upstreams": [{"url": engine, "kind": "text"}], "worker_wait_s": 60}
            known = Settings.model_validate({"data_dir": self._home, "gateway": said})
            engines = EngineRegistry(known.gateway.upstreams)
            app = create_app(known, self._producer, engines, CODEC)
            async with running(app) as url, aiohttp.ClientSession() as self._http:
                over = asyncio.Event()
                self._started.put((url, asyncio.get_running_loop(), over))
                await over.wait()

    def call(
        self, protocol: str, made: bytes, **more: Any
    ) -> tuple[int, list[str], list[Step | FailedCall]]:
        """Return the status, the named steps and the records of a call that gets this reply."""
        self._made["m"] = made
        body = {"model": "m"} | BODIES[protocol] | more
        found: Future[tuple[int, list[str]]] = asyncio.run_coroutine_threadsafe(
            self._post(PATHS[protocol], body), self._loop
        )
        status, named = found.result(60)
        records = [CODEC.decode(m.value) for m in self._producer.messages]
        self._producer.messages.clear()
        return status, named, records

    async def _post(self, path: str, body: Any) -> tuple[int, list[str]]:
        async with self._http.post(self._url + "/t/g" + path, json=body) as got:
            await got.read()
            named = got.headers.get("x-clawstream-step", "")
        return got.status, [name for name in named.split(",") if name]

    def close(self) -> None:
        """Stop the gateway."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(60)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    made = Gateway(tmp_path_factory.mktemp("one-record"))
    yield made
    made.close()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 600) | st.sampled_from(["", "a", "error", "stop"]),
    lambda inner: st.lists(inner, max_size=2),
    max_leaves=3,
)
DELTAS = st.fixed_dictionaries(
    {},
    optional={
        "role": st.just("assistant"),
        "content": VALUES,
        "tool_calls": st.lists(
            st.fixed_dictionaries(
                {"function": st.fixed_dictionaries({"arguments": st.sampled_from(["", "{}"])})},
                optional={"index": st.integers(0, 1), "id": st.sampled_from(["", "a", "b"])},
            ),
            max_size=2,
        ),
    },
)
CHOICES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "index": st.integers(0, 3) | VALUES,
            "delta": DELTAS | VALUES,
            "message": DELTAS | VALUES,
            "text": VALUES,
            "finish_reason": st.sampled_from([None, "stop", "length", "abort", 7]),
        },
    ),
    max_size=3,
)
BLOCKS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "tool_use", "sketch", "text_delta", "sketch_delta"])},
    optional={"text": VALUES, "x": VALUES, "stop_reason": st.sampled_from([None, "end_turn"])},
)
ITEMS = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "function_call"])},
    optional={"id": st.sampled_from(["a", "b"]), "content": VALUES, "arguments": VALUES},
)
TYPES = st.sampled_from([
    "message_start", "content_block_start", "content_block_delta", "message_delta", "message_stop",
    "ping", "error", "tomorrow", "response.created", "response.output_item.added",
    "response.output_item.done", "response.output_text.delta", "response.sketch.delta",
    "response.completed", "response.failed",
])  # fmt: skip
PAYLOADS = st.fixed_dictionaries(
    {},
    optional={
        "type": TYPES,
        "choices": CHOICES | VALUES,
        "content": st.lists(BLOCKS, max_size=2) | VALUES,
        "output": st.lists(ITEMS, max_size=2) | VALUES,
        "usage": st.none() | st.just({"prompt_tokens": 3, "completion_tokens": 1}) | VALUES,
        "error": st.sampled_from([None, "broken", {"message": "broken", "code": 429}]),
        "object": st.sampled_from(["error", "chat.completion"]),
        "message": VALUES | st.just({"role": "assistant", "content": []}),
        "code": VALUES,
        "index": st.integers(0, 2),
        "output_index": st.integers(0, 1),
        "content_block": BLOCKS,
        "delta": BLOCKS | st.just("x"),
        "item": ITEMS,
        "response": st.fixed_dictionaries({}, optional={"output": st.lists(ITEMS, max_size=2)}),
    },
)
EVENTS = st.builds(
    lambda name, payload: name + b"data: " + payload + b"\n\n",
    st.sampled_from([b"", b"", b"event: error\n"]),
    PAYLOADS.map(lambda p: json.dumps(p).encode()) | st.sampled_from([b"[DONE]", b"{", b"1"]),
) | st.sampled_from([b": wait\n\n", b"\n\n", b"data: cut"])
REPLIES = st.lists(EVENTS, max_size=5).map(b"".join) | PAYLOADS.map(
    lambda p: json.dumps(p).encode()
)


@pytest.mark.slow
@settings(
    max_examples=examples(400),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)
@example("chat", b'{"choices":[],"usage":{"prompt_tokens":19}}', "application/json", False, 1, 200)
@example("chat", b"data: [DONE]\n\n", "text/event-stream", True, 1, 200)
@example("messages", b"", "text/event-stream", True, 1, 200)
@example("chat", b"", "text/html", False, 1, 307)
@given(
    protocol=st.sampled_from(sorted(BODIES)),
    made=REPLIES,
    kind=st.sampled_from(["text/event-stream", "application/json", "text/plain"]),
    stream=st.booleans(),
    n=st.integers(1, 3),
    status=st.sampled_from([200, 200, 200, 201, 301, 404, 500]),
)
def test_any_reply_leaves_exactly_one_kind_of_record(
    gateway: Gateway, protocol: str, made: bytes, kind: str, stream: bool, n: int, status: int
) -> None:
    whole = reply(made, kind).replace(b" 200 OK", b" %d OK" % status, 1)
    more = {"n": n} if protocol in ("chat", "completions") else {}
    got, named, records = gateway.call(protocol, whole, stream=stream, **more)
    steps = [r.step_id for r in records if isinstance(r, Step)]
    failed = [r for r in records if isinstance(r, FailedCall)]
    assert bool(steps) != bool(failed) and len(failed) <= 1
    assert len(set(steps)) == len(steps)
    assert set(named) <= set(steps) and bool(named) == bool(steps)
    assert got == (502 if status == 301 or status == 307 else status)
    if got >= 300:
        assert failed
