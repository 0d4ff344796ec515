"""Identify the known agent that sends a request, and its session. Pure.

The signs were measured on unmodified agents (claude-code 2.1, codex 0.169, openclaw 2026.9,
opencode): see docs/sessions.md. An agent without a certain sign stays unidentified: a bare
`traceparent` or `x-session-id` from an unknown client is not a session.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import orjson

from clawstream.gateway.attribution.conversation import last_user_text, system_text
from clawstream.schemas.ids import parse_traceparent

AgentName = Literal["claude-code", "codex", "opencode", "openclaw"]

LOOKED_AT = 4096
"""Characters searched at the start of each prompt block for the name of an agent."""
OPENCLAW_SYSTEM = ("running inside OpenClaw", "You are a context summarization assistant")
"""Words in openclaw's own system prompt, and the start of its compaction prompt."""
OPENCLAW_USER = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"
"""Start of a message that openclaw moves to the end of every request."""
OLD_USER_ID = re.compile(r"_session_([0-9a-f-]{36})$")
MAX_ID = 200
"""Maximum characters of an accepted session id."""


class AgentSession(NamedTuple):
    """Name a session as its agent does. A sub-agent has the session of its parent agent."""

    agent: AgentName
    session_id: str


def agent_of(headers: Mapping[str, str], payload: Mapping[str, Any]) -> AgentName | None:
    """Return the agent if it is a known one.

    Args:
        headers: Names in lower case.
        payload: Body of the request.
    """
    agent = headers.get("user-agent", "").lower()
    if "x-claude-code-session-id" in headers or agent.startswith("claude-cli/"):
        return "claude-code"
    if "x-codex-turn-metadata" in headers or agent.startswith("codex"):
        return "codex"
    if "opencode/" in agent or ("x-session-affinity" in headers and "x-session-id" in headers):
        return "opencode"
    if "openclaw" in agent or _speaks_openclaw(headers, payload):
        return "openclaw"
    return None


def _speaks_openclaw(headers: Mapping[str, str], payload: Mapping[str, Any]) -> bool:
    start = system_text(payload, LOOKED_AT)
    if OPENCLAW_SYSTEM[0] in start:
        return True
    # Other clients also send this compaction prompt and these context blocks. Only openclaw sends a
    # trace with them.
    return "traceparent" in headers and (
        start.startswith(OPENCLAW_SYSTEM[1]) or OPENCLAW_USER in last_user_text(payload, LOOKED_AT)
    )


def session_of(headers: Mapping[str, str], payload: Mapping[str, Any]) -> AgentSession | None:
    """Return the session of a known agent, or None.

    Args:
        headers: Names in lower case.
        payload: Body of the request.
    """
    agent = agent_of(headers, payload)
    if agent is None:
        return None
    match agent:
        case "claude-code":
            found = headers.get("x-claude-code-session-id") or _claude_user(payload)
        case "codex":
            found = headers.get("session-id") or headers.get("session_id")
        case "opencode":
            found = headers.get("x-parent-session-id") or headers.get("x-session-id")
        case "openclaw":
            trace = parse_traceparent(headers.get("traceparent"))
            found = trace.trace_id if trace else None
    return AgentSession(agent, found) if found and len(found) <= MAX_ID else None


def _claude_user(payload: Mapping[str, Any]) -> str | None:
    """Return Claude Code's session from `metadata.user_id`.

    The value is JSON with session_id; older versions send `..._session_<uuid>`.
    """
    metadata = payload.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    if not isinstance(user, str):
        return None
    if user.startswith("{"):
        try:
            found = orjson.loads(user)
        except orjson.JSONDecodeError:
            return None
        session = found.get("session_id") if isinstance(found, dict) else None
        return session if isinstance(session, str) else None
    old = OLD_USER_ID.search(user)
    return old[1] if old else None
