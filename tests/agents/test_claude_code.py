"""Test Claude Code through the gateway: only its base URL and its key are changed.

It runs headless, with a new home directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from support.agents import Ear, environment, run
from support.stage import Stage, drifts, record, roots, tags
from support.toy_model import Call, Heard, Reply, ToyModel

pytestmark = pytest.mark.long
SUMMARY = (
    "<analysis>Short.</analysis>\n<summary>The note says heron; a helper said so too.</summary>"
)
ALLOWED = ["--allowedTools", "Bash", "Read", "Agent"]


def decide(heard: Heard) -> Reply:
    """Act as the model: two tools at once, then a sub-agent, then a summary on request."""
    asked = heard.users[-1]
    if "cc_is_subagent=true" in heard.system:
        return Reply("The helper saw egret") if heard.results else Reply("", (bash("echo egret"),))
    if "create a detailed summary" in asked:
        return Reply(SUMMARY)
    if "task-notification" in asked:
        return Reply("It saw egret" if "The helper saw egret" in asked else "It saw nothing")
    if heard.last.role == "tool":
        return Reply(
            f"The note says {heard.results[0].split()[-1]}"
            if len(heard.results) == 2
            else "I wait for it."
        )
    if "note" in asked:
        return Reply(
            "I will look.", (Call("Read", {"file_path": asked.split()[-1]}), bash("echo crane"))
        )
    if "helper" in asked:
        task = {
            "description": "Look",
            "prompt": "Say which bird you see",
            "subagent_type": "general-purpose",
        }
        return Reply("", (Call("Agent", task),))
    return Reply("Where were we?")


def bash(command: str) -> Call:
    return Call("Bash", {"command": command, "description": "Say a bird"})


def test_a_conversation_with_tools_a_sub_agent_and_a_compaction_is_one_trajectory(
    stage: Stage, tmp_path: Path
) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (work / "note.txt").write_text("heron")
    said: list[dict[str, Any]] = []

    async def scenario(url: str, ear: Ear) -> None:
        env = environment(home, ANTHROPIC_BASE_URL=url, ANTHROPIC_API_KEY="any")
        for number, prompt in enumerate(
            (f"Read the note {work / 'note.txt'}", "Ask a helper", "/compact", "Go on")
        ):
            words = [
                "claude",
                "-p",
                prompt,
                "--output-format",
                "json",
                *ALLOWED,
                *(["--continue"] if number else []),
            ]
            ended = await run(words, work, env)
            assert ended.code == 0, ended
            said.append(orjson.loads(ended.out))

    played = stage.play(ToyModel(decide), scenario)
    record("claude-code", played, tmp_path, "cc_is_subagent=true", "Your task is to create")
    assert [s["result"] for s in said] == [
        "The note says heron",
        "It saw egret",
        "",
        "Where were we?",
    ]
    assert len({s["session_id"] for s in said}) == 1
    (trajectory,) = stage.kept(played)
    assert trajectory.trajectory_key.startswith("agent-claude-code-")
    assert roots(trajectory) == 1
    assert sorted(tags(trajectory)) == [()] * 6 + [("compaction",)] + [("sub_agent",)] * 2
    # The calls that start a new prefix: the conversation, the sub-agent, and the conversation after
    # its compaction.
    assert sorted(drifts(trajectory)) == ["clean"] * 6 + ["root"] * 3
    evidence = {t.name: t.evidence for s in trajectory.steps for t in s.tags}
    assert evidence["sub_agent"].startswith("header x-claude-code-agent-id: ")
    assert evidence["compaction"] == "last user turn: Your task is to create a detailed summary of"
