"""Test how known agents are identified by their requests, and their sessions and tags."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.gateway.attribution.agents import agent_of, session_of
from clawstream.gateway.attribution.tags import CODEX_METADATA, HEADERS, PROMPTS, tags_of

TRACE = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
CLAUDE = {"user-agent": "claude-cli/2.1.329 (external, cli)", "x-claude-code-session-id": "s"}
CODEX = {
    "user-agent": "codex_exec/0.169.0",
    "session-id": "s",
    "thread-id": "s",
    "x-codex-turn-metadata": "{}",
}
OPENCODE = {"user-agent": "opencode/1.4", "x-session-id": "s", "x-session-affinity": "s"}


def chat(system: str | None, *users: str) -> dict[str, Any]:
    head = [{"role": "system", "content": system}] if system is not None else []
    return {"messages": [*head, *({"role": "user", "content": u} for u in users)]}


def anthropic(system: Any, *users: Any) -> dict[str, Any]:
    return {"system": system, "messages": [{"role": "user", "content": u} for u in users]}


def responses(instructions: str, *users: str) -> dict[str, Any]:
    turns = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": u}]}
        for u in users
    ]
    return {"instructions": instructions, "input": turns}


OPENCLAW = chat("You are a personal assistant running inside OpenClaw.\n## Tooling", "hi")
BILLING = {
    "type": "text",
    "text": "x-anthropic-billing-header: cc_version=2.1.329; cc_is_subagent=true;",
}
COMPACT = (
    "CRITICAL: Respond with TEXT ONLY.\n\n"
    "Your task is to create a detailed summary of the conversation so far"
)

SESSIONS: list[tuple[dict[str, str], dict[str, Any], tuple[str, str | None] | None]] = [
    (CLAUDE, {}, ("claude-code", "s")),
    (
        {"user-agent": "claude-cli/2.1"},
        {"metadata": {"user_id": '{"session_id":"u"}'}},
        ("claude-code", "u"),
    ),
    (
        {"user-agent": "claude-cli/1.0"},
        {"metadata": {"user_id": "user_1_account__session_01234567-89ab-cdef-0123-456789abcdef"}},
        ("claude-code", "01234567-89ab-cdef-0123-456789abcdef"),
    ),
    ({"user-agent": "claude-cli/2.1"}, {"metadata": {"user_id": "{broken"}}, ("claude-code", None)),
    ({"user-agent": "claude-cli/2.1"}, {"metadata": [1]}, ("claude-code", None)),
    (CODEX, {}, ("codex", "s")),
    (CODEX | {"thread-id": "child", "x-codex-parent-thread-id": "s"}, {}, ("codex", "s")),
    ({"user-agent": "codex_cli_rs/0.50", "session_id": "old"}, {}, ("codex", "old")),
    (OPENCODE, {}, ("opencode", "s")),
    ({"user-agent": "opencode/1.4", "x-session-id": "s"}, {}, ("opencode", "s")),
    (OPENCODE | {"x-session-id": "c", "x-parent-session-id": "s"}, {}, ("opencode", "s")),
    (TRACE, OPENCLAW, ("openclaw", "ab" * 16)),
    (
        TRACE,
        responses("You are a personal assistant running inside OpenClaw.", "hi"),
        ("openclaw", "ab" * 16),
    ),
    (
        TRACE,
        anthropic([{"type": "text", "text": "... running inside OpenClaw."}], "hi"),
        ("openclaw", "ab" * 16),
    ),
    (TRACE, chat("You are a context summarization assistant. Your", "x"), ("openclaw", "ab" * 16)),
    (
        TRACE,
        chat("You are mine", "hi", "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nx"),
        ("openclaw", "ab" * 16),
    ),
    ({}, OPENCLAW, ("openclaw", None)),
    ({"traceparent": "broken"}, OPENCLAW, ("openclaw", None)),
    # An unknown agent: its headers may mean anything.
    (TRACE, chat("You are helpful", "hi"), None),
    ({"x-session-id": "s"}, chat(None, "hi"), None),
    ({"session-id": "s"}, chat(None, "hi"), None),
    ({"user-agent": "OpenAI/Python 2.1"}, chat("You are a title generator", "hi"), None),
    ({}, chat("You are a context summarization assistant.", "x"), None),
]


@pytest.mark.parametrize(("headers", "said", "expected"), SESSIONS)
def test_a_session_is_what_its_agent_says_it_is(
    headers: dict[str, str], said: dict[str, Any], expected: tuple[str, str | None] | None
) -> None:
    session = session_of(headers, said)
    assert agent_of(headers, said) == (expected[0] if expected else None)
    assert session == (expected if expected and expected[1] else None)


def test_a_session_id_that_is_too_long_is_none() -> None:
    assert session_of(CLAUDE | {"x-claude-code-session-id": "s" * 201}, {}) is None


TAGGED: list[tuple[dict[str, str], dict[str, Any], dict[str, str]]] = [
    (CLAUDE, anthropic("You are Claude Code", "hi"), {}),
    (
        CLAUDE | {"x-claude-code-agent-id": "a7"},
        {},
        {"sub_agent": "header x-claude-code-agent-id: a7"},
    ),
    (CLAUDE, anthropic([BILLING], "hi"), {"sub_agent": "system prompt: cc_is_subagent=true"}),
    (
        CLAUDE | {"x-claude-code-agent-id": "a7"},
        anthropic(
            [BILLING],
            "hi",
            [{"type": "tool_result", "content": "x"}, {"type": "text", "text": COMPACT}],
        ),
        {
            "sub_agent": "header x-claude-code-agent-id: a7",
            "compaction": "last user turn: Your task is to create a detailed summary of",
        },
    ),
    (CLAUDE, anthropic("", COMPACT, "and now?"), {}),
    (
        CLAUDE | {"x-claude-code-request-class": "compaction"},
        {},
        {"compaction": "header x-claude-code-request-class: compaction"},
    ),
    (CLAUDE | {"x-claude-code-request-class": "main"}, {}, {}),
    (
        CLAUDE,
        anthropic("Generate a concise, sentence-case title (3-7 words)", "hi"),
        {"title": "system prompt: Generate a concise, sentence-case title"},
    ),
    (
        CLAUDE,
        anthropic("Analyze if this message indicates a new conversation topic. If it does", "hi"),
        {"title": "system prompt: indicates a new conversation topic"},
    ),
    (CODEX, responses("You are Codex", "hi"), {}),
    (
        CODEX | {"x-openai-subagent": "collab_spawn", "x-codex-parent-thread-id": "s"},
        {},
        {"sub_agent": "header x-openai-subagent: collab_spawn"},
    ),
    (
        CODEX | {"x-openai-subagent": "compact"},
        {},
        {"compaction": "header x-openai-subagent: compact"},
    ),
    (
        CODEX | {"x-codex-turn-metadata": '{"request_kind":"compaction"}'},
        {},
        {"compaction": "header x-codex-turn-metadata: request_kind compaction"},
    ),
    (CODEX | {"x-codex-turn-metadata": '{"request_kind":"turn"}'}, {}, {}),
    (CODEX | {"x-codex-turn-metadata": "["}, {}, {}),
    (
        CODEX,
        responses(
            "You are Codex", "hi", "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a"
        ),
        {"compaction": "last user turn: CONTEXT CHECKPOINT COMPACTION"},
    ),
    (OPENCODE | {"x-parent-session-id": "p"}, {}, {"sub_agent": "header x-parent-session-id: p"}),
    (
        OPENCODE,
        chat(
            "You are a title generator. You output ONLY",
            "Generate a title for this conversation:",
            "hi",
        ),
        {"title": "system prompt: You are a title generator"},
    ),
    (
        OPENCODE,
        chat("You are an anchored context summarization assistant for coding", "x"),
        {"compaction": "system prompt: anchored context summarization assistant"},
    ),
    (
        TRACE,
        chat(
            "... running inside OpenClaw ...\n# Subagent Context\n"
            "You are a **subagent** spawned by the main agent",
            "x",
        ),
        {"sub_agent": "anywhere in the system prompt: You are a **subagent** spawned by"},
    ),
    (
        TRACE,
        chat(
            "... running inside OpenClaw ...\n# Subagent Context\n\n"
            "Subagent spawned by main agent; one specific task.",
            "x",
        ),
        {"sub_agent": "anywhere in the system prompt: Subagent spawned by"},
    ),
    (
        TRACE,
        chat("You are a context summarization assistant. Your task", "x"),
        {"compaction": "system prompt: You are a context summarization assistant"},
    ),
    # The words are ignored further in, where a user's own files may be quoted.
    (OPENCODE, chat("You are opencode" + " " * 2000 + "You are a title generator", "x"), {}),
    # The words of one agent are ignored from another agent and from an unknown client.
    ({}, chat("You are a title generator", COMPACT), {}),
    (CODEX, responses("cc_is_subagent=true", COMPACT), {}),
    ({"x-openai-subagent": "compact"}, chat(None, "x"), {}),
]


@pytest.mark.parametrize(("headers", "said", "expected"), TAGGED)
def test_a_call_is_tagged_with_what_shows_it(
    headers: dict[str, str], said: dict[str, Any], expected: dict[str, str]
) -> None:
    assert {t.name: t.evidence for t in tags_of(headers, said)} == expected


def test_evidence_is_bounded_and_never_the_users_words() -> None:
    (tag,) = tags_of(CLAUDE | {"x-claude-code-agent-id": "a" * 500}, anthropic("secret", "secret"))
    assert len(tag.evidence) < 150
    marked = {s.words for signs in PROMPTS.values() for s in signs} | {CODEX_METADATA}
    marked |= {s.header for signs in HEADERS.values() for s in signs}
    for headers, said, _ in TAGGED:
        assert all(any(words in t.evidence for words in marked) for t in tags_of(headers, said))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "user_id"]), inner, max_size=3
        )
    ),
    max_leaves=20,
)


@given(
    st.sampled_from([CLAUDE, CODEX, OPENCODE, TRACE, {}, {"user-agent": "claude-cli/2"}]),
    st.dictionaries(
        st.sampled_from(["messages", "input", "system", "instructions", "metadata", "prompt"]), JSON
    ),
    JSON,
)
def test_no_body_breaks_recognition(
    headers: dict[str, str], said: dict[str, Any], metadata: Any
) -> None:
    said = orjson.loads(orjson.dumps(said))
    given_headers = (
        headers | {"x-codex-turn-metadata": orjson.dumps(metadata).decode()}
        if headers is CODEX
        else headers
    )
    assert isinstance(tags_of(given_headers, said), tuple)
    session_of(given_headers, said)
