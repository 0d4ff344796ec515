"""Test OpenClaw through the gateway, set up by its own configuration file.

Only the base URL and the key of its provider are changed.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from support.agents import Ear, environment, run
from support.ports import free_port
from support.stage import Stage, drifts, record, roots, tags
from support.toy_model import Call, Heard, Reply, ToyModel

pytestmark = pytest.mark.long
CONTEXT = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"
SUB_AGENT = "Subagent spawned by"
COMPACTS = "You are a context summarization assistant"
SETTLED = "Child completion results"
PATIENCE_S = 240.0


def decide(heard: Heard) -> Reply:
    """Act as the model: two tools at once, then a sub-agent that it waits for."""
    real = [t for t in heard.turns if t.role != "system" and CONTEXT not in t.text]
    asked = next(t.text for t in reversed(real) if t.role == "user")
    if COMPACTS in heard.system:
        return Reply("## Decisions\nnone")
    if SUB_AGENT in heard.system:
        return (
            Reply("The helper saw egret")
            if heard.results
            else Reply("", (Call("exec", {"command": "echo egret"}),))
        )
    if SETTLED in asked:
        return Reply("EGRET" if "The helper saw egret" in asked else "It saw nothing")
    if real[-1].role == "tool":
        if heard.called("sessions_yield"):
            return Reply("I wait for it.")
        if heard.called("tool_call"):
            return Reply("", (Call("sessions_yield", {}),))
        return Reply(f"The note says {heard.results[0].split()[-1]}")
    if "note" in asked:
        return Reply(
            "I will look.",
            (Call("exec", {"command": "echo heron"}), Call("exec", {"command": "echo crane"})),
        )
    if "helper" in asked:
        child = {"task": "Say which bird you see"}
        return Reply("", (Call("tool_call", {"id": "sessions_spawn", "args": child}),))
    return Reply("Where were we?")


def configuration(url: str, key: str, api: str, port: int) -> bytes:
    """Return its configuration file. A base URL for Anthropic's protocol has no /v1."""
    return orjson.dumps({
        "gateway": {"mode": "local", "port": port, "auth": {"mode": "token", "token": "any"}},
        "models": {
            "providers": {
                "clawstream": {
                    "baseUrl": url if api == "anthropic-messages" else f"{url}/v1",
                    "apiKey": key,
                    "api": api,
                    "models": [{"id": "policy", "name": "policy"}],
                }
            }
        },
        "agents": {"defaults": {"model": {"primary": "clawstream/policy"}}},
    })  # fmt: skip


class OpenClaw:
    """Run OpenClaw with a new home directory."""

    def __init__(self, folder: Path) -> None:
        self.home, self.work = folder / "home", folder / "work"
        (self.home / ".openclaw").mkdir(parents=True)
        self.work.mkdir()
        self.env = environment(self.home)

    def configure(self, url: str, key: str, api: str) -> None:
        (self.home / ".openclaw" / "openclaw.json").write_bytes(
            configuration(url, key, api, free_port())
        )

    async def say(self, *words: str) -> Any:
        """Run its command line to the end, and return its JSON output."""
        ended = await run(["openclaw", "agent", *words, "--json"], self.work, self.env)
        assert ended.code == 0, ended
        return orjson.loads(ended.out[ended.out.index("{") :])

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Run its own gateway, as for a user."""
        log = self.home / "gateway.log"
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                "openclaw", "gateway", "run", cwd=self.work, env=self.env,
                stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
            try:
                async with asyncio.timeout(PATIENCE_S):
                    while b"[gateway] ready" not in log.read_bytes():
                        assert process.returncode is None, log.read_text()[-4000:]
                        await asyncio.sleep(0.2)
                yield
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


async def session_key(url: str) -> str:
    """Return a session key of the gateway for one trajectory."""
    async with aiohttp.ClientSession() as http, http.post(f"{url}/sessions", json={}) as reply:
        found: Mapping[str, str] = await reply.json()
        return found["session_key"]


def test_a_conversation_with_tools_and_a_sub_agent_is_one_trajectory(
    stage: Stage, tmp_path: Path
) -> None:
    """Use its own gateway, several messages and a key of `POST /sessions`."""
    openclaw = OpenClaw(tmp_path)

    async def scenario(url: str, ear: Ear) -> None:
        openclaw.configure(url, await session_key(stage.url), "openai-completions")
        async with openclaw.serving():
            await openclaw.say("--agent", "main", "-m", "Read the note")
            await openclaw.say("--agent", "main", "-m", "Ask a helper")
            await ear.until_told(b"EGRET")
            await openclaw.say("--agent", "main", "-m", "Go on")
            await run(
                ["openclaw", "sessions", "compact", "agent:main:main"], openclaw.work, openclaw.env
            )

    played = stage.play(ToyModel(decide), scenario)
    record("openclaw", played, tmp_path, SUB_AGENT, "Requester session")
    (trajectory,) = stage.kept(played)
    assert roots(trajectory) == 1
    found = tags(trajectory)
    assert set(found) == {(), ("sub_agent",), ("compaction",)}
    assert found.count(("sub_agent",)) == 2
    said = [orjson.loads(s.response_json).get("content") for s in trajectory.steps]
    assert {"The note says heron", "The helper saw egret", "EGRET", "Where were we?"} <= set(said)


def test_without_a_session_key_a_run_is_a_trajectory_with_its_sub_agent(
    stage: Stage, tmp_path: Path
) -> None:
    """Use an unknown key: the trace shows which calls belong together."""
    openclaw = OpenClaw(tmp_path)

    async def scenario(url: str, ear: Ear) -> None:
        openclaw.configure(url, "any", "openai-completions")
        async with openclaw.serving():
            await openclaw.say("--agent", "main", "-m", "Ask a helper")
            await ear.until_told(b"EGRET")

    played = stage.play(ToyModel(decide), scenario)
    record("openclaw-run", played, tmp_path, SUB_AGENT, "Requester session")
    (trajectory,) = stage.kept(played)
    assert trajectory.trajectory_key.startswith("agent-openclaw-")
    assert roots(trajectory) == 1
    assert tags(trajectory).count(("sub_agent",)) == 2
    evidence = {t.evidence for s in trajectory.steps for t in s.tags}
    assert evidence == {f"anywhere in the system prompt: {SUB_AGENT}"}


@pytest.mark.parametrize("api", ["openai-completions", "openai-responses", "anthropic-messages"])
def test_one_headless_run_over_each_protocol_is_one_trajectory(
    stage: Stage, tmp_path: Path, api: str
) -> None:
    openclaw = OpenClaw(tmp_path)
    said: list[Any] = []

    async def scenario(url: str, ear: Ear) -> None:
        openclaw.configure(url, "any", api)
        said.append(await openclaw.say("exec", "Read the note"))

    played = stage.play(ToyModel(decide), scenario)
    record(f"openclaw-{api}", played, tmp_path)
    assert said[0]["final"] == "The note says heron"
    (trajectory,) = stage.kept(played)
    assert trajectory.trajectory_key.startswith("agent-openclaw-")
    assert roots(trajectory) == 1
    assert tags(trajectory) == [(), ()]
    # OpenClaw moves its context message to the end of every request, except over Responses.
    assert drifts(trajectory) == ["root", "clean" if api == "openai-responses" else "root"]
