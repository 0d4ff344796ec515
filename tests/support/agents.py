"""Real agents as processes: their installation, their home directory, and a recording proxy.

The proxy stands between the agents and the gateway.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web

ROOT = Path(__file__).parents[2]
AGENTS = ROOT / ".agents"
HOP = ("host", "connection", "transfer-encoding", "content-length", "accept-encoding")


def install() -> None:
    """Install the agents into .agents unless they are there."""
    done = subprocess.run(
        ["bash", "infra/install-agents.sh"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


@dataclass(frozen=True)
class Exchange:
    """A request of an agent and its reply. headers, returned: names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    status: int
    returned: Mapping[str, str]
    reply: bytes

    @property
    def endpoint(self) -> str:
        """Return the path without its query."""
        return self.path.partition("?")[0]

    @property
    def said(self) -> dict[str, Any]:
        found = orjson.loads(self.body)
        assert isinstance(found, dict)
        return found


@dataclass
class Ear:
    """Forward all traffic and record it: the agent's requests and the bytes of the replies."""

    exchanges: list[Exchange] = field(default_factory=list)

    @asynccontextmanager
    async def listen(self, to: str) -> AsyncIterator[str]:
        """Listen between an agent and the server at `to`; yield the URL for the agent."""
        app = web.Application(client_max_size=64 << 20)
        async with aiohttp.ClientSession(
            auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None)
        ) as http:
            app.router.add_route("*", "/{tail:.*}", partial(self._pass, http, to))
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            try:
                yield f"http://127.0.0.1:{runner.addresses[0][1]}"
            finally:
                await runner.cleanup()

    async def until_told(self, words: bytes, timeout_s: float = 240.0) -> None:
        """Wait until any reply to an agent contains these words."""
        async with asyncio.timeout(timeout_s):
            # Agents set no event.
            while not any(words in e.reply for e in self.exchanges):  # noqa: ASYNC110
                await asyncio.sleep(0.2)

    async def _pass(
        self, http: aiohttp.ClientSession, to: str, request: web.Request
    ) -> web.StreamResponse:
        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP}
        async with http.request(
            request.method, to + request.raw_path, headers=headers, data=body or None
        ) as got:
            returned = {k: v for k, v in got.headers.items() if k.lower() not in HOP}
            response = web.StreamResponse(status=got.status, headers=returned)
            await response.prepare(request)
            heard = b""
            async for piece in got.content.iter_any():
                heard += piece
                await response.write(piece)
            sent = {k.lower(): v for k, v in request.headers.items()}
            told = {k.lower(): v for k, v in got.headers.items()}
            self.exchanges.append(
                Exchange(request.method, request.path_qs, sent, body, got.status, told, heard)
            )
            await response.write_eof()
            return response


@dataclass(frozen=True)
class Ended:
    """The result of an agent's process."""

    code: int
    out: str
    err: str

    def __str__(self) -> str:
        return f"exit {self.code}\n{self.out[-4000:]}\n{self.err[-4000:]}"


def environment(home: Path, **more: str) -> dict[str, str]:
    """Return the environment of an agent.

    It contains nothing of this machine's user, and allows connections to loopback only.
    """
    kept = {k: os.environ[k] for k in ("LANG", "LC_ALL", "TZ") if k in os.environ}
    nowhere = "http://127.0.0.1:9"
    proxies = {"http_proxy": nowhere, "https_proxy": nowhere, "no_proxy": "127.0.0.1,localhost"}
    return kept | {
        "HOME": str(home), "PATH": f"{AGENTS / 'bin'}:/usr/local/bin:/usr/bin:/bin", "TERM": "dumb",
        "CI": "1", **proxies, **{k.upper(): v for k, v in proxies.items()}, **more,
    }  # fmt: skip


async def run(
    words: list[str], cwd: Path, env: Mapping[str, str], timeout_s: float = 900.0
) -> Ended:
    """Run an agent to its end.

    At the deadline the agent is killed, and its exit code shows the kill.
    """
    process = await asyncio.create_subprocess_exec(
        *words, cwd=cwd, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate()
    except TimeoutError:
        os.killpg(process.pid, 9)
        out, err = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))
