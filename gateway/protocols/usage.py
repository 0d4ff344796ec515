"""Reads token counts from the `usage` of a reply of any protocol. Pure.

Values that are not counts are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from clawstream.schemas.records import Usage

INPUT_DETAILS = ("prompt_tokens_details", "input_tokens_details")
OUTPUT_DETAILS = ("completion_tokens_details", "output_tokens_details")


def usage_of(payload: object) -> Usage | None:
    """Parse the `usage` object of a reply; None when it has no counts.

    Anthropic's `input_tokens` exclude tokens read from or written to the cache; OpenAI's
    `prompt_tokens` include them. The result includes them. Kimi and DeepSeek have own fields for
    cached tokens. xAI's `completion_tokens` exclude reasoning tokens, as the total shows; the
    result includes them.
    """
    if not isinstance(payload, dict) or not payload:
        return None
    prompt = _count(payload, "prompt_tokens", "input_tokens")
    cached = _detail(payload, INPUT_DETAILS, "cached_tokens")
    if cached is None:
        cached = _count(
            payload, "cached_tokens", "prompt_cache_hit_tokens", "cache_read_input_tokens"
        )
    completion = _count(payload, "completion_tokens", "output_tokens")
    reasoning = _detail(payload, OUTPUT_DETAILS, "reasoning_tokens")
    if prompt is not None and completion is not None and reasoning:
        total = _count(payload, "total_tokens")
        if total == prompt + completion + reasoning:
            completion += reasoning
    if prompt is not None and "input_tokens" in payload:
        for cache in ("cache_read_input_tokens", "cache_creation_input_tokens"):
            prompt += _count(payload, cache) or 0
    if prompt is cached is completion is reasoning is None:
        return None
    return Usage(
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        reasoning_tokens=reasoning,
    )


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


def _first(counted: int | None, reported: int | None) -> int | None:
    return reported if counted is None else counted


def _count(payload: Mapping[str, Any], *names: str) -> int | None:
    """Return the count in the first of these fields that has one."""
    for name in names:
        value = payload.get(name)
        if type(value) is int and 0 <= value < 1 << 30:
            return value
    return None


def _detail(payload: Mapping[str, Any], objects: Iterable[str], name: str) -> int | None:
    """Return the count `name` in the first of these objects that has it."""
    for key in objects:
        details = payload.get(key)
        if isinstance(details, dict) and (count := _count(details, name)) is not None:
            return count
    return None
