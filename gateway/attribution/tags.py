"""Tag the calls of a known agent that are not its main conversation. Pure.

Such a call belongs to a sub-agent, or makes a title, a compaction or a summary. A tag names its
evidence: a header, or words of the agent's own prompt, never of the user's. An uncertain call gets
no tag. To add a sign, add a line to one of the two tables, with its source in a comment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import orjson

from clawstream.gateway.attribution.agents import AgentName, agent_of
from clawstream.gateway.attribution.conversation import first_user_text, last_user_text, system_text
from clawstream.schemas.records import Tag

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
    """Map a header to a tag. value None: any value matches."""

    header: str
    value: str | None
    name: Name


class PromptSign(NamedTuple):
    """Map words of an agent's own prompt to a tag."""

    where: Where
    words: str
    name: Name


HEADERS: Mapping[AgentName, tuple[HeaderSign, ...]] = {
    "claude-code": (
        HeaderSign("x-claude-code-agent-id", None, "sub_agent"),  # measured, 2.1.329
        # its gateway hints, from 2.1.273
        HeaderSign("x-claude-code-request-class", "subagent", "sub_agent"),
        HeaderSign("x-claude-code-request-class", "workflow", "sub_agent"),
        HeaderSign("x-claude-code-request-class", "compaction", "compaction"),
        HeaderSign("x-claude-code-compaction", None, "compaction"),
    ),
    "codex": (
        # codex-rs/core, session sources
        HeaderSign("x-openai-subagent", "compact", "compaction"),
        HeaderSign("x-openai-subagent", "memory_consolidation", "summary"),
        # measured, 0.169.0: collab_spawn; also review and others
        HeaderSign("x-openai-subagent", None, "sub_agent"),
        HeaderSign("x-codex-parent-thread-id", None, "sub_agent"),  # measured
    ),
    "opencode": (HeaderSign("x-parent-session-id", None, "sub_agent"),),  # measured
    "openclaw": (),
}
"""The first match of a header counts."""

CODEX_METADATA = "x-codex-turn-metadata"
CODEX_KINDS: Mapping[str, Name] = {"compaction": "compaction", "memory": "summary"}
"""`request_kind` of codex's turn metadata, codex-rs/core."""

PROMPTS: Mapping[AgentName, tuple[PromptSign, ...]] = {
    "claude-code": (
        # measured: its billing block
        PromptSign("system prompt", "cc_is_subagent=true", "sub_agent"),
        # session title, 2.x
        PromptSign("system prompt", "Generate a concise, sentence-case title", "title"),
        # topic and title, 1.x
        PromptSign("system prompt", "indicates a new conversation topic", "title"),
        # 1.x and 2.x
        PromptSign("system prompt", "tasked with summarizing conversations", "compaction"),
        # /compact
        PromptSign("last user turn", "Your task is to create a detailed summary of", "compaction"),
        # recap, 2.x
        PromptSign("last user turn", "The user stepped away and is coming back.", "summary"),
    ),
    "codex": (
        # core/templates/compact
        PromptSign("last user turn", "CONTEXT CHECKPOINT COMPACTION", "compaction"),
        PromptSign("system prompt", "CONTEXT CHECKPOINT COMPACTION", "compaction"),
    ),
    "opencode": (
        # agent/prompt/title.txt
        PromptSign("system prompt", "You are a title generator", "title"),
        # session/prompt.ts
        PromptSign("first user turn", "Generate a title for this conversation:", "title"),
        # compaction.txt
        PromptSign("system prompt", "anchored context summarization assistant", "compaction"),
        # its older wording
        PromptSign("system prompt", "tasked with summarizing conversations", "compaction"),
        # summary.txt
        PromptSign("system prompt", "Summarize what was done in this conversation", "summary"),
    ),
    "openclaw": (
        # measured, 2026.9.6
        PromptSign("anywhere in the system prompt", "Subagent spawned by", "sub_agent"),
        # older wording
        PromptSign(
            "anywhere in the system prompt", "You are a **subagent** spawned by", "sub_agent"
        ),
        # its compaction
        PromptSign("system prompt", "You are a context summarization assistant", "compaction"),
        # session memory file
        PromptSign("last user turn", "generate a short 1-2 word filename slug", "title"),
    ),
}


def tags_of(headers: Mapping[str, str], payload: Mapping[str, Any]) -> tuple[Tag, ...]:
    """Return the tags of a call, each name once.

    Args:
        headers: Names in lower case.
        payload: Body of the request.
    """
    agent = agent_of(headers, payload)
    if agent is None:
        return ()
    found: dict[str, str] = {}
    seen: set[str] = set()
    for sign in HEADERS[agent]:
        value = headers.get(sign.header) if sign.header not in seen else None
        if value and sign.value in (None, value):
            seen.add(sign.header)
            found.setdefault(sign.name, f"header {sign.header}: {value[:MAX_VALUE]}")
    if agent == "codex" and (kind := _codex_kind(headers)) is not None:
        found.setdefault(CODEX_KINDS[kind], f"header {CODEX_METADATA}: request_kind {kind}")
    texts: dict[Where, str] = {}
    for prompt in PROMPTS[agent]:
        if prompt.where not in texts:
            texts[prompt.where] = _text(prompt.where, payload)
        if prompt.words in texts[prompt.where]:
            found.setdefault(prompt.name, f"{prompt.where}: {prompt.words}")
    return tuple(Tag(name=name, evidence=evidence) for name, evidence in found.items())


def _text(where: Where, payload: Mapping[str, Any]) -> str:
    match where:
        case "system prompt":
            return system_text(payload, LOOKED_AT)
        case "anywhere in the system prompt":
            return system_text(payload)
        case "first user turn":
            return first_user_text(payload, LOOKED_AT)
        case "last user turn":
            return last_user_text(payload, LOOKED_AT)


def _codex_kind(headers: Mapping[str, str]) -> str | None:
    text = headers.get(CODEX_METADATA)
    if text is None:
        return None
    try:
        metadata = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    kind = metadata.get("request_kind") if isinstance(metadata, dict) else None
    return kind if isinstance(kind, str) and kind in CODEX_KINDS else None
