"""Detect empty replies, unreadable tool calls and broken text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from clawstream.rewards.quality.score import Score
from clawstream.schemas.conversation import Call, calls_in, loaded, texts_in
from clawstream.schemas.records import Trajectory

BROKEN = "\ufffd"


def format(trajectory: Trajectory) -> Iterator[Score]:
    """Score an empty reply or a call without JSON arguments with 0.0, undecodable text with 0.5."""
    for step in trajectory.steps:
        # Truncated replies belong to the rule `truncation`; a lost payload has no reply.
        if step.status != "ok" or not step.response_json:
            continue
        try:
            reply = loaded(step.response_json)
        except ValueError as e:
            yield Score(0.0, f"the reply is no JSON: {e}", step.step_id)
        else:
            if not _plain_text(reply):
                yield from (Score(value, why, step.step_id) for value, why in _flaws(reply))


def _plain_text(reply: Any) -> bool:
    """Return whether a reply is text without defects; a fast check for most replies."""
    if (
        type(reply) is not dict
        or "output" in reply
        or reply.get("tool_calls")
        or reply.get("function_call")
    ):
        return False
    text = reply.get("content")
    return type(text) is str and text != "" and not text.isspace() and BROKEN not in text


def _flaws(reply: Any) -> Iterator[tuple[float, str]]:
    calls, texts = list(calls_in(reply)), list(texts_in(reply))
    for call in calls:
        why = _flaw(call) if call.is_json else None
        if why is not None:
            yield 0.0, f"call of {call.name or 'no function'}: {why}"
    if not calls and not any(text.strip() for text in texts):
        yield 0.0, "neither text nor a call"
    if any(BROKEN in text for text in texts):
        yield 0.5, "text with U+FFFD: bytes that were no character"


def _flaw(call: Call) -> str | None:
    if call.given is None:
        return "no arguments"
    if not isinstance(call.given, str):
        return None
    try:
        return (
            None if isinstance(loaded(call.given or "{}"), dict) else "arguments are no JSON object"
        )
    except ValueError as e:
        return f"arguments are no JSON: {e}"
