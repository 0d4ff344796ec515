"""A real installation for real agents.

Kafka, gateway, assemble and lake run as processes; a toy model is the engine.

played = stage.play(ToyModel(decide), scenario)  # scenario(url, ear) runs the agent at the URL
(trajectory,) = stage.kept(played)  # checks that the log, the lake and a trajectory have it all
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from support.agents import Ear, Exchange
from support.feed import Feed
from support.ports import free_port
from support.scripted.engine import PROTOCOL_SERVERS, ScriptedEngine
from support.scripted.script import Script
from support.toy_model import LOGPROB, ToyModel
from support.up import ROOT, Up, own_installation, up

from clawstream.schemas.records import Step, Trajectory
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import pack_ids, pack_logprobs

Scenario = Callable[[str, Ear], Awaitable[None]]
PATIENCE_S = 300.0
SHOWN = 120
"""Number of characters of a text that a recording keeps."""
WHOLE = ("user_id", "arguments")
OF_TOOLS = ("parameters", "input_schema", "description", "defer_loading")
MACHINE = (
    (r"host=\S+", "host=machine"), (r"os=[^|]*", "os=Linux "), (r"/tmp/[^\"\\ ]*", "/home/agent"),
    (r"codex_exec/(\S+) \([^)]*\)", r"codex_exec/\1 (Linux)"),
)  # fmt: skip
"""Replacements for this machine's names in a recording."""
RECORDED_HEADERS = (
    "user-agent", "traceparent", "session-id", "thread-id", "originator", "upgrade",
    "anthropic-version", "anthropic-beta", "x-app", "x-claude-code", "x-codex", "x-openai",
    "x-session", "x-parent", "x-client-request-id", "x-stainless-retry-count",
)  # fmt: skip


@dataclass(frozen=True)
class Played:
    """The result of a scenario."""

    exchanges: list[Exchange]
    model: ToyModel

    @property
    def calls(self) -> list[Exchange]:
        """Return the model calls."""
        paths = {v.path for v in PROTOCOL_SERVERS}
        return [e for e in self.exchanges if e.method == "POST" and e.endpoint in paths]


class Stage:
    """One installation that runs several scenarios in sequence."""

    def __init__(self, running: Up, engine_port: int) -> None:
        self.running, self.settings, self._engine_port = running, running.settings, engine_port
        self.url = f"http://127.0.0.1:{running.settings.gateway.port}"

    def play(self, model: ToyModel, scenario: Scenario) -> Played:
        """Run a scenario with a recording proxy between its agent and the gateway."""

        async def body() -> Played:
            ear = Ear()
            async with ScriptedEngine(model).serve(self._engine_port), ear.listen(self.url) as url:
                await self._ready()
                await scenario(url, ear)
            return Played(ear.exchanges, model)

        return asyncio.run(body())

    async def _ready(self) -> None:
        async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as http:
            while True:
                try:
                    async with http.get(f"{self.url}/ready") as reply:
                        if reply.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.1)

    def kept(self, played: Played) -> list[Trajectory]:
        """Close and return the trajectories of all calls.

        Checks that replies reached the agent byte for byte and that no call is lost.
        """
        scripts = [self._passed(e, played.model) for e in played.calls]
        feed = Feed(self.settings)
        ids = {e.returned["x-clawstream-step"] for e in played.calls}

        def on_log() -> dict[str, Step]:
            return {s.step_id: s for s in feed.events(feed.topics.steps, Step) if s.step_id in ids}

        self.running.until(lambda: ids == on_log().keys(), "every step is on the log", PATIENCE_S)
        steps = on_log()
        for exchange, script in zip(played.calls, scripts, strict=True):
            step, (choice,) = steps[exchange.returned["x-clawstream-step"]], script.choices
            assert step.status == "ok" and step.tokens_absent_reason is None
            assert step.request_json == exchange.body
            assert step.prompt_token_ids == pack_ids(script.prompt_ids)
            assert step.response_token_ids == pack_ids(choice.ids)
            assert step.response_logprobs == pack_logprobs([LOGPROB] * len(choice.ids))
        keys = {s.trajectory_key: s.step_id for s in steps.values()}
        asyncio.run(self._complete(keys))

        def closed() -> list[Trajectory]:
            return [
                t
                for t in feed.events(feed.topics.trajectories, Trajectory)
                if t.trajectory_key in keys
            ]

        self.running.until(
            lambda: len(closed()) >= len(keys), "every trajectory has closed", PATIENCE_S
        )
        found = closed()
        assert Counter(s.step_id for t in found for s in t.steps) == Counter(dict.fromkeys(ids, 1))
        assert all(s.trainable for t in found for s in t.steps)
        self.running.until(
            lambda: ids <= set(feed.column("steps", "step_id")),
            "every step is in the lake",
            PATIENCE_S,
        )
        assert all(n == 1 for s, n in Counter(feed.column("steps", "step_id")).items() if s in ids)
        feed.close()
        return found

    def _passed(self, exchange: Exchange, model: ToyModel) -> Script:
        """Return the script of a reply that reached the agent byte for byte."""
        assert exchange.status == 200, exchange.reply
        server = next(v for v in PROTOCOL_SERVERS if v.path == exchange.endpoint)
        asked = exchange.said
        for heard, script in zip(model.heard, model.said, strict=True):
            if heard.said == asked:
                streamed = b"".join(e.data for e in server.events(asked, script))
                if exchange.reply == (
                    streamed if asked.get("stream") else orjson.dumps(server.plain(asked, script))
                ):
                    return script
        raise AssertionError(f"not what the engine said: {exchange.reply[:2000]!r}")

    async def _complete(self, keys: Mapping[str, str]) -> None:
        """Complete the trajectories.

        keys: each with one of its steps, because a key assigned by the gateway does not identify
        the trajectory.
        """
        async with aiohttp.ClientSession() as http:
            for key, step in keys.items():
                async with http.post(
                    f"{self.url}/complete_trajectory/{key}", json={"step_id": step}
                ) as reply:
                    assert reply.status == 200, await reply.text()


@contextmanager
def stage_in(home: Path) -> Iterator[Stage]:
    """Run an installation in a folder until the block ends."""
    engine_port = free_port()
    settings = Settings.model_validate({
        **own_installation(home, upstreams=[f"http://127.0.0.1:{engine_port}"]),
        "jobs": {"anonymous_inactivity_s": 3000},  # a busy machine pauses longer than an agent
        "lake": {"flush_interval_s": 1},
        "up": {"processes": ["broker", "gateway", "assemble", "lake"]},
    })  # fmt: skip
    with up(settings) as running:
        yield Stage(running, engine_port)
        running.stop()


def roots(trajectory: Trajectory) -> int:
    """Return the number of trees in the trajectory."""
    return sum(s.parent is None for s in trajectory.segments)


def tags(trajectory: Trajectory) -> list[tuple[str, ...]]:
    """Return the tags of each step, in order."""
    return [tuple(t.name for t in s.tags) for s in trajectory.steps]


def drifts(trajectory: Trajectory) -> list[str]:
    """Return how each step's prompt was derived."""
    return [s.drift for s in trajectory.steps]


def record(name: str, played: Played, home: Path, *signs: str) -> None:
    """Write an agent's requests to runs/agents without this machine's names.

    Texts are shortened, except for lines that contain one of `signs`. tests/agents/recorded has
    copies. home: the agent's home directory.
    """
    folder = ROOT / "runs" / "agents"
    folder.mkdir(parents=True, exist_ok=True)
    found = [
        {
            "method": e.method,
            "path": e.path,
            "headers": {k: v for k, v in e.headers.items() if k.startswith(RECORDED_HEADERS)},
            **({"body": shortened(e.said, signs)} if e.body else {}),
        }
        for e in played.exchanges
    ]
    text = orjson.dumps(found, option=orjson.OPT_INDENT_2).decode() + "\n"
    for pattern, instead in (
        (re.escape(str(home)), "/home/agent"),
        (re.escape(str(ROOT)), "/project"),
        *MACHINE,
    ):
        text = re.sub(pattern, instead, text)
    (folder / f"{name}.json").write_text(text)


def shortened(said: Any, signs: tuple[str, ...]) -> Any:
    """Return a body without its long texts, and with only the names of its tools."""
    if isinstance(said, dict):
        return {
            k: v if k in WHOLE else shortened(v, signs)
            for k, v in said.items()
            if k not in OF_TOOLS
        }
    if isinstance(said, list):
        return [shortened(v, signs) for v in said]
    if isinstance(said, str) and len(said) > SHOWN:
        kept = [line for line in said[SHOWN:].splitlines() if any(s in line for s in signs)]
        return "\n".join([said[:SHOWN] + " ...", *kept])
    return said
