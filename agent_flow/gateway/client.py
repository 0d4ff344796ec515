"""A client of the gateway's sessions, rewards and rollout budget."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote

import httpx

from clawstream.agent_flow.errors import FlowError, GatewayUnavailable
from clawstream.agent_flow.outcome import Outcome, Reward

Channel = Literal["train", "val"]
API_KEY = "CLAWSTREAM_API_KEY"
"""Environment variable with the caller's key."""
RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rollout is recorded. key: of its trajectory."""

    key: str
    group: str
    group_size: int
    channel: Channel
    run: str | None


@dataclass(frozen=True, slots=True)
class Session:
    """An open trajectory: base URL with `/v1`, and the key that reaches it and nothing else."""

    base_url: str
    api_key: str


class Gateway:
    """One gateway. Requests are repeated until accepted, because it may be restarting."""

    def __init__(self, url: str, api_key: str | None, patience_s: float = 60.0) -> None:
        """patience_s: how long a request is repeated."""
        self.url = url.rstrip("/")
        self.patience_s = patience_s
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(headers=headers, limits=limits, timeout=30.0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def open(self, place: Place, metadata: Mapping[str, Any]) -> Session:
        """Open a trajectory.

        Raises:
            FlowError: The gateway refuses it, or gives no answer.
        """
        body = {
            "trajectory_key": place.key,
            "group_id": place.group,
            "group_size": place.group_size,
            "channel": place.channel,
            "metadata": dict(metadata),
        }
        reply = await self._request("POST", "/sessions", self._headers(place), body)
        return Session(f"{self.url}/v1", reply["session_key"])

    async def reward(
        self, place: Place, name: str, value: float, step_id: str | None = None
    ) -> None:
        """Record a named reward of the trajectory, or of one of its steps.

        Raises:
            FlowError: The gateway refuses it, or gives no answer.
        """
        body = {
            "trajectory_id": place.key,
            "step_id": step_id,
            "source": "env",
            "name": name,
            "function_version": "1",
            "value": value,
        }
        await self._request("POST", "/rewards", self._headers(place), body)

    async def complete(
        self,
        place: Place,
        outcome: Outcome,
        reward: Reward = None,
        reason: str | None = None,
    ) -> None:
        """End the trajectory, with a reward or with several by name.

        Raises:
            FlowError: The gateway refuses it, or gives no answer.
        """
        body = {
            "outcome": outcome,
            "rewards" if isinstance(reward, Mapping) else "reward": reward,
            "reason": reason and reason[:2000],
        }
        path = f"/complete_trajectory/{quote(place.key, safe='@:=+~')}"
        await self._request("POST", path, self._headers(place), body)

    async def budget(self, run: str, channel: Channel) -> Mapping[str, Any] | None:
        """Return the rollout budget; None while the run has no admission, or it is unknown.

        Asks once.

        Raises:
            GatewayUnavailable: The gateway gave no answer, or one that may be repeated.
            FlowError: The gateway refuses it.
        """
        path = f"/runs/{quote(run, safe='')}/demand?channel={channel}&after={2**53}"
        try:
            reply = await self._http.get(self.url + path)
        except httpx.HTTPError as error:
            raise GatewayUnavailable(
                f"GET {self.url}{path}: {error!r}; is the gateway running?"
            ) from error
        if reply.status_code in (404, 503):
            return None
        if reply.status_code == 429 or reply.status_code >= 500:
            raise GatewayUnavailable(f"GET {self.url}{path}: {reply.status_code}")
        return self._checked("GET", path, reply)

    def _headers(self, place: Place) -> dict[str, str]:
        headers = {"x-clawstream-group": place.group, "x-clawstream-channel": place.channel}
        if place.run is not None:
            headers["x-clawstream-run"] = place.run
        return headers

    async def _request(
        self, method: str, path: str, headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the reply's body. A 4xx other than 429 is final; all else is repeated."""
        content = {name: value for name, value in body.items() if value is not None}
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.patience_s
        while True:
            try:
                reply = await self._http.request(
                    method, self.url + path, headers=headers, json=content
                )
                if reply.status_code < 500 and reply.status_code != 429:
                    return self._checked(method, path, reply)
                last = f"{reply.status_code} {reply.text[:300]}"
            except httpx.HTTPError as error:
                last = repr(error)
            if loop.time() > deadline:
                raise GatewayUnavailable(
                    f"{method} {self.url}{path}: {last}; is the gateway running?"
                )
            await asyncio.sleep(RETRY_S)

    def _checked(self, method: str, path: str, reply: httpx.Response) -> dict[str, Any]:
        if reply.status_code >= 300:
            raise FlowError(f"{method} {self.url}{path}: {reply.status_code} {reply.text[:500]}")
        body: dict[str, Any] = reply.json()
        return body
