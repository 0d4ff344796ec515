"""One HTTP endpoint of a model: requests with retries."""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

import aiohttp

_NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
"""The caller limits the time."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0


class EndpointError(Exception):
    """The endpoint gave no usable reply, after all attempts."""


class Endpoint:
    """Posts JSON to one base URL."""

    def __init__(self, url: str, api_key_env: str | None, attempts: int) -> None:
        """Read the key.

        Args:
            url: Base URL.
            api_key_env: Environment variable that holds the key; None: no key is sent.
            attempts: Of one request.

        Raises:
            EndpointError: The variable is not set.
        """
        self._url, self._attempts = url.rstrip("/"), attempts
        self._headers = dict[str, str]()
        if api_key_env is not None:
            key = os.environ.get(api_key_env)
            if not key:
                raise EndpointError(f"the environment variable {api_key_env} is not set")
            self._headers["Authorization"] = f"Bearer {key}"

    async def post(self, path: str, body: Any) -> dict[str, Any]:
        """Return the reply as JSON.

        Retries after 408, 429, 5xx and broken connections, with growing pauses (Retry-After of
        the endpoint, up to 8 s). The caller limits the time.

        Raises:
            EndpointError: Another status, no JSON object, or all attempts failed.
        """
        pause_s = _FIRST_PAUSE_S
        for left in reversed(range(self._attempts)):
            try:
                return await self._post(path, body)
            except _Again as e:
                if not left:
                    raise EndpointError(f"{e}, {self._attempts} attempts") from e
                await asyncio.sleep(
                    min(_LONGEST_PAUSE_S, pause_s if e.pause_s is None else e.pause_s)
                )
            pause_s *= 2 * random.uniform(0.75, 1.25)
        raise AssertionError("unreachable")

    async def _post(self, path: str, body: Any) -> dict[str, Any]:
        try:
            async with (
                aiohttp.ClientSession(timeout=_NO_TIMEOUT, headers=self._headers) as session,
                session.post(self._url + path, json=body) as reply,
            ):
                if reply.status in (408, 429) or reply.status >= 500:
                    after = reply.headers.get("Retry-After", "")
                    asked = float(after) if after.isdecimal() else None
                    raise _Again(f"HTTP {reply.status} of {self._url}{path}", asked)
                if reply.status != 200:
                    text = (await reply.text())[:120]
                    raise EndpointError(f"HTTP {reply.status} of {self._url}{path}: {text}")
                found = await reply.json(content_type=None)
        except aiohttp.ClientError as e:
            raise _Again(f"{type(e).__name__}: {e}", None) from e
        except ValueError as e:
            raise EndpointError(f"the reply of {self._url}{path} is no JSON") from e
        if not isinstance(found, dict):
            raise EndpointError(f"the reply of {self._url}{path} is no JSON object")
        return found


class _Again(Exception):
    """A failure that another attempt may not have. pause_s: what the endpoint asks for, if any."""

    def __init__(self, message: str, pause_s: float | None) -> None:
        super().__init__(message)
        self.pause_s = pause_s
