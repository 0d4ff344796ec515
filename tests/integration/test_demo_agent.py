"""The black-box agent as a process, with a stand-in gateway that fails first and then answers."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from aiohttp import web

CALL = {
    "index": 0,
    "id": "c1",
    "type": "function",
    "function": {"name": "lookup", "arguments": '{"key": "k374"}'},
}


class Gateway:
    """Answer each episode's first request with 503.

    Turn 1 is a tool call; turn 2 is an answer with the tool's result.
    """

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.seen: list[dict[str, Any]] = []

    async def start(self) -> int:
        app = web.Application()
        app.router.add_post("/{trajectory}/{prompt}/v1/chat/completions", self._answer)
        self.runner = web.AppRunner(app, access_log=None)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return int(self.runner.addresses[0][1])

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        trajectory = request.match_info["trajectory"]
        if trajectory not in self.refused:
            self.refused.add(trajectory)
            return web.json_response(
                {"error": {"message": "starting"}}, status=503, headers={"Retry-After": "0.1"}
            )
        body = await request.json()
        self.seen.append(body)
        last = body["messages"][-1]
        calls = [] if last["role"] == "tool" else [CALL]
        content = f"the total is {last['content']}." if not calls else None
        if body.get("stream"):
            return await self._stream(request, content, calls)
        message = {"role": "assistant", "content": content, "tool_calls": calls or None}
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if calls else "stop",
        }
        return web.json_response({**_HEAD, "object": "chat.completion", "choices": [choice]})

    async def _stream(
        self, request: web.Request, content: str | None, calls: list[dict[str, Any]]
    ) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"content": letter} for letter in content or ""]
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            deltas.append(
                {"tool_calls": [{**call, "function": {"name": name, "arguments": arguments[:5]}}]}
            )
            deltas.append({"tool_calls": [{"index": 0, "function": {"arguments": arguments[5:]}}]})
        for delta in deltas:
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            chunk = {**_HEAD, "object": "chat.completion.chunk", "choices": [choice]}
            await reply.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await reply.write(b": a comment that an agent must not mind\n\ndata: [DONE]\n\n")
        return reply


_HEAD = {"id": "x", "created": 0, "model": "policy"}


def test_episodes_of_a_process_survive_a_gateway_that_is_just_starting() -> None:
    async def scenario() -> None:
        gateway = Gateway()
        port = await gateway.start()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "clawstream.demo.agent", "--concurrency", "3"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        jobs: list[dict[str, Any]] = [
            {
                "id": f"e{i}",
                "question": "price of k374 plus 2?",
                "base_url": f"http://127.0.0.1:{port}/t{i}/p/v1",
                **({"stream": True} if i % 2 else {}),
                **({"temperature": 0.5} if i == 0 else {}),
            }
            for i in range(8)
        ]
        jobs.append({"id": "lost", "question": "?", "base_url": f"http://127.0.0.1:{port}/nowhere"})
        lines, _ = await asyncio.wait_for(
            process.communicate("".join(json.dumps(j) + "\n" for j in jobs).encode()), 240
        )
        await gateway.runner.cleanup()
        results = {result["id"]: result for result in map(json.loads, lines.splitlines())}
        assert results.keys() == {job["id"] for job in jobs}
        assert "NotFoundError" in results.pop("lost")["error"]
        for result in results.values():
            assert result == {"id": result["id"], "answer": "the total is 6.", "turns": 2}
        assert process.returncode == 0
        assert len(gateway.seen) == 16
        assert sum(body.get("temperature") == 0.5 for body in gateway.seen) == 2
        second = next(body for body in gateway.seen if len(body["messages"]) > 1)
        assert [m["role"] for m in second["messages"]] == ["user", "assistant", "tool"]
        assert second["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"key": "k374"}'

    asyncio.run(scenario())
