"""CPU time of bodies: it grows linearly with their size, whatever they contain.

The event loop serves all calls, so the time of one body is the wait of all others.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.log_producer import InMemoryLogProducer

from clawstream.gateway.app import create_app
from clawstream.gateway.asgi.messages import App
from clawstream.gateway.capture.engine_tokens import CapturedTokens
from clawstream.gateway.capture.stream import EventStream
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.gateway.protocols.adapter import ProtocolAdapter
from clawstream.gateway.protocols.anthropic_messages import AnthropicMessages
from clawstream.gateway.protocols.openai_chat import OpenAIChat
from clawstream.gateway.protocols.openai_responses import OpenAIResponses
from clawstream.runtime.process.lifecycle import GC_THRESHOLD
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.settings import Settings

pytestmark = pytest.mark.slow
CODEC = Codec()
SIZE = 1 << 18
PER_MIB_S = 0.1
"""CPU seconds of a MiB on a machine of 2024 that does nothing else."""
BUSY = 4.0
"""Factor of CPU time on a machine whose caches and cores others use."""
FIXED_S = 0.01
"""CPU seconds of a call beside its body."""
ROUNDS = 2
"""Each body is measured so often; the least time counts."""

Body = Callable[[int], bytes]
REPLY = orjson.dumps(
    {"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}]}
)
HTTP_REPLY = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
    % (len(REPLY), REPLY)
)


def text(piece: bytes) -> Body:
    """Return bodies whose prompt repeats a piece of a JSON string."""
    return lambda size: chat(b'"' + piece * (size // len(piece)) + b'"')


def values(piece: bytes) -> Body:
    """Return bodies with a list of equal values, where a client may send anything."""
    return lambda size: chat(
        b'"x"', b',"odd":[' + b",".join([piece] * (size // (len(piece) + 1))) + b"]"
    )


def chat(content: bytes, more: bytes = b"", model: bytes = b"m") -> bytes:
    return b'{"model":"%s","messages":[{"role":"user","content":%s}]%s}' % (model, content, more)


def messages(message: bytes) -> Body:
    return lambda size: (
        b'{"model":"m","messages":[%s]}' % b",".join([message] * (size // (len(message) + 1)))
    )


def call_with(arguments: bytes) -> Body:
    """Return bodies whose history has a tool call with long arguments."""
    return lambda size: (
        b'{"model":"m","messages":[%s]}'
        % (
            b'{"role":"assistant","content":null,"tool_calls":[{"id":"a","type":"function","function":'
            b'{"name":"f","arguments":"%s"}}]}' % (arguments * (size // len(arguments)))
        )
    )


BODIES: dict[str, Body] = {
    "text": text(b"The price of k374 is 2, "),
    "other letters": text("Größe 価格 😀 ".encode()),
    "line breaks": text(rb"\n"),
    "escaped quotes": text(rb"\""),
    "escaped backslashes": text(rb"\\"),
    "escaped letters": text(rb"\u00e9"),
    "surrogate pairs": text(rb"\ud83d\ude00"),
    "lone surrogates": text(rb"\ud83d"),
    "lone surrogates and escapes": text(rb"\n\n\n\n\n\n\n\n\ud83d"),
    "no JSON at the end": lambda size: chat(b'"' + rb"\n" * (size // 2) + b'"')[:-1],
    "no JSON after escapes": lambda size: rb"\n\u00e9\ud83d" * (size // 14),
    "backslashes alone": lambda size: b"\\" * size,
    "control characters": lambda size: b"\x00" * size,
    "not UTF-8": lambda size: chat(b'"' + b"\xff" * size + b'"'),
    "brackets that never close": lambda size: b"[" * size,
    "lists": values(b"[]"),
    "objects": values(b"{}"),
    "lists in objects": values(b'{"a":[]}'),
    "nested lists": values(b"[" * 200 + b"]" * 200),
    "nested objects": values(b'{"a":' * 100 + b"1" + b"}" * 100),
    "short texts": values(b'"ab"'),
    "numbers": values(b"1234567"),
    "long numbers": values(b"1" * 300),
    "fractions": values(b"0.1234567890123456789e-7"),
    "one number": lambda size: chat(b'"x"', b',"odd":' + b"1" * size),
    "names": lambda size: chat(
        b'"x"', b',"odd":{%s}' % b",".join(b'"k%d":1' % i for i in range(size // 10))
    ),
    "one long name": lambda size: chat(b'"x"', b',"%s":1' % (b"k" * size)),
    "one name repeated": lambda size: chat(b'"x"', b',"a":1' * (size // 6)),
    "a long model name": lambda size: chat(b'"x"', model=b"m" * size),
    "a long role": lambda size: b'{"model":"m","messages":[{"role":"%s"}]}' % (b"r" * size),
    "messages": messages(b'{"role":"user","content":"hi"}'),
    "turns": messages(b'{"role":"user","content":"a"},{"role":"assistant","content":"b"}'),
    "system messages": messages(b'{"role":"system","content":"hi"}'),
    "parts": messages(b'{"role":"user","content":[{"type":"text","text":"hi"}]}'),
    "a message of parts": lambda size: chat(
        b"[" + b",".join([b'{"type":"text","text":"a"}'] * (size // 27)) + b"]"
    ),
    "images": messages(
        b'{"role":"user","content":[{"type":"image_url","image_url":'
        b'{"url":"data:image/png;base64,iVBORw0KGgo="}}]}'
    ),
    "tool results": messages(b'{"role":"tool","tool_call_id":"a","content":"[1,{}]"}'),
    "arguments": call_with(rb"{\"a\":1},"),
    "arguments with escapes": call_with(rb"\\n"),
    "tools": lambda size: chat(
        b'"x"',
        b',"tools":[%s]'
        % b",".join(
            [b'{"type":"function","function":{"name":"f","parameters":{}}}'] * (size // 66)
        ),
    ),
    "stop texts": lambda size: chat(b'"x"', b',"stop":[%s]' % b",".join([b'"a"'] * (size // 4))),
    "metadata": lambda size: chat(
        b'"x"', b',"metadata":{%s}' % b",".join(b'"k%d":"v"' % i for i in range(size // 12))
    ),
    "a long user": lambda size: chat(b'"x"', b',"user":"%s"' % (b"u" * size)),
}
"""Bodies of about the given size, by what they are full of."""
PATHS = ("/v1/chat/completions", "/t/g/v1/responses")


@pytest.fixture(autouse=True)
def as_in_a_process() -> Iterator[None]:
    """Collect garbage as rarely as the processes do."""
    before = gc.get_threshold()
    gc.set_threshold(*GC_THRESHOLD)
    yield
    gc.set_threshold(*before)


@asynccontextmanager
async def gateway(directory: Path, **settings: Any) -> AsyncIterator[App]:
    """Yield a gateway before an engine that reads requests and parses nothing."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                at = head.find(b"content-length:")
                if at >= 0:
                    await reader.readexactly(int(head[at + 15 :].split(b"\r\n")[0]))
                writer.write(HTTP_REPLY)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    engine = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 24)
    url = f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}"
    said = {"upstreams": [{"url": url, "kind": "text"}], **settings}
    made = Settings.model_validate({"data_dir": directory, "gateway": said})
    app = create_app(made, InMemoryLogProducer(), EngineRegistry(made.gateway.upstreams), CODEC)
    async with app.router.lifespan_context(app):
        yield app
    engine.close()


async def cpu_s(app: App, path: str, body: bytes) -> float:
    """Return the least CPU time of this process for a call."""
    times = []
    for _ in range(ROUNDS):
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive(parts: list[dict[str, Any]] = parts) -> dict[str, Any]:
            if parts:
                return parts.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            pass

        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
            "query_string": b"", "headers": [(b"host", b"x")], "http_version": "1.1", "state": {},
            "scheme": "http", "server": ("x", 1), "client": ("x", 1), "root_path": "",
        }  # fmt: skip
        gc.collect()
        began = time.process_time()
        await app(scope, receive, send)
        times.append(time.process_time() - began)
    return min(times)


def check(name: str, single_s: float, double_s: float, size: int) -> None:
    """Assert that twice the size takes at most about twice the time, and little at all."""
    mib = size / (1 << 20)
    print(f"{name:45} {1e3 * double_s / 2 / mib:7.1f} ms a MiB, ratio {double_s / single_s:5.2f}")
    assert double_s <= BUSY * (2 * mib * PER_MIB_S + FIXED_S), name
    assert double_s <= 3.0 * single_s + BUSY * FIXED_S, name


@pytest.mark.parametrize("path", PATHS)
def test_the_time_of_a_body_grows_linearly(tmp_path: Path, path: str) -> None:
    async def scenario() -> None:
        async with gateway(tmp_path) as app:
            await cpu_s(app, path, chat(b'"warm"'))
            for name, body in BODIES.items():
                await measure(app, f"{name}, {path}", path, body)

    asyncio.run(scenario())


async def measure(app: App, name: str, path: str, body: Body) -> None:
    """Compare the time of a body with that of one of twice the size."""
    single, double = body(SIZE), body(2 * SIZE)
    check(name, await cpu_s(app, path, single), await cpu_s(app, path, double), len(single))


CONTROL: dict[str, tuple[str, Body]] = {
    "metadata": ("/sessions", lambda n: b'{"metadata":{"a":[%s1]}}' % (b"[]," * (n // 3))),
    "numbers": ("/sessions", lambda n: b'{"metadata":{"a":[%s1]}}' % (b"12345678," * (n // 9))),
    "exponents": ("/sessions", lambda n: b'{"metadata":{"a":[%s1]}}' % (b"1e99," * (n // 5))),
    "one number": ("/sessions", lambda n: b'{"metadata":{"a":%s}}' % (b"1" * n)),
    "an unknown name": ("/rewards", lambda n: b'{"%s":1}' % (b"k" * n)),
    "unknown names": (
        "/rewards",
        lambda n: b"{%s}" % b",".join(b'"k%d":1' % i for i in range(n // 10)),
    ),
    "steps": (
        "/submit_steps",
        lambda n: (
            b'{"steps":[{"prompt_ids":[%s1],"response_ids":[1],"trajectory_uid":"t"}]}'
            % (b"12345," * (n // 6))
        ),
    ),
    "wrong ids": (
        "/submit_steps",
        lambda n: b'{"steps":[{"prompt_ids":[%s1],"response_ids":[1]}]}' % (b'"a",' * (n // 4)),
    ),
    "ids": ("/generate", lambda n: b'{"prompt_ids":[%s1]}' % (b"12345," * (n // 6))),
}
"""Bodies of the other routes."""


def test_the_time_of_a_control_body_grows_linearly(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway(tmp_path, default_max_tokens=9) as app:
            for name, (path, body) in CONTROL.items():
                await cpu_s(app, path, body(100))
                await measure(app, f"{name}, {path}", path, body)

    asyncio.run(scenario())


# ---------------------------------------------------------------- streams


def event(data: Any, name: str | None = None) -> bytes:
    head = b"event: %s\n" % name.encode() if name else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


def chat_arguments(count: int) -> Iterator[bytes]:
    """Arguments of a tool call in pieces of four characters."""
    for _ in range(count):
        call = {"index": 0, "function": {"arguments": "abcd"}}
        yield event({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})


def chat_text(count: int) -> Iterator[bytes]:
    for _ in range(count):
        yield event({"choices": [{"index": 0, "delta": {"content": "abcd"}}]})


def chat_calls(count: int) -> Iterator[bytes]:
    """Many tool calls."""
    for index in range(count):
        call = {"index": index, "id": f"c{index}", "function": {"name": "f", "arguments": "{}"}}
        yield event({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})


def chat_unknown(count: int) -> Iterator[bytes]:
    """A field that no protocol defines, in pieces."""
    for _ in range(count):
        yield event({"choices": [{"index": 0, "delta": {"odd": [{"index": 0, "x": "abcd"}]}}]})


LONG = "abcd" * 100
DELTAS: dict[str, Any] = {
    "custom call": {"tool_calls": [{"index": 0, "custom": {"input": LONG}}]},
    "reasoning details": {"reasoning_details": [{"type": "reasoning.text", "text": LONG}]},
    "function call": {"function_call": {"arguments": LONG}},
    "audio": {"audio": {"data": LONG, "transcript": "a"}},
    "parts": {"content": [{"type": "text", "text": LONG}]},
}
"""Deltas of chat completions whose texts are merged."""


def chat_deltas(delta: Any) -> Callable[[int], Iterator[bytes]]:
    return lambda count: iter([event({"choices": [{"index": 0, "delta": delta}]})] * count)


def anthropic_unknown(count: int) -> Iterator[bytes]:
    """Deltas of a type that no protocol defines."""
    for _ in range(count):
        delta = {"type": "odd_delta", "x": LONG}
        yield event({"type": "content_block_delta", "index": 0, "delta": delta})


def anthropic_arguments(count: int) -> Iterator[bytes]:
    block = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    yield event({"type": "message_start", "message": {"role": "assistant", "content": []}})
    yield event({"type": "content_block_start", "index": 0, "content_block": block})
    for _ in range(count):
        delta = {"type": "input_json_delta", "partial_json": "abcd"}
        yield event({"type": "content_block_delta", "index": 0, "delta": delta})


def responses_arguments(count: int) -> Iterator[bytes]:
    item = {"type": "function_call", "id": "i", "call_id": "c", "name": "f", "arguments": ""}
    yield event({"type": "response.output_item.added", "output_index": 0, "item": item})
    for _ in range(count):
        yield event(
            {
                "type": "response.function_call_arguments.delta",
                "item_id": "i", "output_index": 0, "delta": "abcd",
            }
        )  # fmt: skip


def one_event(count: int) -> Iterator[bytes]:
    """One long event in small pieces."""
    whole = event({"choices": [{"index": 0, "delta": {"content": "abcd" * (25 * count)}}]})
    for at in range(0, len(whole), 100):
        yield whole[at : at + 100]


STREAMS: dict[str, tuple[ProtocolAdapter, Callable[[int], Iterator[bytes]]]] = {
    "chat: text": (OpenAIChat(), chat_text),
    "chat: arguments": (OpenAIChat(), chat_arguments),
    "chat: tool calls": (OpenAIChat(), chat_calls),
    "chat: unknown fields": (OpenAIChat(), chat_unknown),
    "chat: one event": (OpenAIChat(), one_event),
    **{f"chat: {name}": (OpenAIChat(), chat_deltas(delta)) for name, delta in DELTAS.items()},
    "messages: arguments": (AnthropicMessages(), anthropic_arguments),
    "messages: unknown deltas": (AnthropicMessages(), anthropic_unknown),
    "responses: arguments": (OpenAIResponses(), responses_arguments),
}
EVENTS = 4000


@pytest.mark.parametrize("name", STREAMS)
def test_the_time_of_a_stream_grows_linearly(name: str) -> None:
    adapter, pieces_of = STREAMS[name]
    request = adapter.parse_request(
        orjson.dumps({"model": "m", "stream": True, "messages": [], "input": "x", "max_tokens": 9})
    )

    def cpu_of(count: int) -> float:
        times = []
        for _ in range(ROUNDS):
            pieces = list(pieces_of(count))
            stream = EventStream(adapter.accumulator(request, "text"), CapturedTokens(), False)
            gc.collect()
            began = time.process_time()
            for piece in pieces:
                stream.feed(piece)
            stream.close()
            stream.whole()
            times.append(time.process_time() - began)
        return min(times)

    single_s, double_s = cpu_of(EVENTS), cpu_of(2 * EVENTS)
    print(f"{name:45} {1e6 * double_s / 2 / EVENTS:7.1f} us an event")
    assert double_s <= 3.0 * single_s + BUSY * FIXED_S
