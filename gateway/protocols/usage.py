"""Reads token counts from the `usage` of a reply of any protocol. Pure.

Values that are not counts are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schemas.records import Usage

INPUT_DETAILS = ("prompt_tokens_details", "input_tokens_details")
OUTPUT_DETAILS = ("completion_tokens_details", "output_tokens_details")


def usage_of(payload: object) -> Usage | None:
    """Parse the `usage` object of a reply; None when it has no counts.

    Anthropic's `input_tokens` exclude tokens read from or written to the cache; OpenAI's
    `prompt_tokens` include them. The result includes them.
    """
    if not isinstance(payload, dict) or not payload:
        return None
    read, written = (_count(payload, f"cache_{what}_input_tokens") for what in ("read", "creation"))
    prompt = _first(_count(payload, "prompt_tokens"), _count(payload, "input_tokens"))
    if prompt is not None and "input_tokens" in payload:
        prompt += (read or 0) + (written or 0)
    found = Usage(
        prompt_tokens=prompt,
        cached_tokens=_first(
            *(_count(_object(payload, name), "cached_tokens") for name in INPUT_DETAILS), read
        ),
        completion_tokens=_first(
            _count(payload, "completion_tokens"), _count(payload, "output_tokens")
        ),
        reasoning_tokens=_first(
            *(_count(_object(payload, name), "reasoning_tokens") for name in OUTPUT_DETAILS)
        ),
    )
    return None if found == Usage() else found


def merged(counted: Usage | None, reported: Usage | None) -> Usage | None:
    """Prefer counts of the tokens themselves over the counts that the reply reported."""
    if counted is None or reported is None:
        return counted or reported
    return Usage(
        prompt_tokens=_first(counted.prompt_tokens, reported.prompt_tokens),
        cached_tokens=_first(counted.cached_tokens, reported.cached_tokens),
        completion_tokens=_first(counted.completion_tokens, reported.completion_tokens),
        reasoning_tokens=_first(counted.reasoning_tokens, reported.reasoning_tokens),
    )


def _first(*counts: int | None) -> int | None:
    return next((count for count in counts if count is not None), None)


def _object(payload: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = payload.get(name)
    return value if isinstance(value, dict) else {}


def _count(payload: Mapping[str, Any], name: str) -> int | None:
    value = payload.get(name)
    return value if type(value) is int and 0 <= value < 1 << 30 else None
