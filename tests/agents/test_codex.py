"""Test Codex through the gateway, over Responses.

It uses a provider of its own configuration file, or its built-in one with another base URL.
"""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from support.agents import Ear, environment, run
from support.stage import Stage, drifts, record, roots, tags
from support.toy_model import Call, Heard, Reply, ToyModel

pytestmark = pytest.mark.long
EXEC = ["codex", "exec"]
FLAGS = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
PROVIDER = """\
model = "policy"
model_provider = "clawstream"
{more}
[model_providers.clawstream]
name = "Clawstream"
base_url = "{url}/v1"
env_key = "CLAWSTREAM_API_KEY"
wire_api = "responses"
"""
BUILT_IN = """\
model = "policy"
openai_base_url = "{url}/v1"
{more}
"""


def decide(heard: Heard) -> Reply:
    """Act as the model: two tools at once, then a sub-agent and its answer, then a summary.

    The summary follows a request for one.
    """
    asked = heard.users[-1]
    if "CONTEXT CHECKPOINT COMPACTION" in asked:
        return Reply("The note says heron.")
    if "Another language model started" in asked:
        return Reply(
            "The summary says heron" if "The note says heron." in asked else "I remember nothing"
        )
    if "which bird" in asked:
        return Reply("The helper saw egret") if heard.results else Reply("", (shell("echo egret"),))
    if "<subagent_notification>" in asked:
        return Reply("It saw egret" if "The helper saw egret" in asked else "It saw nothing")
    if heard.last.role == "tool":
        if "agent_id" in heard.results[-1]:
            started = orjson.loads(heard.results[-1])["agent_id"]
            return Reply("", (Call("wait_agent", {"targets": [started]}, "multi_agent_v1"),))
        return Reply(f"The note says {heard.results[0].split()[-1]}")
    if "note" in asked:
        return Reply("I will look.", (shell("cat note.txt"), shell("echo crane")))
    if "helper" in asked:
        return Reply(
            "", (Call("spawn_agent", {"message": "Say which bird you see"}, "multi_agent_v1"),)
        )
    return Reply("Where were we?")


def shell(command: str) -> Call:
    return Call("exec_command", {"cmd": command})


class Codex:
    """Run Codex with a new home directory."""

    def __init__(self, folder: Path, configuration: str, more: str = "") -> None:
        self._home, self._work = folder / "home", folder / "work"
        self._configuration, self._more = configuration, more
        (self._home / ".codex").mkdir(parents=True)
        self._work.mkdir()
        (self._work / "note.txt").write_text("heron")
        self._begun = False

    async def say(self, url: str, prompt: str) -> str:
        """Run one turn, and return the agent's last message."""
        (self._home / ".codex" / "config.toml").write_text(
            self._configuration.format(url=url, more=self._more)
        )
        env = environment(self._home, CLAWSTREAM_API_KEY="any", CODEX_API_KEY="any")
        words = [*EXEC, *(["resume", "--last"] if self._begun else []), *FLAGS, prompt]
        self._begun = True
        ended = await run(words, self._work, env)
        assert ended.code == 0, ended
        items = [
            e["item"]
            for e in map(orjson.loads, ended.out.splitlines())
            if e["type"] == "item.completed"
        ]
        return [str(i["text"]) for i in items if i["type"] == "agent_message"][-1]


def test_a_conversation_with_tools_and_a_sub_agent_is_one_trajectory(
    stage: Stage, tmp_path: Path
) -> None:
    codex = Codex(tmp_path, PROVIDER)
    said: list[str] = []

    async def scenario(url: str, ear: Ear) -> None:
        for prompt in ("Read the note", "Ask a helper", "Go on"):
            said.append(await codex.say(url, prompt))

    played = stage.play(ToyModel(decide), scenario)
    record("codex", played, tmp_path)
    assert said == ["The note says heron", "It saw egret", "Where were we?"]
    (trajectory,) = stage.kept(played)
    assert trajectory.trajectory_key.startswith("agent-codex-")
    assert roots(trajectory) == 1
    assert sorted(tags(trajectory)) == [()] * 6 + [("sub_agent",)] * 2
    assert sorted(drifts(trajectory)) == ["clean"] * 6 + ["root"] * 2
    (evidence,) = {t.evidence for s in trajectory.steps for t in s.tags}
    assert evidence == "header x-openai-subagent: collab_spawn"


def test_a_compaction_is_tagged_and_stays_in_the_trajectory(stage: Stage, tmp_path: Path) -> None:
    codex = Codex(tmp_path, PROVIDER, "model_auto_compact_token_limit = 5000")

    async def scenario(url: str, ear: Ear) -> None:
        assert await codex.say(url, "Read the note") == "The summary says heron"

    played = stage.play(ToyModel(decide), scenario)
    record("codex-compaction", played, tmp_path)
    (trajectory,) = stage.kept(played)
    assert roots(trajectory) == 1
    assert tags(trajectory) == [(), ("compaction",), ()]
    (evidence,) = {t.evidence for s in trajectory.steps for t in s.tags}
    assert evidence == "header x-codex-turn-metadata: request_kind compaction"


def test_its_built_in_provider_gives_up_its_web_socket_at_once(
    stage: Stage, tmp_path: Path
) -> None:
    codex = Codex(tmp_path, BUILT_IN)
    said: list[str] = []

    async def scenario(url: str, ear: Ear) -> None:
        said.append(await codex.say(url, "Read the note"))

    played = stage.play(ToyModel(decide), scenario)
    record("codex-built-in", played, tmp_path)
    assert said == ["The note says heron"]
    assert [(e.method, e.status) for e in played.exchanges] == [
        ("GET", 426),
        ("POST", 200),
        ("POST", 200),
    ]
    (trajectory,) = stage.kept(played)
    assert drifts(trajectory) == ["root", "clean"]
