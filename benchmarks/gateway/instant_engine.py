"""An engine that answers at once, for benchmarks of the servers in front of it.

    python -m benchmarks.gateway.instant_engine --port 21000 [--events 101] [--pause-ms 0] [--prompt
    420] [--response 110]

It speaks chat completions like vLLM 0.32 with our middleware (to clients that ask for it) or like a
stock vLLM with ids in the body (to others): a plain reply of 9.4 KB either way, or a stream of
`--events` events. Replies are created once, so a call costs it a few microseconds. `GET /asked`
returns the number of POSTs.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from typing import cast

import orjson
import uvloop

from clawstream.schemas import engine_frames
from clawstream.schemas.tokens import pack_ids, pack_logprobs

REPLY_BYTES = 9400
VERSION = "default/3.0"
JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


@dataclass(frozen=True)
class Shape:
    """Tokens of prompt and response, events of a stream, and milliseconds between them."""

    prompt: int
    response: int
    events: int
    pause_ms: float


def _frame(shape: Shape) -> bytes:
    n = shape.response
    choice = engine_frames.Choice(
        0, pack_ids(range(1000, 1000 + n)), pack_logprobs([-0.5] * n), "stop", ((VERSION, 0, n),)
    )
    return engine_frames.encode(engine_frames.Frame(0, pack_ids(range(shape.prompt)), (choice,)))


def _completion(shape: Shape, text: str, tokens: bool) -> bytes:
    logprobs = [
        {"token": f"t{i}", "logprob": -0.5, "bytes": [116, 101], "top_logprobs": []}
        for i in range(shape.response)
    ]
    body = {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion",
        "created": 1760000000,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": text,
                    "refusal": None,
                    "tool_calls": [],
                },
                "logprobs": {"content": logprobs} if tokens else None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": list(range(1000, 1000 + shape.response)) if tokens else None,
            }
        ],
        "usage": {"prompt_tokens": shape.prompt, "total_tokens": shape.prompt + shape.response},
        "prompt_token_ids": list(range(shape.prompt)) if tokens else None,
    }
    return orjson.dumps(body)


def plain_reply(shape: Shape, captured: bool) -> bytes:
    """Return the whole HTTP reply; its text fills it up to 9.4 KB."""
    frame = _frame(shape) if captured else b""
    empty = len(_completion(shape, "", not captured)) + len(frame)
    body = _completion(shape, "word " * max(22, (REPLY_BYTES - empty) // 5), not captured)
    head = JSON_HEAD + b"content-length: %d\r\n" % (len(body) + len(frame))
    if captured:
        head += (
            f"{engine_frames.ASK}: 1\r\n{engine_frames.VERSION_START}: {VERSION}\r\n"
            f"{engine_frames.OWN_BODY}: {len(body)}\r\n"
        ).encode()
    return head + b"\r\n" + body + frame


def stream_events(shape: Shape, captured: bool) -> list[bytes]:
    """Return the events of a stream, each an HTTP chunk; the last one ends the body."""
    events = []
    for i in range(shape.events):
        last = i == shape.events - 1
        choice = {
            "index": 0,
            "delta": {"content": f"word{i} "},
            "logprobs": None,
            "finish_reason": "stop" if last else None,
        }
        data = orjson.dumps(
            {
                "id": "chatcmpl-0123456789abcdef",
                "object": "chat.completion.chunk",
                "created": 1760000000,
                "model": "policy",
                "choices": [choice],
            }
        )
        event = b"data: " + data + b"\n\n"
        if captured:
            frame = engine_frames.Choice(
                0, pack_ids([1000 + i]), pack_logprobs([-0.5]), "stop" if last else None,
                ((VERSION, 0, shape.events),) if last else None,
            )  # fmt: skip
            prompt = pack_ids(range(shape.prompt)) if i == 0 else None
            tokens = engine_frames.encode(engine_frames.Frame(0, prompt, (frame,)))
            event = engine_frames.comment(tokens) + event
        events.append(event)
    events[-1] += b"data: [DONE]\n\n"
    chunks = [b"%x\r\n%s\r\n" % (len(e), e) for e in events]
    chunks[-1] += b"0\r\n\r\n"
    return chunks


class Replies:
    """All replies, encoded once."""

    def __init__(self, shape: Shape) -> None:
        self.pause_s = shape.pause_ms / 1000
        self.asked = 0
        self.plain = {c: plain_reply(shape, c) for c in (True, False)}
        self.stream = {c: stream_events(shape, c) for c in (True, False)}
        captured = f"{engine_frames.ASK}: 1\r\n".encode()
        self.version = (
            JSON_HEAD + captured + b"content-length: 20\r\n\r\n" + b'{"version":"0.32.0"}'
        )
        self.health = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
        models = b'{"object":"list","data":[{"id":"policy","object":"model"}]}'
        self.models = JSON_HEAD + b"content-length: %d\r\n\r\n" % len(models) + models
        self.stream_head = {
            c: b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n"
            + (
                captured + f"{engine_frames.VERSION_START}: {VERSION}\r\n\r\n".encode()
                if c
                else b"\r\n"
            )
            for c in (True, False)
        }


class Engine(asyncio.Protocol):
    """One connection: requests one after the other, as clients with keep-alive send them."""

    def __init__(self, replies: Replies) -> None:
        self._replies = replies
        self._buffer = bytearray()
        self._need = 0
        self._transport: asyncio.Transport | None = None
        self._streaming: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop has a class of its own

    def connection_lost(self, exc: Exception | None) -> None:
        if self._streaming is not None:
            self._streaming.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while self._buffer and len(self._buffer) >= self._need:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._buffer[: end + 2])
            at = head.lower().find(b"\r\ncontent-length:")
            length = int(head[at + 17 : head.index(b"\r\n", at + 2)]) if at >= 0 else 0
            if at < 0 and b"transfer-encoding: chunked" in head.lower():
                stop = self._buffer.find(b"0\r\n\r\n", end)  # our bodies are JSON: this ends them
                if stop < 0:
                    return
                length = stop + 5 - end - 4
            self._need = end + 4 + length
            if len(self._buffer) < self._need:
                return
            body = bytes(self._buffer[end + 4 : self._need])
            del self._buffer[: self._need]
            self._need = 0
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        replies = self._replies
        captured = engine_frames.ASK.encode() in head.lower()
        if head.startswith(b"POST"):
            replies.asked += 1
            if b'"stream":true' in body or b'"stream": true' in body:
                self._transport.write(replies.stream_head[captured])
                self._streaming = asyncio.ensure_future(self._stream(replies.stream[captured]))
            else:
                self._transport.write(replies.plain[captured])
        elif b"/version" in head[:64]:
            self._transport.write(replies.version)
        elif b"/asked" in head[:64]:
            body = b"%d" % replies.asked
            self._transport.write(JSON_HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        elif b"/models" in head[:64]:
            self._transport.write(replies.models)
        else:
            self._transport.write(replies.health)

    async def _stream(self, chunks: list[bytes]) -> None:
        assert self._transport is not None
        for chunk in chunks:
            self._transport.write(chunk)
            await asyncio.sleep(self._replies.pause_s)


async def serve(port: int, shape: Shape) -> None:
    """Serve until the process ends."""
    replies = Replies(shape)
    server = await asyncio.get_running_loop().create_server(
        lambda: Engine(replies), "127.0.0.1", port
    )
    print("ready", flush=True)
    await server.serve_forever()


def main() -> None:
    """Serve until the process ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prompt", type=int, default=420)
    parser.add_argument("--response", type=int, default=110)
    parser.add_argument("--events", type=int, default=101)
    parser.add_argument("--pause-ms", type=float, default=0.0)
    asked = parser.parse_args()
    uvloop.run(serve(asked.port, Shape(asked.prompt, asked.response, asked.events, asked.pause_ms)))


if __name__ == "__main__":
    main()
