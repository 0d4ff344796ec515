"""Tag the calls of a known agent that are not its main conversation. Pure.

Such a call belongs to a sub-agent, or makes a title, a compaction or a summary. A tag names its
evidence: a header, or words of the agent's own prompt, never of the user's. An uncertain call gets
no tag. To add a sign, add a line to one of the two tables, with its source in a comment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import orjson

from gateway.attribution.agents import AgentName, agent_of
from gateway.attribution.conversation import first_user_text, last_user_text, system_text
from schemas.records import Tag

Name = Literal["sub_agent", "title", "compaction", "summary"]
Where = Literal[
    "system prompt", "anywhere in the system prompt", "first user turn", "last user turn"
]
LOOKED_AT = 2000
"""Characters searched at the start of a block, where an agent puts its instruction.

Text further in may come from a user's own files.
"""
MAX_VALUE = 100


class HeaderSign(NamedTuple):
    """Map a header of an agent to a tag. value None: any value matches."""

    agent: AgentName
    header: str
    value: str | None
    name: Name


class PromptSign(NamedTuple):
    """Map words of an agent's own prompt to a tag."""

    agent: AgentName
    where: Where
    words: str
    name: Name


HEADERS = (
    HeaderSign("claude-code", "x-claude-code-agent-id", None, "sub_agent"),  # measured, 2.1.329
    # its gateway hints, from 2.1.273
    HeaderSign("claude-code", "x-claude-code-request-class", "subagent", "sub_agent"),
    HeaderSign("claude-code", "x-claude-code-request-class", "workflow", "sub_agent"),
    HeaderSign("claude-code", "x-claude-code-request-class", "compaction", "compaction"),
    HeaderSign("claude-code", "x-claude-code-compaction", None, "compaction"),
    # codex-rs/core, session sources
    HeaderSign("codex", "x-openai-subagent", "compact", "compaction"),
    HeaderSign("codex", "x-openai-subagent", "memory_consolidation", "summary"),
    # measured, 0.169.0: collab_spawn; also review and others
    HeaderSign("codex", "x-openai-subagent", None, "sub_agent"),
    HeaderSign("codex", "x-codex-parent-thread-id", None, "sub_agent"),  # measured
    HeaderSign("opencode", "x-parent-session-id", None, "sub_agent"),  # measured
)
"""The first match of an agent and header counts."""

CODEX_METADATA = "x-codex-turn-metadata"
CODEX_KINDS: Mapping[str, Name] = {"compaction": "compaction", "memory": "summary"}
"""`request_kind` of codex's turn metadata, codex-rs/core."""

PROMPTS = (
    # measured: its billing block
    PromptSign("claude-code", "system prompt", "cc_is_subagent=true", "sub_agent"),
    # session title, 2.x
    PromptSign("claude-code", "system prompt", "Generate a concise, sentence-case title", "title"),
    # topic and title, 1.x
    PromptSign("claude-code", "system prompt", "indicates a new conversation topic", "title"),
    # 1.x and 2.x
    PromptSign(
        "claude-code", "system prompt", "tasked with summarizing conversations", "compaction"
    ),
    # /compact
    PromptSign(
        "claude-code",
        "last user turn",
        "Your task is to create a detailed summary of",
        "compaction",
    ),
    # recap, 2.x
    PromptSign(
        "claude-code", "last user turn", "The user stepped away and is coming back.", "summary"
    ),
    # core/templates/compact
    PromptSign("codex", "last user turn", "CONTEXT CHECKPOINT COMPACTION", "compaction"),
    PromptSign("codex", "system prompt", "CONTEXT CHECKPOINT COMPACTION", "compaction"),
    # agent/prompt/title.txt
    PromptSign("opencode", "system prompt", "You are a title generator", "title"),
    # session/prompt.ts
    PromptSign("opencode", "first user turn", "Generate a title for this conversation:", "title"),
    # compaction.txt
    PromptSign(
        "opencode", "system prompt", "anchored context summarization assistant", "compaction"
    ),
    # its older wording
    PromptSign("opencode", "system prompt", "tasked with summarizing conversations", "compaction"),
    # summary.txt
    PromptSign(
        "opencode", "system prompt", "Summarize what was done in this conversation", "summary"
    ),
    # measured, 2026.9.6
    PromptSign("openclaw", "anywhere in the system prompt", "Subagent spawned by", "sub_agent"),
    # older wording
    PromptSign(
        "openclaw",
        "anywhere in the system prompt",
        "You are a **subagent** spawned by",
        "sub_agent",
    ),
    # its compaction
    PromptSign(
        "openclaw", "system prompt", "You are a context summarization assistant", "compaction"
    ),
    # session memory file
    PromptSign("openclaw", "last user turn", "generate a short 1-2 word filename slug", "title"),
)


def tags_of(headers: Mapping[str, str], said: Mapping[str, Any]) -> tuple[Tag, ...]:
    """Return the tags of a call, each name once.

    Args:
        headers: Names in lower case.
        said: Body of the request.
    """
    agent = agent_of(headers, said)
    if agent is None:
        return ()
    found: dict[str, str] = {}
    seen: set[str] = set()
    for sign in HEADERS:
        value = (
            headers.get(sign.header) if sign.agent == agent and sign.header not in seen else None
        )
        if value and sign.value in (None, value):
            seen.add(sign.header)
            found.setdefault(sign.name, f"header {sign.header}: {value[:MAX_VALUE]}")
    if agent == "codex" and (kind := _codex_kind(headers)) is not None:
        found.setdefault(CODEX_KINDS[kind], f"header {CODEX_METADATA}: request_kind {kind}")
    texts: dict[Where, str] = {}
    for prompt in PROMPTS:
        if prompt.agent == agent:
            if prompt.where not in texts:
                texts[prompt.where] = _text(prompt.where, said)
            if prompt.words in texts[prompt.where]:
                found.setdefault(prompt.name, f"{prompt.where}: {prompt.words}")
    return tuple(Tag(name=name, evidence=evidence) for name, evidence in found.items())


def _text(where: Where, said: Mapping[str, Any]) -> str:
    match where:
        case "system prompt":
            return system_text(said, LOOKED_AT)
        case "anywhere in the system prompt":
            return system_text(said)
        case "first user turn":
            return first_user_text(said, LOOKED_AT)
        case "last user turn":
            return last_user_text(said, LOOKED_AT)


def _codex_kind(headers: Mapping[str, str]) -> str | None:
    text = headers.get(CODEX_METADATA)
    if text is None:
        return None
    try:
        said = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    kind = said.get("request_kind") if isinstance(said, dict) else None
    return kind if isinstance(kind, str) and kind in CODEX_KINDS else None
