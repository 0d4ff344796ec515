"""An engine for soak tests: small replies of every protocol, plain and streamed, built once.

A request can ask for a slow stream.

python tests/support/soak_engine.py PORT
"""

from __future__ import annotations

import asyncio
import sys
from typing import ClassVar

import orjson
import uvloop
from support.scripted.engine import PROTOCOL_SERVERS, frames_of, whole_frames
from support.scripted.script import Json, Script, ScriptedChoice

from benchmarks.gateway.instant_engine import JSON_HEAD, Engine, Replies, Shape
from clawstream.schemas import engine_frames

VERSION = "default/3.0"
IDS = range(1000, 1012)
SCRIPT = Script(
    [ScriptedChoice(IDS, [f"word{i} " for i in IDS], [-0.5] * len(IDS))],
    prompt_ids=range(60),
    versions=[[{"version": VERSION, "start": 0, "end": len(IDS)}]],
    version_start=VERSION,
)
TOLD = f"{engine_frames.ASK}: 1\r\n{engine_frames.VERSION_START}: {VERSION}\r\n"
SLOW = b"take your time"
PAUSE_S = 0.05


def plain_reply(voice: int, request: Json) -> bytes:
    """Return body and tokens with the HTTP head."""
    body = orjson.dumps(PROTOCOL_SERVERS[voice].plain(request, SCRIPT))
    whole = engine_frames.trail(body, [engine_frames.encode(f) for f in whole_frames(SCRIPT, 1)])
    head = f"{TOLD}{engine_frames.OWN_BODY}: {len(body)}\r\ncontent-length: {len(whole)}\r\n\r\n"
    return JSON_HEAD + head.encode() + whole


def streamed_reply(voice: int, request: Json) -> list[bytes]:
    """Return HTTP chunks: the head with the first event, then one chunk for each event."""
    chunks, told = [], False
    for event in PROTOCOL_SERVERS[voice].events(request, SCRIPT):
        data = event.data
        if event.shows or not told:
            frames = b"".join(
                engine_frames.encode(f) for f in frames_of(SCRIPT, event, 1, not told)
            )
            data, told = engine_frames.comment(frames) + data, True
        chunks.append(b"%x\r\n%s\r\n" % (len(data), data))
    head = (
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        f"transfer-encoding: chunked\r\n{TOLD}\r\n"
    )
    return [head.encode() + chunks[0], *chunks[1:-1], chunks[-1] + b"0\r\n\r\n"]


REQUESTS: tuple[Json, ...] = (
    {"model": "policy", "messages": []},
    {"model": "policy", "prompt": "x"},
    {"model": "policy", "input": "x"},
    {"model": "policy", "messages": [], "max_tokens": 20},
)


class SoakEngine(Engine):
    """One connection."""

    plain: ClassVar[dict[bytes, bytes]] = {
        v.path.encode(): plain_reply(i, REQUESTS[i]) for i, v in enumerate(PROTOCOL_SERVERS)
    }
    streamed: ClassVar[dict[bytes, list[bytes]]] = {
        v.path.encode(): streamed_reply(i, REQUESTS[i] | {"stream": True})
        for i, v in enumerate(PROTOCOL_SERVERS)
    }

    def _answer(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        path = head.split(b" ", 2)[1]
        if path not in self.plain:
            super()._answer(head, body)
        elif b'"stream":true' not in body:
            self._transport.write(self.plain[path])
        elif SLOW in body:
            self._streaming = asyncio.ensure_future(self._slowly(self.streamed[path]))
        else:
            self._transport.write(b"".join(self.streamed[path]))

    async def _slowly(self, chunks: list[bytes]) -> None:
        for chunk in chunks:
            assert self._transport is not None
            self._transport.write(chunk)
            await asyncio.sleep(PAUSE_S)


async def serve(port: int) -> None:
    """Serve until the process ends."""
    replies = Replies(Shape(1, 1, 1, 0.0))
    server = await asyncio.get_running_loop().create_server(
        lambda: SoakEngine(replies), "127.0.0.1", port
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
