"""The load request of vLLM's API server, on an engine client that notes what is asked of it."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from clawstream.rollout.vllm_plugin.engine import INVALID, UNREADABLE
from clawstream.rollout.vllm_plugin.weight_loader import (
    BROKEN,
    CHANGED,
    INVALID_WEIGHTS,
    LOADED,
    PATH,
    UNAVAILABLE,
    UNREADABLE_WEIGHTS,
    WeightLoader,
)


class EngineClient:
    """vLLM's engine client. fails: the call that raises, and what."""

    def __init__(self, fails: dict[str, Exception] | None = None) -> None:
        self.label = "default"
        self.calls: list[str] = []
        self.files: list[str] = []
        self.fails = fails or {}

    async def _called(self, name: str) -> None:
        self.calls.append(name)
        await asyncio.sleep(0)  # another request gets its turn here
        if name in self.fails:
            raise self.fails[name]

    async def get_weight_version(self) -> str:
        return self.label

    async def start_weight_update(self) -> None:
        await self._called("start")

    async def update_weights(self, request: Any) -> None:
        self.files = request.update_info["files"]
        await self._called("update")

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", True)
        await self._called("pause")

    async def finish_weight_update(self, version_id: str) -> None:
        await self._called("finish")
        self.label = version_id

    async def resume_generation(self) -> None:
        await self._called("resume")


class Server:
    """The middleware around an app that answers 404."""

    def __init__(self, client: EngineClient) -> None:
        self._scope = {
            "type": "http",
            "app": type("App", (), {"state": type("State", (), {"engine_client": client})}),
        }

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})

        self._loader = WeightLoader(app)

    async def ask(self, method: str, body: bytes = b"", path: str = PATH) -> tuple[int, Any]:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body}

        async def send(message: Any) -> None:
            sent.append(message)

        await self._loader({**self._scope, "method": method, "path": path}, receive, send)
        return sent[0]["status"], orjson.loads(sent[1]["body"])

    async def load(self, version_id: str, served: str) -> tuple[int, Any]:
        return await self.ask(
            "POST", orjson.dumps({"version_id": version_id, "served": served, "files": ["/f"]})
        )


def test_a_version_is_staged_swapped_and_labelled_in_one_request() -> None:
    async def scenario() -> None:
        client = EngineClient()
        server = Server(client)
        status, answer = await server.load("run/1.0", "default")
        assert (status, answer["weight_version"]) == (LOADED, "run/1.0")
        assert client.calls == ["start", "update", "pause", "finish", "resume"]
        assert client.files == ["/f"]
        assert await server.ask("GET") == (200, {"weight_version": "run/1.0"})
        assert (await server.ask("GET", path="/v1/models"))[0] == 404
        assert (await server.ask("POST", b"[]"))[0] == 400
        assert (await server.ask("PUT"))[0] == 405

    asyncio.run(scenario())


def test_two_workers_never_mix_their_updates() -> None:
    async def scenario() -> None:
        client = EngineClient()
        server = Server(client)
        outcomes = await asyncio.gather(
            server.load("a/1.0", "default"), server.load("b/1.0", "default")
        )
        assert [status for status, _ in outcomes] == [LOADED, CHANGED]
        assert outcomes[1][1] == {"weight_version": "a/1.0"}
        assert client.calls == ["start", "update", "pause", "finish", "resume"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fails", "error", "status", "text", "touched"),
    [
        ("update", RuntimeError(f"x {INVALID}no tensors', please check "
            "the stack trace"), INVALID_WEIGHTS, "no tensors", False),
        ("update", RuntimeError(f"x {UNREADABLE}gone', please check "
            "the stack trace"), UNREADABLE_WEIGHTS, "gone", False),
        ("start", RuntimeError("busy"), UNAVAILABLE, "RuntimeError: busy", False),
        ("pause", RuntimeError("dead"), BROKEN, "RuntimeError: dead", True),
        ("finish", RuntimeError("in pieces"), BROKEN, "RuntimeError: in pieces", True),
    ],
)  # fmt: skip
def test_an_error_says_whether_the_model_was_touched(
    fails: str, error: Exception, status: int, text: str, touched: bool
) -> None:
    async def scenario() -> None:
        client = EngineClient({fails: error})
        assert await Server(client).load("run/1.0", "default") == (status, {"error": text})
        assert client.label == "default"
        assert ("pause" in client.calls) == touched
        assert "resume" not in client.calls

    asyncio.run(scenario())
