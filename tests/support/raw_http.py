"""Byte-level clients over real sockets, for tests of the gateway's HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson

SOON_S = 60.0
ASK = orjson.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi"}]})
ASK_STREAM = orjson.dumps(
    {"model": "policy", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
)
CALL = "/t/g/v1/chat/completions"


class RawClient:
    """One connection of a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, *parts: bytes) -> None:
        """Write the parts one by one."""
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()

    async def head(self) -> bytes:
        """Return the head of the next reply with the blank line; interim replies count too."""
        async with asyncio.timeout(SOON_S):
            return await self.reader.readuntil(b"\r\n\r\n")

    async def reply(self) -> tuple[bytes, bytes]:
        """Return the head and body of a reply that states its length."""
        head = await self.head()
        lines = head.lower().split(b"\r\n")
        length = next((int(h[15:]) for h in lines if h.startswith(b"content-length:")), 0)
        async with asyncio.timeout(SOON_S):
            return head, await self.reader.readexactly(length)

    async def rest(self) -> bytes:
        """Return all bytes up to the end of the connection."""
        async with asyncio.timeout(SOON_S):
            return await self.reader.read()


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[RawClient]:
    """Open a connection to the gateway at the URL."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()


def request(
    method: str = "POST",
    path: str = CALL,
    body: bytes = ASK,
    *headers: str,
    version: str = "1.1",
) -> bytes:
    """Return a whole request that states its length."""
    lines = [f"{method} {path} HTTP/{version}", "host: x", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body
