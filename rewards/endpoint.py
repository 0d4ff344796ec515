"""One HTTP endpoint of a model: requests with retries, within a time."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

CONNECTIONS = 128
"""Requests at once to an endpoint, in each process: far below the usual limit of 1024 descriptors,
and what a server of models computes at once."""
_KEEP_ALIVE_S = 2.0
"""Servers close an idle connection, uvicorn after 5 s; a request on a closed one would fail."""
_NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
"""`Endpoint.post` limits the time."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0


class EndpointError(Exception):
    """The endpoint gave no usable reply."""


class NotServed(EndpointError):
    """The endpoint has begun no attempt of the request, so nothing was bought."""


class Endpoint:
    """Posts JSON to one base URL, in one event loop. Owns the retries and the time-out."""

    def __init__(
        self,
        url: str,
        api_key_env: str | None,
        attempts: int,
        timeout_s: float,
        waits_in_time: bool = True,
    ) -> None:
        """Read the key.

        Args:
            url: Base URL.
            api_key_env: Environment variable that holds the key; None: no key is sent.
            attempts: Of one request, as far as the endpoint has begun them.
            timeout_s: Longest time of one request with all attempts, without its waits for a
                connection.
            waits_in_time: Whether that is also the longest such wait; else the caller bounds it.

        Raises:
            EndpointError: The variable is not set.
        """
        self._url, self._attempts, self._timeout_s = url.rstrip("/"), attempts, timeout_s
        self._headers = dict[str, str]()
        if api_key_env is not None:
            key = os.environ.get(api_key_env)
            if not key:
                raise EndpointError(f"the environment variable {api_key_env} is not set")
            self._headers["Authorization"] = f"Bearer {key}"
        self._wait_s = timeout_s if waits_in_time else None
        self._connections = asyncio.Semaphore(CONNECTIONS)
        self._session = self._open()

    async def post(
        self, path: str, body: Any, give_back: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Return the reply as JSON.

        Until the time-out, repeats a request that the endpoint does not begin: no connection, 429
        and 503. Repeats after 408, other 5xx and broken connections while attempts are left. The
        pauses grow up to 8 s; Retry-After lengthens them.

        Args:
            path: Below the base URL.
            body: Sent as JSON.
            give_back: Called if this ends, also by cancellation, and the endpoint has begun no
                attempt.

        Raises:
            NotServed: The time-out, and the endpoint has begun no attempt; or no connection was
                free.
            EndpointError: The time-out, another status, no JSON object, or all attempts failed.
        """
        begun, last, pause_s = 0, None, _FIRST_PAUSE_S
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                while True:
                    try:
                        async with self._connection(limit):
                            begun += 1  # also if the time-out leaves this in doubt
                            return await self._post(path, body)
                    except _Retryable as e:
                        begun, last = begun - (not e.is_begun), e
                        if begun == self._attempts:
                            raise EndpointError(f"{e}, {begun} attempts") from e
                    await asyncio.sleep(min(_LONGEST_PAUSE_S, max(pause_s, last.pause_s)))
                    pause_s *= 2 * random.uniform(0.75, 1.25)
        except TimeoutError as e:
            late = f"no reply of {self._url}{path} in {self._timeout_s:g} s"
            error = EndpointError if begun else NotServed
            raise error(late if last is None else f"{late}: {last}") from e
        finally:
            if not begun:
                give_back()

    @asynccontextmanager
    async def _connection(self, limit: asyncio.Timeout) -> AsyncIterator[None]:
        """Hold one of the connections. Waiting for it does not use up the time of the request.

        Raises:
            NotServed: None was free within the time-out.
        """
        now, due = asyncio.get_running_loop().time, limit.when()
        assert due is not None
        began = now()
        limit.reschedule(None)
        try:
            async with asyncio.timeout(self._wait_s):
                await self._connections.acquire()
        except TimeoutError as e:
            raise NotServed(
                f"no connection to {self._url} was free in {self._timeout_s:g} s: "
                f"{CONNECTIONS} requests at once"
            ) from e
        limit.reschedule(due + now() - began)
        try:
            yield
        finally:
            self._connections.release()

    async def _post(self, path: str, body: Any) -> dict[str, Any]:
        session = await anext(self._session)
        try:
            async with session.post(self._url + path, json=body) as reply:
                if reply.status in (408, 429) or reply.status >= 500:
                    after = reply.headers.get("Retry-After", "")
                    raise _Retryable(
                        f"HTTP {reply.status} of {self._url}{path}",
                        is_begun=reply.status not in (429, 503),
                        pause_s=float(after) if after.isdecimal() else 0.0,
                    )
                if reply.status != 200:
                    text = (await reply.text())[:120]
                    raise EndpointError(f"HTTP {reply.status} of {self._url}{path}: {text}")
                found = await reply.json(content_type=None)
        except aiohttp.ClientError as e:
            is_begun = not isinstance(e, aiohttp.ClientConnectorError)
            raise _Retryable(f"{type(e).__name__}: {e}", is_begun) from e
        except ValueError as e:
            raise EndpointError(f"the reply of {self._url}{path} is no JSON") from e
        if not isinstance(found, dict):
            raise EndpointError(f"the reply of {self._url}{path} is no JSON object")
        return found

    async def _open(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Yield one session, which keeps connections; the end of the event loop closes it."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        async with aiohttp.ClientSession(
            connector=connector, timeout=_NO_TIMEOUT, headers=self._headers
        ) as session:
            while True:
                yield session


class _Retryable(Exception):
    """A failure that another attempt may not have.

    is_begun: Whether the endpoint has begun the request. pause_s: What the endpoint asks for.
    """

    def __init__(self, message: str, is_begun: bool, pause_s: float = 0.0) -> None:
        super().__init__(message)
        self.is_begun, self.pause_s = is_begun, pause_s
