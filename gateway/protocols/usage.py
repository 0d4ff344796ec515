"""How many tokens a call took, as its reply says it, in the words of any protocol. Pure; what is no count is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schemas.records import Usage

INPUT_DETAILS = ("prompt_tokens_details", "input_tokens_details")
OUTPUT_DETAILS = ("completion_tokens_details", "output_tokens_details")


def usage_of(said: object) -> Usage | None:
    """What a reply's `usage` says. None: nothing.

    Anthropic's `input_tokens` leave out what was read from the cache or written to it, OpenAI's counts have it in them.
    """
    if not isinstance(said, dict) or not said:
        return None
    read, written = (_count(said, f"cache_{what}_input_tokens") for what in ("read", "creation"))
    prompt = _first(_count(said, "prompt_tokens"), _count(said, "input_tokens"))
    if prompt is not None and "input_tokens" in said:
        prompt += (read or 0) + (written or 0)
    found = Usage(
        prompt_tokens=prompt,
        cached_tokens=_first(
            *(_count(_object(said, name), "cached_tokens") for name in INPUT_DETAILS), read
        ),
        completion_tokens=_first(_count(said, "completion_tokens"), _count(said, "output_tokens")),
        reasoning_tokens=_first(
            *(_count(_object(said, name), "reasoning_tokens") for name in OUTPUT_DETAILS)
        ),
    )
    return None if found == Usage() else found


def merged(counted: Usage | None, said: Usage | None) -> Usage | None:
    """What was counted from the tokens themselves, and of the rest what the reply said."""
    if counted is None or said is None:
        return counted or said
    return Usage(
        prompt_tokens=_first(counted.prompt_tokens, said.prompt_tokens),
        cached_tokens=_first(counted.cached_tokens, said.cached_tokens),
        completion_tokens=_first(counted.completion_tokens, said.completion_tokens),
        reasoning_tokens=_first(counted.reasoning_tokens, said.reasoning_tokens),
    )


def _first(*counts: int | None) -> int | None:
    return next((count for count in counts if count is not None), None)


def _object(said: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = said.get(name)
    return value if isinstance(value, dict) else {}


def _count(said: Mapping[str, Any], name: str) -> int | None:
    value = said.get(name)
    return value if type(value) is int and 0 <= value < 1 << 30 else None
